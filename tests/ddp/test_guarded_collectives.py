"""No collective of a step runs without a fence or a gate before it: a rank that goes another way is named, nothing is mixed.

A grid of two tensor-parallel and two data-parallel ranks, whose norm covers all four: also where gradients are all-reduced, an
update needs a collective.
"""

import math

import pytest
import torch
from grids import Grid, cut

from megabucket import ChainedOptimizer, DistributedOptimizer, finalize_grads
from megabucket.errors import CallMismatchError, ConfigError, MegabucketError, PeerFailedError, PhaseError

MODES = [pytest.param(False, id="all-reduce"), pytest.param(True, id="reduce-scatter")]
FAULTY, NUM_STEPS, FAULTY_STEP = 1, 4, 1


class Net(torch.nn.Module):
    """A row that is cut over the tensor-parallel ranks, and a bias that they hold copies of."""

    def __init__(self):
        super().__init__()
        self.row, self.bias = cut(torch.nn.Parameter(torch.ones(8, 8)), 1), torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (self.row.sum() + self.bias.sum()) * x


def grads_of(module):
    """A backward of the whole module, without a call of it: all gradients are 1."""
    module(1.0).backward()


def wrap(grid, rank, **config):
    return grid.wrap(rank, Net(), config=config, reduction=["dense"], copies=["tp"])


def no_step_here():
    raise ValueError("no step here")


def leaves_by_zero_grad(optimizer):
    optimizer.zero_grad()


def leaves_by_an_exception(optimizer):
    try:
        optimizer.step(closure=no_step_here)
    except ValueError:
        optimizer.zero_grad()


def leaves_by_clearing_in_plain_torch(optimizer):
    for param in optimizer.ddp.module.parameters():
        param.grad = None


def leaves_by_abort(optimizer):
    optimizer.ddp.abort_step("unusable")
    optimizer.zero_grad()


@pytest.mark.parametrize("finish", ["auto", "explicit"])
@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize("leave", [leaves_by_zero_grad, leaves_by_an_exception, leaves_by_abort])
def test_a_rank_that_does_not_step_meets_nobody_in_the_norm_and_the_next_step_is_right(leave, is_sharded, finish):
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank, use_distributed_optimizer=is_sharded, finish=finish)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp, clip_grad=1e6)
        seen = []
        for step in range(NUM_STEPS):
            ddp(1.0).backward()
            if finish == "explicit":
                ddp.finish_grad_sync()
            try:
                if (rank, step) == (FAULTY, FAULTY_STEP):
                    leave(optimizer)
                else:
                    assert optimizer.step().updated
                    seen.append("updated")
            except MegabucketError as error:
                seen.append(type(error).__name__)
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return seen, ddp.module.row.unique().tolist(), str(ddp.last_error)

    results = grid.run(program)

    assert len({text for *_, text in results}) == 1
    for rank, (seen, weights, _) in enumerate(results):
        assert weights == [1.0 - (NUM_STEPS - 1)]  # one step was dropped on all ranks
        assert seen.count("updated") == NUM_STEPS - 1
        assert len(seen) == NUM_STEPS or rank == FAULTY


@pytest.mark.parametrize("is_sharded", MODES)
def test_a_step_is_dropped_on_no_rank_where_all_leave_it(is_sharded):
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank, use_distributed_optimizer=is_sharded)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        for step in range(NUM_STEPS):
            ddp(1.0).backward()
            if step != FAULTY_STEP:
                optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return ddp.module.row.unique().tolist(), ddp.last_error

    assert grid.run(program) == [([1.0 - (NUM_STEPS - 1)], None)] * 4


@pytest.mark.parametrize("is_sharded", MODES)
def test_gradients_kept_after_an_update_accumulate_as_without_a_norm_over_ranks(is_sharded):
    """Plain torch: a second backward adds to gradients that were not cleared. Shards refuse that, on all ranks."""
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank, use_distributed_optimizer=is_sharded)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        try:
            for _ in range(2):
                ddp(1.0).backward()
                optimizer.step()
        except MegabucketError as error:
            return type(error).__name__
        return ddp.module.row.unique().tolist()

    assert grid.run(program) == ["LateGradientError" if is_sharded else [1.0 - 1.0 - 2.0]] * 4


CHANGES = {
    "clip": lambda optimizer: optimizer.clip_grad_norm_(1e6),
    "unscale": lambda optimizer: optimizer.unscale_grads(1.0),
    "finalize": lambda optimizer: finalize_grads(optimizer.ddp),
    "zeros": lambda _: None,
}


@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize("what", CHANGES)
def test_a_rank_without_a_collective_of_the_others_is_named_before_it(what, is_sharded):
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank, use_distributed_optimizer=is_sharded, nonfinite_gradients="allow")
        counts = what == "zeros"
        inner = torch.optim.SGD(ddp.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, ddp, returns_num_zeros=counts, returns_grad_norm=not counts)
        seen = []
        for step in range(NUM_STEPS):
            ddp(1.0).backward()
            try:
                if (rank, step) != (FAULTY, FAULTY_STEP):
                    CHANGES[what](optimizer)
                if (rank, step) != (FAULTY, FAULTY_STEP) or not counts:
                    optimizer.step()
                    seen.append(None)
                optimizer.zero_grad()
            except MegabucketError as error:
                seen.append(type(error))
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return seen, ddp.module.row.unique().tolist(), str(ddp.last_error)

    results = grid.run(program)

    assert len({text for *_, text in results}) == 1
    for seen, weights, _ in results:
        assert [kind is None for kind in seen] == [step != FAULTY_STEP for step in range(NUM_STEPS)]
        assert weights == [1.0 - (NUM_STEPS - 1)]
    if what == "finalize" and not is_sharded:  # with shards the fence is in finalize_grads() or in step()
        assert {seen[FAULTY_STEP] for seen, *_ in results} == {CallMismatchError}


@pytest.mark.parametrize("is_sharded", MODES)
def test_a_chain_that_one_rank_does_not_step_is_named_before_the_common_norm(is_sharded):
    grid = Grid(2, 2)

    def program(rank):
        ddps = [wrap(grid, rank, use_distributed_optimizer=is_sharded) for _ in range(2)]
        chain = ChainedOptimizer(
            [DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp) for ddp in ddps], clip_grad=1e6
        )
        num_updates = 0
        for step in range(NUM_STEPS):
            for ddp in ddps:
                ddp(1.0).backward()
            try:
                if (rank, step) != (FAULTY, FAULTY_STEP):
                    num_updates += chain.step().updated
                chain.zero_grad()
            except MegabucketError:
                chain.zero_grad()
        for ddp in ddps:
            ddp.finish_param_sync()
        return num_updates, [ddp.module.row.unique().tolist() for ddp in ddps]

    assert grid.run(program) == [(NUM_STEPS - 1, [[1.0 - (NUM_STEPS - 1)]] * 2)] * 4


def test_a_gradient_that_was_cleared_before_the_step_of_one_rank_is_named_on_all():
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        for step in range(NUM_STEPS):
            ddp(1.0).backward()
            if step == FAULTY_STEP:
                if rank == FAULTY:
                    leaves_by_clearing_in_plain_torch(optimizer)
                with pytest.raises(PhaseError if rank == FAULTY else PeerFailedError, match="was cleared"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return ddp.module.row.unique().tolist()

    assert grid.run(program) == [[1.0 - (NUM_STEPS - 1)]] * 4


TOKENS = [torch.tensor([8.0, 8.0]), "8", math.nan, math.inf, -1, None, torch.tensor(8 + 1j), [8]]


@pytest.mark.parametrize("given", TOKENS, ids=["two", "text", "nan", "inf", "negative", "none", "complex", "list"])
@pytest.mark.parametrize("is_sharded", MODES)
def test_a_wrong_number_of_tokens_on_one_rank_is_named_on_all_and_the_next_step_is_right(given, is_sharded):
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank, use_distributed_optimizer=is_sharded, grad_reduction="sum")
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        texts = []
        for step in range(NUM_STEPS):
            ddp(1.0).backward()
            try:
                finalize_grads(ddp, num_tokens=given if (rank, step) == (FAULTY, FAULTY_STEP) else torch.ones(1))
                optimizer.step()
            except MegabucketError as error:
                texts.append(str(error))
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return texts, ddp.module.row.unique().tolist()

    results = grid.run(program)

    assert all(result == results[0] for result in results)
    texts, weights = results[0]
    assert weights == [1.0 - (NUM_STEPS - 1)]  # two ranks of one token each: gradients of 1
    (text,) = texts
    assert "num_tokens" in text
    assert given is None or "rank 1" in text


def test_a_wrong_number_of_tokens_on_all_ranks_is_a_wrong_argument():
    grid = Grid(2, 2)

    def program(rank):
        ddp = wrap(grid, rank, grad_reduction="sum")
        ddp(1.0).backward()
        with pytest.raises(ConfigError, match="num_tokens must be a finite number >= 0, or a tensor of one element, got '8'"):
            finalize_grads(ddp, num_tokens="8")
        ddp.zero_grad()

    grid.run(program)
