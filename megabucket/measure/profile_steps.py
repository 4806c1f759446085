"""From recorded moments of training steps to a ``Workload``. No torch.

Moments are medians over microbatches, counted from the start or the end of a forward; times are differences of medians. So the
sums, which decide how long a step is, are medians of measured times, and no time is negative.
"""

from __future__ import annotations

import enum
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabucket.errors import PhaseError
from megabucket.layout import ParamSpec
from megabucket.planning.documents import write_text
from megabucket.planning.workload import TensorWork, WireBytes, Workload, workload_from_dict


@dataclass(frozen=True)
class WorkloadProfile:
    """A measured workload and the facts of its measurement."""

    workload: Workload
    facts: Mapping[str, Any]
    """Plain data: versions, device, model fingerprint, number of steps."""

    def to_dict(self) -> dict[str, Any]:
        """Return ``Workload.to_dict`` with the facts beside it under ``facts``."""
        return {**self.workload.to_dict(), "facts": dict(self.facts)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> WorkloadProfile:
        """Return the profile that ``to_dict`` wrote.

        Raises:
            ConfigError: not such data.
        """
        return WorkloadProfile(workload_from_dict(data), data["facts"])

    def write(self, path: str | Path) -> None:
        """Write JSON and make the directory.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_text(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")


class EventKind(enum.Enum):
    """What a hook records."""

    CALLED = "the forward of a module begins; the index is the module's"
    FORWARD_END = "the forward of the whole model ends"
    READY = "a gradient was accumulated; the index is the parameter's"
    OPTIMIZER = "an optimizer begins to step"
    OPTIMIZER_END = "an optimizer ends, and with the outermost one the step"
    HANDING_OVER = "gradients are given to collectives, outside of backward"
    HANDED_OVER = "all gradients are given to collectives"
    STEP_END = "the step is over"


@dataclass(frozen=True, slots=True)
class Event:
    """One moment, in seconds."""

    kind: EventKind
    moment_s: float
    index: int = -1


@dataclass(slots=True)
class Microbatch:
    """One forward and backward, in seconds of the clock."""

    start_s: float
    called_s: dict[int, float] = field(default_factory=dict)
    """By module: its first call."""
    end_s: float | None = None
    ready_s: dict[int, float] = field(default_factory=dict)
    """By parameter: its last accumulation."""

    @property
    def forward_end_s(self) -> float:
        """End of the forward; the first gradient where the model was never called as a whole."""
        return self.end_s if self.end_s is not None else min(self.ready_s.values())


@dataclass(frozen=True, slots=True)
class Step:
    """The recorded times of one step."""

    microbatches: list[Microbatch]
    optimizer_s: float = 0.0
    handing_over_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of all passes and the optimizer."""
        passes_s = sum(max(each.ready_s.values()) - each.start_s for each in self.microbatches)
        return passes_s + self.handing_over_s + self.optimizer_s


def split_steps(events: Iterable[Event]) -> list[Step]:
    """Return the steps, without forwards that no backward follows.

    A step ends where a forward follows an optimizer or ``STEP_END``. If no step ends, each microbatch is one; otherwise an
    unfinished step at the end is left out.
    """
    chunks: list[list[Event]] = [[]]
    for event in events:
        if event.kind is EventKind.CALLED and _has_ended(chunks[-1]):
            chunks.append([])
        chunks[-1].append(event)
    steps = [
        Step(
            _microbatches(chunk),
            _spans_s(chunk, EventKind.OPTIMIZER, EventKind.OPTIMIZER_END),
            _spans_s(chunk, EventKind.HANDING_OVER, EventKind.HANDED_OVER),
        )
        for chunk in chunks
        if _has_ended(chunk)
    ]
    if not steps:
        return [Step([microbatch]) for chunk in chunks for microbatch in _microbatches(chunk)]
    return [step for step in steps if step.microbatches]


def _has_ended(events: Sequence[Event]) -> bool:
    return bool(events) and events[-1].kind in (EventKind.OPTIMIZER_END, EventKind.STEP_END)


def _microbatches(events: Iterable[Event]) -> list[Microbatch]:
    found: list[Microbatch] = []
    for event in events:
        if event.kind is EventKind.CALLED:
            if not found or found[-1].ready_s:
                found.append(Microbatch(event.moment_s))
            found[-1].called_s.setdefault(event.index, event.moment_s)
        elif found and event.kind is EventKind.FORWARD_END:
            found[-1].end_s = event.moment_s
        elif found and event.kind is EventKind.READY:
            found[-1].ready_s[event.index] = event.moment_s
    return [microbatch for microbatch in found if microbatch.ready_s]


def _spans_s(events: Iterable[Event], start: EventKind, stop: EventKind) -> float:
    """Return the seconds of all outermost spans. A span that has not ended when a forward begins has failed."""
    total_s, open_s = 0.0, list[float]()
    for event in events:
        if event.kind is EventKind.CALLED:
            open_s.clear()
        elif event.kind is start:
            open_s.append(event.moment_s)
        elif event.kind is stop and open_s:
            start_s = open_s.pop()
            total_s += 0.0 if open_s else event.moment_s - start_s
    return total_s


def reduce_steps(
    steps: Sequence[Step], specs: Sequence[ParamSpec], *, owners: Sequence[Sequence[Sequence[int]]], wire: WireBytes
) -> WorkloadProfile:
    """Return the workload of a typical step: medians over all microbatches and steps.

    Args:
        specs: trainable parameters in registration order.
        owners: for each parameter the modules that hold it, from the owner outwards; several such chains if it is tied.
        wire: bytes of an element of a gradient and of a parameter.

    Raises:
        PhaseError: no step has a backward.
    """
    microbatches = [microbatch for step in steps for microbatch in step.microbatches]
    if not microbatches:
        raise PhaseError(
            "no step was profiled: no parameter of the model received a gradient inside the context. Run at least one whole "
            "step (forward, backward, optimizer) of this model there, after the warm-up steps."
        )
    forward_s, is_in_order = _forward(microbatches, owners)
    backward_s, order = _backward(microbatches, len(specs))
    unused = [index for index in range(len(specs)) if index not in set(order)]
    # Training hands gradients to collectives within backward, which takes longer for larger ones.
    handing_over_s = statistics.median(step.handing_over_s for step in steps)
    total_numel = sum(spec.numel for spec in specs) or 1
    tensors = [
        TensorWork(spec.name, spec.numel, backward + handing_over_s * spec.numel / total_numel, forward)
        for spec, backward, forward in zip(specs, backward_s, forward_s, strict=True)
    ]
    workload = Workload(
        tuple(tensors),
        bytes_per_element=wire.gradient,
        param_bytes_per_element=wire.parameter,
        optimizer_s=statistics.median(step.optimizer_s for step in steps),
        num_microbatches=round(statistics.median(len(step.microbatches) for step in steps)),
        ready_order=(*order, *reversed(unused)),
    )
    steps_s = sorted(step.compute_s for step in steps)
    facts = {
        "num_steps": len(steps),
        "num_microbatches_seen": len(microbatches),
        "step_compute_s": {"min": steps_s[0], "median": steps_s[len(steps_s) // 2], "max": steps_s[-1]},
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s,
        # The simulator assumes that parameters are first needed in the order of registration.
        "is_forward_in_registration_order": is_in_order,
        "unused": [specs[index].name for index in unused],
        "handing_over_s_in_backward": handing_over_s,
    }
    return WorkloadProfile(workload, facts)


def _forward(microbatches: Sequence[Microbatch], owners: Sequence[Sequence[Sequence[int]]]) -> tuple[list[float], bool]:
    """Return the forward seconds of each parameter, and whether parameters are needed in order of registration.

    A parameter is needed when its owner is called, or the nearest module around an owner that is never called. If several are
    needed at once, the last one has the module's time. A module that needs nothing new lengthens the one before it.
    """
    called = {module for each in microbatches for module in each.called_s}
    needers = [{next((module for module in chain if module in called), -1) for chain in chains} for chains in owners]
    moments = _medians(
        {
            param: min(each.called_s[module] for module in modules & each.called_s.keys()) - each.start_s
            for param, modules in enumerate(needers)
            if modules & each.called_s.keys()
        }
        for each in microbatches
    )
    in_order = sorted(moments, key=lambda param: (moments[param], param))
    # The first one also has what runs before it is needed.
    starts_s = [0.0, *(moments[param] for param in in_order[1:])]
    stops_s = [*starts_s[1:], statistics.median(each.forward_end_s - each.start_s for each in microbatches)]
    seconds = [0.0] * len(owners)
    for param, start_s, stop_s in zip(in_order, starts_s, stops_s, strict=False):
        seconds[param] = max(0.0, stop_s - start_s)
    return seconds, in_order == sorted(in_order)


def _backward(microbatches: Sequence[Microbatch], num_params: int) -> tuple[list[float], list[int]]:
    """Return the backward seconds of each parameter, and the order in which gradients are ready.

    The first one has all the time from the end of forward to itself, the loss included.
    """
    moments = _medians(
        {param: moment_s - each.forward_end_s for param, moment_s in each.ready_s.items()} for each in microbatches
    )
    order = sorted(moments, key=lambda param: (moments[param], -param))
    seconds, before_s = [0.0] * num_params, 0.0
    for param in order:
        seconds[param] = max(0.0, moments[param] - before_s)
        before_s = max(before_s, moments[param])
    return seconds, order


def _medians(rows: Iterable[Mapping[int, float]]) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            found[key].append(value)
    return {key: statistics.median(values) for key, values in found.items()}
