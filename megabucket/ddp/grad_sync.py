"""One step's gradient sync: how gradients come in, which backward is reduced, and when.

Receives every gradient from the hooks, launches bucket groups in order, and finishes them: at the end of the last backward
(all-reduce, ``finish="auto"``), or when the optimizer or the caller asks. How a step ends is the business of ``step_sync``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager

import torch

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.between_backwards import BetweenBackwards
from megabucket.ddp.model_watch import ModelWatch
from megabucket.ddp.reach import goes_everywhere
from megabucket.ddp.step_sync import StepSync, raise_if_any
from megabucket.errors import MegabucketError, PhaseError


class GradSync(StepSync):
    """The gradient sync of one wrapper.

    Args:
        groups: bucket groups in launch order.
        config: what overlaps, what finishes, and which faults are errors.
        watch: finds out whether the module was changed; ``None`` does not look.
        backward_hooks: of the module and its parts. While there are any, no gradient waits: they may look at others.
    """

    def __init__(
        self,
        groups: Sequence[_ParamAndGradBucketGroup],
        config: DistributedDataParallelConfig,
        watch: ModelWatch | None = None,
        *,
        backward_hooks: Sequence[Sized] = (),
    ) -> None:
        super().__init__(groups, config, watch)
        self._backward_hooks = backward_hooks
        self._may_wait = False  # gradients of the backward that is running, for each other
        self._no_sync_depth = 0
        self._between = BetweenBackwards(groups, keeps=not config.use_distributed_optimizer)
        self._has_received = False  # in the backward that is running
        # Those of the module, to go on to everything behind them. Asked only where it may count without gradients.
        self._has_reached_outputs = False
        self._finishes_with_backward = config.finish == "auto" and not config.use_distributed_optimizer
        self._refusal: MegabucketError | None = None  # raised at the end of the backward that is running

    def check_between_steps(self, operation: str) -> None:
        """Refuse to save or load what a step is about to change.

        Raises:
            PhaseError: a step was begun, and no optimizer has ended it.
            MegabucketError: the step before was dropped, on all ranks, and nobody has been told.
        """
        raise_if_any(self.settle())
        # Gradients that no optimizer has stepped on, nor cleared, would be lost as those of a microbatch would.
        has_grads = self._awaits_update and any(slot.param.grad is not None for group in self._groups for slot in group.slots)
        if has_grads or not self.is_between_steps:
            raise PhaseError(
                f"{operation} in the middle of a step: gradients are part of no checkpoint, and buckets may be on their way. "
                "Call it between two steps, after optimizer.step() or ddp.zero_grad(), on every rank."
            )

    def check_has_updated(self, operation: str) -> None:
        """Refuse to save what an update that has failed on this rank has left: other ranks have made theirs.

        Raises:
            PhaseError: it has failed, and no fence has told the others so far.
        """
        failure = self.tally.failure
        if failure is not None and self.is_between_steps:
            raise PhaseError(
                f"{operation} after an update that failed on rank {self._communicator.rank} ({failure.error}), while others "
                "may have made theirs: their values are not of one step. Load the last checkpoint on every rank."
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in backwards that run inside. May be nested; an exception inside leaves nothing behind."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def begin_forward(self) -> None:
        """Note that a training forward begins.

        Raises:
            MegabucketError: a forward or backward of this step has failed before, and the caller has caught the exception.
        """
        self.tell_swallowed()
        self.settle()
        self.begin_step()
        self._set_phase("forward")
        self.tally.begin_forward()

    # Called by autograd #

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter. The cost does not depend on how many there are, but for the first of each group.

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
        elif group.receive_grad(position, counts=syncs, may_wait=self._may_wait) and self._config.overlap_grad_reduce:
            self._launcher.mark_complete(index)

    def begin_backward(self) -> None:
        """Note that a backward has come to an output of the module.

        Raises:
            ConcurrentBackwardError: another thread's backward is running.
            MegabucketError: as ``begin_forward``.
        """
        if self._backward.is_open:
            self._backward.check_thread(rank=self._communicator.rank)
        else:
            self._open()
        if self._config.unused_parameters == "zero" and goes_everywhere(torch._C._current_autograd_node()):
            self._has_reached_outputs = True

    def _open(self) -> None:
        self.tell_swallowed()
        self.settle()
        self.begin_step()
        self._set_phase("backward")
        self._between.look(is_finished=self._is_finished)  # now, before the first gradient is added to others
        self._backward.open(self)
        # With create_graph=True a sum is a new tensor, so the next gradient must find the one before.
        self._may_wait = not (torch.is_grad_enabled() or any(self._backward_hooks))
        self.has_failed = self._has_received = self._has_reached_outputs = False

    def end_backward(self) -> None:
        """Finish the sync where the end of a backward does."""
        refusal, self._refusal = self._refusal, None
        raise_if_any(refusal)
        if self._has_reached_outputs and not self._has_received:
            self._count_without_gradients()
        self.tally.num_microbatches += self._has_received or self._has_reached_outputs
        if self.awaits_finish and self._finishes_with_backward:
            self._between.note_end(accumulates=False)
            self.finish()  # which takes what still waits
        else:
            self._close_intakes()
            self._between.note_end(accumulates=not self.awaits_finish)
            if self.awaits_finish:
                self._withhold_grads()
        self._communicator.tell_pause()

    def _close_intakes(self) -> None:
        try:
            for group in self._groups:
                group.intake.close()
        except BaseException as error:
            self._drop_intakes()
            self.fail("backward", error)  # autograd would not say so: for it this backward is over
            raise

    def _drop_intakes(self) -> None:
        for group in self._groups:
            group.intake.drop()

    def _withhold_grads(self) -> None:
        for group in self._groups:
            group.withhold_grads()

    def abandon_backward(self) -> None:
        """Tell the others that a backward has failed here. Called from a destructor, so nothing is raised."""
        self._drop_intakes()
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
        self._refusal = self._start_anew()
        if self._refusal is not None:
            slot.param.grad = None
            return False
        return True

    def _start_anew(self) -> MegabucketError | None:
        """Begin a step on top of what plain torch code left; return the error about the last one, if others step on it."""
        error = self._vote_to_drop()
        self.begin_step()
        if error is None:
            self._reopen_if_finished()
            self.tally.kept, self.has_failed = self._between.kept, False
            self._agreement.skip_reason = ""
        return error

    def _count_without_gradients(self) -> None:
        """Make a backward that has brought no gradient one of the step: the others wait for its zeros."""
        if self._is_finished:
            raise_if_any(self._start_anew())
        if self._no_sync_depth == 0:
            self.awaits_finish = True
