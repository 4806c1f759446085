"""What a communicator's timer hands to its recorder, and that the end of a program does not lose it."""

import subprocess
import sys
import threading

import torch

from megabucket.comm.timing import CollectiveTimer
from megabucket.trace import Interval, Lane, ListRecorder


class Work:
    """A launched collective, as far as its completion is concerned."""

    def __init__(self):
        self.future = torch.futures.Future()

    def get_future(self):
        return self.future


class OwingClock:
    """A clock that tells nothing before ``until``."""

    def __init__(self):
        self.now, self.until = 0.0, float("inf")

    def stamp(self):
        self.now += 1.0
        return self.now

    def seconds(self, stamp):
        return stamp if stamp < self.until else None


def test_a_batch_is_complete_with_its_last_work_whichever_that_is():
    timer, recorder, clock = CollectiveTimer(), ListRecorder(), OwingClock()
    works = [Work(), Work(), Work()]
    start = clock.stamp()
    timer.time_completion(works, recorder, clock, label="bucket 0", start=start)

    for work in (works[2], works[0]):
        work.future.set_result(None)
    assert recorder.intervals == []
    works[1].future.set_result(None)

    assert recorder.intervals == [Interval(Lane.COMM, "bucket 0", 1.0, 2.0)]
    assert timer._unfinished.tokens == set()


def test_what_a_device_owes_is_handed_over_when_it_is_known_in_order():
    timer, recorder, clock = CollectiveTimer(), ListRecorder(), OwingClock()
    clock.until = 3.0
    for label in ("first", "second"):
        timer.record(recorder, clock, Lane.WAIT, label=label, start=clock.stamp())
    timer.collect()
    assert [interval.label for interval in recorder.intervals] == ["first"]

    clock.until = float("inf")
    timer.collect()

    assert [(interval.label, interval.start_s, interval.stop_s) for interval in recorder.intervals] == [
        ("first", 1.0, 2.0),
        ("second", 3.0, 4.0),
    ]


def test_on_the_host_nothing_is_owed():
    timer, recorder = CollectiveTimer(), ListRecorder()
    clock = timer.clock(on_device=False)

    timer.record(recorder, clock, Lane.WAIT, label="fence", start=clock.stamp())

    assert [interval.label for interval in recorder.intervals] == ["fence"]


# A collective nobody waits for completes in a thread of the back-end while the program ends.
ENDS_EARLY = """
import sys, threading, time
sys.path.insert(0, {directory!r})
from test_timing import Shout, Work
from megabucket.comm.timing import CollectiveTimer
from megabucket.trace import HostClock

timer, work = CollectiveTimer(), Work()
timer.time_completion([work], Shout(), HostClock(), label="gather", start=0.0)
threading.Thread(target=lambda: (time.sleep(0.3), work.future.set_result(None)), daemon=True).start()
"""


class Shout(ListRecorder):
    def record_interval(self, interval):
        sys.stdout.write(f"{interval.label} by {threading.current_thread() is not threading.main_thread()}\n")
        sys.stdout.flush()


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)


def test_the_end_of_a_program_waits_for_what_nobody_waited_for():
    directory = __file__.rpartition("/")[0]

    done = run(ENDS_EARLY.format(directory=directory))

    assert (done.returncode, done.stdout) == (0, "gather by True\n"), done.stderr


def test_it_does_not_wait_for_a_group_that_was_lost():
    timer, recorder = CollectiveTimer(), ListRecorder()
    timer.time_completion([Work()], recorder, OwingClock(), label="gather", start=0.0)
    assert len(timer._unfinished.tokens) == 1

    timer.give_up()

    assert timer._unfinished.tokens == set()
