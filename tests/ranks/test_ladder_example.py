"""``examples/ladder.py`` on real ranks, with other sizes than its own: one result, and as many collectives as planned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pool import Rank

from megabucket.units import MIB

pytestmark = [pytest.mark.dist, pytest.mark.nightly]

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 4


def climbed(rank: Rank) -> tuple[dict[str, tuple[set[int], int, float]], float]:
    """Return counted and planned collectives and the difference of weights of each rung, and how far weights moved."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from ladder import Course, climb
    finally:
        sys.path.remove(str(EXAMPLES))
    # 12 layers of 257 KiB. A cap above 1 MiB: torch DDP then closes its first bucket no earlier than the others.
    course = Course(num_layers=12, batch=2, num_microbatches=3, bucket_cap_bytes=7 * MIB // 4, num_rounds=1, steps_per_round=3)
    rows, moved = climb(rank.group, course)
    return {row.name: (row.counted, row.planned, row.difference) for row in rows}, moved


def test_the_rungs_agree_and_launch_what_is_planned(pool):
    of_ranks = pool.run(climbed, ranks=RANKS)

    for rungs, moved in of_ranks:
        assert moved > 1e-3  # otherwise equal weights would say nothing
        assert {name: difference for name, (_, _, difference) in rungs.items() if not difference <= 1e-6} == {}
        assert {name: counted for name, (counted, _, _) in rungs.items()} == {
            "simple, each backward": {72},  # 12 weights and 12 biases, 3 backwards
            "accumulation": {24},
            "hooks, blocking": {24},
            "hooks, asynchronous": {24},
            "buckets": {2},  # 7 layers reach 1.75 MiB, and 5 are left
            "torch DDP, each backward": {6},
            "torch DDP, no_sync()": {2},
            "megabucket, all-reduce": {3},  # and a fence
            "megabucket, reduce-scatter": {12},  # 2 reduced, a fence, a norm, and 2 gathered: a broadcast of each of 4 parts
        }
        assert {name: {planned} for name, (_, planned, _) in rungs.items()} == {name: row[0] for name, row in rungs.items()}
