"""``EmulatedFabric`` and its process group: gloo moves the data, each collective takes the time of the link."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from megabucket.errors import ConfigError
from megabucket.testing.fabric.work import FabricWork, Lateness, Ledger, Machine, share_memory

Tensors = list[torch.Tensor]

# As Any: the stubs know overloads that no caller of a Python group uses, and not all that gloo has.
_ProcessGroup: Any = dist.ProcessGroup
_ProcessGroupGloo: Any = c10d.ProcessGroupGloo
_ALWAYS_MOVED_BYTES: Final = 256

FABRIC: Final = "megabucket_fabric"
"""Name of the emulated fabric as a torch back-end."""


@dataclass(frozen=True, slots=True)
class EmulatedFabric:
    """A network of one machine that takes the time of a slower one: gloo moves the data, an alpha-beta link delays it.

    ``n`` ranks, ``S`` bytes of the full buffer: an all-reduce takes ``2 (n-1) latency + 2 S (n-1)/n / bandwidth`` from the
    moment the last rank has launched it and the link of every member is free; every other collective half of that. An
    all-to-all takes ``(n-1) latency + S / bandwidth``, with ``S`` the most bytes that a rank sends to others. A rank that waits
    sleeps.

    Args:
        latency_s: of each step, seconds; 0 or more.
        bytes_per_s: from each rank to the next; more than 0.
        moves_data: ``False``: only the time of reductions and broadcasts passes, and of gathers into memory that was gathered
            into before, for floating-point tensors over 256 bytes. Overlap can then be measured without the CPU time of
            communication. The results are wrong: each rank keeps its own numbers.

    Raises:
        ConfigError: a value is out of range.
    """

    latency_s: float
    bytes_per_s: float
    moves_data: bool = True

    def __post_init__(self) -> None:
        if not (_is_number(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(f"EmulatedFabric: latency_s must be a finite number >= 0, got {self.latency_s!r}")
        if not (_is_number(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ConfigError(f"EmulatedFabric: bytes_per_s must be a finite number > 0, got {self.bytes_per_s!r}")

    def init_process_group(self, **arguments: Any) -> None:
        """Call ``torch.distributed.init_process_group`` with this fabric as the back-end; under torchrun without arguments."""
        dist.init_process_group(self.register(), pg_options=self, **arguments)

    def register(self) -> str:
        """Register the back-end and return its name, for programs that make their groups themselves.

        ``init_process_group(name)`` takes the settings of the fabric that was registered last, or those given as
        ``pg_options``. Groups made by ``new_group`` afterwards take those of the default group.
        """
        plugin = dist.Backend._plugins.get(FABRIC.upper())
        if plugin is None:
            dist.Backend.register_backend(FABRIC, _Creator(self), extended_api=True, devices=["cpu"])
        elif isinstance(plugin.creator_fn, _Creator):
            plugin.creator_fn.fabric = self
        else:
            raise ConfigError(f"torch knows another back-end called {FABRIC!r}; the emulated fabric cannot be registered")
        return FABRIC

    def collective_s(self, *, ring_passes: int, payload_bytes: int, num_ranks: int) -> float:
        """Return how long a collective, or a coalesced batch of them, takes on free links.

        Args:
            ring_passes: how often the buffer goes round the ring: 2 for an all-reduce and a barrier, else 1.
            payload_bytes: of the full buffers, as all ranks together see them.

        >>> EmulatedFabric(1e-4, 1e9).collective_s(ring_passes=2, payload_bytes=4_000_000, num_ranks=4)  # 6 steps, 6 MB
        0.0066
        """
        wire_bytes = payload_bytes * (num_ranks - 1) / num_ranks
        return ring_passes * ((num_ranks - 1) * self.latency_s + wire_bytes / self.bytes_per_s)

    def all_to_all_s(self, *, sent_bytes: int, num_ranks: int) -> float:
        """Return how long an all-to-all takes on free links, for a rank that sends so many bytes to others."""
        return (num_ranks - 1) * self.latency_s + sent_bytes / self.bytes_per_s

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether the data of a tensor is moved: always, or when it controls the program more than it fills the wire."""
        return self.moves_data or not tensor.is_floating_point() or tensor.nbytes <= _ALWAYS_MOVED_BYTES


class FabricGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group on the emulated fabric. Made by torch: see ``EmulatedFabric``.

    Works can be waited for by two threads. Gloo's own reduce-scatter copies its result inside of each ``wait``, so a second
    waiter would write over what the first has begun to use; and both it and the gather go through temporaries. So a gather is
    one broadcast of each shard here, in place, and a reduce-scatter an all-reduce of the input; or of a copy of it, if the
    output is not a part of it.

    Args:
        options: of torch: store, rank, size, time limit, ranks, name.
        machine: that of the default group if it is on a fabric as well.
    """

    waits_like_gloo = True
    """Read by ``comm/torch.py``: its works can be waited for in slices."""

    def __init__(self, fabric: EmulatedFabric, options: Any, *, machine: Machine | None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.fabric = fabric
        self._rank, self._size = rank, size
        # A group may have had the same name and store before, and its old keys must not be read.
        store = c10d.PrefixStore(str(options.store.add(f"groups/{rank}", 1)), options.store)
        members = options.global_ranks_in_group if machine is not None else None
        self._owns_machine = machine is None
        if machine is None:
            links = share_memory(c10d.PrefixStore("links", store), rank=rank, size=size, num_bytes=8 * size)
            machine = Machine(links, size, rank=rank)
            # Also when the program ends without destroying the group.
            weakref.finalize(self, machine.nic.stop)
        self.machine = machine
        slots = share_memory(c10d.PrefixStore("ledger", store), rank=rank, size=size, num_bytes=Ledger.NUM_BYTES)
        self._ledger = Ledger(slots, machine, members or range(size))
        self.timeout_s, self.lateness = options.timeout.total_seconds(), Lateness()
        self._gloo = _ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, timeout=options.timeout)
        # In the group that torch sees behind the methods here: its flight recorder asks there, from 2.15 on.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._filled: dict[tuple[int, int, int], StorageWeakRef] = {}
        self._launching = threading.RLock()

    # The interface of a process group #

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the back-end."""
        return FABRIC

    name = getBackendName

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
        """End the thread; called by ``destroy_process_group``."""
        if self._owns_machine:
            self.machine.nic.stop()

    # Collectives #

    def allreduce(self, tensors: Tensors, *opts: Any) -> dist.Work:
        """Reduce to all ranks, in place."""
        return self._launch(2, tensors, lambda: self._gloo.allreduce(tensors, *opts))

    def allreduce_coalesced(self, tensors: Tensors, *opts: Any) -> dist.Work:
        """Reduce several tensors to all ranks as one batch."""
        return self._launch(2, tensors, lambda: self._gloo.allreduce_coalesced(tensors, *opts))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, *opts: Any) -> dist.Work:  # noqa: ARG002
        """Gather the inputs of all ranks in the outputs, one after the other, as one batch."""
        return self._start(1, outputs, lambda: self._gather(outputs, inputs), outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> dist.Work:  # noqa: A002, ARG002
        """Gather the input of all ranks in the output."""
        return self.all_gather_single_coalesced([output], [input])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, *opts: Any) -> dist.Work:
        """Reduce the inputs; each output receives this rank's part. One batch."""
        op = opts[0].reduceOp if opts else dist.ReduceOp.SUM
        moves = any(self.fabric.moves(tensor) for tensor in inputs)
        buffers: Tensors = []

        def start() -> list[dist.Work]:
            buffers.extend(_reducible(full, output, moves=moves) for full, output in zip(inputs, outputs, strict=True))
            return [self._gloo.allreduce([buffer], _reduction(op)) for buffer in buffers if moves and buffer.numel()]

        def finish() -> None:
            for output, buffer in zip(outputs, buffers, strict=True):
                part = self._parts(buffer)[self._rank]
                if output.data_ptr() != part.data_ptr():
                    output.detach().view(-1).copy_(part)

        return self._start(1, inputs, start, outputs, finish)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, *opts: Any) -> dist.Work:  # noqa: A002
        """Reduce the input; the output receives this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [input], *opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, *opts: Any) -> dist.Work:
        """Gather the inputs of all ranks in lists."""
        return self._launch(1, _flat(outputs), lambda: self._gloo.allgather(outputs, inputs, *opts), outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, *opts: Any) -> dist.Work:
        """Gather several inputs of all ranks in lists, one list for each rank."""
        return self._launch(1, _flat(outputs), lambda: self._gloo.allgather_coalesced(outputs, inputs, *opts), outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], *opts: Any) -> dist.Work:
        """Reduce lists of parts; each output receives this rank's part."""
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, *opts)

    def broadcast(self, tensors: Tensors, *opts: Any) -> dist.Work:
        """Copy the tensors of one rank to all."""
        return self._launch(1, tensors, lambda: self._gloo.broadcast(tensors, *opts))

    def reduce(self, tensors: Tensors, *opts: Any) -> dist.Work:
        """Reduce to one rank."""
        return self._launch(1, tensors, lambda: self._gloo.reduce(tensors, *opts))

    def gather(self, outputs: list[Tensors], inputs: Tensors, *opts: Any) -> dist.Work:
        """Gather the inputs of all ranks on one."""
        return self._launch(1, inputs * self._size, lambda: self._gloo.gather(outputs, inputs, *opts), outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], *opts: Any) -> dist.Work:
        """Send each rank its part of one rank's tensors."""
        return self._launch(1, outputs * self._size, lambda: self._gloo.scatter(outputs, inputs, *opts), outputs)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, *sizes_and_opts: Any) -> dist.Work:  # noqa: A002
        """Send each rank a part of the input."""
        sent_numels = sizes_and_opts[1] if len(sizes_and_opts) > 1 else []
        # Without sizes all parts are equal. Sizes count in the first dimension.
        own_fraction = sent_numels[self._rank] / max(len(input), 1) if sent_numels else 1 / self._size
        sent_bytes = round(input.nbytes * (1 - own_fraction))
        duration_s = self.fabric.all_to_all_s(sent_bytes=sent_bytes, num_ranks=self._size)
        return self._begin(duration_s, lambda: [self._gloo.alltoall_base(output, input, *sizes_and_opts)], [output])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks: the time of an all-reduce without bytes."""
        return self._start(2, [], lambda: [self._gloo.barrier(opts or c10d.BarrierOptions())], [])

    # torch 2.11 has these names only.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _refuse(self, *_: Any, **__: Any) -> Any:
        # Otherwise torch would use plain gloo, past the link.
        raise RuntimeError("the emulated fabric has no messages and no split_group: use collectives, and dist.new_group()")

    send = recv = recv_anysource = split_group = _refuse

    # Launching #

    def _launch(
        self, ring_passes: int, tensors: Tensors, start: Callable[[], dist.Work], outputs: Sequence[Any] | None = None
    ) -> dist.Work:
        """Launch a collective that gloo does as it is.

        Args:
            tensors: the full buffer.
            outputs: memory that is filled and may hold anything before, so its data is moved in any case; ``None``: the
                collective works in place.
        """
        moves = outputs is not None or any(self.fabric.moves(tensor) for tensor in tensors)
        result = tensors if outputs is None else outputs
        return self._start(ring_passes, tensors, lambda: [start()] if moves else [], result)

    def _start(
        self,
        ring_passes: int,
        tensors: Tensors,
        start: Callable[[], Sequence[dist.Work]],
        result: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        duration_s = self.fabric.collective_s(ring_passes=ring_passes, payload_bytes=num_bytes, num_ranks=self._size)
        return self._begin(duration_s, start, result, finish)

    def _begin(
        self,
        duration_s: float,
        start: Callable[[], Sequence[dist.Work]],
        result: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        launch_s = time.monotonic()
        with self._launching:  # data and times of two threads must not be launched in two orders
            works = start()
            slot = self._ledger.launch(launch_s, duration_s)
        return FabricWork(self, slot, duration_s=duration_s, works=works, result=result, finish=finish)

    def _gather(self, outputs: Tensors, inputs: Tensors) -> list[dist.Work]:
        """Broadcast each rank's shard, unless only time passes and the memory holds other ranks' shards already."""
        moves = any(self.fabric.moves(tensor) for tensor in inputs)
        works: list[dist.Work] = []
        for output, own in zip(outputs, inputs, strict=True):
            is_filled = not moves and self._remember(output)
            parts = self._parts(output)
            if parts[self._rank].data_ptr() != own.data_ptr():
                parts[self._rank].copy_(own.detach().reshape(-1))
            if not is_filled and output.numel():
                works += [self._gloo.broadcast([part.view(torch.uint8)], _root(rank)) for rank, part in enumerate(parts)]
        return works

    def _parts(self, full: torch.Tensor) -> list[torch.Tensor]:
        flat = full.detach().view(-1)
        return list(flat.chunk(self._size)) if flat.numel() else [flat] * self._size

    def _remember(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor was gathered into before.

        Ranks run the same program, so they all give the same answers: a storage is known while it lives, wherever it lies.
        """
        self._filled = {key: storage for key, storage in self._filled.items() if not storage.expired()}
        reference = StorageWeakRef(tensor.untyped_storage())
        # A weak reference keeps its address from being given to another storage, so an equal address is the same storage.
        key = (int(reference.cdata), int(tensor.storage_offset()), tensor.nbytes)
        is_known = key in self._filled
        self._filled.setdefault(key, reference)
        return is_known


def _reducible(full: torch.Tensor, output: torch.Tensor, *, moves: bool) -> torch.Tensor:
    """Return the buffer to reduce: the caller's if the output lies in it, else a copy."""
    flat = full.detach().reshape(-1)
    is_in_place = flat.data_ptr() <= output.data_ptr() < flat.data_ptr() + flat.nbytes
    return flat if is_in_place or not moves else flat.clone()


def _reduction(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


def _root(rank: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options


def _flat(rows: Sequence[Tensors]) -> Tensors:
    return [tensor for row in rows for tensor in row]


class _Creator:
    """Makes groups when torch asks; torch's registry of back-ends keeps it, and with it the settings."""

    def __init__(self, fabric: EmulatedFabric) -> None:
        self.fabric = fabric

    def __call__(self, options: Any, pg_options: Any) -> FabricGroup:
        world = dist.group.WORLD
        parent = world if isinstance(world, FabricGroup) else None
        if pg_options is None:
            pg_options = parent.fabric if parent is not None else self.fabric
        if not isinstance(pg_options, EmulatedFabric):
            raise ConfigError(f"pg_options of a group on the emulated fabric must be an EmulatedFabric, got {pg_options!r}")
        return FabricGroup(pg_options, options, machine=parent.machine if parent is not None else None)


def fabric_lateness(group: dist.ProcessGroup | None = None) -> Lateness:
    """Return how late operations of a group completed on this rank since the last call, and reset the counts.

    Raises:
        ConfigError: the group is not on an emulated fabric.
    """
    real = group if group is not None else dist.group.WORLD
    if not isinstance(real, FabricGroup):
        raise ConfigError(f"the group is no emulated fabric, so it has no lateness: {real!r}")
    taken, real.lateness = real.lateness, Lateness()
    return taken


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
