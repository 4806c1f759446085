"""A pre-training loop over two pipeline stages, each on half of the ranks: torch's 1F1B schedule, with sharded optimizers.

torchrun --standalone --nproc-per-node 4 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

import megabucket as mb
from megabucket.integrations.pipelining import PipelineStage

NUM_STAGES, STEPS, MICROBATCHES, CLIP, LR = 2, 12, 4, 0.05, 1e-2


def make_part(stage: int) -> torch.nn.Module:
    torch.manual_seed(stage)
    if stage == 0:
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU())
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(step))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def train(mesh: dist.DeviceMesh) -> torch.nn.Module:
    """Train on a mesh (dp, pp) of all ranks, and return the part of the model that is on this rank."""
    dp, index = mesh["dp"], mesh["pp"].get_local_rank()
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=500)
    # Gradients are reduced over the ranks with the same stage. All ranks agree on steps, and on one norm.
    groups = mb.ParallelGroups({"dense": dp}, step_group=dist.group.WORLD, norm_group=dist.group.WORLD)
    model = mb.DistributedDataParallel(make_part(index), config, groups=groups, disable_bucketing=index > 0)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), LR), model, clip_grad=CLIP)

    stage = PipelineStage(model, index, NUM_STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=stage.reporting(loss_of))
    for step in range(STEPS):
        batch = batch_of(step).chunk(dp.size())[dp.get_local_rank()]
        losses: list[torch.Tensor] = []
        if stage.is_first:
            schedule.step(batch)
        else:
            schedule.step(target=batch[:, :8], losses=losses)
        result = optimizer.step()
        optimizer.zero_grad()
        if stage.is_last and dp.get_local_rank() == 0:
            loss = torch.stack(losses).mean().item()
            print(f"step {step}: loss {loss:.4f}, norm of both stages {result.grad_norm:.3f}, clipped to {CLIP}")
    model.detach()
    return model.module


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.init_device_mesh("cpu", (dist.get_world_size() // NUM_STAGES, NUM_STAGES), mesh_dim_names=("dp", "pp")))
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
