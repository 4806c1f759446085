"""What ``reduction_order="rank"`` costs: two wrappers of each rank, one with each order, whose steps are timed in turn.

    OMP_NUM_THREADS=1 python tests/benchmarks/sum_order.py --ranks 4

Prints the median of the ratios of the seconds, rank over backend, with its quartiles, and those of the median step.
"""

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from against_commit import Gpt

import megabucket as mb

STEPS = 4  # a turn
CASES = list(itertools.product(("all-reduce", "sharded"), ("sockets", "same host"), ("no norm", "clipped")))


def make_step(case: tuple[str, str, str], order: str):
    mode, path, norm = case
    torch.manual_seed(0)
    model, batch = Gpt(), torch.randint(0, 2048, (4, 64))
    config = mb.DistributedDataParallelConfig(
        bucket_size=1 << 20,
        use_distributed_optimizer=mode == "sharded",
        read_peer_memory=path == "same host",
        reduction_order=order,
    )
    ddp = mb.DistributedDataParallel(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    clip_grad = 1e-3 if norm == "clipped" else 0.0
    optimizer = mb.DistributedOptimizer(optimizer, ddp, clip_grad=clip_grad, returns_grad_norm=clip_grad > 0)

    def step() -> None:
        ddp(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return ddp, step


def measure(rank: int, size: int, path: str, num_turns: int, only: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    for case in CASES:
        if only not in ", ".join(case):
            continue
        made = {order: make_step(case, order) for order in ("backend", "rank")}
        seconds: dict[str, list[float]] = {order: [] for order in made}
        for turn in range(num_turns + 1):
            for order in list(made)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                start_s = time.perf_counter()
                for _ in range(STEPS):
                    made[order][1]()
                dist.barrier()
                seconds[order].append(time.perf_counter() - start_s)
        for ddp, _ in made.values():
            ddp.detach()
        if rank == 0:
            ratios = [own / other for own, other in zip(seconds["rank"][1:], seconds["backend"][1:], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            step_ms = {order: 1e3 * statistics.median(found[1:]) / STEPS for order, found in seconds.items()}
            texts = [f"{', '.join(case):32} rank / backend {median:.3f} [{low:.3f}, {high:.3f}]"]
            texts += [f"{order} {ms:.1f} ms a step" for order, ms in step_ms.items()]
            print("; ".join(texts), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the name of the cases to run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rest = (arguments.ranks, f"{folder}/store", arguments.turns, arguments.only)
        ranks = [
            multiprocessing.get_context("spawn").Process(target=measure, args=(rank, *rest)) for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
