"""A process group that passes every collective on to another one and records when it is launched, complete and waited for.

It works for any wrapper: it sees launches from Python and from C++ (torch DDP's reducer), and waits for works. It cannot see a
wait for a future, which is how torch DDP waits; the caller has to note that.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepTrace
from megabucket.trace.step_trace import clip_interval

BACKEND = "megabucket_recorded"
METHODS = MappingProxyType(  # of a process group: what each launches, and which argument is the full buffer
    {
        "allreduce": (CollectiveKind.ALL_REDUCE, 0),
        "broadcast": (CollectiveKind.BROADCAST, 0),
        "all_gather_single": (CollectiveKind.ALL_GATHER, 0),
        "_allgather_base": (CollectiveKind.ALL_GATHER, 0),  # the name in torch 2.11
        "reduce_scatter_single": (CollectiveKind.REDUCE_SCATTER, 1),
        "_reduce_scatter_base": (CollectiveKind.REDUCE_SCATTER, 1),
    }
)


class Meter:
    """Records when the thread computes, when it waits, and when a collective runs; makes traces of them."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self.moments_s: list[float] = []  # the start of the first step and the end of each
        self.intervals: list[Interval] = []  # threads of torch append to it as well
        self.launches: list[tuple[float, CollectiveRecord]] = []

    def begin(self, start_s: float) -> None:
        """Begin the first step, forgetting what was noted before."""
        self.moments_s, self.intervals, self.launches = [start_s], [], []

    def end_step(self, stop_s: float) -> None:
        """End a step and begin the next one."""
        self.moments_s.append(stop_s)

    def traces(self) -> list[StepTrace]:
        """Return what the steps did; intervals are cut at the ends of steps."""
        found = []
        for number, (start_s, stop_s) in enumerate(itertools.pairwise(self.moments_s)):
            inside = [part for one in self.intervals if (part := clip_interval(one, start_s, stop_s)) is not None]
            launched = [record for moment_s, record in self.launches if start_s <= moment_s < stop_s]
            found.append(StepTrace(number, self.rank, start_s, stop_s, tuple(inside), tuple(launched)))
        return found

    def note(self, lane: Lane, label: str, start_s: float) -> None:
        self.intervals.append(Interval(lane, label, start_s, time.perf_counter()))

    @contextmanager
    def computing(self, label: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.note(Lane.COMPUTE, label, start_s)


class RecordedWork(dist.Work):
    """A work of the group below. Its completion is noted by the thread that tells it to futures."""

    def __init__(self, work: dist.Work, meter: Meter, label: str, launched_s: float) -> None:
        super().__init__()
        self.work, self.meter, self.label = work, meter, label
        work.get_future().add_done_callback(lambda _: meter.note(Lane.COMM, label, launched_s))

    def wait(self, timeout: timedelta | None = None) -> bool:
        start_s = time.perf_counter()
        try:
            return self.work.wait(timeout) if timeout else self.work.wait()
        finally:
            self.meter.note(Lane.WAIT, self.label, start_s)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.work.get_future()


class RecordedGroup(dist.ProcessGroup):
    """Made by ``record``."""

    def __init__(self, below: dist.ProcessGroup, meter: Meter, name: str) -> None:
        super().__init__(below.rank(), below.size())  # type: ignore[call-arg]  # torch's stub knows only the other constructor
        self.below, self.meter, self.own_name = below, meter, name

    def allgather(self, *args: Any) -> dist.Work:
        return self.below.allgather(*args)  # used only while models are wrapped

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a property in torch as well
        return self.own_name

    @property
    def group_desc(self) -> str:
        return self.own_name

    def _set_group_name(self, name: str) -> None:
        self.own_name = name

    def _set_group_desc(self, description: str) -> None:
        """Keep the name as the description."""

    def _get_backend(self, device: torch.device) -> Any:
        return self.below._get_backend(device)  # what holds for gloo, or for the fabric, holds here

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def shutdown(self) -> None:
        """Leave the group below to whoever made it."""


def noting(method: str) -> Callable[..., dist.Work]:
    kind, position = METHODS[method]

    def launch(group: RecordedGroup, *args: Any) -> dist.Work:
        full = args[position] if isinstance(args[position], list) else [args[position]]
        return launched(group, method, kind, sum(tensor.nbytes for tensor in full), args)

    return launch


def noting_exchange(method: str) -> Callable[..., dist.Work]:
    """Note an all-to-all as what Megabucket makes of it over gloo, a reduce-scatter, by the bytes that it sends."""

    def launch(group: RecordedGroup, output: torch.Tensor, sent: torch.Tensor, *sizes_and_options: Any) -> dist.Work:
        num_ranks, sent_sizes = group.size(), sizes_and_options[1]
        sent_bytes = sent.nbytes - sent_sizes[group.rank()] * sent.element_size()
        payload_bytes = sent_bytes * num_ranks // (num_ranks - 1)
        return launched(group, method, CollectiveKind.REDUCE_SCATTER, payload_bytes, (output, sent, *sizes_and_options))

    return launch


def launched(group: RecordedGroup, method: str, kind: CollectiveKind, payload_bytes: int, args: tuple[Any, ...]) -> dist.Work:
    launched_s = time.perf_counter()
    group.meter.launches.append((launched_s, CollectiveRecord(kind, kind.value, 1, payload_bytes, group.size())))
    work = RecordedWork(getattr(group.below, method)(*args), group.meter, kind.value, launched_s)
    # The collective is under way and the thread busy with nothing but sending it: no compute is hidden behind that.
    group.meter.note(Lane.WAIT, kind.value, launched_s)
    return work


for _method in METHODS:
    setattr(RecordedGroup, _method, noting(_method))
for _method in ("all_to_all_single", "alltoall_base"):  # the second is the name in torch 2.11
    setattr(RecordedGroup, _method, noting_exchange(_method))


def record(below: dist.ProcessGroup, meter: Meter) -> dist.ProcessGroup:
    """Return a group of all ranks that talks through ``below``, which holds all ranks as well."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    return dist.new_group(backend=BACKEND, pg_options=(below, meter))


def _create(options: Any, parts: tuple[dist.ProcessGroup, Meter]) -> RecordedGroup:
    return RecordedGroup(*parts, name=str(options.group_id))
