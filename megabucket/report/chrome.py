"""Chrome-trace JSON of steps, for Perfetto and ``chrome://tracing``: one process per rank. No torch.

Collectives of one rank may be under way at the same time, but slices of one track must nest; so a lane gets as many tracks as
it has intervals at once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megabucket.planning.documents import write_text
from megabucket.trace.recorder import Lane
from megabucket.trace.step_trace import StepTrace

_TRACKS_PER_LANE = 1000


def chrome_trace(traces: Iterable[StepTrace]) -> dict[str, Any]:
    """Return steps of any number of ranks as one Chrome-trace object, ready for ``json.dump``.

    Times are microseconds since the earliest step. All ranks must have read the same clock, which
    ``time.perf_counter`` is on one machine only: across machines the ranks are shifted against each other.

    A complete event (``ph: X``) has ``pid`` = rank and ``tid`` = track; the steps have a track of their own.
    """
    spans: defaultdict[tuple[int, str], list[tuple[float, float, str]]] = defaultdict(list)  # by rank and lane
    for trace in traces:
        spans[trace.rank, "step"].append((trace.start_s, trace.stop_s, f"step {trace.step}"))
        for part in trace.intervals:
            spans[trace.rank, part.lane.value].append((part.start_s, part.stop_s, part.label))
    origin_s = min((start_s for of_lane in spans.values() for start_s, *_ in of_lane), default=0.0)
    lanes = ["step", *(lane.value for lane in Lane)]
    events: list[dict[str, Any]] = []
    for (rank, lane), of_lane in sorted(spans.items()):
        if lane == "step":
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        track_ends: list[float] = []
        for start_s, stop_s, label in sorted(of_lane):
            track = next((track for track, end_s in enumerate(track_ends) if end_s <= start_s), len(track_ends))
            track_ends[track : track + 1] = [stop_s]
            # Both ends are rounded to nanoseconds, the viewers' unit: neighbours that touch must not overlap by an error.
            start_ns, stop_ns = round((start_s - origin_s) * 1e9), round((stop_s - origin_s) * 1e9)
            times = {"ts": start_ns / 1e3, "dur": (stop_ns - start_ns) / 1e3}
            events.append({"ph": "X", "name": label, "pid": rank, "tid": lanes.index(lane) * _TRACKS_PER_LANE + track, **times})
        for track in range(len(track_ends)):
            name = {"name": lane if track == 0 else f"{lane} {track + 1}"}
            tid = lanes.index(lane) * _TRACKS_PER_LANE + track
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": name})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, traces: Iterable[StepTrace]) -> None:
    """Write ``chrome_trace(traces)`` to ``path``, making its directory.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(chrome_trace(traces), allow_nan=False) + "\n")
