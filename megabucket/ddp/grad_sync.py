"""One step's gradient sync: which backward is reduced, when it starts, when it is finished, and whether it is whole.

Receives every gradient from the hooks, launches bucket groups in order, and finishes them: at the end of the last backward
(all-reduce, ``finish="auto"``), or when the optimizer or the caller asks. Whatever goes wrong, each rank launches the same
collectives in the same order: all groups, then the fence. A fault is noted where it happens and raised after the fence, by all
ranks. Knows groups only; memory is their business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.backward_watch import BackwardWatch
from megabucket.ddp.launcher import InOrderLauncher
from megabucket.ddp.model_watch import ModelWatch
from megabucket.ddp.step_agreement import StepAgreement
from megabucket.ddp.step_tally import keeps_grads, unused_params
from megabucket.errors import MegabucketError, PhaseError


class GradSync:
    """The gradient sync of one wrapper.

    Args:
        groups: bucket groups in launch order.
        config: what overlaps, what finishes, and which faults are errors.
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
        self._no_sync_depth = 0
        self._backward = BackwardWatch()
        self._has_received = self._keeps_grads = False  # in the backward that is running
        self._finishes_with_backward = config.finish == "auto" and not config.use_distributed_optimizer
        self._is_finished = False
        self._refusal: MegabucketError | None = None  # raised at the end of the backward that is running
        self._awaits_vote = False
        self._defers_failures = False
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

    def continue_from(self, other: GradSync) -> None:
        """Take over what outlives a rebuild."""
        self._agreement.continue_from(other._agreement)
        self.force_all_reduce = other.force_all_reduce

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in backwards that run inside. May be nested; an exception inside leaves nothing behind."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

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
    def is_finished(self) -> bool:
        """Whether every gradient is reduced."""
        return self._is_finished

    def begin_forward(self) -> None:
        """Note that a training forward begins."""
        self.settle()
        self._set_phase("forward")
        self.tally.begin_forward()

    # Called by autograd #

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter. The cost does not depend on the number of parameters.

        Args:
            index: of the bucket group.
            position: of the parameter in the group.
        """
        group = self._groups[index]
        if not self._backward.is_open:
            self._open()
        if (self._is_finished or self._refusal is not None) and not self._start_step_unasked(group, position):
            return
        self.has_local_grads = self._has_received = True
        syncs = self._no_sync_depth == 0
        if syncs:
            self.awaits_finish = True
        if group.grad_phase is not GradPhase.ACCUMULATING:
            self._note_late(group, position)
        elif group.receive_grad(position, counts=syncs) and self._config.overlap_grad_reduce:
            self._launcher.mark_complete(index)

    def begin_backward(self) -> None:
        """Note that a backward through the module's outputs begins.

        Raises:
            ConcurrentBackwardError: another thread's backward is running.
        """
        if self._backward.is_open:
            self._backward.check_thread(rank=self._communicator.rank)
        else:
            self._open()

    def _open(self) -> None:
        self.settle()
        self._set_phase("backward")
        if self._is_finished and not self._config.use_distributed_optimizer:
            self._keeps_grads = keeps_grads(self._groups)  # now, before the first gradient is added to them
        self._backward.open(self)
        self.has_failed = self._has_received = False

    def end_backward(self) -> None:
        """Finish the sync where the end of a backward does."""
        refusal, self._refusal = self._refusal, None
        _raise_if_any(refusal)
        if self._has_received:
            self.tally.num_microbatches += 1
        if self._finishes_with_backward and self.awaits_finish:
            self.finish()

    def abandon_backward(self) -> None:
        """Tell the others that a backward has failed here. Called from a destructor, so nothing is raised."""
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            self.fail("backward", None)

    def _note_late(self, group: _ParamAndGradBucketGroup, position: int) -> None:
        """Keep a gradient away from a buffer that was sent, and remember to say so."""
        slot = group.slots[position]
        slot.param.grad = None
        self.tally.note_late(slot.name, bucket=group.index, phase=group.grad_phase.value)

    def _start_step_unasked(self, group: _ParamAndGradBucketGroup, position: int) -> bool:
        """Start a step because a gradient arrives: plain torch code may clear gradients without telling us.

        Returns whether the gradient is wanted: not if this rank has dropped a step that others take, which is an error of this
        whole backward.

        After an all-reduce a cleared gradient (``None``) starts anew. One that was zeroed in place, or kept, is accumulated on
        and reduced again: the mean of equal values is that value, as with torch's own accumulation. A sum would count the
        old values once per rank, and after a reduce-scatter they are not even gradients; both are noted as late.
        """
        slot = group.slots[position]
        if self._refusal is not None:
            slot.param.grad = None
            return False
        may_start = not self._config.use_distributed_optimizer
        if may_start and self._config.grad_reduction == "sum":
            others = (other for one in self._groups for other in one.slots if other is not slot)
            may_start = slot.param.grad is not slot.view and not any(other.has_grad for other in others)
        if not may_start:
            self._note_late(group, position)
        self._refusal = self._vote_to_drop()
        if self._refusal is not None:
            slot.param.grad = None
            return False
        self._reopen_if_finished()
        self.tally.keeps_reduced_grads, self.has_failed = self._keeps_grads, False
        self._agreement.skip_reason = ""
        return True

    # Called by the wrapper and by optimizers #

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
        if not self._agreement.is_pending:
            if self._is_finished:
                return
            self._launch_rest(unused_counts=self._config.unused_parameters == "error", is_committing=is_committing)
        _raise_if_any(self.settle())

    def commit(self) -> None:
        """Finish the sync for an optimizer that is about to update and gather: from here on every rank does so.

        Raises:
            MegabucketError: the step is not whole on some rank; nobody updates.
            PhaseError: the optimizer has updated with these gradients already, and there are shards to gather.
        """
        self._set_phase("fence")
        is_sharded = self._config.use_distributed_optimizer
        if self._is_finished and self._awaits_vote:
            # The fence was at ``finish_grad_sync()``, and not every rank that was there need be here.
            _raise_if_any(self._vote(is_committing=True))
        elif self._is_finished and is_sharded:
            raise PhaseError("step() was called twice on the same gradients; run backward and zero_grad() between two steps.")
        else:
            self.finish(is_committing=is_sharded)
        self._awaits_vote = False
        self._set_phase("optimizer")

    def fail(self, phase: str, error: BaseException | str | None) -> None:
        """Give up the step on this rank: launch the rest of the schedule and the fence, which tells the others.

        Does not wait: the next call does. Never raises: it runs while an exception is on its way.

        Args:
            error: what happened; ``None`` when autograd keeps it to itself.
        """
        if self._agreement.is_pending or error is self.last_error is not None:
            return
        if self._defers_failures and phase in ("forward", "backward"):
            return  # the ``step()`` block around this will call again with the whole exception
        self._backward.forget()
        try:
            if not self._awaits_vote:
                self._reopen_if_finished()
                self._launcher.flush()
            self._agreement.launch_failure(phase, error, ends_step=not self._awaits_vote)
        except MegabucketError as cause:  # the group is gone: there is nobody to tell
            self.has_failed, self._agreement.last_error = True, cause

    def settle(self) -> MegabucketError | None:
        """Wait for the fence that was launched, if any; return the error that all ranks raise about the step.

        Raises:
            PeerLostError: a rank went away meanwhile.
        """
        if not self._agreement.is_pending:
            return None
        for group in self._groups:
            group.finish_grad_sync()
        was_late = self.tally.late is not None and self.tally.late.phase == GradPhase.IN_FLIGHT.value
        error = self._agreement.conclude()
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
        self._launcher.start_step()
        for group in self._groups:
            group.readiness.finish_step()
            if not self.skip_reason:
                group.publish()

    @contextmanager
    def deferring_failures(self) -> Iterator[None]:
        """Let exceptions in forward and backward wait for the end of the block, where they are known as a whole."""
        before, self._defers_failures = self._defers_failures, True
        try:
            yield
        finally:
            self._defers_failures = before

    def reset(self) -> None:
        """Start a step: forget all gradients. One that others may be reducing with this rank is completed before.

        Raises:
            StepMismatchError: this rank drops a step that others take.
        """
        self.settle()
        self._backward.forget()
        if not self._is_finished and (self.awaits_finish or self._launcher.num_launched):
            self.tally.num_dropped_steps += 1
            for group in self._groups:
                group.readiness.abandon_step()
            self._launch_rest(unused_counts=False)
            _raise_if_any(self.settle())
            self._awaits_vote = False
        _raise_if_any(self._vote_to_drop())
        self._forget()
        self.tally.forget_grads()
        self.has_failed = False

    def check_not_failed(self) -> None:
        """Refuse to step on gradients that an error was raised about.

        Raises:
            PhaseError: there was such an error since gradients were last cleared.
        """
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
        group.start_grad_sync(force_all_reduce=self.force_all_reduce)

    def _launch_rest(self, *, unused_counts: bool, is_committing: bool = False) -> None:
        """Launch the groups that were not launched yet and the fence. From here on ``settle`` is due."""
        if self._watch is not None:
            self.tally.change = self._watch.find_change()
        self._launcher.flush()
        if unused_counts:
            self.tally.unused = unused_params(self._groups, had_local_grads=self.has_local_grads)
        self._agreement.launch(force_all_reduce=self.force_all_reduce, is_committing=is_committing)

    def _vote(self, *, is_committing: bool) -> MegabucketError | None:
        """Agree once more, after the sync: either every rank steps, or every rank drops the step."""
        self._agreement.launch(force_all_reduce=self.force_all_reduce, is_committing=is_committing, ends_step=False)
        return self.settle()

    def _vote_to_drop(self) -> MegabucketError | None:
        """Say that this rank does not step on the gradients it has finished, in case others do."""
        if not self._awaits_vote:
            return None
        self.tally.num_dropped_steps += 1
        error = self._vote(is_committing=False)
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
        self._is_finished = self.has_local_grads = self.awaits_finish = self._awaits_vote = False
        self._agreement.skip_reason = ""
        for group in self._groups:
            group.reset()

    def _set_phase(self, phase: str) -> None:
        progress = self._communicator.progress
        progress.step, progress.phase, progress.bucket = self.step, phase, -1


def _raise_if_any(error: MegabucketError | None) -> None:
    if error is not None:
        raise error
