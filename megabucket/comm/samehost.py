"""Same-host copies: a communicator that wraps that of a process group and copies between the memory of its ranks.

If all ranks of a gloo group run on one host and the kernel permits it, large data batches are not sent over sockets. A thread
of each rank reads the memory of the others (``process_vm_readv(2)``): one copy by the kernel, where a socket takes two and a
network stack. Everything else goes to the wrapped communicator.

======================  =================================================================================================
reduce-scatter          each rank reads the other ranks' values of its part, block by block, and adds them to its own
all-reduce              the same, then each rank reads the parts that the others have summed
all-gather              each rank reads the other ranks' parts into their places
======================  =================================================================================================

An all-to-all is passed on: its sizes differ between ranks, so they would not agree by themselves on what is large, nor know
where their parts begin in the memory of the others.

The bits are those of gloo's own collectives. The threads synchronize over Unix sockets: first they exchange the addresses of
the tensors of a launch, so each knows that all have launched; then, after each stage, whether the reads succeeded. A job is
done when all ranks have read, so after its own wait a rank may overwrite its memory, and no wait depends on another rank's
wait. See docs/decisions/gloo.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import torch

from megabucket.comm.communicator import (
    AllGather,
    AllReduce,
    Batch,
    BufferCall,
    Call,
    Communicator,
    ForwardingCommunicator,
    Handle,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.exchange import exchange
from megabucket.comm.gloo import can_exchange_among, places_in_sums, rank_blocks, ring_blocks
from megabucket.comm.liveness.observations import identify_this_process
from megabucket.comm.plan import Operation, Plan, additions_in_rank_order, additions_of, divisions, wide_block
from megabucket.comm.torch import ProcessGroupCommunicator, WorkHandle
from megabucket.trace.recorder import CollectiveRecord

LEAST_BYTES: Final = 1 << 20
"""Least size of a batch that is copied. A smaller gather of two ranks is slower than torch's: tests/benchmarks/gloo_cost.py."""

BLOCK_BYTES: Final = 1 << 19
"""Read at a time for additions, so that the values are still in the cache when they are added."""

_MOST_CALLS: Final = 4096  # per batch: their addresses must fit into a socket's buffer
_LONGEST_READ_BYTES: Final = 1 << 30  # the kernel's limit is a little below 2 GiB
_NONCE_BYTES: Final = 16
_SLICE_S: Final = 0.1


class SameHostCommunicator(ForwardingCommunicator):
    """Copies large batches between the processes of one host. See ``with_same_host_copies``."""

    def __init__(self, inner: ProcessGroupCommunicator, memory: PeerMemory, sockets: PeerSockets) -> None:
        super().__init__(inner)
        self.process_group = inner.process_group
        """The group the wrapper was given; ``None`` means the default one."""
        self._link, self._memory, self._sockets = inner.link, memory, sockets
        self._finish = weakref.finalize(self, sockets.close)

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        if is_kept and batch.plan is None and can_copy(batch):
            # A tuple, not the batch itself: a reference cycle would keep buffers until the garbage collector runs.
            calls = tuple(call for call in batch if isinstance(call, BufferCall))
            batch.plan = _Copies(calls, self._memory, self._sockets, rank=self.rank, size=self.size)
        copies = batch.plan
        if not isinstance(copies, _Copies):
            return self.handle_on_inner(batch, label=record.label, is_kept=is_kept)
        return WorkHandle(self._link, None, copies.plan, record, run=copies.run)

    def close(self) -> None:
        """End the thread, the sockets and the wrapped communicator."""
        super().close()
        self._finish()


def with_same_host_copies(communicator: Communicator, device: torch.device) -> Communicator:
    """Return a communicator that copies between processes if all ranks are on this host and may; otherwise the given one.

    All ranks call it, and get the same answer.

    Args:
        device: of the buffers.
    """
    if not isinstance(communicator, ProcessGroupCommunicator) or device.type != "cpu":
        return communicator
    link = communicator.link
    if not link.own_groups or not can_exchange_among(communicator.size):
        return communicator

    def send_to_all(message: bytes) -> list[bytes]:
        return exchange(communicator, message, device=device, label="same-host copies")

    memory = find_peer_memory(send_to_all, rank=communicator.rank)
    if memory is None:
        return communicator
    sockets = PeerSockets(send_to_all, rank=communicator.rank, size=communicator.size, timeout_s=link.timeout_s)
    return SameHostCommunicator(communicator, memory, sockets)


def can_copy(calls: Sequence[Call]) -> bool:
    """Return whether a batch of calls of one kind can run as copies and is large enough. The same on all ranks."""
    buffers = [call for call in calls if isinstance(call, BufferCall) and _is_readable(call)]
    is_worth_it = len(calls) <= _MOST_CALLS and sum(call.full.nbytes for call in buffers) >= LEAST_BYTES
    return is_worth_it and len(buffers) == len(calls)


def _is_readable(call: BufferCall) -> bool:
    if isinstance(call, ReduceScatter):
        return call.op is not ReduceOp.MAX and (call.in_rank_order or not call.in_fp32)
    if isinstance(call, AllReduce):
        return call.op is not ReduceOp.MAX and call.full.is_floating_point()
    return isinstance(call, AllGather)


_Action = tuple[Operation, int, int]
"""An operation, the rank that is read, and the bytes that a successful read returns; 0 for an operation that is no read."""


class _Copies:
    """Runs one batch on one rank by copying, on the thread. It is planned again if the tensors of a rank have moved."""

    def __init__(self, calls: Sequence[BufferCall], memory: PeerMemory, sockets: PeerSockets, *, rank: int, size: int) -> None:
        self._calls, self._memory, self._sockets = calls, memory, sockets
        self._rank, self._size = rank, size
        self._others = [(rank + hops) % size for hops in range(1, size)]
        kinds = [(call.kind.value, call.full.numel(), str(call.full.dtype), getattr(call, "op", None)) for call in calls]
        # A checksum that is equal on all ranks if they run the same batch, then the addresses of the tensors.
        self._words = [zlib.crc32(repr(kinds).encode()), *(call.full.data_ptr() for call in calls)]
        self._addresses: list[list[int]] = []
        self._stages: list[list[_Action]] = []
        self.plan = Plan(rank=rank, size=size, waits_like_gloo=True, is_kept=True)
        """Has no collectives: the thread does everything."""

    def run(self, must_stop: Callable[[], bool]) -> dict[int, str]:
        """Run the batch with all ranks. Return the problem of each rank that could not be read: the same on all ranks."""
        by_rank = self._sockets.exchange(self._words, must_stop)
        if any(words[0] != self._words[0] for words in by_rank):
            raise RuntimeError(f"rank {self._rank} has launched another batch than the others: {self._calls[0].kind.value}")
        addresses = [words[1:] for words in by_rank]
        if addresses != self._addresses:
            self._addresses = addresses
            self._make_stages()
        for actions in self._stages:
            unread = []
            for operation, rank, nbytes in actions:
                result = operation()
                if nbytes and result != nbytes:
                    unread.append(rank)
            words = self._sockets.exchange([1 + unread[0] if unread else 0], must_stop)
            if states := {word - 1: reader for reader, (word,) in enumerate(words) if word}:
                return {rank: f"is there, but rank {reader} could not read its memory" for rank, reader in states.items()}
        return {}

    def _make_stages(self) -> None:
        first = self._calls[0]
        self._stages = []
        if isinstance(first, AllReduce | ReduceScatter):
            self._stages.append(list(self._sum()))
        if isinstance(first, AllReduce | AllGather):
            self._stages.append(list(self._gather()))

    def _part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a buffer that a rank sums, or owns."""
        numel = full.numel()
        return full.view(-1)[rank * numel // self._size : (rank + 1) * numel // self._size]

    def _gather(self) -> Iterator[_Action]:
        """Yield the reads of the parts of all other ranks."""
        for index, call in enumerate(self._calls):
            full = call.full.data
            for rank in self._others:
                part = self._part(full, rank)
                yield from self._memory.reads(part, rank, self._addresses[rank][index] + part.data_ptr() - full.data_ptr())

    def _sum(self) -> Iterator[_Action]:
        """Yield the operations that sum this rank's part of each call, in the order it asks for or gloo's, and divide it."""
        for index, (call, (start, numel)) in enumerate(zip(self._calls, places_in_sums(self._calls), strict=True)):
            if isinstance(call, AllReduce | ReduceScatter):
                yield from self._sum_one(call, [of_rank[index] for of_rank in self._addresses], start, numel)

    def _sum_one(self, call: AllReduce | ReduceScatter, addresses: Sequence[int], start: int, numel: int) -> Iterator[_Action]:
        full = call.full.data
        own, itemsize = self._part(full, self._rank), full.element_size()
        offset = (own.data_ptr() - full.data_ptr()) // itemsize
        elements, block_numel = range(start + offset, start + offset + own.numel()), BLOCK_BYTES // itemsize
        blocks = ring_blocks(elements, numel=numel, itemsize_bytes=itemsize, num_ranks=self._size, block_numel=block_numel)
        if call.in_rank_order:
            blocks = rank_blocks(own.numel(), num_ranks=self._size, block_numel=block_numel)
        total = wide_block(own, block_numel) if call.in_rank_order else None
        for block in blocks:
            pieces = []
            for rank in block.ranks:
                piece = own[block.start : block.stop]
                if rank != self._rank:
                    piece = self._memory.block(rank, full.dtype)[: piece.numel()]
                    yield from self._memory.reads(piece, rank, addresses[rank] + (offset + block.start) * itemsize)
                pieces.append(piece)
            result, averages_over = own[block.start : block.stop], self._size
            additions = additions_of(pieces, block.ranks, own_rank=self._rank)
            if call.in_rank_order:
                additions, averages_over = additions_in_rank_order(pieces, call.op, own_rank=self._rank, total=total), 1
            for operation in (*additions, *divisions([call], averages_over=averages_over, result=result)):
                yield operation, self._rank, 0


# Memory of other processes #


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class PeerMemory:
    """The memory of the ranks of one group, all on this host.

    Args:
        pids: process of each rank.
        rank: of this process.
    """

    def __init__(self, pids: Sequence[int], *, rank: int) -> None:
        self.pids = tuple(pids)
        self._rank = rank
        self._readv = _process_vm_readv()
        self._blocks = torch.empty(len(pids) - 1, BLOCK_BYTES, dtype=torch.uint8, device="cpu")

    def block(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the 1D memory into which blocks of another rank are read; one per rank."""
        return self._blocks[rank - (rank > self._rank)].view(dtype)

    def reads(self, target: torch.Tensor, rank: int, address: int) -> Iterator[_Action]:
        """Yield the reads of an address range of another rank into ``target``. Each operation is a single call in C."""
        for start in range(0, target.nbytes, _LONGEST_READ_BYTES):
            nbytes = min(_LONGEST_READ_BYTES, target.nbytes - start)
            here, there = _Piece(target.data_ptr() + start, nbytes), _Piece(address + start, nbytes)
            arguments = (self.pids[rank], ctypes.pointer(here), 1, ctypes.pointer(there), 1, 0)
            yield partial(self._readv, *arguments), rank, nbytes


SendToAll = Callable[[bytes], list[bytes]]
"""Sends a short message to all ranks and returns the message of each, by rank."""


def find_peer_memory(send_to_all: SendToAll, *, rank: int) -> PeerMemory | None:
    """Return the memory of the other ranks if all ranks can read each other's memory. The same answer on all ranks."""
    nonce = os.urandom(_NONCE_BYTES)
    kept = ctypes.create_string_buffer(nonce, _NONCE_BYTES)
    process = identify_this_process()
    spaces = [process.pid_space, network_space()]
    own = [spaces, process.pid, ctypes.addressof(kept), nonce.hex()]
    peers = [json.loads(word) for word in send_to_all(json.dumps(own).encode())]
    can_read = all(spaces) and all(
        theirs == spaces and (index == rank or _reads_nonce(pid, address, expected))
        for index, (theirs, pid, address, expected) in enumerate(peers)
    )
    # The second message also means that no rank reads the nonce any more.
    all_can = all(word == b"yes" for word in send_to_all(b"yes" if can_read else b"no"))
    return PeerMemory([pid for _, pid, _, _ in peers], rank=rank) if all_can else None


def network_space() -> str:
    """Return an id of the network namespace; empty if unknown. Socket names are valid inside one namespace."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def _reads_nonce(pid: int, address: int, expected: str) -> bool:
    # A process with the same id in another container, or a later process with that id, does not have the nonce.
    found = ctypes.create_string_buffer(_NONCE_BYTES)
    here, there = _Piece(ctypes.addressof(found), _NONCE_BYTES), _Piece(address, _NONCE_BYTES)
    try:
        num_read = _process_vm_readv()(pid, ctypes.pointer(here), 1, ctypes.pointer(there), 1, 0)
    except (AttributeError, OSError):
        return False
    return num_read == _NONCE_BYTES and found.raw.hex() == expected


def _process_vm_readv() -> Callable[..., int]:
    function = ctypes.CDLL(None).process_vm_readv
    function.restype = ctypes.c_ssize_t
    pieces = ctypes.POINTER(_Piece)
    function.argtypes = [ctypes.c_int, pieces, ctypes.c_ulong, pieces, ctypes.c_ulong, ctypes.c_ulong]
    found: Callable[..., int] = function
    return found


# Sockets #


class PeerSockets:
    """Connects the thread of a rank with those of all others, for short messages of integers. Linux only.

    Gloo would take a millisecond, because each message passes through threads of two processes that need a core.

    Args:
        send_to_all: for ranks in one network namespace; all of them construct this together.
        timeout_s: limit of a wait for another rank.

    Raises:
        OSError: another rank did not come.
    """

    def __init__(self, send_to_all: SendToAll, *, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._pid = rank, timeout_s, os.getpid()
        self._peers: dict[int, socket.socket] = {}
        # Abstract names, which vanish with their sockets. Callers bind a name as well, so that strangers are recognized.
        name = f"\0megabucket-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(size)
            listener.settimeout(timeout_s)
            names = [word.decode() for word in send_to_all(name.encode())]
            for other in range(rank):
                peer = self._peers[other] = socket.socket(socket.AF_UNIX)
                peer.bind(f"{name} {other}")
                peer.connect(names[other])
            callers = {f"{names[other]} {rank}".encode(): other for other in range(rank + 1, size)}
            while callers:
                peer, address = listener.accept()
                if address in callers:
                    self._peers[callers.pop(address)] = peer
                else:
                    peer.close()
        for peer in self._peers.values():
            peer.settimeout(_SLICE_S)

    def exchange(self, words: Sequence[int], must_stop: Callable[[], bool]) -> list[list[int]]:
        """Return the words of all ranks, by rank: equally many 64-bit integers from each, a few thousand at most.

        Raises:
            RuntimeError: another rank is gone or silent, or ``must_stop`` returns true. The text is gloo's.
        """
        message = array("q", [len(words), *words]).tobytes()
        by_rank = {self._rank: list(words)}
        try:
            for peer in self._peers.values():
                peer.sendall(message)
            for rank, peer in self._peers.items():
                length, *by_rank[rank] = array("q", self._receive(peer, len(message), must_stop))
                if length != len(words):
                    raise RuntimeError(f"rank {rank} has launched another batch than rank {self._rank}")
        except OSError:
            raise RuntimeError("Connection closed by peer") from None
        return [by_rank[rank] for rank in range(len(by_rank))]

    def _receive(self, peer: socket.socket, nbytes: int, must_stop: Callable[[], bool]) -> bytes:
        parts, deadline_s = bytearray(), time.monotonic() + self._timeout_s
        while len(parts) < nbytes:
            try:
                part = peer.recv(nbytes - len(parts))
            except TimeoutError:
                if must_stop():
                    raise ConnectionError from None
                if time.monotonic() > deadline_s:
                    raise RuntimeError("Timed out waiting for another rank to read the memory of this one") from None
                continue
            if not part:
                raise ConnectionError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close the connections, even while a thread waits for a message. Idempotent."""
        for peer in self._peers.values():
            if os.getpid() == self._pid:  # a forked child must not shut down its parent's connections
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
            peer.close()
