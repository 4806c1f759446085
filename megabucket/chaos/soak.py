"""Judges a soak while it runs: every step of every rank, with as little kept as possible."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megabucket.chaos.cell import Cell
from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.farm import run_soaks
from megabucket.chaos.judge import Window, judge_steps
from megabucket.chaos.kinds import kind_named
from megabucket.chaos.soak_plan import SoakPlan
from megabucket.chaos.verdict import FAILING, VerdictName, unless_vacuous

_SECONDS_PER_STEP: Final = 0.5
_SECONDS_TO_START: Final = 60.0
_PROBLEMS_KEPT: Final = 20


@dataclass(slots=True)
class SoakResult:
    """What became of the steps of a soak.

    Attributes:
        counts: verdicts by ``kind/place``.
        problems: the first failing steps, in words.
        num_judged: steps that all ranks have reported.
        slowest_s: longest time from a fault to the last rank's report.
    """

    plan: SoakPlan
    counts: dict[str, Counter[VerdictName]] = field(default_factory=lambda: defaultdict(Counter))
    problems: list[str] = field(default_factory=list)
    num_judged: int = 0
    slowest_s: float = 0.0
    wall_s: float = 0.0

    def total(self, *names: VerdictName) -> int:
        """Return how many steps got one of these verdicts."""
        return sum(count[name] for count in self.counts.values() for name in names)

    @property
    def num_faults(self) -> int:
        """How many judged steps had a fault."""
        return sum(sum(count.values()) for kind, count in self.counts.items() if not kind.startswith("none/"))

    @property
    def has_failed(self) -> bool:
        """Whether any step got a verdict it must not get, or is missing."""
        return self.total(*FAILING) > 0 or self.num_judged < self.plan.num_steps or bool(self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "soak": self.plan.to_dict(),
            "num_judged": self.num_judged,
            "num_faults": self.num_faults,
            "silent": self.total(VerdictName.SILENT),
            "hung": self.total(VerdictName.HUNG),
            "wrong": self.total(VerdictName.WRONG),
            "counts": {
                kind: {name.value: count for name, count in verdicts.items()} for kind, verdicts in sorted(self.counts.items())
            },
            "slowest_s": round(self.slowest_s, 4),
            "wall_s": round(self.wall_s, 1),
            "problems": self.problems,
        }


class SoakJudge:
    """Receives the reports of all ranks and judges a step as soon as it is complete."""

    def __init__(self, plan: SoakPlan) -> None:
        self.result = SoakResult(plan)
        self._cells = plan.cells()
        self._next_step = 0
        self._num_agreements = 0
        self._waiting: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        self._loose: dict[int, list[Mapping[str, Any]]] = defaultdict(list)

    def receive(self, event: Mapping[str, Any]) -> None:
        """Take one report."""
        kind, rank = event["kind"], event["rank"]
        if kind == "broken":
            self._note(f"rank {rank}: {event['text']}")
        elif kind in ("step", "weights", "no weights"):
            step = event["attempt"]
            # What a rank said since the step before belongs to this one: when the fault happened, what a thread said.
            self._waiting[step] += [*self._loose.pop(rank, ()), event]
            self._judge_what_is_complete()
        elif event.get("phase") != "wrap" and kind in ("fault", "child"):
            self._loose[rank].append(event)

    def _judge_what_is_complete(self) -> None:
        num_ranks = self.result.plan.combo.num_ranks
        while True:
            events = self._waiting[self._next_step]
            if sum("attempt" in event for event in events) < 2 * num_ranks:
                return
            self._judge(next(self._cells), self._waiting.pop(self._next_step))
            self._next_step += 1

    def _judge(self, cell: Cell, events: list[Mapping[str, Any]]) -> None:
        step, result = self._next_step, self.result
        run = CellRun(cell=cell, events=events, exits={}, killed=(), timed_out=False, logs={}, wall_s=0.0)
        fault = kind_named(cell.kind).fault(cell)
        window = Window(fault=step, stop=step + 1, num_agreements=self._num_agreements)
        verdict = unless_vacuous(run, judge_steps(run, fault.expect(), window))
        self._num_agreements += fault.num_agreements()
        result.num_judged += 1
        result.counts[f"{cell.kind}/{cell.place}"][verdict.name] += 1
        result.slowest_s = max(result.slowest_s, verdict.detected_s or 0.0)
        if verdict.name in FAILING:
            self._note(f"step {step}, {cell.name}, rank {cell.culprit}: {verdict.name.value}: {verdict.reason[:500]}")

    def _note(self, problem: str) -> None:
        if len(self.result.problems) < _PROBLEMS_KEPT:
            self.result.problems.append(problem)

    def finish(self, run: CellRun) -> SoakResult:
        """Note how the processes ended, and return the result."""
        self.result.wall_s = run.wall_s
        if run.timed_out:
            self.result.counts["the whole soak"][VerdictName.HUNG] += 1
            self._note(f"the soak hung in step {self._next_step}: {dict(run.logs)}"[:4_000])
        if any(run.exits.values()):
            self._note(f"ranks ended with {dict(run.exits)}: {dict(run.logs)}"[:4_000])
        return self.result


def run_random_steps(plans: Sequence[SoakPlan]) -> Iterator[SoakResult]:
    """Run soaks one after the other, each under a time limit, and yield their results."""
    judges = [SoakJudge(plan) for plan in plans]
    limits_s = [_SECONDS_TO_START + _SECONDS_PER_STEP * plan.num_steps for plan in plans]
    runs = run_soaks([(plan, judge.receive) for plan, judge in zip(plans, judges, strict=True)], time_limits_s=limits_s)
    for judge, run in zip(judges, runs, strict=True):
        yield judge.finish(run)
