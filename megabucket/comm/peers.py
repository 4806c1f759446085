"""Who the ranks are as processes, and a direct look at those of the same host. Reads /proc; without it nothing is known."""

from __future__ import annotations

import enum
import os
import socket
from dataclasses import dataclass
from pathlib import Path


class ProcessState(enum.Enum):
    """What a look at a process shows."""

    RUNNING = "running"
    STOPPED = "stopped"  # by a signal or a debugger: it may go on
    DEAD = "dead"  # gone, waiting to be reaped, or its id belongs to somebody else by now
    UNKNOWN = "unknown"  # on another host or in another container


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told from others that had or will have the same id."""

    host: str
    pid: int
    start_ticks: int  # clock ticks from boot to its start
    pid_space: str  # equal for two processes whose ids mean the same; empty where that cannot be told


def identify_this_process() -> ProcessIdentity:
    """Return who this process is. To be called again in a forked child."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Containers of one host share the boot, not the ids.
        return ProcessIdentity(socket.gethostname(), pid, _read_stat(pid)[1], f"{boot} {Path('/proc/self/ns/pid').readlink()}")
    except (OSError, ValueError, IndexError):
        return ProcessIdentity(socket.gethostname(), pid, 0, "")


def look_at(process: ProcessIdentity, *, from_space: str) -> ProcessState:
    """Return the state of a process, as seen by a process whose ids mean what ``from_space`` says."""
    if not from_space or process.pid_space != from_space:
        return ProcessState.UNKNOWN
    try:
        state, start_ticks = _read_stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return ProcessState.DEAD
    except (OSError, ValueError, IndexError):
        return ProcessState.UNKNOWN
    if start_ticks != process.start_ticks or state in "ZXx":
        return ProcessState.DEAD
    return ProcessState.STOPPED if state in "Tt" else ProcessState.RUNNING


def _read_stat(pid: int) -> tuple[str, int]:
    """Return the state letter and the start time of a process (proc(5): fields 3 and 22)."""
    # The name of the program, field 2, is in parentheses and may contain anything, parentheses too.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode("ascii"), int(fields[19])
