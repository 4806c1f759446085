"""A pre-training loop on a mesh (replicate, shard): shards inside each replica, gradients reduced over replicas (HSDP).

torchrun --standalone --nproc-per-node 4 examples/hsdp.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist

import megabucket as mb

STEPS, CLIP, LR = 12, 0.05, 1e-2


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def backward(model: mb.DistributedDataParallel, step: int, rank: int, size: int, microbatches: int) -> None:
    """Run this rank's microbatches of one batch, which all ranks share."""
    batch = torch.randn(24, 32, generator=torch.Generator().manual_seed(step))
    for index, inputs in enumerate(batch.chunk(size)[rank].chunk(microbatches)):
        with nullcontext() if index == microbatches - 1 else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(inputs) - inputs[:, :8]).float().square().mean() / microbatches
            loss.backward()


class Run:
    def __init__(self, mesh: dist.DeviceMesh, root: str, *, microbatches: int) -> None:
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=500)
        self.model = mb.DistributedDataParallel(make_module(), config, process_group=mesh)
        self.optimizer = mb.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), LR), self.model, clip_grad=CLIP)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.checkpoints = mb.Checkpointer(root, self.model, self.optimizer, schedulers=self.schedule)
        self.ranks, self.microbatches = (self.model.communicator.rank, self.model.communicator.size), microbatches

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            backward(self.model, step, *self.ranks, self.microbatches)
            result = self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            if self.ranks[0] == 0:
                print(f"step {step}: gradient norm {result.grad_norm:.3f}, clipped to {CLIP}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    run = Run(ranks, "runs/hsdp", microbatches=3)
    run.train(0, STEPS // 2)
    run.checkpoints.save(STEPS // 2)
    run = Run(ranks, "runs/hsdp", microbatches=3)  # as a new process would, on any number of ranks
    run.train(run.checkpoints.load().step, STEPS)
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
