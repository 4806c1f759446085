"""What a rank sees of the others, and what it means in words. Reads ``/proc``; does no communication."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from megabucket.comm.communicator import Finding

LONGEST_GAP_S: Final = 1.0
"""Between two checks by this rank; a longer gap means that this process itself was stopped."""

_LOOKS_AT_DEAD: Final = 2  # consecutive dead observations required; data it sent may be in flight
_LOOKS_AT_ENDED: Final = 10  # the same for a rank that exited cleanly after launching the collective in question
_BEATS_ALIVE: Final = 2  # a rank that is silent for more beats is not said to be alive
_BEATS_SILENT: Final = 2.5  # at least; beats of ranks that were lost together are up to a period apart, or a little more
_LOOK_EVERY_S: Final = 0.02
_LOOKS_PER_S: Final = 10_000  # all ranks may wait at once: see docs/scale.md
_READ_EVERY_S: Final = 0.2


# Processes of the same host #


class ProcessIdentity(NamedTuple):
    """A process, distinguished from other processes with the same id."""

    host: str
    pid: int
    start_ticks: int  # clock ticks from boot to its start
    pid_space: str  # equal for processes that share host and pid namespace; empty if unknown


def identify_this_process() -> ProcessIdentity:
    """Return the identity of this process. Call it again in a forked child."""
    host, pid = socket.gethostname(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = f"{boot} {Path('/proc/self/ns/pid').readlink()}"  # containers of one host share the boot, not the ids
        if str(Path("/proc/self").readlink()) != str(pid):
            raise ProcessLookupError("/proc belongs to another container")
        return ProcessIdentity(host, pid, _read_stat(pid)[1], space)
    except (OSError, ValueError, IndexError):
        return ProcessIdentity(host, pid, 0, "")


def is_gone(process: ProcessIdentity, *, from_space: str) -> bool:
    """Return whether a process is certainly dead: ended, not yet reaped, or its id reused. False if it cannot be seen.

    Args:
        from_space: the ``pid_space`` of the process that looks.
    """
    if not from_space or process.pid_space != from_space:
        return False
    try:
        letter, start_ticks = _read_stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False
    return start_ticks != process.start_ticks or letter in "ZXx"


def _read_stat(pid: int) -> tuple[str, int]:
    """Return fields 3 and 22 of ``/proc/<pid>/stat``, see proc(5): the state letter and the start time in clock ticks."""
    # Field 2, the program name in parentheses, may itself contain parentheses.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode("ascii"), int(fields[19])


# Signs of life #


class Beat(NamedTuple):
    """One sign of life of a rank."""

    process: ProcessIdentity
    number: int
    every_s: float | None  # None: this rank writes no more beats
    step: int
    phase: str
    bucket: int  # -1: in none
    num_launched: int
    has_left: bool  # the final beat: its program exited cleanly, its group was destroyed, or its wrapper was detached

    @property
    def place(self) -> str:
        """Phase, step and bucket of the rank."""
        return f"{self.phase}, step {self.step}" + (f", bucket {self.bucket}" if self.bucket >= 0 else "")

    @property
    def last_seen(self) -> str:
        """The place as the end of an error text; empty if the rank writes a single beat."""
        # Age omitted: ranks without the store compose this text independently.
        return "" if self.every_s is None else f"; last seen in {self.place} (it says so every {self.every_s:g} s)"


class View(NamedTuple):
    """The contents of the store at one moment.

    Of all waiting ranks of a wrapper one, the watcher, reads the beats of all ranks. The others know those of their own host.
    """

    asked_at_s: float  # time.monotonic() before the store was last asked for the beats of all ranks
    beats: Mapping[int, Beat]
    finding: Finding | None = None
    num_present: int = 0  # ranks that have written a beat
    watcher_since_s: float | None = None  # time.monotonic() since this rank has been the watcher
    silent_before_s: Mapping[int, float] = MappingProxyType(
        {}
    )  # silence of ranks before this watcher took over from a lost one


def look_every_s(num_ranks: int) -> float:
    """Return how often a waiting rank looks for a finding and for the watcher, in seconds."""
    return max(_LOOK_EVERY_S, num_ranks / _LOOKS_PER_S)


def read_every_s(num_ranks: int) -> float:
    """Return how often the watcher reads the beats of all ranks, in seconds."""
    return max(_READ_EVERY_S, look_every_s(num_ranks))


# Observations #


@dataclass(slots=True)
class _Peer:
    """Observations about one other rank during one wait."""

    beat: Beat
    looks_at_dead: int = 0  # consecutive checks that found its process dead
    silent_s: float = 0.0  # since its last beat


class Observations:
    """Observations about the other ranks during one long wait, and their meaning in words. Does no communication.

    Args:
        number: of the launch in question, counted from 1 and the same on all ranks.
        host: of this rank.
        is_gone: returns whether a process is certainly dead.
    """

    def __init__(
        self, label: str, *, number: int, rank: int, size: int, host: str, is_gone: Callable[[ProcessIdentity], bool]
    ) -> None:
        self.label, self.started_s = label, time.monotonic()
        self.is_on_board = self.has_warned = False
        self._number, self._host = number, host
        self._others = [other for other in range(size) if other != rank]
        self._is_gone = is_gone
        self._longest_gap_s = max(LONGEST_GAP_S, 2 * read_every_s(size))
        self._watcher_since_s: float | None = None
        self._peers: dict[int, _Peer] = {}
        self._looked_at_s = self._asked_at_s = 0.0
        self._view: View | None = None
        self.store_silent_s = 0.0
        """How long there was no new view of the store."""

    def note(self, view: View, at_s: float) -> None:
        """Check the processes and take over a view of the store."""
        # A long gap between two checks counts as a short one: then this process was stopped, and the others may be alive.
        gap_s = min(at_s - self._looked_at_s, LONGEST_GAP_S)
        # Only the watcher reads beats again and again, so only its own time as such counts.
        has_watched = view.watcher_since_s is not None and view.watcher_since_s == self._watcher_since_s
        view_gap_s = min(view.asked_at_s - self._asked_at_s, self._longest_gap_s) if has_watched else 0.0
        self._watcher_since_s = view.watcher_since_s
        self.store_silent_s = self.store_silent_s + gap_s if view is self._view else 0.0
        self._looked_at_s, self._asked_at_s, self._view = at_s, view.asked_at_s, view
        for rank, beat in view.beats.items():
            is_new = rank not in self._peers
            peer = self._peers.setdefault(rank, _Peer(beat))
            peer.looks_at_dead = peer.looks_at_dead + 1 if self._is_gone(beat.process) else 0
            silent_s = 0.0 if is_new or beat.number != peer.beat.number else peer.silent_s + view_gap_s
            peer.silent_s = max(silent_s, view.silent_before_s.get(rank, 0.0))
            peer.beat = beat

    @property
    def is_store_silent(self) -> bool:
        """Whether the store has not answered for longer than it usually takes."""
        return self.store_silent_s >= self._longest_gap_s

    def gone(self) -> dict[int, str]:
        """Return the ranks that are certainly dead, or have left without launching the collective in question.

        If some crashed, only these: a clean exit may be a reaction to a crash.
        """
        crashed, left, is_sure = dict[int, str](), dict[int, str](), False
        for rank, peer in self._peers.items():
            beat, is_dead = peer.beat, peer.looks_at_dead > 0
            has_left_early = beat.has_left and beat.num_launched < self._number
            is_sure |= has_left_early or peer.looks_at_dead >= (_LOOKS_AT_ENDED if beat.has_left else _LOOKS_AT_DEAD)
            if is_dead and not beat.has_left:
                # Without the store, ranks know different beats of it; their texts must be alike.
                last_seen = "" if self.store_silent_s else beat.last_seen
                crashed[rank] = f"died: process {beat.process.pid} on {beat.process.host} is gone{last_seen}"
            elif is_dead or has_left_early:
                left[rank] = self._how_left(beat)
        return (crashed or left) if is_sure else {}

    def left(self) -> dict[int, str]:
        """Return the ranks that have left, also those that have launched the collective in question before."""
        return {rank: self._how_left(peer.beat) for rank, peer in self._peers.items() if peer.beat.has_left}

    def _how_left(self, beat: Beat) -> str:
        return (
            "left: its program ended, its process group was destroyed, or its wrapper was detached, after "
            f"{beat.num_launched} launches; this was launch {self._number}"
        )

    def silent(self, limit_s: float, verb: str = "froze") -> dict[int, str]:
        """Return the ranks that should write beats and have written none for ``limit_s``.

        Where another host was lost, its other ranks are among them: their last beats are up to two periods apart. On this host
        processes are seen, and a rank that writes late is a rank without a core.
        """
        due = [(rank, peer) for rank, peer in self._peers.items() if peer.beat.every_s is not None and not peer.beat.has_left]
        lost_hosts = {peer.beat.process.host for _, peer in due if peer.silent_s >= limit_s} - {self._host}
        silent = dict[int, str]()
        for rank, peer in due:
            every_s, host = peer.beat.every_s or 0.0, peer.beat.process.host
            allowed_s = max(limit_s - 2 * every_s, _BEATS_SILENT * every_s) if host in lost_hosts else limit_s
            if peer.silent_s >= min(limit_s, allowed_s):
                silent[rank] = f"{verb}: no sign of life for {limit_s:.3g} s{peer.beat.last_seen}, on {host}"
        return silent

    def absent(self) -> dict[int, str]:
        """Return the ranks that never wrote a beat."""
        return dict.fromkeys(self._absent(), "went away or never came: it has given no sign of life")

    def late(self) -> dict[int, str]:
        """Return the ranks that have not launched the collective in question, according to their beats."""
        found = dict.fromkeys(self._absent(), "has given no sign of life: it has not wrapped its module yet")
        for rank, peer in self._peers.items():
            beat = peer.beat
            if beat.every_s is None or beat.num_launched >= self._number:
                continue
            found[rank] = f"is alive but has not launched its part; it is in {beat.place}"
            if peer.silent_s > _BEATS_ALIVE * beat.every_s:
                silence = f"has given no sign of life for {peer.silent_s:.3g} s"
                found[rank] = f"{silence} and has not launched its part{beat.last_seen}"
        return dict(sorted(found.items()))

    def _absent(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._peers]
