"""The step of the demo with Muon beside that with AdamW alone, in turns: wall and CPU time, and the median of paired ratios.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/demo_muon.py

CPU time is that of all threads of a rank: on a machine that others use as well it says more than wall time.
"""

import os
import statistics
import time
from pathlib import Path

import megabucket as mb
from examples.bytegpt.config import load_demo_config
from examples.bytegpt.report import MetricsLog, Progress
from examples.bytegpt.steps import StepLoop, Trainee
from examples.bytegpt.task import make_optimizers, make_task, trainable_model
from megabucket.measure.ranks import Ranks, joined_ranks

WARMUPS, TURNS = 5, 50


def make_loop(name: str, ranks: Ranks) -> StepLoop:
    """Return the demo's loop with this optimizer."""
    config = load_demo_config(Path("configs/bytegpt.yaml"), [f"optimizer.name={name}"])
    task = make_task(config, trainable_model(config), ranks)
    model = mb.DistributedDataParallel(task.build_model(), config.ddp)
    optimizers = make_optimizers(config.program.optimizer, dict(model.named_parameters()))
    optimizer = mb.DistributedOptimizer(optimizers, model, clip_grad=config.program.optimizer.clip_grad)
    trainee = Trainee(name, model, optimizers, optimizer.zero_grad, model.no_sync, optimizer.step, model.step)
    return StepLoop(task, trainee, progress=Progress(), log=MetricsLog(None))


def main() -> None:
    """Print the figures of rank 0."""
    with joined_ranks(os.environ, None) as ranks:
        loops = {name: make_loop(name, ranks) for name in ("adamw", "muon")}
        wall: dict[str, list[float]] = {name: [] for name in loops}
        cpu: dict[str, list[float]] = {name: [] for name in loops}
        for step in range(WARMUPS + TURNS):
            for name in sorted(loops, reverse=step % 2 == 1):
                start, start_cpu = time.perf_counter(), time.process_time()
                loops[name]._run_step(step)
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)
        if ranks.rank == 0:
            for title, times in (("wall", wall), ("CPU", cpu)):
                adamw, muon = (times[name][WARMUPS:] for name in ("adamw", "muon"))
                ratios = [b / a for a, b in zip(adamw, muon, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                medians = f"AdamW {statistics.median(adamw) * 1e3:.1f} ms, Muon {statistics.median(muon) * 1e3:.1f} ms a step"
                print(f"{title}: {medians}, ratio {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
