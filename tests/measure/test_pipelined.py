"""The table for buckets that queue up: how many collectives are in flight, and what becomes of the points."""

import pytest
import torch

from megabucket.comm import AllToAll, Handle
from megabucket.measure.calibrate import Calibration, pipelined_link
from megabucket.measure.collectives import Cell, Timing, time_collectives
from megabucket.testing import LoopbackWorld
from megabucket.trace import CollectiveKind


class CountingCommunicator:
    """Counts launches that nobody has waited for yet, by size."""

    def __init__(self, inner):
        self.inner, self.rank, self.size, self.control = inner, inner.rank, inner.size, inner.control
        self.num_open, self.most = {}, {}

    def prepare(self, calls):
        return self.inner.prepare(calls)

    def launch(self, calls, *, label):
        num_bytes = (calls[0].sent if isinstance(calls[0], AllToAll) else calls[0].full).nbytes
        if label == "calibrate":
            self.num_open[num_bytes] = self.num_open.get(num_bytes, 0) + 1
            self.most[num_bytes] = max(self.most.get(num_bytes, 0), self.num_open[num_bytes])
        return CountingHandle(self.inner.launch(calls, label=label), self, num_bytes, label)


class CountingHandle(Handle):
    def __init__(self, inner, communicator, num_bytes, label):
        self.inner, self.communicator, self.num_bytes, self.label = inner, communicator, num_bytes, label

    @property
    def is_started(self):
        return self.inner.is_started

    def start(self):
        self.inner.start()

    def wait(self):
        self.inner.wait()
        if self.label == "calibrate":
            self.communicator.num_open[self.num_bytes] -= 1


@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize(
    ("in_flight_bytes", "expected"), [(0, [1, 1, 1]), (4096, [8, 4, 1]), (100_000, [8, 8, 8])], ids=["none", "some", "all"]
)
def test_as_many_are_in_flight_as_the_bytes_hold_and_eight_at_most(kind, in_flight_bytes, expected):
    world = LoopbackWorld(2)
    cells = [Cell(kind, "float32", size) for size in (16, 1024, 8192)]

    def measure(rank):
        communicator = CountingCommunicator(world.communicator(rank))
        device = torch.device("cpu")
        timings = time_collectives(cells, communicator, device=device, repetitions=2, in_flight_bytes=in_flight_bytes)
        assert all(seconds > 0 for timing in timings for seconds in timing.seconds)
        return [communicator.most[cell.num_bytes] for cell in cells]

    assert world.run(measure) == [expected] * 2


def test_the_lower_quartile_of_the_shorter_kind_counts_and_no_point_is_lost():
    world = LoopbackWorld(2)
    gather, reduce = (CollectiveKind.ALL_GATHER, "bfloat16"), (CollectiveKind.ALL_REDUCE, "float32")
    timings = [
        Timing(Cell(*gather, 1024), (2e-12, 1e-12, 1e-12, 1e-12, 1.0)),
        Timing(Cell(*gather, 4096), (2000.0, 3000.0)),
        Timing(Cell(*reduce, 1024), (1000.0, 1000.0)),
        Timing(Cell(*reduce, 2048), (1000.0, 1000.0)),
    ]
    calibration = Calibration.of(timings, 2, {})

    results = world.run(lambda rank: pipelined_link(calibration, world.communicator(rank), device=torch.device("cpu")))

    assert results[0] == results[1]
    assert results[0].num_ranks == 2
    points = {key: results[0].points(key[0], 2, key[1]) for key in (gather, reduce)}
    sizes = {key: [size for size, _ in each] for key, each in points.items()}
    assert sizes == {gather: [1024, 4096], reduce: [1024, 2048]}
    assert points[gather][0] == (1024, 1e-12)
    assert all(0 < seconds < 1000 for _, seconds in (*points[reduce], points[gather][1]))
