"""What a collective takes on the lane when nothing disturbs it: a measured table for buckets that queue up.

``megabucket calibrate`` measures collectives that are launched and waited for one by one, so each of its points holds a launch
and a waking thread, and nothing that a back-end does side by side shows. Of buckets in a queue only the lane's time counts; the
host's part is counted by ``HostCosts``. So small collectives are measured once more, several in flight, and the lower quartile
of the rounds counts, of whichever kind is shorter: the other rounds show how long threads of the back-end stood in line for a
core, which is different in a step.
"""

from __future__ import annotations

from typing import Final

import torch

from megabucket.comm import Communicator
from megabucket.measure.calibrate import Calibration
from megabucket.measure.collectives import time_collectives
from megabucket.planning.links import MeasuredLink, TableKey

_IN_FLIGHT_BYTES: Final = 8 * 2**20  # of larger collectives the rest is a small part
_ROUNDS: Final = 7


def pipelined_link(calibration: Calibration, communicator: Communicator, *, device: torch.device) -> MeasuredLink:
    """Return the link of a calibration with the times of undisturbed rounds, alone or in flight together. Collective call."""
    cells = [timing.cell for timing in calibration.timings]
    in_flight = time_collectives(cells, communicator, device=device, repetitions=_ROUNDS, in_flight_bytes=_IN_FLIGHT_BYTES)
    undisturbed_s = {
        alone.cell: min(alone.quartiles_s[0], together.quartiles_s[0])
        for alone, together in zip(calibration.timings, in_flight, strict=True)
    }
    tables: dict[TableKey, tuple[tuple[float, float], ...]] = {
        key: tuple((timing.cell.num_bytes, undisturbed_s[timing.cell]) for timing in timings)
        for key, timings in calibration.tables.items()
    }
    return MeasuredLink(tables, calibration.num_ranks)
