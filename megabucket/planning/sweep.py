"""Sweeps: many bucket sizes, many numbers of ranks, one figure each. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from megabucket.errors import ConfigError
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import MeasuredLink
from megabucket.planning.setting import Setting

RANKS: Final = tuple(2**exponent for exponent in range(13))
"""1 to 4096."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One plan in numbers."""

    bucket_numel: int | None
    """The size that closes its buckets, in elements; ``None`` when they are cut in another way."""
    buckets: int
    """Buckets that send anything."""
    step_s: float
    exposed_s: float
    """Seconds that communication adds to the compute of the step."""


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One number of ranks in numbers."""

    num_ranks: int
    step_s: float
    efficiency: float
    """Throughput per rank, as a fraction of that of one rank alone."""


def sweep_row(setting: Setting, plan: BucketPlan, bucket_numel: int | None = None) -> SweepRow:
    """Return one plan in numbers.

    Raises:
        ConfigError: the link cannot say what a collective costs.
    """
    step_s = setting.step_s(plan)
    # Sums in another order may miss zero by a rounding error.
    exposed_s = max(step_s - setting.workload.compute_s, 0.0)
    return SweepRow(bucket_numel, plan.num_collectives(setting.workload), step_s, exposed_s)


def sweep(setting: Setting, sizes: Iterable[int]) -> tuple[SweepRow, ...]:
    """Return one row for each bucket size, in the order given.

    Raises:
        ConfigError: the link cannot say what a collective costs, or the workload is of another model.
    """
    return tuple(sweep_row(setting, setting.plan_of_size(size), size) for size in sizes)


def scaling(setting: Setting, *, bucket_numel: int | None, ranks: Iterable[int] = RANKS) -> tuple[ScalingRow, ...]:
    """Return the efficiency over numbers of ranks, each rank keeping its own batch (weak scaling).

    ``efficiency = throughput(n) / (n * throughput(1)) = step(1) / step(n)``: a rank alone sends nothing. Numbers of ranks that
    the link knows nothing about (parts of nodes) are left out; a table knows one number only.

    Args:
        bucket_numel: the size that closes buckets; ``None``: the optimal cuts of each number of ranks.

    Raises:
        ConfigError: the workload is of another model.
    """
    rows = []
    for count in ranks:
        at = setting.on(count)
        if isinstance(setting.link, MeasuredLink) and count not in (1, setting.link.num_ranks):
            continue
        try:
            rows.append(scaling_row(at, lambda at: at.plan_of_size(bucket_numel) if bucket_numel else at.optimal_plan))
        except ConfigError:
            continue
    return tuple(rows)


def scaling_row(setting: Setting, plan_of: Callable[[Setting], BucketPlan]) -> ScalingRow:
    """Return the step on the ranks of the setting in numbers.

    Args:
        plan_of: gives the plan. Not asked for one rank, which sends nothing whatever a link would charge for it.

    Raises:
        ConfigError: the link cannot say what a collective costs on so many ranks.
    """
    alone_s = setting.workload.compute_s
    step_s = alone_s if setting.dp_size == 1 else setting.step_s(plan_of(setting))
    return ScalingRow(setting.dp_size, step_s, alone_s / step_s if step_s > 0 else 1.0)
