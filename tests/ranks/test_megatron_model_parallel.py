"""The adapter under Megatron's model parallelism ends with the bits of Megatron's own wrapper and optimizer: norms, losses and
weights of its GPT model, in its schedules, with its parameter groups and scheduler, on gloo ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt_ranks import CLIP, Cell, Outcome, train
from pool import WorkerPool

pytestmark = [pytest.mark.dist, pytest.mark.nightly]  # Megatron takes its time to import, on each rank

SHARDED = {"use_distributed_optimizer": True}
GATHERING = SHARDED | {"overlap_param_gather": True}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CHUNKS = PP | {"virtual_pipeline_model_parallel_size": 2}
EP, EP_4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
ETP = {"expert_tensor_parallel_size": 1}
INSTANCES = {"num_distributed_optimizer_instances": 2}
SEQUENCE = {"sequence_parallel": True}
EXPERTS = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.0, "add_bias_linear": False}
EXCHANGED = EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
GATHERED = EXPERTS | {"moe_token_dispatcher_type": "allgather"} | SEQUENCE  # gloo gathers no uneven parts over expert tp
GATED = {"qk_layernorm": True, "gated_linear_unit": True}
PER_TOKEN = {"calculate_per_token_loss": True}
BLOCKING = {"overlap_grad_reduce": False}


@pytest.fixture
def own_pool(request) -> Iterator[WorkerPool]:
    """Ranks of this test alone: Megatron's wrapper keeps its groups, with their threads, as long as the process lives."""
    pool = WorkerPool("forkserver", num_ranks=getattr(request, "param", 4))
    yield pool
    pool.close()


def assert_same_bits(pool, cell: Cell, *, ranks: int) -> None:
    ours, theirs = (pool.run(train, side, cell, ranks=ranks, timeout_s=100) for side in ("our", "their"))

    for own, other in zip(ours, theirs, strict=True):
        assert own.norms == other.norms
        assert min(own.norms) > CLIP  # every step clips
        assert own.losses == other.losses
        assert own.rates == other.rates
        assert own.weights.keys() == other.weights.keys()
        assert [name for name in own.weights if not torch.equal(own.weights[name], other.weights[name])] == []


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(TP, SEQUENCE, GATHERING, steps=3), id="tp 2 x dp 2, sequence parallel"),
        pytest.param(Cell(CHUNKS, {}, GATHERING, is_tied=True, steps=3), id="interleaved, tied"),
    ],
)
def test_four_ranks_end_with_megatrons_bits(pool, cell):
    assert_same_bits(pool, cell, ranks=4)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(TP, {}, GATHERING, num_microbatches=3), id="tp 2 x dp 2"),
        pytest.param(Cell(TP, {}, {}), id="tp 2 x dp 2, all-reduce"),
        pytest.param(Cell(TP, SEQUENCE | PER_TOKEN, SHARDED), id="tp 2 x dp 2, sequence parallel, per token"),
        pytest.param(Cell(TP, SEQUENCE, GATHERING, dtype=torch.bfloat16), id="tp 2 x dp 2, sequence parallel, bf16"),
        pytest.param(
            Cell(TP, {"qk_layernorm": True, "gated_linear_unit": True} | SEQUENCE, SHARDED),
            id="tp 2 x dp 2, gated, norms of queries",
        ),
        pytest.param(Cell({"tensor_model_parallel_size": 4}, SEQUENCE, GATHERING), id="tp 4"),
        pytest.param(Cell(PP, {}, GATHERING, is_tied=True), id="pp 2 x dp 2, tied"),
        pytest.param(Cell(PP, {}, {}, is_tied=True), id="pp 2 x dp 2, tied, all-reduce"),
        pytest.param(Cell(PP, PER_TOKEN, SHARDED | BLOCKING, is_tied=True), id="pp 2 x dp 2, tied, per token"),
        pytest.param(Cell(PP | TP, SEQUENCE, GATHERING, is_tied=True), id="pp 2 x tp 2, tied"),
        pytest.param(Cell(CHUNKS, {}, GATHERING), id="interleaved"),
        pytest.param(Cell(CHUNKS, {}, {}, is_tied=True, num_microbatches=4), id="interleaved, tied, all-reduce"),
        pytest.param(Cell(CHUNKS, {}, GATHERING, is_tied=True, dtype=torch.bfloat16), id="interleaved, tied, bf16"),
        pytest.param(Cell(EP, EXCHANGED, GATHERING), id="ep 2 x edp 2"),
        pytest.param(Cell(EP, EXCHANGED, {}, num_microbatches=1), id="ep 2 x edp 2, all-reduce"),
        pytest.param(Cell(EP | TP, GATHERED, GATHERING), id="ep 2 x tp 2"),
        pytest.param(Cell(EP | TP, GATHERED, {}), id="ep 2 x tp 2, all-reduce"),
        pytest.param(
            Cell(EP | TP | {"expert_tensor_parallel_size": 1}, EXCHANGED | SEQUENCE, GATHERING), id="ep 2, tp 2, etp 1"
        ),
        pytest.param(Cell(EP | PP, EXCHANGED, GATHERING, is_tied=True), id="ep 2 x pp 2, tied"),
        pytest.param(Cell(INSTANCES, {}, GATHERING, is_tied=True), id="instances 2"),
        pytest.param(Cell(INSTANCES | EP, EXCHANGED, SHARDED), id="instances 2, ep 2"),
        pytest.param(Cell({}, {}, GATHERING | {"align_param_gather": True}, is_tied=True), id="dp 4"),
    ],
)
def test_four_ranks_end_with_megatrons_bits_at_night(own_pool, cell):
    assert_same_bits(own_pool, cell, ranks=4)


@pytest.mark.parametrize("own_pool", [2], indirect=True)
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(TP, SEQUENCE, GATHERING), id="tp 2"),
        pytest.param(Cell(PP, {}, GATHERING, is_tied=True), id="pp 2, tied"),
        pytest.param(Cell(CHUNKS, {}, GATHERING, is_tied=True), id="interleaved, tied"),
        pytest.param(Cell(EP, EXCHANGED, GATHERING), id="ep 2"),
        pytest.param(Cell(INSTANCES, {}, SHARDED), id="instances 2"),
    ],
)
def test_two_ranks_end_with_megatrons_bits(own_pool, cell):
    assert_same_bits(own_pool, cell, ranks=2)


UNBIASED = {"add_bias_linear": False}  # the gradient of the bias of keys is rounding alone


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Cell(PP, UNBIASED, GATHERING), Cell({}, UNBIASED, SHARDED), id="pp 2 to 1"),
        pytest.param(Cell(TP, UNBIASED | SEQUENCE, SHARDED), Cell({}, UNBIASED, GATHERING), id="tp 2 to 1"),
        pytest.param(Cell({}, UNBIASED, {}), Cell(TP | PP, UNBIASED | SEQUENCE, SHARDED), id="to tp 2 x pp 2"),
        pytest.param(Cell(EP, EXCHANGED, SHARDED), Cell(EP_4, EXCHANGED, SHARDED), id="ep 2 to 4"),
    ],
)
def test_our_checkpoint_goes_on_under_another_model_parallelism(own_pool, tmp_path, before, after):
    """As one run of Megatron's, to 1e-4 of how far its weights moved."""

    def run(side: str, cell: Cell, **changes: Any) -> list[Outcome]:
        num_stages = math.prod(size for name, size in cell.sizes.items() if "expert" not in name)
        return own_pool.run(train, side, replace(cell, num_microbatches=num_stages, **changes), ranks=4, timeout_s=100)

    half = run("our", before, steps=3, root=str(tmp_path))
    rest = run("our", after, first=3, root=str(tmp_path))
    whole = run("their", before)

    assert rest[0].norms == pytest.approx(whole[0].norms[3:], rel=1e-4)
    expected = joined(half, [one.weights for one in whole])
    found, saved = (joined(side, [one.weights for one in side]) for side in (rest, half))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        moved = (weight - saved[name]).abs().max()
        assert (found[name] - weight).abs().max() <= 1e-4 * moved, name


def joined(ranks: list[Outcome], weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of the whole model, of which each rank has pieces."""
    found: dict[str, torch.Tensor] = {}
    for one, of_rank in zip(ranks, weights, strict=True):
        for local, (name, shape, offset) in one.places.items():
            piece = of_rank[local]
            target = found.setdefault(name, torch.full(shape, torch.nan))
            target[tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))] = piece
    return found


def test_parts_of_the_model_have_names_of_the_whole_one(own_pool):
    transformer = GATHERED | {"gated_linear_unit": True}
    outcomes = own_pool.run(train, "our", Cell(TP | EP, transformer, SHARDED, steps=1), ranks=4, timeout_s=100)

    names = [{place[0] for place in one.places.values()} for one in outcomes]
    expert = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc{}.weight"
    assert [expert.format(number, 2) in names[0] for number in range(4)] == [True, True, False, False]
    assert [expert.format(number, 2) in names[3] for number in range(4)] == [False, False, True, True]
    # Gate and up are cut each, so what a rank has is no block of the whole, and fits no other number of ranks.
    assert expert.format(0, 1) not in names[0]
    assert f"{expert.format(0, 1)}.cut_over_2" in names[0]
