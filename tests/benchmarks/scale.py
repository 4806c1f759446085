"""What one rank pays at scale: 2 to 16,384 ranks, up to a million parameters. Counts and bytes are exact, times medians.

    python tests/benchmarks/scale.py                  # all of it, a few minutes
    python tests/benchmarks/scale.py layout plan      # some of it: layout, ranks, params, world, plan

Nothing is asserted about time. Times are those of the process, which others on the machine disturb less; only ``world`` takes
the time on the clock. ``ranks`` and ``params`` run the real wrapper and optimizer as one rank of many
(``tests/scale/one_of_many.py``), ``world`` runs all ranks in one process (``LoopbackWorld``), ``plan`` simulates.
"""

import argparse
import gc
import itertools
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import megabucket as mb
from megabucket.ddp.fence import Fence
from megabucket.ddp.hooks import grad_hooks
from megabucket.ddp.report import RankReport
from megabucket.errors import MegabucketError
from megabucket.layout import ParamSpec, build_layout
from megabucket.layout.segments import plan_segments
from megabucket.planning import load_config
from megabucket.planning.setting import setting_of, sweep_row
from megabucket.testing import ListRecorder, LoopbackWorld

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/scale"))

from one_of_many import OneOfMany  # noqa: E402 - found from here on only

RANKS = (2, 8, 64, 512, 1_024, 4_096, 16_384)
NUMEL, BUCKET_NUMEL = 64, 16_384  # multiples of the alignment and of every lcm(ranks, 128), so there is no padding
SHARDED = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=BUCKET_NUMEL)


def median(work: Callable[[], object], repeats: int) -> float:
    """Return seconds."""
    times = []
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return statistics.median(times)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as they come."""
    print(f"\n**{title}**\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in row)} |", flush=True)


# Layout #


def layout_row(num_params: int, ranks: int, repeats: int) -> list[object]:
    specs = [ParamSpec(f"layers.{i}.weight", (95, 95)) for i in range(num_params)]
    config = mb.DistributedDataParallelConfig()
    build_s = median(lambda: build_layout(specs, config, dp_size=ranks), repeats)
    gc.collect()
    tracemalloc.start()
    layout = build_layout(specs, config, dp_size=ranks)
    held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (buffer,) = layout.buffers
    groups = dict.fromkeys(buffer.params, 0)
    segments_s = median(lambda: plan_segments(buffer, groups, rank=ranks - 1, is_sharded=True), repeats)
    columns = [f"{build_s * 1e3:.0f}", f"{held_bytes / 2**20:.1f}", f"{peak_bytes / 2**20:.1f}", f"{segments_s * 1e3:.2f}"]
    return [num_params, ranks, layout.num_buckets, f"{buffer.padding_fraction:.2%}", *columns]


def show_layout(most_params: int) -> None:
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= most_params]
    rows = (layout_row(size, ranks, 5 if size < 100_000 else 3) for size in sizes for ranks in (2, 1_024, 16_384))
    head = ("parameters", "ranks", "buckets", "padding", "layout ms", "held MiB", "peak MiB", "shards of the last rank ms")
    table("Layout: 9,025 elements each, default bucket size", head, rows)


# One rank of many #


class Rank:
    """One rank of many, with a model of small parameters."""

    def __init__(self, num_params: int, ranks: int) -> None:
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(num_params)])
        self.recorder = ListRecorder(records_time=False)
        self.communicator = OneOfMany(size=ranks, recorder=self.recorder)
        start_s = time.process_time()
        self.ddp = mb.DistributedDataParallel(module, SHARDED, communicator=self.communicator)
        self.wrap_s = time.process_time() - start_s
        inner = torch.optim.AdamW(self.ddp.parameters(), fused=True)
        start_s = time.process_time()
        self.optimizer = mb.DistributedOptimizer(inner, self.ddp)
        self.optimizer_s = time.process_time() - start_s
        self.setup = list(self.recorder.collectives)
        groups = self.ddp.bucket_groups
        self.hooks = [pair for group in groups for pair in zip(grad_hooks(self.ddp.sync, group), group.params, strict=True)]
        self.grads = [torch.ones(NUMEL) for _ in self.hooks]

    def step_s(self) -> list[float]:
        """Run one step without a model's arithmetic; return the seconds of its hooks, finish, optimizer and zero_grad."""
        times = [time.process_time()]
        for (_, param), grad in zip(self.hooks, self.grads, strict=True):
            param.grad = grad
        self.ddp.sync.backward = SimpleNamespace(is_taking=False)  # as at the first hook of a backward
        self.recorder.launches.clear()
        times[0] = time.process_time()
        with torch.no_grad():  # as autograd has it
            for hook, param in self.hooks:
                hook(param)
        times.append(time.process_time())
        self.ddp.sync.backward = None
        self.ddp.finish_grad_sync()
        times.append(time.process_time())
        self.optimizer.step()
        times.append(time.process_time())
        self.optimizer.zero_grad()
        times.append(time.process_time())
        return [stop - start for start, stop in itertools.pairwise(times)]

    def median_step_s(self, repeats: int) -> list[float]:
        for _ in range(2):
            self.step_s()  # the first step learns how many gradients to expect
        steps = [self.step_s() for _ in range(repeats)]
        return [statistics.median(part) for part in zip(*steps, strict=True)]


def fence_us(rank: Rank, repeats: int) -> float:
    ddp = rank.ddp
    fence = Fence(rank.communicator, num_buckets=len(ddp.bucket_groups), policy=ddp.policy, device=torch.device("cpu"))
    report = RankReport(rank=0)

    def agree() -> None:
        fence.send(report)
        fence.take(lambda: report)

    return median(agree, repeats) * 1e6


def rank_row(ranks: int) -> list[object]:
    tries = [Rank(1_024, ranks) for _ in range(3)]
    rank = tries[-1]
    parts = rank.median_step_s(21)
    step = list(rank.recorder.collectives)
    agreement = [record for record in rank.setup if record.kind.value == "all_gather"]
    fences = [record.payload_bytes for record in step if record.label == "fence"]
    # A broadcast of parameters and the exchanges of 32 bytes and their length.
    return [
        ranks,
        f"{statistics.median(one.wrap_s for one in tries) * 1e3:.0f}",
        f"{statistics.median(one.optimizer_s for one in tries) * 1e3:.0f}",
        len(agreement),
        agreement[0].payload_bytes,
        len(step),
        sum(record.payload_bytes for record in step) - sum(fences),
        f"{len(fences)} x {fences[0]}",
        f"{fence_us(rank, 201):.0f}",
        *(f"{part * 1e6:.0f}" for part in parts),
    ]


def show_ranks(_: int) -> None:
    Rank(10, 2).step_s()  # torch's first optimizer imports for a while
    head = ("ranks", "wrap ms", "optimizer ms", "exchanges", "bytes of each", "launches a step", "bytes of buckets and norm")
    head += ("fences x bytes", "one fence us", "hooks us", "finish us", "step us", "zero_grad us")
    table("One rank of many: 1,024 parameters in 4 buckets, reduce-scatter", head, map(rank_row, RANKS))


def print_params_row(num_params: int) -> None:
    """Print the cells of one row. In a process of its own, so that what it holds can be told from what others have left."""
    Rank(10, 2).step_s()
    before_mib = resident_mib()
    rank = Rank(num_params, 1_024)
    after_mib = resident_mib()
    parts = rank.median_step_s(21 if num_params <= 10_000 else 5)
    tensor_bytes = sum(2 * 4 * buffer.numel for buffer in rank.ddp.layout.buffers)
    per_param = [f"{part * 1e6 / num_params:.2f}" for part in parts]
    num_launches = len(rank.recorder.collectives)
    held = f"{(after_mib - before_mib) * 2**20 / num_params:.0f}"
    us = rank.wrap_s * 1e6 / num_params, rank.optimizer_s * 1e6 / num_params
    cells = [f"{num_params:,}", f"{num_launches:,}", *(f"{part:.1f}" for part in us), *per_param, held]
    print(*cells, f"{tensor_bytes / num_params:.0f}", sep="|")


def params_row(num_params: int) -> list[str]:
    command = [sys.executable, __file__, "--params-row", str(num_params)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().split("|")


def resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def show_params(most_params: int) -> None:
    head = ("parameters", "launches a step", "wrap us each", "optimizer us each", "hook us each", "finish us each")
    head += ("step us each", "zero_grad us each", "resident bytes each", "of these in buffers")
    sizes = [size for size in (100, 1_000, 10_000, 100_000, 1_000_000) if size <= most_params]
    table("One rank of 1,024: small parameters", head, map(params_row, sizes))


# All ranks in one process #


def play(world: LoopbackWorld, rank: int, config: mb.DistributedDataParallelConfig, odd: str) -> tuple[str, str]:
    """Wrap, step twice, and return the fingerprint of the layout and the error there was."""
    torch.manual_seed(0)
    width = 9 if odd == "model" and rank == world.size - 1 else 8
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, width))
    try:
        ddp = mb.DistributedDataParallel(module, config, communicator=world.communicator(rank))
    except MegabucketError as error:
        return "", str(error)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp)
    text = ""
    for step in range(2):
        used = module[:2] if odd == "gradient" and rank == world.size - 1 and step == 0 else ddp
        used(torch.full((2, 8), float(rank))).sum().backward()
        try:
            optimizer.step()
        except MegabucketError as error:
            text = str(error)
        optimizer.zero_grad()
    return ddp.layout.fingerprint, text


def world_row(ranks: int, odd: str) -> list[object]:
    world = LoopbackWorld(ranks, timeout_s=300)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=100)
    start_s = time.perf_counter()
    results = world.run(lambda rank: play(world, rank, config, odd))
    seconds = time.perf_counter() - start_s
    layouts, texts = ({one[index] for one in results} for index in (0, 1))
    schedules = {world.schedule(rank) for rank in range(ranks)}
    text = next(iter(texts)).partition(". ")[0]
    shown = text if len(text) < 200 else f"{text[:200]}..."
    counts = [len(layouts), len(schedules), len(world.schedule(0)), len(texts)]
    return [ranks, odd or "nothing", *counts, f"{seconds:.1f}", shown]


def show_world(_: int) -> None:
    head = ("ranks", "odd on the last rank", "layouts", "schedules", "launches of each", "texts", "seconds for all", "text")
    rows = (world_row(ranks, odd) for ranks in (64, 256, 1_024) for odd in ("", "model", "gradient"))
    table("All ranks in one process: wrap, optimizer, two steps", head, rows)


# Planned #


def plan_rows(name: str) -> Iterable[list[object]]:
    run = load_config(name, ["link=h100-cluster-400g"])
    run = run.model_copy(update={"ddp": run.ddp.model_copy(update={"use_distributed_optimizer": True})})
    for ranks in RANKS:
        setting = setting_of(run, dp_size=ranks)
        start_s = time.process_time()
        default, optimal = sweep_row(setting, setting.plan_of_size(None)), sweep_row(setting, setting.optimal_plan)
        seconds = time.process_time() - start_s
        compute_s = setting.workload.compute_s
        floor_s = setting.lower_bound_s - compute_s
        times = [f"{one * 1e3:.1f}" for one in (default.exposed_s, optimal.exposed_s, floor_s)]
        share = f"{compute_s / (compute_s + optimal.exposed_s):.1%}"
        yield [name, ranks, default.buckets, times[0], optimal.buckets, times[1], times[2], share, f"{seconds * 1e3:.0f}"]


def show_plan(_: int) -> None:
    head = ("model", "ranks", "buckets of default size", "exposed ms", "optimal buckets", "exposed ms", "no plan below ms")
    head += ("efficiency", "planned in ms")
    names = ("gpt2-1.5b", "llama3-8b", "llama3-70b")
    table("Planned: reduce-scatter, assumed H100 nodes", head, (row for name in names for row in plan_rows(name)))


SECTIONS: dict[str, Callable[[int], Any]] = {
    "layout": show_layout,
    "ranks": show_ranks,
    "params": show_params,
    "world": show_world,
    "plan": show_plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"{', '.join(SECTIONS)}; all of them when none is named")
    parser.add_argument("--most-params", type=int, default=1_000_000, help="leave out what has more parameters")
    parser.add_argument("--params-row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    if arguments.params_row is not None:
        print_params_row(arguments.params_row)
        return
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, one thread")
    for name in arguments.sections or SECTIONS:
        SECTIONS[name](arguments.most_params)


if __name__ == "__main__":
    main()
