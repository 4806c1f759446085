"""What collectives over gloo take: torch's own, and the port's for the same result. Paired, in changing order.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/gloo_cost.py

All of ``reduce_scatter``, ``all_gather`` and ``all_reduce``, or those that are named. "sent" goes through sockets, "copied" is
what the port does where processes may copy from each other's memory, here whatever the size. Times of a call and its wait, CPU
time of one process, and how long the launch keeps the caller, all in milliseconds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megabucket.comm import (
    AllGather,
    AllReduce,
    Communicator,
    ReduceScatter,
    discover_communicator,
    samehost,
    with_same_host_copies,
)

SIZES_KIB = (4, 16, 64, 256, 1024, 4096, 16384, 65536)

Start = Callable[[], Callable[[], object]]  # launches, and returns what waits


class Cost(NamedTuple):
    """Of one call."""

    wall_s: float
    cpu_s: float
    launch_s: float


def candidates(kind: str, full: torch.Tensor, sender: Communicator, copier: Communicator) -> dict[str, Start]:
    """Return how torch and how the port do one kind of collective on a buffer of one row for each rank."""
    flat, own = full.view(-1), full[dist.get_rank()]
    elsewhere = torch.zeros_like(own)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    torch_start: Start
    if kind == "reduce_scatter":
        torch_start = lambda: scatter(elsewhere, flat, async_op=True).wait  # noqa: E731
        calls = [ReduceScatter(own, flat)]
    elif kind == "all_gather":
        torch_start = lambda: gather(flat, own, async_op=True).wait  # noqa: E731
        calls = [AllGather(flat, own)]
    else:
        torch_start = lambda: dist.all_reduce(flat, async_op=True).wait  # noqa: E731
        calls = [AllReduce(flat)]
    sent, copied = sender.prepare(calls), copier.prepare(calls)
    return {
        "torch": torch_start,
        "sent": lambda: sender.launch(sent, label=kind).wait,
        "copied": lambda: copier.launch(copied, label=kind).wait,
    }


def timed(start: Start) -> Cost:
    """Time one call, from a barrier on."""
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    wait = start()
    launch_s = time.perf_counter() - start_s
    wait()
    return Cost(time.perf_counter() - start_s, time.process_time() - start_cpu_s, launch_s)


def measure(kind: str, size_kib: int, sender: Communicator, copier: Communicator) -> None:
    """Print one line."""
    num_ranks = dist.get_world_size()
    full = torch.zeros(num_ranks, size_kib * 256 // num_ranks)
    starts = candidates(kind, full, sender, copier)
    costs: dict[str, list[Cost]] = {name: [] for name in starts}
    for index in range(62 if size_kib <= 1024 else 22):
        names = list(starts)
        for name in names[index % 3 :] + names[: index % 3]:
            cost = timed(starts[name])
            if index >= 2:
                costs[name].append(cost)
    if dist.get_rank() == 0:
        texts = [text_of(name, found, costs["torch"]) for name, found in costs.items()]
        print(f"{num_ranks} ranks {kind:<14} {size_kib:>6} KiB: {'; '.join(texts)}", flush=True)


def text_of(name: str, found: list[Cost], torchs: list[Cost]) -> str:
    """Return medians in milliseconds, and those of the ratios to what torch took in the same turn."""
    wall, cpu, launch = (statistics.median(cost[which] for cost in found) * 1e3 for which in (0, 1, 2))
    text = f"{name} {wall:.2f} ({cpu:.2f} CPU, launch {launch:.2f})"
    if name == "torch":
        return text
    ratios = [
        statistics.median(cost[i] / torch_cost[i] for cost, torch_cost in zip(found, torchs, strict=True)) for i in (0, 1)
    ]
    return f"{text} = {ratios[0]:.2f} ({ratios[1]:.2f} CPU)"


if __name__ == "__main__":
    torch.set_num_threads(1)
    samehost.LEAST_BYTES = 0
    dist.init_process_group("gloo")
    over_sockets = discover_communicator(None)
    with_copies = with_same_host_copies(discover_communicator(None), torch.device("cpu"))
    for chosen in sys.argv[1:] or ["reduce_scatter", "all_gather", "all_reduce"]:
        for chosen_kib in SIZES_KIB:
            measure(chosen, chosen_kib, over_sockets, with_copies)
    with_copies.close()
    over_sockets.close()
    dist.barrier()
    dist.destroy_process_group()
