"""Runs one world again, and finds out how little of it is needed for the same failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabucket.chaos.loopback_soak.counts import Failure, SoakCounts
from megabucket.chaos.loopback_soak.program import Episode, WorldSpec
from megabucket.chaos.loopback_soak.soak import SoakedWorld, all_kinds, draw_world_episodes, run_world


def replay(world_seed: int) -> Failure | None:
    """Run the world of a seed exactly as a soak over all kinds does; return its failure, if it has one."""
    counts = SoakCounts(world_seed)
    run_world(world_seed, counts, kinds=all_kinds())
    return counts.failures[0] if counts.failures else None


def shrink(failure: Failure) -> list[Episode]:
    """Return as few episodes of the world as are found to end in the same kind of failure; the last one fails.

    Leaves out episodes before it, in ever smaller pieces. Only worlds in which ranks take turns are sure to fail again.
    """
    spec, drawn = draw_world_episodes(failure.world_seed, kinds=all_kinds(), fixed={})
    kept = drawn[: failure.index]
    size = max(len(kept), 1)
    while size:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if _fails_alike(spec, [*fewer, failure.episode], failure):
                kept = fewer
            else:
                at += size
        size //= 2
    return [*kept, failure.episode]


def _fails_alike(spec: WorldSpec, episodes: Sequence[Episode], failure: Failure) -> bool:
    judgements = SoakedWorld(spec).run(episodes)
    last = judgements[-1]
    return len(judgements) == len(episodes) and (last.verdict, last.error) == (
        failure.judgement.verdict,
        failure.judgement.error,
    )


def describe_program(episodes: Sequence[Episode]) -> Iterator[str]:
    """Yield lines that show what each rank does."""
    for episode in episodes:
        yield f"{episode.kind} {episode.place}".rstrip()
        for rank, blocks in enumerate(episode.programs):
            for block in blocks:
                if block.acts:
                    yield f"  rank {rank}{', inside ddp.step()' if block.is_guarded else ''}:"
                    yield from (f"    {act}" for act in block.acts)
