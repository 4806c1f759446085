"""``torch.distributed.checkpoint`` on gloo: what some ranks have written, others read, FSDP2 among them, and back.

Gradients are integers and independent of the weights, so all of them must agree bit by bit with one process of plain torch.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import Rank, WorkerPool
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import megabucket as mb
from megabucket.checkpoint.convert.dcp import load_dcp, save_dcp

pytestmark = pytest.mark.dist

SHAPES = {"a": (10, 7), "b": (5, 3, 4), "c": (9,), "d": (2, 3, 2, 3)}


class Tensors(torch.nn.Module):
    """Named tensors; the gradient of each is the factor it is multiplied by."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            values = values.to(memory_format=torch.channels_last) if values.dim() == 4 and seed != 3 else values
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        factors = {name: 12.0 * torch.randint(-5, 6, shape, generator=generator) for name, shape in SHAPES.items()}
        return torch.stack([(param * factors[name]).sum() for name, param in self.named_parameters()]).sum()


def train(module: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        module(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def ours(rank: Rank, seed: int, bucket_size: int, *, sharded: bool) -> tuple[mb.DistributedDataParallel, Any]:
    model = Tensors(seed)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=bucket_size)
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    return ddp, mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), ddp)


def outcome(ddp: mb.DistributedDataParallel, optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    found = {name: tensor.clone() for name, tensor in ddp.state_dict().items()}
    return found | {f"{name}.{key}": value for index, name in enumerate(SHAPES) for key, value in state[index].items()}


def begin(rank: Rank, path: str) -> None:
    ddp, optimizer = ours(rank, 1, 50, sharded=True)
    train(ddp, optimizer, range(3))
    save_dcp(path, ddp, optimizer)


def go_on(rank: Rank, path: str, bucket_size: int, sharded: bool, steps: range, target: str = "") -> dict[str, torch.Tensor]:
    ddp, optimizer = ours(rank, 2, bucket_size, sharded=sharded)
    load_dcp(path, ddp, optimizer, trusted=True)
    train(ddp, optimizer, steps)
    if target:
        save_dcp(target, ddp, optimizer)
    return outcome(ddp, optimizer)


def go_on_with_fsdp2(rank: Rank, path: str, target: str) -> dict[str, torch.Tensor]:
    """Load into FSDP2, train two steps, save: plain torch all the way."""
    mesh = DeviceMesh.from_group(rank.group, "cpu", mesh=list(range(rank.size)), mesh_dim_names=("dp",))
    model = Tensors(3)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state_dict = {"model": model_state, "optim": optimizer_state}
        dcp.load(state_dict, checkpoint_id=path, process_group=rank.group)
        set_state_dict(model, optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"])
        train(model, optimizer, range(3, 5))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=target, process_group=rank.group)
    found = {name: tensor.full_tensor() for name, tensor in model.state_dict().items() if isinstance(tensor, DTensor)}
    assert optimizer.param_groups[0]["lr"] == 0.01
    for name, of_param in optimizer_state["state"].items():
        for key, value in of_param.items():
            found[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: tensor.detach() for name, tensor in found.items()}


def alone(steps: int) -> dict[str, torch.Tensor]:
    model = Tensors(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(steps))
    found = {name: param.detach() for name, param in model.named_parameters()}
    return found | {f"{n}.{key}": value for n, p in model.named_parameters() for key, value in optimizer.state[p].items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def test_other_numbers_of_ranks_and_fsdp2_take_over_from_each_other(pool: WorkerPool, tmp_path: Any) -> None:
    first, third, last = (str(tmp_path / name) for name in ("first", "third", "last"))

    pool.run(begin, first, ranks=2)
    on_three = pool.run(go_on, first, 37, True, range(3, 5), third, ranks=3)
    on_one = pool.run(go_on, first, 1000, False, range(3, 5), ranks=1)
    with_fsdp2 = pool.run(go_on_with_fsdp2, first, last, ranks=2)
    after_fsdp2 = pool.run(go_on, last, 64, True, range(5, 7), ranks=4)
    after_three = pool.run(go_on, third, 64, False, range(5, 7), ranks=2)

    for found in (*on_three, *on_one, *with_fsdp2):
        assert differing(found, alone(5)) == []
    for found in (*after_fsdp2, *after_three):
        assert differing(found, alone(7)) == []
