"""What the machine counted: peak memory of this process, bytes over the loopback device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

LOOPBACK_COUNTER: Final = Path("/sys/class/net/lo/statistics/tx_bytes")
"""Where Linux counts the bytes sent over the loopback device, by all processes of the network namespace."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak of a process or a device, counted from the moment this was made.

    On CUDA that is memory in tensors. On CPU it is resident memory of the whole process, whose peak before that moment
    (imports, reading data) hides growth up to it.
    """

    device: torch.device
    base_bytes: int

    @staticmethod
    def from_now(device: torch.device) -> PeakMemory:
        """Start counting."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return PeakMemory(device, _peak_bytes(device))

    @property
    def source(self) -> str:
        """What is counted, in words for a table."""
        return "allocated on the GPU" if self.device.type == "cuda" else "resident set"

    def growth_bytes(self) -> int:
        """Return by how much the peak is above where counting started."""
        return _peak_bytes(self.device) - self.base_bytes


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows counts nothing here
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def loopback_bytes(counter: Path = LOOPBACK_COUNTER) -> int | None:
    """Return the bytes sent over the loopback device since boot, or ``None`` where nothing counts them."""
    try:
        return int(counter.read_text())
    except (OSError, ValueError):
        return None
