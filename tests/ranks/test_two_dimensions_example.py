"""``examples/two_dimensions.py`` against a single process, on tp 2 x dp 2, and after its checkpoint on tp 4."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Rank
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import megabucket as mb

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    from two_dimensions import CLIP, LR, STEPS, Run, backward, make_module
finally:
    sys.path.remove(str(EXAMPLES))


def whole(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in weights.items()}


def trained(rank: Rank, root: str, microbatches: int, sharded: bool) -> tuple[dict[str, float], list[float]]:
    """Return, by run, the largest difference over the largest change of a weight, and the norms before clipping."""
    alone = make_module()
    optimizer = torch.optim.AdamW(alone.parameters(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    norms = []
    for step in range(STEPS):
        backward(alone, step, 0, 1, microbatches)
        norms.append(torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    through = Run(mesh, microbatches=microbatches, sharded=sharded)
    through.train(0, STEPS // 2)
    through.save(root)
    through.train(STEPS // 2, STEPS)
    through.model.check_replicas()

    resumed = Run(mesh, microbatches=microbatches, sharded=sharded)
    resumed.train(resumed.load(root), STEPS)
    tp_alone = Run(dist.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")), microbatches=1, sharded=sharded)
    tp_alone.train(tp_alone.load(root), STEPS)

    before = make_module().state_dict()
    moved = max(float((weight - before[name]).abs().max()) for name, weight in alone.state_dict().items())
    found = {}
    for name, run in {"through": through, "resumed": resumed, "on tp 4": tp_alone}.items():
        weights = whole(run.model.state_dict())
        assert weights.keys() == before.keys()
        found[name] = max(float((weights[key] - weight).abs().max()) / moved for key, weight in alone.state_dict().items())
    found["norms"] = max(abs(one / other - 1) for one, other in zip(through.norms, norms, strict=True))
    ends = [whole(run.model.state_dict()) for run in (through, resumed)]
    found["resumed from through"] = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in before)
    for run in (through, resumed, tp_alone):
        run.model.detach()
    return found, norms


@pytest.mark.parametrize(("microbatches", "sharded"), [(1, True), pytest.param(3, False, marks=pytest.mark.nightly)])
def test_a_loop_on_two_dimensions_ends_with_the_weights_of_one_process(pool, tmp_path, microbatches, sharded):
    for found, norms in pool.run(trained, str(tmp_path), microbatches, sharded, ranks=4, timeout_s=110):
        print({name: f"{value:.1e}" for name, value in found.items()})
        assert min(norms) > 2 * CLIP  # it bites
        assert max(found["through"], found["resumed"], found["on tp 4"]) <= 1e-4
        assert found["norms"] <= 1e-6
        assert found["resumed from through"] == 0.0


def buffers_of(rank: Rank) -> tuple[list[float], list[float]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Linear(2, 4)
    for name, param in list(module.named_parameters()):
        module.register_parameter(name, torch.nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Shard(0)])))
    piece = torch.full((2,), 1.0 + rank.index)
    module.register_buffer("table", DTensor.from_local(piece, mesh["tp"], [Shard(0)]))
    model = mb.DistributedDataParallel(module, process_group=mesh["dp"])
    table = module.table
    model.detach()
    return table.to_local().tolist(), table.full_tensor().tolist()


def test_module_buffers_that_are_dtensors_are_made_equal_over_dp_only(pool):
    first, second = ([1.0, 1.0], [1.0, 1.0, 2.0, 2.0]), ([2.0, 2.0], [1.0, 1.0, 2.0, 2.0])  # as on ranks 0 and 1, dp 0

    assert pool.run(buffers_of, ranks=4) == [first, second, first, second]
