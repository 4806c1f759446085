import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from megabucket.report import chrome_trace, write_chrome_trace
from megabucket.trace import Interval, Lane, StepTrace


def comm(start_s, stop_s):
    return Interval(Lane.COMM, "bucket", start_s, stop_s)


def test_a_slice_has_the_rank_as_process_and_microseconds_since_the_first_step():
    trace = StepTrace(step=7, rank=3, start_s=100.0, stop_s=100.5, intervals=(comm(100.25, 100.375),))

    events = chrome_trace([trace])["traceEvents"]

    (slice_,) = [event for event in events if event["ph"] == "X" and event["name"] == "bucket"]
    assert (slice_["pid"], slice_["ts"], slice_["dur"]) == (3, 250_000, 125_000)
    names = {(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {("process_name", "rank 3"), ("thread_name", "step"), ("thread_name", "comm")}


def test_each_lane_has_a_track_of_its_own():
    intervals = tuple(Interval(lane, lane.value, 0.0, 1.0) for lane in Lane)
    trace = StepTrace(step=0, rank=0, start_s=0.0, stop_s=1.0, intervals=intervals)

    events = chrome_trace([trace])["traceEvents"]

    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 1 + len(Lane)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=12))
def test_intervals_on_one_track_never_overlap_and_no_track_is_wasted(spans):
    intervals = [comm(start, start + length) for start, length in spans]

    events = chrome_trace([StepTrace(0, 0, 0.0, 30.0, tuple(intervals))])["traceEvents"]

    slices = [event for event in events if event["ph"] == "X" and event["name"] == "bucket"]
    tracks = {event["tid"] for event in slices}
    for track in tracks:
        on_track = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices if event["tid"] == track)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(on_track))
    at_once = max((sum(part.start_s <= t < part.stop_s for part in intervals) for t in range(30)), default=0)
    assert len(tracks) == at_once


def test_the_file_is_strict_json_with_the_slices_of_all_ranks(tmp_path):
    path = tmp_path / "runs" / "trace.json"

    write_chrome_trace(path, [StepTrace(0, rank, 1.0, 2.0, (comm(1.0, 1.5),)) for rank in range(2)])

    events = json.loads(path.read_text())["traceEvents"]
    assert sorted(event["pid"] for event in events if event["ph"] == "X") == [0, 0, 1, 1]


def test_no_steps_make_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []
