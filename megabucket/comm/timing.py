"""When collectives begin, complete and are waited for, measured for the recorder of a process group's communicator.

On a host the back-end's thread tells when a collective is complete. On a device with a queue (NCCL) all of it is events in
that queue, so the host never waits; intervals reach the recorder once the device has come so far.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from megabucket.trace.clock import Clock, DeviceClock, HostClock, Stamp
from megabucket.trace.recorder import Interval, Lane, Recorder

_LAST_WORDS_S: Final = 1.0
"""How long the end of a program waits for collectives that nobody waited for."""


class _Span(NamedTuple):
    recorder: Recorder
    clock: Clock
    lane: Lane
    label: str
    start: Stamp
    stop: Stamp


class CollectiveTimer:
    """Times the collectives of one communicator."""

    def __init__(self) -> None:
        self._host_clock = HostClock()
        self._device_clock: DeviceClock | None = None
        self._owed: deque[_Span] = deque()  # in order of their ends, nearly
        self._unfinished = _Unfinished()

    def clock(self, *, on_device: bool) -> Clock:
        """Return the clock of the host, or that of the current CUDA device, which is made when it is first asked for."""
        if not on_device:
            return self._host_clock
        if self._device_clock is None:
            self._device_clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
        return self._device_clock

    def time_completion(
        self, works: Sequence[dist.Work], recorder: Recorder, clock: Clock, *, label: str, start: Stamp
    ) -> None:
        """Record the time from ``start`` to the completion of the last work, from the back-end's own thread."""
        countdown = iter(range(len(works))[::-1])  # next() is atomic, and works may end in several threads at once
        unfinished, token = self._unfinished, object()

        def on_done(_: Any) -> None:
            if next(countdown) == 0:
                self.record(recorder, clock, Lane.COMM, label=label, start=start)
                unfinished.tokens.discard(token)

        unfinished.tokens.add(token)
        for work in works:
            work.get_future().add_done_callback(on_done)

    def record(self, recorder: Recorder, clock: Clock, lane: Lane, *, label: str, start: Stamp) -> None:
        """Record an interval from ``start`` to now, at once or as soon as its times are known."""
        span = _Span(recorder, clock, lane, label, start, clock.stamp())
        if not _record(span):
            self._owed.append(span)

    def collect(self) -> None:
        """Record what is known by now. Never waits."""
        while self._owed and _record(self._owed[0]):
            self._owed.popleft()

    def give_up(self) -> None:
        """Expect no more of what was launched: its group is lost."""
        self._unfinished.tokens.clear()


class _Unfinished:
    """Launches whose completion is still to be told.

    Telling it takes Python's lock. A thread of gloo that asks for the lock when the interpreter is gone takes the process with
    it (docs/decisions/gloo-tensors.md), so the end of the program waits a little for those that nobody has waited for.
    """

    def __init__(self) -> None:
        self.tokens: set[object] = set()
        # Callbacks keep this object, so before the end of the program there is nothing left to wait for when it goes.
        weakref.finalize(self, _wait_for_all, self.tokens)


def _wait_for_all(tokens: set[object]) -> None:
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while tokens and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _record(span: _Span) -> bool:
    stop_s = span.clock.seconds(span.stop)
    start_s = None if stop_s is None else span.clock.seconds(span.start)
    if start_s is None or stop_s is None:
        return False
    span.recorder.record_interval(Interval(span.lane, span.label, start_s, stop_s))
    return True
