"""The communicator over a ``torch.distributed`` process group: gloo, NCCL, or any other back-end torch knows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, cast

import torch
import torch.distributed as dist

from megabucket.comm.background_reader import MOST_CALLS, BackgroundReader
from megabucket.comm.gloo_paths import alike, can_exchange_among, fp32_plan, gloo_plan, plain_plan, small_room_bytes
from megabucket.comm.heartbeat import Heartbeat
from megabucket.comm.liveness import Liveness
from megabucket.comm.peer_memory import WORD_BYTES, get_to_know
from megabucket.comm.plan import AllToAll, InBackground, Plan, Start
from megabucket.comm.port import (
    AllGather,
    AllReduce,
    Batch,
    Broadcast,
    Call,
    Communicator,
    Handle,
    LocalCommunicator,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.reading_paths import can_read, own_copies
from megabucket.comm.timing import CollectiveTimer
from megabucket.comm.torch_probes import (
    existence_of,
    flight_record,
    forget_coalescing,
    has_gloo_works,
    is_gloo,
    keep_for_ever,
    store_of,
    timeout_s_of,
)
from megabucket.comm.vigil import PeerWatch
from megabucket.comm.wires import Wires, can_meet
from megabucket.comm.work_handle import WorkHandle, uses_of
from megabucket.errors import CollectiveError, GroupDestroyedError, InvariantError, ProcessGroupMissingError
from megabucket.trace.clock import Clock
from megabucket.trace.recorder import Recorder

_REDUCE_OPS: Final = MappingProxyType(
    {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG, ReduceOp.MAX: dist.ReduceOp.MAX}
)
_JOIN_S: Final = 1.0
_PATIENCE_S: Final = 1800.0  # torch's, where a group does not say its own
_ROOM_BYTES: Final = 1 << 25  # for small all-reduces that are launched again and again, all together


def _newest(name: str, deprecated_name: str) -> Callable[..., dist.Work]:
    # torch 2.13 renamed these collectives and warns under the old names; 2.11 has only the old ones.
    return cast("Callable[..., dist.Work]", getattr(dist, name, None) or getattr(dist, deprecated_name))


_all_gather = _newest("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")


def discover_communicator(
    process_group: dist.ProcessGroup | None, recorder: Recorder | None = None, liveness: Liveness | None = None
) -> Communicator:
    """Return the communicator for a group: the given one, the default one, or a single process.

    Raises:
        ProcessGroupMissingError: a launcher started several processes but ``torch.distributed`` is not initialized.
        ConfigError: the settings of ``liveness`` and the time limit of the group are not in order.
    """
    if process_group is not None:
        return ProcessGroupCommunicator(process_group, recorder, liveness=liveness)
    if dist.is_available() and dist.is_initialized():
        return ProcessGroupCommunicator(dist.group.WORLD, recorder, liveness=liveness)
    # Read only to refuse: a forgotten init_process_group() would otherwise train replicas that never talk.
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ProcessGroupMissingError(world_size=int(launched))
    return LocalCommunicator()


class ProcessGroupCommunicator(Communicator):
    """Launches on one process group. Several of them may live in one process.

    Args:
        liveness: how the ranks watch each other over gloo; when not given, without heartbeats, so that only dead and stopped
            processes of the same host are noticed.

    Raises:
        CollectiveError: this process is not a member of the group.
        ConfigError: the settings of ``liveness`` and the time limit of the group are not in order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, recorder: Recorder | None = None, *, liveness: Liveness | None = None
    ) -> None:
        # The default group stays None: a reference of ours would keep its threads alive beyond destroy_process_group().
        self._group = None if group is dist.group.WORLD else group
        self._answers: dict[tuple[Callable[[dist.ProcessGroup, torch.device], bool], torch.device], bool] = {}
        rank = dist.get_rank(group)
        if rank < 0:
            raise CollectiveError(
                f"global rank {dist.get_rank()} is not a member of the process group it was given; wrap the module on the "
                "group's members only, or pass a group that contains this rank."
            )
        super().__init__(rank=rank, size=dist.get_world_size(group), recorder=recorder)
        living = cast("dist.ProcessGroup", group if group is not None else dist.group.WORLD)
        self._group_exists = existence_of(living)
        self.timer = CollectiveTimer()
        """Times what is launched."""
        self._room_bytes = _ROOM_BYTES
        self._heartbeat: Heartbeat | None = None
        self._watch: PeerWatch | None = None
        self._reader: BackgroundReader | None = None
        self._finish_reading: weakref.finalize[..., ProcessGroupCommunicator] | None = None
        if self.size > 1 and has_gloo_works(living, torch.device("cpu")):
            self._start_watching(living, liveness or Liveness(heartbeat_s=None, is_default=True))

    def _start_watching(self, group: dist.ProcessGroup, liveness: Liveness) -> None:
        group_timeout_s, store = timeout_s_of(group), store_of(group)
        liveness = liveness.fitted_to(group_timeout_s)
        if store is None:
            return
        name, known_group, timer, owner = str(group.group_name), weakref.ref(group), self.timer, weakref.ref(self)

        def stop_reading() -> None:
            if (communicator := owner()) is not None:
                communicator._stop_reading()

        def abandon_group() -> None:
            timer.give_up()
            if (communicator := owner()) is not None and communicator._reader is not None:
                communicator._reader.give_up()
            if (lost_group := known_group()) is not None:
                keep_for_ever(lost_group)

        self._heartbeat = Heartbeat(
            store,
            rank=self.rank,
            size=self.size,
            progress=self.progress,
            every_s=liveness.heartbeat_s,
            is_wanted=self._group_exists,
            on_unwanted=stop_reading,
        )
        self._watch = PeerWatch(
            self._heartbeat,
            liveness,
            progress=self.progress,
            group_timeout_s=group_timeout_s,
            flight_record=lambda: flight_record(name),
            on_loss=abandon_group,
        )
        # Also at the end of the program, and when a communicator is dropped without close().
        weakref.finalize(self, self._heartbeat.stop)

    def close(self) -> None:
        """End the threads of this communicator; the process group stays as it is."""
        reader = self._reader
        self._stop_reading()
        if reader is not None:
            reader.join(_JOIN_S)
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        if self._watch is not None and self._watch.finding is not None:
            raise self._watch.finding.error()
        if not self._group_exists():
            self._stop_reading()  # sockets of our own do not end with the group, and others may wait for this rank
            raise GroupDestroyedError(rank=self.rank, operation=f"{label} was launched")
        device = calls[0].full.device
        clock = self.clock_for(device) if self.recorder.records_time else None
        start = None if clock is None else clock.stamp()
        has_gloo_threads = self._ask(has_gloo_works, device)
        plan = self._plan(calls, is_anchored=has_gloo_threads)
        # A batch keeps its plan, and the plan what gloo's threads hold. Nobody keeps that of other calls.
        passing = uses_of(plan) if has_gloo_threads and not isinstance(calls, Batch) else []
        for target, source in plan.copies:
            target.copy_(source)
        works = self._start_all(plan.starts)
        if clock is not None:
            self.timer.time_completion(works, self.recorder, clock, label=label, start=start)
        watch = self._watch if has_gloo_threads else None
        return WorkHandle(works, plan, self, label, watch=watch, passing=passing)

    def _plan(self, calls: Sequence[Call], *, is_anchored: bool) -> Plan:
        plan: Plan | None = calls.plan if isinstance(calls, Batch) else None
        if plan is None:
            wide = [call for call in calls if isinstance(call, ReduceScatter) and call.in_fp32]
            rest = [call for call in calls if call not in wide]
            plan = fp32_plan(wide, rank=self.rank, size=self.size)
            if rest and self._ask(is_gloo, calls[0].full.device):
                plan += self._gloo_plan(rest, is_kept=isinstance(calls, Batch))
            elif rest:
                plan += plain_plan(rest, is_anchored=is_anchored)
            if isinstance(calls, Batch):
                calls.plan = plan
        return plan

    def _gloo_plan(self, calls: Sequence[Call], *, is_kept: bool) -> Plan:
        room_bytes = self._room_bytes if is_kept else None
        plan = gloo_plan(calls, rank=self.rank, size=self.size, room_bytes=room_bytes)
        if is_kept and isinstance(calls[0], AllReduce) and isinstance(plan.starts[0], AllToAll):
            # All ranks launch the same batches in the same order, so they run out of room at the same one.
            self._room_bytes -= small_room_bytes(calls[0], size=self.size)
        return plan

    # Reading what other ranks of this host have #

    def introduce(self, batches: Sequence[Batch]) -> None:
        """Find out with the other ranks which batches are done by reading."""
        if self.size == 1 or not can_exchange_among(self.size):
            return
        read = [batch for batch in batches if batch and can_read(batch) and len(batch) <= MOST_CALLS]
        if not read or not self._ask(is_gloo, read[0][0].full.device):
            return
        if self._reader is None and not self._start_reader():
            return
        for batch in read:
            # Not the batch itself: buffers would have to wait for the garbage collector.
            batch.plan = Plan([InBackground(tuple(batch))], own_copies(batch, rank=self.rank, size=self.size))

    def _start_reader(self) -> bool:
        """Return whether the ranks can read each other's memory; all of them get the same answer."""
        memory = get_to_know(self._tell_all, rank=self.rank)
        if memory is None or not can_meet(self._tell_all):
            return False
        group = cast("dist.ProcessGroup", self._group or dist.group.WORLD)
        wires = Wires(self._tell_all, rank=self.rank, size=self.size, timeout_s=timeout_s_of(group) or _PATIENCE_S)
        self._reader = BackgroundReader(memory, wires, rank=self.rank, size=self.size)
        self._finish_reading = weakref.finalize(self, self._reader.finish)
        self._finish_reading.atexit = False  # the reader sees to that itself
        return True

    def _stop_reading(self) -> None:
        """Have the thread end when it has done what was launched, and forget it."""
        self._reader = None
        if self._finish_reading is not None:
            self._finish_reading()

    def _tell_all(self, word: bytes) -> list[bytes]:
        """Return what each rank says, by rank: at most ``WORD_BYTES`` without zeros at the end.

        No collective of a step, so it is not recorded.
        """
        rows = torch.zeros(self.size, WORD_BYTES, dtype=torch.uint8, device="cpu")
        own = rows[self.rank].copy_(torch.frombuffer(bytearray(word.ljust(WORD_BYTES, b"\0")), dtype=torch.uint8))
        self._launch([AllGather(rows.view(-1), own)], "peer memory").wait()
        return [bytes(told.tolist()).rstrip(b"\0") for told in rows]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` stands for the default one."""
        return self._group

    def clock_for(self, device: torch.device) -> Clock:
        """Return the clock by which this group's collectives on a device are timed: its own where they run in its queue."""
        return self.timer.clock(on_device=device.type == "cuda" and not self._ask(has_gloo_works, device))

    def collect_times(self) -> None:
        """Hand intervals to the recorder that a device owed when they were measured. Never waits."""
        self.timer.collect()

    def _ask(self, question: Callable[[dist.ProcessGroup, torch.device], bool], device: torch.device) -> bool:
        """Return what holds for the group and one kind of device; torch is asked once."""
        known = self._answers.get((question, device))
        if known is None:
            group = self._group or dist.group.WORLD
            known = self._answers[question, device] = group is not None and question(group, device)
        return known

    def _start_all(self, starts: Sequence[Start]) -> list[dist.Work]:
        """Start what a plan says, as few batches: torch coalesces one kind, one reduce op and one dtype at a time."""
        if len(starts) == 1:
            return [self._start(starts[0])]
        works: list[dist.Work] = []
        coalescible: list[Call] = []
        for start in starts:
            if isinstance(start, AllToAll | InBackground) or self._is_alone(start):
                works.append(self._start(start))
            else:
                coalescible.append(start)
        for batch in alike(coalescible).values():
            works += [self._start(batch[0])] if len(batch) == 1 else self._start_coalesced(batch)
        return works

    def _is_alone(self, call: Call) -> bool:
        # A coalesced gather breaks gloo's heap, also when it is the only one: see docs/decisions/gloo-coalesced-gather.md.
        return isinstance(call, Broadcast) or (isinstance(call, AllGather) and self._ask(is_gloo, call.full.device))

    def _start(self, start: Start) -> dist.Work:
        group = self._group
        if isinstance(start, InBackground):
            return self._start_reading(start)
        if isinstance(start, AllReduce):
            work = dist.all_reduce(start.tensor, op=_REDUCE_OPS[start.op], group=group, async_op=True)
        elif isinstance(start, ReduceScatter):
            work = _reduce_scatter(start.shard, start.full, op=_REDUCE_OPS[start.op], group=group, async_op=True)
        elif isinstance(start, AllGather):
            work = _all_gather(start.full, start.shard, group=group, async_op=True)
        elif isinstance(start, Broadcast):
            work = dist.broadcast(start.tensor, group=group, group_src=start.root, async_op=True)
        else:
            sizes = start.received_sizes, start.sent_sizes
            work = dist.all_to_all_single(start.received, start.sent, *sizes, group=group, async_op=True)
        return cast("dist.Work", work)

    def _start_reading(self, start: InBackground) -> dist.Work:
        if self._reader is None:
            raise InvariantError("what a thread reads was launched after close()")
        work = self._reader.start(start)
        work.hasten()
        return cast("dist.Work", work)

    def _start_coalesced(self, calls: Sequence[Call]) -> list[dist.Work]:
        # NCCL batches what is launched between group start and end; other back-ends have *_coalesced collectives.
        device = calls[0].full.device if calls[0].full.is_cuda else None
        try:
            with dist._coalescing_manager(self._group, device=device, async_ops=True) as manager:  # type: ignore[attr-defined]
                for call in calls:
                    self._start(call)
        except BaseException:
            forget_coalescing(self._group or dist.group.WORLD)
            raise
        return list(manager.works)
