"""What the machine counted: peak memory of this process, bytes over the loopback device."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

LOOPBACK_COUNTER: Final = Path("/sys/class/net/lo/statistics/tx_bytes")
"""Where Linux counts the bytes sent over the loopback device, by all processes of the network namespace."""


_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak of a process or a device, counted from the moment this was made.

    On CUDA that is memory in tensors. On CPU it is resident memory of the whole process. Linux forgets its earlier peak when
    asked; elsewhere the peak before that moment (imports, reading data) hides growth up to it.
    """

    device: torch.device
    base_bytes: int

    @staticmethod
    def from_now(device: torch.device) -> PeakMemory:
        """Start counting."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # 5 sets the peak to what is resident now (proc_pid_clear_refs(5)). Where that is not allowed, it stays.
            with suppress(OSError):
                _CLEAR_REFS.write_text("5\n")
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
    return _resident_peak_bytes()


def _resident_peak_bytes() -> int:
    # VmHWM belongs to this program. getrusage's ru_maxrss does not: a program starts with the peak of the one it was
    # started from, so under a large launcher it would not move.
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
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
