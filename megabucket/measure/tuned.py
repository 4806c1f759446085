"""What ``megabucket tune`` leaves behind: a config with the evidence in its comments, the evidence as JSON, the lines shown."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from megabucket import __version__
from megabucket.errors import printable
from megabucket.measure.out_file import write_text
from megabucket.measure.tune import Tuning
from megabucket.planning.run_config import RunConfig
from megabucket.planning.simulate import Mode
from megabucket.planning.tune import DEFAULT, SIZE_FIELDS, Candidate, Comparison
from megabucket.units import format_seconds

_CHOSEN = (*SIZE_FIELDS, "bucket_order", "bucket_groups", "overlap_grad_reduce", "overlap_param_gather")


def write_tuning(config: RunConfig, tuning: Tuning, *, out: Path, evidence: Path) -> str:
    """Write both files; return why one could not be written, or nothing."""
    texts = {out: tuned_text(config, tuning), evidence: json.dumps(tuning.to_dict(), indent=1, allow_nan=False) + "\n"}
    return next((problem for path, text in texts.items() if (problem := write_text(path, text))), "")


def tuned_text(config: RunConfig, tuning: Tuning) -> str:
    """Return the config with the chosen plan as YAML, the evidence in comments before it."""
    header = [f"megabucket tune {__version__}, {datetime.now(timezone.utc).isoformat(timespec='seconds')}", *describe(tuning)]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in header)
    return comments + "\n" + yaml.safe_dump(tuned_data(config, tuning.choice), sort_keys=False, allow_unicode=True)


def tuned_data(config: RunConfig, choice: Candidate) -> dict[str, Any]:
    """Return the config as plain data, with the chosen fields of ``ddp`` in place of its own; the default changes nothing."""
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    if choice.name == DEFAULT:
        return data
    replaced = (*_CHOSEN, "use_distributed_optimizer")
    ddp = {name: value for name, value in data.pop("ddp", {}).items() if name not in replaced}
    chosen = choice.ddp.model_dump(mode="json", include=set(_CHOSEN))
    ddp |= {name: chosen[name] for name in _CHOSEN if name in chosen and chosen[name] is not None}
    is_sharded = choice.mode is Mode.REDUCE_SCATTER
    data.pop("mode", None)
    return {"mode": "reduce_scatter" if is_sharded else "all_reduce", **data, "ddp": ddp}


def describe(tuning: Tuning) -> list[str]:
    """Return what was found, a line for each plan that was run and one for the decision."""
    facts, comparisons = tuning.facts, {each.name: each for each in tuning.decision.comparisons}
    counts = f"{len(tuning.candidates)} plans predicted, {len(tuning.seconds)} run"
    lines = [f"{facts['num_ranks']} ranks, {facts['backend']}; {counts}"]
    for name in sorted(tuning.seconds, key=tuning.measured_s):
        each, measured_s = tuning.candidate(name), tuning.measured_s(name)
        text = (
            f"{printable(name)} ({each.num_buckets} buckets): predicted {format_seconds(each.predicted_s)}, measured "
            f"{format_seconds(measured_s)} (error {each.predicted_s / measured_s - 1:+.1%})"
        )
        lines.append(f"  {text}{_gain(comparisons[name])}" if name in comparisons else f"  {text}")
    return [*lines, _verdict(tuning)]


def _gain(found: Comparison) -> str:
    interval = f"{found.low:+.1%} to {found.high:+.1%}" if found.low > -1 else "too few rounds for an interval"
    return f", {found.gain:+.1%} against the default ({interval}; faster in {found.num_faster} of {found.num_rounds} rounds)"


def _verdict(tuning: Tuning) -> str:
    found = tuning.decision.chosen
    if found is None:
        return "no candidate is better than the default beyond noise; the config stays as it is"
    return (
        f"{printable(found.name)} is faster than the default by {found.gain:.1%} (95 % interval over all candidates: "
        f"{found.low:.1%} to {found.high:.1%}, sign test p = {found.p_value:.2g})"
    )
