"""What one rank of a job does: ``torchrun -m peers.rank JOB RESULT``, both JSON. The first rank writes the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peers import bound, counting, figures, hooks, resident
from peers.interleave import Course, Interleaving
from peers.links import LinkCase
from peers.models import MODELS
from peers.registry import SYSTEMS
from peers.system import Setup, System, or_reason

COUNTED_STEPS = 2
PROFILED_STEPS = 5


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    link = LinkCase(**job["link"])
    link.start()
    try:
        result = {"steps": steps, "memory": resident_of_all, "hooks": hooks.backwards}[job["part"]](job)
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Not through Python's own end: tensors of asynchronous collectives of a peer may still be held by a thread of gloo, which
    # then aborts the process when it lets go of them (docs/decisions/gloo.md). Everything is written by now.
    sys.stderr.flush()
    os._exit(0)


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of all ranks by system, counts, reasons for absences, and on a fabric the planner's bounds."""
    case, link = MODELS[job["model"]], LinkCase(**job["link"])
    setup = Setup(job["bucket_bytes"], case.blocks_per_group, moves_data=link.moves_data)
    course = Course(job["warmups"], job["turns"], job["steps"])
    wanted = [name for name in job["systems"] if SYSTEMS[name].only_on in ("", "fabric" if link.is_fabric else "loopback")]
    workload, absent = None, {}
    if link.is_fabric:
        workload, bare = _profile(job, setup)
        setup = replace(setup, cuts=bound.planned_cuts(bound.settings(workload, bare.module, link)))
    systems: dict[str, System] = {}
    for name in wanted:
        built = _on_all(lambda name=name: SYSTEMS[name].builder()(case.module(), setup))
        if isinstance(built, str):
            absent[name] = built
        else:
            systems[name] = built
    run = Interleaving(systems, case, course)
    for name in list(systems):
        failed = _on_all(lambda name=name: run.take(name, run.batches(1)))
        if isinstance(failed, str):
            absent[name] = failed
            del systems[name], run.samples[name]
    run.next_step += 1
    run.warm_up()
    counted = {name: _count(run, name, link) for name in systems}
    run.next_step += COUNTED_STEPS
    run.run()
    bounds = optima = None
    if workload is not None:
        own = [sum(parts) for parts in run.samples["none"].parts_s] if "none" in systems else [workload.compute_s]
        # Who synchronizes waits for the slower rank in each step, whichever it is.
        alone = [max(of_ranks) for of_ranks in zip(*_of_all(own), strict=True)]
        bounds = bound.bounds_s(workload, case.module(), link, alone)
        optima = bound.optima_s(workload, case.module(), link, figures.spread(alone)["median"])
    return {
        "numel": sum(param.numel() for param in case.module().parameters()),
        "tensors": len(list(case.module().parameters())),
        "absent": absent,
        "counts": counted,
        "bounds_s": bounds,
        "optima_s": optima,
        "buckets": {mode: len(cuts) + 1 for mode, cuts in setup.cuts},
        "samples": {name: _of_all(samples.to_dict()) for name, samples in run.samples.items()},
    }


def resident_of_all(job: dict[str, Any]) -> dict[str, Any]:
    found = _on_all(lambda: resident.peak_of(job))
    return {"absent": found} if isinstance(found, str) else {"ranks": _of_all(found)}


def _profile(job: dict[str, Any], setup: Setup) -> tuple[Any, System]:
    """Return the workload of the bare model and the model."""
    case = MODELS[job["model"]]
    bare = SYSTEMS["none"].builder()(case.module(), setup)
    run = Interleaving({"none": bare}, case, Course(0, 0, 0))
    return bound.profile_bare(bare, lambda count: run.take("none", run.batches(count)), steps=PROFILED_STEPS), bare


def _count(run: Interleaving, name: str, link: LinkCase) -> dict[str, dict[str, float]]:
    def take() -> None:
        run.take(name, run.batches(COUNTED_STEPS))

    return counting.count(take, steps=COUNTED_STEPS, is_fabric=link.is_fabric)


def _on_all(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns, or, when it failed on any rank, the first reason as text on every rank."""
    result = or_reason(work)
    reasons = [reason for reason in _of_all(result if isinstance(result, str) else "") if reason]
    return reasons[0] if reasons else result


def _of_all(value: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


if __name__ == "__main__":
    main()
