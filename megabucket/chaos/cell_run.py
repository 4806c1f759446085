"""``CellRun``: everything that was seen of one cell, as data for the judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megabucket.chaos.cell import Cell


@dataclass(frozen=True, slots=True)
class CellRun:
    """What the ranks of a cell reported, and how their processes ended.

    Attributes:
        events: reports in order of arrival; each has ``kind`` and ``rank``.
        exits: by rank as text, the exit code of the process, negative for a signal.
        killed: ranks that the supervisor had to kill.
        timed_out: whether the time limit was reached.
        logs: by rank as text, the end of what the process printed.
        wall_s: seconds from the first fork to the last exit.
        num_tries: how often the group had to be formed; gloo's rendezvous fails now and then on a busy machine.
    """

    cell: Cell
    events: Sequence[Mapping[str, Any]]
    exits: Mapping[str, int]
    killed: Sequence[int]
    timed_out: bool
    logs: Mapping[str, str]
    wall_s: float
    num_tries: int = 1

    @property
    def has_started(self) -> bool:
        """Whether every rank has joined the group, so that what happened says something about the cell."""
        return len({event["rank"] for event in self.of("joined")}) == self.cell.combo.num_ranks

    def of(self, kind: str, *, rank: int | None = None, attempt: int | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield the reports of a kind, of one rank or of all, about one step or all."""
        for event in self.events:
            if (
                event["kind"] == kind
                and (rank is None or event["rank"] == rank)
                and (attempt is None or event.get("attempt") == attempt)
            ):
                yield event

    def first(self, kind: str, *, rank: int | None = None, attempt: int | None = None) -> Mapping[str, Any] | None:
        """Return the first such report, if there is one."""
        return next(self.of(kind, rank=rank, attempt=attempt), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> CellRun:
        """Return the run that ``to_dict`` has written."""
        return CellRun(**{**data, "cell": Cell.from_dict(data["cell"])})
