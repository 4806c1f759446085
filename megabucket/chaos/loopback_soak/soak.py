"""Runs worlds, episode after episode, until enough steps are done; every failure is printed with what replays it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from megabucket.chaos.loopback_soak.counts import Failure, SoakCounts
from megabucket.chaos.loopback_soak.drafts import Maker
from megabucket.chaos.loopback_soak.judge import Judgement, Verdict, judge
from megabucket.chaos.loopback_soak.kinds import KINDS, SLIPS, slip_episode
from megabucket.chaos.loopback_soak.oracle import Oracle
from megabucket.chaos.loopback_soak.player import Player
from megabucket.chaos.loopback_soak.program import Episode, WorldSpec
from megabucket.chaos.loopback_soak.turns import Turns
from megabucket.chaos.loopback_soak.worlds import draw_world
from megabucket.testing import LoopbackWorld

EPISODES_PER_WORLD: Final = 40
_TIMEOUT_S: Final = 60.0
_HEALTHY_SHARE: Final = 0.3
_PAIR_SHARE: Final = 0.12
_COUNTED: Final = frozenset(
    {
        "microbatch more",
        "microbatch less",
        "second backward",
        "zero between microbatches",
        "no_sync left out",
        "finish only",
        "forward more",
        "next batch",
        "other step number",
        "zero instead of step",
    }
)
"""Faults that are noticed because ranks count differently; two of them on two ranks may count alike."""
_ALONE: Final = frozenset({"exception before the step", "abort before the step"})
"""Faults that come to nothing when another rank's fault ends the step before."""


def draw_episodes(spec: WorldSpec, num_episodes: int, kinds: Sequence[str]) -> list[Episode]:
    """Return the episodes of a world: a function of its seed.

    Args:
        kinds: which faults may happen; pairs are made of the slips among them.
    """
    maker = Maker(spec)
    choice = random.Random(f"kinds {spec.seed}")  # noqa: S311 - no secret
    slips = [kind for kind in kinds if kind in SLIPS]
    episodes: list[Episode] = []
    while len(episodes) < num_episodes:
        fate = choice.random()
        if fate < _HEALTHY_SHARE or not kinds:
            episode = KINDS["healthy"](maker)
        elif fate < _HEALTHY_SHARE + _PAIR_SHARE and len(slips) > 1:
            pair = choice.sample(slips, 2)
            is_clear = _ALONE.isdisjoint(pair) and not _COUNTED.issuperset(pair)
            episode = slip_episode(maker, pair) if is_clear else None
        else:
            episode = make_episode(maker, choice.choice(kinds))
        if episode is not None:
            episodes.append(episode)
    return episodes


def make_episode(maker: Maker, kind: str) -> Episode | None:
    """Return an episode of one kind; ``None`` where the world has no such fault."""
    return KINDS[kind](maker) if kind in KINDS else slip_episode(maker, [kind])


class SoakedWorld:
    """One world, wrapped and ready."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        completion: Any = spec.completion
        self._world = LoopbackWorld(spec.num_ranks, completion=completion, timeout_s=_TIMEOUT_S)
        self._turns = Turns(spec.num_ranks, spec.seed) if spec.takes_turns else None
        self._players: list[Player] = self._run(lambda rank: Player(rank, spec, self._world, self._turns))
        self.oracle = Oracle(spec)

    def _run(self, function: Callable[[int], Any]) -> list[Any]:
        return self._world.run(function) if self._turns is None else self._turns.run(function)

    def run(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Run episodes without a pause between them; return a judgement each, up to the first bad one."""

        def program(rank: int) -> Any:
            seen = []
            for episode in episodes:
                seen.append(self._players[rank].play(episode.programs[rank]))
                if seen[-1][-1].broken is not None:
                    break
            return seen

        by_rank = self._run(program)
        judgements = []
        for index, episode in enumerate(episodes):
            seen = [by_rank[rank][index] if index < len(by_rank[rank]) else [] for rank in range(self.spec.num_ranks)]
            judgement, self.oracle = judge(episode, seen, self.oracle)
            judgements.append(judgement)
            if not judgement.verdict.is_good:
                break
        return judgements

    def find_leftovers(self) -> str:
        """Return what is left when it should not be, in words: a collective in flight, a rank that launched more."""
        self._run(lambda rank: self._players[rank].ddp.zero_grad())
        self._run(lambda rank: self._players[rank].ddp.finish_param_sync())
        steps = {player.ddp.sync.step for player in self._players}
        for player in self._players:
            player.ddp.detach()
        lengths = {len(self._world.schedule(rank)) for rank in range(self.spec.num_ranks)}
        if self._world.pending or len(lengths) > 1 or len(steps) > 1:
            return f"left over: pending {self._world.pending}, schedule lengths {lengths}, steps {steps}"
        return ""


def all_kinds() -> list[str]:
    """Return the names of all kinds of episode."""
    return [*SLIPS, *KINDS]


def draw_world_episodes(seed: int, *, kinds: Sequence[str], fixed: Mapping[str, Any]) -> tuple[WorldSpec, list[Episode]]:
    """Return the world of a seed and its episodes."""
    spec = draw_world(seed, **fixed)
    return spec, draw_episodes(spec, EPISODES_PER_WORLD, kinds)


def run_world(
    seed: int,
    counts: SoakCounts,
    *,
    kinds: Sequence[str],
    fixed: Mapping[str, Any] = MappingProxyType({}),
    habits: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Run the world of a seed to its end, or to its first failure."""
    spec, episodes = draw_world_episodes(seed, kinds=kinds, fixed=fixed)
    world = SoakedWorld(replace(spec, **habits))
    counts.num_worlds += 1
    choice = random.Random(f"chunks {seed}")  # noqa: S311 - no secret
    step, index = 0, 0
    while index < len(episodes):
        chunk = episodes[index : index + choice.randint(1, 8)]
        try:
            judgements = world.run(chunk)
        except Exception as error:  # outside of any block, where nothing should fail
            judgements = [Judgement(Verdict.WRONG, "the program of a rank has failed", type(error).__name__, str(error))]
        for episode, judgement in zip(chunk, judgements, strict=False):
            counts.count(episode, judgement, spec.num_ranks)
            if not judgement.verdict.is_good:
                counts.failures.append(Failure(seed, index, step, episode, judgement))
                return
            step += episode.num_steps
            index += 1
    leftovers = world.find_leftovers()
    if leftovers:
        counts.failures.append(Failure(seed, index, step, episodes[-1], Judgement(Verdict.WRONG, leftovers)))


def run_loopback_soak(
    num_steps: int,
    seed: int,
    *,
    kinds: Sequence[str] | None = None,
    habits: Mapping[str, Any] = MappingProxyType({}),
    max_failures: int = 10,
    report: Callable[[str], None] = lambda _: None,
) -> SoakCounts:
    """Run at least ``num_steps`` training steps with random faults in loopback worlds; return what came of them.

    Args:
        num_steps: of the world, not of each rank.
        seed: worlds ``seed * 1_000_000``, ``+ 1``, ... are run; each can be replayed alone.
        kinds: which faults may happen; all of them if not given.
        habits: fields of ``WorldSpec`` that are not drawn.
        max_failures: stop after so many worlds that went wrong.
        report: receives a line per failure, and one now and then.
    """
    chosen = list(kinds) if kinds is not None else all_kinds()
    counts = SoakCounts(seed)
    start_s = time.perf_counter()
    while counts.num_steps < num_steps and len(counts.failures) < max_failures:
        num_failures = len(counts.failures)
        run_world(seed * 1_000_000 + counts.num_worlds, counts, kinds=chosen, habits=habits)
        counts.seconds = time.perf_counter() - start_s
        for failure in counts.failures[num_failures:]:
            report(failure.describe())
        if counts.num_worlds % 100 == 0:
            rate = counts.num_steps / counts.seconds
            report(f"seed {seed}: {counts.num_steps:,} steps in {counts.num_worlds} worlds, {rate:.0f} steps/s")
    return counts
