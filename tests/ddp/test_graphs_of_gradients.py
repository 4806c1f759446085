"""Under ``no_sync`` a gradient of ``backward(create_graph=True)`` keeps its graph: a penalty on it trains as in plain torch.

Each rank's program also runs on a plain module; the expected gradient is the mean of the plain ones over the ranks.
"""

import copy
import operator
import warnings
from functools import reduce

import pytest
import torch
from loop_ranks import Ranks

from megabucket import DistributedOptimizer

WAYS = {
    "all-reduce": {},
    "all-reduce, explicit": {"finish": "explicit"},
    "no overlap": {"overlap_grad_reduce": False},
    "reduce-scatter": {"use_distributed_optimizer": True},
    "overlapped gather": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
SIZE = 2


class Net(torch.nn.Module):
    """Small tensors, which are staged, and one that is too large for it; a bias, whose gradient may have no graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.large, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 10_000), torch.nn.Linear(10_000, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.large(torch.tanh(self.first(x)))))


def inputs(rank, microbatch, dtype=torch.float32):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + microbatch)).to(dtype)


class Loop:
    """One rank's model, wrapped or plain."""

    def __init__(self, rank, model):
        self.rank, self.model = rank, model
        self.dtype = next(model.parameters()).dtype
        self.no_sync = getattr(model, "no_sync", warnings.catch_warnings)  # a context that changes nothing

    def loss(self, microbatch):
        return self.model(inputs(self.rank, microbatch, self.dtype)).square().mean()

    def backward(self, microbatch, *, create_graph=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about reference cycles
            self.loss(microbatch).backward(create_graph=create_graph)

    def penalty(self):
        return reduce(operator.add, (param.grad.square().sum() for param in self.model.parameters()))


def penalty_last(loop):
    with loop.no_sync():
        loop.backward(0, create_graph=True)
    loop.penalty().backward()


def after_a_plain_microbatch(loop):
    with loop.no_sync():
        loop.backward(0)
        loop.backward(1, create_graph=True)
    loop.penalty().backward()


def penalty_on_a_sum_then_a_plain_microbatch(loop):
    with loop.no_sync():
        loop.backward(0, create_graph=True)
        loop.backward(1, create_graph=True)
        loop.penalty().backward()
    loop.backward(2)


def with_the_norm_of_all_gradients(loop):
    with loop.no_sync():
        loop.backward(0, create_graph=True)
    grads = [param.grad for param in loop.model.parameters()]
    (reduce(operator.mul, [grad.sum() for grad in grads[::-1]]) + torch.nn.utils.get_total_norm(grads)).backward()


def graph_left_unused(loop):
    with loop.no_sync():
        loop.backward(0, create_graph=True)
    loop.backward(1)


def on_a_part_of_the_model(loop):
    with loop.no_sync():
        loop.backward(0, create_graph=True)
        kept = [param.grad for param in loop.model.parameters()]
    (kept[0].square().sum() + kept[-1].square().sum()).backward()


def cleared_between(loop):
    with loop.no_sync():
        loop.backward(0, create_graph=True)
        loop.model.zero_grad()
        loop.backward(1, create_graph=True)
    loop.penalty().backward()


PROGRAMS = {
    program.__name__: program
    for program in (
        penalty_last,
        after_a_plain_microbatch,
        penalty_on_a_sum_then_a_plain_microbatch,
        with_the_norm_of_all_gradients,
        graph_left_unused,
        on_a_part_of_the_model,
        cleared_between,
    )
}


def plain_grads(program, model):
    """The mean over the ranks."""
    models = [copy.deepcopy(model) for _ in range(SIZE)]
    for rank, one in enumerate(models):
        program(Loop(rank, one))
    by_param = zip(*([param.grad.detach() for param in one.parameters()] for one in models), strict=True)
    return [sum(grads) / SIZE for grads in by_param]


def reduced(ddp):
    ddp.finish_grad_sync(force_all_reduce=True)
    return [param.main_grad.clone() for param in ddp.module.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_equal_those_of_plain_torch(program, way):
    ranks = Ranks(SIZE, Net(), bucket_size=20_000, **WAYS[way])

    def play(rank, ddp):
        found = []
        for _ in range(2):  # the second time over what the first step has left in the buffers
            PROGRAMS[program](Loop(rank, ddp))
            found.append(reduced(ddp))
            ddp.zero_grad()
        return found

    expected = plain_grads(PROGRAMS[program], Net())
    for found in ranks.run(play):
        torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("zeroed", [False, True], ids=["fresh buffers", "zeroed buffers"])
@pytest.mark.parametrize("patterns", [(), ("*",)], ids=["in the buffer", "in float32 memory of its own"])
def test_16_bit_gradients_equal_those_of_plain_torch(patterns, zeroed):
    model = Net().to(torch.bfloat16)
    switches = {"grad_reduce_in_fp32": not patterns, "param_name_patterns_for_fp32_local_accumulation": patterns}
    ranks = Ranks(SIZE, model, use_distributed_optimizer=True, **switches)

    def play(rank, ddp):
        if zeroed:
            ddp.zero_grad_buffer()
        penalty_last(Loop(rank, ddp))
        return reduced(ddp)

    expected = [grad.float() for grad in plain_grads(penalty_last, model)]
    for found in ranks.run(play):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-4)


def test_the_gradient_is_in_param_grad_with_its_graph_until_the_next_backward_that_is_reduced():
    ranks = Ranks(SIZE, Net())

    def play(rank, ddp):
        loop = Loop(rank, ddp)
        with ddp.no_sync():
            loop.backward(0, create_graph=True)
        return all(param.grad.requires_grad for param in ddp.module.parameters())

    assert ranks.run(play) == [True] * SIZE


@pytest.mark.parametrize("program", [penalty_last, after_a_plain_microbatch])
def test_weights_after_steps_with_a_penalty_are_those_of_training_on_the_mean(program):
    ranks = Ranks(SIZE, Net(), use_distributed_optimizer=True, bucket_size=20_000)
    alone = Net()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    def play(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), ddp)
        for _ in range(3):
            program(Loop(rank, ddp))
            optimizer.step()
            optimizer.zero_grad()
        return list(ddp.module.parameters())

    for _ in range(3):
        for param, grad in zip(alone.parameters(), plain_grads(program, alone), strict=True):
            param.grad = grad
        sgd.step()

    for weights in ranks.run(play):
        torch.testing.assert_close(weights, list(alone.parameters()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_kept", [False, True], ids=["set by hand", "with a graph"])
def test_a_factor_reaches_gradients_that_are_in_param_grad_only(is_kept):
    ranks = Ranks(SIZE, Net())

    def play(rank, ddp):
        loop = Loop(rank, ddp)
        with ddp.no_sync():
            loop.backward(0, create_graph=is_kept)
        if not is_kept:
            for param in ddp.module.parameters():
                param.grad = param.grad.clone()
        ddp.scale_gradients(0.25)
        loop.backward(1)
        return reduced(ddp)

    def plain(loop):
        loop.backward(0)
        for param in loop.model.parameters():
            param.grad *= 0.25
        loop.backward(1)

    expected = plain_grads(plain, Net())
    for found in ranks.run(play):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_gradient_of_an_embedding_is_kept_and_added_to(is_sparse):
    model = torch.nn.EmbeddingBag(6, 3, sparse=is_sparse, mode="sum")

    def program(loop, wrapped):
        tokens = torch.tensor([[loop.rank, 1, 2]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with loop.no_sync():
                wrapped(tokens).square().sum().backward(create_graph=True)
            wrapped(tokens + 1).square().sum().backward()

    ranks = Ranks(SIZE, model)
    found = ranks.run(lambda rank, ddp: (program(Loop(rank, ddp), ddp), reduced(ddp))[1])

    models = [copy.deepcopy(model) for _ in range(SIZE)]
    for rank, one in enumerate(models):
        program(Loop(rank, one), one)
    expected = [sum(one.weight.grad.detach().to_dense() for one in models) / SIZE]
    for grads in found:
        torch.testing.assert_close(grads, expected, rtol=1e-6, atol=0)
