"""What one collective costs: the formulas, the tables, the line through a table, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from timing_cases import flat, ring

from megabucket.errors import ConfigError
from megabucket.planning.links import MeasuredLink, ReplicatedLink, TwoLevelLink, fit_affine
from megabucket.trace import CollectiveKind, CollectiveRecord

AR, RS, AG, BC, A2A = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.BROADCAST,
    CollectiveKind.ALL_TO_ALL,
)
POINTS = ((1000.0, 1e-3), (3000.0, 2e-3), (4000.0, 4e-3))
TABLE = MeasuredLink.of({(AR, "float32"): POINTS}, num_ranks=2)
INSIDE, BETWEEN = ring(1e-6, 300e9), ring(1e-5, 25e9)
SIZES = st.integers(0, 10**12)
RANKS = st.integers(1, 4096)


def ring_by_steps(kind, payload_bytes, num_ranks, latency_s, bytes_per_s):
    """Return the time of an algorithm, step by step: each step of a ring moves one chunk of ``S / n`` bytes to the next rank.

    An all-to-all sends each other rank its part of ``S``, all of which leaves this rank.
    """
    if kind is A2A:
        return (num_ranks - 1) * latency_s + payload_bytes / bytes_per_s
    rounds = {AR: 2, RS: 1, AG: 1, BC: 1}[kind]
    return sum(latency_s + payload_bytes / num_ranks / bytes_per_s for _ in range(rounds * (num_ranks - 1)))


@given(st.sampled_from(CollectiveKind), SIZES, st.integers(1, 64))
def test_a_ring_takes_its_steps(kind, payload_bytes, num_ranks):
    link = ring(1e-5, 25e9)

    expected = ring_by_steps(kind, payload_bytes, num_ranks, 1e-5, 25e9)
    assert link.collective_s(kind, payload_bytes, num_ranks) == pytest.approx(expected, rel=1e-9)


@given(st.sampled_from(CollectiveKind), SIZES, RANKS)
def test_a_ring_without_latency_moves_the_bytes_that_a_collective_must_move(kind, payload_bytes, num_ranks):
    record = CollectiveRecord(kind, "bucket", 1, payload_bytes, num_ranks)

    assert ring(0.0, 1.0).collective_s(kind, payload_bytes, num_ranks) == pytest.approx(record.wire_bytes)


@given(SIZES, RANKS)
def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce(payload_bytes, num_ranks):
    for link in (ring(1e-5, 25e9), TwoLevelLink(inside=INSIDE, between=BETWEEN, ranks_per_node=1)):
        half = [link.collective_s(kind, payload_bytes, num_ranks) for kind in (RS, AG)]
        assert sum(half) == pytest.approx(link.collective_s(AR, payload_bytes, num_ranks))


@pytest.mark.parametrize("num_ranks", [8, 16, 512])
def test_two_levels_reduce_inside_then_between_then_gather_inside(num_ranks):
    link = TwoLevelLink(inside=INSIDE, between=BETWEEN, ranks_per_node=8)
    payload_bytes = 2**30

    inside = INSIDE.collective_s(RS, payload_bytes, 8) + INSIDE.collective_s(AG, payload_bytes, 8)
    between = BETWEEN.collective_s(AR, payload_bytes / 8, num_ranks // 8)
    assert link.collective_s(AR, payload_bytes, num_ranks) == pytest.approx(inside + between)
    assert link.collective_s(RS, payload_bytes, num_ranks) == pytest.approx((inside + between) / 2)


def test_an_all_to_all_over_two_levels_sends_some_messages_inside_and_the_others_between():
    link = TwoLevelLink(inside=ring(1e-6, 8e9), between=ring(1e-5, 1e9), ranks_per_node=4)

    # To 3 ranks of the own node and to 8 others, 1 MB each.
    expected = 3 * (1e-6 + 1e6 / 8e9) + 8 * (1e-5 + 1e6 / 1e9)
    assert link.collective_s(A2A, 11e6, 12) == pytest.approx(expected)
    # In one node there is only the ring.
    assert link.collective_s(A2A, 3e6, 4) == pytest.approx(3 * (1e-6 + 1e6 / 8e9))


def test_replicas_exchange_parts_inside_of_each():
    link = ring(1e-5, 1e9)

    assert ReplicatedLink(link=link, num_instances=3).collective_s(A2A, 1e6, 4) == link.collective_s(A2A, 1e6, 4)


def test_an_all_to_all_that_was_not_measured_takes_the_time_of_a_gather_that_sends_as_much():
    points = ((1000.0, 1e-3), (4000.0, 2e-3))
    link = MeasuredLink.of({(AG, "bfloat16"): points, (AG, "float32"): POINTS}, num_ranks=4)

    # Each rank sends 3/4 of the full buffer: 750 bytes of the first point, 3000 of the last.
    assert link.points(A2A, 4, "bfloat16") == ((750.0, 1e-3), (3000.0, 2e-3))
    assert link.collective_s(A2A, 3000, 4, "bfloat16") == 2e-3
    assert link.points(A2A, 4) == tuple((size * 3 / 4, seconds) for size, seconds in POINTS)
    measured = MeasuredLink.of({(AG, "float32"): POINTS, (A2A, "float32"): points}, num_ranks=4)
    assert measured.points(A2A, 4) == points
    with pytest.raises(ConfigError, match="no table for all_to_all; it was measured for all_reduce"):
        TABLE.collective_s(A2A, 8, 2)


def test_a_part_of_one_node_is_a_ring_and_parts_of_several_are_refused():
    link = TwoLevelLink(inside=INSIDE, between=BETWEEN, ranks_per_node=8)

    assert link.collective_s(AR, 1e9, 3) == INSIDE.collective_s(AR, 1e9, 3)
    with pytest.raises(ConfigError, match="not a multiple of ranks_per_node=8"):
        link.collective_s(AR, 1e9, 12)


@given(st.sampled_from(CollectiveKind), SIZES, RANKS)
def test_what_is_affine_says_so_exactly(kind, payload_bytes, num_ranks):
    for link in (
        flat(1e-3, 1e-9),
        ring(1e-5, 25e9),
        TwoLevelLink(inside=INSIDE, between=BETWEEN, ranks_per_node=1),
    ):
        latency_s, seconds_per_byte = link.affine(kind, num_ranks)
        assert link.collective_s(kind, payload_bytes, num_ranks) == latency_s + seconds_per_byte * payload_bytes


@pytest.mark.parametrize(
    ("payload_bytes", "seconds"),
    [
        (0, 1e-3),  # below the first point: its time
        (1000, 1e-3),
        (2000, 1.5e-3),
        (3000, 2e-3),
        (3500, 3e-3),
        (4000, 4e-3),
        (6000, 8e-3),  # beyond the last point: 2e-6 s per byte goes on
    ],
)
def test_a_table_is_linear_between_its_points(payload_bytes, seconds):
    assert TABLE.collective_s(AR, payload_bytes, 2) == pytest.approx(seconds)
    assert TABLE.affine(AR, 2) == fit_affine(POINTS)
    assert not TABLE.is_affine


def test_a_table_that_falls_at_its_end_stays_flat_beyond_it():
    link = MeasuredLink.of({(AR, "float32"): ((0.0, 2e-3), (8.0, 1e-3))}, num_ranks=2)

    assert link.collective_s(AR, 1e9, 2) == 1e-3


def test_a_dtype_that_was_not_measured_takes_the_times_of_float32():
    other = ((0.0, 5.0), (1.0, 6.0))
    link = MeasuredLink.of({(AR, "bfloat16"): other, (AR, "float32"): POINTS}, num_ranks=2)

    assert link.collective_s(AR, 1000, 2, "bfloat16") == 1005.0
    assert link.collective_s(AR, 1000, 2, "float64") == link.collective_s(AR, 1000, 2, "float32") == 1e-3
    assert MeasuredLink.of({(AR, "bfloat16"): other}, num_ranks=2).collective_s(AR, 0, 2, "float32") == 5.0


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: flat(-1.0, 0.0), "latency_s\n  Input should be greater than or equal to 0"),
        (lambda: flat(0.0, math.nan), "seconds_per_byte\n  Input should be a finite number"),
        (lambda: ring(0.0, 0.0), "bytes_per_s\n  Input should be greater than 0"),
        (
            lambda: TwoLevelLink(inside=INSIDE, between=BETWEEN, ranks_per_node=0),
            "ranks_per_node\n  Input should be greater than 0",
        ),
        (lambda: MeasuredLink.of({}, 2), "tables\n  Value should have at least 1 item"),
        (lambda: MeasuredLink.of({(AR, "float32"): POINTS}, 0), "num_ranks\n  Input should be greater than 0"),
        (lambda: MeasuredLink.of({(AR, "float32"): POINTS[:1]}, 2), "points\n  Value should have at least 2 items"),
        (lambda: MeasuredLink.of({(AR, "float32"): POINTS[::-1]}, 2), "points: 3000.0 bytes after 4000.0; sort them by bytes"),
        (lambda: MeasuredLink.of({(AR, "float32"): (POINTS[0], (2000.0, -1.0))}, 2), "should be greater than or equal to 0"),
    ],
)
def test_a_link_that_cannot_be_is_refused_with_the_field(build, text):
    with pytest.raises(ValidationError) as caught:
        build()

    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: TABLE.collective_s(AR, 8, 4), "measured on 2 ranks and says nothing about 4"),
        (lambda: TABLE.collective_s(RS, 8, 2), "no table for reduce_scatter; it was measured for all_reduce"),
    ],
)
def test_a_question_that_a_link_cannot_answer_is_refused(ask, text):
    with pytest.raises(ConfigError, match=text):
        ask()


# The line through a table #


@given(st.floats(1e-7, 1), st.floats(1e-12, 1e-6), st.lists(st.integers(0, 2**32), min_size=2, max_size=20, unique=True))
def test_points_on_a_line_give_the_line(latency_s, slope, sizes):
    fit = fit_affine([(size, latency_s + slope * size) for size in sorted(sizes)])

    for size in sizes:
        assert fit(size) == pytest.approx(latency_s + slope * size, rel=1e-5)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e-6, 1)), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_no_line_with_latency_and_slope_above_zero_has_a_smaller_relative_error(points):
    points.sort()

    def error(latency_s, slope):
        return sum(((latency_s + slope * size) / seconds - 1) ** 2 for size, seconds in points)

    fit = fit_affine(points)

    assert fit.latency_s >= 0
    assert fit.seconds_per_byte >= 0
    for factor_a in (0.0, 0.9, 1.1):
        for factor_b in (0.0, 0.9, 1.1):
            least = error(fit.latency_s * factor_a + 1e-9, fit.seconds_per_byte * factor_b + 1e-15)
            assert error(fit.latency_s, fit.seconds_per_byte) <= least * (1 + 1e-6) + 1e-9


def test_a_table_of_zeros_fits_a_link_that_costs_nothing():
    assert fit_affine([(0, 0.0), (8, 0.0)])(100) == 0.0


def test_one_point_is_its_time_for_any_size():
    assert fit_affine([(0, 0.5)])(100) == 0.5
