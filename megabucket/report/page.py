"""The page, the figures as JSON and the Chrome traces. No torch.

The page draws the data it is given. Its one table of plans, those of the sweep and the named ones, with the timeline of each,
feeds the slider, the buttons and the curve. Data that grows with the model is cut, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from megabucket.errors import ConfigError, printable
from megabucket.planning.documents import write_text
from megabucket.planning.setting import Setting
from megabucket.report.chrome import write_chrome_trace
from megabucket.report.collect import NamedPlan, Report
from megabucket.trace import Lane, StepTrace
from megabucket.units import format_bytes, format_count

_MOST_BUCKETS: Final = 20_000
"""In the timeline of a plan; a timeline of more takes long to compute and shows only stripes."""
_MOST_SIZES: Final = 250
"""Buckets of a plan up to which the page knows the size of each."""
_BUCKET_ROWS: Final = (40, 10)
"""First and last rows of the table of buckets."""
_FACT_CHARS: Final = 20_000
_LEAST_FRACTION: Final = 1 / 500
"""Of a step: neighbours in a lane that are shorter are drawn as one."""


def write_report(report: Report, path: Path) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json``, ``report.trace.json`` and, of measured steps, ``report.measured.trace.json``.

    Returns:
        the files that were written, the page first.

    Raises:
        ConfigError: the page is not called ``.html``, or a file cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: the page is called something.html; the other files lie beside it")
    written = [path, path.with_suffix(".json"), path.with_suffix(".trace.json")]
    write_text(path, render_page(report))
    write_text(written[1], json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n")
    write_chrome_trace(written[2], report.setting.traces(report.configured.plan, num_steps=3))
    if report.measured is not None and report.measured.traces:
        written.append(path.with_suffix(".measured.trace.json"))
        write_chrome_trace(written[3], report.measured.traces)
    return tuple(written)


def render_page(report: Report) -> str:
    """Return the page: one file that loads nothing."""
    page = _asset("page.html").replace("@STYLE@", _asset("page.css"))
    page = page.replace("@SCRIPTS@", _asset("chart.js") + _asset("page.js"))
    # In JSON "<" can only be part of a string; escaped, no string can end the script element.
    values = page_data(report)
    facts = {name: printable(text, _FACT_CHARS) for name, text in values["facts"].items()}
    lines = [printable(line, _FACT_CHARS) for line in report.outlook.advice.config_lines]
    data = json.dumps({**_printable(values), "facts": facts, "config_lines": lines}, separators=(",", ":"), ensure_ascii=False)
    return page.replace("@DATA@", data.replace("<", "\\u003c"))  # last: a name may be "@STYLE@"


def _asset(name: str) -> str:
    return (files("megabucket.report") / "assets" / name).read_text(encoding="utf-8")


def _printable(data: Any) -> Any:
    """Return plain data with short and printable strings."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {key: _printable(value) for key, value in data.items()}
    return [_printable(value) for value in data] if isinstance(data, list | tuple) else data


def page_data(report: Report) -> dict[str, Any]:
    """Return the data of the page: the report's figures without long lists, and the timelines."""
    first, last = _BUCKET_ROWS
    is_long = len(report.buckets) > first + last
    plans = [_plan(report.setting, plan) for plan in (*report.sized(), *report.plans)]
    figures = report.to_dict()
    link = _in_words(figures["link"])
    if report.link_name is not None:
        link = f"{printable(report.link_name)} ({link})"
    names = ("title", "summary", "mode", "dp_size", "lower_bound_s", "memory", "scaling", "scaling_gaps", "measured")
    return {
        **{name: figures[name] for name in names},
        "facts": _facts(report.setting, link),
        "plans": plans,
        "bucket_count": len(report.buckets),
        "buckets": report.buckets[:first] + report.buckets[-last:] if is_long else report.buckets,
    }


def _plan(setting: Setting, plan: NamedPlan) -> dict[str, Any]:
    num_buckets, workload = len(plan.plan.buckets), setting.workload
    trace = setting.traces(plan.plan)[-1] if num_buckets <= _MOST_BUCKETS else None  # the last step is a usual one
    sizes = zip(plan.plan.buckets, plan.plan.grad_sizes_bytes(workload), plan.plan.param_sizes_bytes(workload), strict=True)
    return {
        "key": plan.key,
        "name": plan.name,
        **plan.row.to_dict(),
        "hidden": None if trace is None else trace.overlap_fraction,
        "parts": None if trace is None else timeline(trace),
        "sizes": [[len(bucket), *num_bytes] for bucket, *num_bytes in sizes] if num_buckets <= _MOST_SIZES else None,
    }


def timeline(trace: StepTrace, least_fraction: float = _LEAST_FRACTION) -> list[list[Any]]:
    """Return the parts of a step as ``[lane, label, start, stop]``, times as fractions of the step.

    Args:
        least_fraction: neighbours of a kind that are shorter than this, and no farther apart, become one without a number.
    """
    parts: list[list[Any]] = []
    last_of: dict[Lane, list[Any]] = {}
    for interval in sorted(trace.intervals, key=lambda each: (each.start_s, each.stop_s)):
        times = (interval.start_s - trace.start_s, interval.stop_s - trace.start_s)
        start, stop = (round(moment_s / trace.duration_s, 6) if trace.duration_s > 0 else 0.0 for moment_s in times)
        kind = interval.label.rstrip("0123456789 ")
        last = last_of.get(interval.lane)
        is_same = last is not None and last[1].startswith(kind)
        if last is not None and is_same and stop - last[2] < least_fraction and start - last[3] < least_fraction:
            last[1:] = [kind, last[2], max(last[3], stop)]
        else:
            last_of[interval.lane] = [interval.lane.value, interval.label, start, stop]
            parts.append(last_of[interval.lane])
    return parts


def _in_words(link: Mapping[str, Any]) -> str:
    """Return the fields of a link, without its tables."""
    parts = []
    for key, value in link.items():
        if isinstance(value, Mapping):
            parts.append(f"{printable(key)} ({_in_words(value)})")
        elif key != "tables":
            parts.append(f"{printable(key)} {printable(str(value))}")
    return ", ".join(parts)


def _facts(setting: Setting, link: str) -> dict[str, str]:
    workload = setting.workload
    groups = "".join(f"; {name}: {size:,}" for name, size in setting.group_sizes.items())
    replicas = f"; in {setting.num_instances:,} replicas" if setting.num_instances > 1 else ""
    overlap = "gradients overlap backward" if setting.overlap_grad_reduce else "gradients go out after backward"
    gathers = ", parameters are gathered in the next forward" if setting.overlap_param_gather else ""
    grads = format_bytes(workload.numel * workload.bytes_per_element)
    return {
        "Ranks": f"{setting.dp_size:,}{groups}{replicas}",
        "Mode": f"{setting.mode.value}; {overlap}{gathers}",
        "Link": link,
        "Tensors": f"{len(workload.tensors):,}; elements: {format_count(workload.numel)}, {grads} of gradients",
        "Microbatches": f"{workload.num_microbatches:,}",
    }
