"""What the planner says about every shipped model, as numbers, which a test compares with ``preset_figures.json``.

``python -m tests.planning.preset_figures > tests/planning/preset_figures.json`` records them anew.
"""

from __future__ import annotations

import json
import sys

from docs.tools.advice import MODELS

from megabucket.layout import build_layout
from megabucket.planning import load_config, param_specs
from megabucket.planning.memory import memory_by_mode
from megabucket.planning.setting import setting_of

# Link and ranks; the last one is a measured table.
LINKS = (("infiniband-400g", 64), ("h100-cluster-400g", 32), ("ethernet-25g", 8), ("gloo-loopback", 2))
MODES = ("all_reduce", "reduce_scatter")


def step_figures(model: str, link: str, dp_size: int, mode: str) -> dict[str, float]:
    """Return the predicted seconds of a step with the optimal cuts and with the config's own, and the lower bound."""
    overrides = [f"mode={mode}", f"link={link}"]
    if mode == "reduce_scatter":
        overrides.append("ddp.overlap_param_gather=true")
    setting = setting_of(load_config(model, overrides), dp_size=dp_size)
    configured = setting.configured_plan or setting.plan_of_size(None)
    return {
        "optimal_s": setting.step_s(setting.optimal_plan),
        "configured_s": setting.step_s(configured),
        "no_overlap_s": setting.no_overlap_s,
        "lower_bound_s": setting.lower_bound_s,
    }


def size_figures(model: str) -> dict[str, object]:
    """Return the layout's fingerprint on 16 ranks and the bytes of a rank in each mode."""
    run = load_config(model)
    specs = param_specs(run.model)
    memory = memory_by_mode(specs, run.ddp, dp_size=16)
    return {
        "fingerprint": build_layout(specs, run.ddp, dp_size=16).fingerprint,
        "memory_bytes": {mode: each.total_bytes for mode, each in memory.items()},
    }


def case_name(link: str, dp_size: int, mode: str) -> str:
    """Return the key of the figures of one link and mode."""
    return f"{link} on {dp_size}, {mode}"


def main() -> None:
    """Print the figures of all models as JSON."""
    found: dict[str, dict[str, object]] = {}
    for model in MODELS:
        found[model] = size_figures(model)
        for link, dp_size in LINKS:
            for mode in MODES:
                found[model][case_name(link, dp_size, mode)] = step_figures(model, link, dp_size, mode)
        print(model, file=sys.stderr)
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
