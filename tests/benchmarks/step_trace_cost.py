"""What the online figures cost in a step: ``step_traces=True`` beside ``False``, in CPU time and in wall time.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/step_trace_cost.py [demo|tensors] [steps]

Interleaved step by step in one run, in changing order; figures are medians of paired differences to "off", with the 95 %
interval of the median. "off, again" is the noise. CPU time counts all threads of a rank.
"""

import copy
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist
from safety_cost import MODELS, WARMUPS

import megabucket as mb

VARIANTS = {"off": False, "on": True, "off, again": False}


class Candidate:
    """One wrapped model with its optimizer."""

    def __init__(self, module: torch.nn.Module, mode: str, **fields: object) -> None:
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=mode == "reduce-scatter", **fields)
        self.model = mb.DistributedDataParallel(module, config)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.optimizer = mb.DistributedOptimizer(adamw, self.model, clip_grad=1.0)

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        """Return the seconds of CPU time and of wall time of one step."""
        dist.barrier()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        output = self.model(tokens)
        torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, : output.shape[1]].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - cpu_s, time.perf_counter() - wall_s


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Return the distribution-free 95 % confidence interval of the median, from order statistics."""
    ordered, n = sorted(values), len(values)
    distance = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - distance))], ordered[min(n - 1, int(n / 2 + distance))]


def main(name: str, mode: str, num_steps: int) -> None:
    torch.manual_seed(0)
    module, shape, sizes = MODELS[name]()
    sizes = {"bucket_size": 400_000} if name == "tensors" else sizes
    candidates = {
        label: Candidate(copy.deepcopy(module), mode, **sizes, step_traces=traces) for label, traces in VARIANTS.items()
    }
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in candidates}
    order, shuffled = list(candidates), random.Random(0)
    for index in range(WARMUPS + num_steps):
        tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(97 * index + dist.get_rank()))
        shuffled.shuffle(order)
        for label in order:
            elapsed = candidates[label].step(tokens)
            if index >= WARMUPS:
                seconds[label].append(elapsed)
    if dist.get_rank() == 0:
        num_buckets = candidates["on"].model.layout.num_buckets
        print(
            f"{name}, {mode}: {num_buckets} buckets, {dist.get_world_size()} ranks, {num_steps} steps of each, torch "
            f"{torch.__version__}"
        )
        report(seconds)


def report(seconds: dict[str, list[tuple[float, float]]]) -> None:
    for label, pairs in seconds.items():
        line = f"  {label:<12}"
        for position, what in enumerate(("CPU", "wall")):
            values, off = [pair[position] for pair in pairs], [pair[position] for pair in seconds["off"]]
            percent = [100 * (value / base - 1) for value, base in zip(values, off, strict=True)]
            low, high = interval_of_median(percent)
            middle = statistics.median(percent)
            line += f"   {what} {statistics.median(values) * 1e3:7.2f} ms {middle:+6.2f} % ({low:+.2f} to {high:+.2f})"
        print(line)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model_names = [word for word in sys.argv[1:] if word in MODELS] or list(MODELS)
    steps_asked = next((int(word) for word in sys.argv[1:] if word.isdecimal()), 300)
    for model_name in model_names:
        for mode_name in ("all-reduce", "reduce-scatter"):
            main(model_name, mode_name, steps_asked)
    dist.destroy_process_group()
