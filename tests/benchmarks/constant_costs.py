"""Costs that must not grow: per hook, per parameter of a layout, per import, per plan.

    make bench-costs

prints medians and ratios; nothing is asserted about time.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from paired import interleave, ratio, timed

import megabucket as mb
from megabucket.ddp.hooks import grad_hooks
from megabucket.ddp.wrap import model_entries
from megabucket.layout import ParamSpec, build_layout, plain_identity

ROOT = Path(__file__).parents[2]
REPETITIONS = 15


def hook_cost_s(num_params: int) -> Callable[[], float]:
    """Return a callable giving seconds per hook for a model of ``num_params`` equal parameters in one bucket group."""
    params = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(16)) for _ in range(num_params)])
    ddp = mb.DistributedDataParallel(params, mb.DistributedDataParallelConfig())
    (group,) = ddp.bucket_groups
    hooks = grad_hooks(ddp.sync, group)
    grads = [torch.ones(16) for _ in range(num_params)]
    rounds = max(1, 5_000 // num_params)

    def measure() -> float:
        total_s = 0.0
        with ddp.no_sync():
            for _ in range(rounds):
                ddp.zero_grad()
                ddp.sync.backward = SimpleNamespace(is_taking=False)  # as at the first hook of a backward
                for slot, grad in zip(group.slots, grads, strict=True):
                    slot.param.grad = grad
                start_s = time.perf_counter()
                with torch.no_grad():  # as autograd has it
                    for hook, slot in zip(hooks, group.slots, strict=True):
                        hook(slot.param)
                group.end_backward()
                total_s += time.perf_counter() - start_s
                ddp.sync.backward = None
        return total_s / (rounds * num_params)

    return measure


def layout_of(num_params: int) -> None:
    build_layout([ParamSpec(f"p{i}", (95, 95)) for i in range(num_params)], mb.DistributedDataParallelConfig(), dp_size=8)


def run_python(*arguments: str) -> Callable[[], float]:
    return timed(lambda: subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL))


def report(title: str, seconds: dict[str, list[float]], unit: str = "ms") -> None:
    scale = {"us": 1e6, "ms": 1e3}[unit]
    print(f"\n{title}")
    for name, values in seconds.items():
        print(f"  {name:<28}{statistics.median(values) * scale:10.3f} {unit}   (best {min(values) * scale:.3f})")


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {REPETITIONS} interleaved repetitions, medians")

    hooks = interleave({f"{n} parameters": hook_cost_s(n) for n in (10, 5_000)}, repetitions=REPETITIONS)
    report("one hook, gradient stored and counted", hooks, "us")
    print("  5000 / 10: {:.2f} (quartiles {:.2f} to {:.2f})".format(*ratio(hooks, "5000 parameters", "10 parameters")))

    layouts = interleave({f"{n} parameters": timed(lambda n=n: layout_of(n)) for n in (25_000, 100_000)}, repetitions=5)
    report("layout", layouts)
    print(
        "  100000 / 25000: {:.2f} (quartiles {:.2f} to {:.2f}); 4 is linear".format(
            *ratio(layouts, "100000 parameters", "25000 parameters")
        )
    )

    linears = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(500))
    config = mb.DistributedDataParallelConfig()
    identities = {name: plain_identity(name, tuple(param.shape)) for name, param in linears.named_parameters()}
    agreement = interleave(
        {
            "entries of 1000 parameters": timed(lambda: model_entries(linears, config, identities)),
            "named_parameters() alone": timed(lambda: list(linears.named_parameters())),
        },
        repetitions=200,
    )
    report("agreement when wrapping, beside its exchange", agreement)

    commands = interleave(
        {
            "python -c pass": run_python("-c", "pass"),
            "python -c import megabucket": run_python("-c", "import megabucket"),
            "plan llama3-70b, dp 512": run_python("-m", "megabucket", "plan", "-c", "llama3-70b", "--dp-size", "512"),
        },
        repetitions=5,
    )
    report("processes, interpreter start included", commands)


if __name__ == "__main__":
    main()
