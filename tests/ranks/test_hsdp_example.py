"""``examples/hsdp.py`` against torch DDP: four ranks in two replicas, then two ranks that go on from the checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from odd_model import flat
from pool import Rank

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    from hsdp import CLIP, LR, STEPS, Run, backward, make_module
finally:
    sys.path.remove(str(EXAMPLES))


def trained(rank: Rank, root: str, microbatches: int) -> tuple[list[torch.Tensor], list[float]]:
    """Return the weights of torch DDP, of four ranks and of two that go on half-way, and the norms before clipping."""
    torch_ddp = torch.nn.parallel.DistributedDataParallel(make_module())
    optimizer = torch.optim.AdamW(torch_ddp.parameters(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    norms = []
    for step in range(STEPS):
        backward(torch_ddp, step, rank.index, rank.size, microbatches)
        norms.append(torch.nn.utils.clip_grad_norm_(torch_ddp.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    on_four = Run(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), root, microbatches=microbatches)
    on_four.train(0, STEPS // 2)
    on_four.checkpoints.save(STEPS // 2)
    on_four.train(STEPS // 2, STEPS)

    pairs = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pair", "replicate", "shard"))
    # The same run twice, beside each other; with the same microbatches, whose gradients are rounded to bfloat16.
    on_two = Run(pairs["replicate", "shard"], root, microbatches=2 * microbatches)
    on_two.train(on_two.checkpoints.load().step, STEPS)
    assert on_two.ranks == (rank.index % 2, 2)

    weights = [flat(torch_ddp.parameters())] + [flat(run.model.state_dict().values()) for run in (on_four, on_two)]
    for run in (on_four, on_two):
        run.model.detach()
    return weights, norms


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_loop_on_a_mesh_ends_with_the_weights_of_torch_ddp_also_resumed_on_fewer_ranks(pool, tmp_path, microbatches):
    before = flat(make_module().parameters())

    for (reference, *found), norms in pool.run(trained, str(tmp_path), microbatches, ranks=4):
        assert min(norms) > 2 * CLIP  # it bites
        moved = (reference - before).abs().max()
        ratios = [float((weights - reference).abs().max() / moved) for weights in found]
        print(f"largest difference over largest change of a weight: {max(ratios):.1e}")
        assert max(ratios) <= 1e-4
