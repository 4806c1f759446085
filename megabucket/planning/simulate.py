"""The timing model: one rank's steps as events on a compute lane and a serial communication lane. Pure arithmetic, no torch.

::

    compute  |-- forward --|----- backward ------|  wait |fence| optimizer |-- forward, waiting where it must --|
    comm                       |b 0|  |  b 1  |b 2      ||     |           | gather 2 | gather 1 |g 0|

A bucket is ready when the last of its gradients is; buckets go out in order, one after the other. The small collectives of a
step (the fence, the gradient norm) follow the last bucket, then the optimizer runs. In reduce-scatter mode the updated
parameters are gathered in reverse bucket order, either at once or while the next forward runs; a tensor's forward waits for
the gather of its bucket. A bucket without bytes sends nothing, a tensor without elements waits for nothing. All ranks are
alike, so nobody waits for a slower one.

``simulate_step_s`` gives the time of a step alone and builds nothing else: sweeps and searches call it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from megabucket.errors import ConfigError
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import Link
from megabucket.planning.workload import Workload
from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepTrace

StepCollective: TypeAlias = tuple[CollectiveKind, int]
"""Operation and bytes of one small collective after the buckets."""

FENCE: Final[StepCollective] = (CollectiveKind.ALL_REDUCE, 144)
"""What the wrapper's step protocol adds to every step: 18 integers."""

GRAD_NORM: Final[StepCollective] = (CollectiveKind.ALL_REDUCE, 8)
"""What ``DistributedOptimizer`` adds in reduce-scatter mode: one float64."""


class Mode(str, enum.Enum):
    """How gradients travel."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"


def simulate_step_s(
    workload: Workload,
    plan: BucketPlan,
    link: Link,
    *,
    num_ranks: int,
    mode: Mode,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    step_collectives: Sequence[StepCollective] = (),
) -> float:
    """Return the seconds of one step in the steady state: the duration of the last trace of ``simulate_steps``.

    Raises:
        ConfigError: the plan is not one of this workload, or the link cannot say what a collective costs.
    """
    check_plan(workload, plan)
    costs = _costs(workload, plan, link, num_ranks=num_ranks, mode=mode, step_collectives=step_collectives)
    finish_s = 0.0
    for ready_s, cost_s in zip(_bucket_ready_s(workload, plan, overlaps=overlap_grad_reduce), costs.reduce_s, strict=True):
        if cost_s is not None:
            finish_s = max(finish_s, ready_s) + cost_s
    gather_s = [cost for cost in costs.gather_s if cost is not None]
    first_forward_s = workload.forward_s
    after_step_s = 0.0
    if overlap_param_gather:
        first_forward_s = _waiting_forward_s(workload, plan, costs.gather_s)
    else:
        after_step_s = sum(gather_s)
    before_s = first_forward_s + (workload.num_microbatches - 1) * (workload.forward_s + workload.backward_s)
    step_s = max(finish_s, workload.backward_s) + sum(costs.extra_s) + workload.optimizer_s
    return before_s + step_s + after_step_s


def simulate_steps(  # noqa: PLR0913 - one argument per choice of a step, all of them named
    workload: Workload,
    plan: BucketPlan,
    link: Link,
    *,
    num_ranks: int,
    mode: Mode,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    num_steps: int = 2,
    step_collectives: Sequence[StepCollective] = (),
) -> tuple[StepTrace, ...]:
    """Return consecutive steps of one rank. The first finds its parameters gathered; all after it are alike.

    A step begins with its forward and ends with its optimizer, or with the gathers when they do not overlap. Overlapped
    gathers are launched in the step that updated the parameters and lie in the window of the next one, as when measured. COMM
    intervals are the time on the lane; a collective that waits for the lane begins later than its launch.

    Args:
        num_ranks: ranks of the data-parallel group.
        mode: all-reduce, or reduce-scatter with a gather of the parameters.
        overlap_grad_reduce: whether a bucket goes out when it is ready, or all of them after backward.
        overlap_param_gather: whether parameters are gathered during the next forward. Says nothing in all-reduce mode.
        num_steps: at least 1; two show the steady state.
        step_collectives: what follows the buckets in every step, for example ``FENCE``; each waits for the one before it.

    Raises:
        ConfigError: the plan is not one of this workload, or the link cannot say what a collective costs.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ConfigError(f"num_steps={num_steps!r} must be an integer >= 1")
    check_plan(workload, plan)
    costs = _costs(workload, plan, link, num_ranks=num_ranks, mode=mode, step_collectives=step_collectives)
    ready_s = _bucket_ready_s(workload, plan, overlaps=overlap_grad_reduce)
    records = _records(workload, plan, num_ranks=num_ranks, mode=mode, step_collectives=step_collectives)
    traces: list[StepTrace] = []
    pending_gathers: tuple[float | None, ...] = (None,) * len(plan.buckets)
    for step in range(num_steps):
        lanes = _Lanes(traces[-1].stop_s if traces else 0.0)
        _run_forwards_and_backwards(lanes, workload, plan, pending_gathers)
        _run_last_backward(lanes, workload, ready_s, costs)
        lanes.compute("optimizer", workload.optimizer_s)
        if overlap_param_gather:
            pending_gathers = costs.gather_s
        else:
            _run_gathers_at_once(lanes, costs.gather_s)
        traces.append(lanes.trace(step, records))
    return tuple(traces)


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """What the model knows about one bucket. Seconds of a collective are ``None`` where the bucket sends nothing."""

    grad_bytes: int
    param_bytes: int
    ready_s: float
    """From the start of the last backward to its last gradient."""
    first_tensor: int
    """Index of the tensor that needs its parameters first in forward."""
    needed_s: float
    """From the start of forward to that tensor."""
    reduce_s: float | None
    gather_s: float | None


def bucket_times(workload: Workload, plan: BucketPlan, link: Link, *, num_ranks: int, mode: Mode) -> tuple[BucketTimes, ...]:
    """Return what the model knows about each bucket, in launch order.

    Raises:
        ConfigError: the plan is not one of this workload, or the link cannot say what a collective costs.
    """
    check_plan(workload, plan)
    costs = _costs(workload, plan, link, num_ranks=num_ranks, mode=mode, step_collectives=())
    first_needs, needed_s = _first_needs(workload, plan), workload.needed_s
    columns = zip(
        plan.grad_sizes_bytes(workload),
        plan.param_sizes_bytes(workload),
        _bucket_ready_s(workload, plan, overlaps=True),
        first_needs,
        [needed_s[first] for first in first_needs],
        costs.reduce_s,
        costs.gather_s,
        strict=True,
    )
    return tuple(BucketTimes(*column) for column in columns)


def check_plan(workload: Workload, plan: BucketPlan) -> None:
    """Refuse a plan that does not hold every tensor of the workload once.

    Raises:
        ConfigError: a bucket is empty, or a tensor is missing, doubled or unknown.
    """
    indices = [index for bucket in plan.buckets for index in bucket]
    count = len(workload.tensors)
    if len(indices) != count or set(indices) != set(range(count)):
        raise ConfigError(f"the plan does not hold each of the workload's {count} tensors once; make it from this workload")
    if not all(plan.buckets):
        raise ConfigError("the plan has a bucket without tensors; leave it out")


# Costs #


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds on the lane; ``None`` for a bucket that sends nothing."""

    reduce_s: tuple[float | None, ...]
    gather_s: tuple[float | None, ...]
    extra_s: tuple[float, ...]


def _costs(
    workload: Workload, plan: BucketPlan, link: Link, *, num_ranks: int, mode: Mode, step_collectives: Sequence[StepCollective]
) -> _Costs:
    group_sizes = plan.num_ranks or (num_ranks,) * len(plan.buckets)
    sends = _bucket_sends(workload, plan, mode)
    costs = [_send_s(link, send, group_sizes) for send in sends]
    return _Costs(
        reduce_s=costs[0],
        gather_s=costs[1] if len(costs) > 1 else (None,) * len(plan.buckets),
        extra_s=tuple(link.collective_s(kind, payload_bytes, num_ranks) for kind, payload_bytes in step_collectives),
    )


class _Send(NamedTuple):
    """One collective of each bucket."""

    kind: CollectiveKind
    label: str
    sizes_bytes: tuple[int, ...]
    dtype: str


def _bucket_sends(workload: Workload, plan: BucketPlan, mode: Mode) -> tuple[_Send, ...]:
    is_sharded = Mode(mode) is Mode.REDUCE_SCATTER
    kind = CollectiveKind.REDUCE_SCATTER if is_sharded else CollectiveKind.ALL_REDUCE
    reduce = _Send(kind, "bucket", plan.grad_sizes_bytes(workload), workload.grad_dtype)
    if not is_sharded:
        return (reduce,)
    return reduce, _Send(CollectiveKind.ALL_GATHER, "param gather", plan.param_sizes_bytes(workload), workload.param_dtype)


def _send_s(link: Link, send: _Send, group_sizes: Sequence[int]) -> tuple[float | None, ...]:
    kind, _, sizes_bytes, dtype = send
    lines = {ranks: link.affine(kind, ranks, dtype) for ranks in set(group_sizes)}
    costs: list[float | None] = []
    for size, ranks in zip(sizes_bytes, group_sizes, strict=True):
        line = lines[ranks]
        if not size:
            costs.append(None)
        elif line is not None:
            costs.append(line[0] + line[1] * size)
        else:
            costs.append(link.collective_s(kind, size, ranks, dtype))
    return tuple(costs)


def _records(
    workload: Workload, plan: BucketPlan, *, num_ranks: int, mode: Mode, step_collectives: Sequence[StepCollective]
) -> tuple[CollectiveRecord, ...]:
    """Return what a step launches, in order."""
    group_sizes = plan.num_ranks or (num_ranks,) * len(plan.buckets)
    sends = _bucket_sends(workload, plan, mode)
    of_buckets = [
        [
            CollectiveRecord(send.kind, f"{send.label} {index}", 1, size, ranks)
            for index, (size, ranks) in enumerate(zip(send.sizes_bytes, group_sizes, strict=True))
            if size
        ]
        for send in sends
    ]
    small = [
        CollectiveRecord(kind, f"step collective {index}", 1, payload_bytes, num_ranks)
        for index, (kind, payload_bytes) in enumerate(step_collectives)
    ]
    return (*of_buckets[0], *small, *(reversed(of_buckets[1]) if len(of_buckets) > 1 else ()))


def _bucket_ready_s(workload: Workload, plan: BucketPlan, *, overlaps: bool) -> list[float]:
    """Return when each bucket may go out, in seconds from the start of the last backward.

    That is after those before it, also empty ones: buckets are launched in order.
    """
    if not overlaps:
        return [workload.backward_s] * len(plan.buckets)
    ready_s = workload.ready_s
    return list(accumulate((max([ready_s[index] for index in bucket]) for bucket in plan.buckets), max))


def _gather_end_s(gather_s: Sequence[float | None]) -> list[float]:
    """Return when the gather of each bucket is complete, in seconds from the end of the optimizer."""
    ends = [0.0] * len(gather_s)
    now_s = 0.0
    for bucket in reversed(range(len(gather_s))):
        now_s += gather_s[bucket] or 0.0
        ends[bucket] = now_s
    return ends


def _first_needs(workload: Workload, plan: BucketPlan) -> list[int]:
    """Return the tensor that needs each bucket first in forward. A tensor without elements needs nothing."""
    tensors = workload.tensors
    return [min([index for index in bucket if tensors[index].numel] or bucket) for bucket in plan.buckets]


def _waiting_forward_s(workload: Workload, plan: BucketPlan, gather_s: Sequence[float | None]) -> float:
    """Return the seconds of a forward that begins together with the gathers.

    The forward ends ``rest`` after the last wait that holds it up, so it is the largest ``gathered + rest`` of any bucket, with
    the rest of the forward counted from the first tensor that needs the bucket.
    """
    total_s, needed_s = workload.forward_s, workload.needed_s
    ends = _gather_end_s(gather_s)
    waits = zip(ends, gather_s, _first_needs(workload, plan), strict=True)
    return max([total_s, *(end + (total_s - needed_s[first]) for end, cost, first in waits if cost is not None)])


# Lanes #


class _Lanes:
    """The lanes of one step, filled from left to right."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._intervals: list[Interval] = []
        self.now_s = start_s
        """Where the caller's thread is."""

    def compute(self, label: str, seconds: float) -> None:
        """Let the thread compute."""
        if seconds > 0:
            self._add(Lane.COMPUTE, label, self.now_s, self.now_s + seconds)
            self.now_s += seconds

    def send(self, label: str, start_s: float, stop_s: float) -> None:
        """Let a collective be under way."""
        self._add(Lane.COMM, label, start_s, stop_s)

    def wait(self, label: str, until_s: float) -> None:
        """Let the thread stand still until a collective is complete."""
        if until_s > self.now_s:
            self._add(Lane.WAIT, label, self.now_s, until_s)
            self.now_s = until_s

    def trace(self, step: int, records: tuple[CollectiveRecord, ...]) -> StepTrace:
        """Return what was filled in."""
        intervals = tuple(sorted(self._intervals, key=lambda part: (part.start_s, part.stop_s)))
        return StepTrace(step, 0, self._start_s, self.now_s, intervals, records)

    def _add(self, lane: Lane, label: str, start_s: float, stop_s: float) -> None:
        self._intervals.append(Interval(lane, label, start_s, stop_s))


def _run_forwards_and_backwards(lanes: _Lanes, workload: Workload, plan: BucketPlan, gather_s: Sequence[float | None]) -> None:
    """Run everything before the last backward; the first forward waits for the parameters."""
    _run_forward_with_gathers(lanes, workload, plan, gather_s)
    for _ in range(workload.num_microbatches - 1):
        lanes.compute("backward", workload.backward_s)
        lanes.compute("forward", workload.forward_s)


def _run_forward_with_gathers(lanes: _Lanes, workload: Workload, plan: BucketPlan, gather_s: Sequence[float | None]) -> None:
    start_s, needed_s = lanes.now_s, workload.needed_s
    ends = _gather_end_s(gather_s)
    begun_s = start_s
    for bucket in reversed(range(len(gather_s))):
        if gather_s[bucket] is not None:
            lanes.send(f"param gather {bucket}", begun_s, start_s + ends[bucket])
            begun_s = start_s + ends[bucket]
    # In the order in which forward first needs a bucket; a bucket is waited for once.
    needs = _first_needs(workload, plan)
    done_s = 0.0
    for index, bucket in sorted((needs[bucket], bucket) for bucket, cost in enumerate(gather_s) if cost is not None):
        if start_s + ends[bucket] > lanes.now_s + (needed_s[index] - done_s):
            lanes.compute("forward", needed_s[index] - done_s)
            done_s = needed_s[index]
            lanes.wait(f"param gather {bucket}", start_s + ends[bucket])
    lanes.compute("forward", workload.forward_s - done_s)


def _run_last_backward(lanes: _Lanes, workload: Workload, ready_s: Sequence[float], costs: _Costs) -> None:
    start_s = lanes.now_s
    lanes.compute("backward", workload.backward_s)
    free_s = start_s
    for bucket, (ready, cost) in enumerate(zip(ready_s, costs.reduce_s, strict=True)):
        if cost is not None:
            begun_s = max(free_s, start_s + ready)
            free_s = begun_s + cost
            lanes.send(f"bucket {bucket}", begun_s, free_s)
            lanes.wait(f"bucket {bucket}", free_s)
    for index, cost in enumerate(costs.extra_s):
        begun_s = lanes.now_s
        lanes.send(f"step collective {index}", begun_s, begun_s + cost)
        lanes.wait(f"step collective {index}", begun_s + cost)


def _run_gathers_at_once(lanes: _Lanes, gather_s: Sequence[float | None]) -> None:
    for bucket in reversed(range(len(gather_s))):
        cost = gather_s[bucket]
        if cost is not None:
            begun_s = lanes.now_s
            lanes.send(f"param gather {bucket}", begun_s, begun_s + cost)
            lanes.wait(f"param gather {bucket}", begun_s + cost)
