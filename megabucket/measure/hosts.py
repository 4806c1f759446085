"""Times collectives inside each host and across hosts: the two levels of a link.

::

    host a    rank 0 ---- rank 1        inside: the ranks of each host, on all hosts at once
                 |           |
    host b    rank 2 ---- rank 3        across: one rank of each host, all such groups at once, so that they share the network
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import numpy as np
import torch.distributed as dist

from megabucket.comm import HostMap, SameHostCommunicator, discover_communicator, with_same_host_copies
from megabucket.measure.collectives import Cell, Timing, cells_of, time_collectives
from megabucket.measure.ranks import Ranks
from megabucket.planning.links import Point, RingLink, TableKey, TwoLevelLink, fit_ring
from megabucket.trace import CollectiveKind

_TIMEOUT: Final = timedelta(minutes=10)
_ALL: Final = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
LEAST_BYTES: Final = 4096
"""Of the largest buffer of a level; two sizes need more than the smallest one."""


@dataclass(frozen=True, slots=True)
class Level:
    """The times of collectives in groups of one kind, all of them working at once. The slowest group counts."""

    num_ranks: int
    """Of each group."""
    timings: tuple[Timing, ...]
    num_copying: int
    """Groups whose ranks copy between their memories instead of sending."""
    num_groups: int

    @property
    def points(self) -> dict[TableKey, list[Point]]:
        """Bytes and median seconds by operation and dtype."""
        found: dict[TableKey, list[Point]] = {}
        for timing in self.timings:
            found.setdefault((timing.cell.kind, timing.cell.dtype), []).append((float(timing.cell.num_bytes), timing.median_s))
        return found

    @property
    def ring(self) -> RingLink:
        """The ring that fits the times best."""
        return fit_ring(self.points, self.num_ranks)

    @property
    def worst_residual(self) -> float:
        """The largest distance of a time from the ring, as a fraction of that time, signed."""
        errors = [
            self.ring.collective_s(timing.cell.kind, timing.cell.num_bytes, self.num_ranks) / timing.median_s - 1
            for timing in self.timings
        ]
        return max(errors, key=abs)

    @property
    def way(self) -> str:
        """How the ranks of a group reach each other."""
        if self.num_copying in {0, self.num_groups}:
            return "copies between memories" if self.num_copying else "sockets"
        return f"copies between memories in {self.num_copying} of {self.num_groups} groups, sockets in the others"


@dataclass(frozen=True, slots=True)
class HostLevels:
    """Both levels. ``inside`` is ``None`` where each host has one rank."""

    inside: Level | None
    across: Level

    @property
    def link(self) -> TwoLevelLink:
        """The fitted link."""
        between = self.across.ring
        if self.inside is None:
            return TwoLevelLink(inside=between, between=between, ranks_per_node=1)
        return TwoLevelLink(inside=self.inside.ring, between=between, ranks_per_node=self.inside.num_ranks)


def measure_levels(
    ranks: Ranks,
    hosts: HostMap,
    *,
    max_bytes: int,
    dtypes: Sequence[str] = ("float32",),
    kinds: Sequence[CollectiveKind] = _ALL,
    repetitions: int = 5,
) -> HostLevels | None:
    """Measure both levels on ranks that have joined, equal on all of them; ``None``: the ranks are no grid of hosts.

    Every rank calls it. Inside a host ranks copy between their memories where they can, as a wrapper of such a group does.

    Args:
        max_bytes: of the largest full buffer inside a host; across hosts it is cut into shards.

    Raises:
        ConfigError: the buffers do not fit into memory.
    """
    per_host = hosts.ranks_per_host
    if per_host is None:
        return None
    ring_kinds = [kind for kind in kinds if kind is not CollectiveKind.ALL_TO_ALL] or list(_ALL)
    by_host = list(hosts.ranks.values())
    cells = cells_of(ring_kinds, dtypes, max(max_bytes, LEAST_BYTES), per_host)
    inside = _measure(ranks, by_host, cells, repetitions) if per_host > 1 else None
    shard_bytes = max(max_bytes // per_host, LEAST_BYTES)
    columns = [tuple(column) for column in zip(*by_host, strict=True)]
    return HostLevels(inside, _measure(ranks, columns, cells_of(ring_kinds, dtypes, shard_bytes, len(by_host)), repetitions))


def _measure(ranks: Ranks, groups: Sequence[Sequence[int]], cells: Sequence[Cell], repetitions: int) -> Level:
    made = {index: dist.new_group(list(members), timeout=_TIMEOUT) for index, members in enumerate(groups)}
    own = next(index for index, members in enumerate(groups) if ranks.rank in members)
    try:
        with closing(discover_communicator(made[own])) as plain:
            communicator = with_same_host_copies(plain, ranks.device)
            ranks.gather("ready")
            timings = time_collectives(cells, communicator, device=ranks.device, repetitions=repetitions, note=ranks.note)
            copies = isinstance(communicator, SameHostCommunicator)
            communicator.close()
        said = ranks.gather((own, copies, [timing.seconds for timing in timings]))
    finally:
        group = made.pop(own)
        made.clear()
        dist.destroy_process_group(group)
    slowest = np.max([seconds for _, _, seconds in said], axis=0).tolist()
    copying = {index for index, copies, _ in said if copies}
    timings = tuple(Timing(cell, tuple(seconds)) for cell, seconds in zip(cells, slowest, strict=True))
    return Level(len(groups[own]), timings, len(copying), len(groups))


def line_of(level: Level, kind: CollectiveKind = CollectiveKind.ALL_REDUCE) -> tuple[float, float]:
    """Return the seconds of the smallest collective of a kind, and the bytes of the full buffer per second of the largest."""
    points = next(points for (of_kind, _), points in level.points.items() if of_kind is kind)
    (_, least_s), (most_bytes, most_s) = points[0], points[-1]
    return least_s, most_bytes / most_s
