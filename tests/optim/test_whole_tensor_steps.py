"""A step of optimizers that update whole tensors, in every way to take it: on shards as after an all-reduce, bit by bit."""

import pytest
import torch
from whole_ranks import PULL, assert_same, run_ranks, seed_of, weights_of
from whole_stand_ins import factors_of

CLIP = 50.0
SCALE = 64.0


def assert_as_all_reduced(program, name="Muon, AdamW", *, size=2, **fields):
    """Compare what ``program`` returns on the ranks with shards and without; return it."""
    sharded = run_ranks(size, name, program, **fields)
    reduced = run_ranks(size, name, program, **fields, sharded=False)
    for found in (*sharded, *reduced[1:]):
        assert_same(found, reduced[0])
    return reduced[0]


@pytest.mark.parametrize("by_hand", [("unscale",), ("clip",), ("unscale", "clip")], ids=" ".join)
@pytest.mark.parametrize("clip_grad", [0.0, CLIP])
def test_16_bit_gradients_that_were_changed_in_float32_reach_owners_and_norm_so(by_hand, clip_grad):
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            (ddp(seed_of(step, rank), PULL) * SCALE).backward()
            if "unscale" in by_hand:
                optimizer.unscale_grads(1 / SCALE)
            if "clip" in by_hand:
                found.append(float(optimizer.clip_grad_norm_(CLIP)))
            result = optimizer.step()
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append((result.grad_norm, result.num_zeros, weights_of(ddp.module)))
        return found

    config = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": False, "nonfinite_gradients": "allow"}
    assert_as_all_reduced(program, **config, options={"clip_grad": clip_grad, "returns_num_zeros": True})


def test_parts_step_one_by_one_on_gradients_that_were_unscaled():
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            (ddp(seed_of(step, rank), PULL) * SCALE).backward()
            optimizer.unscale_grads(1 / SCALE)
            for part in optimizer.parts:
                found.append(part.step().grad_norm)
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append(weights_of(ddp.module))
        return found

    config = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": False, "nonfinite_gradients": "allow"}
    assert_as_all_reduced(program, "8-bit Adam, Muon", **config, options={"clip_grad": CLIP})


@pytest.mark.parametrize("name", ["Muon, AdamW", "SOAP"])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_zeros_are_counted_in_the_gradients_of_the_step(name, in_fp32):
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            ddp(seed_of(step, rank)).backward()
            found.append(optimizer.step().num_zeros)
            optimizer.zero_grad()
        return found

    config = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": in_fp32, "options": {"returns_num_zeros": True}}
    found = assert_as_all_reduced(program, name, **config)

    sums = [zip(*(factors_of(seed_of(step, rank)).values() for rank in range(2)), strict=True) for step in range(3)]
    assert found == [sum(int((one + other == 0).sum()) for one, other in of_step) for of_step in sums]
