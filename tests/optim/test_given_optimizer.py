"""What the torch optimizer that was given to a ``DistributedOptimizer`` may still do, and how the rest is refused."""

import copy
import functools
import pickle

import pytest
import torch
from optim_ranks import in_ways, run_wrapped

from megabucket import DistributedDataParallel, DistributedOptimizer
from megabucket.errors import (
    CheckpointUnavailableError,
    ConfigError,
    PeerFailedError,
    PhaseError,
    UnusedParameterError,
)

MODES = in_ways("all_reduce", "reduce_scatter")


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(3))

    def forward(self, factor):
        return factor * (self.a.sum() + self.b.sum())


def sgd(params):
    return torch.optim.SGD(params, lr=1.0, momentum=0.5)


def on_ranks(size, program, make=sgd, **switches):
    """Call ``program(rank, ddp, optimizer)`` on each rank."""
    return run_wrapped(size, Two(), program, lambda ddp: DistributedOptimizer(make(ddp.parameters()), ddp), **switches)


def values(ddp):
    ddp.finish_param_sync()
    return [param.unique().tolist() for param in ddp.module.parameters()]


# Its step #


@MODES
@pytest.mark.parametrize("kernel", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_its_step_is_refused_and_changes_nothing(kind, kernel, switches):
    def program(_, ddp, optimizer):
        ddp(1.0).backward()
        before = values(ddp), optimizer.torch_optimizer.state
        with pytest.raises(PhaseError, match=rf"step\(\) of the {kind.__name__} inside a DistributedOptimizer was called"):
            optimizer.torch_optimizer.step()
        assert (values(ddp), optimizer.torch_optimizer.state) == before
        return optimizer.step().updated

    assert on_ranks(2, program, lambda params: kind(params, lr=0.5, **kernel), **switches) == [True, True]


def replaced(_):
    """Stands for a step of the user's own."""


@MODES
def test_a_step_that_was_replaced_before_is_refused(switches):
    def program(_, ddp, __):
        inner = sgd(ddp.parameters())
        inner.step = replaced
        with pytest.raises(ConfigError, match=r"step\(\) of this SGD was replaced by 'replaced'"):
            DistributedOptimizer(inner, ddp)

    run_wrapped(2, Two(), program, lambda _: None, **switches)


def test_a_step_that_is_replaced_on_one_rank_later_is_named_on_all_before_any_updates():
    def program(rank, ddp, optimizer):
        if rank == 1:
            optimizer.torch_optimizer.step = functools.partial(replaced, None)
        ddp(1.0).backward()
        with pytest.raises(ConfigError if rank == 1 else PeerFailedError, match=r"step\(\) of this SGD was replaced"):
            optimizer.step()
        return values(ddp)

    assert on_ranks(2, program, use_distributed_optimizer=True) == [[[1.0], [1.0]]] * 2


@MODES
@pytest.mark.parametrize("wraps_first", [False, True])
def test_a_scheduler_of_it_sets_the_rates_and_sees_the_steps(wraps_first, switches):
    """Warnings are errors here, so a scheduler that believes that no step was taken fails."""

    def program(_, ddp, __):
        inner = sgd(ddp.parameters())
        optimizer = DistributedOptimizer(inner, ddp) if wraps_first else None
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = optimizer or DistributedOptimizer(inner, ddp)
        for _ in range(2):
            ddp(1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return optimizer.param_groups[0]["lr"], values(ddp)

    # 1 - 1 * 1, then less 0.5 * (1 + 0.5)
    assert run_wrapped(2, Two(), program, lambda _: None, **switches) == [(0.25, [[-0.75], [-0.75]])] * 2


@MODES
def test_its_hooks_run_around_the_update_with_what_they_set(switches):
    def program(_, ddp, optimizer):
        inner, calls = optimizer.torch_optimizer, []

        def before(held, *_):
            calls.append(("before", held is inner, values(ddp)[1]))
            held.param_groups[0]["lr"] = 3.0

        inner.register_step_pre_hook(before)
        inner.register_step_post_hook(lambda held, *_: calls.append(("after", held is inner)))
        ddp(1.0).backward()
        optimizer.step()
        return calls, values(ddp)[1]

    assert on_ranks(2, program, **switches) == [([("before", True, [1.0]), ("after", True)], [-2.0])] * 2


# Its gradients #


@MODES
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize(
    "clear", [lambda inner, _, **how: inner.zero_grad(**how), lambda _, module, **how: module.zero_grad(**how)]
)
def test_clearing_gradients_before_the_step_is_an_error_or_what_torch_does(clear, set_to_none, switches):
    def program(_, ddp, optimizer):
        ddp(1.0).backward()
        if switches and not set_to_none:
            with pytest.raises(PhaseError, match="was called on the gradient of"):
                clear(optimizer.torch_optimizer, ddp.module, set_to_none=False)
            return optimizer.step().updated
        clear(optimizer.torch_optimizer, ddp.module, set_to_none=set_to_none)
        if not set_to_none:
            optimizer.step()
            return values(ddp) == [[1.0], [1.0]]  # a gradient of zeros
        with pytest.raises((PhaseError, UnusedParameterError), match=r"was cleared between|their \.grad was set to None"):
            optimizer.step()
        return values(ddp) == [[1.0], [1.0]]

    assert on_ranks(2, program, **switches) == [True, True]


@MODES
def test_clearing_them_after_the_step_is_as_with_torch_where_they_were_reduced(switches):
    def program(_, ddp, optimizer):
        for _ in range(2):
            ddp(1.0).backward()
            optimizer.step()
            (optimizer if switches else optimizer.torch_optimizer).zero_grad()
        return values(ddp)

    assert on_ranks(2, program, **switches) == [[[-1.5], [-1.5]]] * 2


@MODES
def test_clipping_through_its_groups_is_torchs_or_refused(switches):
    def program(_, ddp, optimizer):
        ddp(2.0).backward()
        params = optimizer.torch_optimizer.param_groups[0]["params"]
        if switches:
            with pytest.raises(PhaseError, match="was called on the gradient of"):
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            return optimizer.step().updated
        torch.nn.utils.clip_grad_value_(params, 0.5)
        optimizer.step()
        return values(ddp) == [[0.5], [0.5]]

    assert on_ranks(2, program, **switches) == [True, True]


# Its state #


@MODES
@pytest.mark.parametrize(
    "call",
    [
        lambda inner: inner.state_dict(),
        lambda inner: inner.load_state_dict({"state": {}, "param_groups": []}),
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_its_state_is_that_of_the_other_and_copies_without_it_are_refused(call, switches):
    def program(_, __, optimizer):
        with pytest.raises(CheckpointUnavailableError, match=r"of the SGD inside a DistributedOptimizer would find no state"):
            call(optimizer.torch_optimizer)

    on_ranks(1, program, **switches)


@MODES
def test_it_is_a_plain_optimizer_with_its_state_when_the_other_gives_it_back(switches):
    module = Two()
    inner = sgd(module.parameters())
    ddp = DistributedDataParallel(module, DistributedDataParallel(Two()).ddp_config.model_copy(update=switches))
    optimizer = DistributedOptimizer(inner, ddp)
    ddp(1.0).backward()
    optimizer.step()
    optimizer.zero_grad()

    optimizer.before_rebuild()
    ddp.detach()

    assert [inner.state[param]["momentum_buffer"].unique().tolist() for param in module.parameters()] == [[1.0], [1.0]]
    module(1.0).backward()
    inner.step()
    assert [param.unique().tolist() for param in module.parameters()] == [[-1.5], [-1.5]]
    assert copy.deepcopy(inner).state_dict()["state"].keys() == {0, 1}
