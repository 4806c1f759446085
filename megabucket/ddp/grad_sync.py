"""One step's gradient sync: which backward is reduced, when it starts, when it is finished.

Receives every gradient from the hooks, launches bucket groups in order, and finishes them: at the end of the last backward
(all-reduce, ``finish="auto"``), or when the optimizer or the caller asks. Knows groups only; memory is their business.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.launcher import InOrderLauncher
from megabucket.errors import LateGradientError, PhaseError, UnusedParameterError


class GradSync:
    """The gradient sync of one wrapper.

    Args:
        groups: bucket groups in launch order.
        config: what overlaps, what finishes, and what a missing gradient means.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], config: DistributedDataParallelConfig) -> None:
        self._groups = groups
        self._config = config
        self._launcher = InOrderLauncher(groups, self._launch)
        self._no_sync_depth = 0
        self._open_backward: int | None = None  # autograd's id of the backward at whose end gradients are finished
        self._finishes_with_backward = config.finish == "auto" and not config.use_distributed_optimizer
        self._is_finished = False
        self.force_all_reduce = False
        """All-reduce in the next launches although the distributed optimizer is on."""
        self.has_local_grads = any(slot.has_grad for group in groups for slot in group.slots)
        """Whether gradients were accumulated (also before wrapping) since they were last finished or cleared."""
        self.awaits_finish = False
        """Whether a backward outside ``no_sync`` has run since gradients were last finished or cleared."""
        self.has_failed = False
        """Whether an error was raised about the gradients of this step, so that nobody may step on them."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in backwards that run inside. May be nested; an exception inside leaves nothing behind."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @property
    def finishes_with_backward(self) -> bool:
        """Whether the end of backward finishes the sync by itself."""
        return self._finishes_with_backward

    @property
    def is_finished(self) -> bool:
        """Whether every gradient is reduced."""
        return self._is_finished

    # Called by autograd #

    def hook(self, group: _ParamAndGradBucketGroup, position: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of one parameter. Its cost does not depend on the number of parameters.

        The hook knows this object weakly: Python's garbage collector does not see cycles through hooks of tensors.
        """
        reference, index = weakref.ref(self), group.index

        # As defaults, not as a closure: one tuple instead of a cell each, so thousands of hooks stay in the cache longer.
        def receive(
            _: torch.Tensor,
            reference: weakref.ref[GradSync] = reference,
            index: int = index,
            position: int = position,
        ) -> None:
            sync = reference()
            if sync is None:
                raise PhaseError(
                    "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
                    "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
                )
            sync._receive(index, position)

        return receive

    def _receive(self, index: int, position: int) -> None:
        group = self._groups[index]
        if self._is_finished:
            self._start_step_unasked(group, position)
        self.has_local_grads = True
        syncs = self._no_sync_depth == 0
        if syncs:
            self.awaits_finish = True
            if self._open_backward is None and self._finishes_with_backward:
                self._open(_graph_task_id())
        try:
            is_complete = group.receive_grad(position, counts=syncs)
        except LateGradientError:
            self.has_failed = True
            if group.grad_phase is GradPhase.IN_FLIGHT:
                for one in self._groups:  # the model has changed its ways, probably in other groups, too
                    one.readiness.unlearn()
            raise
        if is_complete and self._config.overlap_grad_reduce:
            self._launcher.mark_complete(index)

    def begin_backward(self) -> None:
        """Note that a backward through the module's outputs begins.

        Reentrant activation checkpointing runs backwards inside the backward, and the first parameter hook may well fire in
        an inner one, whose end is not the end. The outputs belong to the outer one, so what is queued here ends last.

        If the backward before ended in an exception and had sent some of its gradients, all gradients of that step are dropped.
        """
        task = _graph_task_id()
        if not self._finishes_with_backward or task == self._open_backward:
            return
        if self._open_backward is not None:
            self._abandon_backward()
        if not self._no_sync_depth:
            self._open(task)

    def _abandon_backward(self) -> None:
        """Leave a backward behind that ended in an exception: what it counted must not complete a group of the next one."""
        self._open_backward = None
        if any(group.grad_phase is GradPhase.IN_FLIGHT for group in self._groups):
            self.reset()
        else:
            self._launcher.start_step()
            self._forget_counts()
            self.awaits_finish = False

    def _start_step_unasked(self, group: _ParamAndGradBucketGroup, position: int) -> None:
        """Start a step because a gradient arrives, or refuse it: plain torch code may clear gradients without telling us.

        After an all-reduce a cleared gradient (``None``) starts anew. One that was zeroed in place, or not cleared at all, is
        accumulated on and reduced again: the mean of values that are equal on all ranks is that value, so the result is
        what torch's own accumulation gives. A sum would count the old values once per rank, and after a reduce-scatter they
        are not even gradients; both are refused. All groups start together, so the schedule stays the same on every rank.
        """
        slot = group.slots[position]
        may_start = not self._config.use_distributed_optimizer
        if may_start and self._config.grad_reduction == "sum":
            others = (other for one in self._groups for other in one.slots if other is not slot)
            may_start = slot.param.grad is not slot.view and not any(other.has_grad for other in others)
        if not may_start:
            group.refuse_late_grad(position)
        for one in self._groups:
            one.reopen()
        self._is_finished = self.has_failed = False

    def _open(self, task: int) -> None:
        self._open_backward = task
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._open_backward = None
        if self.awaits_finish:
            self.finish()

    # Called by the wrapper #

    def start(self) -> None:
        """Launch every group that was not launched yet."""
        if not self._is_finished:
            self._launcher.flush()

    def finish(self) -> None:
        """Launch what was not launched, wait for all, and leave reduced gradients behind. Idempotent.

        Raises:
            UnusedParameterError: parameters had no gradient in the whole step and the config calls that an error. The
                collectives are completed before, so no other rank waits for this one.
        """
        had_local_grads = self.has_local_grads
        if self._complete_schedule() and self._config.unused_parameters == "error":
            # Without any backward, what the caller wrote into zeroed views counts; what had to be zeroed is missing.
            self._check_unused([group.missing if had_local_grads else group.cleared for group in self._groups])

    def drain(self) -> None:
        """Complete the schedule of a step whose gradients nobody wants any more, so that no rank waits for this one."""
        self._open_backward = None
        if any(group.grad_phase is GradPhase.IN_FLIGHT for group in self._groups):
            self._forget_counts()
            self._complete_schedule()

    def reset(self) -> None:
        """Start a step: drain, then forget all gradients."""
        self.drain()
        self._launcher.start_step()
        self._is_finished = self.has_local_grads = self.awaits_finish = self.has_failed = False
        for group in self._groups:
            group.reset()

    def check_not_failed(self) -> None:
        """Refuse to step on gradients that an error was raised about.

        Raises:
            PhaseError: there was such an error since gradients were last cleared.
        """
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
        group.start_grad_sync(force_all_reduce=self.force_all_reduce)

    def _complete_schedule(self) -> bool:
        """Launch and wait; return whether there was anything to do."""
        if self._is_finished:
            return False
        self._launcher.flush()
        for group in self._groups:
            group.finish_grad_sync()
        self._launcher.start_step()
        self._is_finished = True
        self.has_local_grads = self.awaits_finish = False
        return True

    def _check_unused(self, unused_by_group: Sequence[Sequence[str]]) -> None:
        unused = [name for names in unused_by_group for name in names]
        if unused:
            self.has_failed = True
            raise UnusedParameterError(
                params=unused,
                bucket=next(index for index, names in enumerate(unused_by_group) if names),
                num_buckets=len(self._groups),
                num_params=sum(len(group.slots) for group in self._groups),
                rank=self._groups[0].communicator.rank,
            )

    def _forget_counts(self) -> None:
        for group in self._groups:
            group.readiness.abandon_step()


def _graph_task_id() -> int:
    return int(torch._C._current_graph_task_id())
