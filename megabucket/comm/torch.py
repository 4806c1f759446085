"""The communicator over a ``torch.distributed`` process group: gloo, NCCL, or any other back-end torch knows.

Over gloo a wrapper has two groups of its own, made from the given one: one for data, one for what ranks say to each other. So
no collective of the program meets one of the wrapper, and two wrappers never meet. Everything that torch does not say in public
about groups and works is asked here.
"""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from megabucket.comm.communicator import (
    Batch,
    Communicator,
    Finding,
    Handle,
    LocalCommunicator,
    Progress,
    ReduceScatter,
)
from megabucket.comm.device import Accelerator, Arrived, HostCopy
from megabucket.comm.gloo import Operation, Plan
from megabucket.comm.liveness import Heartbeat, Liveness, PeerWatch, Work, wait_slice
from megabucket.errors import (
    CollectiveError,
    ConfigError,
    ForkedProcessError,
    GroupDestroyedError,
    MegabucketError,
    ProcessGroupMissingError,
)
from megabucket.trace.clock import Clock, DeviceClock, HostClock
from megabucket.trace.recorder import CollectiveRecord, Launch, Recorder

FABRIC: Final = "megabucket_fabric"
"""Name of the emulated fabric among torch's back-ends."""

_GLOO_LIKE: Final = ("gloo", FABRIC)
_ALONE: Final = "fake"  # torch's back-end for one rank whose peers do not exist
_ROOM_BYTES: Final = 1 << 25  # for small all-reduces that are launched again and again, all together
_BACKGROUND_BYTES: Final = 1 << 23  # of a batch that a thread completes; of smaller ones the hooks of backward feel the thread
_RELEASE_S: Final = 0.2
_JOIN_S: Final = 1.0
_TIME_LIMIT_S: Final = 1800.0  # torch's, where a group does not say its own

Run = Callable[[Callable[[], bool]], dict[int, str]]
"""Does a batch, unless told that it must stop, and returns what is the matter with ranks that could not be read."""

_call: Final = operator.methodcaller("__call__")
_is_completed: Final = operator.methodcaller("is_completed")


def discover_communicator(
    process_group: dist.ProcessGroup | None,
    recorder: Recorder | None = None,
    liveness: Liveness | None = None,
    *,
    progress: Progress | None = None,
) -> Communicator:
    """Return the communicator of a wrapper for a group: the given one, the default one, or a single process.

    Over gloo it has groups of its own, so every rank of the group calls this, in the same order.

    Args:
        progress: of the wrapper, where it has several communicators; it brings the recorder.

    Raises:
        ProcessGroupMissingError: a launcher started several processes but ``torch.distributed`` is not initialized.
        ConfigError: the settings of ``liveness`` and the time limit of the group are not in order.
        MegabucketError: another rank does not come, or waits elsewhere.
    """
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return ProcessGroupCommunicator(process_group, recorder, liveness=liveness, owns_groups=True, progress=progress)
    # Read only to refuse: a forgotten init_process_group() would otherwise train replicas that never talk.
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ProcessGroupMissingError(world_size=int(launched))
    return LocalCommunicator()


def process_group_of(ranks: Any) -> Communicator | dist.ProcessGroup:
    """Return what collectives run on: a communicator, or a process group, which may be that of a device mesh.

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
    """Return the ranks that shards are cut over, and those that hold the same one: a mesh (replicate, shard) has both."""
    if isinstance(ranks, DeviceMesh) and ranks.ndim == 2:
        return ranks.get_group(1), ranks.get_group(0)
    return ranks, None


def default_group_of(num_ranks: int) -> dist.ProcessGroup | None:
    """Return the default group, if it has so many ranks."""
    is_there = dist.is_available() and dist.is_initialized() and dist.get_world_size() == num_ranks
    return dist.group.WORLD if is_there else None


def members_of(ranks: Any) -> Sequence[int]:
    """Return the ranks of the whole program in a group, in order. Raises as ``process_group_of``."""
    group = process_group_of(ranks)
    return group.members if isinstance(group, Communicator) else dist.get_process_group_ranks(group)


class _Channel(Communicator):
    """Launches on one process group.

    Args:
        link: what it shares with the other channel.
        group: ``None``: the default group, to which a reference of ours would keep its threads alive when it is destroyed.
    """

    def __init__(self, link: Link, group: dist.ProcessGroup | None) -> None:
        super().__init__(rank=link.rank, size=link.size)
        self.progress = link.progress
        self.link = link
        """What the channels share."""
        self._group = group
        self._backends: dict[str, str] = {}
        self._room_bytes = _ROOM_BYTES

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        plan = batch.plan
        if plan is None:
            plan = batch.plan = self._plan(batch, is_kept=is_kept)
        return WorkHandle(self.link, self._group, plan, record)

    def _plan(self, batch: Batch, *, is_kept: bool) -> Plan:
        backend = self._backend(batch[0].full.device)
        plan = Plan(rank=self.rank, size=self.size, is_gloo=backend in _GLOO_LIKE, is_kept=is_kept)
        plan.accelerator = Accelerator.of(batch[0].full.device)
        wide = [call for call in batch if isinstance(call, ReduceScatter) and call.in_fp32]
        rest = [call for call in batch if call not in wide]
        plan.add_in_fp32(wide)
        if rest and backend == "gloo":
            # All ranks launch the same batches in the same order, so they run out of room at the same one.
            self._room_bytes -= plan.add_for_gloo(rest, room_bytes=self._room_bytes if is_kept else None)
        elif rest:
            plan.add_plain(rest)
        return plan

    def _backend(self, device: torch.device) -> str:
        if device.type not in self._backends:
            self._backends[device.type] = backend_of(self._group or cast("dist.ProcessGroup", dist.group.WORLD), device)
        return self._backends[device.type]

    def _wait_for(self, arrived: Arrived, label: str) -> None:
        self.link.wait_for(arrived, label=label, number=self.progress.num_launched)

    def break_off(self, error: Finding) -> None:
        """Launch nothing more, and write the reason into the store of the group, where the waits of the others find it."""
        self.link.break_off(error)

    def clock_for(self, device: torch.device) -> Clock:
        """Return the clock by which this group's collectives on a device are timed: its own where they run in its queue."""
        return self.link.clock(None if self._backend(device) in _GLOO_LIKE else device)


class ProcessGroupCommunicator(_Channel):
    """The ranks of one process group. Several communicators may live in one process.

    Args:
        group: ``None``: the default group.
        liveness: how the ranks watch each other; when not given, without heartbeats, so that only dead and stopped
            processes of the same host are noticed.
        owns_groups: whether to work over groups of its own, where that is possible. Then all ranks make it together.
        progress: shared with the other communicators of a wrapper; it brings the recorder.

    Raises:
        CollectiveError: this process is not a member of the group.
        ConfigError: the settings of ``liveness`` and the time limit of the group are not in order.
        MegabucketError: another rank does not come, or waits elsewhere.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        recorder: Recorder | None = None,
        *,
        liveness: Liveness | None = None,
        owns_groups: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if dist.get_rank(group) < 0:
            raise CollectiveError(
                f"global rank {dist.get_rank()} is not a member of the process group it was given; wrap the module on the "
                "group's members only, or pass a group that contains this rank."
            )
        living = cast("dist.ProcessGroup", group if group is not None else dist.group.WORLD)
        link = Link(living, liveness, progress or Progress(given_recorders=() if recorder is None else (recorder,)))
        super().__init__(link, None if group is dist.group.WORLD else group)
        self.members = dist.get_process_group_ranks(living)
        self.process_group = self._group
        """The group it was made from, also where it works over groups of its own; ``None`` stands for the default one."""
        self._finish = weakref.finalize(self, link.close)
        if owns_groups and link.watch is not None:
            link.watch.wait_for_all_ranks("wrap")
            names = [f"{link.watch.heartbeat.name} {use}" for use in ("data", "control")]
            link.own_groups = groups_like(living, names, link.timeout_s)
            if link.own_groups:
                self._group = link.own_groups[0]
                self.control = _Channel(link, link.own_groups[1])

    def close(self) -> None:
        """End the threads and groups of this communicator; the process group it was made from stays as it is."""
        self._finish()
        for channel in (self, self.control):
            if isinstance(channel, _Channel):
                channel._group = self.process_group  # who still knows the channel does not keep the threads of its group


class Link:
    """What the channels of one communicator share: the watch over the other ranks, the thread, the count of launches."""

    def __init__(self, group: dist.ProcessGroup, liveness: Liveness | None, progress: Progress) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.progress = progress
        self._host_clock = HostClock()
        self._device_clock: DeviceClock | None = None
        self.worker = Worker(name=f"megabucket-worker-{self.rank}")
        self.numbers = itertools.count(1)
        """Numbers the launches; ``next`` is part of the one call in C that makes a launch."""
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
                progress=self.progress,
                every_s=liveness.heartbeat_s,
                is_wanted=self._exists,
                group_name=name_of(group),
            )
            self.watch = PeerWatch(heartbeat, liveness, group_timeout_s=self.timeout_s, on_loss=self._abandon)

    def clock(self, device: torch.device | None) -> Clock:
        """Return the clock of the host, or that of a device with queues, which is made when it is first asked for.

        On a host a thread of ours sees a collective complete. On a device with a queue (NCCL) all moments are events in that
        queue, so the host never waits.
        """
        accelerator = None if device is None else Accelerator.of(device)
        if accelerator is None:
            return self._host_clock
        if self._device_clock is None:
            self._device_clock = accelerator.clock()
        return self._device_clock

    def check_can_launch(self, label: str) -> None:
        """Refuse a launch where nothing can be sent any more.

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
        """Wait for a device, and look at the other ranks meanwhile.

        Args:
            number: of the launch that it may be waiting for.

        Raises:
            MegabucketError: a rank was lost, or interrupted for good.
        """
        if self.watch is None:
            arrived.wait()
        else:
            self.watch.wait([arrived], label=label, number=number)

    def break_off(self, error: Finding) -> None:
        """Launch nothing more, and let the others know why."""
        if self.watch is not None:
            self.watch.break_off(error)
        self._finding = self._finding or error

    def _abandon(self) -> None:
        self.worker.give_up()
        # The destructor of a gloo group joins threads that wait for the other ranks, up to the time limit of the group: with a
        # frozen rank, destroy_process_group() and the end of the program would take that long. See docs/decisions/liveness.md.
        given = self._given()
        kept = self.own_groups or ([given] if given is not None else [])
        is_aborted = threading.Event()
        threading.Thread(target=_lose, args=(kept, is_aborted), name="megabucket-lost-groups", daemon=True).start()
        is_aborted.wait(_JOIN_S)

    def close(self) -> None:
        """End the threads and groups. Also called when a communicator is dropped, and at the end of the program."""
        self.worker.end(_JOIN_S)
        if self.watch is not None:
            self.watch.heartbeat.stop()
        self.own_groups = []


def _lose(groups: Sequence[dist.ProcessGroup], is_aborted: threading.Event) -> None:
    """End what waits in queues of devices, and hold references that even the end of the program does not drop.

    Nothing else drops those in the frame of a daemon thread. Without the abort, every later wait of the host for a device would
    be one for a collective that never ends.
    """
    for backend in [backend for group in groups for backend in backends_of(group)]:
        if backend.name() not in _GLOO_LIKE:
            with suppress(Exception):  # not every back-end can; there is nobody to tell
                backend.abort()
    is_aborted.set()
    threading.Event().wait()


class WorkHandle(Handle):
    """One launch on a process group.

    The plan stays referenced until ``wait`` has returned: on CUDA the allocator could otherwise hand the memory of its tensors
    to other code while a collective still reads it.

    Args:
        group: ``None``: the default group.
        run: done by the thread, in place of works.
    """

    def __init__(
        self, link: Link, group: dist.ProcessGroup | None, plan: Plan, record: CollectiveRecord, *, run: Run | None = None
    ) -> None:
        self._link, self._group, self._label = link, group, record.label
        self._plan: Plan | None = plan
        self._accelerator = plan.accelerator
        self._launch: Launch | None = None
        self._job: Job | None = None
        self._run, self._unread = run, dict[int, str]()
        is_large = bool(plan.after) and record.payload_bytes >= _BACKGROUND_BYTES
        if link.progress.recorders:
            wants_time = any(recorder.records_time for recorder in link.progress.recorders)
            clock = link.clock(None if plan.is_gloo else plan.starts[0].tensors[0].device) if wants_time else None
            self._launch = Launch(record, clock, on_moment=link.progress.on_moment)
            is_large = is_large or wants_time  # the thread notes when it is done
        if plan.is_gloo and (is_large or run is not None):
            self._job = Job(self._complete_in_background)
        is_passing = plan.is_gloo and not plan.is_kept
        self._passing = [(held, use_count(held)) for start in plan.starts for held in start.tensors] if is_passing else []
        self._sent: list[Any] = []  # number of the launch, then its works: filled by one call in C
        self._completed: list[None] = []  # not empty when the operations after the works were done

    @property
    def is_started(self) -> bool:
        """Whether the batch was sent."""
        return bool(self._sent)

    def start(self) -> None:
        """Send the batch. A signal handler runs before or after the one call in C that does so, never within."""
        plan, link, launch = self._plan, self._link, self._launch
        if self._sent or plan is None:
            return
        link.check_can_launch(self._label)
        for target, source in plan.copies:
            target.copy_(source)
        group = self._group or dist.group.WORLD
        steps: list[Operation] = [partial(next, link.numbers)]
        steps += [partial(getattr(group, start.method), *start.arguments) for start in plan.starts]
        if self._job is not None:
            if link.worker.thread is None:
                link.worker.begin()
            steps.append(partial(link.worker.jobs.put, self._job))
        if launch is not None:
            launch.note("launched")
        self._sent.extend(map(_call, steps))
        link.progress.num_launched += 1
        if link.watch is not None:
            link.watch.heartbeat.num_launched = self._sent[0]
        if launch is not None:
            for recorder in link.progress.recorders:
                recorder.record_launch(launch)
            if self._job is None and launch.clock is not None:
                self._sent[-1].get_future().add_done_callback(lambda _: launch.note("done"))

    def wait(self) -> None:
        """Return when the results are there. A wait that was interrupted may be begun again and goes on where it was.

        Raises:
            PeerLostError: a rank died, froze or left without its part of the batch.
            WrapperBrokenError: a rank was interrupted with the others about to go on.
            CollectiveError: the batch was not sent.
        """
        plan, link = self._plan, self._link
        if plan is None:
            return
        if not self._sent:
            raise CollectiveError(f"[rank {link.rank}] {self._label} was not launched, so there is nothing to wait for")
        if self._launch is not None:
            self._launch.note("wait_start")
        works: Sequence[Work] = self._sent[1:] if self._job is None else (self._job,)
        if plan.is_gloo and link.watch is not None:
            link.watch.wait(works, label=self._label, number=self._sent[0])
        else:
            for work in works:
                work.wait()  # over NCCL the current stream waits; with a time limit the host would, and then end the group
        if self._unread and link.watch is not None:
            raise link.watch.lose(self._unread, label=self._label, number=self._sent[0])
        self._complete(plan)
        self._plan = None
        if self._passing:
            works, self._sent = (), self._sent[:1]  # works hold the tensors
            _await_release(self._passing)
        if self._launch is not None:
            self._launch.note("wait_stop")

    def read(self, result: torch.Tensor) -> torch.Tensor:
        """Wait, also for a device, in slices; return a result as the host may read it."""
        self.wait()
        if self._accelerator is None:
            return result
        copy = HostCopy(self._accelerator, result)
        self._link.wait_for(copy, label=self._label, number=self._sent[0])
        return copy.values

    def poll(self) -> bool:
        """Do what ``wait`` would, where the host would not have to wait. Over NCCL it never does, so nothing is gained."""
        works: Sequence[Work] = self._sent[1:] if self._job is None else (self._job,)
        if self._plan is not None and self._plan.is_gloo and all(map(_is_completed, works)):
            self.wait()
        return self._plan is None

    def _complete(self, plan: Plan) -> None:
        """Do what is left to do with the results, in one call in C: as a whole or not at all."""
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
    """Return when C++ holds the tensors as often as before the launch, or after a fifth of a second.

    Nothing else holds the tensors of calls that were not prepared, so a thread of gloo may need Python's lock to let go of
    them: see ``Plan``. It gets it here.
    """
    deadline_s = time.monotonic() + _RELEASE_S
    while any(use_count(tensor) > count for tensor, count in tensors) and time.monotonic() < deadline_s:
        time.sleep(0.0001)


# The thread that completes large batches #


class Job:
    """Something that the thread of a communicator does. It can be waited for as a work of gloo can.

    Args:
        run: called by the thread with a question whether it must stop.
    """

    def __init__(self, run: Callable[[Callable[[], bool]], None]) -> None:
        self._run: Callable[[Callable[[], bool]], None] | None = run
        self._is_done = threading.Event()
        self._failure: str | None = None

    def run(self, must_stop: Callable[[], bool]) -> None:
        """Do it. Never raises; ``wait`` does."""
        try:
            if self._run is not None:
                self._run(must_stop)
        except Exception as error:
            self._failure = str(error) or repr(error)
        self._run = None  # it leads back here
        self._is_done.set()

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._is_done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done.

        Raises:
            RuntimeError: it has failed, or ``timeout`` is over; it goes on then.
        """
        if not self._is_done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")  # gloo's text, which waits in slices look for
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True


class Worker:
    """A thread that does jobs in the order of their launch. Torch gives Python's lock away while it computes.

    The order is the same on all ranks, so jobs may wait for other ranks.
    """

    def __init__(self, *, name: str) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name = name
        self.thread: threading.Thread | None = None
        self._must_stop = threading.Event()

    def begin(self) -> None:
        """Start the thread."""
        arguments = (self.jobs, self._must_stop)
        self.thread = threading.Thread(target=_do_jobs, args=arguments, name=self._name, daemon=True)
        self.thread.start()
        # A thread that the end of the program meets in C++ aborts the process; and others may need its last jobs.
        atexit.register(self.end, _TIME_LIMIT_S)

    def give_up(self) -> None:
        """Do no more jobs: ranks are lost."""
        self._must_stop.set()

    def end(self, time_limit_s: float) -> None:
        """Have the thread end when it has done its jobs, and wait for it so long at most."""
        thread, self.thread = self.thread, None
        if thread is None or thread is threading.current_thread():
            return
        self.jobs.put(None)
        thread.join(time_limit_s)
        self._must_stop.set()
        atexit.unregister(self.end)


def _do_jobs(jobs: queue.SimpleQueue[Job | None], must_stop: threading.Event) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job.run(must_stop.is_set)
            del job


# What torch knows about groups and works, and does not say in public. Each has a harmless answer when torch has changed. #


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store a group was made with."""
    try:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None
    return store


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the back-end that tensors of a device travel over, or nothing when there is none."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # no back-end for this kind of device
        return ""


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name of a group, the same on all ranks."""
    return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the back-ends of a group, one for each kind of device."""
    return [group._get_backend(device) for device in getattr(group, "_device_types", ())]


def timeout_s_of(group: dist.ProcessGroup) -> float:
    """Return the time limit of a group's collectives, or torch's own when torch does not tell."""
    try:
        return min(float(backend.options._timeout.total_seconds()) for backend in backends_of(group))
    except (AttributeError, RuntimeError, ValueError):
        return _TIME_LIMIT_S


def existence_of(group: dist.ProcessGroup) -> Callable[[], bool]:
    """Return a function that says whether the group still exists; it does not keep the group alive.

    Another default group that was initialized since is another group.
    """
    known = weakref.ref(group)

    def exists() -> bool:
        living = known()
        return living is not None and living in dist.distributed_c10d._world.pg_map

    return exists


def groups_like(group: dist.ProcessGroup, names: Sequence[str], timeout_s: float) -> list[dist.ProcessGroup]:
    """Return gloo groups of the same ranks in the same order; none where torch does not tell how, or back-ends are not gloo.

    All ranks call it together, with the same names, which no group of theirs has had. These groups are not in torch's list of
    groups, so only their own methods can be used. Made as ``new_group`` makes them, over the store of ``group``. Its
    ``split_group`` does the same over three new connections to that store, and the constructor of each asks for the name of an
    address: where a name server loses a question, that takes 5 s, while the other ranks run into their time limit.
    """
    store = store_of(group)
    if {backend.name() for backend in backends_of(group)} != {"gloo"} or store is None:
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
    """Return how often C++ holds a tensor, all of Python being one holder."""
    count = getattr(tensor, "_use_count", None)
    return 1 if count is None else int(count())
