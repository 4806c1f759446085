"""The process group of the emulated fabric: gloo's collectives, each with the time it takes on the link."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megabucket.comm.background_reader import BackgroundReader
from megabucket.comm.gloo_paths import can_exchange_among
from megabucket.comm.peer_memory import get_to_know
from megabucket.comm.torch_probes import FABRIC
from megabucket.comm.wires import Wires, can_meet
from megabucket.testing.fabric import movement
from megabucket.testing.fabric.costs import Cost
from megabucket.testing.fabric.flight import Clock, Flight, Lateness
from megabucket.testing.fabric.ledger import Ledger, Links, ledger_words
from megabucket.testing.fabric.messages import FixedClock, receive, receive_from_any, send
from megabucket.testing.fabric.nic import Nic
from megabucket.testing.fabric.shared import share_words
from megabucket.testing.fabric.threads import hurry_this_thread
from megabucket.testing.fabric.work import BatchedWork, FabricWork

if TYPE_CHECKING:
    from megabucket.testing.fabric.settings import EmulatedFabric

Tensors = list[torch.Tensor]

# As Any: the stubs know overloads that no caller of a Python group uses, and not all that gloo has.
_ProcessGroup: Any = dist.ProcessGroup
_ProcessGroupGloo: Any = c10d.ProcessGroupGloo


@dataclass(frozen=True, slots=True)
class Machine:
    """What all groups of a process share: the links, and the thread that completes futures."""

    links: Links
    nic: Nic


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    cost: Cost
    move: Callable[[], movement.Move]
    result: Any


class FabricGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group on the emulated fabric. Made by torch: see ``EmulatedFabric``.

    Args:
        options: of torch: store, rank, size, time limit, ranks, name.
        machine: of the default group, when that is on a fabric, too.
    """

    def __init__(self, fabric: EmulatedFabric, options: Any, *, machine: Machine | None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.fabric = fabric
        self._rank, self._size = rank, size
        self._timeout_s = options.timeout.total_seconds()
        # A group may have had the same name and store before, and what it left there is not ours.
        store = c10d.PrefixStore(str(options.store.add(f"groups/{rank}", 1)), options.store)
        share = partial(share_words, rank=rank, size=size, lock_timeout_s=self._timeout_s)
        members = options.global_ranks_in_group if machine is not None else None
        self._owns_machine = machine is None
        if machine is None:
            links = Links(share(c10d.PrefixStore("links", store), num_words=size))
            machine = Machine(links, Nic(f"megabucket-nic-{rank}"))
        self.machine = machine
        self._members = tuple(members or range(size))
        words = share(c10d.PrefixStore("ledger", store), num_words=ledger_words(size))
        self._ledger = Ledger(words, machine.links, rank=rank, members=self._members, timeout_s=self._timeout_s)
        self._gloo = _ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, timeout=options.timeout)
        # In the group that torch sees behind the methods here: its flight recorder asks there, from 2.15 on.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        reading = c10d.PrefixStore("reading", store)
        self._reader = _reader(reading, rank=rank, size=size, timeout_s=self._timeout_s)
        self._mover = movement.Mover(self._gloo, self._reader, rank=rank, size=size)
        self._batch: list[_Call] | None = None
        self._batched: BatchedWork | None = None
        self._lateness = Lateness()
        self._launching = threading.RLock()
        # Also when the program ends, or nobody destroys the group.
        if self._owns_machine:
            weakref.finalize(self, machine.nic.stop)
        if self._reader is not None:
            weakref.finalize(self, self._reader.finish).atexit = False

    # What torch asks a group #

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the back-end."""
        return FABRIC

    def name(self) -> str:
        """Return the name of the back-end."""
        return FABRIC

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._size)

    def rank(self) -> int:
        """Return the rank in the group."""
        return int(self._rank)

    @property
    def options(self) -> Any:
        """Gloo's, which hold the time limit."""
        return self._gloo.options

    def _get_backend(self, device: torch.device) -> FabricGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def shutdown(self) -> None:
        """End the threads; called by ``destroy_process_group``."""
        if self._reader is not None:
            self._reader.stop()
        if self._owns_machine:
            self.machine.nic.stop()

    def take_lateness(self) -> Lateness:
        """Return what was counted since the last call."""
        taken, self._lateness = self._lateness, Lateness()
        return taken

    # Collectives #

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce to all ranks, in place."""
        opts = opts or c10d.AllreduceOptions()
        gloo = partial(self._gloo.allreduce, tensors, opts)
        if len(tensors) > 1:  # gloo adds them up, too
            return self._launch(2, tensors, lambda: [gloo()])
        return self._reduce(tensors, opts, gloo)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors to all ranks as one batch."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._reduce(tensors, opts, partial(self._gloo.allreduce_coalesced, tensors, opts))

    def _reduce(self, tensors: Tensors, opts: Any, gloo: Callable[[], dist.Work]) -> dist.Work:
        return self._launch(2, tensors, lambda: [self._mover.all_reduce(tensors, opts.reduceOp, gloo)])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:  # noqa: ARG002
        """Gather the inputs of all ranks in the outputs, one after the other, as one batch."""
        return self._submit(Cost(1, _bytes(outputs)), lambda: self._mover.gather(outputs, inputs, self._moves(inputs)), outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Gather the input of all ranks in the output."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce the inputs; each output receives this rank's part. One batch."""
        op = (opts or c10d.ReduceScatterOptions()).reduceOp
        return self._submit(
            Cost(1, _bytes(inputs)), lambda: self._mover.scatter(outputs, inputs, op, self._moves(inputs)), outputs
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        """Reduce the input; the output receives this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather the inputs of all ranks in lists."""
        opts = opts or c10d.AllgatherOptions()
        every = [tensor for row in outputs for tensor in row]
        return self._launch(1, every, lambda: [self._gloo.allgather(outputs, inputs, opts)], outputs, always=True)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several inputs of all ranks in lists, one list for each rank."""
        opts = opts or c10d.AllgatherOptions()
        every = [tensor for row in outputs for tensor in row]
        return self._launch(1, every, lambda: [self._gloo.allgather_coalesced(outputs, inputs, opts)], outputs, always=True)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Reduce lists of parts; each output receives this rank's part."""
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Copy the tensors of one rank to all."""
        opts = opts or c10d.BroadcastOptions()
        gloo = partial(self._gloo.broadcast, tensors, opts)
        return self._launch(1, tensors, lambda: [self._mover.broadcast(tensors[0], opts.rootRank, gloo)])

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce to one rank."""
        opts = opts or c10d.ReduceOptions()
        return self._launch(1, tensors, lambda: [self._gloo.reduce(tensors, opts)])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather the inputs of all ranks on one."""
        opts = opts or c10d.GatherOptions()
        return self._launch(1, inputs * self._size, lambda: [self._gloo.gather(outputs, inputs, opts)], outputs, always=True)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Send each rank its part of what one rank has."""
        opts = opts or c10d.ScatterOptions()
        return self._launch(1, outputs * self._size, lambda: [self._gloo.scatter(outputs, inputs, opts)], outputs, always=True)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send each rank a tensor of its own; gloo refuses."""
        opts = opts or c10d.AllToAllOptions()
        return self._launch(1, inputs, lambda: [self._gloo.alltoall(outputs, inputs, opts)], outputs, always=True)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_sizes: Any,
        input_sizes: Any,
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank a part of the input."""
        opts = opts or c10d.AllToAllOptions()
        sizes = (output_sizes, input_sizes)
        return self._launch(1, [input], lambda: [self._gloo.alltoall_base(output, input, *sizes, opts)], [output], always=True)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks: the time of an all-reduce without bytes."""
        opts = opts or c10d.BarrierOptions()
        return self._submit(Cost(2, 0), lambda: movement.Move([self._gloo.barrier(opts)]), [])

    # torch 2.11 has these names only.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Coalescing by device: nothing is launched before the end #

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._batch, self._batched = [], BatchedWork()

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:  # noqa: ARG002
        calls, batched = self._batch, self._batched
        self._batch = self._batched = None
        if not calls or batched is None:
            return None
        batched.launched = self._start(calls)
        return batched.launched

    # Messages #

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send one tensor to one rank."""
        launch_s = time.monotonic()
        duration_s = self.fabric.message_s(_bytes(tensors))
        done_s = self.machine.links.send(self._members[self._rank], from_s=launch_s, duration_s=duration_s)
        works = send(self._gloo, tensors, done_s, dst, tag)
        return self._fly(FixedClock(done_s), works, None, tensors, is_message=True)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive one tensor from one rank."""
        clock, works = receive(self._gloo, tensors, src, tag)
        return self._fly(clock, works, None, tensors, is_message=True, source=lambda: src)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive one tensor from whoever sends first."""
        clock, work = receive_from_any(self._gloo, tensors, tag)
        return self._fly(clock, [work], None, tensors, is_message=True, source=work.source_rank)

    # Launching #

    def _moves(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(self.fabric.moves(tensor) for tensor in tensors)

    def _launch(
        self,
        passes: int,
        tensors: Tensors,
        move: Callable[[], list[movement.Work]],
        result: Any = None,
        *,
        always: bool = False,
    ) -> dist.Work:
        """Launch what gloo does itself.

        Args:
            tensors: the full buffer.
            result: what is written; the same when not given.
            always: also without ``moves_data``: the caller's memory may hold anything before.
        """
        moves = always or self._moves(tensors)
        cost = Cost(passes, _bytes(tensors))
        return self._submit(cost, lambda: movement.Move(move() if moves else []), tensors if result is None else result)

    def _submit(self, cost: Cost, move: Callable[[], movement.Move], result: Any) -> dist.Work:
        call = _Call(cost, move, result)
        if self._batch is not None and self._batched is not None:
            self._batch.append(call)
            return self._batched
        return self._start([call])

    def _start(self, calls: Sequence[_Call]) -> dist.Work:
        launch_s = time.monotonic()
        with self._launching:  # data and times of two threads must not be launched in two orders
            moves = [call.move() for call in calls]
            duration_s = self.fabric.seconds(tuple(call.cost for call in calls), self._size)
            clock = self._ledger.launch(launch_s, duration_s) if self._size > 1 else FixedClock(launch_s)
        finishes = [move.finish for move in moves if move.finish is not None]
        finish = partial(_run_all, finishes) if finishes else None
        result = calls[0].result if len(calls) == 1 else [call.result for call in calls]
        return self._fly(clock, [work for move in moves for work in move.works], finish, result)

    def _fly(
        self,
        clock: Clock,
        works: Sequence[Any],
        finish: Callable[[], None] | None,
        result: Any,
        *,
        is_message: bool = False,
        source: Callable[[], int] | None = None,
    ) -> FabricWork:
        flight = Flight(clock, works, finish, result, self._timeout_s, self._lateness, is_message)
        return FabricWork(flight, self.machine.nic, source=source)


def _reader(store: Any, *, rank: int, size: int, timeout_s: float) -> BackgroundReader | None:
    """Return what reads for this rank, or ``None`` when ranks cannot read each other's memory. All ranks call it."""
    if size == 1 or not can_exchange_among(size):
        return None
    rounds = itertools.count()

    def tell_all(word: bytes) -> list[bytes]:
        number = next(rounds)
        store.set(f"{number}/{rank}", word.decode())
        return [bytes(store.get(f"{number}/{other}")) for other in range(size)]

    memory = get_to_know(tell_all, rank=rank)
    if memory is None or not can_meet(tell_all):
        return None
    wires = Wires(tell_all, rank=rank, size=size, timeout_s=timeout_s)
    return BackgroundReader(memory, wires, rank=rank, size=size, on_start=hurry_this_thread)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _run_all(finishes: Sequence[Callable[[], None]]) -> None:
    for finish in finishes:
        finish()
