"""The communicator over a ``torch.distributed`` process group: gloo, NCCL, or any other back-end of torch.

Over gloo a wrapper has two groups of its own, made from the given one: one for data, one for control messages. So collectives
of the program never meet those of a wrapper, and two wrappers never meet. All private torch calls about groups and works are in
this file.
"""

from __future__ import annotations

import atexit
import errno
import math
import operator
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from megabucket.comm.communicator import (
    AllToAll,
    Batch,
    Communicator,
    Finding,
    Handle,
    LaunchCount,
    LocalCommunicator,
    RankState,
    WrapperRanks,
)
from megabucket.comm.device import Accelerator, Arrived, HostCopy
from megabucket.comm.gloo import GlooPlan
from megabucket.comm.liveness.heartbeat import Heartbeat, report_before_wrap
from megabucket.comm.liveness.watch import Liveness, PeerWatch, Work, wait_slice
from megabucket.comm.plan import Operation, Plan, is_in_rank_order
from megabucket.errors import (
    CollectiveError,
    ConfigError,
    ForkedProcessError,
    GroupDestroyedError,
    MegabucketError,
    PeerFailedError,
    ProcessGroupMissingError,
)
from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.recorder import CollectiveRecord, Launch

_GLOO: Final = "gloo"
_ALONE: Final = "fake"  # torch's back-end for one rank without peers
_ROOM_BYTES: Final = 1 << 25  # receive memory of all prepared small all-reduces together
_BACKGROUND_BYTES: Final = 1 << 23  # least size of a batch that a thread completes: for smaller ones it would slow backward
_DESCRIPTORS_PER_RANK: Final = 5  # two gloo groups, the copies of one host, and the store where this rank is its host
_DESCRIPTORS: Final = 8  # the heartbeat's connections, listeners
_RELEASE_S: Final = 0.2
_JOIN_S: Final = 1.0
_TIME_LIMIT_S: Final = 1800.0  # torch's default, for groups that do not tell theirs

Run = Callable[[Callable[[], bool]], dict[int, str]]
"""Runs a batch, unless the argument says that it must stop; returns the problem of each rank that could not be read."""

T = TypeVar("T")

_call: Final = operator.methodcaller("__call__")
_is_completed: Final = operator.methodcaller("is_completed")


def discover_communicator(
    process_group: dist.ProcessGroup | None, liveness: Liveness | None = None, *, state: RankState | None = None
) -> Communicator:
    """Return the communicator of a wrapper for a group: the given one, the default one, or a single process.

    Over gloo it has groups of its own, so every rank of the group calls this, in the same order.

    Args:
        state: of this rank, shared by the communicators of a wrapper; it has the recorders.

    Raises:
        ProcessGroupMissingError: a launcher started several processes but ``torch.distributed`` is not initialized.
        ConfigError: the settings of ``liveness`` do not fit the time limit of the group.
        MegabucketError: another rank does not come, or is in another call.
    """
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return ProcessGroupCommunicator(process_group, liveness=liveness, owns_groups=True, state=state)
    # Read only to refuse: without init_process_group() each process would silently train alone.
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ProcessGroupMissingError(world_size=int(launched))
    return LocalCommunicator(state)


def process_group_of(ranks: Any) -> Communicator | dist.ProcessGroup:
    """Return the communicator, or the process group, perhaps that of a device mesh, of a group of ranks.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(ranks, Communicator | dist.ProcessGroup):
        return ranks
    if isinstance(ranks, DeviceMesh) and ranks.ndim == 1:
        return ranks.get_group()
    raise ConfigError(
        "a group of ranks must be a process group, a device mesh of one dimension or a communicator, got a "
        f"{type(ranks).__name__}"
    )


def levels_of(ranks: Any) -> tuple[Any, Any]:
    """Return the ranks of the shards, and those of the replicas: a mesh (replicate, shard) has both."""
    if isinstance(ranks, DeviceMesh) and ranks.ndim == 2:
        return ranks.get_group(1), ranks.get_group(0)
    return ranks, None


def default_group_of(num_ranks: int) -> dist.ProcessGroup | None:
    """Return the default group, if it has ``num_ranks`` ranks."""
    is_there = dist.is_available() and dist.is_initialized() and dist.get_world_size() == num_ranks
    return dist.group.WORLD if is_there else None


def flattened_group(mesh: DeviceMesh, dims: Sequence[str]) -> dist.ProcessGroup | None:
    """Return the group of the ranks along the dimensions of a slice of a mesh and further ones of that mesh.

    All ranks of the whole mesh call it, with the same dimensions; the mesh keeps the group. ``None``: it lacks a dimension.
    """
    whole = mesh._get_root_mesh()
    names = whole.mesh_dim_names or ()
    wanted = tuple(name for name in names if name in (*(mesh.mesh_dim_names or ()), *dims))
    return whole[wanted]._flatten().get_group() if len(wanted) == mesh.ndim + len(dims) else None


def members_of(ranks: Any) -> Sequence[int]:
    """Return the global ranks of a group, in order. Raises as ``process_group_of``."""
    group = process_group_of(ranks)
    return group.members if isinstance(group, Communicator) else dist.get_process_group_ranks(group)


class _Channel(Communicator):
    """Launches on one process group.

    Args:
        link: shared with the other channel.
        group: ``None``: the default group. A reference to it would keep its threads alive after it is destroyed.
    """

    def __init__(self, link: RankLink, group: dist.ProcessGroup | None) -> None:
        super().__init__(rank=link.rank, size=link.size, state=link.state)
        self.launches = link.launches
        self.link = link
        """Shared by both channels."""
        self._group = group
        self._backends: dict[str, Backend] = {}  # by the type of a device
        self._room_bytes = _ROOM_BYTES

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        plan = batch.plan
        if plan is None:
            plan = batch.plan = self._plan(batch, is_kept=is_kept)
        return WorkHandle(self.link, self._group, plan, record)

    @torch.inference_mode(False)  # memory of a kept plan is used by later launches
    def _plan(self, batch: Batch, *, is_kept: bool) -> Plan:
        device = first.sent.device if isinstance(first := batch[0], AllToAll) else first.full.device
        backend = self._backend(device)
        kind = GlooPlan if backend.name == _GLOO else Plan
        plan = kind(rank=self.rank, size=self.size, waits_like_gloo=backend.waits_like_gloo, is_kept=is_kept)
        plan.accelerator = Accelerator.of(device)
        ordered = [call for call in batch if is_in_rank_order(call)]
        rest = [call for call in batch if not is_in_rank_order(call)]
        plan.add_in_rank_order(ordered)
        if rest and isinstance(plan, GlooPlan):
            # All ranks plan the same batches in the same order, so they run out of room at the same one.
            plan.room_bytes = plan.add_for_gloo(rest, room_bytes=self._room_bytes if is_kept else None)
            self._room_bytes -= plan.room_bytes
        elif rest:
            plan.add_plain(rest)
        return plan

    def forget(self, batch: Batch) -> None:
        """Drop the plan of a batch. Its receive memory counts as free again."""
        if isinstance(batch.plan, GlooPlan):
            self._room_bytes += batch.plan.room_bytes
        super().forget(batch)

    def _backend(self, device: torch.device) -> Backend:
        if device.type not in self._backends:
            self._backends[device.type] = backend_of(self._group or cast("dist.ProcessGroup", dist.group.WORLD), device)
        return self._backends[device.type]

    def _wait_for(self, arrived: Arrived, label: str) -> None:
        self.link.wait_for(arrived, label=label, number=self.launches.last)

    def break_off(self, error: Finding) -> None:
        """Launch nothing more, and write the reason into the store of the group, where the other ranks read it."""
        self.link.break_off(error)

    def clock_for(self, device: torch.device) -> Clock:
        """Return the clock for this group's collectives on a device: the device's own if they run on its streams."""
        return self.link.clock(None if self._backend(device).waits_like_gloo else device)


class ProcessGroupCommunicator(_Channel):
    """The ranks of one process group. Several communicators may live in one process.

    Args:
        group: ``None``: the default group.
        liveness: how the ranks watch each other; ``None``: without heartbeats, so only dead processes of the same host are
            noticed.
        owns_groups: whether to make groups of its own, where that is possible. Then all ranks make the communicator together.
        state: of this rank, shared by the communicators of a wrapper; it has the recorders.

    Raises:
        CollectiveError: this process is not a member of the group.
        ConfigError: the settings of ``liveness`` do not fit the time limit of the group.
        MegabucketError: another rank does not come, or is in another call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        liveness: Liveness | None = None,
        owns_groups: bool = False,
        state: RankState | None = None,
    ) -> None:
        if dist.get_rank(group) < 0:
            raise CollectiveError(
                f"global rank {dist.get_rank()} is not a member of the process group it was given; wrap the module on the "
                "group's members only, or pass a group that contains this rank."
            )
        living = cast("dist.ProcessGroup", group if group is not None else dist.group.WORLD)
        state = state or RankState()
        if owns_groups:
            _check_descriptors(living, state.ranks)
        link = RankLink(living, liveness, state)
        super().__init__(link, None if group is dist.group.WORLD else group)
        self.members = dist.get_process_group_ranks(living)
        self.process_group = self._group
        """The group it was made from, even if it has groups of its own; ``None`` means the default one."""
        self._finish = weakref.finalize(self, link.close)
        if owns_groups and link.watch is not None:
            link.watch.wait_for_all_ranks("wrap")
            names = [f"{link.watch.heartbeat.name} {use}" for use in ("data", "control")]
            try:
                link.own_groups = _watched(link.watch, lambda: groups_like(living, names, link.timeout_s), label="wrap")
            except dist.DistError as error:
                raise link.watch.report_store_failure(str(error).partition("\n")[0], label="wrap") from error
            if link.own_groups:
                self._group = link.own_groups[0]
                self.control = _Channel(link, link.own_groups[1])

    def close(self) -> None:
        """End the threads and groups of this communicator, but not the process group it was made from."""
        self._finish()
        for channel in (self, self.control):
            if isinstance(channel, _Channel):
                channel._group = self.process_group  # remaining references to the channel must not keep its group's threads


class RankLink:
    """Shared by the channels of one communicator: the watch over the other ranks, the thread, the count of launches."""

    def __init__(self, group: dist.ProcessGroup, liveness: Liveness | None, state: RankState) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.state = state
        self._host_clock = HostClock()
        self._device_clock: DeviceClock | None = None
        self.worker = Worker(name=f"megabucket-worker-{self.rank}", is_failing=partial(_is_failing, state))
        self.launches = LaunchCount()
        self.num_open = 0
        """Launches that were not waited for."""
        self.own_groups: list[dist.ProcessGroup] = []
        self.watch: PeerWatch | None = None
        self._finding: MegabucketError | None = None
        self._given, self._exists = weakref.ref(group), existence_of(group)
        self._pid = os.getpid()
        self.timeout_s = timeout_s_of(group)
        store = store_of(group)
        has_peers = any(backend.name() != _ALONE for backend in backends_of(group))
        if self.size > 1 and store is not None and has_peers:
            liveness = (liveness or Liveness(heartbeat_s=None, is_default=True)).fitted_to(self.timeout_s)
            heartbeat = Heartbeat(
                store,
                rank=self.rank,
                members=dist.get_process_group_ranks(group),
                state=state,
                launches=self.launches,
                every_s=liveness.heartbeat_s,
                is_wanted=self._exists,
                group_name=name_of(group),
            )
            self.watch = PeerWatch(heartbeat, liveness, group_timeout_s=self.timeout_s, on_loss=self._abandon)

    def clock(self, device: torch.device | None) -> Clock:
        """Return the clock of the host, or that of a device, which is made on first use.

        On a host our thread notes when a collective is complete. On a device (NCCL) all moments are events on its streams, so
        the host never waits.
        """
        accelerator = None if device is None else Accelerator.of(device)
        if accelerator is None:
            return self._host_clock
        if self._device_clock is None:
            self._device_clock = accelerator.clock()
        return self._device_clock

    def check_can_launch(self, label: str) -> None:
        """Refuse a launch if nothing more can be sent.

        Raises:
            MegabucketError: the text says why.
        """
        finding = self._finding if self.watch is None else self.watch.finding
        if finding is not None:
            raise finding.copy()
        if os.getpid() != self._pid:
            raise ForkedProcessError(rank=self.rank, operation=f"{label} was launched")
        if not self._exists():
            raise GroupDestroyedError(rank=self.rank, operation=f"{label} was launched")

    def wait_for(self, arrived: Arrived, *, label: str, number: int) -> None:
        """Wait for a device, and watch the other ranks meanwhile.

        Args:
            number: of the launch that the device may be waiting for.

        Raises:
            MegabucketError: a rank was lost or interrupted.
        """
        if self.watch is None:
            arrived.wait()
        else:
            self.watch.wait([arrived], label=label, number=number)

    def break_off(self, error: Finding) -> None:
        """Launch nothing more, and notify the other ranks."""
        if self.watch is not None:
            self.watch.break_off(error)
        self._finding = self._finding or error

    def _abandon(self) -> None:
        self.worker.give_up()
        # The destructor of a gloo group joins threads that wait for the other ranks, up to the group's time limit. With a
        # frozen rank, destroy_process_group() and the end of the program would take that long. See docs/decisions/agreement.md.
        given = self._given()
        kept = self.own_groups or ([given] if given is not None else [])
        is_aborted = threading.Event()
        threading.Thread(target=_lose, args=(kept, is_aborted), name="megabucket-lost-groups", daemon=True).start()
        is_aborted.wait(_JOIN_S)

    def close(self) -> None:
        """End the threads and groups. Also called when the communicator is collected, and at the end of the program."""
        self.worker.end(_JOIN_S)
        if self.watch is not None:
            # The destructor of a group with unfinished collectives waits for the other ranks.
            is_left = self.num_open and _is_failing(self.state)
            if is_left and self.state.failure is not None:
                self.watch.heartbeat.post(self.state.failure)  # the report may go with the connections of this process
            self.watch.heartbeat.stop(kept=self.own_groups if is_left else ())
        self.own_groups = []


def _watched(watch: PeerWatch, call: Callable[[], T], *, label: str) -> T:
    """Return the result of a call that waits for other ranks and for the store, in C++ and perhaps for ever.

    It runs in a thread, while this one looks for lost ranks. After a loss the thread stays where it waits.

    Raises:
        MegabucketError: as ``PeerWatch.wait``.
    """
    results, failures = list[T](), list[Exception]()

    def run(_: Callable[[], bool]) -> None:
        try:
            results.append(call())
        except Exception as error:
            failures.append(error)
            raise

    job = Job(run)
    threading.Thread(target=job.run, args=(bool,), name=f"megabucket-{label}", daemon=True).start()
    try:
        watch.wait([job], label=label, number=0)
    except RuntimeError as error:
        if isinstance(error, MegabucketError) or not failures:
            raise
        raise failures[0] from None  # with its own type
    return results[0]


def _is_failing(state: RankState) -> bool:
    """Return whether this rank, which ends, waits for no other: an exception ends its program, or it leaves a step half done.

    With a fence no rank completes a step without the report of this one, so nobody can use the sums that it has begun.
    """
    is_ending = sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
    return is_ending or state.failure is not None or state.progress.phase == "backward"


def _lose(groups: Sequence[dist.ProcessGroup], is_aborted: threading.Event) -> None:
    """Abort collectives on devices, and keep references to the groups that even the end of the program does not drop.

    Nothing drops the references in the frame of a daemon thread. Without the abort, every later wait of the host for a device
    would wait for a collective that never ends.
    """
    for backend in [backend for group in groups for backend in backends_of(group)]:
        if not _waits_like_gloo(backend):
            with suppress(Exception):  # not every back-end supports it
                backend.abort()
    is_aborted.set()
    threading.Event().wait()


class WorkHandle(Handle):
    """One launch on a process group.

    The plan stays referenced until ``wait`` has returned: otherwise the CUDA allocator could give the memory of its tensors to
    other code while a collective still reads it.

    Args:
        group: ``None``: the default group.
        run: called by the thread; ``None``: the plan's works do everything.
    """

    def __init__(
        self, link: RankLink, group: dist.ProcessGroup | None, plan: Plan, record: CollectiveRecord, *, run: Run | None = None
    ) -> None:
        self._link, self._group, self._label = link, group, record.label
        self._plan: Plan | None = plan
        self._accelerator = plan.accelerator
        self._launch: Launch | None = None
        self._job: Job | None = None
        self._run, self._unread = run, dict[int, str]()
        is_large = bool(plan.after) and record.payload_bytes >= _BACKGROUND_BYTES
        recorders = link.state.recorders
        if recorders.active:
            wants_time = any(recorder.records_time for recorder in recorders.active)
            clock = link.clock(None if plan.waits_like_gloo else plan.starts[0].tensors[0].device) if wants_time else None
            self._launch = Launch(record, clock, on_moment=recorders.on_moment)
            is_large = is_large or wants_time  # the thread notes the time of completion
        if plan.waits_like_gloo and (is_large or run is not None):
            self._job = Job(self._complete_in_background)
        is_transient = plan.waits_like_gloo and not plan.is_kept
        self._transient = [(held, use_count(held)) for start in plan.starts for held in start.tensors] if is_transient else []
        self._sent: list[Any] = []  # the number of the launch, then its works: filled by a single C call
        self._completed: list[None] = []  # not empty once the operations after the works are done

    @property
    def is_started(self) -> bool:
        """Whether the batch was sent."""
        return bool(self._sent)

    def start(self) -> None:
        """Send the batch in a single C call, so that signal handlers run before or after it, never within."""
        plan, link, launch = self._plan, self._link, self._launch
        if self._sent or plan is None:
            return
        link.check_can_launch(self._label)
        for target, source in plan.copies:
            target.copy_(source)
        group = self._group or dist.group.WORLD
        steps: list[Operation] = [partial(next, link.launches.numbers)]
        steps += [partial(getattr(group, start.method), *start.arguments) for start in plan.starts]
        if self._job is not None:
            if link.worker.thread is None:
                link.worker.begin()
            steps.append(partial(link.worker.jobs.put, self._job))
        if launch is not None:
            launch.note("launched")
        self._sent.extend(map(_call, steps))
        link.num_open += 1
        link.launches.last, *results = self._sent
        if launch is not None:
            for recorder in link.state.recorders.active:
                recorder.record_launch(launch)
            if self._job is None and launch.clock is not None:
                results[-1].get_future().add_done_callback(lambda _: launch.note("done"))

    def wait(self) -> None:
        """Return when the results are there. A wait that was interrupted may be repeated and continues.

        Raises:
            PeerLostError: a rank died, froze or left without launching its part of the batch.
            WrapperBrokenError: a rank was interrupted after its fence was sent.
            CollectiveError: the batch was not sent.
        """
        plan, link = self._plan, self._link
        if plan is None:
            return
        if not self._sent:
            raise CollectiveError(f"[rank {link.rank}] {self._label} was not launched, so there is nothing to wait for")
        if self._launch is not None:
            self._launch.note("wait_start")
        number, *works = self._sent
        if self._job is not None:
            works = [self._job]
        if plan.waits_like_gloo and link.watch is not None:
            link.watch.wait(works, label=self._label, number=number)
        else:
            for work in works:
                work.wait()  # over NCCL the current stream waits; with a time limit the host would wait, then abort the group
        if self._unread and link.watch is not None:
            raise link.watch.report_unreachable(self._unread, label=self._label, number=number)
        self._complete(plan)
        self._plan = None
        link.num_open -= 1
        if self._transient:
            works, self._sent = [], [number]  # works hold the tensors
            _await_release(self._transient)
        if self._launch is not None:
            self._launch.note("wait_stop")

    def read(self, result: torch.Tensor) -> torch.Tensor:
        """Wait in slices, also for a device; return a result that the host may read."""
        self.wait()
        if self._accelerator is None:
            return result
        copy = HostCopy(self._accelerator, result)
        number, *_ = self._sent
        self._link.wait_for(copy, label=self._label, number=number)
        return copy.values

    def poll(self) -> bool:
        """Finish the launch if that needs no waiting. Over NCCL it does nothing, because ``wait`` never blocks the host."""
        works: Sequence[Work] = self._sent[1:] if self._job is None else (self._job,)
        if self._plan is not None and self._plan.waits_like_gloo and all(map(_is_completed, works)):
            self.wait()
        return self._plan is None

    def has_arrived(self) -> bool:
        """Return whether all works are complete, on a device as well."""
        return bool(self._sent) and (self.poll() or (self._job is None and all(map(_is_completed, self._sent[1:]))))

    def _complete(self, plan: Plan) -> None:
        """Run the operations after the works in a single C call: as a whole or not at all."""
        if not self._completed:
            deque(map(_call, [*plan.after, partial(self._completed.append, None)]), maxlen=0)

    def _complete_in_background(self, must_stop: Callable[[], bool]) -> None:
        plan = self._plan
        if plan is None:
            return
        for work in self._sent[1 : 1 + len(plan.starts)]:
            while not wait_slice(work):
                if must_stop():
                    raise RuntimeError("Connection closed by peer")  # gloo's text
        if self._run is not None:
            self._unread = self._run(must_stop)
        self._complete(plan)
        if self._launch is not None:
            self._launch.note("done")


def _await_release(tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Return when gloo's threads have released the tensors, or after 0.2 s.

    Nothing else owns the tensors of calls that were not prepared, so a gloo thread may need the GIL to release them: see
    ``Plan``. It gets the GIL here.
    """
    deadline_s = time.monotonic() + _RELEASE_S
    while any(use_count(tensor) > count for tensor, count in tensors) and time.monotonic() < deadline_s:
        time.sleep(0.0001)


# The thread that completes large batches #


class Job:
    """A task of the communicator's thread. It can be waited for like a work of gloo.

    Args:
        run: called by the thread with a function that tells whether it must stop.
    """

    def __init__(self, run: Callable[[Callable[[], bool]], None]) -> None:
        self._run: Callable[[Callable[[], bool]], None] | None = run
        self._is_done = threading.Event()
        self._failure: str | None = None

    def run(self, must_stop: Callable[[], bool]) -> None:
        """Run the task. Never raises; ``wait`` does."""
        try:
            if self._run is not None:
                self._run(must_stop)
        except Exception as error:
            self._failure = str(error) or repr(error)
        self._run = None  # breaks a reference cycle
        self._is_done.set()

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._is_done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done.

        Raises:
            RuntimeError: it has failed, or ``timeout`` is over; then it goes on.
        """
        if not self._is_done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")  # gloo's text, which waits in slices look for
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True


class Worker:
    """A thread that runs jobs in launch order. Torch releases the GIL while it computes.

    The order is the same on all ranks, so jobs may wait for other ranks.
    """

    def __init__(self, *, name: str, is_failing: Callable[[], bool] = bool) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name, self._is_failing = name, is_failing
        self.thread: threading.Thread | None = None
        self._must_stop = threading.Event()

    def begin(self) -> None:
        """Start the thread."""
        arguments = (self.jobs, self._must_stop)
        self.thread = threading.Thread(target=_do_jobs, args=arguments, name=self._name, daemon=True)
        self.thread.start()
        # A thread that is still in C++ at the end of the program aborts the process; and other ranks may need its last jobs.
        atexit.register(self.end, _TIME_LIMIT_S)

    def give_up(self) -> None:
        """Stop running jobs, because ranks are lost."""
        self._must_stop.set()

    def end(self, time_limit_s: float) -> None:
        """Let the thread finish its jobs and end; wait for it at most ``time_limit_s``."""
        thread, self.thread = self.thread, None
        if thread is None or thread is threading.current_thread():
            return
        if self._is_failing():
            self.give_up()  # the jobs wait for other ranks
        self.jobs.put(None)
        thread.join(time_limit_s)
        self._must_stop.set()
        atexit.unregister(self.end)


def _do_jobs(jobs: queue.SimpleQueue[Job | None], must_stop: threading.Event) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job.run(must_stop.is_set)
            del job


# Private torch calls about groups and works. Each has a harmless fallback in case torch changes. #


def _check_descriptors(group: dist.ProcessGroup, ranks: WrapperRanks) -> None:
    """Refuse to make groups if this process could not open their connections: gloo would abort it.

    Raises:
        PeerFailedError: it could not; the other ranks find the same error in the store, and raise it.
    """
    store, size = store_of(group), dist.get_world_size(group)
    num_needed, num_free = _DESCRIPTORS_PER_RANK * size + _DESCRIPTORS, num_free_descriptors()
    if store is None or size == 1 or num_free >= num_needed or {one.name() for one in backends_of(group)} != {_GLOO}:
        return
    rank = dist.get_rank(group)
    cause = (
        f"it has {num_free} file descriptors left, and a wrapper of {size} ranks opens up to {num_needed}. Raise the limit "
        "(ulimit -n), close files, or detach() wrappers that are not needed"
    )
    member = ranks.number_of(dist.get_process_group_ranks(group)[rank], rank)
    finding = PeerFailedError(step=0, rank=member, phase="wrap", cause=cause)
    report_before_wrap(store, finding, rank=rank)
    raise finding


def num_free_descriptors() -> float:
    """Return how many more file descriptors this process may open; infinite where the system does not tell."""
    try:
        import resource  # only on Unix

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_taken = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except ImportError:
        return math.inf
    except OSError as error:
        return 0 if error.errno == errno.EMFILE else math.inf
    return math.inf if limit == resource.RLIM_INFINITY else limit - num_taken


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store a group was made with."""
    try:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None
    return store


class Backend(NamedTuple):
    """A back-end of torch."""

    name: str  # empty: there is none
    waits_like_gloo: bool


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """Return the back-end for tensors on a device."""
    try:
        found = group._get_backend(device)
    except RuntimeError:  # no back-end for this kind of device
        return Backend("", waits_like_gloo=False)
    return Backend(str(found.name()), _waits_like_gloo(found))


def _waits_like_gloo(backend: Any) -> bool:
    """Return whether works of a back-end block the host, and a wait that times out does them no harm.

    A back-end in Python says so by an attribute ``waits_like_gloo``.
    """
    return backend.name() == _GLOO or getattr(backend, "waits_like_gloo", False) is True


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name of a group, the same on all ranks."""
    return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the back-ends of a group, one for each kind of device."""
    return [group._get_backend(device) for device in getattr(group, "_device_types", ())]


def timeout_s_of(group: dist.ProcessGroup) -> float:
    """Return the time limit of a group's collectives, or torch's default if it is unknown."""
    try:
        return min(float(backend.options._timeout.total_seconds()) for backend in backends_of(group))
    except (AttributeError, RuntimeError, ValueError):
        return _TIME_LIMIT_S


def existence_of(group: dist.ProcessGroup) -> Callable[[], bool]:
    """Return a function that tells whether the group still exists, without keeping it alive.

    A default group that was initialized later is another group.
    """
    known = weakref.ref(group)

    def exists() -> bool:
        living = known()
        return living is not None and living in dist.distributed_c10d._world.pg_map

    return exists


def groups_like(group: dist.ProcessGroup, names: Sequence[str], timeout_s: float) -> list[dist.ProcessGroup]:
    """Return gloo groups of the same ranks in the same order; none if a back-end is not gloo, or torch has changed.

    All ranks call it together, with the same new names. The groups are not in torch's list of groups, so only their own
    methods can be used. They are made as in ``new_group``, over the store of ``group``. ``split_group`` would open three new
    connections to that store, each with a reverse name lookup: with a faulty name server that takes 5 s or more, and the other
    ranks time out.
    """
    store = store_of(group)
    if {backend.name() for backend in backends_of(group)} != {_GLOO} or store is None:
        return []
    try:
        given: Any = group._get_backend(torch.device("cpu")).options
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = given._devices, given._threads
        options._timeout = timedelta(seconds=timeout_s)
    except (AttributeError, RuntimeError):
        return []
    made, kind = [], dist.ProcessGroup.BackendType.GLOO
    for name in names:
        place = (PrefixStore(name, store), group.rank(), group.size())
        made.append(dist.ProcessGroup(*place))
        made[-1]._set_default_backend(kind)
        made[-1]._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(*place, options))
        made[-1]._set_group_name(cast("Any", name))
        made[-1]._set_group_desc(name)
    return made


def use_count(tensor: torch.Tensor) -> int:
    """Return the number of C++ references to a tensor; all of Python counts as one."""
    count = getattr(tensor, "_use_count", None)
    return 1 if count is None else int(count())
