"""A training program as torchrun's documentation has it; one rank is killed or raises in its third step.

torchrun --nproc-per-node 2 loses_a_rank.py RANK killed|raises
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import megabucket as mb


@record
def main(lost_rank, how):
    dist.init_process_group("gloo")
    ddp = mb.DistributedDataParallel(torch.nn.Linear(8, 4), mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    for step in range(5):
        loss = ddp(torch.randn(2, 8)).sum()
        if step == 2 and dist.get_rank() == int(lost_rank):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this batch is bad")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
