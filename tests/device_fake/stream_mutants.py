"""The package with one order between streams left out. Every mutant is a patch that a test applies and takes back."""

from contextlib import nullcontext

from fake_accelerator import FakeEvent, FakeStream
from fake_nccl import FakeNccl, FakeWork

from megabucket.buffer import ParamPhase, _ParamAndGradBucketGroup
from megabucket.comm import Arrival, GradStreams, ReplicaReducer
from megabucket.comm.device import HostCopy
from megabucket.comm.exchange import Gate
from megabucket.comm.torch import WorkHandle


def nothing(*_, **__):
    return None


def without(owner, method):
    return lambda patch: patch.setattr(owner, method, nothing)


def unless_labelled(text):
    """Waits of one kind of collective are left out."""
    original = WorkHandle.wait

    def wait(self):
        if text in self._label:
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
    "nobody waits for a reduction": unless_labelled("bucket"),
    "nobody waits for a reduction over replicas": unless_labelled("over replicas"),
    "a reduction over replicas waits for nothing": waits_inside_for_nothing,
    "nobody waits for parameters": unless_labelled("param gather"),
    "nobody waits for the norm": unless_labelled("grad norm"),
    "nobody waits for the fence": message_read_at_once,
    "the host does not wait for a copy": without(HostCopy, "wait"),
    "no collective waits for its launch": launched_at_once,
    "no wait for a work": without(FakeWork, "wait"),
    "no wait for a stream": without(FakeStream, "wait_stream"),
    "no wait for an event": without(FakeEvent, "wait"),
    "no event is recorded": lambda patch: patch.setattr(FakeEvent, "record", lambda self, *_: self),
}
