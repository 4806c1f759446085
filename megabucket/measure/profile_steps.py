"""From moments in some training steps to a ``Workload``: sorting them into steps, and arithmetic on them. No torch.

Moments are medians over microbatches, counted from the start of a forward or the end of it, and differences are taken between
medians. So the sums, which decide how long a step is, are medians of what was measured, and no difference is negative.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabucket.errors import ConfigError, PhaseError
from megabucket.layout import ParamSpec
from megabucket.planning.workload import TensorWork, Workload, workload_from_dict, write_workload
from megabucket.trace.clock import Clock, Stamp


@dataclass(frozen=True)
class WorkloadProfile:
    """A measured workload and the facts of its measurement."""

    workload: Workload
    facts: Mapping[str, Any]
    """Plain data: versions, device, model fingerprint, how many steps, what the hooks cost."""

    def to_dict(self) -> dict[str, Any]:
        """Return the workload as ``Workload.to_dict`` gives it, with the facts beside it under ``facts``."""
        return {**self.workload.to_dict(), "facts": dict(self.facts)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> WorkloadProfile:
        """Read what ``to_dict`` wrote.

        Raises:
            ConfigError: not such data.
        """
        facts = data.get("facts", {})
        if not isinstance(facts, Mapping):
            raise ConfigError(f"workload.facts must be a mapping, got {type(facts).__name__}")
        return WorkloadProfile(workload_from_dict(data), facts)

    def write(self, path: str | Path) -> None:
        """Write JSON, making the directory.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_workload(Path(path), self.workload, facts=self.facts)


@dataclass(slots=True)
class Microbatch:
    """One forward and backward. Moments are stamps of a clock, and seconds once ``StepNotes.steps`` has read them."""

    start: Stamp
    needed: dict[int, Stamp] = field(default_factory=dict)
    """By module: when it began, the first time in this microbatch."""
    end: Stamp | None = None
    """End of the forward."""
    ready: dict[int, Stamp] = field(default_factory=dict)
    """By parameter: when its gradient was complete, the last one if there were several."""

    @property
    def forward_end(self) -> Stamp:
        """End of the forward; the first gradient where the model was never called as a whole."""
        return self.end if self.end is not None else min(self.ready.values())


@dataclass(slots=True)
class Step:
    """What was noted from one step to the next."""

    microbatches: list[Microbatch] = field(default_factory=list)
    optimizer: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    """When optimizers began and ended."""
    handing_over: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    """When gradients were handed to collectives, apart from backward."""
    has_ended: bool = False


class StepNotes:
    """Notes moments and sorts them into steps.

    A step ends with ``end_step``, or where a forward follows an optimizer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._steps = clock, [Step()]
        self._open: Microbatch | None = None
        self._num_open_optimizers = 0
        self._optimizer_began: Stamp | None = None

    def forward(self) -> None:
        """A training forward of the whole model begins."""
        self._microbatch()

    def need(self, module: int) -> None:
        """A module that owns parameters begins."""
        self._microbatch().needed.setdefault(module, self._clock.stamp())

    def forward_end(self) -> None:
        """The forward of the whole model ends."""
        if self._open is not None:
            self._open.end = self._clock.stamp()

    def ready(self, param: int) -> None:
        """A gradient was accumulated."""
        if self._open is not None:
            if not self._open.ready:
                self._steps[-1].microbatches.append(self._open)
            self._open.ready[param] = self._clock.stamp()

    def begin_optimizer(self) -> None:
        """An optimizer begins to step. One inside of another is a part of it."""
        self._num_open_optimizers += 1
        if self._num_open_optimizers == 1:
            self._optimizer_began = self._clock.stamp()

    def end_optimizer(self) -> None:
        """An optimizer ends, and with the outermost one the step."""
        now = self._clock.stamp()
        self._num_open_optimizers = max(0, self._num_open_optimizers - 1)
        if self._num_open_optimizers == 0:
            self._steps[-1].optimizer.append((now if self._optimizer_began is None else self._optimizer_began, now))
            self.end_step()

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """All that runs inside is the optimizer's."""
        self.begin_optimizer()
        try:
            yield
        finally:
            self.end_optimizer()

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Gradients are handed to collectives inside."""
        began = self._clock.stamp()
        yield
        self._steps[-1].handing_over.append((began, self._clock.stamp()))

    def end_step(self) -> None:
        """The step is over."""
        self._steps[-1].has_ended, self._open = True, None

    def _microbatch(self) -> Microbatch:
        """Return the microbatch of a forward: another one once a backward has come."""
        if self._open is None or self._open.ready:
            if self._steps[-1].has_ended:
                self._steps.append(Step())
            self._open = Microbatch(self._clock.stamp())
            self._num_open_optimizers, self._optimizer_began = 0, None  # what has not ended by now has failed
        return self._open

    def steps(self) -> list[Step]:
        """Return the steps in seconds, without what belongs to no backward. The clock must know all moments by now.

        Where no step has ended, every microbatch is one; else what comes last without an end is left out.
        """
        steps = [_in_seconds(step, self._clock.seconds) for step in self._steps]
        if not any(step.has_ended for step in steps):
            return [Step([microbatch]) for step in steps for microbatch in step.microbatches]
        return [step for step in steps if step.has_ended and step.microbatches]


def _in_seconds(step: Step, seconds: Callable[[Stamp], Stamp]) -> Step:
    def known(moments: dict[int, Stamp]) -> dict[int, Stamp]:
        return {index: seconds(stamp) for index, stamp in moments.items()}

    def spans(stamps: list[tuple[Stamp, Stamp]]) -> list[tuple[Stamp, Stamp]]:
        return [(seconds(began), seconds(ended)) for began, ended in stamps]

    microbatches = [
        Microbatch(seconds(one.start), known(one.needed), None if one.end is None else seconds(one.end), known(one.ready))
        for one in step.microbatches
    ]
    return Step(microbatches, spans(step.optimizer), spans(step.handing_over), step.has_ended)


def reduce_steps(
    steps: Sequence[Step],
    specs: Sequence[ParamSpec],
    *,
    module_params: Sequence[Sequence[int]],
    grad_bytes: int,
    param_bytes: int,
) -> WorkloadProfile:
    """Return the workload of typical steps: medians over all microbatches and steps.

    Args:
        specs: trainable parameters in registration order.
        module_params: by module index: the parameters (by index) that it needs when it begins.
        grad_bytes: of one gradient element on the wire.
        param_bytes: of one element of a parameter.

    Raises:
        PhaseError: no step has a backward.
    """
    microbatches = [microbatch for step in steps for microbatch in step.microbatches]
    if not microbatches:
        raise PhaseError(
            "no step was profiled: no parameter of the model received a gradient while the hooks were there. Run at least one "
            "whole step (forward, backward, optimizer) of this very model inside the context, after the steps that warm up."
        )
    forward_s, is_in_order = _forward(microbatches, module_params, len(specs))
    backward_s, order = _backward(microbatches, len(specs))
    unused = [index for index in range(len(specs)) if index not in set(order)]
    # In training gradients are handed to collectives within backward; it takes longer for larger ones.
    handing_over_s = statistics.median(_length_s(step.handing_over) for step in steps)
    total_numel = sum(spec.numel for spec in specs) or 1
    workload = Workload(
        tensors=tuple(
            TensorWork(
                spec.name,
                spec.numel,
                backward_s=backward_s[index] + handing_over_s * spec.numel / total_numel,
                forward_s=forward_s[index],
            )
            for index, spec in enumerate(specs)
        ),
        bytes_per_element=grad_bytes,
        param_bytes_per_element=param_bytes,
        optimizer_s=statistics.median(_length_s(step.optimizer) for step in steps),
        num_microbatches=round(statistics.median(len(step.microbatches) for step in steps)),
        ready_order=(*order, *reversed(unused)),
    )
    steps_s = sorted(_compute_s(step) for step in steps)
    facts = {
        "num_steps": len(steps),
        "num_microbatches_seen": len(microbatches),
        "step_compute_s": {"min": steps_s[0], "median": steps_s[len(steps_s) // 2], "max": steps_s[-1]},
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s,
        # The simulator takes parameters to be first needed in the order in which they were registered.
        "is_forward_in_registration_order": is_in_order,
        "unused": [specs[index].name for index in unused],
        "handing_over_s_in_backward": handing_over_s,
    }
    return WorkloadProfile(workload, facts)


def _forward(
    microbatches: Sequence[Microbatch], module_params: Sequence[Sequence[int]], num_params: int
) -> tuple[list[float], bool]:
    """Return the forward seconds of each parameter, and whether they are needed in order of registration.

    The time of a module counts for the last of the parameters that it is the first to need: all of them have to be there when
    it begins. Modules that need nothing new (the other end of a tied weight) lengthen the one before.
    """
    first_need: dict[int, list[float]] = {}
    for one in microbatches:
        first: dict[int, float] = {}
        for module, moment_s in sorted(one.needed.items(), key=lambda item: item[1]):
            for param in module_params[module]:
                first.setdefault(param, moment_s - one.start)
        for param, moment_s in first.items():
            first_need.setdefault(param, []).append(moment_s)
    moments = {param: statistics.median(known) for param, known in first_need.items()}
    in_order = sorted(moments, key=lambda param: (moments[param], param))
    seconds = [0.0] * num_params
    # What runs before the first parameter is needed belongs to forward as well.
    starts = [0.0, *(moments[param] for param in in_order[1:])]
    stops = [*starts[1:], statistics.median(one.forward_end - one.start for one in microbatches)]
    for param, start_s, stop_s in zip(in_order, starts, stops, strict=False):
        seconds[param] = max(0.0, stop_s - start_s)
    return seconds, in_order == sorted(in_order)


def _backward(microbatches: Sequence[Microbatch], num_params: int) -> tuple[list[float], list[int]]:
    """Return the backward seconds of each parameter, and the order in which they are ready.

    The first one has all that lies between the end of forward and itself: the loss, too.
    """
    ready: dict[int, list[float]] = {}
    for one in microbatches:
        for param, moment_s in one.ready.items():
            ready.setdefault(param, []).append(moment_s - one.forward_end)
    moments = {param: statistics.median(known) for param, known in ready.items()}
    order = sorted(moments, key=lambda param: (moments[param], -param))
    seconds, before_s = [0.0] * num_params, 0.0
    for param in order:
        seconds[param] = max(0.0, moments[param] - before_s)
        before_s = max(before_s, moments[param])
    return seconds, order


def _length_s(spans: Sequence[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def _compute_s(step: Step) -> float:
    passes_s = sum(max(one.ready.values()) - one.start for one in step.microbatches)
    return float(passes_s + _length_s(step.handing_over) + _length_s(step.optimizer))
