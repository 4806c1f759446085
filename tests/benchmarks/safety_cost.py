"""What the safety checks cost in a step: everything on (the default), each part switched off alone, and everything off.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/safety_cost.py [demo|tensors|tensors-64]

Interleaved step by step in one run, in changing order. Printed are medians of wall time and of the process's CPU time, and how
much more than "all off" they are, as the median of paired differences. On a machine that others use, CPU time is steadier.
``demo`` is the model of configs/bytegpt.yaml with its optimizer and batch, ``tensors`` has 2,000 small parameters and 8 samples
a rank and step, so almost no arithmetic; ``tensors-64`` has 64 samples.
"""

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megabucket as mb
from examples.bytegpt.config import load_demo_config
from examples.bytegpt.model import ByteGPT

WARMUPS = 5
REPETITIONS = {"demo": 400, "tensors": 150, "tensors-64": 150}

OFF: dict[str, Any] = {
    "fence": False,
    "check_model_changes": False,
    "nonfinite_gradients": "allow",
    "skipped_forwards": "allow",
    "heartbeat_s": None,
    "straggler_warning_s": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "all off": OFF,
    "all on (default)": {},
    "only the fence": {**OFF, "fence": True},
    "only the model check": {**OFF, "check_model_changes": True},
    "only the finite test": {**OFF, "nonfinite_gradients": "error"},
    "only heartbeats": {**OFF, "heartbeat_s": 1.0},
    "all off, again": OFF,  # what two equal candidates differ by: the noise of the figures
}


class ManyTensors(torch.nn.Module):
    """2,000 parameters, 10.5 M elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 102)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(102, 102) for _ in range(1000))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).mean(1, keepdim=True)
        for layer in self.layers:
            hidden = hidden + layer(hidden) * 0.01
        return hidden @ self.embedding.weight.t()


def demo_model() -> tuple[torch.nn.Module, tuple[int, int], dict[str, Any]]:
    run = load_demo_config(Path(__file__).parents[2] / "configs/bytegpt.yaml", [])
    shape = (run.program.train.microbatch_size, run.model.sequence_length)
    return ByteGPT(run.model, seed=0), shape, {"bucket_size": 200_000}


def many_tensors(num_samples: int = 8) -> tuple[torch.nn.Module, tuple[int, int], dict[str, Any]]:
    return ManyTensors(), (num_samples, 8), {"bucket_cap_mb": 25}


MODELS = {"demo": demo_model, "tensors": many_tensors, "tensors-64": partial(many_tensors, 64)}


def stepper(
    module: torch.nn.Module, shape: tuple[int, int], mode: str, **switches: Any
) -> Callable[[int], tuple[float, float]]:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=mode == "reduce-scatter", **switches)
    model = mb.DistributedDataParallel(module, config)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), model, clip_grad=1.0)

    def step(index: int) -> tuple[float, float]:
        tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(97 * index + dist.get_rank()))
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        output = model(tokens)
        torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, : output.shape[1]].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s

    return step


def main(name: str, mode: str) -> None:
    torch.manual_seed(0)
    module, shape, sizes = MODELS[name]()
    steps = {label: stepper(copy.deepcopy(module), shape, mode, **sizes, **off) for label, off in VARIANTS.items()}
    samples: dict[str, list[tuple[float, float]]] = {label: [] for label in steps}
    order, shuffled = list(steps), random.Random(0)
    for index in range(WARMUPS + REPETITIONS[name]):
        shuffled.shuffle(order)
        for label in order:
            sample = steps[label](index)
            if index >= WARMUPS:
                samples[label].append(sample)
    if dist.get_rank() == 0:
        params = list(module.parameters())
        print(
            f"{name}, {mode}: {sum(p.numel() for p in params) / 1e6:.1f} M elements in {len(params)} parameters, "
            f"{dist.get_world_size()} ranks, {REPETITIONS[name]} interleaved steps, torch {torch.__version__}"
        )
        for label in samples:
            columns = (describe(samples, label, which) for which in range(2))
            print(f"  {label:<24}" + "   ".join(f"{unit} {text}" for unit, text in zip(("wall", "CPU"), columns, strict=True)))


def describe(samples: dict[str, list[tuple[float, float]]], label: str, which: int) -> str:
    """Return the median of one kind of time, and the quartiles of its paired differences to "all off"."""
    values, base = [[sample[which] for sample in samples[one]] for one in (label, "all off")]
    text = f"{statistics.median(values) * 1e3:7.2f} ms"
    if label == "all off":
        return f"{text:<42}"
    percent = [100 * (value / off - 1) for value, off in zip(values, base, strict=True)]
    low, median, high = statistics.quantiles(percent, n=4)
    of_medians = 100 * (statistics.median(values) / statistics.median(base) - 1)
    return f"{text} {median:+6.2f} % ({low:+6.2f} to {high:+6.2f}), medians {of_medians:+6.2f} %"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for model_name in sys.argv[1:] or ["demo", "tensors"]:
        for mode_name in ("all-reduce", "reduce-scatter"):
            main(model_name, mode_name)
    dist.destroy_process_group()
