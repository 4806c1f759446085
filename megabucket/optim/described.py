"""What an optimizer holds for a shard, in words that compare and travel: between ranks, and into a checkpoint.

An entry holds either a value per element, of which only the dtype is told, or one number, which is told in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from megabucket.buffer.views import dtype_name, dtype_named
from megabucket.errors import OptimizerParametersError
from megabucket.optim.shards import MainShard
from megabucket.optim.whole_state import KNOWN_NUMBERS

_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "NoneType": lambda _: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,  # reads back every bit that repr wrote
    "str": str,
}

NUMBER_TYPES: Final = frozenset(_READERS)
"""Types of numbers that are no tensors."""


class StateEntry(NamedTuple):
    """What shards hold under one key, in words that compare and travel."""

    key: str
    kind: str  # "elements", "number" or "tensor" (of one number)
    dtype: str = ""
    device: str = ""
    shape: tuple[int, ...] = ()
    number: tuple[str, str] = ("", "")  # type and text


Description = tuple[StateEntry, ...]
"""Of the state of one parameter, in the order of its keys."""


def describe_state(values: Mapping[str, Any], shard: MainShard) -> Description:
    """Return what an optimizer holds for one shard.

    Raises:
        OptimizerParametersError: some of it is neither one value per element nor one number.
    """
    return tuple(_describe_entry(key, value, shard) for key, value in values.items())


def _describe_entry(key: str, value: Any, shard: MainShard) -> StateEntry:
    if isinstance(value, torch.Tensor) and value.shape == shard.main.shape and key not in KNOWN_NUMBERS:
        return StateEntry(key, "elements", dtype_name(value.dtype))
    if type(value).__name__ in _READERS or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return describe_number(key, value, shard.main.device)
    found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise OptimizerParametersError(
        problem="the optimizer holds, for a flat shard, what is neither one value per element nor one number, so nobody can "
        "say what of it belongs to which parameter",
        params=[f"{key}: {found}"],
        remedy="Use such an optimizer as a plain one with use_distributed_optimizer=False.",
    )


def describe_number(key: str, value: Any, device: torch.device) -> StateEntry:
    """Return a number, or a tensor of one, in words.

    Args:
        device: where the parameters are. A number that lives there does so on every rank; one on the CPU stays on the CPU.
    """
    if not isinstance(value, torch.Tensor):
        return StateEntry(key, "number", number=_written(value))
    where = "" if value.device == device else value.device.type
    return StateEntry(key, "tensor", dtype_name(value.dtype), where, tuple(value.shape), _written(value.item()))


def entry_from_json(fields: Any) -> StateEntry:
    """Return an entry that has become a list on its way through JSON."""
    key, kind, dtype, device, shape, (number_type, text) = fields
    return StateEntry(key, kind, dtype, device, tuple(shape), (number_type, text))


def _written(number: Any) -> tuple[str, str]:
    return type(number).__name__, str(number)


def number_in(entry: StateEntry, device: torch.device) -> Any:
    """Return the number that an entry tells, as the optimizer has held it.

    Args:
        device: where the parameters are.
    """
    kind, text = entry.number
    number = _READERS[kind](text)
    if entry.kind == "number":
        return number
    own_device = torch.device(entry.device) if entry.device else device
    return torch.full(entry.shape, number, dtype=dtype_named(entry.dtype), device=own_device)
