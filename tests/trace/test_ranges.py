"""``ProfilerRanges``: which ranges are open when, also after an exception."""

from contextlib import contextmanager

import torch

from megabucket.comm.device import profiler_range
from megabucket.trace import CollectiveKind, CollectiveRecord, ProfilerRanges
from megabucket.trace.recorder import Launch


class Log:
    """What was opened and closed, in order."""

    def __init__(self):
        self.events = []
        self.ranges = ProfilerRanges(self.range)

    @contextmanager
    def range(self, name):
        self.events.append(f"+ {name.removeprefix('megabucket: ')}")
        yield
        self.events.append(f"- {name.removeprefix('megabucket: ')}")

    def launch(self, label):
        record = CollectiveRecord(CollectiveKind.ALL_REDUCE, label, num_calls=1, payload_bytes=4, num_ranks=2)
        return Launch(record, None, on_moment=self.ranges.note_moment)


def test_a_launch_and_a_wait_are_ranges_inside_of_the_optimizer():
    log = Log()
    launch = log.launch("bucket 0")

    log.ranges.enter_phase(1, "optimizer")
    launch.note("launched")
    log.ranges.record_launch(launch)
    launch.note("done")
    launch.note("wait_start")
    launch.note("done")  # another thread says so while this one waits
    launch.note("wait_stop")
    log.ranges.enter_phase(1, "pause")

    inside = ["+ launch bucket 0", "- launch bucket 0", "+ wait for bucket 0", "- wait for bucket 0"]
    assert log.events == ["+ optimizer", *inside, "- optimizer"]


def test_what_an_exception_leaves_open_ends_with_its_phase():
    log = Log()

    log.ranges.enter_phase(1, "optimizer")
    log.launch("bucket 0").note("wait_start")  # and no end: it has raised
    log.ranges.enter_phase(1, "forward")
    log.launch("bucket 0").note("launched")  # interrupted before it was sent
    log.launch("bucket 0").note("wait_start")

    assert log.events[:4] == ["+ optimizer", "+ wait for bucket 0", "- wait for bucket 0", "- optimizer"]
    assert log.events[4:] == ["+ launch bucket 0", "- launch bucket 0", "+ wait for bucket 0"]


def test_on_cuda_a_range_is_one_of_nvtx_as_well(monkeypatch):
    entered = []

    @contextmanager
    def nvtx_range(name):
        entered.append(name)
        yield
        entered.append("end")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    new_range = profiler_range(torch.device("cuda", 0))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler, new_range("megabucket: launch bucket 0"):
        torch.ones(1)

    assert entered == ["megabucket: launch bucket 0", "end"]
    assert "megabucket: launch bucket 0" in [event.name for event in profiler.events()]
