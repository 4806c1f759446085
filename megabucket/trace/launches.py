"""From what was noted about collectives while they ran to when each was ready, launched, done and waited for. Pure, no torch.

Launches are told by their label and their time: a communicator gives two launches that are under way at once two labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane

_SAME_MOMENT_S: Final = 1e-6
"""By how much an interval may seem to begin before its launch: device times are rounded."""


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """One launch in a step. Times are seconds of the trace's clock; ``None``: not within the step, or unknown."""

    label: str
    kind: CollectiveKind
    payload_bytes: int
    ready_s: float | None
    """When the last gradient of the bucket arrived; ``None`` as well for what is no bucket."""
    launched_s: float
    done_s: float | None
    """When the collective was complete."""
    wait_start_s: float | None
    """When the caller's thread came to need the result."""
    wait_stop_s: float | None
    """When it went on; the time in between is exposed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch as it was noted, with the intervals that belong to it as far as they are known."""

    record: CollectiveRecord
    launched_s: float
    under_way: Interval | None = None
    waited: Interval | None = None


def with_intervals(launches: Sequence[Launch], intervals: Iterable[Interval]) -> list[Launch]:
    """Return launches, given in order of time, with the COMM and WAIT intervals that belong to them.

    An interval belongs to the last launch of its label before it.
    """
    known = list(intervals)
    comm, wait = _by_label(known, Lane.COMM), _by_label(known, Lane.WAIT)
    next_s: dict[str, float] = {}
    found = []
    for launch in reversed(launches):
        label, from_s = launch.record.label, launch.launched_s
        until_s = next_s.get(label, float("inf"))
        under_way, waited = _first(comm.get(label, []), from_s, until_s), _first(wait.get(label, []), from_s, until_s)
        found.append(replace(launch, under_way=under_way, waited=waited))
        next_s[label] = from_s
    return found[::-1]


def launch_times(launch: Launch, *, ready_s: float | None, stop_s: float) -> LaunchTimes:
    """Return the times of a launch within a step that ends at ``stop_s``.

    Args:
        ready_s: when the bucket was ready in the step.
    """
    waited = launch.waited
    # One that was waited for is complete, also where nobody tells when that was.
    done = launch.under_way if launch.under_way is not None else waited
    return LaunchTimes(
        label=launch.record.label,
        kind=launch.record.kind,
        payload_bytes=launch.record.payload_bytes,
        ready_s=ready_s,
        launched_s=launch.launched_s,
        done_s=None if done is None else _within(done.stop_s, stop_s),
        wait_start_s=None if waited is None else _within(waited.start_s, stop_s),
        wait_stop_s=None if waited is None else _within(waited.stop_s, stop_s),
    )


def time_under_way(launch: Launch, *, stop_s: float) -> Interval:
    """Return the COMM interval of a launch: as recorded, or else up to where it was waited for, or else to ``stop_s``.

    A collective is recorded when it completes. One without a record is still under way, or nobody tells when it ended.
    """
    if launch.under_way is not None:
        return launch.under_way
    end_s = launch.waited.stop_s if launch.waited is not None else max(stop_s, launch.launched_s)
    return Interval(Lane.COMM, launch.record.label, launch.launched_s, end_s)


def _by_label(intervals: Iterable[Interval], lane: Lane) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for interval in intervals:
        if interval.lane is lane:
            found.setdefault(interval.label, []).append(interval)
    for known in found.values():
        known.sort(key=lambda interval: interval.start_s)
    return found


def _first(intervals: Sequence[Interval], from_s: float, until_s: float) -> Interval | None:
    """Return the first interval that begins between two moments."""
    start = bisect_left(intervals, from_s - _SAME_MOMENT_S, key=lambda interval: interval.start_s)
    if start < len(intervals) and intervals[start].start_s < until_s - _SAME_MOMENT_S:
        return intervals[start]
    return None


def _within(moment_s: float, stop_s: float) -> float | None:
    return moment_s if moment_s <= stop_s else None
