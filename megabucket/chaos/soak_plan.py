"""The plan of a soak: thousands of steps in one set of ranks, with a random fault in about half of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from megabucket.chaos.cell import Cell, Combo, Mode
from megabucket.chaos.kinds import KINDS

_FAULT_SHARE: Final = 0.5
_ALL_REDUCE_ONLY: Final = frozenset({"two-backwards"})
"""Left out with reduce-scatter: refused as late the first time, after which the wrapper sends later and they are right."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Which faults happen in which steps: a function of the seed, so every rank and the judge know it."""

    num_steps: int
    seed: int
    combo: Combo

    def cells(self) -> Iterator[Cell]:
        """Yield the fault of each step; kind ``none`` where there is none."""
        # The same numbers on every rank; nothing here is a secret.
        source = random.Random(self.seed)  # noqa: S311
        choices = [
            Cell(kind.name, place, self.combo)
            for kind in KINDS
            for place in kind.soak_places
            if kind.name != "none" and (self.combo.mode is Mode.ALL_REDUCE or kind.name not in _ALL_REDUCE_ONLY)
        ]
        healthy = Cell("none", "step", self.combo)
        for _ in range(self.num_steps):
            is_faulty = source.random() < _FAULT_SHARE
            cell = source.choice(choices) if is_faulty else healthy
            yield replace(cell, seed=self.seed, at_rank=source.randrange(self.combo.num_ranks))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SoakPlan:
        """Return the plan that ``to_dict`` has written."""
        combo = data["combo"]
        return SoakPlan(data["num_steps"], data["seed"], Combo(Mode(combo["mode"]), combo["overlaps"], combo["num_ranks"]))
