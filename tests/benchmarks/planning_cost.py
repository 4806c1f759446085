"""What planning costs: a sweep, the optimal cuts, and the two commands on GPT-3 175B. Run it by hand; it asserts nothing.

python tests/benchmarks/planning_cost.py
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megabucket.planning.cuts import uniform_plan
from megabucket.planning.links import FlatLink, MeasuredLink
from megabucket.planning.partition import optimal_plan
from megabucket.planning.simulate import Mode, simulate_step_s
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import CollectiveKind

ROOT = Path(__file__).parents[2]
REPEATS = 5


def random_workload(count: int) -> Workload:
    """Return tensors of 1,000 to 30 million elements; backward takes 1 s, forward half of it."""
    rng = random.Random(0)
    numels = [int(10 ** rng.uniform(3, 7.5)) for _ in range(count)]
    seconds = [numel * rng.uniform(0.5, 1.5) for numel in numels]
    scale = 1 / sum(seconds)
    rows = zip(numels, seconds, strict=True)
    return Workload(tuple(TensorWork(f"t{i}", n, s * scale, s * scale / 2) for i, (n, s) in enumerate(rows)))


def median_ms(work: Callable[[], object]) -> float:
    """Return the median of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def sweep(workload: Workload, link: FlatLink, count: int) -> None:
    """Simulate ``count`` sizes in reduce-scatter mode."""
    for step in range(count):
        plan = uniform_plan(workload, max(1, round(workload.numel ** ((step + 1) / count))))
        simulate_step_s(workload, plan, link, num_ranks=8, mode=Mode.REDUCE_SCATTER, overlap_param_gather=True)


def command(*arguments: str) -> None:
    """Run one command in a process of its own."""
    subprocess.run([sys.executable, "-m", "megabucket", *arguments], cwd=ROOT, check=True, capture_output=True)


def link_of(workload: Workload) -> FlatLink:
    """Return a link that is busy for 0.9 s if everything goes out at once."""
    return FlatLink(latency_s=1e-3, seconds_per_byte=0.9 / (4 * workload.numel))


def table_of(link: FlatLink) -> MeasuredLink:
    """Return points on the line of ``link``, 5 % to either side."""
    points = tuple(
        (2.0**k, (link.latency_s + link.seconds_per_byte * 2.0**k) * (1.05 - 0.1 * (k % 4 > 0))) for k in range(8, 38, 2)
    )
    return MeasuredLink.of({(kind, "float32"): points for kind in CollectiveKind}, num_ranks=8)


def cut(workload: Workload, link: FlatLink | MeasuredLink, mode: Mode) -> float:
    """Return the milliseconds that the optimal cuts take."""
    overlaps = mode is Mode.REDUCE_SCATTER
    return median_ms(lambda: optimal_plan(workload, link, num_ranks=8, mode=mode, overlap_param_gather=overlaps))


def main() -> None:
    """Print one line for each figure."""
    small, large = random_workload(2_000), random_workload(100_000)
    for name, workload in (("2,000", small), ("100,000", large)):
        for mode in Mode:
            print(f"optimal cuts of {name} tensors, {mode.value}: {cut(workload, link_of(workload), mode):.0f} ms")
    for mode in Mode:
        print(f"the same of 2,000 tensors with a table, {mode.value}: {cut(small, table_of(link_of(small)), mode):.0f} ms")
    print(f"40 sizes of 2,000 tensors, reduce_scatter: {median_ms(lambda: sweep(small, link_of(small), 40)):.0f} ms")
    link = "link=h100-cluster-400g"
    for name, *rest in (("plan",), ("simulate", link)):
        arguments = (name, "-c", "gpt3-175b", *rest, "--dp-size", "1024", "--json")
        print(
            f"megabucket {name}, GPT-3 175B on 1,024 ranks: {median_ms(lambda arguments=arguments: command(*arguments)):.0f} ms"
        )


if __name__ == "__main__":
    main()
