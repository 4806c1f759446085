"""From what hooks have noted in some steps to a ``Workload``: pure arithmetic on moments, no torch.

Moments are medians over microbatches, counted from the start of a forward or the end of it, and differences are taken between
medians. So the sums, which decide how long a step is, are medians of what was measured, and no difference is negative.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megabucket.errors import PhaseError
from megabucket.layout import ParamSpec
from megabucket.planning.workload import TensorWork, Workload


class EventKind(enum.Enum):
    """What a hook notes."""

    FORWARD = "forward"  # a training forward of the whole model begins
    NEED = "need"  # a module that owns parameters begins; its index
    FORWARD_END = "forward end"
    READY = "ready"  # a gradient has been accumulated; the index of its parameter
    OPTIMIZER = "optimizer"  # an optimizer begins to step
    OPTIMIZER_END = "optimizer end"
    BUCKETS = "buckets"  # gradients are handed to collectives, apart from backward
    BUCKETS_END = "buckets end"
    STEP_END = "step end"


@dataclass(frozen=True, slots=True)
class Event:
    """One moment."""

    kind: EventKind
    moment_s: float
    index: int = -1


@dataclass(slots=True)
class Microbatch:
    """One forward and backward. Moments are those of the clock."""

    start_s: float
    needed_s: dict[int, float] = field(default_factory=dict)
    """By module: when it began, the first time in this microbatch."""
    end_s: float | None = None
    """End of the forward."""
    ready_s: dict[int, float] = field(default_factory=dict)
    """By parameter: when its gradient was complete."""


@dataclass(slots=True)
class Step:
    """What was noted from one step to the next."""

    microbatches: list[Microbatch] = field(default_factory=list)
    optimizer_s: float = 0.0
    buckets_s: float = 0.0
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of the model decides how moments are read."""

    specs: tuple[ParamSpec, ...]
    """Trainable parameters in registration order."""
    module_params: tuple[tuple[int, ...], ...]
    """By module index: the parameters (by index) that it needs when it begins."""
    grad_bytes: int
    """Of one gradient element on the wire."""
    param_bytes: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """A workload and how it came about."""

    workload: Workload
    num_steps: int
    num_microbatches_seen: int
    unused: tuple[str, ...]
    """Parameters that never got a gradient."""
    is_forward_in_order: bool
    """Whether parameters are first needed in the order in which they were registered, as the simulator takes it."""
    step_compute_s: tuple[float, ...]
    """Of each step that was counted."""
    handing_over_s: float
    """What backward holds of handing gradients to collectives, in a step."""


def split_steps(events: Sequence[Event]) -> list[Step]:
    """Return the steps that events tell of, without what belongs to no backward.

    A step ends with ``STEP_END``, or where a forward follows an optimizer. Without either, every microbatch is a step. What
    comes last without such an end is left out if there was one before.
    """
    splitter = _Splitter()
    for event in events:
        splitter.take(event)
    steps = splitter.steps
    if not any(step.has_ended for step in steps):
        return [Step([microbatch]) for step in steps for microbatch in step.microbatches]
    return [step for step in steps if step.has_ended and step.microbatches]


class _Splitter:
    """Takes events one by one."""

    def __init__(self) -> None:
        self.steps = [Step()]
        self._open: Microbatch | None = None
        self._begun_s: dict[EventKind, list[float]] = {}

    def take(self, event: Event) -> None:
        """Put one event where it belongs."""
        step, kind, moment_s = self.steps[-1], event.kind, event.moment_s
        if kind in (EventKind.FORWARD, EventKind.NEED):
            microbatch = self._forward_at(moment_s)
            if kind is EventKind.NEED:
                microbatch.needed_s.setdefault(event.index, moment_s)
        elif kind is EventKind.FORWARD_END and self._open is not None:
            self._open.end_s = moment_s
        elif kind is EventKind.READY and self._open is not None:
            self._take_ready(self._open, event)
        elif kind in (EventKind.OPTIMIZER, EventKind.BUCKETS):
            self._begun_s.setdefault(kind, []).append(moment_s)
        elif kind is EventKind.BUCKETS_END:
            step.buckets_s += self._since(EventKind.BUCKETS, moment_s)
        elif kind is EventKind.OPTIMIZER_END:
            step.optimizer_s += self._since(EventKind.OPTIMIZER, moment_s)
            step.has_ended, self._open = True, None
        elif kind is EventKind.STEP_END:
            step.has_ended, self._open = True, None

    def _forward_at(self, moment_s: float) -> Microbatch:
        """Return the microbatch of a forward: another one once a backward has come."""
        if self._open is None or self._open.ready_s:
            if self.steps[-1].has_ended:
                self.steps.append(Step())
            self._open = Microbatch(moment_s)
            self._begun_s.clear()  # what has not ended by now has failed
        return self._open

    def _take_ready(self, microbatch: Microbatch, event: Event) -> None:
        if not microbatch.ready_s:
            self.steps[-1].microbatches.append(microbatch)
        microbatch.ready_s[event.index] = event.moment_s  # of several gradients the last counts

    def _since(self, kind: EventKind, moment_s: float) -> float:
        """Return how long something took; nothing for what ends inside of another of its kind, which holds it."""
        begun_s = self._begun_s.get(kind, [])
        start_s = begun_s.pop() if begun_s else moment_s
        return 0.0 if begun_s else moment_s - start_s


def reduce_steps(steps: Sequence[Step], facts: ModelFacts) -> Reduction:
    """Return the workload of typical steps: medians over all microbatches and steps.

    Raises:
        PhaseError: no step has a backward.
    """
    microbatches = [microbatch for step in steps for microbatch in step.microbatches]
    if not microbatches:
        raise PhaseError(
            "no step was profiled: no parameter of the model received a gradient while the hooks were there. Run at least one "
            "whole step (forward, backward, optimizer) of this very model inside the context, after the steps that warm up."
        )
    count = len(facts.specs)
    forward_s, is_in_order = _forward(microbatches, facts)
    backward_s, order, unused = _backward(microbatches, count)
    handing_over_s = statistics.median(step.buckets_s for step in steps)
    _share_out(handing_over_s, backward_s, facts.specs)
    workload = Workload(
        tensors=tuple(
            TensorWork(spec.name, spec.numel, backward_s=backward_s[i], forward_s=forward_s[i])
            for i, spec in enumerate(facts.specs)
        ),
        bytes_per_element=facts.grad_bytes,
        param_bytes_per_element=facts.param_bytes,
        optimizer_s=statistics.median(step.optimizer_s for step in steps),
        num_microbatches=round(statistics.median(len(step.microbatches) for step in steps)),
        ready_order=tuple(order),
    )
    return Reduction(
        workload=workload,
        num_steps=len(steps),
        num_microbatches_seen=len(microbatches),
        unused=tuple(facts.specs[i].name for i in unused),
        is_forward_in_order=is_in_order,
        step_compute_s=tuple(_compute_s(step) for step in steps),
        handing_over_s=handing_over_s,
    )


def _forward(microbatches: Sequence[Microbatch], facts: ModelFacts) -> tuple[list[float], bool]:
    """Return the forward seconds of each parameter, and whether they are needed in order of registration.

    The time of a module counts for the last of the parameters that it is the first to need: all of them have to be there when
    it begins. Modules that need nothing new (the other end of a tied weight) lengthen the one before.
    """
    first_need: dict[int, list[float]] = {}
    ends_s = []
    for one in microbatches:
        modules = sorted(one.needed_s, key=lambda module: one.needed_s[module])
        seen: set[int] = set()
        for module in modules:
            for param in facts.module_params[module]:
                if param not in seen:
                    seen.add(param)
                    moment_s = one.needed_s[module] - one.start_s
                    first_need.setdefault(param, []).append(moment_s)
        end_s = one.end_s if one.end_s is not None else min(one.ready_s.values())
        ends_s.append(end_s - one.start_s)
    moments = {param: statistics.median(known) for param, known in first_need.items()}
    in_order = sorted(moments, key=lambda param: (moments[param], param))
    starts = [moments[param] for param in in_order]
    seconds = [0.0] * len(facts.specs)
    if in_order:
        # What runs before the first parameter is needed belongs to forward as well.
        starts[0] = 0.0
        for param, start_s, stop_s in zip(in_order, starts, [*starts[1:], statistics.median(ends_s)], strict=True):
            seconds[param] = max(0.0, stop_s - start_s)
    return seconds, in_order == sorted(in_order)


def _backward(microbatches: Sequence[Microbatch], count: int) -> tuple[list[float], list[int], list[int]]:
    """Return the backward seconds of each parameter, the order in which they are ready, and those that never were.

    The first one has all that lies between the end of forward and itself: the loss, too.
    """
    ready: dict[int, list[float]] = {}
    for one in microbatches:
        start_s = one.end_s if one.end_s is not None else min(one.ready_s.values())
        for param, moment_s in one.ready_s.items():
            ready.setdefault(param, []).append(moment_s - start_s)
    moments = {param: statistics.median(known) for param, known in ready.items()}
    order = sorted(moments, key=lambda param: (moments[param], -param))
    seconds, before_s = [0.0] * count, 0.0
    for param in order:
        seconds[param] = max(0.0, moments[param] - before_s)
        before_s = max(before_s, moments[param])
    unused = [param for param in reversed(range(count)) if param not in moments]
    return seconds, order + unused, unused[::-1]


def _share_out(seconds: float, backward_s: list[float], specs: Sequence[ParamSpec]) -> None:
    """Add what handing gradients to collectives takes, by elements: in training it happens within backward."""
    total_numel = sum(spec.numel for spec in specs)
    for index, spec in enumerate(specs):
        backward_s[index] += seconds * spec.numel / total_numel if total_numel else 0.0


def _compute_s(step: Step) -> float:
    passes_s = sum(max(one.ready_s.values()) - one.start_s for one in step.microbatches)
    return passes_s + step.buckets_s + step.optimizer_s
