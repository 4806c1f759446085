from hypothesis import given
from hypothesis import strategies as st

from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepRecorder

RECORD = CollectiveRecord(CollectiveKind.ALL_REDUCE, "bucket 0", num_calls=1, payload_bytes=8, num_ranks=2)


def test_a_collective_that_spans_two_steps_counts_in_each_for_its_part():
    recorder = StepRecorder(rank=0)
    recorder.begin(0.0)

    assert recorder.end_step(10.0) is None
    recorder.record_interval(Interval(Lane.COMM, "param gather 0", 8.0, 13.0))  # known only in the second step
    first = recorder.end_step(20.0)
    second = recorder.flush()

    assert (first.step, first.start_s, first.stop_s, first.comm_s) == (0, 0.0, 10.0, 2.0)
    assert (second.step, second.start_s, second.stop_s, second.comm_s) == (1, 10.0, 20.0, 3.0)
    assert recorder.flush() is None


def test_launches_count_for_the_step_that_runs_when_they_are_made():
    recorder = StepRecorder(rank=0)
    recorder.record_collective(RECORD)  # the broadcast when wrapping
    recorder.begin(0.0)
    recorder.record_collective(RECORD)
    recorder.record_collective(RECORD)
    recorder.end_step(1.0)
    recorder.record_collective(RECORD)

    first, second = recorder.end_step(2.0), recorder.flush()

    assert [len(trace.collectives) for trace in (first, second)] == [2, 1]


def test_what_happens_between_the_end_of_a_step_and_begin_belongs_to_no_step():
    recorder = StepRecorder(rank=0)
    recorder.begin(0.0)
    recorder.end_step(1.0)
    recorder.record_collective(RECORD)
    recorder.record_interval(Interval(Lane.WAIT, "evaluation", 1.0, 5.0))

    recorder.begin(6.0)
    first, second = recorder.end_step(7.0), recorder.flush()

    assert (first.exposed_s, len(first.collectives)) == (0.0, 0)
    assert (second.exposed_s, len(second.collectives)) == (0.0, 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12), st.integers(1, 6))
def test_no_moment_of_an_interval_is_lost_or_counted_twice(spans, num_steps):
    # An interval is recorded when it ends; the steps share out [0, 60) evenly and no interval outlasts the next step.
    width = 60 // num_steps
    intervals = [Interval(Lane.COMM, "x", start, min(start + length, 60)) for start, length in spans]
    recorder = StepRecorder(rank=0)
    traces = []

    recorder.begin(0)
    for step in range(num_steps):
        for interval in intervals:
            if step * width < interval.stop_s <= (step + 1) * width:
                recorder.record_interval(interval)
        traces.append(recorder.end_step((step + 1) * width))
    traces.append(recorder.flush())

    recorded = sorted(
        tick for trace in traces if trace for part in trace.intervals for tick in range(part.start_s, part.stop_s)
    )
    in_the_run = [i for i in intervals if i.stop_s <= num_steps * width]
    assert recorded == sorted(tick for part in in_the_run for tick in range(part.start_s, part.stop_s))
