"""What a rank tells the others when it leaves a step before its end: by an exception, or because its wrapper goes."""

import threading
from contextlib import nullcontext

import pytest
from loop_ranks import Ranks, Weights, optimizer_of

from megabucket.ddp import step
from megabucket.ddp.backward import _EndOfBackward
from megabucket.ddp.fence import Fence
from megabucket.ddp.step import GradSync
from megabucket.errors import MegabucketError, PeerFailedError, WrapperBrokenError
from megabucket.trace.recorder import Recorder

DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
FAULTY = 1
BOTH = {"a": 1.0, "b": 1.0}
MODES = pytest.mark.parametrize("sharded", [False, True])


def seen(call):
    try:
        call()
    except BaseException as error:
        return error
    return None


class Phases(Recorder):
    """Keeps what a rank enters."""

    records_time = False

    def __init__(self):
        self.entered = []

    def record_launch(self, launch):
        pass

    def enter_phase(self, step, phase):
        self.entered.append((step, phase))

    def note_ready(self, label):
        pass


# The end of the wrapper #


def detach_with_an_exception(ddp):
    try:
        open_file()
    except OSError:
        ddp.detach()


def open_file():
    raise OSError("disk full")


@MODES
@pytest.mark.parametrize("before", ["nothing", "a step", "the next block"])
def test_a_wrapper_that_goes_between_two_steps_is_not_broken_by_an_exception_that_is_on_its_way(before, sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)

    def run(rank, ddp):
        optimizer, sync = optimizer_of(ddp), ddp.sync
        if before != "nothing":
            ddp(**BOTH).backward()
            optimizer.step()
            optimizer.zero_grad()
        with ddp.step() if before == "the next block" else nullcontext():
            detach_with_an_exception(ddp)
        return sync.broken

    assert ranks.run(run) == [None, None]


@MODES
def test_a_wrapper_that_goes_with_an_exception_in_the_middle_of_a_step_is_broken_on_all_ranks(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)

    def run(rank, ddp):
        sync = ddp.sync
        loss = ddp(**BOTH)
        if rank != FAULTY:
            return seen(loss.backward) or seen(ddp.finish_grad_sync)
        detach_with_an_exception(ddp)
        return sync.broken

    for error in ranks.run(run):
        assert isinstance(error, WrapperBrokenError)
        assert (error.step, error.rank, error.phase, error.cause) == (0, FAULTY, "forward", "OSError: disk full")


def test_a_wrapper_that_goes_with_an_exception_before_its_own_update_is_not_broken():
    ranks = Ranks(2, Weights("ab"), bucket_size=1)

    def run(rank, ddp):
        optimizer, sync = optimizer_of(ddp), ddp.sync
        ddp(**BOTH).backward()
        if rank == FAULTY:
            detach_with_an_exception(ddp)
        else:
            optimizer.step()
            ddp.detach()
        return sync.broken

    assert ranks.run(run) == [None, None]


def test_a_wrapper_that_goes_with_an_exception_before_the_update_of_all_is_broken_on_all_ranks():
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, finish="explicit", bucket_size=1)

    def run(rank, ddp):
        optimizer, sync = optimizer_of(ddp), ddp.sync
        ddp(**BOTH).backward()
        if rank == FAULTY:
            ddp.finish_grad_sync()
            detach_with_an_exception(ddp)
            return sync.broken
        return seen(lambda: (ddp.finish_grad_sync(), optimizer.step(), ddp.finish_param_sync()))

    for error in ranks.run(run):
        assert isinstance(error, WrapperBrokenError)
        assert (error.step, error.rank, error.cause) == (0, FAULTY, "OSError: disk full")


@MODES
def test_a_wrapper_that_goes_in_the_middle_of_a_step_does_not_wait_for_long(sharded, monkeypatch):
    monkeypatch.setattr(step, "_ANSWER_WITHIN_S", 0.02)
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, finish="explicit", bucket_size=1)
    is_gone = threading.Event()

    def run(rank, ddp):
        sync = ddp.sync
        ddp(**BOTH).backward()
        if rank == FAULTY:
            ddp.detach()
            is_gone.set()
            return sync.broken
        assert is_gone.wait(20)
        return seen(ddp.finish_grad_sync)

    for error in ranks.run(run):
        assert isinstance(error, WrapperBrokenError)
        assert (error.step, error.rank, error.phase) == (0, FAULTY, "detach()")
        assert error.cause == "its wrapper was detached in the middle of a step"


@MODES
def test_wrappers_that_all_go_in_the_middle_of_a_step_are_not_broken(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, finish="explicit", bucket_size=1)

    def run(rank, ddp):
        sync = ddp.sync
        ddp(**BOTH).backward()
        ddp.detach()
        return sync.broken, sync.last_error

    assert ranks.run(run) == [(None, None)] * 2


@MODES
def test_a_wrapper_that_goes_after_giving_up_leaves_the_failure_to_those_who_come_later(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)
    is_gone = threading.Event()

    def run(rank, ddp):
        if rank == FAULTY:
            sync = ddp.sync
            ddp.abort_step("no")
            ddp.detach()
            is_gone.set()
            return sync.broken
        assert is_gone.wait(20)
        return seen(lambda: ddp(**BOTH).backward()) or seen(ddp.finish_grad_sync)

    for error in ranks.run(run):
        assert isinstance(error, PeerFailedError)
        assert (error.step, error.rank, error.phase, error.cause) == (0, FAULTY, "abort_step()", "no")


# A rank whose peers are elsewhere #


@MODES
def test_a_block_that_fails_while_the_others_are_elsewhere_raises_what_they_will_raise(sharded, monkeypatch):
    monkeypatch.setattr(step, "_ANSWER_WITHIN_S", 0.02)
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)
    has_raised = threading.Event()

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)

        def one():
            with ddp.step():
                if rank == FAULTY:
                    raise OSError("disk full")
                assert has_raised.wait(20)
                ddp(**BOTH).backward()
                optimizer.step()

        error = seen(one)
        has_raised.set()
        ddp.zero_grad()
        return type(error), str(error), str(ddp.last_error)

    text = f"step 0: rank 1 failed in setup: OSError: disk full. {DROPPED}"
    assert ranks.run(run) == [(PeerFailedError, text, text)] * 2


# A failure that nothing has reported #


def fail(*_):
    raise ValueError("boom")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_backward_whose_end_went_unnoticed_is_told_by_the_next_call_of_its_thread(monkeypatch):
    ranks = Ranks(2, Weights("ab"), bucket_size=1)
    monkeypatch.delattr(_EndOfBackward, "__del__")

    def run(rank, ddp):
        if rank == FAULTY:
            ddp.module.a.register_hook(fail)
        error = seen(ddp(**BOTH).backward)
        ddp.zero_grad()
        return type(error), str(ddp.last_error)

    results = ranks.run(run)

    assert [kind for kind, _ in results] == [PeerFailedError, ValueError]
    assert len({text for _, text in results}) == 1
    assert results[0][1].startswith("step 0: rank 1 failed in backward: an exception that autograd keeps to itself")


def test_a_backward_that_runs_is_not_taken_for_a_failed_one_by_another_thread():
    ranks = Ranks(1, Weights("ab"), bucket_size=1)
    (ddp,) = ranks.ddps
    found = []

    def ask(_):
        thread = threading.Thread(target=lambda: found.append(ddp.sync.backward.is_gone()))
        thread.start()
        thread.join()
        found.append(ddp.sync.backward.is_gone())

    ddp.module.a.register_hook(ask)
    loss = ddp(**BOTH)
    loss.register_hook(lambda _: None)
    loss.backward()

    assert found == [False, False]


@pytest.mark.parametrize("finish", ["auto", "explicit"])
def test_a_rank_that_was_interrupted_again_before_it_could_report_breaks_the_wrapper_at_its_next_call(finish, monkeypatch):
    ranks = Ranks(2, Weights("ab"), finish=finish, bucket_size=1)
    take, break_off = Fence.take, GradSync.break_off
    interrupted = [True]

    def take_unless_interrupted(fence, note):
        if interrupted and fence.communicator.rank == FAULTY:
            raise KeyboardInterrupt
        return take(fence, note)

    def break_off_unless_interrupted(sync, phase, cause):
        if interrupted:
            raise KeyboardInterrupt
        break_off(sync, phase, cause)

    monkeypatch.setattr(Fence, "take", take_unless_interrupted)
    monkeypatch.setattr(GradSync, "break_off", break_off_unless_interrupted)

    def run(rank, ddp):
        error = seen(ddp(**BOTH).backward) or seen(ddp.finish_grad_sync)
        if rank == FAULTY:
            assert isinstance(error, KeyboardInterrupt)
            interrupted.clear()
            return seen(ddp.zero_grad)
        # It may be through the step before the other one breaks the wrapper, but not through the next one.
        return error or seen(lambda: (ddp.zero_grad(), ddp(**BOTH).backward(), ddp.finish_grad_sync()))

    for error in ranks.run(run):
        assert isinstance(error, WrapperBrokenError)
        assert (error.step, error.rank, error.phase, error.cause) == (0, FAULTY, "fence", "it was interrupted twice")


class Takes:
    """``Fence.take``, interrupted once on one rank, the ``nth`` time it runs there after ``arm``."""

    def __init__(self, monkeypatch):
        self._take, self._left = Fence.take, 0
        takes = self

        def take(fence, note):
            return takes.take_or_interrupt(fence, note)

        monkeypatch.setattr(Fence, "take", take)

    def arm(self, nth):
        self._left = nth

    def take_or_interrupt(self, fence, note):
        if fence.communicator.rank == FAULTY and self._left:
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt
        return self._take(fence, note)


@MODES
def test_a_rank_that_is_interrupted_while_it_waits_for_the_end_of_its_failed_step_breaks_the_wrapper(sharded, monkeypatch):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)
    takes, is_over = Takes(monkeypatch), threading.Event()

    def run(rank, ddp):
        if rank == FAULTY:
            takes.arm(1)
            ddp.abort_step("no")
            assert isinstance(seen(ddp.zero_grad), KeyboardInterrupt)
            is_over.set()
            return ddp.sync.broken
        assert is_over.wait(20)
        return seen(ddp(**BOTH).backward) or seen(ddp.finish_grad_sync)

    error, own = ranks.run(run)

    assert (own.step, own.rank, own.phase, own.cause) == (0, FAULTY, "the gradient sync", "KeyboardInterrupt: ")
    assert isinstance(error, MegabucketError)


def test_a_rank_that_is_interrupted_in_a_second_vote_breaks_the_wrapper_on_all_ranks(monkeypatch):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, finish="explicit", bucket_size=1)
    takes = Takes(monkeypatch)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        ddp(**BOTH).backward()
        if rank == FAULTY:
            takes.arm(2)
        error = seen(lambda: (ddp.finish_grad_sync(), optimizer.step(), ddp.finish_param_sync()))
        return ddp.sync.broken if rank == FAULTY else error

    for error in ranks.run(run):
        assert isinstance(error, WrapperBrokenError)
        assert (error.rank, error.phase, error.cause) == (FAULTY, "the gradient sync", "KeyboardInterrupt: ")


@MODES
def test_a_wrapper_that_goes_after_giving_up_when_all_have_answered_is_not_broken(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)
    is_answered = threading.Event()

    def run(rank, ddp):
        sync = ddp.sync
        if rank == FAULTY:
            ddp.abort_step("no")
            assert is_answered.wait(20)
        else:
            assert seen(ddp(**BOTH).backward) or seen(ddp.finish_grad_sync)
            is_answered.set()
        ddp.detach()
        return sync.broken, type(sync.last_error)

    assert ranks.run(run) == [(None, PeerFailedError)] * 2


# What a recorder is told #


# A plain optimizer steps after a backward that has finished the sync; a distributed one finishes it at its own step.
WHOLE = {
    False: [(1, "forward"), (1, "backward"), (2, "between steps"), (2, "pause"), (2, "optimizer"), (2, "pause")],
    True: [(1, "forward"), (1, "backward"), (1, "pause"), (1, "fence"), (2, "between steps"), (2, "optimizer"), (2, "pause")],
}
DROPS = {
    False: [(0, "forward"), (0, "backward"), (1, "between steps")],
    True: [(0, "forward"), (0, "backward"), (0, "pause"), (0, "fence"), (1, "between steps")],
}


@MODES
def test_phases_are_told_with_their_steps_also_of_one_that_is_dropped(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)
    recorders = [Phases(), Phases()]
    for ddp, recorder in zip(ranks.ddps, recorders, strict=True):
        ddp.communicator.recorders.active = (recorder,)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        for index in range(2):
            if rank == FAULTY and index == 0:
                ddp.abort_step("no")
            else:
                seen(lambda: (ddp(**BOTH).backward(), optimizer.step()))
            ddp.zero_grad()

    ranks.run(run)

    told, of_faulty = (recorder.entered for recorder in recorders)
    assert told == DROPS[sharded] + WHOLE[sharded]
    assert of_faulty == [(1, "between steps"), *WHOLE[sharded]]
