"""From Megatron-Core: the state of its ``DistributedOptimizer`` in bucket space (``dp_zero_gather_scatter``), by name.

No file is read here. The caller reads it; only tensors and numbers of the result are used.

Per buffer and kind of value there is one flat float32 tensor: the buckets of the buffer one after the other, without their
padded tails. Gaps between parameters are there, and are zero::

    layout  |  head  gap  norm  | tail |  block  | tail |    a buffer of two buckets
    state   |  head  gap  norm  |  block  |

The state does not say which parameter lies where. The layout does, and is checked as far as the state allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import whole_piece
from megabucket.checkpoint.capture import Prefix, optimizer_values, state_name, values_of_state
from megabucket.checkpoint.format import Snapshot
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.errors import CheckpointMismatchError, name_list
from megabucket.layout import BufferLayout, ModelLayout
from megabucket.layout.identity import canonical_name
from megabucket.optim.state_dict import StateEntry, describe_number

_SOURCE: Final = "the state of Megatron's DistributedOptimizer"
_PARAM: Final = "param"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DpZeroState:
    """The optimizer state that one rank of Megatron's model-parallel group saved, and the layout that explains it.

    Args:
        param_state: the result of ``get_parameter_state_dp_zero()``, or the list of those of dense parameters and of experts.
        layout: of Megatron's buffers: ``layout="megatron"``, its bucket settings, its data-parallel size. The buffers of
            several model chunks follow each other.
        step: how often the optimizer has stepped: ``"step"`` of the groups in Megatron's ``optimizer.state_dict()``.
        weights: tensors that an optimizer's state does not hold: frozen parameters and module buffers. Trained weights may be
            left out; given ones are compared with their main parameters, which also proves the layout.
    """

    param_state: Any
    layout: ModelLayout
    step: float
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def params(self) -> list[str]:
        """The parameters in the order of their registration."""
        slots = [(slot.registration_index, name) for buffer in self.layout.buffers for name, slot in buffer.params.items()]
        return [canonical_name(name) for _, name in sorted(slots)]

    def values(self) -> Iterator[tuple[str, torch.dtype, dict[str, torch.Tensor]]]:
        """Return each parameter with its dtype, its main parameter and its moments, in its shape: views of the state.

        Raises:
            CheckpointMismatchError: state and layout differ.
        """
        states = list(self.param_state) if isinstance(self.param_state, list | tuple) else [self.param_state]
        if not all(isinstance(state, Mapping) and state.get("buckets_coalesced") is True for state in states):
            _refuse(
                "it is not the result of get_parameter_state_dp_zero(): a dict with 'buckets_coalesced', as it is since 2024, "
                "or a list of such dicts"
            )
        held = [state[index] for state in states for index in sorted(key for key in state if type(key) is int)]
        # Experts have an optimizer of their own, after that of the dense parameters.
        buffers = sorted(self.layout.buffers, key=lambda buffer: buffer.key.group != "dense")
        if len(held) != len(buffers):
            keys = ", ".join(str(buffer.key) for buffer in buffers)
            _refuse(f"it has {len(held)} buffers, and the layout has {len(buffers)}: {keys}")
        for of_buffer, buffer in zip(held, buffers, strict=True):
            flats = _checked(of_buffer, buffer)
            for name, start in _places(buffer):
                slot = buffer.params[name]
                of_param = {key: flat[start : start + slot.numel].view(slot.shape) for key, flat in flats.items()}
                yield canonical_name(name), dtype_named(buffer.key.param_dtype), of_param


def _checked(held: Any, buffer: BufferLayout) -> dict[str, torch.Tensor]:
    """Return the flat tensors of a buffer."""
    wanted = (dtype_named(buffer.key.param_dtype), dtype_named(buffer.key.grad_dtype))
    if not isinstance(held, Mapping) or list(held) != [wanted] or not isinstance(held[wanted], Mapping):
        _refuse(
            f"{buffer.key}: the state is {held!r:.100}, and not one dict for {wanted}, the dtypes of parameters and gradients"
        )
    numels = [bucket.numel_unpadded for bucket in buffer.buckets]
    numel = sum(numels)
    flats = {key: held[wanted].get(key) for key in (_PARAM, *_MOMENTS)}
    for key, values in flats.items():
        if not isinstance(values, torch.Tensor) or (values.dtype, values.shape) != (torch.float32, (numel,)):
            _refuse(
                f"{buffer.key}: {key!r} is {_form(values)}, and the layout has a flat float32 tensor of {numel} elements, in "
                f"buckets of {', '.join(map(str, numels[:5]))}{', ...' if len(numels) > 5 else ''}"
            )
        stop = 0
        for name, start in _places(buffer):
            if values[stop:start].any():
                _refuse(f"{buffer.key}: {key!r} is not zero in {stop}:{start}, where the layout has no parameter")
            stop = start + buffer.params[name].numel
    return flats


def _places(buffer: BufferLayout) -> Iterator[tuple[str, int]]:
    """Return the parameters of a buffer and where in the state they begin, in this order."""
    offset = 0
    for bucket in buffer.buckets:
        for name in bucket.params:
            yield name, offset + buffer.params[name].start - bucket.start
        offset += bucket.numel_unpadded


def import_dp_zero(
    found: DpZeroState,
    root: Path | str,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    optimizer_class: str = "AdamW",
    settings: SaveSettings | None = None,
) -> Path:
    """Write the state as a checkpoint, and return its directory. Needs neither a model nor other ranks.

    ``load_checkpoint`` takes it into a run of any number of ranks and any buckets; with ``optimizer=None`` the weights alone.

    Args:
        groups: as a torch optimizer takes them, with names under ``"params"``; the run that loads the checkpoint keeps its
            hyperparameters that they do not give, except that ``amsgrad`` is off. Left out: one group of all parameters.
        optimizer_class: that of the run: ``AdamW`` or ``Adam``, as Megatron's ``decoupled_weight_decay`` was set or not.

    Raises:
        CheckpointMismatchError: state, layout and groups do not fit.
        CheckpointNotSavedError: the checkpoint cannot be written.
    """
    if type(found.step) not in (int, float) or not 0 <= found.step == found.step // 1:
        _refuse(f"the step is {found.step!r}, and must be a whole number of 0 or more")
    if twice := [name for name, count in Counter(found.params).items() if count > 1]:
        _refuse(f"the layout has several parameters of one name: {name_list(twice)}")
    if no_tensors := [name for name, weight in found.weights.items() if not isinstance(weight, torch.Tensor)]:
        _refuse(f"of the weights, {name_list(no_tensors)} are no tensors; leave them out")
    weights = {canonical_name(name): weight for name, weight in found.weights.items()}
    given = [{"params": found.params}] if groups is None else groups
    # Without a third moment in its state, an optimizer with amsgrad could not step.
    named = [([canonical_name(name) for name in group["params"]], {"amsgrad": False, **group}) for group in given]
    _check_groups([name for names, _ in named for name in names], found.params, weights)
    tensors = {f"{Prefix.MODEL}{name}": weight for name, weight in weights.items()}
    for name, dtype, values in found.values():
        weight = values[_PARAM].to(dtype)
        if name in weights:
            _check_weight(name, weights[name], weight)
        tensors[f"{Prefix.MODEL}{name}"] = weight
        tensors |= {state_name(name, key): values[key] for key in _MOMENTS}
        tensors |= {f"{Prefix.MAIN}{name}": values[_PARAM]} if dtype != torch.float32 else {}
    count = describe_number("step", torch.tensor(float(found.step), dtype=torch.float32, device="cpu"), torch.device("cpu"))
    description = (count, *(StateEntry(key, "elements", "float32") for key in _MOMENTS))
    described, computed_in = dict.fromkeys(found.params, description), dict.fromkeys(found.params, "float32")
    optimizer = optimizer_values(optimizer_class, named, described, computed_in, tensors.__setitem__)
    pieces = [whole_piece(name, tensor) for name, tensor in sorted(tensors.items())]
    return save_snapshot(root, int(found.step), Snapshot(pieces, values_of_state(optimizer)), AloneRanks(), settings)


def _refuse(problem: str) -> NoReturn:
    raise CheckpointMismatchError(path=_SOURCE, problems=[problem])


def _form(value: object) -> str:
    return f"{dtype_name(value.dtype)} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_groups(grouped: Sequence[str], params: Sequence[str], weights: Mapping[str, torch.Tensor]) -> None:
    here = Counter(name for name in grouped if name in params or name not in weights)
    if missing := list(Counter(params) - here):
        _refuse(f"the layout has {name_list(missing)}, and no group of the optimizer has")
    if surplus := list(here - Counter(params)):
        _refuse(f"the groups of the optimizer have {name_list(surplus)} twice, or the layout has not")


def _check_weight(name: str, given: torch.Tensor, weight: torch.Tensor) -> None:
    if (given.dtype, given.shape) != (weight.dtype, weight.shape):
        _refuse(f"the weight {name!r} is {_form(given)}, and {_form(weight)} in the layout")
    if not torch.equal(given.detach().cpu(), weight):
        _refuse(
            f"the weight {name!r} is not the rounded main parameter: one of the two is of another step, or the layout is "
            "another. If you are sure of the layout, leave the weight out; the rounded main parameter takes its place"
        )
