"""What this rank has counted and found since the last fence. Becomes the report of the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.ddp.step_report import Failure, LateGrads, ModelChange, NonFinite, StepReport, UnusedParams


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
        self.keeps_reduced_grads = False
        self.failure: Failure | None = None
        self.change: ModelChange | None = None
        self.late: LateGrads | None = None
        self.unused: UnusedParams | None = None

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

    def report(self, *, force_all_reduce: bool, is_committing: bool, nonfinite: NonFinite | None) -> StepReport:
        """Return this rank's side of the step."""
        return StepReport(
            rank=self._rank,
            step_number=self.step_number,
            num_microbatches=self.num_microbatches,
            num_skipped_forwards=self._num_skipped_forwards if self._counts_skipped_forwards else 0,
            num_dropped_steps=self.num_dropped_steps,
            num_updates=self.num_updates,
            keeps_reduced_grads=self.keeps_reduced_grads,
            is_committing=is_committing,
            force_all_reduce=force_all_reduce,
            failure=self.failure,
            change=self.change,
            late=self.late,
            unused=self.unused,
            nonfinite=nonfinite,
        )

    def forget_grads(self) -> None:
        """Forget what was counted and found about gradients that are forgotten themselves."""
        self.num_microbatches, self.keeps_reduced_grads, self.late = 0, False, None

    def start_step(self) -> None:
        """Count anew, after a fence."""
        self.num_microbatches = self.num_dropped_steps = self.num_updates = 0
        self.keeps_reduced_grads = False
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


def keeps_grads(groups: Sequence[_ParamAndGradBucketGroup]) -> bool:
    """Return whether gradients of the last step were neither cleared nor zeroed.

    Looks at values, in one pass, only where there are gradients still: ``zero_grad()`` leaves none.
    """
    slots = (slot for group in groups for slot in group.slots)
    views = [slot.view for slot in slots if slot.param.grad is slot.view and slot.view.numel()]
    # The largest element, not the sum of squares, which is zero for small values.
    return bool(views) and bool(torch.stack([norm.bool() for norm in torch._foreach_norm(views, torch.inf)]).any())
