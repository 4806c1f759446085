"""Who the ranks are as processes, and a direct look at those of the same host. Reads /proc; without it nothing is known."""

from __future__ import annotations

import enum
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


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
    host, pid = socket.gethostname(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = f"{boot} {Path('/proc/self/ns/pid').readlink()}"  # containers of one host share the boot, not the ids
        stat = _read_stat(pid)
        if stat != _read_stat("self"):
            return ProcessIdentity(host, pid, 0, "")  # /proc belongs to another container
    except (OSError, ValueError, IndexError):
        return ProcessIdentity(host, pid, 0, "")
    return ProcessIdentity(host, pid, stat.start_ticks, space)


def look_at(process: ProcessIdentity, *, from_space: str) -> ProcessState:
    """Return the state of a process, as seen by a process whose ids mean what ``from_space`` says."""
    if not from_space or process.pid_space != from_space:
        return ProcessState.UNKNOWN
    try:
        stat = _read_stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return ProcessState.DEAD
    except (OSError, ValueError, IndexError):
        return ProcessState.UNKNOWN
    if stat.start_ticks != process.start_ticks or stat.letter in "ZXx":
        return ProcessState.DEAD
    return ProcessState.STOPPED if stat.letter in "Tt" else ProcessState.RUNNING


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    letter: str = field(compare=False)
    start_ticks: int


def _read_stat(pid: int | Literal["self"]) -> _Stat:
    """Return the fields 1, 3 and 22 of what proc(5) says about a process."""
    # The name of the program, field 2, is in parentheses and may contain anything, parentheses too.
    number, _, rest = Path(f"/proc/{pid}/stat").read_bytes().partition(b"(")
    fields = rest.rpartition(b")")[2].split()
    return _Stat(int(number), fields[0].decode("ascii"), int(fields[19]))
