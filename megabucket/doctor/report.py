"""Facts of one rank, the answer that all ranks' facts give, and the report."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from megabucket.comm.hosts import HostMap
from megabucket.errors import rank_list, values_by_rank
from megabucket.units import format_seconds

SCHEMA_VERSION: Final = 1
"""Version of the JSON form; raised when a key changes its meaning."""


class Status(str, enum.Enum):
    """What an answer means for training. From good to bad."""

    HOLDS = "holds"  # as the library needs it
    NOTE = "note"  # unexpected, but the library copes or does not use it
    FINDING = "finding"  # something the library relies on does not hold


@dataclass(frozen=True, slots=True)
class Fact:
    """What one rank reports about one question. Travels as JSON."""

    answer: str
    status: Status = Status.HOLDS
    ranks: tuple[int, ...] = ()
    """Ranks at fault, if known."""
    same: str = ""
    """A finding if ranks differ in it."""
    alike: str = ""
    """A note if ranks differ in it."""


class Question(NamedTuple):
    """One question. ``ask`` takes a bench and returns what this rank sees."""

    text: str
    ask: Callable[[Any], Fact]
    meaning: str
    """What depends on the answer."""
    is_required: bool = True
    """Whether a refusal is a finding; otherwise it is a note."""
    advice: str = ""
    """What to do about a finding."""


@dataclass(frozen=True, slots=True)
class Line:
    """One question, its answer, and what depends on it."""

    question: str
    status: Status
    answer: str
    meaning: str
    ranks: tuple[int, ...] = ()
    """Ranks at fault, or else ranks that differ from the others; empty if it concerns all ranks or none."""
    hosts: str = ""
    """Those of the ranks, if all ranks are on several hosts."""
    advice: str = ""
    """What to do about a finding; empty for other answers, and where nothing helps in general."""


def line_of(question: Question, facts: Sequence[Fact], hosts: HostMap = HostMap()) -> Line:  # noqa: B008 - frozen
    """Return the answer to a question, given the facts of all ranks in rank order: the worst status counts."""
    status = max((Status(fact.status) for fact in facts), key=list(Status).index)
    odd, unlike = _odd_ones_out([fact.same for fact in facts]), _odd_ones_out([fact.alike for fact in facts])
    ranks = {rank for fact in facts for rank in fact.ranks}
    ranks = ranks or {rank for rank, fact in enumerate(facts) if fact.status == status}
    if len(ranks) == len(facts):
        ranks = odd or unlike
    if odd:
        status = Status.FINDING
    elif unlike and status is Status.HOLDS:
        status = Status.NOTE
    answers = [fact.answer for fact in facts]
    answer = answers[0]
    if len(set(answers)) > 1:
        answer = hosts.by_host(answers) if hosts.is_several else values_by_rank(answers)
    at_fault = tuple(sorted(ranks))
    advice = question.advice if status is Status.FINDING else ""
    return Line(question.text, status, answer, question.meaning, at_fault, hosts.names_of(at_fault), advice)


def _odd_ones_out(values: Sequence[str]) -> set[int]:
    """Return the ranks whose value is not the most frequent one; of equally frequent ones the first rank's counts."""
    usual = max(dict.fromkeys(values), key=list(values).count)
    return {rank for rank, value in enumerate(values) if value != usual}


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All answers, the same on every rank."""

    backend: str
    """``gloo``, ``nccl``, the class of a communicator, or ``none`` for one process on its own."""
    device: str
    num_ranks: int
    lines: tuple[Line, ...]
    wall_s: float
    """Seconds this rank took."""
    hosts: tuple[str, ...] = ()
    """Of each rank, if they are on several."""

    @property
    def findings(self) -> tuple[Line, ...]:
        """The lines on which something the library relies on does not hold."""
        return tuple(line for line in self.lines if line.status is Status.FINDING)

    @property
    def is_healthy(self) -> bool:
        """Whether everything the library relies on holds."""
        return not self.findings

    @property
    def outcome(self) -> str:
        """One sentence about all answers."""
        counts = Counter(line.status for line in self.lines)
        asked = f"{len(self.lines)} question{'s'[: len(self.lines) != 1]} in {format_seconds(self.wall_s)}"
        if self.is_healthy:
            return f"everything that megabucket relies on holds ({asked}; notes: {counts[Status.NOTE]})"
        found = counts[Status.FINDING]
        ranks = sorted({rank for line in self.findings for rank in line.ranks})
        about = f" about {rank_list(ranks)}" if ranks else ""
        if ranks and self.hosts:
            about += f" on {HostMap(self.hosts).names_of(ranks)}"
        return f"{found} finding{'' if found == 1 else 's'}{about}: do not train before it is cleared up ({asked})"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        lines = [{**asdict(line), "status": line.status.value, "ranks": list(line.ranks)} for line in self.lines]
        return {
            "schema": SCHEMA_VERSION,
            "is_healthy": self.is_healthy,
            **asdict(self),
            "hosts": list(self.hosts),
            "lines": lines,
        }
