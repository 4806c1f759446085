"""``--measured``: step times from a file, shown beside the simulated ones. No torch.

Two kinds of files are read:

* JSON lines of ``StepTraceLog`` (``kind: step_trace``) or of the demo (``kind: step``): steps of the config's plan;
* one JSON object with a list of ``candidates``, whose fields are those of ``MeasuredPlan``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field, TypeAdapter, ValidationError

from megabucket.errors import ConfigError, printable
from megabucket.planning.documents import Document, read_limited
from megabucket.planning.load import explain_validation_error
from megabucket.trace import Interval, Lane, StepTrace
from megabucket.trace.step_trace import LaunchTimes

MAX_BYTES: Final = 64 * 1024 * 1024
"""Of a file of measurements; 100,000 steps with 100 launches each do not fit."""

_ADVICE: Final = (
    "give the JSON lines of StepTraceLog or of the demo, or a JSON object with candidates: [{name, measured_s, ...}]"
)

_Read = TypeVar("_Read")
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


@pydantic.dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """Measured steps of one plan. Times are seconds of a step."""

    name: str
    measured_s: _Seconds
    """Median."""
    low_s: _Seconds | None = None
    """First quartile, or whatever the file calls low."""
    high_s: _Seconds | None = None
    exposed_s: _Seconds | None = None
    """Median."""
    predicted_s: _Seconds | None = None
    """The file's prediction; ``None``: the report simulates ``bucket_numel``, or the config's plan without it."""
    bucket_numel: Annotated[int, Field(gt=0, strict=True)] | None = None
    num_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured steps of a file."""

    source: str
    plans: tuple[MeasuredPlan, ...]
    traces: tuple[StepTrace, ...] = ()
    """The steps themselves, if the file says when collectives ran."""


def _unless_only_planned(entry: Any) -> Any:
    is_planned = isinstance(entry, dict) and entry.get("measured_s") is None
    return None if is_planned else entry


@dataclass(frozen=True)
class _Candidates:
    candidates: tuple[Annotated[MeasuredPlan | None, BeforeValidator(_unless_only_planned)], ...]


@dataclass(frozen=True)
class _Step:
    """One line of a log."""

    kind: str
    duration_s: Annotated[_Seconds, Field(validation_alias=AliasChoices("step_s", "duration_s"))]
    exposed_s: _Seconds | None = None
    step: int = 0
    rank: int = 0
    start_s: float = 0.0
    launches: tuple[LaunchTimes, ...] = ()

    def trace(self) -> StepTrace:
        """Return when collectives were under way and what the thread waited for."""
        intervals = []
        for launch in self.launches:
            times = ((Lane.COMM, launch.launched_s, launch.done_s), (Lane.WAIT, launch.wait_start_s, launch.wait_stop_s))
            for lane, begun_s, ended_s in times:
                if begun_s is not None and ended_s is not None:
                    start_s = self.start_s + max(0.0, begun_s)
                    intervals.append(Interval(lane, launch.label, start_s, max(start_s, self.start_s + ended_s)))
        return StepTrace(self.step, self.rank, self.start_s, self.start_s + self.duration_s, tuple(intervals))


_CANDIDATES: Final = TypeAdapter(_Candidates)
_STEP: Final = TypeAdapter(_Step)


def read_measured(path: Path) -> Measured:
    """Read measured step times.

    Raises:
        ConfigError: the file cannot be read, holds no steps, or numbers that are no times.
    """
    raw = read_limited(path, max_bytes=MAX_BYTES, advice="; keep some thousand steps of it")
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and "candidates" in whole:
        plans = tuple(plan for plan in _read(_CANDIDATES, whole, str(path)).candidates if plan is not None)
        if not plans:
            raise ConfigError(f"{path}: none of the candidates has a measured_s; {_ADVICE}")
        return Measured(path.name, plans)
    steps = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            entry = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not valid JSON: {printable(str(error))}; {_ADVICE}") from None
        if isinstance(entry, dict) and entry.get("kind") in ("step", "step_trace"):
            steps.append(_read(_STEP, entry, f"{path}:{number}"))
    # A training log with step traces in it has each step twice.
    if any(step.kind == "step_trace" for step in steps):
        steps = [step for step in steps if step.kind == "step_trace"]
    if not steps:
        raise ConfigError(f"{path}: holds no steps (objects of the kind step_trace or step); {_ADVICE}")
    return Measured(path.name, (_summary(path.name, steps),), tuple(step.trace() for step in steps if step.launches))


def _read(adapter: TypeAdapter[_Read], entry: dict[str, Any], source: str) -> _Read:
    try:
        return adapter.validate_python(entry)
    except ValidationError as error:
        raise explain_validation_error(error, data=entry, document=Document(entry, source)) from None


def _summary(source: str, steps: Sequence[_Step]) -> MeasuredPlan:
    seconds = [step.duration_s for step in steps]
    low_s, measured_s, high_s = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=4, method="inclusive")
    exposed = [step.exposed_s for step in steps if step.exposed_s is not None]
    name = f"{source}, median of {len(steps):,} step{'' if len(steps) == 1 else 's'}"
    exposed_s = statistics.median(exposed) if exposed else None
    return MeasuredPlan(name, measured_s, low_s, high_s, exposed_s, num_steps=len(steps))
