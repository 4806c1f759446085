"""Collective calls on two ranks: failures before and in their exchange, calls in the middle of a step, a changed module."""

import pytest
import torch

import megabucket as mb
from megabucket.errors import (
    CallMismatchError,
    LayoutMismatchError,
    MegabucketError,
    PeerFailedError,
    PhaseError,
    WrapperBrokenError,
)
from megabucket.testing import LoopbackWorld


class Two(torch.nn.Module):
    """Two layers, of which the second may be left out, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Parameter(torch.ones(3, 2), requires_grad=False)
        for param in self.parameters():  # threads share the random generator
            param.data = torch.linspace(-1, 1, param.numel()).view(param.shape)

    def forward(self, inputs, *, is_short=False):
        return self.first(inputs) if is_short else self.second(self.first(inputs))


class Rank:
    """One rank that trains."""

    def __init__(self, world, rank, **config):
        config = {"use_distributed_optimizer": True, "bucket_cuts": ("second.weight",), **config}
        self.rank, config = rank, mb.DistributedDataParallelConfig(**config)
        self.ddp = mb.DistributedDataParallel(Two(), config, communicator=world.communicator(rank))
        self.optimizer = mb.DistributedOptimizer(torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9), self.ddp)

    def step(self, between=lambda: None, **switches):
        """Train; ``between`` runs after the backward."""
        self.optimizer.zero_grad()
        self.ddp(torch.ones(1, 4), **switches).sum().backward()
        between()
        self.ddp.finish_grad_sync()
        self.optimizer.step()


def error_of(function, *args, **kwargs):
    """Return what a function raises, or ``None``."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def run_ranks(play, **config):
    """Return the results of ``play(rank)`` on two ranks."""
    world = LoopbackWorld(2, timeout_s=20)
    return world.run(lambda rank: play(Rank(world, rank, **config)))


# A failure in the exchange, on rank 1 only #


def spoil_parameter(rank):
    """Its checksum fails."""
    rank.ddp.module.frozen = torch.nn.Parameter(torch.ones(3, 2).to_sparse(), requires_grad=False)


def spoil_state(rank):
    """Its values cannot be copied."""
    for state in rank.optimizer.sharding.updates[0].twin.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to("meta")


def spoil_buffer(rank):
    """It cannot be written to."""
    with torch.inference_mode():
        rank.ddp.module.given = torch.ones(2, 3).t()


IN_THE_EXCHANGE = {
    "check_replicas()": (spoil_parameter, lambda rank: rank.ddp.check_replicas()),
    "state_dict(): optimizer state": (spoil_state, lambda rank: rank.optimizer.state_dict()),
    "broadcast_params()": (spoil_buffer, lambda rank: rank.ddp.broadcast_params()),
    "rebuild: parameters": (spoil_buffer, lambda rank: rank.ddp.rebuild()),
}


@pytest.mark.parametrize("label", IN_THE_EXCHANGE)
def test_a_failure_in_the_exchange_of_a_call_breaks_all_ranks_with_one_error(label):
    spoil, call = IN_THE_EXCHANGE[label]

    def play(rank):
        rank.step()
        rank.ddp.module.register_buffer("given", torch.ones(2, 3).t())
        rank.ddp.module.register_buffer("later", torch.ones(2))  # the other rank waits for it
        if rank.rank == 1:
            spoil(rank)
        return [error_of(call, rank), error_of(rank.ddp.check_replicas), error_of(call, rank)]

    (heard, *refused), (own, *also_refused) = run_ranks(play)

    assert isinstance(heard, WrapperBrokenError)
    assert (heard.rank, heard.phase) == (1, label)
    assert heard.cause.startswith(type(own).__name__)
    assert not isinstance(own, MegabucketError)
    of_rebuild = PhaseError if label.startswith("rebuild") else WrapperBrokenError  # nothing is wrapped
    for next_call, again in (refused, also_refused):
        assert type(next_call) is of_rebuild
        assert str(again) == str(heard)


# A failure before the exchange #


@pytest.mark.parametrize("name", ["check_replicas", "broadcast_params"])
@pytest.mark.parametrize("num_changed", [1, 2])
def test_a_parameter_that_came_after_wrapping_fails_the_call_and_the_next_step_is_right(name, num_changed):
    def play(rank):
        if rank.rank >= 2 - num_changed:
            rank.ddp.module.extra = torch.nn.Parameter(torch.zeros(2))
        found = error_of(getattr(rank.ddp, name))
        if rank.rank >= 2 - num_changed:
            del rank.ddp.module.extra
        rank.step()
        rank.ddp.check_replicas()
        return found

    first, second = run_ranks(play)

    assert str(first) == str(second)
    assert type(first) is (PhaseError if num_changed == 2 else PeerFailedError)
    assert "'extra' came into the module after wrapping" in str(first)
    assert "ddp.rebuild()" in str(first)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("check_replicas", lambda module: module.second.register_parameter("bias", None)),
        ("broadcast_params", lambda module: module.register_buffer("given", torch.zeros(3))),
        ("broadcast_params", lambda module: setattr(module, "frozen", torch.nn.Parameter(torch.ones(2), requires_grad=False))),
    ],
    ids=["parameter removed", "buffer added", "frozen parameter replaced"],
)
def test_a_module_that_changed_on_one_rank_is_named_before_the_exchange(name, change):
    def play(rank):
        if rank.rank == 1:
            change(rank.ddp.module)
        return error_of(getattr(rank.ddp, name))

    first, second = run_ranks(play)

    assert isinstance(first, LayoutMismatchError)
    assert str(first) == str(second)
    assert str(first).startswith("the module is not the same on all ranks")


@pytest.mark.parametrize("label", ["check_replicas()", "broadcast_params()", "param_norms()", "train()", "eval()"])
def test_the_failure_of_a_call_does_not_claim_that_a_step_was_dropped(label):
    error = PeerFailedError(step=3, rank=1, phase=label, cause="ValueError: boom")

    assert str(error).startswith(f"rank 1 failed in {label}: ValueError: boom. ")
    assert "step" not in str(error)


# In the middle of a step #


@pytest.mark.parametrize("name", ["check_replicas", "broadcast_params"])
@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "all-reduce"])
def test_a_call_in_the_middle_of_a_step_is_refused_and_the_step_goes_on(name, is_sharded):
    """In the second step rank 0 has sent both buckets and rank 1 none, so an exchange would meet a bucket."""

    def play(rank, *, calls):
        refused = []
        for is_short in (False, rank.rank == 1, False):
            rank.step(lambda: refused.append(error_of(getattr(rank.ddp, name)) if calls else None), is_short=is_short)
        getattr(rank.ddp, name)()
        return refused, [value.clone() for value in rank.ddp.parameters()]

    switches = {"use_distributed_optimizer": is_sharded, "unused_parameters": "zero"}
    if not is_sharded:
        switches["finish"] = "explicit"
    results, expected = (run_ranks(lambda rank, calls=calls: play(rank, calls=calls), **switches) for calls in (True, False))

    refused = [error for of_rank, _ in results for error in of_rank]
    assert [type(error) for error in refused] == [PhaseError] * 6
    assert {str(error) for error in refused} == {str(refused[0])}
    assert "in the middle of a step" in str(refused[0])
    assert all(map(torch.equal, results[1][1], expected[0][1]))


def test_calls_before_the_first_step_and_after_a_dropped_one_are_not_refused():
    def play(rank):
        rank.ddp.broadcast_params()
        dropped = error_of(rank.step, lambda: rank.ddp.abort_step("no batch") if rank.rank else None)
        rank.ddp.broadcast_params()
        rank.step()
        rank.ddp.check_replicas()
        return type(dropped)

    assert run_ranks(play) == [PeerFailedError] * 2


def test_a_call_between_sync_and_step_on_one_rank_drops_the_step_once_on_both():
    """Rank 0 votes on the step meanwhile."""

    def play(rank):
        def between():
            rank.ddp.finish_grad_sync()
            if rank.rank == 1 and len(found) == 2:
                rank.ddp.check_replicas()

        found = []
        while len(found) < 5:
            found.append(error_of(rank.step, between))
        rank.optimizer.zero_grad()
        rank.ddp.check_replicas()
        return found

    first, second = run_ranks(play, finish="explicit")

    assert [type(error) for error in first] == [type(None)] * 2 + [CallMismatchError] + [type(None)] * 2
    assert list(map(str, first)) == list(map(str, second))
    assert "check_replicas() on rank 1" in str(first[2])
    assert "the step was dropped on all ranks" in str(first[2])


def test_two_calls_in_the_middle_of_a_step_leave_the_step_alone():
    def play(rank):
        found = []
        call = rank.ddp.check_replicas if rank.rank else rank.ddp.broadcast_params
        rank.step(lambda: found.append(error_of(call)))
        return found[0], rank.optimizer.last_step.updated

    (first, is_updated), (second, is_also_updated) = run_ranks(play)

    assert isinstance(first, CallMismatchError)
    assert str(first) == str(second)
    assert "dropped" not in str(first)
    assert is_updated
    assert is_also_updated


# An interrupt between the exchanges of a call #


class Interrupting(Two):
    """Interrupts once whoever asks for its parameters."""

    cause = None

    def parameters(self, recurse=True):
        if self.cause is not None:
            cause, self.cause = self.cause, None
            raise cause
        return super().parameters(recurse)


@pytest.mark.parametrize("cause", [KeyboardInterrupt("by hand"), RuntimeError("out of a signal handler")], ids=repr)
def test_a_rebuild_that_is_interrupted_on_one_rank_breaks_all_ranks_and_the_module_can_be_wrapped_again(cause):
    def play(rank):
        rank.step()
        module = rank.ddp.module
        module.__class__ = Interrupting
        module.cause = cause if rank.rank == 1 else None
        with pytest.raises((WrapperBrokenError, type(cause))) as first:
            rank.ddp.rebuild()
        with pytest.raises(WrapperBrokenError) as second:
            rank.ddp.rebuild()
        found = [first.value, second.value]
        rank.ddp.detach()
        return found, [hasattr(param, "main_grad") for param in module.parameters()], module

    (heard, *of_first), (own, *of_second) = run_ranks(play)

    assert own[0] is cause
    assert all(type(error) is WrapperBrokenError for error in (*heard, *own[1:]))
    assert len({str(error) for error in (*heard, *own[1:])}) == 1
    assert (heard[0].rank, heard[0].phase) == (1, "rebuild()")
    for are_in_buffers, module in (of_first, of_second):
        assert not any(are_in_buffers)
        module.cause = None
        mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(), communicator=LoopbackWorld(1).communicator(0))
