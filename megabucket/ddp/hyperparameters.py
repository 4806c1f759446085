"""The numbers by which an optimizer updates, as plain values that ranks can compare.

Every rank of data parallelism updates by the same numbers; which they are is nobody's business here. Read in every step, so
nothing looks at parameters or waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

import torch

Hyperparameters = tuple[tuple[str, Any], ...]
"""Names and values. A value is a float, a tuple of values, or the text of an integer that no float can hold."""

# How the same update is computed, and where a scheduler has started from.
_NOT_COMPARED: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


def read_hyperparameters(groups: Iterable[Mapping[str, Any]], *, waits: bool = False) -> Hyperparameters:
    """Return all numbers of an optimizer's groups: learning rates, betas, what else there is.

    Args:
        waits: whether to wait for numbers that are on a device. They are left out otherwise.

    >>> read_hyperparameters([{"params": [], "lr": 1, "betas": (0.5, 1), "foreach": True}, {"lr": 0.25}])
    (('betas of group 0', (0.5, 1.0)), ('lr of group 0', 1.0), ('lr of group 1', 0.25))
    """
    numbers = []
    for index, group in enumerate(groups):
        for key in sorted(group):  # a group that comes from a checkpoint has its keys in another order
            if key not in _NOT_COMPARED:
                value = number_of(group[key], waits=waits)
                if value is not None:
                    numbers.append((f"{key} of group {index}", value))
    return tuple(numbers)


def number_of(value: Any, *, waits: bool = False) -> Any:
    """Return a number as a float, several as a tuple, and ``None`` for everything else."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return float(value) if abs(value) <= 1 << 53 else str(value)
    if isinstance(value, tuple | list):
        return tuple([number_of(part, waits=waits) for part in value])
    if isinstance(value, torch.Tensor):
        can_read = value.numel() == 1 and not value.is_complex() and (waits or value.device.type == "cpu")
        return float(value) if can_read else None
    return float(value) if isinstance(value, Real) else None


def texts_of(updates: Sequence[Hyperparameters]) -> tuple[str, ...]:
    """Return the numbers of one or several updates as ``name=value``, to be told to other ranks.

    >>> texts_of([(("lr of group 0", 0.5),)])
    ('lr of group 0=0.5',)
    >>> texts_of([(("lr of group 0", 0.5),), (("lr of group 0", 1.0),)])
    ('lr of group 0 in update 0=0.5', 'lr of group 0 in update 1=1.0')
    """
    return tuple(
        f"{name}{f' in update {index}' if len(updates) > 1 else ''}={value}"
        for index, update in enumerate(updates)
        for name, value in update
    )
