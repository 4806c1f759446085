"""State that an optimizer holds for whole parameters, cut into the flat shards that take their place.

Some optimizers make their state when they are built (Adagrad), and one may have stepped or been loaded from a checkpoint of
plain torch before it is wrapped. Either way the state moves along: per-element tensors are cut like the parameters, anything
else (step counts) must be the same for all parameters that share a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from megabucket.buffer.views import dense_strides
from megabucket.errors import OptimizerParametersError
from megabucket.layout import BufferLayout
from megabucket.optim.shards import MainShard

_NUMBERS_PER_PARAMETER: Final = frozenset({"step", "mu_product", "eta", "mu"})  # of all, of NAdam, and two of ASGD


@torch.no_grad()
def adopt_state(
    shard: MainShard,
    layout: BufferLayout,
    params: Mapping[str, torch.nn.Parameter],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> dict[str, Any]:
    """Return the state of one shard, from the states of the parameters it holds pieces of; empty when they have none.

    Args:
        layout: of the buffer the shard lies in.
        params: the parameters by name.
        state: the optimizer's state by parameter.

    Raises:
        OptimizerParametersError: the parameters' states do not fit into one shard.
    """
    names = shard.run.params
    states = [state.get(params[name]) or {} for name in names]
    if any(one.keys() != states[0].keys() for one in states):
        raise _does_not_fit("state for some parameters of a group and not for others", names)
    adopted: dict[str, Any] = {}
    for key in states[0]:
        values = [one[key] for one in states]
        if all(_is_per_element(key, value, params[name]) for value, name in zip(values, names, strict=True)):
            adopted[key] = _cut(shard, layout, dict(zip(names, values, strict=True)), params)
        elif all(_equal(value, values[0]) for value in values):
            adopted[key] = values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
        else:
            raise _does_not_fit(f"different values of {key!r} for parameters of one group", names)
    return adopted


def _is_per_element(key: str, value: object, param: torch.nn.Parameter) -> bool:
    # A number per parameter and the state of a scalar parameter look the same, so the former are known by name.
    return isinstance(value, torch.Tensor) and value.shape == param.shape and key not in _NUMBERS_PER_PARAMETER


def _equal(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return value == other


def _cut(
    shard: MainShard,
    layout: BufferLayout,
    values: Mapping[str, torch.Tensor],
    params: Mapping[str, torch.nn.Parameter],
) -> torch.Tensor:
    """Return the pieces of per-element state in the shard's order; gaps between parameters are zero, as their values are."""
    flat = torch.zeros_like(shard.main)
    for name, value in values.items():
        param, slot, span = params[name], layout.params[name], shard.run.span
        # In the buffer a parameter lies in its memory order, which for channels-last is not the order of its indices.
        in_memory_order = torch.empty_strided(param.shape, dense_strides(param), dtype=flat.dtype, device=flat.device)
        whole = in_memory_order.copy_(value).as_strided((param.numel(),), (1,))
        start, stop = max(slot.start, span.start), min(slot.stop, span.stop)
        flat[start - span.start : stop - span.start] = whole[start - slot.start : stop - slot.start]
    return flat


def _does_not_fit(problem: str, names: Sequence[str]) -> OptimizerParametersError:
    return OptimizerParametersError(
        problem=f"the optimizer holds {problem}, which cannot share a flat shard",
        params=names,
        remedy="Wrap the optimizer before its first step, or put the parameters that differ into groups of their own.",
    )
