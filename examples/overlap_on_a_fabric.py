"""How much communication each system hides behind backward, measured on one machine over an emulated link.

torchrun --standalone --nproc-per-node 2 examples/overlap_on_a_fabric.py

The fabric takes time but moves no data (``moves_data=False``), so communication uses none of the cores that compute, as on a
machine with a network card. The gradients are therefore wrong; only the times mean something.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megabucket as mb
from megabucket.testing import EmulatedFabric

LAYERS, WIDTH, BATCH = 12, 384, 96
ROUNDS = 12
FABRIC = EmulatedFabric(latency_s=2e-4, bytes_per_s=2.5e8, moves_data=False)


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)))


def ours(**config: Any) -> torch.nn.Module:
    return mb.DistributedDataParallel(make_module(), mb.DistributedDataParallelConfig(bucket_cap_mb=1, **config))


def main() -> None:
    FABRIC.init_process_group()
    systems: dict[str, torch.nn.Module] = {
        "no communication at all": make_module(),
        "torch DDP, buckets of 1 MiB": TorchDDP(make_module(), bucket_cap_mb=1, gradient_as_bucket_view=True),
        "megabucket, buckets of 1 MiB": ours(),
        "megabucket, overlap off": ours(overlap_grad_reduce=False),
    }
    inputs = torch.randn(BATCH, WIDTH)
    steps = {name: stepper(module, inputs) for name, module in systems.items()}
    for step in steps.values():  # torch DDP rebuilds its buckets after the first step
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS):  # in turn, so that a slow moment of the machine hits all of them
        for name, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start_s)
    if dist.get_rank() == 0:
        report(seconds, sum(param.numel() * 4 for param in make_module().parameters()))
    dist.barrier()
    dist.destroy_process_group()


def stepper(module: torch.nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def step() -> None:
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def report(seconds: dict[str, list[float]], gradient_bytes: int) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    compute_s = medians["no communication at all"]
    wire_s = gradient_bytes / FABRIC.bytes_per_s  # an all-reduce between two ranks sends every byte once
    print(f"{gradient_bytes / 1e6:.1f} MB of gradients, at least {wire_s * 1e3:.0f} ms on the wire")
    for name, step_s in medians.items():
        exposed_s = max(step_s - compute_s, 0.0)
        print(f"  {name:<30} {step_s * 1e3:6.1f} ms a step, {exposed_s * 1e3:5.1f} ms exposed")


if __name__ == "__main__":
    assert "RANK" in os.environ, __doc__
    main()
