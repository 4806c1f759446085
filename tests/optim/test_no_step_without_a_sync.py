"""No optimizer steps on gradients, shards or rates that would let replicas drift apart, whatever has brought them there."""

import copy
import math
import random

import pytest
import torch
from optim_ranks import Net

import megabucket as mb
from megabucket.errors import ConfigError, MegabucketError, PeerFailedError, PhaseError, UnreducedGradientsError
from megabucket.testing import LoopbackWorld

pytestmark = pytest.mark.long_file

SIZE = 2
FAULTY = 1
KINDS = pytest.mark.parametrize("kind", ["plain", "all_reduce", "reduce_scatter"])


def loss(model, rank):
    return model(torch.full((3, 4), rank + 1.0)).square().sum()


class Rank:
    """One rank's wrapper and optimizer: a plain one over all-reduced gradients, or a distributed one in either mode."""

    def __init__(self, communicator, *, kind="reduce_scatter", **switches):
        config = mb.DistributedDataParallelConfig(
            bucket_size=20, use_distributed_optimizer=kind == "reduce_scatter", **switches
        )
        self.rank, self.module = communicator.rank, Net()
        self.ddp = mb.DistributedDataParallel(self.module, config, communicator=communicator)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        if kind != "plain":
            self.optimizer = mb.DistributedOptimizer(self.optimizer, self.ddp)

    def train(self, change=lambda _: None):
        """One step; ``change(self)`` comes between backward and the optimizer."""
        loss(self.ddp, self.rank).backward()
        if self.ddp.policy.is_explicit:
            self.ddp.finish_grad_sync()
        change(self)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def give_up(self):
        """Go on after an error, as a caller who catches it does."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1
        self.optimizer.zero_grad()

    def weights(self):
        self.ddp.finish_param_sync()
        return torch.cat([param.detach().flatten() for param in self.module.parameters()])


def run_ranks(program, **fields):
    """Call ``program(one)`` on each rank, after a step in which the wrapper has learned how many gradients there are."""
    world = LoopbackWorld(SIZE, timeout_s=20)
    return world.run(lambda rank: program(Rank(world.communicator(rank), **fields).train()))


def weights_after(num_steps, kind):
    return run_ranks(lambda one: [one.weights() for _ in range(num_steps - 1) if one.train()][-1], kind=kind)[0]


# Gradients that no sync has left #


def by_autograd_grad(one):
    params = list(one.module.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss(one.ddp, one.rank), params), strict=True):
        param.grad = grad


def by_func_grad(one):
    params = dict(one.module.named_parameters())

    def of(values):
        return torch.func.functional_call(one.module, values, (torch.full((3, 4), one.rank + 1.0),)).square().sum()

    for name, grad in torch.func.grad(of)({name: param.detach() for name, param in params.items()}).items():
        params[name].grad = grad


def by_hand(one):
    for param in one.module.parameters():
        param.grad = torch.full_like(param, one.rank + 1.0)


def from_a_copy(one):
    other = copy.deepcopy(one.module)
    loss(other, one.rank).backward()
    for param, of_copy in zip(one.module.parameters(), other.parameters(), strict=True):
        param.grad = of_copy.grad


def by_a_backward_whose_hooks_were_cleared(one):
    hooks = [(param._post_accumulate_grad_hooks, dict(param._post_accumulate_grad_hooks)) for param in one.module.parameters()]
    for of_param, _ in hooks:
        of_param.clear()
    loss(one.ddp, one.rank).backward()
    for of_param, held in hooks:
        of_param.update(held)


LOCAL = [by_autograd_grad, by_func_grad, by_hand, from_a_copy, by_a_backward_whose_hooks_were_cleared]


@KINDS
@pytest.mark.parametrize("bring", LOCAL)
def test_gradients_that_no_backward_of_ours_has_brought_update_nothing_and_the_next_step_is_right(bring, kind):
    def program(one):
        before = one.weights()
        bring(one)
        with pytest.raises(UnreducedGradientsError):
            one.optimizer.step()
        assert torch.equal(one.weights(), before)
        one.give_up()
        return one.train().weights()

    for found in run_ranks(program, kind=kind):
        assert torch.equal(found, weights_after(2, kind))


@KINDS
def test_one_gradient_of_one_rank_is_enough(kind):
    """With a distributed optimizer it is a step, and the others hear of it; a plain one is between two steps of theirs."""

    def program(one):
        before = one.weights()
        if one.rank == FAULTY:
            one.module.last.bias.grad = torch.ones(2)
            with pytest.raises(UnreducedGradientsError):
                one.optimizer.step()
        elif kind != "plain":
            with pytest.raises(PeerFailedError, match=r"rank 1 failed in optimizer\.step\(\): UnreducedGradientsError"):
                one.train()
        assert torch.equal(one.weights(), before)
        one.give_up()
        return one.train().weights()

    for found in run_ranks(program, kind=kind):
        assert torch.equal(found, weights_after(2, kind))


@KINDS
def test_gradients_put_in_the_place_of_those_that_were_stepped_on_are_refused(kind):
    def program(one):
        loss(one.ddp, one.rank).backward()
        one.optimizer.step()
        after = one.weights()
        by_autograd_grad(one)
        with pytest.raises((UnreducedGradientsError, PhaseError)):
            one.optimizer.step()
        assert torch.equal(one.weights(), after)
        one.give_up()
        return after

    for found in run_ranks(program, kind=kind):
        assert torch.equal(found, weights_after(2, kind))


# Parameters that are not those of the buffers any more #


def swapped_by_a_load(one):
    one.module.load_state_dict(copy.deepcopy(one.module.state_dict()))


def converted(one):
    one.module.double().float()


def replaced_by_hand(one):
    for linear in (one.module.first, one.module.last):
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        linear.bias = torch.nn.Parameter(linear.bias.detach().clone())


def moved(one):
    for param in one.module.parameters():
        param.data = param.data.clone()


REPLACEMENTS = {
    "swapped by a load": ("set_swap_module_params_on_conversion", swapped_by_a_load),
    "swapped by a conversion": ("set_swap_module_params_on_conversion", converted),
    "overwritten by a conversion": ("set_overwrite_module_params_on_conversion", converted),
    "replaced by hand": (None, replaced_by_hand),
    "moved": (None, moved),
}


@pytest.fixture
def future():
    """Switches of torch that change what becomes of the parameters of a module."""
    yield lambda name: name is not None and getattr(torch.__future__, name)(True)
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@KINDS
@pytest.mark.parametrize("rebuilds_optimizer", [False, True], ids=["old optimizer", "new optimizer"])
@pytest.mark.parametrize(("switch", "replace"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_parameters_that_were_replaced_are_never_trained_by_each_rank_on_its_own(
    switch, replace, rebuilds_optimizer, kind, future
):
    def program(one):
        one.ddp.finish_param_sync()
        replace(one)
        before = one.weights()
        optimizer = torch.optim.SGD(one.ddp.parameters(), lr=0.1) if rebuilds_optimizer else one.optimizer
        one.optimizer = optimizer
        with pytest.raises(MegabucketError) as caught:
            one.train()
        assert torch.equal(one.weights(), before)
        return type(caught.value)

    world = LoopbackWorld(SIZE, timeout_s=20)
    ranks = world.run(lambda rank: Rank(world.communicator(rank), kind=kind).train())
    future(switch)  # of the process, so for all ranks at once

    found = world.run(lambda rank: program(ranks[rank]))

    assert found[0] is found[1]


@KINDS
def test_a_module_put_in_the_place_of_the_wrapped_one_is_refused_by_name(kind):
    def program(one):
        one.ddp.module = Net()
        for use in (lambda: one.ddp(torch.ones(1, 4)), lambda: list(one.ddp.parameters())):
            with pytest.raises(PhaseError, match=r"ddp\.module was replaced"):
                use()
        loss(one.ddp.module, one.rank).backward()  # nobody can see it
        before = one.weights()
        if kind != "plain":
            with pytest.raises(UnreducedGradientsError):
                one.optimizer.step()
        assert torch.equal(one.weights(), before)

    run_ranks(program, kind=kind)


# Gradients that are assigned over withheld ones #


def assign(one, *, only=None):
    for name, param in one.module.named_parameters():
        if only in (None, name):
            param.grad = torch.full_like(param, one.rank + 1.0)


SENT = "was replaced after it was sent, to no effect: gradients are reduce-scattered while backward runs"


@pytest.mark.parametrize("finish", ["auto", "explicit"])
def test_a_gradient_assigned_over_one_that_was_sent_is_an_error_on_all_ranks(finish):
    def program(one):
        before = one.weights()
        with pytest.raises(PhaseError, match=f"the gradient of 'last.bias' {SENT}"):
            one.train(assign)
        one.give_up()
        assert torch.equal(one.weights(), before)
        return one.train().weights()

    for found in run_ranks(program, finish=finish):
        assert torch.equal(found, weights_after(2, "reduce_scatter"))


def test_one_that_one_rank_assigns_is_told_to_the_others():
    def program(one):
        before = one.weights()
        own = PhaseError if one.rank == FAULTY else PeerFailedError
        with pytest.raises(own, match=f"the gradient of 'first.weight' {SENT}"):
            one.train(lambda one: assign(one, only="first.weight") if one.rank == FAULTY else None)
        one.give_up()
        assert torch.equal(one.weights(), before)
        return one.train().weights()

    for found in run_ranks(program):
        assert torch.equal(found, weights_after(2, "reduce_scatter"))


def test_where_gradients_are_sent_by_the_step_an_assigned_one_is_honoured():
    def program(one):
        before = one.weights()
        one.train(assign)
        return before - one.weights()

    for moved_by in run_ranks(program, overlap_grad_reduce=False):
        torch.testing.assert_close(moved_by, torch.full_like(moved_by, 0.1 * 1.5))  # the mean of 1 and 2, times the rate


# Parameters that left the groups #


def clear_group(optimizer):
    optimizer.torch_optimizer.param_groups[0]["params"].clear()


def drop_groups(optimizer):
    optimizer.param_groups.clear()


def take_one_out(optimizer):
    optimizer.param_groups[0]["params"].pop()


def replace_one(optimizer):
    params = optimizer.param_groups[0]["params"]
    params[0] = torch.nn.Parameter(params[0].detach().clone())


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("take_out", [clear_group, drop_groups, take_one_out, replace_one])
def test_a_parameter_that_left_its_group_is_an_error(take_out, kind):
    def program(one):
        groups, params = list(one.optimizer.param_groups), list(one.optimizer.param_groups[0]["params"])
        before = one.weights()
        with pytest.raises(
            PhaseError, match=r"have left their parameter group|were added to the optimizer and have no shard yet"
        ):
            one.train(lambda one: take_out(one.optimizer))
        assert torch.equal(one.weights(), before)
        one.optimizer.param_groups[:] = groups
        one.optimizer.param_groups[0]["params"][:] = params
        one.give_up()
        return one.train().weights()

    for found in run_ranks(program, kind=kind):
        assert torch.equal(found, weights_after(2, kind))


def test_one_that_left_on_one_rank_is_told_to_the_others_before_they_update():
    def program(one):
        before = one.weights()
        own = PhaseError if one.rank == FAULTY else PeerFailedError
        with pytest.raises(own, match="have left their parameter group"):
            one.train(lambda one: take_one_out(one.optimizer) if one.rank == FAULTY else None)
        assert torch.equal(one.weights(), before)

    run_ranks(program)


def test_shards_may_change_places_in_their_group():
    def program(one):
        random.Random(one.rank).shuffle(one.optimizer.param_groups[0]["params"])
        return one.train().weights()

    for found in run_ranks(program):
        assert torch.equal(found, weights_after(2, "reduce_scatter"))


# Learning rates #


RATES = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "tensor": torch.tensor(math.nan),
}
NO_RATE = "the learning rate of parameter group 0 is -?(nan|inf): every weight of the group would be nan or infinite"


@KINDS
@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_a_learning_rate_that_is_not_finite_is_an_error(rate, kind):
    def program(one):
        before = one.weights()
        with pytest.raises(ConfigError, match=NO_RATE):
            one.train(lambda one: one.optimizer.param_groups[0].update(lr=rate))
        assert torch.equal(one.weights(), before)
        one.give_up()
        return one.train().weights()

    for found in run_ranks(program, kind=kind):
        assert torch.equal(found, weights_after(2, kind))


@KINDS
def test_one_of_one_rank_is_told_to_the_others_with_its_cause(kind):
    def change(one):
        if one.rank == FAULTY:
            one.optimizer.param_groups[0]["lr"] = math.inf

    def text_of(one, change=lambda _: None):
        try:
            one.train(change)
        except MegabucketError as error:
            one.give_up()
            return str(error)
        return ""

    def program(one):
        return [text for text in (text_of(one, change), text_of(one)) if text]

    others, own = run_ranks(program, kind=kind)
    assert own[0].startswith("the learning rate of parameter group 0 is inf")
    # With reduce-scatter nobody updates; otherwise the others have, and the fence of the next step says what has kept rank 1.
    assert len(others) == 1
    assert ("rank 1" in others[0], "the learning rate of parameter group 0 is inf" in others[0]) == (True, True)
    assert own[1:] == ([] if kind == "reduce_scatter" else others)
