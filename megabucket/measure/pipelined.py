"""What a collective takes on the lane when the next one is waiting behind it: a measured table without the cost of each wait.

``megabucket calibrate`` measures collectives that are launched and waited for one by one, so each of its points holds a launch
and a waking thread. Buckets queue up: there only the link counts, and the host's part is counted by ``HostCosts``.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from megabucket.comm import AllReduce, Communicator
from megabucket.measure.host import meeting, slowest
from megabucket.planning.links import MeasuredLink

_PROBE_NUMEL: Final = 256
_IN_A_ROW: Final = 8
_ROUNDS: Final = 9


def time_overhead(communicator: Communicator, *, device: torch.device) -> float:
    """Return what waiting for each of several small all-reduces adds to one of them, in seconds. Collective call."""
    probe = communicator.prepare([AllReduce(torch.zeros(_PROBE_NUMEL, device=device))])
    meet = meeting(communicator, device=device)
    differences_s = []
    for _ in range(_ROUNDS):
        meet()
        start_s = time.perf_counter()
        for _ in range(_IN_A_ROW):
            communicator.launch(probe, label="probe").wait()
        one_by_one_s = time.perf_counter() - start_s
        meet()
        start_s = time.perf_counter()
        for handle in [communicator.launch(probe, label="probe") for _ in range(_IN_A_ROW)]:
            handle.wait()
        differences_s.append((one_by_one_s - (time.perf_counter() - start_s)) / (_IN_A_ROW - 1))
    return max(0.0, *slowest([statistics.median(differences_s)], communicator, device=device))


def without_overhead(link: MeasuredLink, overhead_s: float) -> MeasuredLink:
    """Return the link with ``overhead_s`` taken off each point; a tenth of a point at least stays."""
    tables = {
        key: tuple((size, max(seconds - overhead_s, seconds / 10)) for size, seconds in points)
        for key, points in link.tables.items()
    }
    return MeasuredLink(tables, link.num_ranks)
