"""How a step ends: its collectives launched to the last, then the fence, then one of two ends, alike on all ranks.

Whatever goes wrong, each rank launches the same collectives in the same order: all groups, then the fence. A fault is noted
where it happens and raised after the fence, by all ranks. Knows groups only; memory is their business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.backward_watch import BackwardWatch
from megabucket.ddp.hyperparameters import Hyperparameters
from megabucket.ddp.launcher import InOrderLauncher
from megabucket.ddp.model_watch import ModelWatch
from megabucket.ddp.patience import insist
from megabucket.ddp.step_agreement import StepAgreement, describe
from megabucket.ddp.step_report import Failure
from megabucket.ddp.step_tally import unused_params
from megabucket.errors import MegabucketError, PhaseError


class StepSync:
    """The steps of one wrapper, seen from their ends.

    Args:
        groups: bucket groups in launch order.
        config: what finishes, and which faults are errors.
        watch: finds out whether the module was changed; ``None`` does not look.
    """

    def __init__(
        self,
        groups: Sequence[_ParamAndGradBucketGroup],
        config: DistributedDataParallelConfig,
        watch: ModelWatch | None = None,
    ) -> None:
        self._groups = groups
        self._config = config
        self._watch = watch
        self._communicator = groups[0].communicator
        self._launcher = InOrderLauncher(groups, self._launch)
        self._agreement = StepAgreement(groups, config)
        self._backward = BackwardWatch()
        self._is_finished = False
        self._has_begun = False  # something of the next step, since all ranks have agreed on one
        self._awaits_vote = False  # agreed, but one more fence comes before anybody updates
        self._awaits_update = False  # agreed for good, so the others update; this rank has not done so yet
        self._swallowed: Failure | None = None
        self.defers_failures = False
        """Whether exceptions in forward and backward wait for the end of a ``step()`` block, where they are known whole."""
        self.tally = self._agreement.tally
        """What this rank will report at the fence."""
        self.force_all_reduce = False
        """All-reduce in the next launches although the distributed optimizer is on."""
        self.has_local_grads = any(slot.has_grad for group in groups for slot in group.slots)
        """Whether gradients were accumulated (also before wrapping) since they were last finished or cleared."""
        self.awaits_finish = False
        """Whether a backward outside ``no_sync`` has run since gradients were last finished or cleared."""
        self.has_failed = False
        """Whether an error was raised about the gradients of this step, so that nobody may step on them."""

    def continue_from(self, other: StepSync) -> None:
        """Take over what outlives a rebuild."""
        self._agreement.continue_from(other._agreement)
        self.force_all_reduce = other.force_all_reduce

    @property
    def step(self) -> int:
        """How many steps were agreed on, or dropped, by all ranks."""
        return self._agreement.step

    @property
    def last_error(self) -> MegabucketError | None:
        """The error all ranks agreed on for the last step that was dropped."""
        return self._agreement.last_error

    @property
    def phase(self) -> str:
        """What this rank was doing last."""
        return self._communicator.progress.phase

    @property
    def skip_reason(self) -> str:
        """Why nobody steps on the gradients of this step (``nonfinite_gradients="skip_step"``); empty otherwise."""
        return self._agreement.skip_reason

    @property
    def stop_is_wanted(self) -> bool:
        """Whether some rank has said at the last fence that it was asked to stop."""
        return self._agreement.stop_is_wanted

    @property
    def is_finished(self) -> bool:
        """Whether every gradient is reduced."""
        return self._is_finished

    @property
    def is_between_steps(self) -> bool:
        """Whether all ranks have agreed on the last step, for good, and this rank has begun nothing since."""
        return not (self._has_begun or self._awaits_vote or self._agreement.is_pending)

    # From the first act of a step to its update #

    def begin_step(self) -> None:
        """Note that what follows belongs to the next step, whatever has become of the last one."""
        self._has_begun, self._awaits_update = True, False

    def start(self) -> None:
        """Launch every group that was not launched yet."""
        if not self._is_finished:
            self._launcher.flush()

    def finish(self, *, is_committing: bool = False) -> None:
        """Launch what was not launched, wait for all, and leave reduced gradients behind. Idempotent.

        Raises:
            MegabucketError: the step is not whole on some rank. All ranks raise the same error, the gradients are forgotten,
                and the next step may run.
        """
        self.tell_swallowed()
        if not self._agreement.is_pending:
            if self._is_finished:
                return
            self._launch_rest(unused_counts=self._config.unused_parameters == "error", is_committing=is_committing)
        raise_if_any(self.settle())

    def commit(self, note_reduced: Callable[[_ParamAndGradBucketGroup], object] | None = None) -> BaseException | None:
        """Finish the sync for an optimizer that is about to update and gather: from here on every rank does so.

        So a wait that is interrupted is begun again. Returns what has interrupted it, for the caller to raise when this rank
        has run the rest of the schedule. ``note_reduced`` is that of ``settle``.

        Raises:
            MegabucketError: the step is not whole on some rank; nobody updates.
            PhaseError: the optimizer has updated with these gradients already, and there are shards to gather.
        """
        self.tell_swallowed()
        raise_if_any(self.settle())
        self._set_phase("fence")
        is_sharded = self._config.use_distributed_optimizer
        if not self._is_finished:
            self._launch_rest(unused_counts=self._config.unused_parameters == "error", is_committing=is_sharded)
        elif self._awaits_vote:
            # The fence was at ``finish_grad_sync()``, and not every rank that was there need be here.
            self._launch_vote(is_committing=True)
        elif is_sharded:
            raise PhaseError("step() was called twice on the same gradients; run backward and zero_grad() between two steps.")
        error, interrupt = insist(lambda: self.settle(note_reduced))
        if error is not None:
            # An interrupt of the user is not an error of the step, and whoever catches those must not catch it.
            raise error if interrupt is None or isinstance(interrupt, Exception) else interrupt
        self._set_phase("optimizer")
        return interrupt

    def vote_on_update(self) -> None:
        """Agree once more, between ``commit`` and the update: some rank may have failed since.

        Raises:
            MegabucketError: it has; nobody updates.
        """
        self._launch_vote(is_committing=True)
        raise_if_any(self.settle())

    def end_step(self) -> None:
        """Note that nothing is left to agree on: the optimizer updates now, or all ranks know that none does."""
        self._awaits_vote = self._awaits_update = False

    def note_update(self, hyperparameters: Hyperparameters = ()) -> None:
        """Count an update: all ranks must make as many.

        Args:
            hyperparameters: those that no fence before the update has compared.
        """
        self._awaits_update = False
        self.tally.note_update(hyperparameters)

    def note_missed_update(self, error: BaseException) -> None:
        """Remember what kept this rank from an update that others make. It is told if they have made it."""
        if self._awaits_update:
            self.tally.missed_update = describe(error)

    # A rank that cannot go on #

    def fail(self, phase: str, error: BaseException | str | None) -> None:
        """Give up the step on this rank: launch the rest of the schedule and the fence, which tells the others.

        Does not wait: the next call does. Never raises: it runs while an exception is on its way, and in a destructor.

        Args:
            error: what happened; ``None`` when autograd keeps it to itself.
        """
        if self._agreement.is_pending or error is self.last_error is not None:
            return
        if self.defers_failures and phase in ("forward", "backward"):
            # The block around this will call again, with the whole exception, unless the caller catches it before.
            self._swallowed = Failure(phase, "an exception" if error is None else describe(error))
            return
        self._give_up(phase, error)

    def tell_swallowed(self) -> None:
        """Give up the step if a forward or backward has failed in it and the caller has caught the exception in the block.

        What a backward has brought before it failed cannot be told apart from what the step had before, so it cannot go on.

        Raises:
            MegabucketError: the error that all ranks raise about it.
        """
        swallowed = self._swallowed
        if swallowed is not None:
            where = "caught inside the `with ddp.step():` block, which cannot go on"
            self._give_up(swallowed.phase, f"{swallowed.error} ({where})")
            raise_if_any(self.settle())

    def abort(self, reason: str) -> None:
        """Give up the step because the caller says so.

        Raises:
            PhaseError: all ranks have agreed on its gradients, and nobody asks this one before they step on them.
        """
        if self._agreement.is_pending and self.tally.failure is None and self.settle() is not None:
            return  # a wait was interrupted, and the step was dropped anyway
        if self.tally.failure is not None and not self._has_begun:
            return  # the update has failed, when others had begun theirs: the next fence says so
        if self._awaits_update:
            self.tally.missed_update = f"abort_step(): {reason}"
            raise PhaseError(
                "abort_step() comes too late: all ranks have agreed on the gradients of this step and the others update with "
                "them. Step on this rank, too. If the next step is meant, call zero_grad() before, or set step_number."
            )
        self.fail("abort_step()", reason)

    def _give_up(self, phase: str, error: BaseException | str | None) -> None:
        self._swallowed = None
        self._backward.forget()
        try:
            if not self._awaits_vote:
                self._reopen_if_finished()
                self._launcher.flush(self._launch_as_it_is)
            for group in self._groups:
                group.withdraw_grads()  # this rank is through with the step, so the caller may clear gradients in any way
            self._agreement.launch_failure(
                phase, error, force_all_reduce=self.force_all_reduce, ends_step=not self._awaits_vote
            )
        except Exception as cause:  # the group is gone: there is nobody to tell
            self.has_failed = True
            if isinstance(cause, MegabucketError):
                self._agreement.last_error = cause

    def settle(self, note_reduced: Callable[[_ParamAndGradBucketGroup], object] | None = None) -> MegabucketError | None:
        """Wait for the fence that was launched, if any; return the error that all ranks raise about the step.

        ``note_reduced`` is called with each group as soon as it is reduced; again when an interrupted wait is begun again.

        Raises:
            PeerLostError: a rank went away meanwhile.
        """
        if not self._agreement.is_pending:
            return None
        for group in self._groups:
            group.finish_grad_sync()
            if note_reduced is not None:
                note_reduced(group)
        was_late = self.tally.late is not None and self.tally.late.phase == GradPhase.IN_FLIGHT.value
        error = self._agreement.conclude()
        self._has_begun = False
        self._set_phase("between steps")
        if error is None:
            self._finish_whole_step()
            return None
        if was_late:
            for group in self._groups:
                group.readiness.unlearn()  # the model has changed its ways, probably in other groups, too
        if self._watch is not None:
            self._watch.forget_foreign_grads()
        self._forget()
        self.has_failed = True
        return error

    def _finish_whole_step(self) -> None:
        self._is_finished = True
        self.has_local_grads = self.awaits_finish = False
        self._awaits_vote = self._config.use_distributed_optimizer
        self._awaits_update = not (self._awaits_vote or self.skip_reason)
        self._launcher.start_step()
        for group in self._groups:
            group.readiness.finish_step()
            if self.skip_reason:
                group.withdraw_grads()
            else:
                group.publish()

    def reset(self) -> None:
        """Start a step: forget all gradients. One that others may be reducing with this rank is completed before.

        Raises:
            StepMismatchError: this rank drops a step that others take.
        """
        self.tell_swallowed()
        self.settle()
        self._backward.forget()
        if not self._is_finished and (self.awaits_finish or self._launcher.num_launched):
            self.tally.num_dropped_steps += 1
            for group in self._groups:
                group.readiness.abandon_step()
            self._launch_rest(unused_counts=False)
            raise_if_any(self.settle())
            self._awaits_vote = False
        raise_if_any(self._vote_to_drop())
        self._forget()
        self.tally.forget_grads()
        self.has_failed = False

    # What others ask before they act #

    def check_not_failed(self) -> None:
        """Refuse to step on gradients that an error was raised about.

        Raises:
            PhaseError: there was such an error since gradients were last cleared.
        """
        self.tell_swallowed()
        self.settle()
        if self.has_failed:
            raise PhaseError(
                "the gradients of this step are not usable: an error about them was raised before (and caught by the caller). "
                "Call zero_grad() and go on with the next step."
            )

    def check_not_in_flight(self, operation: str) -> None:
        """Refuse an operation on gradients that a collective owns.

        Raises:
            PhaseError: a group is in flight.
        """
        busy = [group.index for group in self._groups if group.grad_phase is GradPhase.IN_FLIGHT]
        if busy:
            raise PhaseError(
                f"{operation} would touch the gradients of bucket groups {busy[:5]} while a collective owns them; "
                "call finish_grad_sync() first."
            )

    def _launch(self, group: _ParamAndGradBucketGroup) -> None:
        self._communicator.progress.bucket = group.index
        group.start_grad_sync()

    def _launch_as_it_is(self, group: _ParamAndGradBucketGroup) -> None:
        self._communicator.progress.bucket = group.index
        group.start_dropped_sync()

    def _launch_rest(self, *, unused_counts: bool, is_committing: bool = False) -> None:
        """Launch the groups that were not launched yet and the fence. From here on ``settle`` is due."""
        try:
            if self._watch is not None:
                self.tally.change = self._watch.find_change()
            self._launcher.flush()
            if unused_counts:
                self.tally.unused = unused_params(self._groups, had_local_grads=self.has_local_grads)
            self._agreement.launch(force_all_reduce=self.force_all_reduce, is_committing=is_committing)
        except BaseException as error:
            self.fail("the gradient sync", error)  # the others are waiting
            raise

    def _launch_vote(self, *, is_committing: bool) -> None:
        """Ask once more, after the sync: either every rank steps, or every rank drops the step."""
        self._agreement.launch(force_all_reduce=self.force_all_reduce, is_committing=is_committing, ends_step=False)

    def _vote_to_drop(self) -> MegabucketError | None:
        """Say that this rank does not step on the gradients it has finished, in case others do."""
        if not self._awaits_vote:
            return None
        self.tally.num_dropped_steps += 1
        self._launch_vote(is_committing=False)
        error = self.settle()
        self._awaits_vote = False
        return error

    def _reopen_if_finished(self) -> None:
        if self._is_finished:
            for group in self._groups:
                group.reopen()
            self._is_finished = False

    def _forget(self) -> None:
        """Forget the gradients; no collective owns any."""
        self._launcher.start_step()
        self._is_finished = self.has_local_grads = self.awaits_finish = self._awaits_vote = self._awaits_update = False
        self._agreement.skip_reason = ""
        for group in self._groups:
            group.reset()

    def _set_phase(self, phase: str) -> None:
        self._communicator.enter_phase(self.step, phase)


def raise_if_any(error: MegabucketError | None) -> None:
    """Raise the error, if there is one."""
    if error is not None:
        raise error
