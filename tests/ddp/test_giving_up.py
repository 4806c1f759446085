"""A rank that gives up tells the others, whatever state it is in: even where its own gradients cannot be looked at any more."""

import pytest
import torch
from loop_ranks import Ranks, Weights, main_grads, optimizer_of

from megabucket.errors import MegabucketError, ParametersChangedError, PeerFailedError, PhaseError, ReplicasDivergedError
from megabucket.trace.recorder import Recorder

DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
FAULTY = 1
MODES = [(sharded, overlaps) for sharded in (False, True) for overlaps in (True, False)]


class Pair(torch.nn.Module):
    """Two parameters with ones as gradients, whatever their shapes."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 2))
        self.v = torch.nn.Parameter(torch.zeros(300))

    def forward(self):
        return self.w.sum() + self.v.sum()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # the failure is told by a destructor
@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
def test_a_parameter_whose_shape_has_changed_keeps_no_bucket_from_being_sent(sharded, overlaps):
    ranks = Ranks(2, Pair(), use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps, bucket_size=1)

    def run(rank, ddp):
        optimizer, whole, found = optimizer_of(ddp), ddp.module.w.data, []
        for index in range(3):
            if rank == FAULTY and index == 1:
                ddp.module.w.data = whole[:1]
            try:
                ddp().backward()
                optimizer.step()
                found.append(None)
            except Exception as error:
                # Not the error itself, which would keep a graph alive in which the parameter has the other shape.
                found.append((type(error), str(error)))
            ddp.module.w.data = whole
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return found, str(ddp.last_error), ddp.module.w.tolist()

    (here, told, at_end), (there, told_there, at_end_there) = ranks.run(run)

    assert here == [None, (PeerFailedError, told), None]
    assert there[1][0] is RuntimeError
    assert (there[0], there[2], told_there) == (None, None, told)
    assert told.startswith("step 1: rank 1 failed in ")
    assert at_end == at_end_there == [[-2.0, -2.0]] * 4  # two steps that count


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_failed_rank_has_sent_leaves_nothing_in_a_place_that_was_zeroed_for_the_next_step(sharded):
    """The places are zeroed, so gradients are added to them; what was reduced into them meanwhile must not stay."""
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)

    def run(rank, ddp):
        ddp.zero_grad_buffer()
        for param in ddp.parameters():
            param.main_grad.fill_(100.0 * (rank + 1))
        if rank == FAULTY:
            ddp.abort_step("no")
        else:
            with pytest.raises(PeerFailedError):
                ddp.finish_grad_sync()
        ddp(a=1.0, b=3.0).backward()
        ddp.finish_grad_sync()
        return main_grads(ddp.module)

    first, second = ranks.run(run)

    shown = first if not sharded else {"a": first["a"], "b": second["b"]} | {"b": first["b"]}
    assert shown == {"a": 1.0, "b": 3.0}


def test_a_launch_that_fails_at_the_end_of_a_step_is_told_to_the_others():
    """Not in a backward, whose failure a destructor tells, but where the rest of the buckets goes out."""
    ranks = Ranks(2, Weights("ab"), overlap_grad_reduce=False, finish="explicit", bucket_size=1)

    def run(rank, ddp):
        ddp(a=1.0, b=1.0).backward()
        if rank == FAULTY:
            ddp.module.a.grad = None
            ddp.module.a.data = ddp.module.a.data[:1]
            ddp.module.a.grad = torch.ones(1)
        try:
            ddp.finish_grad_sync()
        except Exception as error:
            return type(error).__name__, str(ddp.last_error)
        return None

    (kind, text), (own_kind, own_text) = ranks.run(run)

    assert (kind, own_kind) == ("PeerFailedError", "RuntimeError")
    assert text == own_text
    assert text.startswith("step 0: rank 1 failed in the gradient sync: RuntimeError: ")


class UnspeakableError(Exception):
    def __str__(self):
        raise KeyError("no text")


def test_an_exception_whose_text_cannot_be_made_is_told_by_its_name():
    ranks = Ranks(2, Weights("ab"), bucket_size=1)

    def run(rank, ddp):
        try:
            with ddp.step():
                if rank == FAULTY:
                    raise UnspeakableError
                ddp(a=1.0, b=1.0).backward()
        except MegabucketError as error:
            return str(error)
        return None

    text = f"step 0: rank 1 failed in setup: UnspeakableError (its text cannot be made: KeyError). {DROPPED}"
    assert ranks.run(run) == [text] * 2


class LaunchesFail(Recorder):
    """Lets one launch raise, after everything was prepared for it."""

    records_time = False

    def __init__(self):
        self.is_armed = False

    def record_launch(self, launch):
        if self.is_armed and launch.record.label == "bucket 1":
            self.is_armed = False
            raise MemoryError("no room for bucket 1")

    def enter_phase(self, step, phase):
        pass

    def note_ready(self, label):
        pass


@pytest.mark.parametrize("sharded", [False, True])
def test_a_collective_that_could_not_be_launched_is_launched_when_the_rank_gives_up(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)
    recorder = LaunchesFail()
    ranks.ddps[FAULTY].communicator.recorders.active = (recorder,)

    def run(rank, ddp):
        optimizer, found = optimizer_of(ddp), []
        for index in range(3):
            if rank == FAULTY:
                recorder.is_armed = index == 1
            try:
                ddp(a=1.0, b=1.0).backward()
                optimizer.step()
                found.append(None)
            except (MemoryError, PeerFailedError) as error:
                found.append(type(error).__name__)
            optimizer.zero_grad()
        return found

    assert ranks.run(run) == [[None, "PeerFailedError", None], [None, "MemoryError", None]]


@pytest.mark.parametrize("finish", ["auto", "explicit"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_with_none_of_its_parameters_left_says_so_in_its_backward(sharded, finish):
    """An optimizer of the new ones knows nothing of the wrapper, so nothing else of this step would ever call it."""
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, finish=finish, bucket_size=1)

    def run(rank, ddp):
        if rank == FAULTY:
            for name in "ab":
                setattr(ddp.module, name, torch.nn.Parameter(torch.ones(100)))
            with pytest.raises(ParametersChangedError) as caught:
                ddp(a=1.0, b=1.0).backward()
            return str(caught.value)
        try:
            ddp(a=1.0, b=1.0).backward()
            ddp.finish_grad_sync()
        except ParametersChangedError as error:
            return str(error)
        return None

    text, own = ranks.run(run)

    assert text == own
    assert text.startswith("step 0: after wrapping, rank 1 has replaced 'a', 'b'. ")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_launch_by_the_caller_that_fails_is_told_by_the_name_of_the_call(sharded):
    switches = {"use_distributed_optimizer": sharded, "overlap_grad_reduce": False, "finish": "explicit"}
    ranks = Ranks(2, Weights("ab"), bucket_size=1, **switches)
    recorder = LaunchesFail()
    ranks.ddps[FAULTY].communicator.recorders.active = (recorder,)

    def run(rank, ddp):
        ddp(a=1.0, b=1.0).backward()
        if rank == FAULTY:
            recorder.is_armed = True
            with pytest.raises(MemoryError):
                ddp.start_grad_sync()
        else:
            ddp.start_grad_sync()
        with pytest.raises(PeerFailedError) as caught:
            ddp.finish_grad_sync()
        return str(caught.value)

    text = f"step 0: rank 1 failed in start_grad_sync(): MemoryError: no room for bucket 1. {DROPPED}"
    assert ranks.run(run) == [text] * 2


def test_a_launch_that_fails_at_the_end_of_a_backward_is_told_as_a_failure_of_the_backward():
    """A gradient that is computed apart, but while the backward runs, is launched at its end."""

    def compute_apart(_, module):
        module.a.skip_backward_post_hook = True

    ranks = Ranks(2, Weights("ab"), prepare=compute_apart, finish="explicit", bucket_size=1)
    recorder = LaunchesFail()
    ranks.ddps[FAULTY].communicator.recorders.active = (recorder,)

    def run(rank, ddp):
        def compute(_):
            ddp.module.a.grad = torch.ones(100)
            ddp.grad_ready(ddp.module.a)

        ddp.module.b.register_hook(compute)
        ddp(b=1.0).backward()  # the first step launches nothing before its end
        ddp.finish_grad_sync()
        ddp.zero_grad()
        recorder.is_armed = True
        try:
            ddp(b=1.0).backward()
        except MemoryError:
            assert rank == FAULTY
        with pytest.raises(PeerFailedError) as caught:
            ddp.finish_grad_sync()
        return str(caught.value)

    text = f"step 1: rank 1 failed in backward: MemoryError: no room for bucket 1. {DROPPED}"
    assert ranks.run(run) == [text] * 2


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_giving_up_plain_torch_code_may_clear_what_the_step_has_left(set_to_none, overlaps):
    """What ``param.grad`` refuses to show between backward and ``finish_grad_sync()`` is nobody's business any more."""
    ranks = Ranks(2, Weights("ab"), overlap_grad_reduce=overlaps, finish="explicit", bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        for index in range(3):
            ddp(a=1.0, b=rank + 1.0).backward()
            try:
                if rank == FAULTY and index == 1:
                    ddp.abort_step("no")
                else:
                    ddp.finish_grad_sync()
                    optimizer.step()
            except PeerFailedError:
                pass
            optimizer.zero_grad(set_to_none=set_to_none)
        return ddp.module.b[0].item(), str(ddp.last_error)

    # From 1, twice the mean of 1 and 2.
    assert ranks.run(run) == [(-2.0, f"step 1: rank 1 failed in abort_step(): no. {DROPPED}")] * 2


# Because another wrapper, which updates together with this one, skips its update #


def test_before_the_fence_of_this_wrapper_the_others_hear_why():
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        ddp(a=1.0, b=1.0).backward()
        if rank == FAULTY:
            ddp.sync.give_up_update("another part has failed", is_agreed=False)
            ddp.zero_grad()
        else:
            with pytest.raises(PeerFailedError):
                optimizer.step()
        return str(ddp.last_error)

    assert ranks.run(run) == [f"step 0: rank 1 failed in optimizer.step(): another part has failed. {DROPPED}"] * 2


def test_after_an_all_reduce_the_divergence_that_follows_has_that_cause():
    ranks = Ranks(2, Weights("ab"), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        ddp(a=1.0, b=1.0).backward()
        if rank == FAULTY:
            ddp.sync.give_up_update("another part has failed", is_agreed=False)
        else:
            optimizer.step()
        ddp.zero_grad()
        with pytest.raises(ReplicasDivergedError) as caught:
            ddp(a=1.0, b=1.0).backward()
        return str(caught.value)

    for text in ranks.run(run):
        assert "(rank 1 made none because of another part has failed)" in text


def test_where_all_have_agreed_on_it_the_step_is_dropped_without_a_word_and_counted_once():
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, finish="explicit", bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        ddp(a=1.0, b=1.0).backward()
        ddp.finish_grad_sync()
        num_launched = ddp.communicator.launches.last
        ddp.sync.give_up_update("another part has failed", is_agreed=True)
        is_silent = ddp.communicator.launches.last == num_launched
        with pytest.raises(PhaseError, match="gradients of this step are not usable"):
            optimizer.step()
        return str(ddp.last_error), is_silent, ddp.sync.step

    assert ranks.run(run) == [("another part has failed", True, 1)] * 2
