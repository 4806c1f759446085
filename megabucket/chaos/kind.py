"""``Kind``: one sort of fault, where it can happen, what must come of it, and with which combinations it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megabucket.chaos.cell import Cell, Combo, Mode
from megabucket.chaos.fault import Fault

_BOTH = (True, False)

EVERY = tuple(Combo(mode, overlaps, num_ranks) for mode in Mode for overlaps in _BOTH for num_ranks in (2, 3, 4))
"""All twelve combinations."""

PAIRS = (
    Combo(Mode.ALL_REDUCE, True, 2),
    Combo(Mode.ALL_REDUCE, False, 3),
    Combo(Mode.ALL_REDUCE, True, 4),
    Combo(Mode.REDUCE_SCATTER, True, 3),
    Combo(Mode.REDUCE_SCATTER, False, 2),
    Combo(Mode.REDUCE_SCATTER, False, 4),
)
"""Six combinations in which each mode meets each number of ranks, and each overlap setting."""

FEW = (Combo(Mode.ALL_REDUCE, True, 2), Combo(Mode.ALL_REDUCE, False, 3), Combo(Mode.REDUCE_SCATTER, True, 3))
"""Three combinations, for what hardly depends on them."""

SHARDED = tuple(combo for combo in EVERY if combo.mode is Mode.REDUCE_SCATTER)
"""The combinations with reduce-scatter."""


def runs_with_torch(_: Cell) -> str:
    """Say nothing against running a cell with torch DDP."""
    return ""


def not_in_torch(reason: str) -> Callable[[Cell], str]:
    """Return what says that torch DDP has no such thing."""
    return lambda _: reason


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the matrix."""

    name: str
    says: str
    """What must happen, in one sentence."""
    fault: Callable[[Cell], Fault]
    places: tuple[str, ...] = ("step",)
    combos: tuple[Combo, ...] = EVERY
    torch_skip: Callable[[Cell], str] = runs_with_torch
    """Why a cell is not run with torch DDP; empty when it is."""
    soak_places: tuple[str, ...] = ()
    """The places that may happen again and again in one set of ranks."""

    def cells(self) -> list[Cell]:
        """Return the cells of the kind, with seed 0 and megabucket."""
        return [Cell(self.name, place, combo) for place in self.places for combo in self.combos]
