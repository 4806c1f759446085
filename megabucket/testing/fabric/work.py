"""``torch.distributed.Work`` of the emulated fabric: done when the data has moved and the link would have delivered it.

Waits sleep in the caller's thread. Futures are completed by one thread for all groups of a process.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

_NO_LIMIT: Final = timedelta(0)
_SHORTEST_PAUSE_S: Final = 100e-6
_LONGEST_PAUSE_S: Final = 20e-3
_PATIENCE: Final = 0.02  # after a second of waiting, a look may come twenty milliseconds late
_JOIN_S: Final = 1.0
_DESTROYED: Final = "the process group of the emulated fabric was destroyed"


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


@dataclass(frozen=True, slots=True)
class FixedClock:
    """An end that is known from the beginning."""

    done_s: float
    duration_s: float = 0.0


class HeaderClock:
    """The end of a message, which its sender knows and tells in a message of its own ahead of it.

    A message leaves when the sender's link is free, and needs no receiver to do so.
    """

    duration_s = 0.0

    def __init__(self) -> None:
        self.header = torch.zeros(1, dtype=torch.float64)
        self._launch_s = time.monotonic()

    @property
    def done_s(self) -> float | None:
        """Moment the message arrives; ``None`` before the header has."""
        told_s = self.header.item()
        return max(told_s, self._launch_s) if told_s else None


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


@dataclass(slots=True)
class Endpoint:
    """What all works of a group share: its time limit, the thread that completes futures, and how late they were."""

    timeout_s: float
    nic: Nic
    lateness: Lateness


class FabricWork(dist.Work):
    """One launched collective or message.

    Args:
        clock: when the link delivers.
        works: of gloo, which move the data; none when nothing is moved.
        result: what a future holds.
        finish: puts the data where the caller wants it; called once, when all has arrived.
        is_message: sent or received. Gloo tells whether such a work is done only to a caller that waits for it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        works: Sequence[dist.Work],
        *,
        result: Any,
        finish: Callable[[], None] | None = None,
        is_message: bool = False,
    ) -> None:
        super().__init__()
        self._endpoint, self._clock, self._works = endpoint, clock, works
        self._result, self._finish, self._is_message = result, finish, is_message
        self._launch_s = time.monotonic()
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._failure: BaseException | None = None
        self._is_done = self._is_data_late = self._is_awaited = False

    # What torch asks a work #

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the operation is done.

        Raises:
            RuntimeError: it failed, or ``timeout``, or else the time limit of the group, is over; the operation goes on then.
        """
        limit_s = timeout.total_seconds() if timeout > _NO_LIMIT else None
        start_s = time.monotonic()
        end_s = start_s + (self._endpoint.timeout_s if limit_s is None else limit_s)
        for work in self._works:
            if limit_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(end_s - time.monotonic(), 1e-3)))
        self._is_awaited = True
        if self._works and time.monotonic() > max(self._clock.done_s or math.inf, start_s) + _SHORTEST_PAUSE_S:
            self._is_data_late = True
        while (next_s := self.next_look_s(now_s := time.monotonic())) is not None:
            if now_s >= end_s:
                # The texts of gloo: a caller that waits in slices or looks for a time limit need not know the difference.
                limit = f"Timed out waiting {self._endpoint.timeout_s * 1000:.0f}ms for the other ranks to launch on the"
                raise RuntimeError("Operation timed out!" if limit_s is not None else f"{limit} emulated fabric")
            time.sleep(max(min(next_s, end_s) - now_s, 0.0))
        self._settle(since_s=start_s)
        return True

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        now_s = time.monotonic()
        if self.next_look_s(now_s) is not None:
            return False
        with suppress(RuntimeError):
            self._settle(since_s=now_s)
        return True

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.is_completed() and self._failure is None

    def exception(self) -> BaseException | None:
        """Return why it failed."""
        return self._failure

    def result(self) -> Any:
        """Return the tensors it wrote."""
        return self._result

    def synchronize(self) -> None:
        """Do nothing: there are no streams."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that the thread of the process completes."""
        with self._lock:
            if self._future is None:
                if self._is_message:
                    raise RuntimeError("a message has no future, as with gloo: wait() for it")
                self._future = torch.futures.Future()
                self._endpoint.nic.promise(self)
            return self._future

    # What completes it #

    def next_look_s(self, now_s: float) -> float | None:
        """Return the moment before which nothing can be done, or ``None`` when there is nothing to wait for any more."""
        if self._is_done or self._failure is not None:
            return None
        done_s = self._clock.done_s
        if done_s is None:
            if self._has_failed():
                return None
            return now_s + max(self._clock.duration_s, _pause_s(now_s - self._launch_s))
        if now_s < done_s:
            return done_s
        if self._is_awaited if self._is_message else all(work.is_completed() for work in self._works):
            return None
        self._is_data_late = True
        return now_s + _pause_s(now_s - done_s)

    def _has_failed(self) -> bool:
        """Whether gloo has given up, so that the other ranks may never come."""
        if self._is_message:
            return False
        try:
            for work in self._works:
                if work.is_completed():
                    work.wait()  # at once; the only way to ask that torch does not warn about
        except RuntimeError:
            return True
        return False

    def _settle(self, *, since_s: float) -> None:
        """Take the result over; ``next_look_s`` has returned ``None``. Idempotent.

        Args:
            since_s: when a caller began to wait; nobody missed a completion before.

        Raises:
            RuntimeError: gloo failed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_done:
                return
            try:
                if not self._is_message:  # a second wait for a message would wait for the next one
                    for work in self._works:
                        work.wait()
                if self._finish is not None:
                    self._finish()
            except BaseException as error:
                self._failure = error
                raise
            late_s = time.monotonic() - max(self._clock.done_s or self._launch_s, since_s)
            self._endpoint.lateness.note(late_s, is_data=self._is_data_late)
            self._is_done = True
            self._works, self._finish = (), None

    def keep_promise(self, *, since_s: float) -> None:
        """Complete the future; ``next_look_s`` has returned ``None``."""
        future = self.get_future()
        try:
            self._settle(since_s=since_s)
        except BaseException as error:  # it belongs to whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(self._result)


def _pause_s(waited_s: float) -> float:
    """Return how long to sleep before looking again for something that may come at any moment."""
    return min(max(_SHORTEST_PAUSE_S, _PATIENCE * waited_s), _LONGEST_PAUSE_S)


class Nic:
    """The thread that completes futures: it sleeps until the next one is due."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._promises: list[tuple[float, int, float, FabricWork]] = []  # a heap: when to look, number, since when, work
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def promise(self, work: FabricWork) -> None:
        """Complete the future of ``work`` when it is done."""
        with self._changed:
            if self._is_stopped:
                raise RuntimeError(_DESTROYED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            now_s = time.monotonic()
            promise = (work.next_look_s(now_s) or 0.0, next(self._numbers), now_s, work)
            heapq.heappush(self._promises, promise)
            if self._promises[0] is promise:  # otherwise the thread is to wake up earlier anyway
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; futures that are not complete fail. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        # A network card needs no turn on a core. The lowest real-time priority, where the system allows it.
        with suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        while (promise := self._next()) is not None:
            _, number, since_s, work = promise
            look_s = work.next_look_s(time.monotonic())
            if look_s is None:
                work.keep_promise(since_s=since_s)
            else:
                with self._changed:
                    heapq.heappush(self._promises, (look_s, number, since_s, work))
        for *_, work in self._promises:
            work.get_future().set_exception(RuntimeError(_DESTROYED))
        self._promises.clear()

    def _next(self) -> tuple[float, int, float, FabricWork] | None:
        """Return the next promise that is due, or ``None`` when the thread shall end."""
        with self._changed:
            while not self._is_stopped:
                if not self._promises:
                    self._changed.wait()
                elif (rest_s := self._promises[0][0] - time.monotonic()) > 0:
                    self._changed.wait(rest_s)
                else:
                    return heapq.heappop(self._promises)
        return None
