"""The page, the figures as JSON and the Chrome traces. No torch.

The page draws what it is given. Its one table of plans, those of the sweep and the named ones, with the timeline of each, feeds
the slider, the buttons and the curve. What grows with the model is cut until the page is small enough, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from megabucket.errors import ConfigError, printable
from megabucket.planning.setting import Setting
from megabucket.planning.simulate import Mode
from megabucket.report.chrome import write_chrome_trace
from megabucket.report.collect import BucketEntry, NamedPlan, Report, describe_link
from megabucket.trace import Lane, StepTrace
from megabucket.units import format_bytes, format_count

MAX_PAGE_BYTES: Final = 200_000
_SCRIPTS: Final = ("chart.js", "page.js")
_BUCKETS_DRAWN: Final = 20_000
"""Of a plan; the timeline of one with more takes long to make and shows nothing but stripes."""
_BUCKET_ROWS: Final = (40, 10)
_MEASURED_ROWS: Final = 60
_TICKS: Final = 1_000_000
"""Moments in a timeline are whole parts of the step, so many of them."""

# What a part of a timeline is, by the label of its interval without a number; the page knows them by position.
_KINDS: Final = ("forward", "backward", "optimizer", "bucket", "param gather", "step collective")
_LANES: Final = (Lane.COMPUTE, Lane.WAIT, Lane.COMM)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the page may carry of what grows with the model."""

    least_ticks: int = 400
    """Neighbours in a lane that are shorter than this are drawn as one."""
    buckets_told: int = 250
    name_chars: int = 100

    def tighter(self) -> Limits:
        """Return limits for a page that came out too large."""
        return Limits(self.least_ticks * 2, self.buckets_told // 2, max(16, self.name_chars * 8 // 10))


def write_report(report: Report, path: Path) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json``, ``report.trace.json`` and, of measured steps, ``report.measured.trace.json``.

    Returns:
        the files that were written, the page first.

    Raises:
        ConfigError: the page is not called ``.html``, or a file cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: the page is called something.html; the other files lie beside it")
    page = render_page(report)
    figures, trace = path.with_suffix(".json"), path.with_suffix(".trace.json")
    written = [path, figures, trace]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
        figures.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        write_chrome_trace(trace, report.traces())
        if report.measured is not None and report.measured.traces:
            written.append(path.with_suffix(".measured.trace.json"))
            write_chrome_trace(written[-1], report.measured.traces)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: cannot be written: {error.strerror}; name a file in a directory of yours"
        ) from None
    return tuple(written)


def render_page(report: Report) -> str:
    """Return the page, smaller than 200 kB."""
    frame, scripts = read_asset("page.html"), [read_asset(name) for name in _SCRIPTS]
    plans = [_drawable(report.setting, plan) for plan in (*report.sized(), *report.plans)]
    limits = Limits()
    while True:
        page = assemble(frame, scripts, page_data(report, plans, limits))
        if len(page.encode()) < MAX_PAGE_BYTES or limits.least_ticks > _TICKS:
            return page
        limits = limits.tighter()


def assemble(frame: str, scripts: Sequence[str], data: Any) -> str:
    """Return a self-contained page: the frame with the report's style, its scripts, and its data as JSON.

    Args:
        frame: HTML with ``@STYLE@``, ``@SCRIPTS@`` and ``@DATA@`` where they belong.
    """
    page = frame.replace("@STYLE@", read_asset("page.css")).replace("@SCRIPTS@", "\n".join(scripts))
    return page.replace("@DATA@", as_script_data(data))  # last: a name in it may well be "@STYLE@"


def as_script_data(data: Any) -> str:
    r"""Return data as JSON that cannot end the script element it stands in.

    >>> as_script_data(["</script>"])
    '["\\u003c/script>"]'
    """
    text = json.dumps(data, separators=(",", ":"), default=list)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def read_asset(name: str) -> str:
    """Return a file of ``assets``."""
    return (files("megabucket.report") / "assets" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class _Drawable:
    """A plan and a step of it in the steady state; ``None`` where it has too many buckets to draw."""

    plan: NamedPlan
    trace: StepTrace | None


def _drawable(setting: Setting, plan: NamedPlan) -> _Drawable:
    is_drawn = len(plan.plan.buckets) <= _BUCKETS_DRAWN
    return _Drawable(plan, setting.traces(plan.plan)[-1] if is_drawn else None)


def page_data(report: Report, plans: Iterable[_Drawable], limits: Limits) -> dict[str, Any]:
    """Return what the page shows, ready for JSON."""
    setting, entries = report.setting, report.buckets
    first, last = _BUCKET_ROWS
    shown = list(enumerate(entries))
    shown = shown if len(shown) <= first + last else shown[:first] + shown[-last:]
    return {
        "title": printable(report.title, limits.name_chars),
        "summary": report.summary,
        "facts": _facts(setting),
        "notes": _notes(setting),
        "mode": setting.mode.value,
        "ranks": setting.dp_size,
        "ticks": _TICKS,
        "lower_bound_s": report.outlook.lower_bound_s,
        "plans": [_plan(setting, plan, limits) for plan in plans],
        "bucket_count": len(entries),
        "buckets": [[index, _entry(entry, limits)] for index, entry in shown],
        "memory": [asdict(row) for row in report.memory],
        "scaling": [asdict(row) for row in report.scaling],
        "scaling_gaps": [printable(gap, 300) for gap in report.scaling_gaps],
        "measured": _measured(report, limits),
    }


def _plan(setting: Setting, drawable: _Drawable, limits: Limits) -> dict[str, Any]:
    plan, trace, workload = drawable.plan, drawable.trace, setting.workload
    sizes = zip(plan.plan.buckets, plan.plan.grad_sizes_bytes(workload), plan.plan.param_sizes_bytes(workload), strict=True)
    is_told = len(plan.plan.buckets) <= limits.buckets_told
    return {
        "key": plan.key,
        "name": plan.name,
        **asdict(plan.row),
        "hidden": None if trace is None else trace.overlap_fraction,
        "parts": None if trace is None else timeline(trace, limits.least_ticks),
        "sizes": [[len(bucket), *num_bytes] for bucket, *num_bytes in sizes] if is_told else None,
    }


def timeline(trace: StepTrace, least_ticks: int) -> list[list[int]]:
    """Return the parts of a step as ``[lane, kind, bucket, start, stop]``; a bucket of -1 stands for several, or none.

    Args:
        least_ticks: neighbours of a kind that are shorter than this, and no farther apart, become one.
    """
    scale = _TICKS / trace.duration_s if trace.duration_s > 0 else 0.0
    parts: list[list[int]] = []
    last_of: dict[int, list[int]] = {}
    for interval in sorted(trace.intervals, key=lambda each: (each.start_s, each.stop_s)):
        label, _, number = interval.label.rpartition(" ")
        kind = _KINDS.index(label or interval.label)
        bucket = int(number) if label and kind < len(_KINDS) - 1 else -1
        lane = _LANES.index(interval.lane)
        start, stop = (round((moment_s - trace.start_s) * scale) for moment_s in (interval.start_s, interval.stop_s))
        last = last_of.get(lane)
        if last is not None and last[1] == kind and stop - last[3] < least_ticks and start - last[4] < least_ticks:
            last[2:] = [-1, last[3], max(last[4], stop)]
        else:
            last_of[lane] = [lane, kind, bucket, start, stop]
            parts.append(last_of[lane])
    return parts


def _entry(entry: BucketEntry, limits: Limits) -> dict[str, Any]:
    data = entry.to_dict()
    for names in (data, *data["owners"]):
        names |= {key: printable(names[key], limits.name_chars) for key in ("first_param", "last_param")}
    return data


def _measured(report: Report, limits: Limits) -> dict[str, Any] | None:
    if report.measured is None:
        return None
    rows = []
    for plan in report.measured.plans[:_MEASURED_ROWS]:
        x_numel = plan.bucket_numel
        if x_numel is None and plan.predicted_s is None:  # steps of the config's plan: they belong where it lies on the curve
            x_numel = report.configured.row.bucket_numel
        data = {**asdict(plan), "name": printable(plan.name, limits.name_chars)}
        rows.append({**data, "predicted_s": report.predicted_s(plan), "x_numel": x_numel})
    source = printable(report.measured.source, limits.name_chars)
    return {"source": source, "count": len(report.measured.plans), "plans": rows}


def _facts(setting: Setting) -> list[list[str]]:
    workload = setting.workload
    mode = "reduce-scatter and all-gather" if setting.mode is Mode.REDUCE_SCATTER else "all-reduce"
    overlap = "gradients overlap backward" if setting.overlap_grad_reduce else "gradients go out after backward"
    gathers = ", parameters are gathered in the next forward" if setting.overlap_param_gather else ""
    experts = "" if setting.expert_dp_size is None else f", experts on {setting.expert_dp_size:,}"
    instances = "" if setting.num_instances == 1 else f", in {setting.num_instances:,} replicas"
    size = format_bytes(workload.numel * workload.bytes_per_element)
    return [
        ["Ranks", f"{setting.dp_size:,}{experts}{instances}"],
        ["Mode", f"{mode}; {overlap}{gathers}"],
        ["Link", describe_link(setting.link)],
        ["Tensors", f"{len(workload.tensors):,}; elements: {format_count(workload.numel)}, {size} of gradients"],
        ["Microbatches", f"{workload.num_microbatches:,}"],
    ]


def _notes(setting: Setting) -> list[str]:
    if all(tensor.backward_s == 0 for tensor in setting.workload.tensors):
        return ["The workload says nothing about when gradients become ready, so nothing can be hidden behind backward."]
    return []
