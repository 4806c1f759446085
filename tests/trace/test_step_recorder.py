"""The recorder against an oracle that looks at every tick of a made-up run."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.trace import CollectiveKind, CollectiveRecord, StepRecorder
from megabucket.trace.recorder import Launch


class FakeClock:
    """Ticks when it is told to. With ``owes_from`` it does not know the moments from there on."""

    def __init__(self):
        self.now, self.owes_from = 0, float("inf")

    def stamp(self):
        return self.now

    def seconds(self, stamp):
        return stamp if stamp < self.owes_from else None


def record(label, num_bytes=8):
    return CollectiveRecord(CollectiveKind.ALL_REDUCE, label, num_calls=1, payload_bytes=num_bytes, num_ranks=2)


@dataclass
class Run:
    """A run on ticks: the recorder hears of it; the ticks are the truth."""

    clock: FakeClock = field(default_factory=FakeClock)
    flying: dict = field(default_factory=dict)  # label -> (launch, when it is done)
    launched: dict = field(default_factory=dict)  # label -> launch
    comm: list = field(default_factory=list)
    wait: list = field(default_factory=list)
    computed: list = field(default_factory=list)

    def __post_init__(self):
        self.recorder = StepRecorder(rank=0, clock=self.clock)

    def tick(self, *, is_compute=False, is_wait=False):
        self.comm.append(bool(self.flying))
        self.wait.append(is_wait)
        self.computed.append(is_compute and not is_wait)
        self.clock.now += 1
        for label, (launch, done) in list(self.flying.items()):
            if done <= self.clock.now:
                del self.flying[label]
                launch.note("done")

    def compute(self, num_ticks):
        for _ in range(num_ticks):
            self.tick(is_compute=True)

    def launch(self, label, duration):
        launch = self.launched[label] = Launch(record(label), self.clock)
        launch.note("launched")
        self.recorder.record_launch(launch)
        self.flying[label] = (launch, self.clock.now + duration)

    def wait_for(self, label):
        self.launched[label].note("wait_start")
        while label in self.flying:
            self.tick(is_wait=True)
        self.launched[label].note("wait_stop")

    def seconds(self, ticks, trace):
        return sum(ticks[trace.start_s : trace.stop_s])


# Per bucket: ticks of backward before it is ready, ticks its collective takes.
BUCKETS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=5)
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "forward": st.integers(1, 4),
            "buckets": BUCKETS,
            "optimizer": st.integers(1, 3),
            "gathers": st.lists(st.integers(1, 12), max_size=3),
            "pause": st.integers(0, 3),
            "microbatches": st.integers(1, 3),
        }
    ),
    min_size=1,
    max_size=6,
)


def play(run, number, step):
    """One step as the wrapper tells of it: gathers of the step before are waited for in its forward."""
    pending = [label for label in run.flying if label.startswith("gather")]
    for microbatch in range(step["microbatches"]):
        is_last = microbatch == step["microbatches"] - 1
        play_microbatch(run, number, step, pending=pending if microbatch == 0 else [], is_last=is_last)
    for index in range(len(step["buckets"])):
        run.wait_for(f"bucket {index}")
    run.recorder.enter_phase(number + 1, "between steps")
    run.recorder.enter_phase(number + 1, "optimizer")
    run.compute(step["optimizer"])
    for index, duration in enumerate(step["gathers"]):
        run.launch(f"gather {index}", duration)
        run.compute(1)
    run.recorder.enter_phase(number + 1, "pause")
    trace = run.recorder.last()
    for _ in range(step["pause"]):
        run.tick()
    return trace


def play_microbatch(run, number, step, *, pending, is_last):
    run.recorder.enter_phase(number, "forward")
    for label in pending:
        run.wait_for(label)
    run.compute(step["forward"])
    run.recorder.enter_phase(number, "backward")
    for index, (ticks, duration) in enumerate(step["buckets"]):
        run.compute(ticks + 1)
        if is_last:
            run.recorder.note_ready(f"bucket {index}")
            run.launch(f"bucket {index}", duration)
    run.recorder.enter_phase(number, "pause")
    if not is_last:
        run.tick()


@given(STEPS)
def test_the_figures_of_every_step_are_those_an_observer_of_every_tick_would_give(steps):
    run = Run()

    for number, step in enumerate(steps):
        trace = play(run, number, step)

        assert trace.step == number
        assert (trace.comm_s, trace.exposed_s, trace.compute_s) == (
            run.seconds(run.comm, trace),
            run.seconds(run.wait, trace),
            run.seconds(run.computed, trace),
        )
        assert trace.num_collectives == len(step["buckets"]) + len(step["gathers"])


@given(STEPS)
def test_each_launch_of_a_step_is_told_from_ready_to_waited_for(steps):
    run = Run()

    for number, step in enumerate(steps):
        trace = play(run, number, step)

        buckets = [launch for launch in trace.launches if launch.label.startswith("bucket")]
        assert [launch.label for launch in buckets] == [f"bucket {index}" for index in range(len(step["buckets"]))]
        for launch, (_, duration) in zip(buckets, step["buckets"], strict=True):
            assert launch.ready_s == launch.launched_s
            assert launch.done_s == launch.launched_s + duration
            assert launch.wait_start_s <= launch.wait_stop_s
            assert launch.wait_stop_s == max(launch.done_s, launch.wait_start_s)


@given(STEPS, st.integers(2, 5))
def test_memory_is_bounded_by_a_few_steps(steps, repetitions):
    run = Run()

    for number, step in enumerate(steps * repetitions):
        play(run, number, step)

    most = max(len(step["buckets"]) + len(step["gathers"]) for step in steps)
    assert sum(len(step.launches) for step in run.recorder._steps) <= 4 * most


def test_before_the_first_step_has_ended_there_is_no_trace():
    run = Run()
    assert run.recorder.last() is None

    run.recorder.enter_phase(0, "forward")
    run.tick(is_compute=True)

    assert run.recorder.last() is None


def test_the_trace_of_a_step_grows_when_its_optimizer_is_heard_of():
    run = Run()
    for phase, number in (("forward", 0), ("backward", 0), ("between steps", 1)):
        run.recorder.enter_phase(number, phase)
        run.tick(is_compute=True)
    assert run.recorder.last().stop_s == 2

    run.recorder.enter_phase(1, "optimizer")
    run.tick(is_compute=True)
    run.tick(is_compute=True)
    run.recorder.enter_phase(1, "pause")

    trace = run.recorder.last()
    assert (trace.stop_s, trace.compute_s) == (5, 4)
    assert [part.label for part in trace.intervals] == ["forward", "backward", "optimizer"]


def test_while_a_step_runs_the_last_trace_is_that_of_the_step_before():
    run = Run()
    step = {"forward": 1, "buckets": [(0, 3)], "optimizer": 1, "gathers": [], "pause": 0, "microbatches": 1}
    trace = play(run, 0, step)

    run.recorder.enter_phase(1, "forward")
    run.tick(is_compute=True)

    assert run.recorder.last() == trace


def test_a_step_whose_times_a_device_still_owes_is_not_told_before_they_are_known():
    run = Run()
    step = {"forward": 2, "buckets": [(1, 3)], "optimizer": 1, "gathers": [], "pause": 0, "microbatches": 1}
    first = play(run, 0, step)
    second = play(run, 1, step)
    assert second.step == 1

    for owes_from in range(first.stop_s + 1, second.stop_s + 1):  # also when only its very end is owed
        run.clock.owes_from = owes_from
        assert run.recorder.last() == first
    run.clock.owes_from = float("inf")
    assert run.recorder.last().step == 1


def test_a_collective_may_be_under_way_for_longer_than_the_next_step():
    run = Run()
    step = {"forward": 1, "buckets": [(0, 1)], "optimizer": 1, "gathers": [], "pause": 0, "microbatches": 1}
    told = run.recorder.enter_phase
    play(run, 0, step)
    told(1, "forward")
    run.launch("slow", 100)
    told(2, "between steps")
    run.tick()
    told(2, "pause")
    launched_in = run.recorder.last()

    during = play(run, 2, step)
    for _ in range(100):
        run.tick()
    told(3, "pause")

    assert (launched_in.comm_s, launched_in.launches[0].done_s) == (1, None)
    assert during.comm_s == during.duration_s
    assert [launch.label for launch in during.launches] == ["bucket 0"]


def test_what_happened_after_the_end_of_a_step_is_not_told_of_it_later():
    run = Run()
    step = {"forward": 1, "buckets": [(0, 1)], "optimizer": 1, "gathers": [20], "pause": 0, "microbatches": 1}
    before = play(run, 0, step)

    run.tick()
    run.wait_for("gather 0")

    assert run.recorder.last() == before
    assert (before.launches[1].done_s, before.launches[1].wait_start_s) == (None, None)


def test_launches_outside_of_a_step_are_in_no_trace():
    run = Run()
    run.launch("broadcast", 2)
    run.wait_for("broadcast")
    step = {"forward": 1, "buckets": [(0, 1)], "optimizer": 1, "gathers": [], "pause": 0, "microbatches": 1}
    play(run, 0, step)
    run.launch("checksums", 2)
    run.wait_for("checksums")

    assert [launch.label for launch in run.recorder.last().launches] == ["bucket 0"]
    assert run.recorder.last().comm_s == 1


@pytest.mark.parametrize("has_wait", [False, True])
def test_a_communicator_that_does_not_tell_when_a_collective_is_done_is_believed_when_it_was_waited_for(has_wait):
    run = Run()
    told = run.recorder.enter_phase
    told(0, "forward")
    told(0, "backward")
    run.clock.now = 10
    launch = Launch(record("bucket 0"), run.clock, launched=10)
    run.recorder.record_launch(launch)
    run.clock.now = 15
    if has_wait:
        launch.wait_start, launch.wait_stop = 12, 14
    told(1, "between steps")
    run.clock.now = 20
    told(1, "pause")

    trace = run.recorder.last()

    (times,) = trace.launches
    assert trace.comm_s == (4 if has_wait else 10)  # 10 to 14, or to the end of the step
    assert times.done_s == (14 if has_wait else None)


def test_a_program_that_never_steps_cannot_fill_the_memory():
    recorder, launch = StepRecorder(rank=0), Launch(record("x"), None)
    recorder.record_launch(launch)  # in no step
    for _ in range(5):
        recorder.enter_phase(0, "forward")
    for _ in range(150_000):
        recorder.record_launch(launch)

    assert len(recorder._steps[0].launches) == 100_000
    assert len(recorder._steps[0].phases) == 1


def test_a_wait_that_was_interrupted_and_begun_again_is_one_wait():
    clock = FakeClock()
    launch = Launch(record("fence"), clock)

    for moment in ("launched", "wait_start", "wait_start", "done", "wait_stop"):
        clock.now += 1
        launch.note(moment)

    assert (launch.launched, launch.wait_start, launch.done, launch.wait_stop) == (1, 2, 4, 5)
