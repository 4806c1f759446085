import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepTrace
from megabucket.trace.step_trace import clip_interval


def intervals(*, max_intervals=10):
    """Intervals on whole ticks of all lanes; shrinks towards none."""
    tick = st.integers(0, 30)
    return st.lists(st.builds(Interval, st.sampled_from(Lane), st.just("x"), tick, tick), max_size=max_intervals)


def ticks(some, lane):
    return {tick for part in some if part.lane is lane for tick in range(part.start_s, part.stop_s)}


@given(intervals())
def test_the_figures_of_a_step_equal_counting_ticks(some):
    trace = StepTrace(step=0, rank=0, start_s=0, stop_s=30, intervals=tuple(some))
    compute, comm, wait = (ticks(some, lane) for lane in (Lane.COMPUTE, Lane.COMM, Lane.WAIT))

    assert trace.comm_s == len(comm)
    assert trace.exposed_s == len(wait)
    assert trace.compute_s == len(compute - wait)
    assert trace.hidden_s == len(comm - wait)
    if comm:
        assert trace.overlap_fraction == pytest.approx(len(comm - wait) / len(comm))
        assert 0 <= trace.overlap_fraction <= 1
    else:
        assert trace.overlap_fraction is None


def test_communication_behind_a_wait_is_exposed_and_the_rest_is_hidden():
    trace = StepTrace(
        step=3,
        rank=1,
        start_s=0.0,
        stop_s=10.0,
        intervals=(
            Interval(Lane.COMPUTE, "backward", 0.0, 8.0),
            Interval(Lane.COMM, "bucket 0", 2.0, 6.0),
            Interval(Lane.COMM, "bucket 1", 5.0, 9.0),
            Interval(Lane.WAIT, "bucket 1", 7.0, 9.0),
        ),
    )

    assert trace.comm_s == 7.0  # from 2 to 9
    assert trace.exposed_s == 2.0  # from 7 to 9
    assert trace.compute_s == 7.0  # from 0 to 7: the wait lies inside the backward
    assert trace.overlap_fraction == pytest.approx(5 / 7)


def test_collectives_are_counted_per_call_and_in_bytes():
    records = (
        CollectiveRecord(CollectiveKind.REDUCE_SCATTER, "bucket 0", num_calls=3, payload_bytes=1000, num_ranks=4),
        CollectiveRecord(CollectiveKind.ALL_REDUCE, "norm", num_calls=1, payload_bytes=8, num_ranks=4),
    )

    trace = StepTrace(step=0, rank=0, start_s=0.0, stop_s=1.0, intervals=(), collectives=records)

    assert trace.num_collectives == 4
    assert trace.payload_bytes == 1008
    assert trace.wire_bytes == 1000 * 3 / 4 + 2 * 8 * 3 / 4


@given(intervals(max_intervals=1), st.integers(0, 30), st.integers(0, 30))
def test_clipping_keeps_exactly_the_ticks_inside_the_window(some, start, stop):
    for interval in some:
        clipped = clip_interval(interval, start, stop)

        kept = set(range(interval.start_s, interval.stop_s)) & set(range(start, stop))
        assert ticks([clipped] if clipped else [], interval.lane) == kept
