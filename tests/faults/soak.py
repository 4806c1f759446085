"""The soak: thousands of steps with random faults in the same ranks, world after world, each a function of its seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .cells import FORMS, Cell, Combo, Form, Mode, Recovery
from .judge import Name, Run, judge
from .kinds import KINDS, fault_of
from .loopback import run_in_threads
from .player import Play

EPISODES = 40
"""Of a world."""
_HEALTHY_SHARE = 0.3
_FORM_SHARE = 0.3
"""Of worlds whose program has a form of its own."""
_OWNER_SHARE = 0.2
"""Of sharded worlds whose weights have owners."""


@dataclass
class SoakResult:
    """What became of the steps of a soak."""

    seed: int
    num_steps: int = 0
    counts: Counter[tuple[str, Name]] = field(default_factory=Counter)
    """By kind and verdict."""
    failures: list[str] = field(default_factory=list)

    def total(self, name: Name) -> int:
        """Return how many episodes got a verdict."""
        return sum(count for (_, one), count in self.counts.items() if one is name)

    def describe(self) -> str:
        """Return one line for the terminal."""
        counts = ", ".join(f"{self.total(name)} {name.value}" for name in Name if self.total(name))
        return f"seed {self.seed}: {self.num_steps} steps, {counts}, {len(self.failures)} failures"


def draw_world(seed: int, *, num_episodes: int = EPISODES) -> Play:
    """Return the world of a seed: ranks, config, and a fault in about two of three episodes."""
    draw = random.Random(f"faults {seed}")
    mode, is_explicit = draw.choice(tuple(Mode)), draw.random() < 0.25
    combo = Combo(mode, draw.random() < 0.7, draw.choice((2, 2, 3, 4)), is_explicit)
    if draw.random() < _FORM_SHARE:
        combo = draw.choice(FORMS)
    if combo.is_sharded and random.Random(f"owners {seed}").random() < _OWNER_SHARE:  # all other draws are as without owners
        combo = replace(combo, has_owners=True)
    config = {
        "unused_parameters": draw.choice(("error", "zero")),
        "nonfinite_gradients": draw.choice(("error", "skip_step")),
        "bucket_groups": draw.choice(("per_bucket", "single")),
    }
    if combo.form in (Form.SCALER, Form.AMP):
        config["nonfinite_gradients"] = "allow"  # which a scaler needs
    choices = [cell for cell in candidates(combo, seed) if _fits(cell, config)]
    cells = []
    for _ in range(num_episodes):
        cell = draw.choice(choices) if draw.random() > _HEALTHY_SHARE else Cell("none", "step", combo, seed)
        cells.append(Cell(cell.kind, cell.place, combo, seed, at_rank=draw.randrange(combo.num_ranks)))
    return Play(cells, config, num_healthy=0, steps_after=1, momentum=0.0)


def candidates(combo: Combo, seed: int = 0) -> Iterator[Cell]:
    """Yield a cell for each place of each kind that may happen again and again with a combination."""
    for kind in KINDS.values():
        setup = (combo.mode, combo.is_explicit, combo.form)
        is_known = any((one.mode, one.is_explicit, one.form) == setup for one in kind.combos)
        if kind.soaks and not kind.needs_processes and is_known:
            yield from (Cell(kind.name, place, combo, seed) for place in kind.places)


def _fits(cell: Cell, config: dict[str, Any]) -> bool:
    """Whether training goes on after a fault, and the world has the config that the fault is about."""
    fault = fault_of(cell)
    expect = fault.expect
    goes_on = all(one.recovery is not Recovery.OVER and not one.at_wrap for one in expect.alternatives())
    # What is unused, or not finite, is an error here or not by the config.
    has_other_buckets = cell.combo.has_owners and not cell.combo.overlaps
    if "bucket" in expect.fields and (config["bucket_groups"] == "single" or has_other_buckets):
        return False  # the bucket's number is another one
    return goes_on and all(config.get(name, value) == value for name, value in fault.config.items())


def count(run: Run, result: SoakResult, *, describe: str) -> None:
    """Judge a world and count its episodes up to the first failure."""
    for number, (cell, verdict) in enumerate(judge(run, fault_of)):
        result.num_steps += 1 + run.play.steps_after
        result.counts[f"{cell.kind}/{cell.place}", verdict.name] += 1
        if not verdict.name.is_good:
            where = f"{describe}, episode {number}, {cell.name}, rank {cell.culprit}"
            result.failures.append(f"{where}: {verdict.name.value}: {verdict.reason[:600]}")
            return


def run_soak(
    num_steps: int,
    seed: int,
    *,
    max_failures: int = 10,
    run_worlds: Callable[[Iterable[Play]], Iterable[Run]] = lambda plays: map(run_in_threads, plays),
    report: Callable[[str], None] = lambda _: None,
) -> SoakResult:
    """Run worlds until at least so many steps were judged.

    Args:
        num_steps: of the world, not of each rank.
        seed: worlds ``seed * 1_000_000``, ``+ 1``, ... are run.
        max_failures: stop after so many worlds that went wrong.
        run_worlds: the runner; loopback when not given.
        report: receives a line per failure, and one now and then.
    """
    result = SoakResult(seed)
    num_worlds = 0
    while result.num_steps < num_steps and len(result.failures) < max_failures:
        world = seed * 1_000_000 + num_worlds
        (run,) = run_worlds([draw_world(world)])
        known = len(result.failures)
        count(run, result, describe=f"world {world}")
        num_worlds += 1
        for failure in result.failures[known:]:
            report(failure)
        if num_worlds % 25 == 0:
            report(result.describe())
    return result
