"""One GPU, world size 1: what the wrapper and the optimizer cost, beside bare torch and whatever peers are installed.

    make bench-gpu                                               # fits ten minutes on one GPU
    python tests/benchmarks/gpu.py passes gpt --json gpu.json    # some of it: passes, gpt, tensors
    python tests/benchmarks/gpu.py --device cpu --tiny           # the same code, small, to see that it runs

Passes are timed by events, in turn, and compared with the bandwidth of a plain copy measured in the same run. Steps are timed
by the clock, each system in turn with bare torch, and must give its losses. Peers that cannot be imported are left out by name.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_systems import SYSTEMS, Setup, Step, gpt, many_tensors
from paired import interleave, ratio

from megabucket.fused.kernels import add_weight_grad

LOSS_TOLERANCE = 0.1  # of what the loss changes by: bf16 products in another order may differ, a missing update may not


@dataclass
class Bench:
    """How large everything is, and what was measured."""

    device: torch.device
    is_tiny: bool
    repetitions: int
    results: dict[str, Any] = field(default_factory=dict)

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


# Passes over memory #


def passes(bench: Bench) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return each pass with the bytes it must move."""
    numel = 1 << (16 if bench.is_tiny else 28)
    made = {"device": bench.device}
    wide, other = torch.ones(numel, **made), torch.zeros(numel, **made)
    narrow = torch.ones(numel, dtype=torch.bfloat16, **made)
    moments = [torch.zeros(numel, **made) for _ in range(2)]
    count = torch.ones((), **made)
    adam = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}

    def step() -> None:
        torch._fused_adamw_([wide], [other], [moments[0]], [moments[1]], [], [count], **adam)

    return {
        "copy, float32 (the measure)": (8 * numel, lambda: other.copy_(wide)),
        "first microbatch: bf16 gradient stored in float32": (6 * numel, lambda: other.copy_(narrow)),
        "further microbatch: bf16 gradient added in float32": (10 * numel, lambda: other.add_(narrow)),
        "finite test: the largest magnitude": (4 * numel, lambda: torch.linalg.vector_norm(other, torch.inf)),
        "division by the number of ranks": (8 * numel, lambda: other.div_(1.0)),
        "norm in float64": (4 * numel, lambda: torch._foreach_norm([other], dtype=torch.float64)),
        "clipping": (8 * numel, lambda: torch._foreach_mul_([other], 1.0)),
        "flat fused AdamW, float32": (28 * numel, step),
        "main parameters rounded to bf16": (6 * numel, lambda: narrow.copy_(wide)),
        **peer_adams(wide, other, moments, numel),
    }


def peer_adams(
    params: torch.Tensor, grads: torch.Tensor, moments: list[torch.Tensor], numel: int
) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the flat updates of peers that are installed: apex by its extension, never by ``import apex``, and TE."""
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    if not params.is_cuda:
        return found
    try:
        import amp_C

        noop = torch.zeros(1, dtype=torch.int32, device=params.device)
        lists = [[grads], [params], [moments[0]], [moments[1]]]
        found["flat AdamW of amp_C"] = (
            28 * numel,
            lambda: amp_C.multi_tensor_adam(65_536, noop, lists, 1e-4, 0.9, 0.95, 1e-8, 1, 1, 1, 0.1),
        )
    except ImportError as error:
        print(f"left out: amp_C ({error})")
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam

        param = torch.nn.Parameter(params)
        optimizer = FusedAdam([param], lr=1e-4, adam_w_mode=True, weight_decay=0.1)

        def step() -> None:
            param.grad = grads
            optimizer.step()

        found["flat AdamW of Transformer Engine"] = (28 * numel, step)
    except Exception as error:  # an extension that does not fit this torch raises whatever it likes
        print(f"left out: Transformer Engine ({type(error).__name__}: {error})")
    return found


def runs(bench: Bench, name: str, work: Callable[[], object]) -> bool:
    """Whether a candidate runs; one that raises is left out by name, and the others are measured."""
    try:
        work()
        bench.wait()
    except Exception as error:
        print(f"left out: {name} ({type(error).__name__}: {error})")
        return False
    return True


def show_passes(bench: Bench) -> None:
    candidates = {name: passed for name, passed in passes(bench).items() if runs(bench, name, passed[1])}
    names = list(candidates)
    timed = {name: (lambda work=work: bench.seconds(work)) for name, (_, work) in candidates.items()}
    seconds = interleave(timed, repetitions=bench.repetitions)
    rates = {name: candidates[name][0] / statistics.median(seconds[name]) for name in names}
    print("\n| pass | bytes an element | ms | GB/s | of the copy |\n|---|---|---|---|---|")
    numel = candidates[names[0]][0] // 8
    for name in names:
        ms, share = statistics.median(seconds[name]) * 1e3, rates[name] / rates[names[0]]
        print(f"| {name} | {candidates[name][0] // numel} | {ms:.3f} | {rates[name] / 1e9:.0f} | {share:.0%} |")
    bench.results["passes"] = {name: {"bytes": candidates[name][0], "seconds": seconds[name]} for name in names}
    show_weight_grads(bench)


def show_weight_grads(bench: Bench) -> None:
    """Compare a weight gradient that the product adds by itself with one that is made and then added."""
    rows, features = (64, 32) if bench.is_tiny else (8_192, 4_096)
    made = {"device": bench.device, "dtype": torch.bfloat16}
    inputs, grads = torch.randn(rows, features, **made), torch.randn(rows, features, **made)
    main_grad = torch.zeros(features, features, device=bench.device)
    candidates = {
        "product, then added": lambda: main_grad.add_(grads.t() @ inputs),
        "added by the product": lambda: add_weight_grad(main_grad, inputs, grads, keep=1.0),
        "overwritten by the product": lambda: add_weight_grad(main_grad, inputs, grads, keep=0.0),
    }
    for work in candidates.values():
        work()
    timed = {name: (lambda work=work: bench.seconds(work)) for name, work in candidates.items()}
    seconds = interleave(timed, repetitions=bench.repetitions)
    print(f"\n| weight gradient of {features} x {features}, {rows} rows, bf16 | ms |\n|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values) * 1e3:.3f} |")
    bench.results["weight_grads"] = seconds


# Steps #


def measure_pair(bench: Bench, setup: Setup, name: str) -> dict[str, Any] | str:
    """Return seconds of bare torch, of its arithmetic alone, and of one system, all in turn; or why it is left out."""
    steps: dict[str, Step] = {}
    try:
        steps = {"bare": SYSTEMS["bare torch"](setup), "system": SYSTEMS[name](setup)}
        losses = {key: [float(step.run()) for _ in range(4)] for key, step in steps.items()}
        work: Mapping[str, Callable[[], float]] = {
            "compute": bench.clocked(steps["bare"].compute),
            "bare": bench.clocked(steps["bare"].run),
            "system": bench.clocked(steps["system"].run),
        }
        for candidate in work.values():
            candidate()
        if bench.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        return {"seconds": interleave(work, repetitions=bench.repetitions), "losses": losses}
    except Exception as error:  # a peer may fail in any way, and the others are to be measured
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        for step in steps.values():
            step.close()
        steps.clear()
        gc.collect()
        if bench.is_cuda:
            torch.cuda.empty_cache()


def show_steps(bench: Bench, setup: Setup, title: str) -> None:
    print(f"\n**{title}**: {setup.describe()}")
    head = ("system", "step ms", "bare torch ms", "over bare (quartiles)", "arithmetic alone ms", "losses")
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    rows: dict[str, Any] = {}
    for name in SYSTEMS:
        found = rows[name] = measure_pair(bench, setup, name)
        if isinstance(found, str):
            print(f"| {name} | left out: {found} | | | | |", flush=True)
            continue
        seconds = found["seconds"]
        median, low, high = ratio(seconds, "system", "bare")
        ms = {key: statistics.median(values) * 1e3 for key, values in seconds.items()}
        alike = are_alike(found["losses"])
        over = f"{median - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
        columns = [f"{ms['system']:.2f}", f"{ms['bare']:.2f}", over, f"{ms['compute']:.2f}", "alike" if alike else "DIFFER"]
        print(f"| {name} | {' | '.join(columns)} |", flush=True)
    bench.results[title] = rows
    show_rest(rows)


def are_alike(losses: Mapping[str, list[float]]) -> bool:
    """Whether a system has the losses of bare torch, step by step."""
    change = abs(losses["bare"][0] - losses["bare"][-1])
    pairs = zip(losses["bare"], losses["system"], strict=True)
    return change > 0 and all(abs(one - other) <= LOSS_TOLERANCE * change for one, other in pairs)


def show_rest(rows: Mapping[str, Any]) -> None:
    """Print what each system adds to the arithmetic, beside torch DDP's."""
    rests = {
        name: statistics.median(a - b for a, b in zip(row["seconds"]["system"], row["seconds"]["compute"], strict=True))
        for name, row in rows.items()
        if not isinstance(row, str)
    }
    reference = rests.get("torch DDP")
    print("\n| system | beside the arithmetic, ms | torch DDP's over it |\n|---|---|---|")
    for name, rest_s in rests.items():
        over = "-" if reference is None or rest_s <= 0 else f"{reference / rest_s:.2f}x"
        print(f"| {name} | {rest_s * 1e3:.2f} | {over} |")


def show_gpt(bench: Bench) -> None:
    show_steps(bench, gpt(bench.device, is_tiny=bench.is_tiny), "GPT")


def show_tensors(bench: Bench) -> None:
    show_steps(bench, many_tensors(bench.device, is_tiny=bench.is_tiny), "Many small tensors")


SECTIONS: dict[str, Callable[[Bench], None]] = {"passes": show_passes, "gpt": show_gpt, "tensors": show_tensors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"{', '.join(SECTIONS)}; all of them when none is named")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", help="write every measured time into this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"bench-gpu: torch {torch.__version__} finds no CUDA device here, so there is nothing to measure and no figure is "
            "made up. Run it on a machine with an NVIDIA GPU and a CUDA build of torch; `--device cpu --tiny` runs the same "
            "code small, to see that it works."
        )
    if arguments.device == "cpu" and not arguments.tiny:
        sys.exit("bench-gpu: on a CPU the models are too large; add --tiny, which measures nothing worth keeping")
    bench = Bench(torch.device(arguments.device), arguments.tiny, arguments.repetitions)
    name = torch.cuda.get_device_name() if bench.is_cuda else "CPU: these times mean nothing"
    print(f"{name}, torch {torch.__version__}, {bench.repetitions} interleaved repetitions, medians")
    for section in arguments.sections or SECTIONS:
        SECTIONS[section](bench)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"device": name, "torch": torch.__version__, **bench.results}, file, indent=1)


if __name__ == "__main__":
    main()
