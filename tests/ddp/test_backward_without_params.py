"""``unused_parameters="zero"``: a rank whose loss reaches no parameter at all takes part in the step with zeros."""

import pytest
import torch
from loop_ranks import Ranks, optimizer_of
from torch.utils.checkpoint import checkpoint

from megabucket.errors import MicrobatchMismatchError

MODES = [(sharded, overlaps) for sharded in (False, True) for overlaps in (True, False)]


class Layer(torch.nn.Module):
    """May be skipped as a whole; then its output does not depend on its parameter."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(100))

    def forward(self, x, *, skips=False, reruns=False):
        if reruns:
            return checkpoint(self.forward, x, use_reentrant=True)
        return x.sum() if skips else (self.a * x).sum()


def inputs():
    return torch.ones(100, requires_grad=True)


def weight(ddp):
    ddp.finish_param_sync()
    return ddp.module.a[0].item()


@pytest.mark.parametrize("finish", ["auto", "explicit"])
@pytest.mark.parametrize("clears_in_wrapper", [True, False])
@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
def test_one_rank_may_skip_the_module(sharded, overlaps, clears_in_wrapper, finish):
    switches = {"use_distributed_optimizer": sharded, "overlap_grad_reduce": overlaps, "finish": finish}
    ranks = Ranks(2, Layer(), unused_parameters="zero", **switches)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        for step in range(3):
            ddp(inputs(), skips=rank == 1 and step == 1).backward()
            if finish == "explicit":
                ddp.finish_grad_sync()
            optimizer.step()
            ddp.zero_grad() if clears_in_wrapper else optimizer.zero_grad()
        return weight(ddp), ddp.last_error, ddp.sync.step

    # 1, then the mean of 1 and nothing, then 1.
    assert ranks.run(run) == [(-2.5, None, 3)] * 2
    assert ranks.schedule(0) == ranks.schedule(1)


@pytest.mark.parametrize("finish", ["auto", "explicit"])
def test_one_rank_may_skip_it_where_gradients_are_zeroed_in_place(finish):
    ranks = Ranks(2, Layer(), unused_parameters="zero", finish=finish)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        for step in range(3):
            ddp(inputs(), skips=rank == 1 and step == 1).backward()
            if finish == "explicit":
                ddp.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return weight(ddp), ddp.last_error

    # Its step begins on the zeros as well, although no gradient of it arrives.
    assert ranks.run(run) == [(-2.5, None)] * 2


@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
@pytest.mark.parametrize("skipped", [0, 1], ids=["first", "last"])
def test_one_rank_may_skip_it_in_one_microbatch(skipped, sharded, overlaps):
    ranks = Ranks(2, Layer(), unused_parameters="zero", use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        for _ in range(2):
            with ddp.no_sync():
                ddp(inputs(), skips=rank == 1 and skipped == 0).backward()
            ddp(inputs(), skips=rank == 1 and skipped == 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight(ddp), ddp.last_error

    # The mean of 2 and 1, twice.
    assert ranks.run(run) == [(-3.0, None)] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_may_skip_it(sharded):
    ranks = Ranks(2, Layer(), unused_parameters="zero", use_distributed_optimizer=sharded)

    def run(_, ddp):
        optimizer = optimizer_of(ddp)
        ddp(inputs(), skips=True).backward()
        optimizer.step()
        return weight(ddp), ddp.last_error, ddp.sync.step

    assert ranks.run(run) == [(0.0, None, 1)] * 2


def test_it_counts_as_a_microbatch():
    ranks = Ranks(2, Layer(), unused_parameters="zero", skipped_forwards="allow")

    def run(rank, ddp):
        if rank == 1:
            with ddp.no_sync():
                ddp(inputs(), skips=True).backward()
        with pytest.raises(MicrobatchMismatchError) as caught:
            ddp(inputs()).backward()
        return caught.value.by_rank

    assert ranks.run(run) == [(1, 2)] * 2


def ask(ddp, x, of):
    """Look at gradients by hand, where no parameter's is accumulated."""
    if of == "parameter in a checkpoint":  # whose backward would be another one, so autograd does not see the parameter
        torch.autograd.grad(ddp(x, reruns=True), ddp.module.a, allow_unused=True)
    elif of == "input of what uses no parameter":
        torch.autograd.grad(ddp(x, skips=True), x)
    elif of == "input, by backward":
        ddp(x).backward(inputs=[x])
    elif of == "output":
        output = ddp(x)
        torch.autograd.grad(output, output)
    else:
        torch.autograd.grad(ddp(x), {"input": x, "parameter": ddp.module.a}[of])


@pytest.mark.pairs
@pytest.mark.parametrize(
    "of",
    ["input", "parameter", "output", "parameter in a checkpoint", "input of what uses no parameter", "input, by backward"],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
def test_gradients_that_are_asked_for_by_hand_change_nothing(sharded, overlaps, when, of):
    """On all ranks alike: on one rank only, it would be a microbatch without gradients where those are zeros."""
    ranks = Ranks(2, Layer(), unused_parameters="zero", use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps)

    def run(_, ddp):
        optimizer = optimizer_of(ddp)
        for _ in range(2):
            if when == "before":
                ask(ddp, inputs(), of)
            ddp(inputs()).backward()
            optimizer.step()
            if when == "after":
                ask(ddp, inputs(), of)
            optimizer.zero_grad()
        return weight(ddp), ddp.last_error

    assert ranks.run(run) == [(-2.0, None)] * 2
