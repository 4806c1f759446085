"""A parameter that still begins at its place in the buffer, but in another shape or order, has left it."""

import pytest
import torch
from loop_ranks import Ranks, optimizer_of

from megabucket.errors import StorageMovedError

MODES = pytest.mark.parametrize(
    "switches",
    [{}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True, "overlap_param_gather": True}],
    ids=["all_reduce", "reduce_scatter", "overlapped_gather"],
)
FACTORS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


class Square(torch.nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(shape or (2, 2)))

    def forward(self, factors):
        return (self.w * factors).sum()


def train(ddp, optimizer, factors=FACTORS):
    ddp(factors).backward()
    optimizer.step()
    optimizer.zero_grad()


@MODES
def test_a_transposed_square_on_one_rank_is_named_on_all_and_the_next_step_is_right(switches):
    ranks = Ranks(2, Square(), **switches)

    def program(rank, ddp):
        optimizer, w = optimizer_of(ddp), ddp.module.w
        train(ddp, optimizer)
        ddp.finish_param_sync()
        before = w.data
        if rank == 1:
            w.data = w.data.t()
        with pytest.raises(StorageMovedError) as caught:
            train(ddp, optimizer)
        w.data = before
        train(ddp, optimizer)
        ddp.finish_param_sync()
        return str(caught.value), w.tolist()

    (text, weights), other = ranks.run(program)
    assert other == (text, weights)
    assert text.startswith(
        "step 1: on rank 1 parameters have left the buffer: 'w' (the first one is float32 on cpu of shape (2, 2) with strides "
        "(1, 2) at its place, expected float32 on cpu of shape (2, 2) with strides (2, 1) at its place)."
    )
    assert weights == (-2 * FACTORS).tolist()


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((5, 1), torch.Tensor.t),
        ((1, 6), lambda w: w.view(6, 1)),
        ((4, 2), lambda w: w.view(1, 4, 2)),
        ((2, 2), lambda w: w[:1]),
    ],
    ids=["strides stay", "a dimension of one", "a dimension more", "half of it"],
)
def test_another_shape_at_its_place_is_found(shape, change):
    (ddp,) = Ranks(1, Square(*shape)).ddps
    ddp.module.w.data = change(ddp.module.w.data)

    change = ddp.sync._watch.find_change()

    assert change.kind == "StorageMovedError"
    assert f"of shape {tuple(ddp.module.w.shape)}" in change.fields["found"]


def test_another_view_of_all_of_it_is_no_change():
    (ddp,) = Ranks(1, Square()).ddps
    ddp.module.w.data = ddp.module.w.data.view(4).view(2, 2)

    assert ddp.sync._watch.find_change() is None


@MODES
def test_a_rebuild_takes_the_parameter_as_it_is_now(switches):
    ranks = Ranks(2, Square(), **switches)

    def program(_, ddp):
        optimizer = optimizer_of(ddp)
        train(ddp, optimizer)
        ddp.finish_param_sync()
        ddp.module.w.data = ddp.module.w.data.t()
        ddp.rebuild()
        train(ddp, optimizer)
        ddp.finish_param_sync()
        return ddp.module.w.tolist()

    assert ranks.run(program) == [(-FACTORS.t() - FACTORS).tolist()] * 2
