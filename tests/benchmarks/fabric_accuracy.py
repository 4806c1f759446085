"""How late collectives of the emulated fabric complete, alone and while the ranks compute.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/fabric_accuracy.py [latency_s] [bytes_per_s]

Lateness is measured from outside: from the last launch over the ranks to the completion on the slowest rank, by the clock they
share, less what the link should take. ``waiting``: the caller waits. ``computing``: it multiplies matrices, which leaves
Python's lock alone, and a future says when the collective was done. ``python``: it runs Python code, which holds the lock.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megabucket.testing import EmulatedFabric, fabric_lateness

REPETITIONS = 40
SIZES_BYTES = [1024, 64 * 1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024, 16 * 1024 * 1024]


def wait(work: dist.Work) -> float:
    work.wait()
    return time.monotonic()


def meanwhile(act: Callable[[], object]) -> Callable[[dist.Work], float]:
    def wait_busily(work: dist.Work) -> float:
        stamps: list[float] = []
        work.get_future().add_done_callback(lambda _: stamps.append(time.monotonic()))
        while not stamps:
            act()
        work.wait()
        return stamps[0]

    return wait_busily


def count() -> int:
    return sum(range(20_000))


def lateness_s(tensor: torch.Tensor, fabric: EmulatedFabric, observe: Callable[[dist.Work], float]) -> tuple[list[float], int]:
    """Return the lateness of each repetition on the slowest rank, and how many waited for data."""
    size = dist.get_world_size()
    link_s = fabric.collective_s(ring_passes=2, payload_bytes=tensor.nbytes, num_ranks=size)
    spans = []
    num_slow = 0
    for _ in range(REPETITIONS):
        dist.barrier()
        fabric_lateness()
        launch_s = time.monotonic()
        spans.append((launch_s, observe(dist.all_reduce(tensor, async_op=True))))
        num_slow += fabric_lateness().num_slow_data
    everybody: list[list[tuple[float, float]]] = [[]] * size
    dist.all_gather_object(everybody, spans)
    late = []
    for parts in zip(*everybody, strict=True):
        launches, ends = zip(*parts, strict=True)
        late.append(max(ends) - max(launches) - link_s)
    return late, num_slow


def main() -> None:
    latency_s, bytes_per_s = (float(text) for text in (*sys.argv[1:3], *("1e-4", "5e8")[len(sys.argv) - 1 :]))
    matrix = torch.randn(192, 192)
    observers = {"waiting": wait, "computing": meanwhile(lambda: matrix @ matrix), "python": meanwhile(count)}
    for moves_data in (False, True):
        fabric = EmulatedFabric(latency_s, bytes_per_s, moves_data=moves_data)
        fabric.init_process_group()
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, {latency_s * 1e6:g} us, {bytes_per_s / 1e9:g} GB/s, ", end="")
            print("data moves" if moves_data else "timing only", "; ms late: median (95th percentile)", sep="")
            print(f"{'bytes':>10} {'link ms':>8}", *(f"{name:>20}" for name in observers))
        for num_bytes in SIZES_BYTES:
            cells = []
            for observe in observers.values():
                late, num_slow = lateness_s(torch.zeros(num_bytes // 4 + 1), fabric, observe)
                cells.append(f"{statistics.median(late) * 1e3:.2f} ({statistics.quantiles(late, n=20)[-1] * 1e3:.2f})")
                cells[-1] += f" {num_slow:>3}*" if num_slow else "     "
            if dist.get_rank() == 0:
                link_s = fabric.collective_s(ring_passes=2, payload_bytes=num_bytes, num_ranks=dist.get_world_size())
                print(f"{num_bytes:>10} {link_s * 1e3:>8.2f}", *(f"{cell:>20}" for cell in cells), flush=True)
        dist.barrier()
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(f"*: of {REPETITIONS} repetitions, those in which the first rank waited for data, not for the link")


if __name__ == "__main__":
    main()
