"""Clocks: record moments, and convert them to seconds later. No torch.

The host knows the time at once. A device works asynchronously, so its moment is an event in its queue, and has a time once the
device has reached it. Clocks never wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

Stamp: TypeAlias = Any
"""A recorded moment, for the clock that made it: a number, or an event of a device."""

_LONGEST_SPAN_S: Final = 1.0
"""Events measure the time between them in float32 milliseconds: exact to 60 nanoseconds within a second."""


class Clock(Protocol):
    """Records moments and converts them to seconds of ``time.perf_counter``, perhaps later."""

    def stamp(self) -> Stamp:
        """Record this moment. Fast, never waits, for any thread."""
        ...

    def seconds(self, stamp: Stamp) -> float | None:
        """Return the time of a moment, or ``None`` while it is not known. Never waits."""
        ...


class HostClock:
    """The clock of this process."""

    def stamp(self) -> Stamp:
        """Return the time."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float | None:
        """Return the recorded time."""
        return float(stamp)


class DeviceClock:
    """The clock of a device with a queue. Its constructor waits for the device once.

    Args:
        new_event: makes an event with timing, for instance ``torch.cuda.Event(enable_timing=True)``.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        # Times are counted from an anchor: a moment known on the device and on the host.
        self._anchor = self.stamp()
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()

    def stamp(self) -> Stamp:
        """Return an event at the end of the device's current queue."""
        event = self._new_event()
        event.record()
        return event

    def seconds(self, stamp: Stamp) -> float | None:
        """Return when the device reached the event, or ``None`` if it has not."""
        if not stamp.query():
            return None
        anchor, anchor_s = self._anchor, self._anchor_s
        elapsed_s = float(anchor.elapsed_time(stamp)) / 1e3
        if elapsed_s > _LONGEST_SPAN_S:
            self._anchor, self._anchor_s = stamp, anchor_s + elapsed_s
        return anchor_s + elapsed_s
