"""Where the emulated fabric moves nothing, each rank's own part still gets to where it belongs."""

import pytest
import torch

from megabucket.comm.port import ReduceOp
from megabucket.testing.fabric.movement import Mover

RANK, SIZE = 1, 2


def scattered(output, full):
    move = Mover(None, None, rank=RANK, size=SIZE).scatter([output], [full], ReduceOp.SUM, moves=False)
    if move.finish is not None:
        move.finish()
    return output, move.finish is not None


@pytest.mark.parametrize("numel", [0, 2, 8])
def test_a_part_that_lies_in_place_is_left_there(numel):
    full = torch.arange(float(numel))

    output, was_moved = scattered(full[numel // 2 :], full)

    assert not was_moved
    assert output.tolist() == list(range(numel // 2, numel))


def test_a_part_elsewhere_is_brought_there():
    output, was_moved = scattered(torch.zeros(4), torch.arange(8.0))

    assert was_moved
    assert output.tolist() == [4, 5, 6, 7]


def test_the_memory_of_a_transposed_tensor_does_not_begin_with_its_first_part():
    memory = torch.arange(8.0)
    output, _ = scattered(memory[4:], memory.view(2, 4).t())

    assert output.tolist() == [2, 6, 3, 7]


@pytest.mark.parametrize("moves", [False, True])
def test_what_was_gathered_into_before_is_left_alone_without_moves(moves):
    sent = []

    class Gloo:
        def broadcast(self, tensors, _):
            sent.append(tensors)

    mover, full = Mover(Gloo(), None, rank=RANK, size=SIZE), torch.arange(8.0)
    for _ in range(2):
        mover.gather([full], [full[4:]], moves)
    mover.gather([full], [torch.full((4,), 9.0)], moves)

    assert len(sent) == (3 * SIZE if moves else SIZE)
    assert full.tolist() == [0, 1, 2, 3, 9, 9, 9, 9]
