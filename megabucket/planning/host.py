"""``predict_step_s``: the step of ``simulate_step_s`` with what the host adds to it, each part a measured number with a name.

The simulator knows what a model computes and what a link takes. A real step also pays for every bucket on the thread that
computes (test and scale the gradients, launch, take the result over), and a thread that waits goes on a little late::

    compute  |- bwd -|launch 0|- bwd -|launch 1|   wait 0 |wake|finish 0| ...  fence |+| norm |+| optimizer |bucket by bucket|
    comm                      |--- bucket 0 ----|- bucket 1 ...                                            | gather n | ...

With ``HostCosts()`` it is ``simulate_step_s`` to the rounding; a property test holds both against each other. Pure arithmetic,
no torch; ``megabucket.measure.host`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from megabucket.errors import ConfigError
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import Affine, Link
from megabucket.planning.partition import optimal_plan
from megabucket.planning.simulate import Mode, StepCollective, check_plan
from megabucket.planning.workload import Workload
from megabucket.trace import CollectiveKind

_HOST_FACTORS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host, besides what the model computes and what the link takes.

    Attributes:
        launch_s: to hand one bucket to its collective, on the thread that runs backward.
        launch_s_per_byte: for each byte of gradients in it: the test for nan and inf, the scaling.
        finish_s: to take over one reduced bucket.
        update_s: of each bucket in the optimizer's step: its shard, the launch of its gather.
        gather_finish_s: to take over one gathered bucket.
        wake_s: from the end of a collective to the moment a thread that waits for it goes on.
        step_collective_s: of each small collective of a step (fence, norm) beyond the link.

    Raises:
        ConfigError: a number is negative or not finite.
    """

    launch_s: float = 0.0
    launch_s_per_byte: float = 0.0
    finish_s: float = 0.0
    update_s: float = 0.0
    gather_finish_s: float = 0.0
    wake_s: float = 0.0
    step_collective_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"HostCosts: {field.name} must be a finite number of seconds >= 0, got {value!r}")

    def to_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)

    def times(self, factor: float) -> HostCosts:
        """Return the costs on a host that is slower by a factor."""
        return HostCosts(**{name: value * factor for name, value in self.to_dict().items()})


@dataclass(frozen=True, slots=True)
class HostedLink:
    """A link on which every collective also costs what the host spends on a bucket, for the search of optimal cuts.

    The search knows one lane; a launch that lengthens backward moves everything after it, as a longer collective would.
    """

    link: Link
    host: HostCosts

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective with those of the host."""
        return self.link.collective_s(kind, payload_bytes, num_ranks, dtype) + self._bucket_s(kind)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine | None:
        """Return the two constants where the link has them."""
        cost = self.link.affine(kind, num_ranks, dtype)
        return None if cost is None else Affine(cost[0] + self._bucket_s(kind), cost[1])

    def _bucket_s(self, kind: CollectiveKind) -> float:
        if kind is CollectiveKind.ALL_GATHER:
            return self.host.update_s + self.host.gather_finish_s
        return self.host.launch_s + self.host.finish_s


def hosted_plan(
    workload: Workload, link: Link, host: HostCosts, *, num_ranks: int, mode: Mode, overlap_param_gather: bool = False
) -> BucketPlan:
    """Return a plan with a short predicted step: the best of the optimal plans for hosts from this one to a very slow one.

    The exact search has one lane, in which a bucket's cost to the host is a longer collective. What it costs the thread that
    computes is not felt there as long as collectives are hidden, so the search alone would cut too finely. Of equally short
    steps the one with fewer buckets is returned.

    Raises:
        ConfigError: the link cannot say what a collective costs.
    """
    setting: dict[str, Any] = {"num_ranks": num_ranks, "mode": mode, "overlap_param_gather": overlap_param_gather}
    plans = []
    for factor in _HOST_FACTORS:
        plans.append(optimal_plan(workload, HostedLink(link, host.times(factor)), **setting))
        if len(plans[-1].buckets) == 1:
            break
    return min(plans, key=lambda plan: (predict_step_s(workload, plan, link, host=host, **setting), len(plan.buckets)))


def predict_step_s(  # noqa: PLR0913 - one argument per choice of a step, all of them named
    workload: Workload,
    plan: BucketPlan,
    link: Link,
    *,
    num_ranks: int,
    mode: Mode,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    step_collectives: Sequence[StepCollective] = (),
    host: HostCosts | None = None,
) -> float:
    """Return the seconds from the start of a forward to the start of the next, in the steady state.

    Args:
        host: what the host adds; nothing when not given.

    Raises:
        ConfigError: the plan is not one of this workload, or the link cannot say what a collective costs.
    """
    check_plan(workload, plan)
    walk = _Walk(workload, plan, link, num_ranks=num_ranks, mode=Mode(mode), host=host or HostCosts())
    if overlap_param_gather:
        walk.forward_with_gathers()
    else:
        walk.now_s += workload.forward_s
    walk.now_s += (workload.num_microbatches - 1) * (workload.forward_s + workload.backward_s)
    walk.last_backward(overlaps=overlap_grad_reduce)
    walk.finish(step_collectives)
    walk.now_s += workload.optimizer_s
    walk.update(waits=not overlap_param_gather)
    return walk.now_s


class _Walk:
    """The thread that computes and the lane of its collectives, from the start of a forward on."""

    def __init__(
        self, workload: Workload, plan: BucketPlan, link: Link, *, num_ranks: int, mode: Mode, host: HostCosts
    ) -> None:
        self.now_s = 0.0
        self._workload, self._plan, self._link, self._host, self._num_ranks = workload, plan, link, host, num_ranks
        self._grad_bytes = plan.grad_sizes_bytes(workload)
        self._is_sharded = mode is Mode.REDUCE_SCATTER
        reduce_kind = CollectiveKind.REDUCE_SCATTER if self._is_sharded else CollectiveKind.ALL_REDUCE
        self._reduce_s = self._costs(reduce_kind, self._grad_bytes, workload.grad_dtype)
        param_bytes = plan.param_sizes_bytes(workload) if self._is_sharded else (0,) * len(plan.buckets)
        self._gather_s = self._costs(CollectiveKind.ALL_GATHER, param_bytes, workload.param_dtype)
        self._free_s = 0.0
        self._ends_s: list[float] = []

    def _costs(self, kind: CollectiveKind, sizes: Sequence[int], dtype: str) -> list[float | None]:
        ranks = self._plan.num_ranks or (self._num_ranks,) * len(sizes)
        cost = self._link.collective_s
        return [cost(kind, size, count, dtype) if size else None for size, count in zip(sizes, ranks, strict=True)]

    def _gather_ends_s(self, start_s: float) -> dict[int, float]:
        """Return when each bucket is gathered, by index, when the launches begin at ``start_s``; reversed launch order."""
        ends, launched_s, free_s = {}, start_s, start_s
        for bucket in reversed(range(len(self._gather_s))):
            launched_s += self._host.update_s
            cost_s = self._gather_s[bucket]
            if cost_s is not None:
                free_s = ends[bucket] = max(free_s, launched_s) + cost_s
        return ends

    def forward_with_gathers(self) -> None:
        """Run the first forward, each tensor waiting for its bucket. The gathers were launched right before."""
        workload, host = self._workload, self._host
        ends_s = self._gather_ends_s(-len(self._gather_s) * host.update_s)
        bucket_of = {index: bucket for bucket, indices in enumerate(self._plan.buckets) for index in indices}
        for index, tensor in enumerate(workload.tensors):
            if tensor.numel and bucket_of[index] in ends_s:
                self._wait(ends_s.pop(bucket_of[index]))
                self.now_s += host.gather_finish_s
            self.now_s += tensor.forward_s

    def last_backward(self, *, overlaps: bool) -> None:
        """Run the backward whose buckets go out; each launch keeps the thread for a while."""
        workload, host, start_s = self._workload, self._host, self.now_s
        ready_s, launching_s, complete_s = workload.ready_s, 0.0, 0.0
        self._free_s = start_s
        for bucket, cost_s, num_bytes in zip(self._plan.buckets, self._reduce_s, self._grad_bytes, strict=True):
            own_s = max(ready_s[index] for index in bucket) if overlaps else workload.backward_s
            complete_s = max(complete_s, own_s)
            launching_s += host.launch_s + host.launch_s_per_byte * num_bytes
            if cost_s is not None:
                self._free_s = max(self._free_s, start_s + complete_s + launching_s) + cost_s
            self._ends_s.append(self._free_s if cost_s is not None else 0.0)
        self.now_s = start_s + workload.backward_s + launching_s

    def finish(self, step_collectives: Sequence[StepCollective]) -> None:
        """Take the buckets over, one by one, and then the small collectives; the first follows the buckets at once."""
        launched_s = self.now_s
        for end_s in self._ends_s:
            self._wait(end_s)
            self.now_s += self._host.finish_s
        for position, (kind, payload_bytes) in enumerate(step_collectives):
            start_s = max(self._free_s, launched_s if position == 0 else self.now_s)
            self._free_s = start_s + self._link.collective_s(kind, payload_bytes, self._num_ranks)
            self.now_s = max(self.now_s, self._free_s) + self._host.step_collective_s

    def update(self, *, waits: bool) -> None:
        """Step on the shards of all buckets, and launch their gathers."""
        ends_s = self._gather_ends_s(self.now_s)
        self.now_s += len(self._plan.buckets) * self._host.update_s
        for bucket in sorted(ends_s, reverse=True) if waits else ():
            self._wait(ends_s[bucket])
            self.now_s += self._host.gather_finish_s

    def _wait(self, until_s: float) -> None:
        if until_s > self.now_s:
            self.now_s = until_s + self._host.wake_s
