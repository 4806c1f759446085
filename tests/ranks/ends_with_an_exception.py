"""A training program for two ranks. Rank 1 fails in the third step; rank 0 is in a collective of its own then."""

import gc
import os
import sys

import torch
import torch.distributed as dist

import megabucket as mb

WIDTHS = {"small": 32, "large": 1800}  # 13 MB in a weight of the large one: a thread completes its reduction


class Net(torch.nn.Module):
    """Two layers that fail on demand."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.fails_in = ""

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.fails_in == "forward":
            fail()
        if self.fails_in == "backward":
            hidden.register_hook(lambda _: fail())
        return self.second(hidden)


def fail():
    print("fails now", flush=True)
    raise ValueError("the program has failed")


def take_step(ddp, optimizer, width, place):
    is_failing = os.environ["RANK"] == "1"
    if place and not is_failing and place != "after step":
        dist.all_reduce(torch.zeros(3))
    ddp.module.fails_in = place if is_failing else ""
    loss = ddp(torch.randn(2, width)).sum()
    if is_failing and place == "between":
        fail()
    loss.backward()
    if is_failing and place == "after backward":
        fail()
    optimizer.step()
    optimizer.zero_grad()
    if is_failing and place == "after step":
        fail()
    if place == "after step":
        dist.all_reduce(torch.zeros(3))


def train(place, way, mode, width):
    is_sharded = mode == "reduce_scatter"
    fields = {"use_distributed_optimizer": is_sharded, "overlap_param_gather": is_sharded, "num_buckets": 2}
    ddp = mb.DistributedDataParallel(Net(width), mb.DistributedDataParallelConfig(**fields))
    optimizer = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    try:
        for step in range(4):
            if way == "block":
                with ddp.step():
                    take_step(ddp, optimizer, width, place if step == 2 else "")
            else:
                take_step(ddp, optimizer, width, place if step == 2 else "")
    finally:
        if way in ("detach", "destroy"):
            ddp.detach()
        if way == "destroy":
            dist.destroy_process_group()


def main(place, way, mode, size):
    dist.init_process_group("gloo")
    if way not in ("dropped", "caught"):
        train(place, way, mode, WIDTHS[size])
        return
    try:
        train(place, way, mode, WIDTHS[size])
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if way == "dropped":
        gc.collect()  # the wrapper goes here, otherwise at the end of the program
    print("Traceback is lost:", failure)
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
