"""One fault on one rank: all ranks raise the same error with the same text, and the next step is right.

Every case runs a healthy step, the fault on rank 1, and a healthy step again, in both modes, with and without overlap, on a
loopback world that finds mismatched collectives, deadlocks and writes in flight with certainty.
"""

import _thread
import math
import threading
from fractions import Fraction

import pytest
import torch
from loop_ranks import FailsInBackward, Ranks, optimizer_of
from torch.utils.checkpoint import checkpoint

from megabucket.ddp.step import GradSync
from megabucket.errors import (
    DetachedGradError,
    LateGradientError,
    MegabucketError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    ParametersChangedError,
    PeerFailedError,
    PhaseError,
    ReplicasDivergedError,
    ScheduleMismatchError,
    StepMismatchError,
    StorageMovedError,
    TrainabilityChangedError,
    UnreducedGradientsError,
    UnusedParameterError,
    WrapperBrokenError,
)

DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
UNKNOWN = (
    "an exception that autograd keeps to itself; it stands in the log of that rank, and would stand here inside "
    "`with ddp.step():`"
)
SKIPPED = (
    "Some rank has skipped or dropped a step that others have taken, so batches of different steps would be averaged. Make "
    "every rank take every step: a rank that cannot use its batch, or that catches an exception, calls abort_step() or "
    "ddp.zero_grad(), and all drop the step together (torch's optimizer.zero_grad() does not tell the wrapper). A "
    "forward that is not for training belongs under torch.no_grad() or module.eval()"
)
TRAINABILITY = (
    "A frozen parameter keeps its place in the buffer and gets no gradient; the gradient of an unfrozen one is never reduced, "
    "and replicas drift apart. Call ddp.rebuild() on every rank after changing requires_grad"
)
FOR_A_WHILE = (
    "To freeze them for a while, as the halves of a GAN in turn, wrap with unused_parameters='skip', or each half by itself, "
    "and unfreeze it before its optimizer steps. check_model_changes=False leaves the check out."
)
MOVED = (
    "Something moved parameters after wrapping: .to(), .half(), .bfloat16(), load_state_dict(assign=True) or `param.data =`. "
    "The optimizer would go on updating memory that the module does not read. Convert the module before wrapping and copy "
    "values with param.copy_() under no_grad(); ddp.rebuild() takes the module as it is now"
)
CHANGED = (
    "Gradients of parameters that are not in the buffers are never reduced, and the optimizer still holds the old ones. Call "
    "ddp.rebuild() on every rank after changing the module"
)
SIZE = 3
FAULTY = 1


class Model(torch.nn.Module):
    """The gradient of each parameter is the input, in every element. ``fault`` says what goes wrong in this forward."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(100)))
        self.frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)

    def forward(self, x, fault=None):
        if fault == "exception in forward":
            raise ValueError("boom")
        a = self.a * x
        if fault == "exception in backward":
            a = FailsInBackward.apply(a)
        b = (self.b * x).sum() * (math.nan if fault == "nan" else 1.0)
        return a.sum() + (self.c * x).sum() + (0 if fault == "unused" else b)


def step(rank, ddp, optimizer, fault=None):
    """One training step of one rank, with one thing wrong."""
    x = rank + 1.0
    if fault == "no_sync left out":
        ddp(x).backward()
    if fault == "one microbatch more":
        with ddp.no_sync():
            ddp(x).backward()
    if fault == "step skipped after forward":
        ddp(x)
        ddp(x).backward()
    elif fault == "second backward":
        loss = ddp(x)
        loss.backward(retain_graph=True)
        loss.backward()
    elif fault == "batch skipped":
        ddp.step_number += 1
        ddp(x).backward()
    else:
        ddp(x, fault).backward()
    if fault == "gradients dropped":
        optimizer.zero_grad()
    else:
        optimizer.step()


BREAK = {
    "frozen": lambda model: model.b.requires_grad_(False),
    "unfrozen": lambda model: model.frozen.requires_grad_(True),
    "half": lambda model: model.half(),
    "data moved": lambda model: setattr(model.b, "data", model.b.data.clone()),
    "parameter replaced": lambda model: setattr(model, "b", torch.nn.Parameter(torch.zeros(100))),
    "parameter added": lambda model: setattr(model, "d", torch.nn.Parameter(torch.zeros(100))),
    "main_grad replaced": lambda model: setattr(model.b, "main_grad", torch.zeros(100)),
}


def repair(model, before):
    """Undo what ``BREAK`` did."""
    for name, (param, data, main_grad) in before.items():
        setattr(model, name, param)
        param.data = data
        param.requires_grad_(name != "frozen")
        if main_grad is not None:
            param.main_grad = main_grad
    if hasattr(model, "d"):
        del model.d


# Fault -> class, and the text on every rank.
EXPECTED = {
    "exception in forward": (
        PeerFailedError,
        f"step 1: rank 1 failed in forward: ValueError: boom. {DROPPED}",
    ),
    "exception in backward": (
        PeerFailedError,
        f"step 1: rank 1 failed in backward: {UNKNOWN}. {DROPPED}",
    ),
    "aborted": (
        PeerFailedError,
        f"step 1: rank 1 failed in abort_step(): the batch is empty. {DROPPED}",
    ),
    "unused": (
        UnusedParameterError,
        (
            "step 1: 'b' got no gradient on rank 1 of 3 ranks (first in bucket 1 of 3, counted from 0). They "
            "require grad but no backward of the step reached them, or their .grad was set to None (by a hook, or between two "
            "backwards). Freeze them with requires_grad_(False) before wrapping, use"
            " them, or set unused_parameters='skip', which is torch DDP's find_unused_parameters=True, or 'zero' to reduce "
            f"zeros in their place. {DROPPED}"
        ),
    ),
    "nan": (
        NonFiniteGradientError,
        (
            "step 1: the gradient of 'b' on rank 1 (bucket 1 of 3, counted from 0) has nan in 100 of 100 "
            "elements, first at [0]. Reduced, it would reach every rank. No optimizer step was taken on any "
            "rank. Look at the loss and the data of that rank; set nonfinite_gradients='skip_step' to skip "
            f"such steps, or 'allow' with a loss scaler such as torch.amp.GradScaler. {DROPPED}"
        ),
    ),
    "one microbatch more": (
        MicrobatchMismatchError,
        (
            "step 1: microbatch counts differ between ranks: 1 on ranks 0, 2; 2 on rank 1. The mean "
            "would weigh them unequally. Run as many backwards per step on every rank, all but the last one "
            f"inside no_sync(). {DROPPED}"
        ),
    ),
    "step skipped after forward": (
        StepMismatchError,
        (
            "step 1: training forwards that no backward has reached differ between ranks: 0 on ranks 0, 2; 1 on rank 1. "
            f"{SKIPPED}. {DROPPED}"
        ),
    ),
    "batch skipped": (
        StepMismatchError,
        f"step 1: the caller's step numbers differ between ranks: 1 on ranks 0, 2; 2 on rank 1. {SKIPPED}. {DROPPED}",
    ),
    "force_all_reduce": (
        ScheduleMismatchError,
        (
            "step 1: force_all_reduce differs between ranks: 0 on ranks 0, 2; 1 on rank 1. Ranks that launch "
            f"different collectives mix unrelated data. Set it alike on every rank before backward. {DROPPED}"
        ),
    ),
    "frozen": (
        TrainabilityChangedError,
        f"step 1: after wrapping, rank 1 has frozen 'b' (requires_grad). {TRAINABILITY}. {FOR_A_WHILE} {DROPPED}",
    ),
    "unfrozen": (
        TrainabilityChangedError,
        f"step 1: after wrapping, rank 1 has unfrozen 'frozen' (requires_grad). {TRAINABILITY}. {DROPPED}",
    ),
    "half": (
        StorageMovedError,
        (
            "step 1: on rank 1 parameters have left the buffer: 'a', 'b', 'c' (the first one is float16 on cpu in memory of "
            f"its own, expected float32 on cpu at its place). {MOVED}. {DROPPED}"
        ),
    ),
    "data moved": (
        StorageMovedError,
        (
            "step 1: on rank 1 parameters have left the buffer: 'b' (the first one is float32 on cpu in memory of its own, "
            f"expected float32 on cpu at its place). {MOVED}. {DROPPED}"
        ),
    ),
    "parameter replaced": (
        ParametersChangedError,
        f"step 1: after wrapping, rank 1 has replaced 'b'. {CHANGED}. {DROPPED}",
    ),
    "parameter added": (
        ParametersChangedError,
        f"step 1: after wrapping, rank 1 has added 'd'. {CHANGED}. {DROPPED}",
    ),
    "main_grad replaced": (
        DetachedGradError,
        (
            "step 1: on rank 1 main_grad of 'b' is no longer the place in the gradient buffer, so what is added"
            " there is in no reduction. Something assigned or deleted it after wrapping. Write into main_grad "
            f"in place (main_grad.copy_(), .add_()), and clear gradients with ddp.zero_grad(). {DROPPED}"
        ),
    ),
}
MODES = [(sharded, overlaps) for sharded in (False, True) for overlaps in (True, False)]


def weights(ddp):
    ddp.finish_param_sync()
    return {name: Fraction(*ddp.module.get_parameter(name)[0].item().as_integer_ratio()) for name in "abc"}


def attempt(rank, ddp, optimizer, fault):
    """Run a step; return the error this rank saw, if any."""
    try:
        if fault == "aborted":
            ddp.abort_step("the batch is empty")
        elif fault == "force_all_reduce":
            ddp.force_all_reduce = True
            step(rank, ddp, optimizer)
        else:
            step(rank, ddp, optimizer, fault)
    except Exception as error:
        return error
    finally:
        ddp.force_all_reduce = False
    return None


def program(fault):
    def run(rank, ddp):
        optimizer, model = optimizer_of(ddp), ddp.module
        ddp.step_number = 0
        seen = [attempt(rank, ddp, optimizer, None)]
        optimizer.zero_grad()
        ddp.step_number = 1
        before = {name: (param, param.data, getattr(param, "main_grad", None)) for name, param in model.named_parameters()}
        if rank == FAULTY and fault in BREAK:
            BREAK[fault](model)
        seen.append(attempt(rank, ddp, optimizer, fault if rank == FAULTY and fault not in BREAK else None))
        agreed = ddp.last_error
        if rank == FAULTY and fault in BREAK:
            repair(model, before)
        after_fault = weights(ddp)
        ddp.step_number = 2
        seen.append(attempt(rank, ddp, optimizer, None))
        return seen, agreed, after_fault, weights(ddp)

    return run


# A loopback world refuses the mixed collectives of a forced all-reduce at once, where they are told apart: with shards.
CASES = [
    (fault, sharded, overlaps)
    for fault in EXPECTED
    for sharded, overlaps in MODES
    if not (sharded and fault == "force_all_reduce")
]


@pytest.mark.parametrize(("fault", "sharded", "overlaps"), CASES)
def test_a_fault_on_one_rank_is_the_same_error_on_all_and_the_next_step_is_right(fault, sharded, overlaps):
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps, bucket_size=1)

    results = ranks.run(program(fault))

    kind, text = EXPECTED[fault]
    for rank, (seen, agreed, after_fault, at_end) in enumerate(results):
        first, faulty, last = seen
        assert (first, last) == (None, None)
        assert type(agreed) is kind
        assert str(agreed) == text
        if rank == FAULTY and fault.startswith("exception"):
            assert isinstance(faulty, ValueError)  # its own
        elif rank == FAULTY and fault == "aborted":
            assert faulty is None  # it knows
        else:
            assert faulty is agreed
        # The mean of 1, 2, 3 is 2 in each of the two steps that count, with a learning rate of 1.
        assert after_fault == dict.fromkeys("abc", -2)
        assert at_end == dict.fromkeys("abc", -4)


@pytest.mark.parametrize("overlaps", [True, False])
def test_gradients_dropped_by_one_rank_are_not_stepped_on_by_the_others(overlaps):
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=True, overlap_grad_reduce=overlaps, bucket_size=1)

    results = ranks.run(program("gradients dropped"))

    for seen, agreed, after_fault, at_end in results:
        assert isinstance(agreed, StepMismatchError)
        assert seen[1] is agreed
        assert (
            "dropped steps (zero_grad() without an optimizer step) differ between ranks: 0 on ranks 0, 2; 1 on rank 1"
            in str(agreed)
        )
        assert after_fault == dict.fromkeys("abc", -2)
        assert at_end == dict.fromkeys("abc", -4)


@pytest.mark.parametrize("overlaps", [True, False])
def test_gradients_dropped_by_all_ranks_are_no_fault(overlaps):
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=True, overlap_grad_reduce=overlaps, bucket_size=1)

    def drop(rank, ddp):
        optimizer = optimizer_of(ddp)
        ddp(100.0 * rank).backward()
        optimizer.zero_grad()
        step(rank, ddp, optimizer)
        return ddp.last_error, weights(ddp)

    assert ranks.run(drop) == [(None, dict.fromkeys("abc", -2))] * SIZE


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_second_backward_on_one_rank_is_late_on_all(overlaps):
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=True, overlap_grad_reduce=overlaps, bucket_size=1)

    results = ranks.run(program("second backward"))

    # With overlap its buckets are in flight; without, nothing was sent yet, but it counts one backward more.
    kind = LateGradientError if overlaps else MicrobatchMismatchError
    for seen, agreed, after_fault, at_end in results:
        assert seen[1] is agreed
        assert isinstance(agreed, MicrobatchMismatchError | kind)
        assert (after_fault, at_end) == (dict.fromkeys("abc", -2), dict.fromkeys("abc", -4))


@pytest.mark.parametrize(("sharded", "overlaps"), MODES, ids=str)
def test_inside_a_step_block_the_failing_rank_raises_the_same_error_with_the_whole_text(sharded, overlaps):
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps, bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        caught = None
        try:
            with ddp.step():
                step(rank, ddp, optimizer, "exception in backward" if rank == FAULTY else None)
        except MegabucketError as error:
            caught = error
        with ddp.step():
            step(rank, ddp, optimizer)
        return caught, weights(ddp)

    for rank, (error, at_end) in enumerate(ranks.run(run)):
        assert isinstance(error, PeerFailedError)
        assert str(error) == f"step 0: rank 1 failed in backward: ValueError: boom. {DROPPED}"
        assert isinstance(error.__cause__, ValueError if rank == FAULTY else type(None))
        assert at_end == dict.fromkeys("abc", -2)


def test_an_interrupt_inside_a_step_block_leaves_it_at_once_and_is_told_to_the_others():
    ranks = Ranks(2, Model(), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        try:
            with ddp.step():
                if rank == FAULTY:
                    raise KeyboardInterrupt  # noqa: TRY301
                step(rank, ddp, optimizer)
        except BaseException as error:
            return type(error).__name__, str(ddp.last_error)
        return None

    text = f"step 0: rank 1 failed in setup: KeyboardInterrupt: . {DROPPED}"
    assert ranks.run(run) == [("PeerFailedError", text), ("KeyboardInterrupt", text)]


def fail(*_):
    raise ValueError("boom")


def test_a_plain_optimizer_that_fails_on_one_rank_is_named_on_all_at_the_next_fence():
    ranks = Ranks(SIZE, Model(), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        errors = []
        for index in range(2):
            if rank == FAULTY and index == 0:
                handle = optimizer.register_step_pre_hook(fail)
            errors.append(attempt(rank, ddp, optimizer, None))
            if rank == FAULTY and index == 0:
                handle.remove()
            optimizer.zero_grad()
        return errors

    for rank, (first, second) in enumerate(ranks.run(run)):
        assert isinstance(first, ValueError if rank == FAULTY else type(None))
        assert isinstance(second, ReplicasDivergedError)
        assert "optimizer updates since the last agreement differ between ranks: 1 on ranks 0, 2; 0 on rank 1" in str(second)


def test_a_distributed_optimizer_that_fails_on_one_rank_breaks_the_wrapper_on_all():
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=True, bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        if rank == FAULTY:
            optimizer.torch_optimizer.register_step_pre_hook(fail)
        errors = [attempt(rank, ddp, optimizer, None) for _ in range(2)]
        for call in (optimizer.zero_grad, ddp.check_replicas, optimizer.state_dict):
            with pytest.raises(WrapperBrokenError) as caught:
                call()
            errors.append(caught.value)
        ddp.detach()
        return errors[rank == FAULTY], {str(error) for error in errors[1:]}

    for first, texts in ranks.run(run):
        assert isinstance(first, WrapperBrokenError)
        (text,) = texts
        assert text.startswith("step 0: rank 1 stopped in optimizer.step(), with the others about to go on: ValueError: boom. ")


def test_without_the_fence_an_error_stays_on_its_rank():
    ranks = Ranks(2, Model(), fence=False, bucket_size=1)

    def run(rank, ddp):
        return type(attempt(rank, ddp, optimizer_of(ddp), "unused" if rank == FAULTY else None)).__name__

    assert ranks.run(run) == ["NoneType", "UnusedParameterError"]
    assert not any("fence" in text for text in ranks.world.schedule(0))


def test_forwards_without_a_backward_are_no_fault_when_the_config_allows_them():
    ranks = Ranks(2, Model(), skipped_forwards="allow", bucket_size=1)

    def run(rank, ddp):
        return attempt(rank, ddp, optimizer_of(ddp), "step skipped after forward" if rank == FAULTY else None)

    assert ranks.run(run) == [None, None]


@pytest.mark.parametrize("how", ["no_grad", "eval"])
def test_forwards_that_are_not_for_training_do_not_count(how):
    ranks = Ranks(2, Model(), bucket_size=1)

    def run(rank, ddp):
        if rank == FAULTY:
            ddp.train(how != "eval")
            with torch.set_grad_enabled(how != "no_grad"):
                ddp(1.0)
            ddp.train()
        return attempt(rank, ddp, optimizer_of(ddp), None)

    assert ranks.run(run) == [None, None]


def test_what_went_wrong_first_is_named_when_several_things_did():
    ranks = Ranks(SIZE, Model(), bucket_size=1)

    def run(rank, ddp):
        fault = {0: "nan", 1: "exception in forward", 2: "unused"}[rank]
        attempt(rank, ddp, optimizer_of(ddp), fault)
        return str(ddp.last_error)

    assert ranks.run(run) == [f"step 0: rank 1 failed in forward: ValueError: boom. {DROPPED}"] * SIZE


def test_an_error_that_was_caught_cannot_be_stepped_on():
    ranks = Ranks(2, Model(), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        attempt(rank, ddp, optimizer, "unused")
        with pytest.raises(PhaseError, match="an error about them was raised before"):
            optimizer.step()
        return attempt(rank, ddp, optimizer, None)  # nothing needs to be cleared

    assert ranks.run(run) == [None, None]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(("sharded", "overlaps"), MODES, ids=str)
def test_checkpointing_the_whole_module_is_no_fault(sharded, overlaps, checkpoints):
    ranks = Ranks(2, Model(), use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps, bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        for _ in range(3):
            x = torch.tensor(rank + 1.0)
            # Its forward runs again in backward, and is cut short there by an exception.
            loss = checkpoint(ddp, x, use_reentrant=False) if checkpoints else ddp(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return ddp.last_error, weights(ddp)

    assert ranks.run(run) == [(None, dict.fromkeys("abc", Fraction(-9, 2)))] * 2


def test_a_forward_that_failed_unnoticed_counts_as_skipped():
    """An interrupt runs no hooks of the module, but the rank has not done what the others have."""
    ranks = Ranks(2, Model(), bucket_size=1)

    def run(rank, ddp):
        if rank == FAULTY:
            with pytest.raises(KeyboardInterrupt):
                ddp(Interrupts())
        return type(attempt(rank, ddp, optimizer_of(ddp), None)).__name__

    assert ranks.run(run) == ["StepMismatchError"] * 2


class Interrupts:
    def __rmul__(self, _):
        raise KeyboardInterrupt


@pytest.mark.parametrize("faulty_ranks", [{FAULTY}, {0, 1, 2}], ids=["one rank", "all ranks"])
def test_a_gradient_zeroed_in_place_does_not_stand_in_for_one_that_never_came(faulty_ranks):
    ranks = Ranks(SIZE, Model(), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        step(rank, ddp, optimizer)
        optimizer.zero_grad(set_to_none=False)
        return attempt(rank, ddp, optimizer, "unused" if rank in faulty_ranks else None)

    for error in ranks.run(run):
        assert isinstance(error, UnusedParameterError)
        assert (error.params, set(error.ranks)) == (("b",), faulty_ranks)


def test_the_number_of_a_step_does_not_depend_on_where_its_fence_is():
    ranks = Ranks(SIZE, Model(), use_distributed_optimizer=True, finish="explicit", bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        seen = []
        for fault in (None, "drop", None, "abort"):
            ddp(rank + 1.0).backward()
            ddp.finish_grad_sync()
            try:
                if fault == "abort" and rank == FAULTY:
                    ddp.abort_step("no")
                elif fault != "drop" or rank != FAULTY:
                    optimizer.step()
                optimizer.zero_grad()
            except MegabucketError:
                pass
            seen.append(ddp.last_error.step if ddp.last_error else None)
        return seen

    assert ranks.run(run) == [[None, 1, 1, 3]] * SIZE


def test_an_input_gradient_between_step_and_zero_grad_is_no_fault():
    ranks = Ranks(2, Model(), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        step(rank, ddp, optimizer)
        if rank == FAULTY:
            torch.autograd.grad(ddp(1.0), ddp.module.a)
        optimizer.zero_grad()
        return attempt(rank, ddp, optimizer, None)

    assert ranks.run(run) == [None, None]


class Interrupt(BaseException):
    """Raised by a signal handler."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_backward_whose_destructor_is_interrupted_is_told_by_the_next_call(monkeypatch):
    ranks = Ranks(2, Model(), bucket_size=1)
    abandon = GradSync.abandon_backward
    left = [1]

    def interrupted_once(sync):
        if left.pop():
            left.append(0)
            raise Interrupt
        left.append(0)
        abandon(sync)

    monkeypatch.setattr(GradSync, "abandon_backward", interrupted_once)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        attempt(rank, ddp, optimizer, "exception in backward" if rank == FAULTY else None)
        error = attempt(rank, ddp, optimizer, None) if rank == FAULTY else None
        error = error or ddp.last_error
        if rank != FAULTY:
            attempt(rank, ddp, optimizer, None)
        return str(error)

    assert ranks.run(run) == [f"step 0: rank 1 failed in backward: {UNKNOWN}. {DROPPED}"] * 2


class DropsLate:
    """Autograd, one thread of which still holds what a backward that is over has queued."""

    def __init__(self):
        self._engine, self._held = torch.autograd.Variable._execution_engine, []
        self.run_backward = self._engine.run_backward

    def queue_callback(self, callback):
        self._held.append(callback)
        self._engine.queue_callback(callback)

    def drop(self):
        """Let a thread that Python has not started, as those of autograd are, drop what it holds."""
        is_done = threading.Event()

        def in_the_thread():
            self._held.clear()
            is_done.set()

        _thread.start_new_thread(in_the_thread, ())
        is_done.wait()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("has_begun_again", [False, True])
def test_a_failed_backward_that_a_thread_of_autograd_drops_sends_nothing_there(monkeypatch, sharded, has_begun_again):
    """On a device it may be dropped while the caller handles its exception, or is in the next forward already."""
    autograd = DropsLate()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", autograd)
    ranks = Ranks(2, Model(), bucket_size=1, use_distributed_optimizer=sharded)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        failed = attempt(rank, ddp, optimizer, "exception in backward" if rank == FAULTY else None)
        loss = ddp(rank + 1.0) if has_begun_again or rank != FAULTY else None
        if rank == FAULTY:
            launched = ddp.communicator.launches.last
            autograd.drop()
            assert ddp.communicator.launches.last == launched
        (loss if loss is not None else ddp(rank + 1.0)).backward()
        optimizer.step()
        ddp.finish_param_sync()
        return type(failed), str(ddp.last_error), ddp.module.a[0].item()

    error = f"step 0: rank 1 failed in backward: {UNKNOWN}. {DROPPED}"
    weight = -(1.0 + 2.0) / 2  # of both ranks' inputs, and a learning rate of 1
    assert ranks.run(run) == [(PeerFailedError, error, weight), (ValueError, error, weight)]


def test_a_failed_backward_of_another_thread_that_a_thread_of_autograd_drops_is_told_by_the_next_call(monkeypatch):
    """On a device hooks run in that thread as well, so the caller's thread says nothing about the backward."""
    autograd = DropsLate()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", autograd)
    ranks = Ranks(2, Model(), bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        if rank == FAULTY:
            thread = threading.Thread(target=attempt, args=(rank, ddp, optimizer, "exception in backward"))
            thread.start()
            thread.join()
            autograd.drop()
        else:
            attempt(rank, ddp, optimizer, None)
        ddp.zero_grad()
        return str(ddp.last_error), attempt(rank, ddp, optimizer, None)

    assert ranks.run(run) == [(f"step 0: rank 1 failed in backward: {UNKNOWN}. {DROPPED}", None)] * 2


def test_an_optimizer_does_not_step_while_buckets_are_on_their_way():
    ddp = Ranks(1, Model(), finish="explicit").ddps[0]
    ddp(1.0).backward()
    ddp.start_grad_sync()
    ddp.module.zero_grad()  # plain torch does not know, and would step on nothing

    with pytest.raises(UnreducedGradientsError, match="not reduced"):
        optimizer_of(ddp).step()
