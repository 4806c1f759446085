"""Clocks: what a moment is while it is noted, and which second it was once that can be known. No torch.

The host knows the time at once. A device does its work later than the host asks for it, so a moment of a device is an event
in its queue, and becomes a time when the device has come there. Nobody waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

Stamp: TypeAlias = Any
"""A noted moment, of use to the clock that gave it: a number, or an event of a device."""

_LONGEST_SPAN_S: Final = 1.0
"""Events tell the time between them in float32 milliseconds: within a second that is exact to 60 nanoseconds."""


class Clock(Protocol):
    """Notes moments and tells, later perhaps, when they were. One time base: seconds of ``time.perf_counter``."""

    def stamp(self) -> Stamp:
        """Note this moment. Quick, never waits, and may be called from any thread."""
        ...

    def seconds(self, stamp: Stamp) -> float | None:
        """Return when a moment was, or ``None`` while that is not known. Never waits."""
        ...


class HostClock:
    """The clock of this process."""

    def stamp(self) -> Stamp:
        """Return the time."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float | None:
        """Return the time that was noted."""
        return float(stamp)


class DeviceClock:
    """The clock of a device with a queue. Waits for the device once, when it is made.

    Args:
        new_event: makes an event that takes part in timing, for instance ``torch.cuda.Event(enable_timing=True)``.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        # All times are counted from a pair of moments known to be the same: one of the device and one of the host.
        self._anchor = self.stamp()
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()

    def stamp(self) -> Stamp:
        """Return an event at the end of the device's current queue."""
        event = self._new_event()
        event.record()
        return event

    def seconds(self, stamp: Stamp) -> float | None:
        """Return when the device came to the event, or ``None`` if it has not."""
        if not stamp.query():
            return None
        anchor, anchor_s = self._anchor, self._anchor_s
        elapsed_s = float(anchor.elapsed_time(stamp)) / 1e3
        if elapsed_s > _LONGEST_SPAN_S:
            self._anchor, self._anchor_s = stamp, anchor_s + elapsed_s
        return anchor_s + elapsed_s
