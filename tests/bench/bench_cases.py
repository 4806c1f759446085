"""A result of a run, small and made up, as the tables and the page take it."""

from typing import Any

from peers.figures import over_bound, spread, system_figures, with_ratios

HOSTILE = '</script><img src=x onerror="pwned=1"> | @DATA@ \u2028\u202e'


def samples(*steps_s: float, losses: tuple[float, ...] = (2.0, 1.5)) -> dict[str, Any]:
    """Return what one rank measured: steps of four equal parts."""
    return {
        "parts_s": [(seconds / 4,) * 4 for seconds in steps_s],
        "turn_cpu_s": [0.25, 0.35],
        "turn_faults": [10.0, 30.0],
        "turn_wire_bytes": [1e6, 3e6],
        "losses": list(losses),
    }


def system(*steps_s: float) -> dict[str, Any]:
    counts = {"all_reduce": {"calls": 2.0, "bytes": 8e6}, "all": {"calls": 2.0, "bytes": 8e6}}
    return {**system_figures([samples(*steps_s)]), "counts": counts, "loss_difference": 3e-7, "over_bound": None}


def result() -> dict[str, Any]:
    bounds_s = [0.08, 0.05, 0.1]
    systems = {"none": system(0.08, 0.1, 0.12), "ddp": system(0.2, 0.2, 0.4), "mb-rs": system(0.1, 0.1, 0.1)}
    systems["mb-rs"]["over_bound"] = over_bound(systems["mb-rs"]["steps_s"], bounds_s)
    cell = {
        "model": "gpt",
        "numel": 10_840_000,
        "tensors": 77,
        "ranks": 2,
        "link": {"name": "timing, 100 us, 0.5 GB/s", "kind": "timing", "latency_s": 1e-4, "bytes_per_s": 5e8},
        "bounds_s": {"all_reduce": spread([0.09]), "reduce_scatter": spread(bounds_s)},
        "optima_s": {"all_reduce": 0.095, "reduce_scatter": 0.084},
        "planned_buckets": {"reduce_scatter": 5},
        "absent": {"deepspeed-1": HOSTILE},
        **with_ratios(systems, ("ddp", "zero")),
    }
    row = {
        "peak_bytes": 12e6,
        "formula_bytes": 4e6,
        "expected_bytes": 4e6,
        "numel": 1,
        "held_bytes": 4.1e6,
        "over_formula": 0.025,
    }
    bare = {**row, "formula_bytes": None, "over_formula": float("nan")}
    extra = {**spread([1.0, 1.5, 2.0]), "cpu": 1.25}
    return {
        "name": HOSTILE,
        "command": "make bench BENCH='--models gpt'",
        "date": "2026-11-20",
        "commit": None,
        "versions": {"torch": "2.13.0", "deepspeed": None},
        "machine": {"system": "Linux", "processor": "a processor", "cores": 2, "memory_gib": 8.0, "load_before": 0.1},
        "settings": {"turns": 1, "steps_per_turn": 3, "warmups": 1, "bucket_bytes": 2**20, "tolerance": 1e-5},
        "cells": [cell],
        "memory": [
            {
                "model": "gpt",
                "ranks": 2,
                "baseline": None,
                "rows": {"none": bare, "mb-rs": row},
                "absent": {"deepspeed-1": HOSTILE},
            }
        ],
        "hooks": [{"model": "tensors", "num_params": 1500, "bare_s": spread([0.08]), "extra_us": {"ddp": extra}, "absent": {}}],
        "problems": ["losses differ\nin many lines"],
    }
