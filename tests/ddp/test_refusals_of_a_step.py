"""What a step refuses, and all that it says about it: the reason, and what to do."""

import threading
from contextlib import suppress

import pytest
import torch
from loop_ranks import Ranks, Weights, optimizer_of

from megabucket.ddp.step import StepState
from megabucket.errors import ConcurrentBackwardError, ConfigError, InvariantError, MegabucketError, PeerFailedError, PhaseError

BOTH = {"a": 1.0, "b": 1.0}


def one_rank(**switches):
    (ddp,) = Ranks(1, Weights("ab"), bucket_size=1, **switches).ddps
    return ddp


def text_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_call_inside_a_backward_is_sent_behind_it():
    ddp, texts = one_rank(), []
    loss = ddp(**BOTH)
    loss.register_hook(lambda _: texts.append(text_of(PhaseError, ddp.zero_grad)))

    loss.backward()

    (text,) = texts
    assert text == (
        "zero_grad() was called inside a backward, by a hook or by a forward that activation checkpointing reruns. It needs "
        "all ranks, and they run their backwards at different paces. Call it when backward() has returned."
    )


def test_an_abort_that_comes_too_late_is_sent_to_the_update_or_to_the_next_step():
    ddp = one_rank()
    ddp(**BOTH).backward()

    assert text_of(PhaseError, lambda: ddp.abort_step("bad batch")) == (
        "abort_step() comes too late: all ranks have agreed on the gradients of this step and the others update with them. "
        "Step on this rank as well. If the next step is meant, call zero_grad() before, or set step_number."
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_an_error_are_sent_to_zero_grad(sharded):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        if rank == 0:
            return ddp.abort_step("no")
        with suppress(PeerFailedError):
            ddp(**BOTH).backward()
            ddp.finish_grad_sync()
        return text_of(PhaseError, optimizer.step)

    assert ranks.run(run)[1] == (
        "the gradients of this step are not usable: an error about them was raised before (and caught by the caller); "
        "ddp.last_error has it. Call zero_grad() and go on with the next step."
    )


def test_a_call_in_the_middle_of_a_step_is_sent_between_two_steps():
    ddp = one_rank()
    ddp(**BOTH)

    assert text_of(PhaseError, ddp.check_replicas).endswith(
        "check_replicas() in the middle of a step: gradients are part of no checkpoint, and buckets may be on their way. "
        "Call it between two steps, after optimizer.step() or ddp.zero_grad(), on every rank. A forward in train mode "
        "begins a step, and needs a backward: run one that is not for training under torch.no_grad() or in eval mode."
    )


def test_a_state_that_a_step_cannot_have_next_is_named_with_the_one_it_has():
    ddp = one_rank()

    text = text_of(InvariantError, lambda: ddp.sync.enter(StepState.PUBLISHED))

    assert "a step that is 'between two steps' cannot become 'published'" in text
    assert ddp.sync.state is StepState.IDLE


def test_a_gradient_of_autograd_is_refused_as_one_computed_outside_of_it():
    ddp = one_rank()

    assert text_of(ConfigError, lambda: ddp.grad_ready(ddp.module.a)) == (
        "grad_ready() was called with a parameter of shape (100,) whose gradients are taken from autograd: they would count "
        "twice. Set param.skip_backward_post_hook = True before wrapping if they are computed outside backward."
    )


def test_a_delayed_gradient_that_comes_too_late_is_sent_before_the_sync():
    def mark(_, module):
        module.a.skip_backward_post_hook = True

    (ddp,) = Ranks(1, Weights("ab"), prepare=mark, finish="explicit", bucket_size=1).ddps
    ddp(b=1.0).backward()
    ddp.module.a.grad = torch.ones(100)
    ddp.grad_ready(ddp.module.a)
    ddp.finish_grad_sync()

    assert text_of(PhaseError, lambda: ddp.grad_ready(ddp.module.a)) == (
        "grad_ready() was called for 'a' when the gradients of the step were reduced: this one would be left out. Call it "
        "before finish_grad_sync() or the optimizer's step, and zero_grad() before the next step begins."
    )


def test_a_backward_inside_another_one_is_refused_with_the_rank_and_both_threads():
    ranks = Ranks(2, Weights("ab"), bucket_size=1)

    def run(rank, ddp):
        second, found = ddp(**BOTH), []
        first = ddp(**BOTH)

        def begin_another(_):
            with pytest.raises(ConcurrentBackwardError) as caught:
                second.backward()
            found.append((caught.value.rank, caught.value.thread, caught.value.other_thread))

        handle = ddp.module.a.register_hook(begin_another)
        with suppress(MegabucketError):
            first.backward()
        handle.remove()
        return found[0], threading.current_thread().name

    for rank, (found, thread) in enumerate(ranks.run(run)):
        assert found == (rank, thread, thread)
