"""Measures what the host adds to a step, phase by phase on a wrapped model and its real group: ``HostCosts``.

Gradients are accumulated without being sent, then handed over, finished, stepped on and gathered. Each phase is timed after
all ranks have met and nothing is left on the link. Two plans of one model, one with few buckets and one with many, separate the
cost of a bucket from the cost of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from megabucket.ddp import DistributedDataParallel
from megabucket.measure.collectives import meeting, slowest
from megabucket.optim import DistributedOptimizer
from megabucket.planning.links import Link
from megabucket.planning.simulate import FENCE, HostCosts

_WARMUPS: Final = 2


class Phases(NamedTuple):
    """Seconds of the phases of one step, with nothing else on the link, of the slowest rank."""

    launch_s: float
    """Hands all buckets to their collectives."""
    finish_s: float
    """Takes them over once all are complete, and the fence."""
    step_s: float
    """The optimizer's step, until it has launched the gathers; in reduce-scatter mode with a vote and the norm."""
    gather_s: float
    """Takes the gathered parameters over once all are complete."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The phases with one plan: the median over some steps, and the least, which other programs do not disturb."""

    typical: Phases
    least: Phases
    num_buckets: int
    grad_bytes: int


def time_phases(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer, backward: Callable[[], None], *, repetitions: int = 7
) -> PhaseTimes:
    """Measure the phases. Every rank calls it between two steps; weights change as in any step.

    Args:
        backward: runs forward and backward of one microbatch through ``ddp``; called inside of ``no_sync``.
        repetitions: steps that count; two more warm up.
    """
    device = ddp.param_and_grad_buffers[0].grad_data.device
    meet = meeting(ddp.communicator, device=device)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    rows = []
    for _ in range(_WARMUPS + repetitions):
        with ddp.no_sync():
            backward()
        row = []
        for phase in (ddp.start_grad_sync, ddp.finish_grad_sync, update, ddp.finish_param_sync):
            meet()
            start_s = time.perf_counter()
            phase()
            row.append(time.perf_counter() - start_s)
        rows.append(row)
    counted = np.array(rows[_WARMUPS:])
    typical, least = (
        Phases(*slowest(own.tolist(), ddp.communicator, device=device))
        for own in (np.median(counted, axis=0), np.min(counted, axis=0))
    )
    num_bytes = sum(buffer.grad_data.nbytes for buffer in ddp.param_and_grad_buffers)
    return PhaseTimes(typical, least, ddp.layout.num_buckets, num_bytes)


def host_costs(few: PhaseTimes, many: PhaseTimes, link: Link, *, num_ranks: int, is_sharded: bool, wake_s: float) -> HostCosts:
    """Return the host's cost of a bucket and of a small collective, from the phases of two plans of one model.

    The cost of a bucket is a difference of least times, because it is plain work of the host. The cost of a small collective is
    typical, because it waits for another rank.
    """
    num_more = many.num_buckets - few.num_buckets
    per_bucket = Phases(
        *(max(0.0, more - less) / num_more if num_more > 0 else 0.0 for less, more in zip(few.least, many.least, strict=True))
    )
    launches_s = max(0.0, few.typical.launch_s - few.num_buckets * per_bucket.launch_s)
    fence_s = statistics.fmean(times.typical.finish_s - times.num_buckets * per_bucket.finish_s for times in (few, many))
    return HostCosts(
        launch_s=per_bucket.launch_s,
        launch_s_per_byte=launches_s / few.grad_bytes,
        finish_s=per_bucket.finish_s,
        update_s=per_bucket.step_s if is_sharded else 0.0,
        gather_finish_s=per_bucket.gather_s if is_sharded else 0.0,
        wake_s=wake_s,
        step_collective_s=max(0.0, fence_s - link.collective_s(*FENCE, num_ranks)),
    )


def optimizer_s(few: PhaseTimes, many: PhaseTimes, host: HostCosts, link: Link, *, num_ranks: int, is_sharded: bool) -> float:
    """Return the optimizer's seconds on this group, without its collectives and its work on single buckets."""
    seconds = min(times.typical.step_s - times.num_buckets * host.update_s for times in (few, many))
    if is_sharded:  # the vote, because the sync was finished before, and the norm
        seconds -= 2 * (link.collective_s(*FENCE, num_ranks) + host.step_collective_s)
    return max(0.0, seconds)
