"""What this rank has counted and found since the last fence. Becomes the report of the next one."""

from __future__ import annotations

import hashlib
import marshal
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.ddp.hyperparameters import Hyperparameters, texts_of
from megabucket.ddp.step_report import Failure, LateGrads, ModelChange, NonFinite, StepReport, UnusedParams
from megabucket.errors import ConfigError

_UPDATES_COMPARED: Final = 16


class StepTally:
    """Counts of one rank, from one fence to the next.

    Args:
        counts_skipped_forwards: whether forwards that no backward reaches are compared across ranks.
    """

    def __init__(self, rank: int, *, counts_skipped_forwards: bool) -> None:
        self._rank = rank
        self._counts_skipped_forwards = counts_skipped_forwards
        self._num_skipped_forwards = 0
        self._generation = 0  # forwards from before a dropped step do not count any more
        self.step_number = -1
        """The caller's own number of the step; -1 when it gives none."""
        self.num_microbatches = 0
        self.num_dropped_steps = 0
        self.num_updates = 0
        self.missed_update = ""
        """What kept this rank from an update; told if others have made it."""
        self.num_loads = 0
        """Loads of weights that no broadcast has followed."""
        self.kept: tuple[str, ...] = ()
        self.hyperparameters: Hyperparameters = ()
        """By which the optimizer is going to update; looked at when it commits."""
        self.grad_scale = 1.0
        """What the reduced gradients were multiplied with."""
        self.wants_stop = False
        """Whether this rank was asked to stop. It says so at every fence; what comes of it is the caller's business."""
        self._updates: list[Hyperparameters] = []
        self.failure: Failure | None = None
        self.change: ModelChange | None = None
        self.late: LateGrads | None = None
        self.unused: UnusedParams | None = None

    def continue_from(self, other: StepTally) -> None:
        """Take over what outlives a rebuild: the caller's wishes, and what the next fence has to hear about updates."""
        self.step_number, self.wants_stop = other.step_number, other.wants_stop
        self.num_updates, self.missed_update = other.num_updates, other.missed_update
        self._updates = list(other._updates)
        if other.failure is not None and other.failure.phase == "optimizer":
            self.failure = other.failure

    def begin_forward(self) -> None:
        """Count a training forward as skipped, until a backward has reached it."""
        self._num_skipped_forwards += 1

    def reached_forward(self) -> Callable[[], None]:
        """Return what to call when a backward reaches the forward that has just ended; calls after the first do nothing."""
        generation, is_reached = self._generation, False

        def note_reached() -> None:
            nonlocal is_reached
            if not is_reached and generation == self._generation:
                self._num_skipped_forwards -= 1
            is_reached = True

        return note_reached

    def note_late(self, param: str, *, bucket: int, phase: str) -> None:
        """Note a gradient that came after its bucket was sent. The text tells of the bucket of the first one."""
        if self.late is None:
            self.late = LateGrads((param,), bucket, phase)
        elif param not in self.late.params:
            self.late = LateGrads((*self.late.params, param), self.late.bucket, self.late.phase)

    def note_update(self, hyperparameters: Hyperparameters) -> None:
        """Count an optimizer step on gradients of an agreed step.

        Args:
            hyperparameters: to be compared at the next fence; none if they were at the last one.
        """
        self.num_updates += 1
        if hyperparameters and len(self._updates) < _UPDATES_COMPARED:  # whoever makes more between two fences makes them alike
            self._updates.append(self._with_scale(hyperparameters))

    def _with_scale(self, hyperparameters: Hyperparameters) -> Hyperparameters:
        return (*hyperparameters, ("scale_gradients()", self.grad_scale))

    def report(
        self,
        *,
        force_all_reduce: bool,
        is_committing: bool,
        nonfinite: NonFinite | None,
        interrupted: tuple[str, ...] = (),
        is_detailed: bool = False,
    ) -> StepReport:
        """Return this rank's side of the step.

        Args:
            interrupted: parameters whose gradient was cleared between two backwards.
            is_detailed: whether the report is going to be exchanged, and must say what the checksum is of.
        """
        # Two optimizers may step in any order.
        updates = sorted(self._updates, key=str) if len(self._updates) > 1 else list(self._updates)
        if is_committing:
            updates.append(self._with_scale(self.hyperparameters))
        return StepReport(
            rank=self._rank,
            step_number=self.step_number,
            num_microbatches=self.num_microbatches,
            num_skipped_forwards=self._num_skipped_forwards if self._counts_skipped_forwards else 0,
            num_dropped_steps=self.num_dropped_steps,
            num_updates=self.num_updates,
            missed_update=self.missed_update,
            checksum=_checksum(self.num_loads, self.kept, bool(interrupted), *updates),
            num_loads=self.num_loads,
            kept=self.kept,
            interrupted=interrupted,
            hyperparameters=texts_of(updates) if is_detailed or self.failure is not None else (),
            is_committing=is_committing,
            force_all_reduce=force_all_reduce,
            wants_stop=self.wants_stop,
            failure=self.failure,
            change=self.change,
            late=self.late,
            unused=self.unused,
            nonfinite=nonfinite,
        )

    def forget_grads(self) -> None:
        """Forget what was counted and found about gradients that are forgotten themselves."""
        self.num_microbatches, self.kept, self.late = 0, (), None
        self.grad_scale = 1.0

    def start_step(self) -> None:
        """Count anew, after a fence."""
        self.num_microbatches = self.num_dropped_steps = self.num_updates = self.num_loads = 0
        self.kept, self.grad_scale = (), 1.0
        self.missed_update = ""
        self._updates.clear()
        self.failure = self.change = self.late = self.unused = None

    def start_over(self) -> None:
        """Count anew, after a dropped step: what its forwards had begun is over, too."""
        self.start_step()
        self._generation += 1
        self._num_skipped_forwards = 0


def unused_params(groups: Sequence[_ParamAndGradBucketGroup], *, had_local_grads: bool) -> UnusedParams | None:
    """Return the parameters that were reduced as zeros because the step brought no gradient for them.

    Args:
        had_local_grads: without any backward, what the caller wrote into zeroed views counts; what had to be zeroed is unused.
    """
    by_group = [group.missing if had_local_grads else group.cleared for group in groups]
    names = tuple(name for names in by_group for name in names)
    if not names:
        return None
    return UnusedParams(names, bucket=next(index for index, names in enumerate(by_group) if names))


def nonfinite_params(groups: Sequence[_ParamAndGradBucketGroup]) -> NonFinite | None:
    """Return the first parameter whose gradient was found to hold nan or inf, in launch order."""
    found = [(group.index, one) for group in groups for one in group.finite_test.found]
    if not found:
        return None
    bucket, first = found[0]
    return NonFinite(first.param, bucket, first.finding, num_others=len(found) - 1)


def step_number_of(number: object) -> int:
    """Return the caller's number of a step as a plain integer, -1 for ``None``.

    Raises:
        ConfigError: it is no integer, or too large.
    """
    if number is None:
        return -1
    try:
        value = -1 if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        value = -1
    if not 0 <= value < 2**62:
        raise ConfigError(f"step_number must be None or an integer from 0 to 2**62, got {number!r}")
    return value


def _checksum(*facts: Any) -> int:
    """Return a number below 2**62 that is equal where plain values are."""
    # Version 2 of the format writes values only, not whether two of them are the same object.
    return int.from_bytes(hashlib.blake2b(marshal.dumps(facts, 2), digest_size=8).digest(), "big") >> 2
