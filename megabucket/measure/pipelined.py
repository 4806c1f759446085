"""What a collective takes on the lane when others of its kind are in flight: a measured table for buckets that queue up.

``megabucket calibrate`` measures collectives that are launched and waited for one by one, so each of its points holds a launch
and a waking thread, and nothing that a back-end does side by side shows. Of buckets in a queue only the lane's time counts; the
host's part is counted by ``HostCosts``.
"""

from __future__ import annotations

from typing import Final

import torch

from megabucket.comm import Communicator
from megabucket.measure.collectives import Cell, time_collectives
from megabucket.planning.links import MeasuredLink, TableKey

_IN_FLIGHT_BYTES: Final = 8 * 2**20  # of larger collectives the rest is a small part
_ROUNDS: Final = 7


def pipelined_link(link: MeasuredLink, communicator: Communicator, *, device: torch.device) -> MeasuredLink:
    """Return a measured link with the times of collectives in flight together, at the sizes of its points. Collective call.

    No point gets larger: what is waited for one by one cannot be faster.
    """
    cells = [Cell(kind, dtype, int(size)) for (kind, dtype), points in link.tables.items() for size, _ in points]
    timings = time_collectives(cells, communicator, device=device, repetitions=_ROUNDS, in_flight_bytes=_IN_FLIGHT_BYTES)
    seconds = {(timing.cell.kind, timing.cell.dtype, timing.cell.num_bytes): timing.median_s for timing in timings}
    tables: dict[TableKey, tuple[tuple[float, float], ...]] = {
        (kind, dtype): tuple((size, min(alone_s, seconds[kind, dtype, int(size)])) for size, alone_s in points)
        for (kind, dtype), points in link.tables.items()
    }
    return MeasuredLink(tables, link.num_ranks)
