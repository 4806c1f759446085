"""What a collective costs on the emulated fabric, against the link that the planner predicts with."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.planning.links import RingLink
from megabucket.testing import EmulatedFabric, fabric_lateness
from megabucket.trace import CollectiveKind

LATENCIES = st.floats(0, 1)
BANDWIDTHS = st.floats(1e3, 1e12)
SIZES = st.integers(0, 10**10)


@given(
    latency_s=LATENCIES,
    bytes_per_s=BANDWIDTHS,
    payload_bytes=SIZES,
    num_ranks=st.integers(1, 1000),
    kind=st.sampled_from(CollectiveKind),
)
def test_the_fabric_takes_the_time_that_a_ring_link_predicts(latency_s, bytes_per_s, payload_bytes, num_ranks, kind):
    fabric, link = EmulatedFabric(latency_s, bytes_per_s), RingLink(latency_s=latency_s, bytes_per_s=bytes_per_s)

    if kind is CollectiveKind.ALL_TO_ALL:
        seconds = fabric.all_to_all_s(sent_bytes=payload_bytes, num_ranks=num_ranks)
    else:
        seconds = fabric.collective_s(ring_passes=kind.ring_passes, payload_bytes=payload_bytes, num_ranks=num_ranks)

    assert seconds == pytest.approx(link.collective_s(kind, payload_bytes, num_ranks), rel=1e-12)


def test_four_ranks_by_hand():
    fabric = EmulatedFabric(latency_s=1e-3, bytes_per_s=1e6)

    # 6 steps of 1 ms, and 2 x 4000 x 3/4 bytes at 1 MB/s.
    assert fabric.collective_s(ring_passes=2, payload_bytes=4000, num_ranks=4) == pytest.approx(6e-3 + 6e-3)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s"),
    [(-1e-9, 1.0), (math.nan, 1.0), ("fast", 1.0), (True, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, math.inf)],
)
def test_times_that_no_link_has_are_refused(latency_s, bytes_per_s):
    with pytest.raises(ConfigError, match=r"EmulatedFabric: \w+ must be a finite number >"):
        EmulatedFabric(latency_s, bytes_per_s)


@pytest.mark.parametrize(
    ("tensor", "is_moved"),
    [
        (torch.zeros(64), True),  # 256 bytes: a norm, a flag
        (torch.zeros(65), False),
        (torch.zeros(10_000, dtype=torch.int64), True),
        (torch.zeros(10_000, dtype=torch.bfloat16), False),
    ],
)
def test_timing_only_moves_what_controls_the_program(tensor, is_moved):
    assert EmulatedFabric(0.0, 1.0, moves_data=False).moves(tensor) == is_moved
    assert EmulatedFabric(0.0, 1.0).moves(tensor)


def test_lateness_of_another_back_end_is_not_known():
    with pytest.raises(ConfigError, match="no emulated fabric"):
        fabric_lateness()
