"""How well a step is predicted: models x links x plans x modes on the emulated fabric, measured through the real wrapper.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/prediction.py [--fabric timing,data,gloo]

Modules sleep for known times in forward and backward and have real parameters, so that computing burns no CPU and overlap is
that of the schedule, not of the cores. What is predicted knows the workload as profiled without any collective, the latency and
bandwidth of the fabric itself (gloo: a calibrated table), and the host costs as measured on two plans: a single bucket, and one
for each tensor. ``--read FILE`` prints the figures of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import megabucket
from megabucket.comm import AllReduce, Communicator, LocalCommunicator, discover_communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.measure.calibrate import CalibrationPlan, measure_link, pipelined_link
from megabucket.measure.collectives import meeting, slowest
from megabucket.measure.host import host_costs, optimizer_s, time_phases
from megabucket.measure.profile import WorkloadProfiler, choose_rank
from megabucket.measure.profile_steps import WorkloadProfile
from megabucket.measure.ranks import Ranks
from megabucket.optim import DistributedOptimizer
from megabucket.planning.candidates import DEFAULT, Comparison, decide
from megabucket.planning.cuts import plan_of_layout
from megabucket.planning.links import Link, MeasuredLink, RingLink
from megabucket.planning.partition import optimal_plan
from megabucket.planning.simulate import FENCE, GRAD_NORM, Mode, simulate_step_s
from megabucket.planning.workload import Workload
from megabucket.testing import EmulatedFabric
from megabucket.trace import CollectiveKind

MS = 1e-3
Row = tuple[int, float, float]  # elements, seconds of forward, seconds of backward

LINKS = {
    "fast": (50e-6, 2e9),
    "balanced": (100e-6, 2e8),
    "latency": (1.5e-3, 1e9),
    "slow": (300e-6, 1e8),
}
GLOO = "loopback"
CALM = 0.03


def models() -> dict[str, list[Row]]:
    return {
        "uniform": [(65_536, 0.5 * MS, 1.0 * MS)] * 16,
        "big embedding first": [(600_000, 0.1 * MS, 0.2 * MS), *[(36_864, 0.7 * MS, 1.4 * MS)] * 12],
        "big head last": [*[(36_864, 0.6 * MS, 1.2 * MS)] * 12, (500_000, 1.0 * MS, 2.0 * MS)],
        "many tiny tensors": [(8_192, 0.1 * MS, 0.2 * MS)] * 80,
        "one dominant tensor": [
            *[(32_768, 0.6 * MS, 1.2 * MS)] * 7,
            (700_000, 1.0 * MS, 2.0 * MS),
            *[(32_768, 0.6 * MS, 1.2 * MS)] * 7,
        ],
    }


def scaled(rows: list[Row], scale: float) -> list[Row]:
    return [(numel, forward_s * scale, backward_s * scale) for numel, forward_s, backward_s in rows]


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, weight, is_slow, forward_s, backward_s):
        ctx.shape, ctx.is_slow, ctx.backward_s = weight.shape, is_slow, backward_s
        if is_slow():
            time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_slow():
            time.sleep(ctx.backward_s)
        return grad, torch.full(ctx.shape, 1e-3), None, None, None


class Layer(torch.nn.Module):
    def __init__(self, row: Row, is_slow: Callable[[], bool]) -> None:
        super().__init__()
        numel, self.forward_s, self.backward_s = row
        self.weight = torch.nn.Parameter(torch.zeros(numel))
        self.is_slow = is_slow

    def forward(self, value):
        return Slow.apply(value, self.weight, self.is_slow, self.forward_s, self.backward_s)


class Sleeper(torch.nn.Module):
    """Layers that sleep unless ``hurries``."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.hurries = False
        self.layers = torch.nn.ModuleList(Layer(row, lambda: not self.hurries) for row in rows)

    def forward(self, value):
        for layer in self.layers:
            value = layer(value)
        return value.sum()


@dataclass
class Arm:
    """A wrapped model with one plan."""

    name: str
    module: Sleeper
    ddp: DistributedDataParallel
    optimizer: DistributedOptimizer
    predicted_s: float = math.nan
    simulated_s: float = math.nan

    def step(self) -> None:
        with self.ddp.step():
            self.ddp(torch.zeros(1)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def hurry(self) -> None:
        self.module.hurries = True
        self.ddp(torch.zeros(1)).backward()
        self.module.hurries = False


def base_config(mode: Mode) -> DistributedDataParallelConfig:
    is_sharded = mode is Mode.REDUCE_SCATTER
    # Modules are alike on all ranks, and with timing only nothing could be made equal. What is predicted is communication
    # beside computing; ranks that read each other's memory do so while they wait.
    return DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded, overlap_param_gather=is_sharded, init_sync=False, read_peer_memory=False
    )


def make_arm(name: str, rows: list[Row], config: DistributedDataParallelConfig, communicator=None) -> Arm:
    module = Sleeper(rows)
    ddp = DistributedDataParallel(module, config, communicator=communicator)
    torch_optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-6, fused=True)
    return Arm(name, module, ddp, DistributedOptimizer(torch_optimizer, ddp, clip_grad=1.0))


def profile(rows: list[Row], mode: Mode, num_steps: int) -> Workload:
    """Return the workload as ``megabucket tune`` profiles it: alone, nothing sent, the slower rank."""
    config = base_config(mode).model_copy(update={"overlap_param_gather": False})
    arm = make_arm("profile", rows, config, LocalCommunicator())
    with WorkloadProfiler(arm.ddp, optimizer=arm.optimizer, warmup_steps=2) as profiler:
        for _ in range(num_steps + 2):
            with arm.ddp.no_sync():
                arm.ddp(torch.zeros(1)).backward()
            arm.ddp.start_grad_sync()
            with profiler.optimizer_step():
                arm.optimizer.step()
                arm.optimizer.zero_grad()
            profiler.end_step()
    own = profiler.profile()
    arm.ddp.detach()
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own.to_dict())
    return choose_rank([WorkloadProfile.from_dict(data) for data in everybody], "slowest").workload


def measure(arms: list[Arm], *, turns: int, steps: int, key: str) -> dict[str, list[float]]:
    """Return the seconds of each step of each arm, of the slower rank; arms in turn, in changing order."""
    meet = meeting(arms[0].ddp.communicator, device=torch.device("cpu"))
    own: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(turns):
        for arm in random.Random(f"{key} {turn}").sample(arms, len(arms)):
            meet()
            arm.step()  # fills the pipeline: its gathers reach into the next step
            start_s = time.perf_counter()
            for _ in range(steps):
                arm.step()
                stop_s = time.perf_counter()
                own[arm.name].append(stop_s - start_s)
                start_s = stop_s
            arm.ddp.finish_param_sync()
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return {name: [max(both) for both in zip(*(one[name] for one in everybody), strict=True)] for name in own}


def time_wake(communicator: Communicator, link: Link, num_bytes: int, *, device: torch.device) -> float:
    """Return how late a thread goes on that waits for a collective: seconds beyond its launch and the link. Collective call.

    Args:
        num_bytes: of the all-reduce; as large as a bucket, because what a back-end adds to a small one is hidden in a
            large one.
    """
    numel = max(num_bytes // 4, 1)
    probe = communicator.prepare([AllReduce(torch.zeros(numel, device=device))])
    meet = meeting(communicator, device=device)
    late_s = []
    link_s = link.collective_s(CollectiveKind.ALL_REDUCE, numel * 4, communicator.size)
    for _ in range(9):
        meet()
        handle = communicator.launch(probe, label="probe")
        launched_s = time.perf_counter()
        handle.wait()
        late_s.append(time.perf_counter() - launched_s - link_s)
    return max(0.0, *slowest([statistics.median(late_s)], communicator, device=device))


def run_cell(rows: list[Row], workload: Workload, link: Link, mode: Mode, options, key: str) -> dict:
    base, num_ranks, is_sharded = base_config(mode), dist.get_world_size(), mode is Mode.REDUCE_SCATTER
    numel = sum(row[0] for row in rows)
    names = [f"layers.{index}.weight" for index in range(len(rows))]
    arms = [
        make_arm("default", rows, base),
        make_arm("per tensor", rows, base.model_copy(update={"bucket_size": 1})),
    ]
    few, many = (time_phases(arm.ddp, arm.optimizer, arm.hurry, repetitions=options.phases) for arm in arms)
    with closing(discover_communicator(None)) as communicator:
        wake_s = time_wake(communicator, link, numel, device=torch.device("cpu"))
    host = host_costs(few, many, link, num_ranks=num_ranks, is_sharded=is_sharded, wake_s=wake_s)
    workload = replace(workload, optimizer_s=optimizer_s(few, many, host, link, num_ranks=num_ranks, is_sharded=is_sharded))
    best = optimal_plan(workload, link, host=host, num_ranks=num_ranks, mode=mode, overlap_param_gather=is_sharded)
    configs = {f"uniform 1/{part}": {"bucket_size": -(-numel // part)} for part in (2, 4, 8, 16)}
    configs["optimal cuts"] = {"bucket_cuts": best.cut_names(workload)}
    assert set(best.cut_names(workload)) <= set(names)
    arms += [make_arm(name, rows, base.model_copy(update=update)) for name, update in configs.items()]
    setting = {
        "num_ranks": num_ranks,
        "mode": mode,
        "overlap_param_gather": is_sharded,
        "step_collectives": (FENCE, GRAD_NORM) if is_sharded else (FENCE,),
    }
    for arm in arms:
        plan = plan_of_layout(workload, arm.ddp.layout)
        arm.predicted_s = simulate_step_s(workload, plan, link, host=host, **setting)
        arm.simulated_s = simulate_step_s(workload, plan, link, **setting)
    seconds = measure(arms, turns=options.turns, steps=options.steps, key=key)
    rows_out = [
        {
            "plan": arm.name,
            "buckets": arm.ddp.layout.num_buckets,
            "predicted_s": arm.predicted_s,
            "simulated_s": arm.simulated_s,
            "measured_s": statistics.median(seconds[arm.name]),
            "quartiles_s": statistics.quantiles(seconds[arm.name], n=4)[::2],
            "seconds": [round(value, 7) for value in seconds[arm.name]],
        }
        for arm in arms
    ]
    for arm in arms:
        arm.ddp.detach()
    return {"host": host.to_dict(), "compute_s": workload.compute_s, "optimizer_s": workload.optimizer_s, "plans": rows_out}


# Links #


@dataclass(frozen=True)
class SlowerOf:
    """Start the group and return what collectives cost: the two numbers of the fabric; with data and gloo a table, too."""

    link: RingLink
    table: MeasuredLink

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        return max(link.collective_s(kind, payload_bytes, num_ranks, dtype) for link in (self.link, self.table))

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> None:
        return None


def start(fabric: str, name: str, scale: float) -> Link:
    """Start the group and return what collectives cost: the fabric's own two numbers; with data and gloo a table, too."""
    if fabric == "gloo":
        dist.init_process_group("gloo")
        return table()
    ring = RingLink(latency_s=LINKS[name][0] * scale, bytes_per_s=LINKS[name][1] / scale)
    EmulatedFabric(ring.latency_s, ring.bytes_per_s, moves_data=fabric == "data").init_process_group()
    return SlowerOf(ring, table()) if fabric == "data" else ring


def table() -> MeasuredLink:
    """Return what collectives take when others are in flight, as ``megabucket tune`` measures it."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    calibration = measure_link(CalibrationPlan(max_bytes=4 * 2**20, repetitions=5), ranks)
    with closing(discover_communicator(None)) as communicator:
        return pipelined_link(calibration, communicator, device=ranks.device)


# Figures #


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def choice_of(plans: list[dict], how_many: int) -> dict:
    """Return what the tuner takes: of the best predicted few and the default, the best measured."""
    few = sorted(plans, key=lambda row: row["predicted_s"])[:how_many]
    if how_many > 1:
        few.append(next(row for row in plans if row["plan"] == "default"))
    return min(few, key=lambda row: row["measured_s"])


def against_uniform(cell: dict) -> Comparison:
    """Return the optimal cuts against the uniform size with the best median, paired step by step."""
    uniform = min((row for row in cell["plans"] if row["plan"].startswith("uniform")), key=lambda row: row["measured_s"])
    cut = next(row for row in cell["plans"] if row["plan"] == "optimal cuts")
    return decide({DEFAULT: uniform["seconds"], "cuts": cut["seconds"]}).comparisons[0]


def summarize(cells: list[dict], title: str) -> None:
    plans = [row for cell in cells for row in cell["plans"]]
    for name, label in (("predicted_s", "with host costs"), ("simulated_s", "link and workload only")):
        errors = [abs(row[name] / row["measured_s"] - 1) for row in plans]
        print(
            f"{title}, {label}: {len(errors)} cells, |error| median {statistics.median(errors):.1%}, "
            f"95th percentile {quantile(errors, 0.95):.1%}, worst {max(errors):.1%}"
        )
    for how_many, label in ((1, "best predicted"), (3, "best measured of the 3 best predicted and the default")):
        gaps = []
        for cell in cells:
            best_s = min(row["measured_s"] for row in cell["plans"])
            gaps.append((choice_of(cell["plans"], how_many)["measured_s"] / best_s - 1, cell))
        worst_gap, worst = max(gaps, key=lambda pair: pair[0])
        within = sum(gap <= 0.03 for gap, _ in gaps)
        where = f"{worst['model']}, {worst['link']}, {worst['mode']}"
        print(f"{title}, {label}: within 3 % of the best measured in {within}/{len(gaps)}, worst {worst_gap:.1%} ({where})")
    wins = [(against_uniform(cell), cell) for cell in cells]
    for (win, cell), label in (
        (max(wins, key=lambda pair: pair[0].gain), "most"),
        (min(wins, key=lambda pair: pair[0].gain), "least"),
    ):
        where = f"{cell['model']}, {cell['link']}, {cell['mode']}"
        span = f"{win.low:+.1%} to {win.high:+.1%}"
        print(f"{title}, optimal cuts faster than the best uniform size: {label} {win.gain:+.1%}, {span} ({where})")
    signs = [sum(win.low > 0 for win, _ in wins), sum(win.high < 0 for win, _ in wins)]
    counts = f"faster in {signs[0]}, slower in {signs[1]} of {len(wins)}"
    print(f"{title}, optimal cuts against the best uniform size, beyond noise: {counts}")
    default_gain = [
        next(row for row in cell["plans"] if row["plan"] == "default")["measured_s"] / choice_of(cell["plans"], 3)["measured_s"]
        for cell in cells
    ]
    print(
        f"{title}, choice against the default: median {statistics.median(default_gain):.2f} times, most {max(default_gain):.2f}"
    )


def prioritize(fabric: str) -> None:
    """Let the main thread run as soon as it wakes, as on a machine of its own: other programs are no error of a prediction.

    Not over plain gloo, where sharing the cores is what is measured.
    """
    if fabric == "gloo":
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    else:
        with suppress(OSError):  # a privilege
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fabric", default="timing,data,gloo")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--models", default=",".join(models()))
    parser.add_argument("--modes", default="all_reduce,reduce_scatter")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--phases", type=int, default=7)
    parser.add_argument("--scale", type=float, default=2.0, help="times of modules and links; the host's own stay")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", type=Path, help="measure those cells of a file again whose steps were disturbed")
    parser.add_argument("--read", type=Path, help="print the figures of a file that --out has written, and measure nothing")
    options = parser.parse_args()
    if options.read:
        report(read(options.read))
        return
    calm = {name_of(cell) for cell in calmest(read(options.again)) if spread(cell) <= CALM} if options.again else set()
    is_first = os.environ["RANK"] == "0"
    began_s = time.perf_counter()
    cells: list[dict] = []
    for fabric in options.fabric.split(","):
        for link_name in [GLOO] if fabric == "gloo" else options.links.split(","):
            wanted = [(model, mode) for model in options.models.split(",") for mode in options.modes.split(",")]
            wanted = [(model, mode) for model, mode in wanted if (fabric, link_name, model, mode) not in calm]
            if not wanted:
                continue
            prioritize(fabric)
            link = start(fabric, link_name, options.scale)
            for model_name, mode in wanted:
                rows, key = scaled(models()[model_name], options.scale), f"{fabric} {link_name} {model_name} {mode}"
                cell = run_cell(rows, profile(rows, Mode(mode), options.phases + 1), link, Mode(mode), options, key)
                cell = {"fabric": fabric, "link": link_name, "model": model_name, "mode": mode, **cell}
                cells.append(cell)
                if is_first:
                    show(cell)
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(cell) + "\n")
            dist.barrier()
            dist.destroy_process_group()
    if is_first:
        versions = f"megabucket {megabucket.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        print(f"{date.today()}, {versions}, ", end="")
        print(f"{os.cpu_count()} cores, {time.perf_counter() - began_s:.0f} s, load {os.getloadavg()}, {' '.join(sys.argv)}")
        report(cells)


def report(cells: list[dict]) -> None:
    """Print the figures of each fabric: of the median step, and of the lower quartile, which other programs disturb less."""
    num_measured, cells = len(cells), calmest(cells)
    disturbed = sum(spread(cell) > CALM for cell in cells)
    print(f"{num_measured} cells measured, {len(cells)} different; steps more than {CALM:.0%} apart in {disturbed} of those")
    for fabric in dict.fromkeys(cell["fabric"] for cell in cells):
        found = [cell for cell in cells if cell["fabric"] == fabric]
        summarize(found, f"{fabric}, median step")
        summarize([undisturbed(cell) for cell in found], f"{fabric}, lower quartile of the steps")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def name_of(cell: dict) -> tuple[str, ...]:
    return cell["fabric"], cell["link"], cell["model"], cell["mode"]


def spread(cell: dict) -> float:
    """Return how far steps of one plan are apart: the mean over the plans of the range between the quartiles, relative."""
    return statistics.fmean((row["quartiles_s"][1] - row["quartiles_s"][0]) / row["measured_s"] for row in cell["plans"])


def calmest(cells: list[dict]) -> list[dict]:
    """Return each cell once; of several attempts that with the least spread. What was predicted has no say in it."""
    best: dict[tuple[str, ...], dict] = {}
    for cell in cells:
        if name_of(cell) not in best or spread(cell) < spread(best[name_of(cell)]):
            best[name_of(cell)] = cell
    return list(best.values())


def undisturbed(cell: dict) -> dict:
    return {**cell, "plans": [{**row, "measured_s": row["quartiles_s"][0]} for row in cell["plans"]]}


def show(cell: dict) -> None:
    title = f"{cell['fabric']:<6} {cell['link']:<9} {cell['model']:<20} {cell['mode']:<14}"
    for row in cell["plans"]:
        error, bare = (row[name] / row["measured_s"] - 1 for name in ("predicted_s", "simulated_s"))
        low, high = row["quartiles_s"]
        print(
            f"{title} {row['plan']:<13} {row['buckets']:>3} buckets  predicted {row['predicted_s'] * 1e3:7.2f} ms  measured "
            f"{row['measured_s'] * 1e3:7.2f} ms ({low * 1e3:.2f}-{high * 1e3:.2f})  error {error:+6.1%}",
            f" without host {bare:+6.1%}",
            flush=True,
        )
    print("   " + "  ".join(f"{name} {value * 1e6:.4g} us" for name, value in cell["host"].items()), flush=True)


if __name__ == "__main__":
    main()
