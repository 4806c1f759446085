"""Weights that leave four real ranks whole: cut by torch's ``parallelize_module``, by Megatron's attributes, or experts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from dtensor_models import mesh_of, train, whole, wrapped
from moe_ranks import NUM_RANKS, Moe, groups_of, loss_of, own_experts, tokens_of
from pool import Rank

import megabucket as mb
from examples.tensor_parallel import VOCABULARY, Mlp

pytestmark = pytest.mark.dist

Weights = dict[str, torch.Tensor]


def sent(chunks: Any) -> list[mb.WeightChunk]:
    return [mb.WeightChunk.from_header(json.loads(json.dumps(one.header())), one.tensor.clone()) for one in chunks]


def copies_of(weights: Any) -> Weights:
    return {name: whole(value).clone() for name, value in weights.items()}


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def there_and_back(ddp: Any, go_on: Any, max_bytes: int) -> tuple[Weights, Weights, Weights, Weights]:
    """Return whole weights, the ``state_dict`` of this rank, and the latter after more steps and the way back, twice."""
    chunks, own = sent(ddp.export_weights(max_bytes=max_bytes, whole=True)), sent(ddp.export_weights(max_bytes=max_bytes))
    before, back = copies_of(ddp.state_dict()), []
    for received in (chunks, own):
        go_on()
        ddp.finish_param_sync()
        assert not torch.equal(next(ddp.module.parameters()), next(iter(before.values())))
        ddp.import_weights(received)
        ddp.check_replicas()
        back.append(copies_of(ddp.state_dict()))
    return mb.named_weights(chunks), before, *back


def with_dtensors(_: Rank, form: str, fields: dict[str, Any], dtype: torch.dtype) -> tuple[Weights, ...]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    ddp, optimizer = wrapped(mesh, form, dtype=dtype, **fields)
    train(ddp, optimizer, mesh["dp"], range(2))
    optimizer.zero_grad()

    def go_on() -> None:
        train(ddp, optimizer, mesh["dp"], range(2, 3))
        optimizer.zero_grad()

    result = there_and_back(ddp, go_on, 1024)
    ddp.detach()
    return result


@pytest.mark.parametrize(
    ("form", "fields", "dtype"),
    [
        ("sequence parallel", {"use_distributed_optimizer": True, "overlap_param_gather": True}, torch.bfloat16),
        pytest.param("tensor parallel", {}, torch.float32, marks=pytest.mark.nightly),
        pytest.param("tensor parallel", {"use_distributed_optimizer": True}, torch.float32, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_pieces_of_dtensors_on_two_replicas_become_what_torch_calls_the_full_tensors(pool, form, fields, dtype):
    results = pool.run(with_dtensors, form, fields, dtype, ranks=4)

    for exported, before, *back in results:
        assert exported["out.weight"] is exported["emb.weight"]  # tied: sent once
        assert_equal(exported, before)
        for weights in back:
            assert_equal(weights, before)
        assert_equal(exported, results[0][0])


def with_experts(rank: Rank, fields: dict[str, Any]) -> tuple[Weights, ...]:
    exchanging, same = groups_of(rank.index, 2)
    model = Moe(own_experts(rank.index, 2), exchanging)
    config = mb.DistributedDataParallelConfig(bucket_size=300, **fields)
    ddp = mb.DistributedDataParallel(model, config, groups={"dense": rank.group, "expert": same})
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), 1e-2), ddp)

    def go_on() -> None:
        loss_of(ddp, tokens_of(rank.index, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    go_on()
    result = there_and_back(ddp, go_on, 2048)
    ddp.detach()
    return result


@pytest.mark.parametrize(
    "fields",
    [{"use_distributed_optimizer": True, "overlap_param_gather": True}, pytest.param({}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_experts_of_two_ranks_in_two_replicas_become_one_model(pool, fields):
    results = pool.run(with_experts, fields, ranks=NUM_RANKS)

    expected = {**results[1][1], **results[0][1]}  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
    assert expected.keys() == Moe().state_dict().keys()
    for exported, before, *back in results:
        assert_equal(exported, expected)
        for weights in back:
            assert_equal(weights, before)


def with_megatron_attributes(rank: Rank) -> tuple[Weights, ...]:
    tp, dp = groups_of(rank.index, 2)
    groups = mb.ParallelGroups({"dense": dp}, copies={"tp": tp}, norm_group=rank.group)
    config = mb.DistributedDataParallelConfig(grad_reduction="sum", bucket_size=2000, use_distributed_optimizer=True)
    ddp = mb.DistributedDataParallel(Mlp(tp), config, groups=groups)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), 1e-2), ddp)

    def go_on() -> None:
        tokens = torch.arange(VOCABULARY).roll(dp.rank()).chunk(2)[tp.rank()]
        torch.nn.functional.cross_entropy(ddp(tokens), tokens, reduction="sum").backward()
        mb.finalize_grads(ddp, num_tokens=VOCABULARY)
        optimizer.step()
        optimizer.zero_grad()

    go_on()
    result = there_and_back(ddp, go_on, 4096)
    ddp.detach()
    return result


def test_pieces_of_megatrons_layers_become_whole_weights(pool):
    results = pool.run(with_megatron_attributes, ranks=NUM_RANKS)

    first, second = results[0][1], results[1][1]
    cut = {name: torch.cat([first[name], second[name]], dim) for name, dim in (("column", 0), ("row", 1))}
    for exported, before, *back in results:
        assert_equal(exported, {**first, **cut})
        for weights in back:
            assert_equal(weights, before)
