"""Random workloads, links and plans for the timing model, and a slow simulator to compare it with."""

from __future__ import annotations

from hypothesis import strategies as st

from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import FlatLink, MeasuredLink, RingLink
from megabucket.planning.simulate import Mode
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import CollectiveKind

TIMES = st.integers(0, 1000).map(lambda ms: max(ms - 200, 0) / 1000)  # one in six is zero
NUMELS = st.integers(0, 60).map(lambda numel: max(numel - 10, 0))


def workloads(max_tensors=7):
    """Small workloads: tensors without elements or time, any ready order, several microbatches."""

    def build(rows, rank, param_bytes, optimizer_s, num_microbatches):
        tensors = tuple(TensorWork(f"t{i}", *row) for i, row in enumerate(rows))
        order = None if rank is None else tuple(sorted(range(len(rows)), key=lambda i: (rank * (i + 3) % 11, i)))
        return Workload(
            tensors,
            param_bytes_per_element=param_bytes,
            optimizer_s=optimizer_s,
            num_microbatches=num_microbatches,
            ready_order=order,
        )

    return st.builds(
        build,
        st.lists(st.tuples(NUMELS, TIMES, TIMES), min_size=1, max_size=max_tensors),
        st.none() | st.integers(1, 10),
        st.sampled_from([2, 4]),
        TIMES,
        st.integers(1, 3),
    )


def plans(workload):
    """Any cut of the ready order into buckets."""
    count = len(workload.tensors)
    return st.lists(st.booleans(), min_size=count - 1, max_size=count - 1).map(lambda cuts: plan_of(workload, cuts))


def plan_of(workload, is_cut_after):
    buckets, bucket = [], []
    for index, cut in zip(workload.order, [*is_cut_after, True], strict=True):
        bucket.append(index)
        if cut:
            buckets.append(tuple(bucket))
            bucket = []
    return BucketPlan(tuple(buckets))


def single_plan(workload):
    """One bucket for everything."""
    return BucketPlan((workload.order,))


def flat(latency_s, seconds_per_byte):
    return FlatLink(latency_s=latency_s, seconds_per_byte=seconds_per_byte)


def ring(latency_s, bytes_per_s):
    return RingLink(latency_s=latency_s, bytes_per_s=bytes_per_s)


FLAT = st.builds(FlatLink, latency_s=TIMES, seconds_per_byte=st.integers(0, 20).map(lambda n: n / 1000))
RING = st.builds(RingLink, latency_s=TIMES, bytes_per_s=st.integers(1, 1000).map(float))
POINTS = st.lists(st.tuples(st.integers(0, 400), TIMES), min_size=2, max_size=5, unique_by=lambda point: point[0]).map(
    lambda points: tuple(sorted(points))
)
KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
MEASURED = st.tuples(POINTS, POINTS, POINTS).map(
    lambda tables: MeasuredLink.of({(kind, "float32"): table for kind, table in zip(KINDS, tables, strict=True)}, num_ranks=4)
)
AFFINE_LINKS = FLAT | RING
LINKS = AFFINE_LINKS | MEASURED

CHOICES = st.sampled_from(
    [
        {"mode": Mode.ALL_REDUCE, "overlap_grad_reduce": True},
        {"mode": Mode.ALL_REDUCE, "overlap_grad_reduce": False},
        {"mode": Mode.REDUCE_SCATTER, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"mode": Mode.REDUCE_SCATTER, "overlap_grad_reduce": True, "overlap_param_gather": False},
        {"mode": Mode.REDUCE_SCATTER, "overlap_grad_reduce": False, "overlap_param_gather": False},
    ]
)


def run_step_by_step(workload, plan, link, *, num_steps=3, **choices):
    """Return the seconds of each step: one thread that does one thing after the other, and a network card with a queue.

    Knows nothing of formulas: it visits every tensor, counts down its bucket, launches in order, waits where it must.
    """
    rank = _Rank(workload, plan, link, **choices)
    durations = []
    for _ in range(num_steps):
        began = rank.now
        for _ in range(workload.num_microbatches - 1):
            rank.forward()
            rank.now += workload.backward_s
        rank.forward()
        rank.last_backward()
        rank.finish()
        durations.append(rank.now - began)
    return durations


class _Rank:
    def __init__(self, workload, plan, link, *, num_ranks, mode, step_collectives=(), **overlap):
        self.workload, self.link, self.num_ranks, self.mode = workload, link, num_ranks, mode
        self.step_collectives, self.overlap = step_collectives, overlap
        self.buckets = plan.buckets
        self.bucket_of = {index: b for b, bucket in enumerate(plan.buckets) for index in bucket}
        self.numels = [sum(workload.tensors[i].numel for i in bucket) for bucket in plan.buckets]
        self.now = self.free = 0.0
        self.done = {}

    def launch(self, name, kind, payload_bytes, dtype):
        if payload_bytes:
            seconds = self.link.collective_s(kind, payload_bytes, self.num_ranks, dtype)
            self.free = self.done[name] = max(self.free, self.now) + seconds

    def wait(self, name):
        self.now = max(self.now, self.done.pop(name, self.now))

    def forward(self):
        for index, tensor in enumerate(self.workload.tensors):
            if tensor.numel:
                self.wait(("gather", self.bucket_of[index]))
            self.now += tensor.forward_s

    def launch_reduce(self, bucket):
        kind = CollectiveKind.ALL_REDUCE if self.mode is Mode.ALL_REDUCE else CollectiveKind.REDUCE_SCATTER
        self.launch(bucket, kind, self.numels[bucket] * self.workload.bytes_per_element, self.workload.grad_dtype)

    def last_backward(self):
        missing = [len(bucket) for bucket in self.buckets]
        turn = 0
        for index in self.workload.order:
            self.now += self.workload.tensors[index].backward_s
            missing[self.bucket_of[index]] -= 1
            while self.overlap["overlap_grad_reduce"] and turn < len(missing) and missing[turn] == 0:
                self.launch_reduce(turn)
                turn += 1
        for bucket in range(turn, len(self.buckets)):
            self.launch_reduce(bucket)

    def finish(self):
        for bucket in range(len(self.buckets)):
            self.wait(bucket)
        for kind, payload_bytes in self.step_collectives:
            self.launch("extra", kind, payload_bytes, "float32")
            self.wait("extra")
        self.now += self.workload.optimizer_s
        if self.mode is Mode.REDUCE_SCATTER:
            for bucket in reversed(range(len(self.buckets))):
                payload_bytes = self.numels[bucket] * self.workload.param_bytes_per_element
                self.launch(("gather", bucket), CollectiveKind.ALL_GATHER, payload_bytes, self.workload.param_dtype)
        if not self.overlap.get("overlap_param_gather", False):
            for name in list(self.done):
                self.wait(name)
