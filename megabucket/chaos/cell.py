"""``Cell``: one combination to run, as data that travels to the processes that run it."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Mode(str, enum.Enum):
    """Who owns the optimizer state."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"


class SystemName(str, enum.Enum):
    """Which data-parallel library the ranks train with."""

    MEGABUCKET = "megabucket"
    TORCH_DDP = "torch-ddp"


@dataclass(frozen=True, slots=True)
class Combo:
    """How the ranks of a cell are set up."""

    mode: Mode
    overlaps: bool
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of fault at a place, on ranks that are set up in one way."""

    kind: str
    place: str
    combo: Combo
    seed: int = 0
    system: SystemName = SystemName.MEGABUCKET
    at_rank: int = -1
    """The rank at fault; -1 leaves that to the rule of ``culprit``."""

    @property
    def culprit(self) -> int:
        """The rank at fault: the first one or the last one, so that both are tried."""
        if self.at_rank >= 0:
            return self.at_rank
        return self.combo.num_ranks - 1 if self.combo.overlaps else 0

    @property
    def name(self) -> str:
        """Kind, place and combination as one word.

        >>> Cell("nan", "bucket-1", Combo(Mode.ALL_REDUCE, True, 2)).name
        'nan/bucket-1/all-reduce/overlap/2'
        """
        overlap = "overlap" if self.combo.overlaps else "no-overlap"
        return f"{self.kind}/{self.place}/{self.combo.mode.value}/{overlap}/{self.combo.num_ranks}"

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cell:
        """Return the cell that ``to_dict`` has written."""
        combo = data["combo"]
        return Cell(
            kind=data["kind"],
            place=data["place"],
            combo=Combo(Mode(combo["mode"]), combo["overlaps"], combo["num_ranks"]),
            seed=data["seed"],
            system=SystemName(data["system"]),
            at_rank=data["at_rank"],
        )
