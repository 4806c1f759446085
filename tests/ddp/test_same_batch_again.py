"""A rank that fails between a forward and its backward, outside ``with ddp.step()``, is on the same batch as the others later.

Each step's gradients are a power of four of its own, so a weight tells which batches were averaged: the mean of two different
powers is no sum of powers of four.
"""

import pytest
import torch
from loop_ranks import FailsInBackward, Ranks, Weights

from megabucket import DistributedOptimizer
from megabucket.errors import CallMismatchError, MegabucketError, PeerFailedError

MODES = [
    pytest.param((False, False), id="all-reduce, torch's optimizer"),
    pytest.param((False, True), id="all-reduce"),
    pytest.param((True, True), id="reduce-scatter"),
]
NUM_STEPS, FAULTY = 8, 1


def stop(kind=ValueError):
    raise kind("no backward here")


def optimizer_of(ddp, mode):
    sgd = torch.optim.SGD(ddp.parameters(), lr=1.0)
    return DistributedOptimizer(sgd, ddp) if mode[1] else sgd


def train(ddp, optimizer, rank, *, failing, num_microbatches=1, clears="except", is_numbered=False, error_of=ValueError):
    """Take ``NUM_STEPS`` batches; ``failing(rank, step)`` fails between forward and backward. Return the errors by step."""
    errors = {}
    for step in range(NUM_STEPS):
        if is_numbered:
            ddp.step_number = step
        try:
            for _ in range(num_microbatches - 1):
                with ddp.no_sync():
                    ddp(a=0, b=0).backward()
            loss = ddp(a=4**step, b=4**step)
            if failing(rank, step):
                stop(error_of)
            loss.backward()
            optimizer.step()
        except (MegabucketError, ValueError, KeyboardInterrupt) as error:
            errors[step] = error
            if clears == "except":
                ddp.zero_grad()
        ddp.zero_grad()
    if hasattr(optimizer, "ddp"):
        ddp.finish_param_sync()
    return errors


def used(weight):
    """The steps whose batches have moved the weight, which began at 1."""
    total = 1 - weight
    found = {step for step in range(NUM_STEPS) if int(total) >> 2 * step & 1}
    assert total == sum(4**step for step in found), f"batches of different steps were averaged: {total}"
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("clears", ["except", "always"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "failed",
    [
        pytest.param({1: [2]}, id="once"),
        pytest.param({1: [2, 5]}, id="twice"),
        pytest.param({1: [2, 3]}, id="twice in a row"),
        pytest.param({1: [2, 3, 4]}, id="three in a row"),
        pytest.param({0: [3], 1: [2]}, id="one after the other"),
        pytest.param({0: [2], 1: [2]}, id="both at once"),
        pytest.param({0: [2], 1: [2, 3]}, id="both, and one more"),
        pytest.param({1: [0]}, id="in the first step"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_batches_of_different_steps_are_never_averaged(mode, failed, num_microbatches, clears):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def program(rank, ddp):
        optimizer = optimizer_of(ddp, mode)
        failing = lambda rank, step: step in failed.get(rank, ())  # noqa: E731
        errors = train(ddp, optimizer, rank, failing=failing, num_microbatches=num_microbatches, clears=clears)
        return {step for step, error in errors.items() if isinstance(error, MegabucketError)}, ddp.module.a[0].item(), errors

    results = ranks.run(program)

    weights = {weight for _, weight, _ in results}
    assert len(weights) == 1
    taken = used(weights.pop())
    lost = set(range(NUM_STEPS)) - taken
    fell = {step for steps in failed.values() for step in steps}
    assert lost == fell
    for _, _, errors in results:
        assert lost >= errors.keys()
    if failed == {1: [2]}:
        (told,) = [errors for rank, (_, _, errors) in enumerate(results) if rank != FAULTY]
        assert type(told[2]) is PeerFailedError
        assert "rank 1 failed in forward: zero_grad() was called after it" in str(told[2])


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"error_of": KeyboardInterrupt}, id="interrupted"),
        pytest.param({"is_numbered": True}, id="with step numbers"),
        pytest.param({"num_microbatches": 3, "clears": "never"}, id="never cleared at once"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_whatever_ends_the_step_there(mode, setting):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def program(rank, ddp):
        train(ddp, optimizer_of(ddp, mode), rank, failing=lambda rank, step: (rank, step) == (FAULTY, 2), **setting)
        return used(ddp.module.a[0].item())

    assert ranks.run(program) == [set(range(NUM_STEPS)) - {2}] * 2


@pytest.mark.parametrize("second", ["in forward", "in backward", "abort_step()"])
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_fails_in_another_way_in_the_next_batch(mode, second):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def fail(ddp):
        if second == "in forward":
            ddp(a="no number")
        elif second == "in backward":
            FailsInBackward.apply(ddp(a=1)).backward()
        else:
            ddp(a=1)
            ddp.abort_step("unusable")

    def program(rank, ddp):
        optimizer = optimizer_of(ddp, mode)
        for step in range(NUM_STEPS):
            try:
                if (rank, step) == (FAULTY, 3):
                    fail(ddp)
                else:
                    loss = ddp(a=4**step, b=4**step)
                    if (rank, step) == (FAULTY, 2):
                        stop()
                    loss.backward()
                    optimizer.step()
            except (MegabucketError, ValueError, TypeError):
                pass
            ddp.zero_grad()
        ddp.finish_param_sync()
        return used(ddp.module.a[0].item())

    assert ranks.run(program) == [set(range(NUM_STEPS)) - {2, 3}] * 2


@pytest.mark.parametrize("num_forwards_before", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_two_forwards(mode, num_forwards_before):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def program(rank, ddp):
        optimizer = optimizer_of(ddp, mode)
        for step in range(NUM_STEPS):
            try:
                losses = []
                for index in range(2):
                    if (rank, step, index) == (FAULTY, 2, num_forwards_before):
                        stop()
                    losses.append(ddp(a=4**step / 2, b=4**step / 2))
                if (rank, step, 2) == (FAULTY, 2, num_forwards_before):
                    stop()
                sum(losses).backward()
                optimizer.step()
            except (MegabucketError, ValueError):
                pass
            ddp.zero_grad()
        ddp.finish_param_sync()
        return used(ddp.module.a[0].item())

    assert ranks.run(program) == [set(range(NUM_STEPS)) - {2}] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_after_the_last_step_of_a_rank_keeps_nobody_waiting_in_the_next_call(mode):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def program(rank, ddp):
        optimizer = optimizer_of(ddp, mode)
        errors = train(ddp, optimizer, rank, failing=lambda rank, step: (rank, step) == (FAULTY, NUM_STEPS - 1))
        if rank == FAULTY:
            with pytest.raises(CallMismatchError):
                ddp.check_replicas()
        ddp.check_replicas()
        return used(ddp.module.a[0].item()), type(errors[NUM_STEPS - 1])

    # The others are at the end of the step, this rank in a call: that drops the step on all ranks.
    kinds = [CallMismatchError, ValueError]
    assert ranks.run(program) == [(set(range(NUM_STEPS - 1)), kind) for kind in kinds]


@pytest.mark.parametrize("mode", MODES)
def test_clearing_between_forward_and_backward_is_plain_torch_on_any_rank(mode):
    """``loss = ...; optimizer.zero_grad(); loss.backward(); optimizer.step()``, here on one rank only."""
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def program(rank, ddp):
        optimizer = optimizer_of(ddp, mode)
        for step in range(NUM_STEPS):
            if rank != FAULTY:
                ddp.zero_grad()
            loss = ddp(a=4**step, b=4**step)
            if rank == FAULTY:
                ddp.zero_grad()
            loss.backward()
            optimizer.step()
        ddp.finish_param_sync()
        return used(ddp.module.a[0].item())

    assert ranks.run(program) == [set(range(NUM_STEPS))] * 2


@pytest.mark.parametrize("where", ["before each step", "once", "instead of a step"])
@pytest.mark.parametrize("mode", MODES)
def test_forwards_without_a_backward_are_no_fault_where_all_ranks_make_them(mode, where):
    """As the generator's of a GAN, whose zero_grad() comes before the forward of its own loss. Each costs a schedule."""
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=mode[0])

    def program(rank, ddp):
        optimizer = optimizer_of(ddp, mode)
        for step in range(NUM_STEPS):
            if where != "once" or step == 1:
                ddp(a=100, b=100).detach()
                ddp.zero_grad()
            if where == "instead of a step" and step == 5:
                continue
            ddp(a=4**step, b=4**step).backward()
            optimizer.step()
            ddp.zero_grad()
        ddp.finish_param_sync()
        return used(ddp.module.a[0].item()), ddp.last_error

    taken = set(range(NUM_STEPS)) - ({5} if where == "instead of a step" else set())
    assert ranks.run(program) == [(taken, None)] * 2
    num_left = {"before each step": NUM_STEPS, "once": 1, "instead of a step": NUM_STEPS}[where]
    assert ranks.schedule().count("fence") == len(taken) + num_left
