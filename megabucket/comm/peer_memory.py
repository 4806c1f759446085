"""Reading the memory of other ranks on the same host: one copy by the kernel, where a socket takes two and a network stack.

Linux only, and only where the kernel lets one process read another (``process_vm_readv(2)``). The ranks find out together.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch

from megabucket.comm.peers import identify_this_process
from megabucket.comm.plan import Operation, Read

WORD_BYTES: Final = 512
"""The longest message that ranks exchange to get to know each other."""

BLOCK_BYTES: Final = 1 << 19
"""Read at a time where what was read is added to something, so that it is still in the cache then."""

_LONGEST_READ_BYTES: Final = 1 << 30  # the kernel's limit is a little below 2 GiB
_NONCE_BYTES: Final = 16


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class _Introduction:
    pid_space: str
    pid: int
    nonce_address: int
    nonce: str


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
        others = len(pids) - 1
        self._blocks = torch.empty(others, BLOCK_BYTES, dtype=torch.uint8, device="cpu")

    def block(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory, 1D, that blocks of another rank are read into; there is one for each."""
        return self._blocks[rank - (rank > self._rank)].view(dtype)

    def read(self, target: torch.Tensor, rank: int, address: int) -> list[tuple[Operation, Read]]:
        """Return the operations that fill ``target`` with what another rank has at an address.

        Each returns how many bytes were read, or -1. They are calls in C.
        """
        steps: list[tuple[Operation, Read]] = []
        for start in range(0, target.nbytes, _LONGEST_READ_BYTES):
            nbytes = min(_LONGEST_READ_BYTES, target.nbytes - start)
            here, there = _Piece(target.data_ptr() + start, nbytes), _Piece(address + start, nbytes)
            arguments = (self.pids[rank], ctypes.pointer(here), 1, ctypes.pointer(there), 1, 0)
            steps.append(((self._readv, [arguments]), Read(rank, nbytes)))
        return steps


def get_to_know(tell_all: Callable[[bytes], list[bytes]], *, rank: int) -> PeerMemory | None:
    """Find out whether every rank can read every other one's memory; ``None``: no. All ranks call it and get the same answer.

    Args:
        tell_all: sends at most ``WORD_BYTES`` to all ranks and returns what each has sent, by rank.
    """
    nonce = os.urandom(_NONCE_BYTES)
    kept = ctypes.create_string_buffer(nonce, _NONCE_BYTES)
    process = identify_this_process()
    own = _Introduction(process.pid_space, process.pid, ctypes.addressof(kept), nonce.hex())
    peers = [_Introduction(**json.loads(word)) for word in tell_all(json.dumps(asdict(own)).encode())]
    can_read = bool(own.pid_space) and all(
        peer.pid_space == own.pid_space and (index == rank or _reads_nonce(peer)) for index, peer in enumerate(peers)
    )
    # The second message also tells that nobody looks at the nonce any more.
    everybody_can = all(word == b"yes" for word in tell_all(b"yes" if can_read else b"no"))
    return PeerMemory([peer.pid for peer in peers], rank=rank) if everybody_can else None


def _reads_nonce(peer: _Introduction) -> bool:
    # A process of the same number in another container, or one that took the number over, does not have it.
    found = ctypes.create_string_buffer(_NONCE_BYTES)
    here, there = _Piece(ctypes.addressof(found), _NONCE_BYTES), _Piece(peer.nonce_address, _NONCE_BYTES)
    try:
        num_read = _process_vm_readv()(peer.pid, ctypes.pointer(here), 1, ctypes.pointer(there), 1, 0)
    except (AttributeError, OSError):
        return False
    return num_read == _NONCE_BYTES and found.raw.hex() == peer.nonce


def _process_vm_readv() -> Callable[..., int]:
    function = ctypes.CDLL(None).process_vm_readv
    function.restype = ctypes.c_ssize_t
    pieces = ctypes.POINTER(_Piece)
    function.argtypes = [ctypes.c_int, pieces, ctypes.c_ulong, pieces, ctypes.c_ulong, ctypes.c_ulong]
    found: Callable[..., int] = function
    return found
