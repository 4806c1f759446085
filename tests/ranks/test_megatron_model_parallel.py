"""The adapter under Megatron's model parallelism ends with the bits of Megatron's own wrapper and optimizer: norms, losses and
weights of its GPT model, in its schedules, with its parameter groups and scheduler, on gloo ranks."""

from __future__ import annotations

import pytest
import torch
from gpt_ranks import CLIP, Cell, train

pytestmark = pytest.mark.dist

SHARDED = {"use_distributed_optimizer": True}
GATHERING = SHARDED | {"overlap_param_gather": True}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CHUNKS = PP | {"virtual_pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
ETP = {"expert_tensor_parallel_size": 1}
INSTANCES = {"num_distributed_optimizer_instances": 2}
SEQUENCE = {"sequence_parallel": True}
EXPERTS = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.0, "add_bias_linear": False}
EXCHANGED = EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
GATHERED = EXPERTS | {"moe_token_dispatcher_type": "allgather"} | SEQUENCE  # gloo gathers no uneven parts over expert tp
PER_TOKEN = {"calculate_per_token_loss": True}
BLOCKING = {"overlap_grad_reduce": False}


def assert_same_bits(pool, cell: Cell, *, ranks: int) -> None:
    ours, theirs = (pool.run(train, side, cell, ranks=ranks) for side in ("our", "their"))

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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(TP, {}, GATHERING, num_microbatches=3), id="tp 2 x dp 2"),
        pytest.param(Cell(TP, {}, {}), id="tp 2 x dp 2, all-reduce"),
        pytest.param(Cell(TP, SEQUENCE | PER_TOKEN, SHARDED), id="tp 2 x dp 2, sequence parallel, per token"),
        pytest.param(Cell(TP, SEQUENCE, GATHERING, dtype=torch.bfloat16), id="tp 2 x dp 2, sequence parallel, bf16"),
        pytest.param(Cell(TP, {"qk_layernorm": True} | SEQUENCE, SHARDED), id="tp 2 x dp 2, norms of queries and keys"),
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
def test_four_ranks_end_with_megatrons_bits_at_night(pool, cell):
    assert_same_bits(pool, cell, ranks=4)


@pytest.mark.nightly
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
def test_two_ranks_end_with_megatrons_bits(pool_of_two, cell):
    assert_same_bits(pool_of_two, cell, ranks=2)
