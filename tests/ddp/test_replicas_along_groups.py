"""``check_replicas`` over tensor-parallel ranks: copies have the same bits, parts of one parameter have not.

Two of Megatron's bugs end in copies that drift apart: a norm layer whose gradient lacks its sum over tensor-parallel ranks
(issues 1446 and 7452), and parameters that are cut without being marked. Nothing else would tell: losses stay plausible.
"""

import logging

import pytest
import torch
from grids import CutNet, Grid, WholeNet, cut

from megabucket import DistributedOptimizer
from megabucket.errors import PeerFailedError, ReplicasDivergedError
from megabucket.layout.identity import ParamIdentity

TENSOR_PARALLEL = {"reduction": ["dense"], "copies": ["tp"]}


def error_of(ddp):
    try:
        ddp.check_replicas()
    except (ReplicasDivergedError, PeerFailedError) as error:
        return error
    return None


def after_a_step(grid, **arguments):
    """Wrap and train a net that is cut for one step. Return by rank what ``check_replicas`` raises."""
    whole = WholeNet()

    def program(rank):
        ddp = grid.wrap(rank, CutNet(whole, grid.of(rank, "tp"), **arguments), **TENSOR_PARALLEL)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, clip_grad=0.1)
        ddp(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank // 2))).square().mean().backward()
        optimizer.step()
        return error_of(ddp)

    return grid.run(program)


def test_copies_stay_equal_where_their_gradients_are_complete():
    assert after_a_step(Grid(2, 2)) == [None] * 4


def test_a_gradient_that_lacks_its_sum_over_tensor_parallel_ranks_is_found_by_its_parameter():
    errors = after_a_step(Grid(2, 2), sums_grads=False)

    assert all("'norm.bias', copies along 'tp', and 1 more" in str(error) for error in errors)


def test_parameters_that_are_cut_and_not_marked_are_found():
    grid = Grid(2, 1)

    def program(rank):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(rank)
        return error_of(grid.wrap(rank, model, **TENSOR_PARALLEL))

    assert all("'bias'" in str(error) and "copies along 'tp'" in str(error) for error in grid.run(program))


def test_all_ranks_are_told_where_one_of_them_differs():
    grid = Grid(2, 2)
    weight = torch.randn(2, 3)

    def program(rank):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(weight)
            model.bias.fill_(0)
        ddp = grid.wrap(rank, model, config={"init_sync": False}, **TENSOR_PARALLEL)
        if rank == 0:
            with torch.no_grad():
                model.bias.fill_(1)
        return error_of(ddp)

    errors = grid.run(program)

    assert [type(error) for error in errors] == [ReplicasDivergedError] * 4
    (text,) = set(map(str, errors))
    assert "'bias' (CRC-32) differ" in text
    assert "on rank 2" in text


def test_a_copy_that_a_rank_lacks_is_found():
    grid = Grid(2, 1)

    def program(rank):
        def identity(name, param):
            shape = tuple(param.shape)
            return ParamIdentity(name if rank else f"other.{name}", shape, (0,) * len(shape), copies=("tp",))

        return error_of(grid.wrap(rank, torch.nn.Linear(1, 1, bias=False), identity=identity, **TENSOR_PARALLEL))

    assert ["the list of copies along 'tp'" in str(error) for error in grid.run(program)] == [True, True]


class Part(torch.nn.Module):
    """Two parameters that are cut over tensor-parallel ranks, and one that is not."""

    def __init__(self, weight):
        super().__init__()
        self.weight = cut(torch.nn.Parameter(weight.clone()), 0)
        self.bias = cut(torch.nn.Parameter(torch.zeros(4)), 0)
        self.copied = torch.nn.Parameter(torch.arange(3.0))


def warnings_about(grid, weight_of, caplog, *, copies=("tp",)):
    caplog.set_level(logging.WARNING, logger="megabucket")
    grid.run(lambda rank: grid.wrap(rank, Part(weight_of(rank)), reduction=["dense"], copies=copies).check_replicas())
    return [record.getMessage() for record in caplog.records if "cut" in record.getMessage()]


def test_a_cut_parameter_that_is_equal_on_all_tensor_parallel_ranks_is_named_in_one_warning(caplog):
    (warning,) = warnings_about(Grid(2, 2), lambda _: torch.arange(8.0).view(4, 2), caplog)

    assert warning.startswith("megabucket: 'weight' should be cut over the ranks [0, 1] (tp)")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cut_parameters_that_differ_and_those_that_begin_as_zeros_are_no_reason_to_warn(tp, caplog):
    weights = torch.arange(32.0).view(4, 4, 2)

    assert warnings_about(Grid(tp, 2), lambda rank: weights[rank % tp], caplog) == []


def test_a_cut_parameter_that_is_equal_on_some_tensor_parallel_ranks_is_no_reason_to_warn(caplog):
    weights = torch.arange(16.0).view(2, 4, 2)

    assert warnings_about(Grid(4, 1), lambda rank: weights[rank // 2], caplog) == []


def test_ranks_that_hold_the_same_part_of_a_cut_parameter_are_no_reason_to_warn(caplog):
    weights = torch.arange(16.0).view(2, 4, 2)

    assert warnings_about(Grid(2, 2), lambda rank: weights[rank % 2], caplog, copies=["tp", "dense"]) == []
