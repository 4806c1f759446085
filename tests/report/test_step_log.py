import json

import pytest

from megabucket.errors import ConfigError
from megabucket.report import StepTraceLog, TensorBoardLog, step_figures
from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepTrace
from megabucket.trace.step_trace import LaunchTimes


def trace(step=7, start_s=100.0, *, communicates=True):
    """Ten seconds: computes for 8, sends from 4 to 9 and stands still for the last of them."""
    intervals = [Interval(Lane.COMPUTE, "backward", start_s, start_s + 8.0)]
    launches, records = [], []
    if communicates:
        intervals += [
            Interval(Lane.COMM, "bucket 0", start_s + 4.0, start_s + 9.0),
            Interval(Lane.WAIT, "bucket 0", start_s + 8.0, start_s + 9.0),
        ]
        kind = CollectiveKind.ALL_REDUCE
        records.append(CollectiveRecord(kind, "bucket 0", num_calls=1, payload_bytes=16, num_ranks=2))
        times = [start_s + moment_s for moment_s in (3.5, 4.0, 9.0, 8.0, 9.0)]
        launches += [
            LaunchTimes("bucket 0", kind, 16, *times),
            LaunchTimes("fence", kind, 8, None, start_s + 9.5, None, None, None),
        ]
    return StepTrace(step, 1, start_s, start_s + 10.0, tuple(intervals), tuple(records), tuple(launches))


def test_the_figures_of_a_step_are_plain_data_with_times_since_its_start():
    figures = step_figures(trace())

    assert figures == {
        "schema": 1,
        "kind": "step_trace",
        "step": 7,
        "rank": 1,
        "start_s": 100.0,
        "duration_s": 10.0,
        "compute_s": 8.0,
        "comm_s": 5.0,
        "exposed_s": 1.0,
        "overlap_fraction": 0.8,  # 4 of 5 seconds
        "num_collectives": 1,
        "payload_bytes": 16,
        "wire_bytes": 16.0,  # 2 * 16 * 1/2
        "launches": [
            {
                "label": "bucket 0",
                "kind": "all_reduce",
                "payload_bytes": 16,
                "ready_s": 3.5,
                "launched_s": 4.0,
                "done_s": 9.0,
                "wait_start_s": 8.0,
                "wait_stop_s": 9.0,
            },
            {
                "label": "fence",
                "kind": "all_reduce",
                "payload_bytes": 8,
                "ready_s": None,
                "launched_s": 9.5,
                "done_s": None,
                "wait_start_s": None,
                "wait_stop_s": None,
            },
        ],
    }


def test_a_log_has_one_line_per_step_readable_while_it_is_open(tmp_path):
    path = tmp_path / "new" / "steps.jsonl"
    with StepTraceLog(path) as log:
        log.write(None)  # before the first step there is no trace
        for number in (0, 1):
            log.write(trace(number, 100.0 + number))
            log.write(trace(number, 100.0 + number))  # asked for twice in a step

        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    log.write(trace(2))

    assert len(path.read_text().splitlines()) == 2


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        StepTraceLog(tmp_path)


class Writer:
    """What TensorBoard's SummaryWriter does, as far as it is used."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars.append((tag, scalar_value, global_step))


def test_scalars_go_to_the_writer_and_unknown_figures_are_left_out():
    writer = Writer()
    log = TensorBoardLog(writer, prefix="ddp")

    log.write(None)
    log.write(trace())
    log.write(trace(8, communicates=False))

    assert [scalar for scalar in writer.scalars if scalar[2] == 7] == [
        ("ddp/duration_s", 10.0, 7),
        ("ddp/compute_s", 8.0, 7),
        ("ddp/comm_s", 5.0, 7),
        ("ddp/exposed_s", 1.0, 7),
        ("ddp/overlap_fraction", 0.8, 7),
    ]
    assert [scalar[0] for scalar in writer.scalars if scalar[2] == 8] == [
        "ddp/duration_s",
        "ddp/compute_s",
        "ddp/comm_s",
        "ddp/exposed_s",
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard
def test_the_real_tensorboard_shows_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    log = TensorBoardLog(writer)
    for step in (7, 8):
        log.write(trace(step))
    writer.close()

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    names = ("comm_s", "compute_s", "duration_s", "exposed_s", "overlap_fraction")
    assert sorted(shown) == [f"megabucket/{name}" for name in names]
    assert shown["megabucket/exposed_s"] == [(7, 1.0), (8, 1.0)]
    assert shown["megabucket/comm_s"] == [(7, 5.0), (8, 5.0)]
