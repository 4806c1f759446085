"""Whether all ranks are whole at the end of a step: this rank's tally goes to the fence, one error or none comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.fence import Fence, PendingFence
from megabucket.ddp.step_report import Failure, StepReport
from megabucket.ddp.step_tally import StepTally, nonfinite_params
from megabucket.ddp.verdict import StepFacts, error_of
from megabucket.errors import InvariantError, MegabucketError, NonFiniteGradientError


class StepAgreement:
    """The agreement of one wrapper's ranks about their steps. One fence at a time is pending.

    Args:
        groups: bucket groups in launch order; their finite tests are part of the report.
        config: with ``fence=False`` this rank asks nobody.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], config: DistributedDataParallelConfig) -> None:
        self._groups = groups
        self._skips_nonfinite = config.nonfinite_gradients == "skip_step"
        communicator = groups[0].communicator
        self._rank = communicator.rank
        self._fence = Fence(communicator if config.fence else None, device=groups[0].buckets[0].grad_data.device)
        self._pending: PendingFence | None = None
        self._force_all_reduce = self._is_committing = False
        self._ends_step = True
        self.tally = StepTally(self._rank, counts_skipped_forwards=config.skipped_forwards == "error")
        """What this rank will report at the next fence."""
        self.step = 0
        """How many steps were agreed on, or dropped, by all ranks."""
        self.last_error: MegabucketError | None = None
        """The error all ranks agreed on for the last step that was dropped."""
        self.skip_reason = ""
        """Why nobody steps on the gradients of this step; empty otherwise."""
        self.stop_is_wanted = False
        """Whether some rank has said at the last fence that it was asked to stop."""

    @property
    def is_pending(self) -> bool:
        """Whether a fence was launched that was not concluded."""
        return self._pending is not None

    def continue_from(self, other: StepAgreement) -> None:
        """Take over what outlives a rebuild."""
        self.step, self.last_error = other.step, other.last_error
        self.stop_is_wanted = other.stop_is_wanted
        self.tally.continue_from(other.tally)

    def launch(self, *, force_all_reduce: bool, is_committing: bool = False, ends_step: bool = True) -> None:
        """Send this rank's side to the fence, without waiting.

        Args:
            is_committing: whether the optimizer updates right after it.
            ends_step: false for a second fence in the same step.
        """
        self._force_all_reduce, self._is_committing = force_all_reduce, is_committing
        self._ends_step = ends_step
        flags = [group.finite_test.flag for group in self._groups if group.finite_test.flag is not None]
        report = self._report()
        self._pending = self._fence.launch(report, nonfinite=torch.stack(flags).any() if flags else None)
        if report.failure is not None:
            self._pending.send_report()

    def launch_failure(self, phase: str, error: BaseException | str | None, *, force_all_reduce: bool, ends_step: bool) -> None:
        """Send word that this rank cannot finish the step, without waiting.

        Args:
            error: ``None`` when autograd keeps the exception to itself.
        """
        if self.tally.failure is None:  # one of the optimizer, which was to be told at this fence, matters more
            self.tally.failure = Failure(phase, describe(error))
        self.launch(force_all_reduce=force_all_reduce, ends_step=ends_step)

    def conclude(self) -> MegabucketError | None:
        """Wait for the fence that is pending and end the step; return the error that all ranks raise about it.

        Raises:
            PeerLostError: a rank went away meanwhile; the fence stays pending.
        """
        if self._pending is None:
            raise InvariantError("there is no fence to conclude")
        is_whole = self._pending.is_whole()
        if is_whole and self._force_all_reduce:  # on all ranks: the fence has compared it
            for group in self._groups:
                group.gather_grads()
        error = self._error_of_sum() if is_whole else self._error_of(self._pending)
        self.stop_is_wanted = self._pending.stop_is_wanted
        self._pending = None
        self.step += self._ends_step
        self.skip_reason = ""
        if isinstance(error, NonFiniteGradientError) and self._skips_nonfinite:
            self.skip_reason, error = str(error), None
        if error is None:
            self.tally.start_step()
        else:
            self.tally.start_over()
            self.last_error = error
        return error

    def _error_of_sum(self) -> MegabucketError | None:
        """Return what is wrong with the sum of gradients that were right: it has overflowed.

        Every rank holds the same sum, so nobody has to be asked.
        """
        for group in self._groups:
            if group.sum_test.flag is not None and bool(group.sum_test.flag):
                group.sum_test.name_culprits()
        found = [(group.index, one) for group in self._groups for one in group.sum_test.found]
        if not found:
            return None
        bucket, first = found[0]
        return NonFiniteGradientError(
            step=self.step - (not self._ends_step),
            rank=None,
            param=first.param,
            bucket=bucket,
            num_buckets=len(self._groups),
            finding=first.finding,
            num_others=len(found) - 1,
        )

    def _error_of(self, pending: PendingFence) -> MegabucketError:
        for group in self._groups:
            if group.finite_test.flag is not None and bool(group.finite_test.flag):
                group.finite_test.name_culprits()  # the host could not know them before
        error = error_of(
            StepFacts(self.step - (not self._ends_step), len(self._groups)), pending.reports(self._report(is_detailed=True))
        )
        if error is None:
            raise InvariantError(f"[rank {self._rank}] the fence of step {self.step} does not hold, but no rank says why")
        return error

    def _report(self, *, is_detailed: bool = False) -> StepReport:
        return self.tally.report(
            force_all_reduce=self._force_all_reduce,
            is_committing=self._is_committing,
            nonfinite=nonfinite_params(self._groups),
            interrupted=tuple(name for group in self._groups for name in group.interrupted),
            is_detailed=is_detailed,
        )


def describe(error: BaseException | str | None) -> str:
    """Return an exception as other ranks read it; ``None`` is one that autograd keeps to itself."""
    if error is None:
        return (
            "an exception that autograd keeps to itself; it stands in the log of that rank, and would stand here inside "
            "`with ddp.step():`"
        )
    if isinstance(error, str):
        return error
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as cause:  # the text of an exception is code of the caller, too
        return f"{type(error).__name__} (its text cannot be made: {type(cause).__name__})"
