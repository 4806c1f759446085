"""Timing collectives: which ones, in which order, and what counts. On a loopback world, where a mismatch fails at once."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm import Handle
from megabucket.errors import ConfigError
from megabucket.measure.collectives import SMALLEST_BYTES, Cell, cells_of, sizes_up_to, time_collectives
from megabucket.testing import LoopbackWorld
from megabucket.trace import CollectiveKind
from megabucket.units import dtype_bytes

KINDS = tuple(CollectiveKind)


@given(st.integers(SMALLEST_BYTES + 1, 10**11))
def test_sizes_rise_to_the_largest_by_a_factor_of_four_at_most(max_bytes):
    sizes = sizes_up_to(max_bytes)

    assert (sizes[0], sizes[-1]) == (SMALLEST_BYTES, max_bytes)
    assert all(1 < following / size <= 4 for size, following in itertools.pairwise(sizes))


@pytest.mark.parametrize("max_bytes", [-5, 0, SMALLEST_BYTES])
def test_a_largest_size_that_leaves_no_second_one_is_refused(max_bytes):
    with pytest.raises(ConfigError, match=f"--max-bytes={max_bytes} leaves one size"):
        sizes_up_to(max_bytes)


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    st.lists(st.sampled_from(["float32", "bfloat16", "float64"]), min_size=1, unique=True),
    st.integers(SMALLEST_BYTES + 1, 10**6),
    st.integers(2, 2000),
)
def test_every_buffer_is_made_of_equal_shards_and_comes_once(kinds, dtypes, max_bytes, num_ranks):
    cells = cells_of(kinds, dtypes, max_bytes, num_ranks)

    assert len(set(cells)) == len(cells)
    assert {(cell.kind, cell.dtype) for cell in cells} == {(kind, dtype) for kind in kinds for dtype in dtypes}
    for cell in cells:
        unit = num_ranks * dtype_bytes(cell.dtype)
        assert cell.num_bytes % unit == 0
        assert cell.num_bytes <= max_bytes + unit


def run(world, cells, repetitions, communicator_of=lambda communicator: communicator):
    def measure(rank):
        communicator = communicator_of(world.communicator(rank))
        return time_collectives(cells, communicator, device=torch.device("cpu"), repetitions=repetitions)

    return world.run(measure)


def test_all_ranks_launch_the_same_and_get_the_same_timings():
    world = LoopbackWorld(3)
    cells = cells_of(KINDS, ("float32", "bfloat16"), 5000, 3)

    results = run(world, cells, repetitions=3)

    assert results[0] == results[1] == results[2]
    assert [timing.cell for timing in results[0]] == list(cells)
    assert {len(timing.seconds) for timing in results[0]} == {3}
    assert all(seconds > 0 for timing in results[0] for seconds in timing.seconds)


def test_repetitions_go_through_all_cells_in_orders_of_their_own():
    world = LoopbackWorld(2)
    cells = [Cell(CollectiveKind.ALL_REDUCE, "float32", 8 * numel) for numel in range(1, 7)]

    run(world, cells, repetitions=2)

    launched = [text for text in world.schedule(0) if text.startswith(("calibrate", "meet"))]
    starts = [index for index, text in enumerate(launched) if text.startswith("meet")]
    order = [launched[index + 1] for index in starts]  # what follows each meeting
    assert sorted(order[:6]) == sorted(order[6:])
    assert len(set(order[:6])) == 6
    assert order[:6] != order[6:]


class SlowCommunicator:
    """Waits longer than it must, on one rank, after the collective is done."""

    def __init__(self, inner, delay_s):
        self.inner, self.delay_s, self.rank, self.size = inner, delay_s, inner.rank, inner.size
        self.control = inner.control

    def prepare(self, calls):
        return self.inner.prepare(calls)

    def launch(self, calls, *, label):
        return SlowHandle(self.inner.launch(calls, label=label), self.delay_s if label == "calibrate" else 0.0)


class SlowHandle(Handle):
    def __init__(self, inner, delay_s):
        self.inner, self.delay_s = inner, delay_s

    @property
    def is_started(self):
        return self.inner.is_started

    def start(self):
        self.inner.start()

    def wait(self):
        self.inner.wait()
        time.sleep(self.delay_s)


def test_the_slowest_rank_counts():
    world = LoopbackWorld(3)
    cells = cells_of((CollectiveKind.ALL_REDUCE,), ("float32",), 2000, 3)

    results = run(world, cells, 2, lambda inner: SlowCommunicator(inner, 0.01 if inner.rank == 2 else 0.0))

    assert all(seconds >= 0.01 for timing in results[0] for seconds in timing.seconds)


def test_buffers_beyond_memory_are_refused_in_words():
    cell = Cell(CollectiveKind.ALL_REDUCE, "float32", 2**60)

    with pytest.raises(ConfigError, match="do not fit into memory: lower --max-bytes"):
        time_collectives([cell], LoopbackWorld(1).communicator(0), device=torch.device("cpu"), repetitions=1)
