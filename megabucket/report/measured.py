"""``--measured``: step times from a file, to be shown beside the simulated ones. No torch.

Three kinds of files are understood:

* JSON lines of ``StepTraceLog`` (``kind: step_trace``): steps of the plan that the config gives;
* JSON lines of the demo (``kind: step``): the same;
* one JSON object with a list of ``candidates``, each with ``name`` and ``measured_s`` and, if known, ``predicted_s``,
  ``bucket_numel`` (of a uniform size), ``low_s`` and ``high_s``.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megabucket.errors import ConfigError, printable
from megabucket.planning.documents import read_limited
from megabucket.trace import CollectiveKind, CollectiveRecord, Interval, Lane, StepTrace

MAX_BYTES: Final = 64 * 1024 * 1024
"""Of a file of measurements: 100,000 steps with 100 launches each do not fit, and need not."""

_STEP_TIME: Final = {"step_trace": "duration_s", "step": "step_s"}
_CANDIDATE_TIMES: Final = ("low_s", "high_s", "exposed_s", "predicted_s")
_ADVICE: Final = (
    "give the JSON lines of StepTraceLog or of the demo, or a JSON object with candidates: [{name, measured_s, ...}]"
)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """Measured steps of one plan."""

    name: str
    measured_s: float
    """Median."""
    low_s: float | None = None
    """First quartile, or whatever the file calls low."""
    high_s: float | None = None
    exposed_s: float | None = None
    """Median."""
    predicted_s: float | None = None
    """What the file says was predicted; ``None``: the report simulates the config's plan."""
    bucket_numel: int | None = None
    num_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a file says about measured steps."""

    source: str
    plans: tuple[MeasuredPlan, ...]
    traces: tuple[StepTrace, ...] = ()
    """The steps themselves, when the file tells when collectives ran."""


def read_measured(path: Path) -> Measured:
    """Read measured step times.

    Raises:
        ConfigError: the file cannot be read, is empty, holds no steps, or numbers that are no times.
    """
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty, so there is nothing to compare with; {_ADVICE}, or leave --measured out")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, Mapping) and "candidates" in whole:
        return Measured(path.name, _read_candidates(path, whole["candidates"]))
    if whole is not None and not (isinstance(whole, Mapping) and "kind" in whole):
        raise ConfigError(f"{path}: is JSON without a list of candidates; {_ADVICE}")
    return _read_lines(path, text.splitlines())


def _read_text(path: Path) -> str:
    raw = read_limited(path, max_bytes=MAX_BYTES, advice="; keep some thousand steps of it")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _read_candidates(path: Path, entries: object) -> tuple[MeasuredPlan, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ConfigError(f"{path}: candidates must be a list with at least one measured plan; {_ADVICE}")
    plans = []
    for index, entry in enumerate(entries):
        where = f"{path}: candidates[{index}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be a mapping with name and measured_s")
        if entry.get("measured_s") is None:
            continue  # planned, not run
        numel = entry.get("bucket_numel")
        if numel is not None and (isinstance(numel, bool) or not isinstance(numel, int) or numel < 1):
            raise ConfigError(
                f"{where}.bucket_numel must be a number of elements, at least 1; got {printable(repr(numel), 80)}"
            )
        seconds: dict[str, Any] = {
            key: _seconds(entry[key], f"{where}.{key}") for key in _CANDIDATE_TIMES if entry.get(key) is not None
        }
        measured_s = _seconds(entry["measured_s"], f"{where}.measured_s")
        plans.append(MeasuredPlan(str(entry.get("name", f"plan {index}")), measured_s, bucket_numel=numel, **seconds))
    if not plans:
        raise ConfigError(f"{path}: none of the candidates has a measured_s; {_ADVICE}")
    return tuple(plans)


def _read_lines(path: Path, lines: Sequence[str]) -> Measured:
    steps: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = " (the last line; was the run cut off? remove it)" if number == len(lines) and number > 1 else ""
            raise ConfigError(f"{path}:{number}: not valid JSON{cut}: {printable(str(error))}; {_ADVICE}") from None
        if isinstance(entry, Mapping) and entry.get("kind") in _STEP_TIME:
            steps.append(entry)
    # A training log with step traces in it tells each step twice.
    kind = "step_trace" if any(step["kind"] == "step_trace" for step in steps) else "step"
    steps = [step for step in steps if step["kind"] == kind]
    if not steps:
        raise ConfigError(f"{path}: holds no steps (objects of the kind step_trace or step); {_ADVICE}")
    key = _STEP_TIME[kind]
    seconds = [_seconds(step.get(key), f"{path}: {key} of step {index}") for index, step in enumerate(steps)]
    exposed = [
        _seconds(step["exposed_s"], f"{path}: exposed_s of step {index}")
        for index, step in enumerate(steps)
        if step.get("exposed_s") is not None
    ]
    low_s, high_s = _quartiles(seconds)
    plan = MeasuredPlan(
        name=f"{path.name}, median of {len(steps):,} step{'' if len(steps) == 1 else 's'}",
        measured_s=statistics.median(seconds),
        low_s=low_s,
        high_s=high_s,
        exposed_s=statistics.median(exposed) if exposed else None,
        num_steps=len(steps),
    )
    traces = tuple(_trace(path, step) for step in steps if step.get("launches"))
    return Measured(path.name, (plan,), traces)


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    low_s, _, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
    return low_s, high_s


def _trace(path: Path, step: Mapping[str, Any]) -> StepTrace:
    """Return what a line of ``StepTraceLog`` tells: when collectives were under way, and what the thread waited for."""
    try:
        start_s, stop_s = float(step["start_s"]), float(step["start_s"]) + float(step["duration_s"])
        intervals, records = [], []
        for launch in step["launches"]:
            label = str(launch["label"])
            records.append(CollectiveRecord(CollectiveKind(launch["kind"]), label, 1, int(launch["payload_bytes"]), 1))
            for lane, begun, ended in ((Lane.COMM, "launched_s", "done_s"), (Lane.WAIT, "wait_start_s", "wait_stop_s")):
                if launch.get(begun) is not None and launch.get(ended) is not None:
                    begun_s = max(start_s, start_s + float(launch[begun]))
                    intervals.append(Interval(lane, label, begun_s, max(begun_s, start_s + float(launch[ended]))))
        return StepTrace(int(step["step"]), int(step.get("rank", 0)), start_s, stop_s, tuple(intervals), tuple(records))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: a step trace lacks or garbles {printable(str(error))}; write it with StepTraceLog of this version"
        ) from None


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{what} must be a finite number of seconds >= 0, got {printable(repr(value), 80)}")
    return float(value)
