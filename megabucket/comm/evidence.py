"""What one blocked rank has seen of the others while it waits: who is gone, who is silent, who is late, in words.

Decides nothing about the wait and talks to nobody: signs of life and process states come in, findings go out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from megabucket.comm.peers import ProcessIdentity, ProcessState
from megabucket.comm.signs import Beat, View

_LOOKS_AT_DEAD: Final = 2  # what a rank sent before it died may still be on its way
_LOOKS_AT_ENDED: Final = 10  # the same for one that ended in good order and had launched what is waited for
_LONGEST_GAP_S: Final = 1.0


@dataclass(slots=True)
class Silence:
    """How long a sign has not changed, counted by one who looks again and again.

    A long gap between two looks counts as a short one: then it was this process that was frozen, and others may have lived.
    """

    sign: object = None
    silent_s: float = 0.0
    at_s: float = 0.0

    def hear(self, sign: object, at_s: float, *, longest_gap_s: float = _LONGEST_GAP_S) -> None:
        """Note the sign seen at a moment."""
        self.silent_s = self.silent_s + min(at_s - self.at_s, longest_gap_s) if sign == self.sign else 0.0
        self.sign, self.at_s = sign, at_s


@dataclass(slots=True)
class _Peer:
    beat: Beat
    state: ProcessState = ProcessState.UNKNOWN
    looks_at_dead: int = 0
    stop: Silence = field(default_factory=Silence)
    beats: Silence = field(default_factory=Silence)
    place: Silence = field(default_factory=Silence)

    def last_words(self, *, are_wanted: bool = True) -> str:
        """Return what the last beat said, where it was one of many."""
        if self.beat.every_s is None or not are_wanted:
            return ""
        return f"; last seen in {self.beat.place}, {max(0.0, time.time() - self.beat.at_s):.1f} s before"


class Evidence:
    """What is known about the other ranks during one wait.

    Args:
        number: of the launch that is waited for, counted from 1 and alike on all ranks.
        size: how many ranks there are.
        look_at: returns the state of a process.
        read_every_s: how often views are renewed.
    """

    def __init__(
        self, *, number: int, rank: int, size: int, look_at: Callable[[ProcessIdentity], ProcessState], read_every_s: float
    ) -> None:
        self._number = number
        self._others = [other for other in range(size) if other != rank]
        self._look_at = look_at
        self._longest_gap_s = max(_LONGEST_GAP_S, 2 * read_every_s)
        self._peers: dict[int, _Peer] = {}

    def note(self, view: View, at_s: float) -> None:
        """Take a look at the processes and note what the store said."""
        for rank, beat in view.beats.items():
            peer = self._peers.setdefault(rank, _Peer(beat))
            peer.beat = beat
            peer.state = self._look_at(beat.process)
            peer.looks_at_dead = peer.looks_at_dead + 1 if peer.state is ProcessState.DEAD else 0
            peer.stop.hear("stopped" if peer.state is ProcessState.STOPPED else at_s, at_s)
            peer.beats.hear(beat.count, view.asked_at_s, longest_gap_s=self._longest_gap_s)
            peer.place.hear((beat.num_launched, beat.place), view.asked_at_s, longest_gap_s=self._longest_gap_s)

    @property
    def is_somebody_gone(self) -> bool:
        """Whether a rank is surely dead, or has left without launching what is waited for."""
        return any(self._is_gone(peer) for peer in self._peers.values())

    def _is_gone(self, peer: _Peer) -> bool:
        has_launched = peer.beat.num_launched >= self._number
        if peer.beat.has_left and not has_launched:
            return True
        return peer.looks_at_dead >= (_LOOKS_AT_ENDED if peer.beat.has_left else _LOOKS_AT_DEAD)

    def gone(self, *, in_detail: bool = True) -> dict[int, str]:
        """Return the ranks that died without a word or, if there are none, those that ended in good order.

        Whoever ends in good order may do so because of those who died.

        Args:
            in_detail: with what only this rank may know, for instance when a rank was last heard of.
        """
        dead = {rank: peer for rank, peer in self._peers.items() if peer.state is ProcessState.DEAD}
        crashed = {
            rank: f"died: process {peer.beat.process.pid} on {peer.beat.process.host} is gone"
            f"{peer.last_words(are_wanted=in_detail)}"
            for rank, peer in dead.items()
            if not peer.beat.has_left
        }
        return crashed or {
            rank: f"left: its program ended, or its wrapper was detached, after {peer.beat.num_launched} launches; this was "
            f"launch {self._number}"
            for rank, peer in self._peers.items()
            if peer.beat.has_left and (rank in dead or peer.beat.num_launched < self._number)
        }

    def frozen(self, dead_after_s: float, *, in_detail: bool = True) -> dict[int, str]:
        """Return the ranks that have been stopped, or without a sign of life, for that long."""
        found = {}
        for rank, peer in self._peers.items():
            is_silent = peer.beats.silent_s >= dead_after_s and peer.beat.every_s is not None and not peer.beat.has_left
            if is_silent or peer.stop.silent_s >= dead_after_s:
                why = ", its process is stopped" if peer.state is ProcessState.STOPPED else ""
                words = peer.last_words(are_wanted=in_detail)
                found[rank] = f"froze: no sign of life for {dead_after_s:g} s{why}{words}"
        return found

    def vanished(self, silent_s: float, *, in_detail: bool = True) -> dict[int, str]:
        """Return the ranks without a beat for that long or, if there are none, those that never wrote one."""
        silent = {
            rank: f"went away: no sign of life for {silent_s:.1f} s{peer.last_words(are_wanted=in_detail)}"
            for rank, peer in self._peers.items()
            if peer.beat.every_s is not None and peer.beats.silent_s >= silent_s
        }
        return silent or self.absent()

    @property
    def suspects_only_absent(self) -> bool:
        """Whether ranks that have never given a sign of life must be the lost ones: all others are seen to run."""
        return bool(self._absent) and all(peer.state is ProcessState.RUNNING for peer in self._peers.values())

    def absent(self, *, in_detail: bool = True) -> dict[int, str]:  # noqa: ARG002 - nothing is known in more detail
        """Return the ranks that have never given a sign of life."""
        return dict.fromkeys(self._absent, "went away or never came: it has given no sign of life")

    def late(self, *, in_detail: bool = True) -> dict[int, str]:
        """Return the ranks that have not launched what is waited for, as far as they tell."""
        found = dict.fromkeys(self._absent, "has given no sign of life: it has not wrapped its module yet")
        for rank, peer in self._peers.items():
            if peer.state is ProcessState.STOPPED:
                found[rank] = "has not launched its part; its process is stopped"
            elif peer.beat.every_s is not None and peer.beat.num_launched < self._number:
                there = f" (for {peer.place.silent_s:.3g} s)" if in_detail and peer.place.silent_s >= 1 else ""
                found[rank] = f"is alive but has not launched its part; it is in {peer.beat.place}{there}"
        return dict(sorted(found.items()))

    @property
    def _absent(self) -> Sequence[int]:
        return [rank for rank in self._others if rank not in self._peers]
