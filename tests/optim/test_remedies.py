"""Causes other than the usual one, and what their errors say to do; where that is a way to train, it trains as torch does."""

import copy

import pytest
import torch

import megabucket as mb
from megabucket.errors import (
    AlreadyWrappedError,
    ConcurrentBackwardError,
    ConfigError,
    OptimizerParametersError,
    PhaseError,
    ReplicasDivergedError,
    UnreducedGradientsError,
)
from megabucket.testing import LoopbackWorld

MODES = {"all_reduce": {}, "reduce_scatter": {"use_distributed_optimizer": True}}
in_both_modes = pytest.mark.parametrize("switches", MODES.values(), ids=MODES)


def wrap(model, **switches):
    return mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(**switches))


def sgd(ddp):
    return mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)


def backward(ddp):
    ddp(torch.ones(2, 4)).square().sum().backward()


@in_both_modes
def test_clearing_before_the_step_is_named(switches):
    ddp = wrap(torch.nn.Linear(4, 2), **switches)
    optimizer = sgd(ddp)
    backward(ddp)
    optimizer.zero_grad()

    with pytest.raises(UnreducedGradientsError, match=r"clear gradients after step\(\), not before"):
        optimizer.step()


@in_both_modes
def test_steps_on_gradients_of_one_rank_are_sent_to_a_module_without_a_wrapper(switches):
    ddp = wrap(torch.nn.Linear(4, 2), **switches)
    optimizer = sgd(ddp)

    with ddp.no_sync():
        backward(ddp)
        with pytest.raises(UnreducedGradientsError, match=r"local SGD.*without a wrapper"):
            optimizer.step()


def test_a_step_after_one_that_the_scaler_has_skipped_is_sent_to_the_scaler():
    ddp = wrap(torch.nn.Linear(4, 2), nonfinite_gradients="allow", use_distributed_optimizer=True)
    optimizer, scaler = sgd(ddp), mb.ConstantGradScaler(2.0)
    (ddp(torch.ones(2, 4)).sum() * float("inf")).backward()
    assert not scaler.step(optimizer).updated

    with pytest.raises(PhaseError, match=r"a loss scaler has skipped .* with a scaler call its step\(\)"):
        optimizer.step()


@in_both_modes
@pytest.mark.parametrize("kind", [torch.optim.LBFGS])
def test_an_optimizer_with_closures_is_sent_to_a_wrapper_with_nothing_around_it_where_it_trains(kind, switches):
    initial = torch.nn.Linear(4, 2)
    ddp = wrap(copy.deepcopy(initial), **switches)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} without a DistributedOptimizer around it, under Dist.*adapters"):
        mb.DistributedOptimizer(kind(ddp.parameters()), ddp)

    plain, ddp = copy.deepcopy(initial), wrap(copy.deepcopy(initial), use_distributed_optimizer=False)
    for module in (plain, ddp):
        optimizer = kind(module.parameters())
        for _ in range(2):

            def closure(module=module, optimizer=optimizer):
                optimizer.zero_grad()
                loss = module(torch.ones(2, 4)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)

    assert torch.equal(ddp.module.weight, plain.weight)
    assert not torch.equal(plain.weight, initial.weight)


def test_clearing_in_between_is_told_from_leaving_a_parameter_out():
    ddp = wrap(torch.nn.Linear(4, 2))
    optimizer = sgd(ddp)
    backward(ddp)
    ddp.module.zero_grad()

    with pytest.raises(PhaseError, match=r"To leave one out, zero .* To clear all, call zero_grad\(\) after step\(\)"):
        optimizer.step()


def test_a_backward_inside_another_one_is_not_sent_to_a_lock_alone():
    ddp = wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    second = ddp(torch.ones(2, 4)).sum()
    ddp.module[0].register_forward_hook(lambda *args: args[-1].register_hook(lambda _: second.backward()) and None)
    first = ddp(torch.ones(2, 4))

    with pytest.raises(ConcurrentBackwardError, match=r"one that begins inside another \(in a hook\) after it"):
        first.sum().backward()


def test_a_main_grad_of_another_library_is_named_as_a_cause():
    model = torch.nn.Linear(4, 2)
    model.weight.main_grad = torch.zeros(2, 4)

    with pytest.raises(AlreadyWrappedError, match=r"main_grad.*if it is Megatron-Core's, build the model anew without it"):
        wrap(model)


@in_both_modes
def test_parameters_of_a_second_optimizer_are_to_become_groups_of_the_first(switches):
    ddp = wrap(torch.nn.Linear(4, 2), **switches)
    torch.optim.SGD([ddp.module.bias], lr=0.1)

    with pytest.raises(OptimizerParametersError, match="also those of another optimizer"):
        mb.DistributedOptimizer(torch.optim.SGD([ddp.module.weight], lr=0.1), ddp)


@in_both_modes
def test_an_optimizer_that_a_framework_has_made_plain_again_says_so(switches):
    ddp = wrap(torch.nn.Linear(4, 2), **switches)
    optimizer = sgd(ddp)
    optimizer.before_rebuild()
    backward(ddp)

    with pytest.raises(PhaseError, match=r"If there is none, before_rebuild\(\) has put whole parameters back"):
        optimizer.step()


def test_weights_that_differ_are_sent_to_all_three_causes():
    world = LoopbackWorld(2, timeout_s=20)

    def play(rank):
        ddp = mb.DistributedDataParallel(torch.nn.Linear(4, 2), communicator=world.communicator(rank))
        with torch.no_grad():
            ddp.module.weight[0, 0] += rank
        with pytest.raises(ReplicasDivergedError, match=r"exception caught.* written in place or loaded.* computes wrong"):
            ddp.check_replicas()

    world.run(play)


@pytest.mark.parametrize(
    "switches", [*MODES.values(), {**MODES["reduce_scatter"], "overlap_param_gather": True}], ids=[*MODES, "overlap"]
)
def test_a_gan_trains_as_in_torch_with_a_wrapper_and_an_optimizer_for_each_part(switches):
    torch.manual_seed(0)
    initial = [torch.nn.Linear(4, 6), torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))]

    def train(generator, critic, of_generator, of_critic):
        for step in range(4):
            noise, real = torch.full((3, 4), 0.1 * step + 0.5), torch.ones(3, 6)
            (critic(generator(noise).detach()).square().mean() + (critic(real) - 1).square().mean()).backward()
            of_critic.step()
            of_critic.zero_grad()
            (critic(generator(noise)) - 1).square().mean().backward()
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()  # what the loss of the generator has left there

    plain = copy.deepcopy(initial)
    train(*plain, *(torch.optim.Adam(part.parameters(), lr=0.01) for part in plain))
    world = LoopbackWorld(2, timeout_s=20)

    def play(rank):
        config = mb.DistributedDataParallelConfig(**switches)
        parts = [
            mb.DistributedDataParallel(copy.deepcopy(part), config, communicator=world.communicator(rank)) for part in initial
        ]
        optimizers = [mb.DistributedOptimizer(torch.optim.Adam(part.parameters(), lr=0.01), part) for part in parts]
        train(*parts, *optimizers)
        return [param.detach().clone() for part in parts for param in part.parameters()]

    expected = [param for part in plain for param in part.parameters()]
    for found in world.run(play):
        assert all(map(torch.equal, found, expected))
