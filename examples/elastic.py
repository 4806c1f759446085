"""A run that survives a lost rank: torchrun starts all ranks again, and they go on from the newest checkpoint.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it, gloo hangs in the second attempt (torch 2.13)
torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/elastic.py runs/elastic 7
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import megabucket as mb
from megabucket.errors import CheckpointMissingError

STEPS = 12


def train(root: str, *, group: dist.ProcessGroup | None = None, lost_in: int | None = None) -> None:
    rank = dist.get_rank(group)
    torch.manual_seed(rank)  # each rank draws its own dropout
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 8))
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=500)
    model = mb.DistributedDataParallel(module, config, process_group=group)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, clip_grad=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    checkpoints = mb.Checkpointer(root, model, optimizer, schedulers=schedule)
    try:
        first = checkpoints.load().step
    except CheckpointMissingError:
        first = 0
    print(f"rank {rank} begins at step {first}", flush=True)
    for step in range(first, STEPS):
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(2 * step + rank))
        model(inputs).square().mean().backward()
        if step == lost_in and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 3 == 0:
            checkpoints.save(step + 1)
    model.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, lost_in = sys.argv[1:] or ("runs/elastic", "-1")
    is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    train(folder, lost_in=int(lost_in) if is_first_attempt else None)
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
