"""Functions on ranks of the pool that form a group on an emulated fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from pool import Rank

from megabucket.testing import EmulatedFabric

# By the names that this torch has.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

QUICK = EmulatedFabric(latency_s=1e-5, bytes_per_s=1e9)
RANKS = 2


@contextmanager
def joined(rank: Rank, fabric: EmulatedFabric, ranks: int = RANKS) -> Iterator[dist.ProcessGroup | None]:
    """A group of the first ranks on a fabric; all ranks of the pool must come here."""
    group = dist.new_group(list(range(ranks)), backend=fabric.register(), pg_options=fabric)
    try:
        yield group if rank.index < ranks else None
    finally:
        if rank.index < ranks:
            dist.destroy_process_group(group)


def on_fabric(rank: Rank, function: Callable[..., Any], fabric: EmulatedFabric, ranks: int, *args: Any) -> Any:
    with joined(rank, fabric, ranks) as group:
        return None if group is None else function(Rank(rank.index, ranks, group), *args)


def run(pool, function, fabric, *args, ranks=RANKS, timeout_s=60.0):
    """Return what the function gives on the ranks of a fabric."""
    return pool.run(on_fabric, function, fabric, ranks, *args, ranks=4, timeout_s=timeout_s)[:ranks]
