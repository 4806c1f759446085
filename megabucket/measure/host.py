"""What the host adds to a step, measured phase by phase on a wrapped model and its real group: ``planning.simulate.HostCosts``.

A step is taken apart: gradients are accumulated without being sent, then handed over, finished, stepped on and gathered, each
phase timed by itself after all ranks have met, when nothing is left on the link. Two plans of the same model, one with few
buckets and one with many, tell what a bucket costs from what a step costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from megabucket.ddp import DistributedDataParallel
from megabucket.measure.collectives import meeting, slowest
from megabucket.optim import DistributedOptimizer
from megabucket.planning.links import Link
from megabucket.planning.simulate import FENCE, HostCosts

_WARMUPS: Final = 2


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of the phases of one step, with nothing else on the link, of the slowest rank.

    Attributes:
        launch_s: handing all buckets to their collectives.
        finish_s: taking them over when all are complete, and the fence.
        step_s: the optimizer's step, until it has launched the gathers; with a vote and the norm in reduce-scatter mode.
        gather_s: taking the gathered parameters over when all are complete.
    """

    launch_s: float
    finish_s: float
    step_s: float
    gather_s: float


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The phases with one plan: the median over some steps, and the least, in which no other program counts."""

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
    rows = []
    for _ in range(repetitions + _WARMUPS):
        with ddp.no_sync():
            backward()
        phases = (ddp.start_grad_sync, ddp.finish_grad_sync, _update(optimizer), ddp.finish_param_sync)
        rows.append([_timed_after(meet, phase) for phase in phases])
    columns = list(zip(*rows[_WARMUPS:], strict=True))
    typical, least = (
        Phases(*slowest([statistic(column) for column in columns], ddp.communicator, device=device))
        for statistic in (statistics.median, min)
    )
    return PhaseTimes(
        typical,
        least,
        num_buckets=ddp.layout.num_buckets,
        grad_bytes=sum(buffer.grad_data.nbytes for buffer in ddp.param_and_grad_buffers),
    )


def host_costs(few: PhaseTimes, many: PhaseTimes, link: Link, *, num_ranks: int, is_sharded: bool, wake_s: float) -> HostCosts:
    """Return what a bucket and a small collective cost the host, from the phases of two plans of one model.

    A bucket costs what the least times differ by: it is plain work of the host. A small collective costs what is typical,
    because it waits for another rank.
    """
    launch_s, finish_s, update_s, gather_s = (
        _per_bucket(getattr(few.least, name), getattr(many.least, name), many.num_buckets - few.num_buckets)
        for name in ("launch_s", "finish_s", "step_s", "gather_s")
    )
    fences_s = [times.typical.finish_s - times.num_buckets * finish_s for times in (few, many)]
    return HostCosts(
        launch_s=launch_s,
        launch_s_per_byte=max(0.0, few.typical.launch_s - few.num_buckets * launch_s) / few.grad_bytes,
        finish_s=finish_s,
        update_s=update_s if is_sharded else 0.0,
        gather_finish_s=gather_s if is_sharded else 0.0,
        wake_s=wake_s,
        step_collective_s=max(0.0, statistics.fmean(fences_s) - link.collective_s(*FENCE, num_ranks)),
    )


def optimizer_s(few: PhaseTimes, many: PhaseTimes, host: HostCosts, link: Link, *, num_ranks: int, is_sharded: bool) -> float:
    """Return the optimizer's seconds on this group without its collectives and what it spends on single buckets."""
    seconds = min(times.typical.step_s - times.num_buckets * host.update_s for times in (few, many))
    if is_sharded:  # the vote, because the sync was finished before, and the norm
        seconds -= 2 * (link.collective_s(*FENCE, num_ranks) + host.step_collective_s)
    return max(0.0, seconds)


def _per_bucket(few_s: float, many_s: float, num_more: int) -> float:
    return max(0.0, many_s - few_s) / num_more if num_more > 0 else 0.0


def _update(optimizer: DistributedOptimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed_after(meet: Callable[[], None], phase: Callable[[], None]) -> float:
    meet()
    start_s = time.perf_counter()
    phase()
    return time.perf_counter() - start_s
