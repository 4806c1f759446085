"""What ``megabucket simulate`` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from megabucket.cli.output import counted, text_table
from megabucket.errors import printable
from megabucket.planning.links import FlatLink
from megabucket.planning.run_config import RunConfig
from megabucket.planning.setting import Outlook, SweepRow
from megabucket.planning.workload import Workload, WorkloadConfig
from megabucket.units import format_count

_NAME_CHARS: Final = 200


def assumed_line(run: RunConfig, workload: Workload, config: Path | None, overrides: Sequence[str]) -> str:
    """Return what the config says about the compute of a step, each with the place that says it."""

    def origin(field: str) -> str:
        is_given = any(text.startswith((f"workload.{field}=", "workload=")) for text in overrides)
        return "(command line)" if is_given or config is None else f"({printable(str(config))})"

    given = run.workload or WorkloadConfig()
    times, optimizer = f"times of the tensors {origin('tensors')}", "(workload.optimizer_s is not given)"
    if given.path is not None:
        times, optimizer = f"times of {printable(given.path)} {origin('path')}", f"({printable(given.path)})"
    elif given.flops_per_s is not None:
        tokens = f"{given.tokens_per_microbatch:,} tokens per rank and microbatch {origin('tokens_per_microbatch')}"
        times = f"{tokens} at {given.flops_per_s / 1e12:,g} TFLOP/s {origin('flops_per_s')}"
    if given.optimizer_s is not None:
        optimizer = origin("optimizer_s")
    rate = ""
    if run.optimizer.name == "muon":
        rate = f", updates of whole tensors at {run.optimizer.flops_per_s / 1e12:,g} TFLOP/s (optimizer.flops_per_s)"
    return f"assumed: {times}, optimizer {_ms(workload.optimizer_s)} ms {optimizer}{rate}"


def outlook_lines(outlook: Outlook, assumed: str, *, show_cuts: bool) -> Iterator[str]:
    """Yield what to do and the figures of an outlook; ``assumed`` is a line of the summary."""
    yield from outlook.advice.lines
    yield ""
    setting, workload = outlook.setting, outlook.setting.workload
    size = format_count(outlook.best.bucket_numel or 0)
    yield f"optimal cuts {_ms(outlook.optimal.step_s)} ms a step, {_against(outlook, outlook.optimal)} ({size})"
    tensors, ranks = counted(len(workload.tensors), "tensor"), counted(setting.dp_size, "rank")
    if setting.num_instances > 1:
        ranks += f" in {setting.num_instances} replicas"
    what = f"{setting.mode.value} of {tensors}, {format_count(workload.numel)} elements"
    # A flat link costs the same on any number, and without a model nothing else depends on it.
    yield f"{what}, on {ranks}" if setting.specs is not None or not isinstance(setting.link, FlatLink) else what
    yield f"compute {_ms(setting.compute_s)} ms: {_compute_text(workload, setting.owner_update_s)}"
    yield assumed
    yield f"one collective per tensor after backward {_ms(outlook.no_overlap_s)} ms"
    yield ""
    rows: list[tuple[str, ...]] = [("elements", "buckets", "step, ms", "exposed, ms", "gain, times", "")]
    for _, equal in groupby(outlook.rows, key=lambda row: (row.buckets, row.step_s)):
        same = sorted(equal, key=lambda row: row.bucket_numel or 0)
        sizes = [format_count(row.bucket_numel or 0) for row in same]
        notes = ["best size"] * (outlook.best in same) + [f"from {sizes[0]} on"] * (len(same) > 1)
        rows.append(_cells(sizes[-1], same[-1], outlook, ", ".join(notes)))
    rows.append(_cells("default", outlook.default, outlook, format_count(outlook.default.bucket_numel or 0)))
    if outlook.configured is not None:
        rows.append(_cells("config", outlook.configured, outlook, "the config's own sizes"))
    rows.append(_cells("optimal cuts", outlook.optimal, outlook, _against(outlook, outlook.optimal)))
    rows.append(_cells("fewest cuts", outlook.fewest, outlook, "within 1% of optimal"))
    yield from text_table(rows, num_left=0, num_folded=1)
    yield ""
    yield f"gain is over one collective per tensor; no plan is below {_ms(outlook.lower_bound_s)} ms"
    yield from _scaling_lines(outlook)
    if show_cuts:
        yield from _cut_lines(outlook)


def _compute_text(workload: Workload, owner_update_s: float) -> str:
    passes = [("forward", workload.forward_s), ("backward", workload.backward_s)]
    parts = [f"{name} {_ms(seconds)}" for name, seconds in passes if seconds > 0]
    if parts and workload.num_microbatches > 1:
        parts = [f"{workload.num_microbatches} x ({' + '.join(parts)})"]
    if workload.optimizer_s > 0:
        parts.append(f"optimizer {_ms(workload.optimizer_s)}")
    if owner_update_s > 0:
        parts.append(f"whole tensors {_ms(owner_update_s)}")
    return " + ".join(parts) or "nothing"


def _cells(name: str, row: SweepRow, outlook: Outlook, note: str) -> tuple[str, ...]:
    gain = outlook.no_overlap_s / row.step_s if row.step_s > 0 else 1.0
    return (name, f"{row.buckets:,}", _ms(row.step_s), _ms(row.exposed_s), f"{gain:.2f}", note)


def _against(outlook: Outlook, optimal: SweepRow) -> str:
    best = outlook.best
    why = "by padding and the exchange with owners" if optimal.plan.to_owner_bytes else "by padding"
    gain = 1 - optimal.step_s / best.step_s if best.step_s > 0 else 0.0
    if abs(gain) <= 5e-5:
        return "as the best size"
    return f"{gain:.2%} below the best size" if gain > 0 else f"{-gain:.2%} above the best size, {why}"


def _scaling_lines(outlook: Outlook) -> Iterator[str]:
    if not outlook.scaling:
        return
    yield ""
    yield "scaling with the optimal cuts of each number of ranks:"
    rows = [("ranks", "step, ms", "efficiency, %")]
    rows += [(f"{row.num_ranks:,}", _ms(row.step_s), f"{row.efficiency:.1%}".rstrip("%")) for row in outlook.scaling]
    yield from text_table(rows, num_left=0)


def _cut_lines(outlook: Outlook) -> Iterator[str]:
    yield ""
    yield "ddp:"
    yield "  bucket_cuts:"
    yield from (f"    - {printable(name, _NAME_CHARS)}" for name in outlook.cuts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
