"""State that an optimizer holds for whole parameters, cut into the flat shards that take their place.

Some optimizers make their state when they are built (Adagrad), one may have stepped or been loaded from a checkpoint of plain
torch before it is wrapped, and a rebuild makes other shards of the same parameters. In all cases the state moves along: values
per element are cut like the parameters, numbers (step counts) belong to all parameters of a shard. Parameters whose numbers or
keys differ therefore do not share one, see ``StateCutter.signature``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megabucket.buffer.views import dense_strides, dtype_name
from megabucket.optim.shards import MainShard
from megabucket.optim.whole_state import WholeState, find_numbers

ShardState = dict[str, Any]
"""What an optimizer holds for one shard, by key."""


class StateCutter:
    """Cuts the state of whole parameters into shards.

    Args:
        whole: the state; parameters without any are stepped on for the first time.
        params: the parameters in the buffers, by name.

    Raises:
        OptimizerParametersError: some state belongs neither to elements nor to parameters.
    """

    def __init__(self, whole: WholeState, params: Mapping[str, torch.nn.Parameter]) -> None:
        self._whole = whole
        self._params = params
        self.numbers = find_numbers(whole, params)
        """The keys that hold one number per parameter."""

    def signature(self, name: str) -> tuple[str, ...]:
        """Return, in words, what parameters that share a shard have in common; empty without state.

        The keys, the values of numbers, and the dtype of values per element where the optimizer has chosen it.
        """
        param = self._params[name]
        return tuple(sorted(self._describe(param, key, value) for key, value in self._state_of(name).items()))

    def _describe(self, param: torch.nn.Parameter, key: str, value: Any) -> str:
        if key not in self.numbers:
            return f"{key} per element" if self._whole.follows_param(param, value) else f"{key} in {dtype_name(value.dtype)}"
        if isinstance(value, torch.Tensor):
            return f"{key}={value.item()!r} ({dtype_name(value.dtype)}, {tuple(value.shape)}, {value.device.type})"
        return f"{key}={value!r}"

    def _state_of(self, name: str) -> Mapping[str, Any]:
        return self._whole.values.get(self._params[name]) or {}

    @torch.no_grad()
    def state_of(self, shard: MainShard) -> ShardState:
        """Return the state of one shard, whose parameters have the same signature; empty when they have none."""
        state = self._state_of(shard.run.params[0])
        return {key: self._number(value) if key in self.numbers else self._cut(shard, key) for key, value in state.items()}

    @staticmethod
    def _number(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _cut(self, shard: MainShard, key: str) -> torch.Tensor:
        """Return the pieces of values per element in the shard's order; gaps between parameters are zero, as theirs are."""
        first = self._state_of(shard.run.params[0])[key]
        follows = self._whole.follows_param(self._params[shard.run.params[0]], first)
        flat = torch.zeros_like(shard.main, dtype=shard.main.dtype if follows else first.dtype)
        for piece in shard.pieces():
            values = in_memory_order(self._state_of(piece.param)[key], self._params[piece.param], flat)
            flat[slice(*piece.in_run)] = values[slice(*piece.in_param)]
        return flat

    @torch.no_grad()
    def restore_main_values(self, shard: MainShard) -> None:
        """Give a shard back the main values its parameters had, where they still round to the parameters."""
        for piece in shard.pieces() if shard.has_own_values else ():
            param = self._params[piece.param]
            earlier = self._whole.main_values.get(param)
            if earlier is not None and earlier.shape == param.shape:
                shard.restore_values(in_memory_order(earlier, param, shard.main)[slice(*piece.in_param)], piece.in_run)


def in_memory_order(values: torch.Tensor, param: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values per element in one dimension, in the order in which a parameter's elements lie in the buffer.

    Its memory order, which for channels-last is not the order of its indices.

    Args:
        like: has the dtype and the device of the result.
    """
    ordered = torch.empty_strided(param.shape, dense_strides(param), dtype=like.dtype, device=like.device)
    return ordered.copy_(values).as_strided((param.numel(),), (1,))
