"""The cells of a run: one job of ranks each, for steps, memory and hooks. What fails is noted and the run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from peers.figures import (
    LossesDifferError,
    check_losses,
    extra_us,
    loss_differences,
    over_bound,
    spread,
    system_figures,
    with_ratios,
)
from peers.launch import JobFailedError, run_job
from peers.links import LinkCase
from peers.options import HOOK_SYSTEMS, Options
from peers.registry import PEERS, SYSTEMS

LIMIT = "none"
BASELINE = "none, gradients kept"
REFERENCE = "ddp"
MEMORY_STEPS = 4

Task = Callable[[], dict[str, Any]]


def settings(options: Options) -> dict[str, Any]:
    return {
        "turns": options.turns,
        "steps_per_turn": options.steps,
        "warmups": options.warmups,
        "bucket_bytes": options.bucket_bytes,
        "tolerance": options.tolerance,
    }


def measure(options: Options, result: dict[str, Any]) -> Iterator[None]:
    """Measure everything into ``result`` and yield after each cell."""
    tasks = tasks_of(options)
    for number, (kind, title, task) in enumerate(tasks, 1):
        began_s = time.perf_counter()
        print(f"{number}/{len(tasks)} {title}", end=" ", file=sys.stderr, flush=True)
        try:
            cell = task()
            result[kind].append(cell)
            result["problems"] += [f"{title}: {problem}" for problem in cell.pop("problems", [])]
        except JobFailedError as error:
            result["problems"].append(f"{title}: {error}")
        print(f"({time.perf_counter() - began_s:.0f} s)", file=sys.stderr, flush=True)
        yield


def tasks_of(options: Options) -> list[tuple[str, str, Task]]:
    """Return what to measure: where it goes in the result, its title, and how."""
    tasks: list[tuple[str, str, Task]] = []
    for ranks in options.ranks:
        if "steps" in options.parts:
            tasks += [
                ("cells", f"steps of {model}, {link.name}, {ranks} ranks", partial(steps_cell, options, model, link, ranks))
                for link in options.links
                for model in options.models
            ]
        if "memory" in options.parts:
            tasks += [
                ("memory", f"memory of {model}, {ranks} ranks", partial(memory_cell, options, model, ranks))
                for model in options.models
            ]
    if "hooks" in options.parts:
        tasks += [("hooks", f"hooks of {model}, 1 rank", partial(hooks_cell, options, model)) for model in options.hook_models]
    return tasks


def steps_cell(options: Options, model: str, link: LinkCase, ranks: int) -> dict[str, Any]:
    """Return one model on one link: figures of all systems that ran, reasons for those that did not."""
    job = {
        "part": "steps",
        "model": model,
        "link": _fields(link),
        "bucket_bytes": options.bucket_bytes,
        "warmups": options.warmups,
        "turns": options.turns,
        "steps": options.steps,
        "systems": options.systems,
    }
    found = run_job(job, ranks=ranks, timeout_s=options.timeout_s)
    samples = found["samples"]
    figures = {name: system_figures(of_ranks) for name, of_ranks in samples.items()}
    problems, differences = [], {}
    if link.moves_data and samples:
        differences = loss_differences(samples, REFERENCE if REFERENCE in samples else next(iter(samples)))
        try:
            check_losses(differences, limit=LIMIT, tolerance=options.tolerance, ranks=ranks)
        except LossesDifferError as error:
            problems.append(str(error))
    for name, of_system in figures.items():
        of_system["counts"] = found["counts"][name]
        of_system["loss_difference"] = differences.get(name)
        bounds = (found["bounds_s"] or {}).get(SYSTEMS[name].mode)
        of_system["over_bound"] = None if bounds is None else over_bound(of_system["steps_s"], bounds)
    return {
        "model": model,
        "numel": found["numel"],
        "tensors": found["tensors"],
        "ranks": ranks,
        "link": link.to_dict(),
        "bounds_s": found["bounds_s"] and {mode: spread(bounds) for mode, bounds in found["bounds_s"].items()},
        "optima_s": found["optima_s"],
        "planned_buckets": found["buckets"],
        "absent": found["absent"],
        **with_ratios(figures, PEERS),
        "problems": problems,
    }


def memory_cell(options: Options, model: str, ranks: int) -> dict[str, Any]:
    """Return the peak of each system in processes of its own, and how far that is from formulas.

    What they are compared with keeps its gradients: without, the peak of bare training has activations and no gradients yet,
    and who keeps gradients in buffers would be charged for the difference.
    """
    rows, absent, problems = {}, {}, []
    for name in (BASELINE, *options.systems):
        if name != BASELINE and SYSTEMS[name].only_on:
            continue  # another way of something else in the table
        job = {
            "part": "memory",
            "model": model,
            "link": _fields(LinkCase("loopback")),
            "system": LIMIT if name == BASELINE else name,
            "keeps_grads": name == BASELINE,
            "bucket_bytes": options.bucket_bytes,
            "steps": MEMORY_STEPS,
        }
        try:
            found = run_job(job, ranks=ranks, timeout_s=options.timeout_s, has_plain_heap=False)
        except JobFailedError as error:
            problems.append(str(error))
            continue
        if "absent" in found:
            absent[name] = found["absent"]
            continue
        largest = max(found["ranks"], key=lambda one: one["peak_bytes"])
        rows[name] = {key: largest[key] for key in ("peak_bytes", "formula_bytes", "expected_bytes", "numel")}
    bare = rows.pop(BASELINE, None)
    for row in rows.values():
        row.update(_held(row, bare))
    return {"model": model, "ranks": ranks, "baseline": bare, "rows": rows, "absent": absent, "problems": problems}


def _held(row: dict[str, Any], bare: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a system holds: its peak above the baseline's, and on top what that holds by definition."""
    if bare is None:
        return {"held_bytes": None, "over_formula": None}
    held = row["peak_bytes"] - bare["peak_bytes"] + bare["expected_bytes"]
    formula = row["formula_bytes"] or row["expected_bytes"]
    return {"held_bytes": held, "over_formula": held / formula - 1}


def hooks_cell(options: Options, model: str) -> dict[str, Any]:
    """Return the extra backward per parameter of the wrappers, on one rank."""
    job = {
        "part": "hooks",
        "model": model,
        "link": _fields(LinkCase("loopback")),
        "bucket_bytes": options.bucket_bytes,
        "systems": [name for name in HOOK_SYSTEMS if name in options.systems],
        "turns": options.turns * options.steps,
    }
    found = run_job(job, ranks=1, timeout_s=options.timeout_s)
    return {
        "model": model,
        "num_params": found["num_params"],
        "absent": found["absent"],
        "bare_s": spread([seconds for seconds, _ in found["backward_s"][LIMIT]]),
        "extra_us": {
            name: extra_us(values, found["backward_s"][LIMIT], found["num_params"])
            for name, values in found["backward_s"].items()
            if name != LIMIT
        },
    }


def _fields(link: LinkCase) -> dict[str, Any]:
    return {"kind": link.kind, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
