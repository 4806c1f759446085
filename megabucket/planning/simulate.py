"""The timing model: one rank's steps as events on a compute lane and a serial communication lane. Pure arithmetic, no torch.

::

    compute  |-- forward --|----- backward ------|  wait |fence| optimizer |-- forward, waiting where it must --|
    comm                       |b 0|  |  b 1  |b 2      ||     |           | gather 2 | gather 1 |g 0|

A bucket is ready when the last of its gradients is; buckets go out in order, one after the other. The small collectives of a
step (the fence, the gradient norm) follow the last bucket, then the optimizer runs. In reduce-scatter mode the updated
parameters are gathered in reverse bucket order, either at once or while the next forward runs; a tensor's forward waits for
the gather of its bucket. With several instances (``ReplicatedLink``) the all-reduce of a bucket over replicas follows its
reduce-scatter on the same lane. A bucket without bytes sends nothing, a tensor without elements waits for nothing. All ranks
are alike, so no rank waits for a slower one.

With ``HostCosts`` a step also pays for every bucket on the thread that computes (test and scale the gradients, launch, take
the result over), and a thread that waits goes on a little late. ``megabucket.measure.host`` measures them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Final, TypeAlias

from typing_extensions import Required, TypedDict, Unpack

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import Link, ReplicatedLink
from megabucket.planning.workload import Workload
from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepTrace
from megabucket.units import FENCE_BYTES

StepCollective: TypeAlias = tuple[CollectiveKind, int]
"""Operation and bytes of one small collective after the buckets."""

FENCE: Final[StepCollective] = (CollectiveKind.ALL_REDUCE, FENCE_BYTES)
"""The collective of the wrapper's step protocol."""

GRAD_NORM: Final[StepCollective] = (CollectiveKind.ALL_REDUCE, 8)
"""What ``DistributedOptimizer`` adds in reduce-scatter mode: one float64."""


class Mode(str, enum.Enum):
    """How gradients travel."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"

    @classmethod
    def of(cls, ddp: DistributedDataParallelConfig) -> Mode:
        """Return how a config sends gradients."""
        return cls.REDUCE_SCATTER if ddp.use_distributed_optimizer else cls.ALL_REDUCE

    @property
    def reduce_kind(self) -> CollectiveKind:
        """The collective of a bucket of gradients."""
        return CollectiveKind.ALL_REDUCE if self is Mode.ALL_REDUCE else CollectiveKind.REDUCE_SCATTER


class SyncOptions(TypedDict, total=False):
    """How gradients and parameters travel."""

    num_ranks: Required[int]
    """Ranks of the data-parallel group."""
    mode: Required[Mode]
    """All-reduce, or reduce-scatter with a gather of the parameters."""
    overlap_grad_reduce: bool
    """Whether a bucket goes out when it is ready (default), or all of them after backward."""
    overlap_param_gather: bool
    """Whether parameters are gathered during the next forward (default: no). Says nothing in all-reduce mode."""


class StepOptions(SyncOptions, total=False):
    """What decides how long a step takes, besides workload, plan and link."""

    step_collectives: Sequence[StepCollective]
    """What follows the buckets in every step (default: nothing), for example ``FENCE``; each waits for the one before it."""
    owner_update_s: float
    """Seconds of the busiest owner's update of whole tensors (default: none), after the rest of the optimizer."""
    host: HostCosts | None
    """The costs of the host; nothing when not given."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host, besides the compute of the model and the collectives of the link.

    Attributes:
        launch_s: to hand one bucket to its collective, on the thread that runs backward.
        launch_s_per_byte: for each byte of gradients in it: the test for nan and inf, the scaling.
        finish_s: to take over one reduced bucket.
        update_s: of each bucket in the optimizer's step: its shard, the launch of its gather.
        gather_finish_s: to take over one gathered bucket.
        wake_s: from the end of a collective to the moment a thread that waits for it goes on.
        step_collective_s: of each small collective of a step (fence, norm) beyond the link.
    """

    launch_s: float = 0.0
    launch_s_per_byte: float = 0.0
    finish_s: float = 0.0
    update_s: float = 0.0
    gather_finish_s: float = 0.0
    wake_s: float = 0.0
    step_collective_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)

    def times(self, factor: float) -> HostCosts:
        """Return the costs on a host that is slower by a factor."""
        return HostCosts(**{name: value * factor for name, value in self.to_dict().items()})


def simulate_step_s(workload: Workload, plan: BucketPlan, link: Link, **options: Unpack[StepOptions]) -> float:
    """Return the seconds from the start of a forward to the start of the next, in the steady state.

    Raises:
        ConfigError: the plan is not one of this workload, or the link does not know the cost of a collective.
    """
    walk = _Walk(workload, plan, link, **options)
    walk.step(finds_gathers=True)
    return walk.now_s


def simulate_steps(
    workload: Workload, plan: BucketPlan, link: Link, *, num_steps: int = 2, **options: Unpack[StepOptions]
) -> tuple[StepTrace, ...]:
    """Return consecutive steps of one rank. The first finds its parameters gathered; all after it are alike.

    A step begins with its forward and ends with its optimizer, or with the gathers when they do not overlap. Overlapped
    gathers are launched in the step that updated the parameters and lie in the window of the next one, as when measured. COMM
    intervals are the time on the lane; a collective that waits for the lane begins later than its launch.

    Args:
        num_steps: at least 1; two show the steady state.

    Raises:
        ConfigError: the plan is not one of this workload, or the link does not know the cost of a collective.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ConfigError(f"num_steps={num_steps!r} must be an integer >= 1")
    walk = _Walk(workload, plan, link, **options)
    records = walk.records()
    traces = []
    for step in range(num_steps):
        start_s, walk.notes = walk.now_s, []
        walk.step(finds_gathers=step > 0)
        intervals = tuple(sorted(walk.notes, key=lambda part: (part.start_s, part.stop_s)))
        traces.append(StepTrace(step, 0, start_s, walk.now_s, intervals, records))
    return tuple(traces)


class _Walk:
    """The thread that computes and the lane of its collectives."""

    def __init__(  # noqa: PLR0913 - one argument per choice of a step, all of them named
        self,
        workload: Workload,
        plan: BucketPlan,
        link: Link,
        *,
        num_ranks: int,
        mode: Mode,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        step_collectives: Sequence[StepCollective] = (),
        owner_update_s: float = 0.0,
        host: HostCosts | None = None,
    ) -> None:
        _check_plan(workload, plan)
        if num_ranks < 1:
            raise ConfigError(f"num_ranks={num_ranks} is not a number of ranks; give 1 or more")
        self.now_s = 0.0
        """Where the thread is."""
        self.notes: list[Interval] | None = None
        """The intervals of both lanes; ``None`` records none."""
        self._workload, self._plan, self._host = workload, plan, host or HostCosts()
        self._mode, self._num_ranks = Mode(mode), num_ranks
        self._overlaps_gathers = overlap_param_gather
        count = len(plan.buckets)
        self._group_sizes = plan.num_ranks or (num_ranks,) * count
        self._grad_bytes = plan.grad_sizes_bytes(workload)
        is_sharded = self._mode is Mode.REDUCE_SCATTER
        self._param_bytes = plan.param_sizes_bytes(workload) if is_sharded else (0,) * count
        self.reduce_s = self._costs(link, self._mode.reduce_kind, self._grad_bytes, workload.grad_dtype)
        self._over_replicas_s = [0.0] * count
        self._num_instances = 1
        if isinstance(link, ReplicatedLink):
            self._num_instances = link.num_instances
            places = zip(self._grad_bytes, self._group_sizes, strict=True)
            self._over_replicas_s = [link.over_replicas_s(size / ranks, ranks, workload.grad_dtype) for size, ranks in places]
        self.gather_s = self._costs(link, CollectiveKind.ALL_GATHER, self._param_bytes, workload.param_dtype)
        self._owner_update_s = owner_update_s
        self._to_owner_bytes, self._from_owner_bytes = plan.to_owner_bytes or (), plan.from_owner_bytes or ()
        to_all = CollectiveKind.ALL_TO_ALL
        self._to_owner_s = self._costs(link, to_all, self._to_owner_bytes, workload.grad_dtype)
        self._from_owner_s = self._costs(link, to_all, self._from_owner_bytes, workload.param_dtype)
        self._step_collectives = [(*each, link.collective_s(*each, num_ranks)) for each in step_collectives]
        # A bucket goes out after those before it, also empty ones.
        ready = (max([workload.ready_s[index] for index in bucket]) for bucket in plan.buckets)
        self.ready_s = list(accumulate(ready, max)) if overlap_grad_reduce else [workload.backward_s] * count

    def _costs(self, link: Link, kind: CollectiveKind, sizes: Sequence[int], dtype: str) -> list[float | None]:
        """Return the seconds of each bucket's collective; ``None`` where it sends nothing. Many tensors are equally large."""
        cost = functools.cache(lambda size, ranks: link.collective_s(kind, size, ranks, dtype))
        return [cost(size, ranks) if size else None for size, ranks in zip(sizes, self._group_sizes[: len(sizes)], strict=True)]

    @functools.cached_property
    def first_needs(self) -> list[int]:
        """The tensor that needs each bucket first in forward. A tensor without elements needs nothing."""
        tensors = self._workload.tensors
        return [min([index for index in bucket if tensors[index].numel] or bucket) for bucket in self._plan.buckets]

    def records(self) -> tuple[CollectiveRecord, ...]:
        """Return the launches of a step, in order."""
        records, num_instances = [], self._num_instances
        for index, (size, ranks) in enumerate(zip(self._grad_bytes, self._group_sizes, strict=True)):
            if size:
                records.append(CollectiveRecord(self._mode.reduce_kind, f"bucket {index}", 1, size, ranks))
            if size and num_instances > 1:
                label = f"bucket {index} over replicas"
                records.append(CollectiveRecord(CollectiveKind.ALL_REDUCE, label, 1, size // ranks, num_instances))
        for index, (kind, size, _) in enumerate(self._step_collectives):
            records.append(CollectiveRecord(kind, f"step collective {index}", 1, size, self._num_ranks * num_instances))
        for label, sizes in (("owner exchange", self._to_owner_bytes), ("owner return", self._from_owner_bytes)):
            for index, size in enumerate(sizes):
                if size:
                    ranks = self._group_sizes[index]
                    records.append(CollectiveRecord(CollectiveKind.ALL_TO_ALL, f"{label} {index}", 1, size, ranks))
        for index in reversed(range(len(self._param_bytes))):
            size, ranks = self._param_bytes[index], self._group_sizes[index]
            if size:
                records.append(CollectiveRecord(CollectiveKind.ALL_GATHER, f"param gather {index}", 1, size, ranks))
        return tuple(records)

    def step(self, *, finds_gathers: bool) -> None:
        """Walk from the start of a forward to the start of the next.

        Args:
            finds_gathers: whether overlapped gathers of the step before are still under way.
        """
        workload, host = self._workload, self._host
        update_s = len(self._plan.buckets) * host.update_s
        has_gathers = finds_gathers and self._overlaps_gathers
        self._forward(self._gather_ends_s(self.now_s - update_s) if has_gathers else {})
        for _ in range(workload.num_microbatches - 1):
            self._compute("backward", workload.backward_s)
            self._compute("forward", workload.forward_s)
        self._last_backward()
        self._compute("optimizer", workload.optimizer_s)
        self._compute("owner update", self._owner_update_s)
        self._wait_for_all("owner return", self._exchange("owner return", self._from_owner_s, self.now_s))
        ends_s = {} if self._overlaps_gathers else self._gather_ends_s(self.now_s)
        self.now_s += update_s
        for bucket, end_s in ends_s.items():
            self._wait("param gather", bucket, end_s, host.wake_s)
            self.now_s += host.gather_finish_s

    def _forward(self, gather_ends_s: Mapping[int, float]) -> None:
        """Run a forward in which the first tensor of each bucket waits for its gather."""
        done_s = 0.0
        for index, bucket in sorted((self.first_needs[bucket], bucket) for bucket in gather_ends_s):
            needed_s = self._workload.needed_s[index]
            self._compute("forward", needed_s - done_s)
            self._wait("param gather", bucket, gather_ends_s[bucket], self._host.wake_s)
            self.now_s += self._host.gather_finish_s
            done_s = needed_s
        self._compute("forward", self._workload.forward_s - done_s)

    def _gather_ends_s(self, launched_s: float) -> dict[int, float]:
        """Return when each bucket is gathered, by index, when the launches begin at ``launched_s``; reversed launch order."""
        ends_s, free_s = {}, launched_s
        for bucket in reversed(range(len(self.gather_s))):
            launched_s += self._host.update_s
            cost_s = self.gather_s[bucket]
            if cost_s is not None:
                start_s = max(free_s, launched_s)
                free_s = ends_s[bucket] = start_s + cost_s
                self._note(Lane.COMM, "param gather", bucket, start_s, free_s)
        return ends_s

    def _last_backward(self) -> None:
        """Run the backward whose buckets go out, take them over one by one, then the small collectives."""
        host, start_s, launching_s = self._host, self.now_s, 0.0
        free_s = start_s
        ends_s = []
        for bucket, (ready_s, cost_s) in enumerate(zip(self.ready_s, self.reduce_s, strict=True)):
            launching_s += host.launch_s + host.launch_s_per_byte * self._grad_bytes[bucket]  # keeps the thread
            if cost_s is not None:
                begun_s = max(free_s, start_s + ready_s + launching_s)
                free_s = begun_s + cost_s
                over_s = self._over_replicas_s[bucket]
                self._note(Lane.COMM, "bucket", bucket, begun_s, free_s - over_s)
                if over_s:
                    self._note(Lane.COMM, f"bucket {bucket} over replicas", None, free_s - over_s, free_s)
            ends_s.append(free_s if cost_s is not None else start_s)
        self._compute("backward", self._workload.backward_s)
        self.now_s += launching_s
        launched_s = self.now_s
        for bucket, end_s in enumerate(ends_s):
            self._wait("bucket", bucket, end_s, host.wake_s)
            self.now_s += host.finish_s
        # Gradients travel to their owners once the ranks agree on the step. The norm is summed meanwhile, and follows them.
        if self._step_collectives:
            free_s = self._step_collective(0, max(free_s, launched_s))  # follows the buckets at once
        exchanged = self._exchange("owner exchange", self._to_owner_s, max(free_s, self.now_s))
        free_s = max([free_s, *exchanged.values()])
        for index in range(1, len(self._step_collectives)):
            free_s = self._step_collective(index, max(free_s, self.now_s))
        self._wait_for_all("owner exchange", exchanged)

    def _step_collective(self, index: int, begun_s: float) -> float:
        """Run a small collective to its end, and return when that was."""
        end_s = begun_s + self._step_collectives[index][2]
        self._note(Lane.COMM, "step collective", index, begun_s, end_s)
        self._wait("step collective", index, end_s, 0.0)
        self.now_s += self._host.step_collective_s
        return end_s

    def _exchange(self, label: str, costs_s: Sequence[float | None], free_s: float) -> dict[int, float]:
        """Return when each bucket's exchange ends, by index, when all are launched at ``free_s``."""
        ends_s = {}
        for bucket, cost_s in enumerate(costs_s):
            if cost_s is not None:
                begun_s, free_s = free_s, free_s + cost_s
                ends_s[bucket] = free_s
                self._note(Lane.COMM, label, bucket, begun_s, free_s)
        return ends_s

    def _wait_for_all(self, label: str, ends_s: Mapping[int, float]) -> None:
        for bucket, end_s in ends_s.items():
            self._wait(label, bucket, end_s, self._host.wake_s)

    def _compute(self, label: str, seconds: float) -> None:
        self._note(Lane.COMPUTE, label, None, self.now_s, self.now_s + seconds)
        self.now_s += seconds

    def _wait(self, label: str, index: int, until_s: float, late_s: float) -> None:
        """Let the thread stand still until a collective is complete, and wake up late."""
        if until_s > self.now_s:
            self._note(Lane.WAIT, label, index, self.now_s, until_s)
            self.now_s = until_s + late_s

    def _note(self, lane: Lane, label: str, index: int | None, start_s: float, stop_s: float) -> None:
        if self.notes is None or (lane is Lane.COMPUTE and start_s == stop_s):
            return
        last = self.notes[-1] if self.notes else None
        if index is not None:
            label = f"{label} {index}"
        elif last is not None and (last.lane, last.label, last.stop_s) == (lane, label, start_s):
            start_s = self.notes.pop().start_s  # continues the interval before it
        self.notes.append(Interval(lane, label, start_s, stop_s))


def _check_plan(workload: Workload, plan: BucketPlan) -> None:
    """Refuse a plan that does not hold every tensor of the workload once."""
    indices = [index for bucket in plan.buckets for index in bucket]
    count = len(workload.tensors)
    if len(indices) != count or set(indices) != set(range(count)):
        raise ConfigError(f"the plan does not hold each of the workload's {count} tensors once; make it from this workload")
    if not all(plan.buckets):
        raise ConfigError("the plan has a bucket without tensors; leave it out")
