"""The package with one order between streams left out. Every mutant is a patch that a test applies and takes back."""

import re
from contextlib import nullcontext

import schedules
from fake_accelerator import FakeDevice, FakeEvent, FakeStream
from fake_nccl import FakeNccl, FakeWork

from megabucket.buffer import ParamPhase, _ParamAndGradBucketGroup
from megabucket.checkpoint.capture import to_host
from megabucket.comm import Arrival, GradStreams, ReplicaReducer
from megabucket.comm.device import Arrived
from megabucket.comm.exchange import Exchange, Gate
from megabucket.comm.torch import WorkHandle
from megabucket.ddp.schedule import Schedule


def nothing(*_, **__):
    return None


def without(owner, method):
    return lambda patch: patch.setattr(owner, method, nothing)


class NoEvent:
    """An event that was never recorded."""

    def wait(self):
        """Wait for nothing."""

    def query(self):
        return True

    def synchronize(self):
        """Wait for nothing."""


def recording_nothing_in(owner, name):
    """No event is recorded inside of a function."""
    original = getattr(owner, name)

    def run(*arguments, **named):
        record = FakeDevice.record
        FakeDevice.record = lambda _: NoEvent()
        try:
            return original(*arguments, **named)
        finally:
            FakeDevice.record = record

    return lambda patch: patch.setattr(owner, name, run)


def unless_labelled(pattern):
    """Waits of one kind of collective are left out."""
    original = WorkHandle.wait

    def wait(self):
        if re.fullmatch(pattern, self._label):
            self._plan = None
            return
        original(self)

    return lambda patch: patch.setattr(WorkHandle, "wait", wait)


def staged_on_any_stream(patch):
    """The hook of small gradients does not look where it is."""
    original = GradStreams.is_here
    patch.setattr(GradStreams, "is_here", lambda self: self._last_id is not None or original(self))


def nobody_follows(patch):
    follow = GradStreams.follow

    def join(self):
        follow(self)
        self._last_id = None
        self._streams.clear()

    patch.setattr(GradStreams, "join", join)
    patch.setattr(GradStreams, "follow", nothing)


def stored_where_it_is_noticed(patch):
    patch.setattr(GradStreams, "last", lambda _: nullcontext())


def arrival_before_the_wait(patch):
    """The event of gathered parameters is recorded before the stream waits for them."""
    original = _ParamAndGradBucketGroup.finish_param_sync

    def finish(self):
        early = None
        if self.param_phase is not ParamPhase.GATHERED:
            early = Arrival(self._accelerator)
        original(self)
        self._arrival = early or self._arrival

    patch.setattr(_ParamAndGradBucketGroup, "finish_param_sync", finish)


def first_stream_only(patch):
    original = GradStreams.note
    patch.setattr(GradStreams, "note", lambda self: None if self._streams else original(self))


def no_order_of_kernels(patch):
    patch.setattr(GradStreams, "order", lambda self, _: self.note())


def dropped_step_joins_nobody(patch):
    original = _ParamAndGradBucketGroup.start_dropped_sync

    def start(self):
        streams, self.streams = self.streams, None
        original(self)
        self.streams = streams

    patch.setattr(_ParamAndGradBucketGroup, "start_dropped_sync", start)


def message_read_at_once(patch):
    """The host reads the fence's answer without waiting for its collective."""
    original = Gate.take

    def take(self):
        self._handle.wait = nothing
        return original(self)

    patch.setattr(Gate, "take", take)


def reports_read_at_once(patch):
    """The host reads the reports of a step that has failed without waiting for their collective."""
    original = Exchange.wait

    def wait(self):
        self._handle.wait = nothing
        return original(self)

    patch.setattr(Exchange, "wait", wait)


def delayed_gradients_are_not_noted(patch):
    original = _ParamAndGradBucketGroup.receive_delayed

    def receive(self, position):
        streams, self.streams = self.streams, None
        original(self, position)
        self.streams = streams

    patch.setattr(_ParamAndGradBucketGroup, "receive_delayed", receive)


def finite_tests_are_not_followed(patch):
    """The fence does not wait for the streams of finite tests."""
    original, follow = Schedule.check_launched, GradStreams.follow

    def check_launched(self, **named):
        GradStreams.follow = nothing
        try:
            return original(self, **named)
        finally:
            GradStreams.follow = follow

    patch.setattr(Schedule, "check_launched", check_launched)


def scaled_behind_the_launch(patch):
    """What Megatron once did with replicas: gradients are scaled while the collective reads them (NVIDIA's 3670)."""
    original = _ParamAndGradBucketGroup.start_grad_sync

    def start(self):
        factors, self._scaled_before = self._scaled_before, []
        original(self)
        self._scaled_before = factors
        for values, factor in factors:
            values.mul_(factor)

    patch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", start)


def launched_at_once(patch):
    original, wait = FakeNccl._launch, FakeStream.wait_stream

    def launch(*arguments):
        FakeStream.wait_stream = nothing
        try:
            return original(*arguments)
        finally:
            FakeStream.wait_stream = wait

    patch.setattr(FakeNccl, "_launch", launch)


def waits_inside_for_nothing(patch):
    original = ReplicaReducer.behind

    def behind(self, inside, calls, *, label):
        inside.wait = nothing
        return original(self, inside, calls, label=label)

    patch.setattr(ReplicaReducer, "behind", behind)


MUTANTS = {
    "no join before a launch": without(GradStreams, "join"),
    "nothing waits after a backward": nobody_follows,
    "only the first stream is noted": first_stream_only,
    "staged gradients are stored where it is noticed": stored_where_it_is_noticed,
    "gradients are staged on any stream": staged_on_any_stream,
    "kernels of two streams write one place": no_order_of_kernels,
    "the second stream does not wait for parameters": without(Arrival, "follow"),
    "arrival is recorded before the wait": arrival_before_the_wait,
    "a dropped step joins nobody": dropped_step_joins_nobody,
    "nobody waits for a reduction": unless_labelled(r"bucket \d+"),
    "nobody waits for a reduction over replicas": unless_labelled(".* over replicas"),
    "a reduction over replicas waits for nothing": waits_inside_for_nothing,
    "16-bit gradients are divided behind the launch": scaled_behind_the_launch,
    "delayed gradients are not noted": delayed_gradients_are_not_noted,
    "the fence does not wait for finite tests": finite_tests_are_not_followed,
    "nobody waits for gathered gradients": unless_labelled(r"gradient gather \d+"),
    "nobody waits for gradients along copies": unless_labelled("gradients along tp"),
    "nobody waits for tokens": unless_labelled("tokens"),
    "nobody waits for tokens of the last stage": unless_labelled("tokens of the last stage"),
    "nobody waits for the first broadcast": unless_labelled("initial broadcast"),
    "nobody waits for norms of each parameter": unless_labelled("norms of each parameter"),
    "nobody waits for the state of the optimizer": unless_labelled("optimizer state values"),
    "nobody waits for the reports": reports_read_at_once,
    "nobody waits for parameters": unless_labelled(r"param gather \d+"),
    "nobody waits for the norm": unless_labelled("grad norm"),
    "nobody waits for the fence": message_read_at_once,
    "the host does not wait for a copy": without(Arrived, "wait"),
    "no event behind a copy to the host": recording_nothing_in(Arrived, "__init__"),
    "no event behind the copies of a checkpoint": recording_nothing_in(schedules, to_host.__name__),
    "no event behind gathered parameters": recording_nothing_in(Arrival, "__init__"),
    "no collective waits for its launch": launched_at_once,
    "no wait for a work": without(FakeWork, "wait"),
    "no wait for a stream": without(FakeStream, "wait_stream"),
    "no wait for an event": without(FakeEvent, "wait"),
    "no event is recorded": lambda patch: patch.setattr(FakeEvent, "record", lambda self, *_: self),
}
