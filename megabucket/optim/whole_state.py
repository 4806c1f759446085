"""Optimizer state by whole parameter: what plain torch holds, and the main values that sharding adds to it.

``adopt`` cuts it into the flat shards of one layout, ``unshard`` puts the shards of another together again. Neither of them
knows which optimizer it is: an entry holds either a value per element or one number per parameter, and which of the two is
decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from megabucket.errors import OptimizerParametersError

KNOWN_NUMBERS: Final = frozenset({"step", "mu_product", "eta", "mu"})  # of all, of NAdam, and two of ASGD
"""Keys of torch's own optimizers that hold a number. In the state of a scalar parameter the two kinds look the same."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeState:
    """What an optimizer holds for whole parameters."""

    values: Mapping[torch.Tensor, Mapping[str, Any]]
    """By parameter and key, as in ``torch.optim.Optimizer.state``; tensors of one value per element have its shape."""
    main_values: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Full-precision values of 16-bit parameters, in their shape; those that a 16-bit value was rounded from."""
    dtypes: Mapping[torch.Tensor, torch.dtype] = field(default_factory=dict)
    """What the optimizer computed in, where it is not the parameter's dtype. State of this dtype follows the main parameter."""
    numbers: frozenset[str] = KNOWN_NUMBERS
    """Keys that are known to hold one number per parameter."""

    def follows_param(self, param: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a value per element has the dtype its optimizer computed in, and not one it chose for itself."""
        return value.dtype == self.dtypes.get(param, param.dtype)


def find_numbers(whole: WholeState, params: Mapping[str, torch.nn.Parameter]) -> frozenset[str]:
    """Return the keys that hold one number per parameter; all others hold a value per element.

    Args:
        params: the parameters whose state is looked at, by name.

    Raises:
        OptimizerParametersError: some state is neither: a table, say, or moments from before the parameter was resized.
    """
    numbers = set(whole.numbers)
    entries = [(name, param, key, value) for name, param in params.items() for key, value in _state_of(whole, param).items()]
    for _, param, key, value in entries:
        if not isinstance(value, torch.Tensor) or (value.numel() == 1 and value.shape != param.shape):
            numbers.add(key)
    misfits = [
        f"{key} of {name}: shape {tuple(value.shape)} for {tuple(param.shape)}"
        for name, param, key, value in entries
        if isinstance(value, torch.Tensor) and (value.numel() != 1 if key in numbers else value.shape != param.shape)
    ]
    if misfits:
        raise OptimizerParametersError(
            problem="the optimizer holds state that is neither one value per element nor one number per parameter, and cannot "
            "be cut into flat shards",
            params=misfits,
            remedy="Use such an optimizer as a plain one with use_distributed_optimizer=False; or, where the parameter was "
            "resized, drop its state (optimizer.state.pop(param)) to start anew.",
        )
    return frozenset(numbers)


def state_of_empty_params(whole: WholeState, members: Sequence[Sequence[torch.Tensor]]) -> dict[torch.Tensor, dict[str, Any]]:
    """Return what plain torch holds for parameters without elements, which lie in no shard: what others have, without values.

    Adagrad of torch 2.11 cannot step without it.

    Args:
        whole: the state of all parameters in shards.
        members: the parameters of each group; the first with state stands for the others.
    """
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for group in members:
        like = next((state for param in group if (state := _state_of(whole, param))), {})
        for param in group:
            if param.numel() == 0 and param.requires_grad and like:
                found[param] = {
                    key: copy.deepcopy(value) if key in whole.numbers else torch.empty_like(param, dtype=value.dtype)
                    for key, value in like.items()
                }
    return found


def _state_of(whole: WholeState, param: torch.Tensor) -> Mapping[str, Any]:
    return whole.values.get(param) or {}
