"""Chrome-trace JSON of steps, for Perfetto and ``chrome://tracing``: one process per rank, one track per lane. No torch.

Collectives of one rank may be under way at the same time, and slices of one track must nest; so a lane gets as many
tracks as it has intervals at once.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megabucket.trace.recorder import Interval, Lane
from megabucket.trace.step_trace import StepTrace, TimeSpan

_TRACKS_PER_LANE = 1000


def chrome_trace(traces: Iterable[StepTrace]) -> dict[str, Any]:
    """Return steps of any number of ranks as one Chrome-trace object, ready for ``json.dump``.

    Times are microseconds since the earliest step. All ranks must have read the same clock, which
    ``time.perf_counter`` is on one machine only: across machines the ranks are shifted against each other.

    A complete event (``ph: X``) has ``pid`` = rank and ``tid`` = track; the step itself is a track of its own.
    """
    steps = sorted(traces, key=lambda trace: (trace.rank, trace.start_s))
    origin_s = min((trace.start_s for trace in steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in dict.fromkeys(trace.rank for trace in steps):
        of_rank = [trace for trace in steps if trace.rank == rank]
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        events.append(_metadata("thread_name", rank, 0, "step"))
        for trace in of_rank:
            span = (trace.start_s - origin_s, trace.stop_s - origin_s)
            events.append(_slice(f"step {trace.step}", rank, 0, span))
        for position, lane in enumerate(Lane, start=1):
            intervals = [part for trace in of_rank for part in trace.intervals if part.lane is lane]
            events += _lane_events(intervals, rank=rank, first_track=position * _TRACKS_PER_LANE, origin_s=origin_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, traces: Iterable[StepTrace]) -> None:
    """Write ``chrome_trace(traces)`` to ``path``, making its directory.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(traces), allow_nan=False) + "\n", encoding="utf-8")


def assign_tracks(intervals: Sequence[Interval]) -> tuple[int, ...]:
    """Return a track for each interval such that those on one track never overlap, with as few tracks as possible.

    Intervals are taken in order of their start; each gets the lowest track that is free by then.

    >>> from megabucket.trace.recorder import Lane
    >>> spans = [(0, 4), (1, 2), (2, 3)]
    >>> assign_tracks([Interval(Lane.COMM, "bucket", start, stop) for start, stop in spans])
    (0, 1, 1)
    """
    tracks = [0] * len(intervals)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for index in sorted(range(len(intervals)), key=lambda i: (intervals[i].start_s, intervals[i].stop_s)):
        while busy and busy[0][0] <= intervals[index].start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        tracks[index] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (intervals[index].stop_s, tracks[index]))
    return tuple(tracks)


def _lane_events(intervals: Sequence[Interval], *, rank: int, first_track: int, origin_s: float) -> list[dict[str, Any]]:
    tracks = assign_tracks(intervals)
    events = []
    for track in sorted(set(tracks)):
        name = intervals[0].lane.value if track == 0 else f"{intervals[0].lane.value} {track + 1}"
        events.append(_metadata("thread_name", rank, first_track + track, name))
    for interval, track in zip(intervals, tracks, strict=True):
        span = (interval.start_s - origin_s, interval.stop_s - origin_s)
        events.append(_slice(interval.label, rank, first_track + track, span))
    return events


def _slice(name: str, rank: int, track: int, span: TimeSpan) -> dict[str, Any]:
    # Both ends are rounded to nanoseconds, the viewers' unit: neighbours that touch must not overlap by a rounding error.
    start_ns, stop_ns = round(span[0] * 1e9), round(span[1] * 1e9)
    return {"ph": "X", "name": name, "pid": rank, "tid": track, "ts": start_ns / 1e3, "dur": (stop_ns - start_ns) / 1e3}


def _metadata(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}
