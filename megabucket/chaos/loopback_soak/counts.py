"""What a soak came to: verdicts by kind, errors by class, failures with what replays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from megabucket.chaos.loopback_soak.judge import Judgement, Verdict
from megabucket.chaos.loopback_soak.program import Episode


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that ended neither right nor named."""

    world_seed: int
    index: int
    """Of the episode in its world."""
    step: int
    """Training steps of the world before it."""
    episode: Episode
    judgement: Judgement

    def describe(self) -> str:
        """Return all that is needed to look into it."""
        found = self.judgement
        error = f" [{found.error}: {found.text}]" if found.error else ""
        return (
            f"{found.verdict.value} world seed {self.world_seed}, episode {self.index} (step {self.step}), "
            f"{self.episode.kind} ({self.episode.place}): {found.reason}{error}"
        )


@dataclass(slots=True)
class SoakCounts:
    """What a soak came to."""

    seed: int
    num_steps: int = 0
    num_rank_steps: int = 0
    num_worlds: int = 0
    seconds: float = 0.0
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    """Verdicts by kind of episode."""
    errors: Counter[str] = field(default_factory=Counter)
    """Classes of the errors that all ranks agreed on."""
    failures: list[Failure] = field(default_factory=list)

    def count(self, episode: Episode, judgement: Judgement, num_ranks: int) -> None:
        """Add one episode."""
        self.num_steps += episode.num_steps
        self.num_rank_steps += episode.num_steps * num_ranks
        self.by_kind.setdefault(episode.kind, Counter())[judgement.verdict.value] += 1
        if judgement.verdict is Verdict.NAMED and judgement.error:
            self.errors[judgement.error] += 1

    @property
    def by_verdict(self) -> Counter[str]:
        """Episodes by verdict."""
        return sum(self.by_kind.values(), Counter())


def describe_counts(counts: SoakCounts) -> Iterator[str]:
    """Yield what a soak came to, kind by kind."""
    names = ["RIGHT", "NAMED", "SILENT", "WRONG", "HUNG"]
    yield f"{'kind of episode':44}" + "".join(f"{name:>8}" for name in names)
    pairs = dict.fromkeys(names, 0)
    for kind, verdicts in sorted(counts.by_kind.items()):
        if " + " in kind:
            pairs = {name: pairs[name] + verdicts[name] for name in names}
        else:
            yield f"{kind:44}" + "".join(f"{verdicts[name]:8}" for name in names)
    yield f"{'two of these on two ranks':44}" + "".join(f"{pairs[name]:8}" for name in names)
    total = counts.by_verdict
    yield f"{'all':44}" + "".join(f"{total[name]:8}" for name in names)
    errors = ", ".join(f"{name} {count}" for name, count in counts.errors.most_common())
    yield f"errors that all ranks agreed on: {errors or 'none'}"
    worlds = f"{counts.num_worlds} worlds ({counts.num_rank_steps:,} steps of single ranks)"
    rate = counts.num_steps / max(counts.seconds, 1e-9)
    yield f"seed {counts.seed}: {counts.num_steps:,} steps in {worlds}, {rate:.0f} steps/s, {len(counts.failures)} failures"
