"""A launched collective until it is done: the data has moved, and the emulated link would have delivered it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Protocol

import torch.distributed as dist

from megabucket.comm.background_reader import ReadWork

_SHORTEST_PAUSE_S: Final = 100e-6
_LONGEST_PAUSE_S: Final = 20e-3
_PATIENCE: Final = 0.02  # who has waited for a second may look twenty milliseconds late


class Clock(Protocol):
    """Says when the link delivers."""

    @property
    def duration_s(self) -> float:
        """How long a free link takes."""
        ...

    @property
    def done_s(self) -> float | None:
        """Moment on ``time.monotonic``; ``None`` while it is not known, and then not before now plus ``duration_s``."""
        ...


@dataclass(slots=True)
class Lateness:
    """How far completions came after the moments they were meant for.

    Attributes:
        num_done: collectives and messages that completed.
        total_s: sum of their delays, seconds.
        worst_s: the longest delay.
        num_slow_data: how many were late because the data was not there yet, so that moving was measured, not the link.
    """

    num_done: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0
    num_slow_data: int = 0

    @property
    def mean_s(self) -> float:
        """Mean delay in seconds; 0 when nothing completed."""
        return self.total_s / self.num_done if self.num_done else 0.0

    def note(self, late_s: float, *, is_data: bool) -> None:
        """Count one completion."""
        self.num_done += 1
        self.total_s += late_s
        self.worst_s = max(self.worst_s, late_s)
        self.num_slow_data += is_data


@dataclass(slots=True, eq=False)
class Flight:
    """One launched operation.

    Attributes:
        clock: when the link delivers.
        works: which move the data; none when nothing is moved.
        finish: puts the data where the caller wants it; called once, by whoever is first to see that all has arrived.
        result: what a future of the operation holds.
        timeout_s: of the group.
        lateness: of the group; counted in there.
        is_message: sent or received. Gloo tells whether such a work is done to those only who wait for it.
    """

    clock: Clock
    works: Sequence[dist.Work | ReadWork]
    finish: Callable[[], None] | None
    result: Any
    timeout_s: float
    lateness: Lateness
    is_message: bool = False
    launch_s: float = field(default_factory=time.monotonic)
    failure: BaseException | None = None
    is_done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_data_late: bool = False
    _is_awaited: bool = False

    def next_look_s(self, now_s: float) -> float | None:
        """Return the moment before which nothing can be done, or ``None`` when there is nothing to wait for any more."""
        if self.is_done or self.failure is not None:
            return None
        done_s = self.clock.done_s
        if done_s is None:
            if self._has_failed():
                return None
            return now_s + max(self.clock.duration_s, _pause_s(now_s - self.launch_s))
        if now_s < done_s:
            return done_s
        if not self._is_data_here():
            self._is_data_late = True
            return now_s + _pause_s(now_s - done_s)
        return None

    def _has_failed(self) -> bool:
        """Whether gloo has given up, so that the other ranks may never come."""
        if self.is_message:
            return False
        try:
            for work in self.works:
                if work.is_completed():
                    work.wait()  # at once; the only way to ask that torch does not warn about
        except RuntimeError:
            return True
        return False

    def _is_data_here(self) -> bool:
        return self._is_awaited if self.is_message else all(work.is_completed() for work in self.works)

    def hasten(self) -> None:
        """Have data moved before the link delivers, although nobody waits yet."""
        for work in self.works:
            if isinstance(work, ReadWork):
                work.hasten()

    def settle(self, *, since_s: float) -> None:
        """Take the result over; ``next_look_s`` has returned ``None``. Idempotent.

        Args:
            since_s: when somebody began to wait; nobody missed a completion before.

        Raises:
            RuntimeError: gloo failed.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self.is_done:
                return
            try:
                if not self.is_message:  # a second wait for a message would wait for the next one
                    for work in self.works:
                        work.wait()
                if self.finish is not None:
                    self.finish()
            except BaseException as error:
                self.failure = error
                raise
            late_s = time.monotonic() - max(self.clock.done_s or self.launch_s, since_s)
            self.lateness.note(late_s, is_data=self._is_data_late)
            self.is_done = True
            self.works, self.finish = (), None

    def wait(self, limit_s: float | None) -> None:
        """Return when it is done.

        Args:
            limit_s: give up after this time; the operation goes on. ``None``: after that of the group.

        Raises:
            RuntimeError: gloo failed, or the time is over.
        """
        start_s = time.monotonic()
        end_s = start_s + (self.timeout_s if limit_s is None else limit_s)
        for work in self.works:
            if limit_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(end_s - time.monotonic(), 1e-3)))
        self._is_awaited = True
        if self.works and time.monotonic() > max(self.clock.done_s or math.inf, start_s) + _SHORTEST_PAUSE_S:
            self._is_data_late = True
        while (next_s := self.next_look_s(now_s := time.monotonic())) is not None:
            if now_s >= end_s:
                raise RuntimeError(self._expired(limit_s))
            time.sleep(max(min(next_s, end_s) - now_s, 0.0))
        self.settle(since_s=start_s)

    def _expired(self, limit_s: float | None) -> str:
        # The texts of gloo: who waits in slices or looks for a time limit need not know the difference.
        if limit_s is not None:
            return "Operation timed out!"
        return f"Timed out waiting {self.timeout_s * 1000:.0f}ms for the other ranks to launch on the emulated fabric"


def _pause_s(waited_s: float) -> float:
    """Return how long to sleep before looking again for something that may come at any moment."""
    return min(max(_SHORTEST_PAUSE_S, _PATIENCE * waited_s), _LONGEST_PAUSE_S)
