"""One candidate of ``make gpu`` (tests/gpu/ready.py), measured in this process, beside its reference, in turn.

    python tests/benchmarks/gpu.py --list                                      # what there is, as JSON
    python tests/benchmarks/gpu.py gpt "torch DDP" --json gpu.json             # one GPU, world size 1
    python tests/benchmarks/gpu.py tensors "torch DDP" --ranks 2 --json x.json # two GPUs, NCCL
    python tests/benchmarks/gpu.py gpt "torch DDP" --device cpu --tiny         # the same code, small, to see that it runs

A pass over memory is timed by events, in turn with a plain copy of the same run. The step of a system is timed by the clock, in
turn with that of bare torch, and must give its losses. A peer that is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_systems import SYSTEMS, Setup, gpt, init_group, many_tensors
from paired import interleave

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.fused.kernels import add_weight_grad

LOSS_TOLERANCE = 0.1  # of what the loss changes by: bf16 products in another order may differ, a missing update may not
NUM_PROFILED_STEPS = 2


@dataclass
class Bench:
    """Where it runs and how large everything is."""

    device: torch.device
    is_tiny: bool
    repetitions: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the device's own seconds of one call; a CPU's by the clock."""
        if not self.is_cuda:
            start_s = time.perf_counter()
            work()
            return time.perf_counter() - start_s
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def clocked(self, work: Callable[[], object]) -> Callable[[], float]:
        """Return a callable that runs ``work`` to its end on the device and returns the seconds on the clock."""

        def run() -> float:
            self.wait()
            start_s = time.perf_counter()
            work()
            self.wait()
            return time.perf_counter() - start_s

        return run

    def beside(self, references: Mapping[str, Callable[[], object]], name: str, work: Callable[[], object]) -> dict[str, Any]:
        """Return the seconds of a piece of work and of its references, in turn, each run once before."""
        every = {**references, name: work}
        for one in every.values():
            one()
        self.wait()
        timed = {key: (lambda one=one: self.seconds(one)) for key, one in every.items()}
        return {"seconds": interleave(timed, repetitions=self.repetitions)}


# Passes over memory #

COPY = "copy, float32 (the measure)"


class Memory:
    """What a pass moves: flat tensors of one length."""

    def __init__(self, device: torch.device, numel: int) -> None:
        made = {"device": device}
        self.numel = numel
        self.wide, self.other = torch.ones(numel, **made), torch.zeros(numel, **made)
        self.narrow = torch.ones(numel, dtype=torch.bfloat16, **made)
        self.moments = [torch.zeros(numel, **made) for _ in range(2)]
        self.count = torch.ones((), **made)


def torch_adamw(memory: Memory) -> Callable[[], object]:
    lists = [[memory.wide], [memory.other], [memory.moments[0]], [memory.moments[1]], [], [memory.count]]
    adam = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    return lambda: torch._fused_adamw_(*lists, **adam)


def apex_adamw(memory: Memory) -> Callable[[], object]:
    """By apex's extension: the package of the name ``apex`` on PyPI is something else."""
    import amp_C

    noop = torch.zeros(1, dtype=torch.int32, device=memory.wide.device)
    lists = [[memory.other], [memory.wide], [memory.moments[0]], [memory.moments[1]]]
    return lambda: amp_C.multi_tensor_adam(65_536, noop, lists, 1e-4, 0.9, 0.95, 1e-8, 1, 1, 1, 0.1)


def transformer_engine_adamw(memory: Memory) -> Callable[[], object]:
    from transformer_engine.pytorch.optimizers import FusedAdam

    param = torch.nn.Parameter(memory.wide)
    optimizer = FusedAdam([param], lr=1e-4, adam_w_mode=True, weight_decay=0.1)

    def step() -> None:
        param.grad = memory.other
        optimizer.step()

    return step


# The bytes an element that a pass must move, and what makes it.
PASSES: dict[str, tuple[int, Callable[[Memory], Callable[[], object]]]] = {
    COPY: (8, lambda memory: lambda: memory.other.copy_(memory.wide)),
    "first microbatch: bf16 gradient stored in float32": (6, lambda memory: lambda: memory.other.copy_(memory.narrow)),
    "further microbatch: bf16 gradient added in float32": (10, lambda memory: lambda: memory.other.add_(memory.narrow)),
    "finite test: the largest magnitude": (4, lambda memory: lambda: torch.linalg.vector_norm(memory.other, torch.inf)),
    "division by the number of ranks": (8, lambda memory: lambda: memory.other.div_(1.0)),
    "norm in float64": (4, lambda memory: lambda: torch._foreach_norm([memory.other], dtype=torch.float64)),
    "clipping": (8, lambda memory: lambda: torch._foreach_mul_([memory.other], 1.0)),
    "flat fused AdamW, float32": (28, torch_adamw),
    "main parameters rounded to bf16": (6, lambda memory: lambda: memory.narrow.copy_(memory.wide)),
    "flat AdamW of amp_C": (28, apex_adamw),
    "flat AdamW of Transformer Engine": (28, transformer_engine_adamw),
}


def measure_pass(bench: Bench, name: str) -> dict[str, Any]:
    memory = Memory(bench.device, 1 << (16 if bench.is_tiny else 28))
    (copy_bytes, copy), (num_bytes, made) = PASSES[COPY], PASSES[name]
    found = bench.beside({"reference": copy(memory)}, "work", made(memory))
    return {
        **found,
        "bytes_per_element": num_bytes,
        "bytes": num_bytes * memory.numel,
        "reference_bytes": copy_bytes * memory.numel,
    }


WEIGHT_GRADS: dict[str, Callable[..., object]] = {
    "product, then added": lambda main_grad, inputs, grads: main_grad.add_(grads.t() @ inputs),
    "added by the product": lambda main_grad, inputs, grads: add_weight_grad(main_grad, inputs, grads, keep=1.0),
    "overwritten by the product": lambda main_grad, inputs, grads: add_weight_grad(main_grad, inputs, grads, keep=0.0),
}


def measure_weight_grad(bench: Bench, name: str) -> dict[str, Any]:
    """Compare a weight gradient that the product adds by itself with one that is made and then added."""
    rows, features = (64, 32) if bench.is_tiny else (8_192, 4_096)
    made = {"device": bench.device, "dtype": torch.bfloat16}
    inputs, grads = torch.randn(rows, features, **made), torch.randn(rows, features, **made)
    main_grad = torch.zeros(features, features, device=bench.device)
    reference, work = WEIGHT_GRADS["product, then added"], WEIGHT_GRADS[name]
    found = bench.beside(
        {"reference": lambda: reference(main_grad, inputs, grads)}, "work", lambda: work(main_grad, inputs, grads)
    )
    return {**found, "rows": rows, "features": features}


# Steps #


def setup_of(bench: Bench, section: str) -> Setup:
    return {"gpt": gpt, "tensors": many_tensors}[section](bench.device, is_tiny=bench.is_tiny)


def measure_system(bench: Bench, section: str, name: str) -> dict[str, Any]:
    """Return seconds of bare torch, of its arithmetic alone and of one system, in turn, and whether the losses are alike."""
    setup = setup_of(bench, section)
    steps = {"bare": SYSTEMS["bare torch"](setup), "system": SYSTEMS[name](setup)}
    losses = {key: [float(step.run()) for _ in range(4)] for key, step in steps.items()}
    work = {
        "compute": bench.clocked(steps["bare"].compute),
        "bare": bench.clocked(steps["bare"].run),
        "system": bench.clocked(steps["system"].run),
    }
    for candidate in work.values():
        candidate()
    seconds = interleave(work, repetitions=bench.repetitions)
    for step in steps.values():
        step.close()
    return {"model": setup.describe(), "seconds": seconds, "losses": losses, "are_alike": are_alike(losses)}


def are_alike(losses: Mapping[str, list[float]]) -> bool:
    """Whether a system has the losses of bare torch, step by step."""
    change = abs(losses["bare"][0] - losses["bare"][-1])
    pairs = zip(losses["bare"], losses["system"], strict=True)
    return change > 0 and all(abs(one - other) <= LOSS_TOLERANCE * change for one, other in pairs)


# A profile #

PROFILED = ["megabucket, all-reduce, DistributedOptimizer", "megabucket, reduce-scatter"]


@contextmanager
def ranges_of_buckets():
    """Give what each bucket launches and waits for a range of its own in the profile. The package knows nothing of it."""
    methods = {
        "start_grad_sync": "launch",
        "finish_grad_sync": "finish",
        "start_param_sync": "gather",
        "finish_param_sync": "wait",
    }
    originals = {name: getattr(_ParamAndGradBucketGroup, name) for name in methods}

    def ranged(original, text):
        def run(group, *arguments, **named):
            with torch.profiler.record_function(f"bucket {group.index}: {text}"):
                return original(group, *arguments, **named)

        return run

    for name, text in methods.items():
        setattr(_ParamAndGradBucketGroup, name, ranged(originals[name], text))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(_ParamAndGradBucketGroup, name, original)


def profile_system(bench: Bench, name: str, trace: Path | None) -> dict[str, Any]:
    """Write the trace of some steps of the GPT; return what the host and the device spent in the ranges of the buckets."""
    setup = setup_of(bench, "gpt")
    step = SYSTEMS[name](setup)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * bench.is_cuda
    for _ in range(3):
        step.run()
    bench.wait()
    with ranges_of_buckets(), torch.profiler.profile(activities=activities) as profiler:
        for number in range(NUM_PROFILED_STEPS):
            with torch.profiler.record_function(f"step {number}"):
                step.run()
        bench.wait()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    step.close()
    found = {}
    for event in profiler.key_averages():
        if event.key.startswith("bucket ") and event.cpu_time_total:
            device_us = getattr(event, "device_time_total", 0.0)
            found[event.key] = {"count": event.count, "host_ms": event.cpu_time_total / 1e3, "device_ms": device_us / 1e3}
    return {"model": setup.describe(), "num_steps": NUM_PROFILED_STEPS, "ranges": found}


# One candidate #

SECTIONS: dict[str, list[str]] = {
    "gpt": list(SYSTEMS),
    "tensors": list(SYSTEMS),
    "profile": PROFILED,
    "passes": list(PASSES),
    "weight_grads": list(WEIGHT_GRADS),
}


def measure(bench: Bench, section: str, name: str, trace: Path | None) -> dict[str, Any]:
    try:
        if section == "profile":
            return profile_system(bench, name, trace)
        if section == "passes":
            return measure_pass(bench, name)
        if section == "weight_grads":
            return measure_weight_grad(bench, name)
        return measure_system(bench, section, name)
    except ImportError as error:  # a peer that is not installed
        return {"left_out": str(error)}


def measure_on_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Measure as one of several ranks; the first one writes what it has found."""
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    if arguments.ranks > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        init_group(device, folder, rank=rank, size=arguments.ranks)
    bench = Bench(device, arguments.tiny, arguments.repetitions)
    found = measure(bench, arguments.section, arguments.name, arguments.trace if rank == 0 else None)
    if rank == 0:
        arguments.json.write_text(json.dumps(found), encoding="utf-8")
    if arguments.ranks > 1:
        dist.destroy_process_group()


def facts() -> dict[str, Any]:
    """Return what this machine and this torch are, and what can be measured on it."""
    has_cuda = torch.cuda.is_available()
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_cuda else [],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
        "sections": SECTIONS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("section", nargs="?", choices=list(SECTIONS))
    parser.add_argument("name", nargs="?", help="one of what --list names")
    parser.add_argument("--list", action="store_true", help="print as JSON what there is, and end")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each on a GPU of its own")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", type=Path, default=os.devnull, help="write every measured time into this file")
    parser.add_argument("--trace", type=Path, help="write the profile into this file, for chrome://tracing")
    arguments = parser.parse_args()
    if arguments.list:
        print(json.dumps(facts()))
        return
    if arguments.section is None or arguments.name not in SECTIONS[arguments.section]:
        parser.error(f"{arguments.section} {arguments.name}: not among what --list names")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("on a CPU the models are too large; add --tiny, which measures nothing worth keeping")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.ranks == 1:
            measure_on_rank(0, arguments, folder)
        else:
            torch.multiprocessing.spawn(measure_on_rank, args=(arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
