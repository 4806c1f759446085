"""Memory for buffers in pages of the largest kind that the kernel gives.

Other ranks of the host read buffers (``comm/peer_memory.py``), and for that the kernel looks up every page: there
are 512 times as many of 4 KiB as of 2 MiB (docs/decisions/reading-peers.md).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import torch

LEAST_BYTES: Final = 8 << 20
"""Of a buffer that asks for them: what its ends may take beyond it stays small."""


def filled(numel: int, value: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new 1D tensor full of a value. The kernel is asked for huge pages before it is written to; it may decline."""
    tensor = torch.empty(numel, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= LEAST_BYTES:
        _ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor.fill_(value)


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # Whatever it answers: it is advice.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
