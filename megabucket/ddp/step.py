"""``GradSync``: the state of the steps of one wrapper, from the first forward to the update, and every way to end a step.

::

    IDLE      -> OPEN       a training forward or a gradient
    IDLE      -> LAUNCHING  a gradient of the last microbatch, or a flush, without a forward before
    OPEN      -> LAUNCHING  the same; may stay here between backward and step()
    OPEN      -> IDLE       cleared before anything was sent
    LAUNCHING -> FENCED     the last bucket and the fence are sent
    FENCED    -> PUBLISHED  all ranks are whole and the buckets are reduced (an overflow of the sum is found here); each rank
                            updates by itself
    FENCED    -> COMMITTED  the same, where an update needs collectives: all ranks make it, or none
    FENCED    -> IDLE       a rank has a problem: buckets reduced and forgotten, the same error on all ranks; or all ranks have
                            cleared their gradients
    PUBLISHED -> OPEN       the next step begins, perhaps on gradients that were kept
    PUBLISHED -> IDLE       cleared
    PUBLISHED -> COMMITTED  an optimizer was made whose update needs collectives
    COMMITTED -> IDLE       updated and the gather sent; or cleared
    COMMITTED -> OPEN       the next step begins on gradients that were not cleared
    COMMITTED -> FENCED     a second vote: explicit finish and then step() or zero_grad(); before any joint update or change
    GIVING_UP -> IDLE       the same error on all ranks
    CALL      -> IDLE       another rank has sent the buckets of a step, or votes on it: it is dropped on all ranks

    IDLE, OPEN, LAUNCHING, COMMITTED -> GIVING_UP
                            this rank failed before its fence: it sends the rest of the schedule and a fence that reports the
                            failure; may stay here until the next call
    IDLE, OPEN, LAUNCHING, PUBLISHED, COMMITTED -> CALL
                            a collective call, until its exchange is over. In OPEN and LAUNCHING, where other buckets may be
                            sent on other ranks, calls only compare entries, or are refused on all ranks
    CALL -> IDLE, OPEN, LAUNCHING, PUBLISHED, COMMITTED
                            back to where it came from
    IDLE      -> OFFLOADED  memory is given back on all ranks: everything is refused but to take it again
    OFFLOADED -> IDLE       it is back, or the call that takes it begins
    any -> BROKEN           interrupted after the fence was sent, or in a call, or a peer was lost; only detach() is left

Hooks never raise about the open step and never change the order of launches; they note problems. Whatever goes wrong, each rank
sends the same collectives in the same order: all buckets, then the fence. The phases of the buckets (``buffer/phases.py``) say
who owns their memory.
"""

from __future__ import annotations

import enum
import sys
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType, TracebackType
from typing import Final

import torch

from megabucket.buffer import GradPhase, WithheldGrad, _ParamAndGradBucketGroup
from megabucket.config.resolve import StepPolicy
from megabucket.ddp.backward import Backward, refuse_in_backward
from megabucket.ddp.calls import CollectiveCall, agree_on_call, making, making_several
from megabucket.ddp.fence import Fence
from megabucket.ddp.groups import RankGroups
from megabucket.ddp.module_watch import ModelWatch, only_freezes
from megabucket.ddp.report import CLEARED, RankReport, all_have_left, describe, resolve_error
from megabucket.ddp.schedule import Schedule
from megabucket.ddp.unused import SkippingSchedule
from megabucket.errors import (
    ForkedProcessError,
    GroupDestroyedError,
    InvariantError,
    MegabucketError,
    NonFiniteGradientError,
    PeerFailedError,
    PeerLostError,
    PhaseError,
    UnreducedGradientsError,
    WrapperBrokenError,
    name_list,
)
from megabucket.trace.step_recorder import BETWEEN_STEPS, PAUSE


class StepState(enum.Enum):
    """The state of a step."""

    IDLE = "between two steps"  # no step has begun; calls are allowed
    OPEN = "open"  # forwards and microbatches; gradients accumulate on this rank
    LAUNCHING = "launching"  # the last microbatch runs or has run; buckets are sent
    FENCED = "fenced"  # this rank's report was sent and cannot be taken back
    PUBLISHED = "published"  # gradients are reduced; optimizers may step on them, each rank by itself
    COMMITTED = "committed"  # gradients are reduced; all ranks update with collectives, or none does
    GIVING_UP = "giving up"  # this rank failed; the others learn it at their fence
    CALL = "in a call"  # all ranks are in the same collective call
    OFFLOADED = "offloaded"  # all ranks have given back memory; no tensor in it may be touched
    BROKEN = "broken"  # nothing more can be sent


AGREED: Final = (StepState.PUBLISHED, StepState.COMMITTED)
"""States in which all ranks are whole and the buckets hold reduced gradients."""
_MAY_STEP_ASIDE: Final = frozenset({StepState.IDLE, StepState.OPEN, StepState.LAUNCHING, *AGREED})
"""States in which this rank may make a call and come back, or give up its step. If that is PUBLISHED, the next one is OPEN."""
_ASIDE: Final = frozenset({StepState.GIVING_UP, StepState.CALL})

_TRANSITIONS: Final[Mapping[StepState, frozenset[StepState]]] = MappingProxyType(
    {
        StepState.IDLE: _ASIDE | {StepState.OPEN, StepState.LAUNCHING, StepState.OFFLOADED},
        StepState.OPEN: _ASIDE | {StepState.LAUNCHING, StepState.IDLE},
        StepState.LAUNCHING: _ASIDE | {StepState.FENCED},
        StepState.FENCED: frozenset({StepState.PUBLISHED, StepState.COMMITTED, StepState.IDLE}),
        StepState.PUBLISHED: frozenset({StepState.IDLE, StepState.OPEN, StepState.COMMITTED, StepState.CALL}),
        StepState.COMMITTED: _ASIDE | {StepState.IDLE, StepState.OPEN, StepState.FENCED},
        StepState.GIVING_UP: frozenset({StepState.IDLE}),
        StepState.CALL: _MAY_STEP_ASIDE,
        StepState.OFFLOADED: frozenset({StepState.IDLE}),
        StepState.BROKEN: frozenset(),
    }
)


_ANSWER_WITHIN_S: Final = 2.0
"""How long a rank waits for the others where its program may end: at the end of a step() block, and in detach()."""
_DETACH, _MIDDLE = "detach()", "its wrapper was detached in the middle of a step"

REPORTED: Final = (StepState.FENCED, StepState.CALL)
"""States in which the other ranks have this rank's report, so that a failure breaks the wrapper."""
FAILED: Final = (StepState.GIVING_UP, StepState.BROKEN)
"""States in which this rank cannot bring its step to a good end."""
UPDATING: Final = (StepState.FENCED, *AGREED)
"""States in which the other ranks update and gather, so that an optimizer that fails breaks the wrapper."""

_CAUGHT: Final = " (caught inside the `with ddp.step():` block, which cannot go on)"
_GROUP_ERRORS: Final = (PeerLostError, WrapperBrokenError, ForkedProcessError, GroupDestroyedError)
"""Errors that are not about a step, so there is nothing to report to the other ranks."""


class GradSync:
    """The steps of one wrapper.

    Args:
        groups: bucket groups in launch order.
        watch: finds changes of the module; ``None``: no check.
        backward_hooks: of the module and its submodules. While there are any, no gradient is staged: they may read gradients.
        ranks: of the wrapper.
        partial: names of parameters whose gradients ``finalize_grads`` sums over copies on other ranks.
    """

    def __init__(
        self,
        groups: Sequence[_ParamAndGradBucketGroup],
        policy: StepPolicy,
        watch: ModelWatch | None = None,
        *,
        ranks: RankGroups,
        backward_hooks: Sequence[Sized] = (),
        partial: Collection[str] = (),
    ) -> None:
        self.groups = groups
        self.ranks = ranks
        self.policy = policy
        self._watch = watch
        self._backward_hooks = backward_hooks
        self._communicator = self.ranks.step
        device = groups[0].buckets[0].grad_data.device
        self._fence = Fence(self._communicator, num_buckets=len(groups), policy=policy, device=device)
        self.counters = self._fence.counters
        """The contents of this rank's next report."""
        if any(group.policy.skips_unused for group in groups):
            self._schedule: Schedule = SkippingSchedule(groups, ranks, self.counters, partial=partial)
        else:
            self._schedule = Schedule(groups, self._communicator, self.counters)
        self.step = 0
        """Number of steps that all ranks agreed on or dropped."""
        self.last_error: MegabucketError | None = None
        """The error that all ranks raised for the last dropped step."""
        skipping = [group for group in groups if group.policy.skips_unused and group.communicator.size < ranks.step.size]
        self._unlike = frozenset(slot.name for group in skipping for slot in group.slots)
        """Names of parameters that may have a gradient after a step on some ranks only: those of their reduction group."""
        has_grads = any(slot.has_grad for group in groups for slot in group.slots)  # from before wrapping
        self.state = StepState.OPEN if has_grads else StepState.IDLE
        self.broken: MegabucketError | None = None
        """Why nothing more can be sent: the wrapper is broken, or offloaded."""
        self.dropped: MegabucketError | None = None
        """The error of a step whose gradients were not cleared since: no optimizer may step on them."""
        self.skip_reason = ""
        """Why no rank updates with the gradients of this step: they are not finite, a loss scaler has found that they are not,
        or the step of another wrapper of a chain is skipped. Otherwise empty. Others set it by ``skip_update``."""
        self.force_all_reduce = False
        """Whether to gather whole gradients although the distributed optimizer is on."""
        self.updates_jointly = policy.is_sharded
        """Whether an update needs collectives: then all ranks make it or none, as the fence before it decides."""
        self.given_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that must not step: those inside a ``DistributedOptimizer``, which asks ``skip_reason``."""
        self._is_leaving = False  # detach() waits for the other ranks, but not for long
        self._concludes_late = False  # forwards of the next step may begin before the step that was given up is concluded
        self.resets_late = False
        """Whether the reduced gradients are cleared when the next step begins; those of some optimizers are already."""
        self.is_unseen = False
        """Whether this rank has given up the step because of an exception that its caller may not have seen."""
        self._no_sync_depth = self._num_blocks = self._num_noting = 0
        self.num_calls = 0
        """Number of collective calls that were entered."""
        self.backward: Backward | None = None
        """The backward that is running through the module, if there is one."""

    def continue_from(self, other: GradSync) -> None:
        """Take over the state that survives a rebuild."""
        self.step, self.last_error, self.force_all_reduce = other.step, other.last_error, other.force_all_reduce
        self.counters.continue_from(other.counters)

    @property
    def is_reduced(self) -> bool:
        """Whether the buckets hold reduced gradients."""
        return self.groups[0].grad_phase is GradPhase.REDUCED

    @property
    def is_between_steps(self) -> bool:
        """Whether no step has begun and no other rank waits for the last one."""
        return self.state in (StepState.IDLE, StepState.PUBLISHED) and not self.counters.num_open_forwards

    @property
    def skipped(self) -> frozenset[str]:
        """Names of the parameters that optimizers must leave alone in the step that all ranks have agreed on.

        No rank of their reduction group has used them, and they had no gradient before the step. The same on all ranks of the
        group, whatever they own of them. Empty without such a step, and unless ``unused_parameters="skip"``.
        """
        return self._schedule.skipped if self.state in AGREED else frozenset()

    def enter(self, state: StepState) -> None:
        """Go to ``state``.

        Raises:
            MegabucketError: the wrapper is broken.
            InvariantError: the table has no transition from the current state to ``state``.
        """
        if state is self.state:
            return
        if state not in _TRANSITIONS[self.state]:
            if self.broken is not None:
                raise self.broken.copy()
            raise InvariantError(f"a step that is '{self.state.value}' cannot become '{state.value}'")
        self.state = state

    # Forward and backward #

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in backwards that run inside. May be nested; safe against exceptions."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @property
    def only_accumulates(self) -> bool:
        """Whether the caller is inside ``no_sync()``."""
        return self._no_sync_depth > 0

    @contextmanager
    def noting(self, phase: str) -> Iterator[None]:
        """Give up the step if an exception ends the block. Nothing is sent before ``send_failure()`` or the next call.

        That call raises the error of all ranks, so the caller of this may go on after the exception.

        Args:
            phase: "forward" or "backward".
        """
        self._num_noting += 1
        try:
            yield
        except Exception as error:
            self.fail(phase, error)
            if self.state is StepState.GIVING_UP:
                # Autograd has not said what it was, and torch's pipelines wrap it in a RuntimeError of their own.
                inner = error.__cause__ if type(error) is RuntimeError else None
                self.counters.note_failure(phase, describe(inner or error), is_certain=True)
            raise
        finally:
            self._num_noting -= 1

    def begin_forward(self) -> None:
        """Note that a training forward begins.

        Raises:
            MegabucketError: a forward or backward of this step failed before, and the caller caught the exception.
        """
        self._give_up_cleared_step()
        if not self._concludes_late:
            self.settle()
        if self.resets_late:
            self._reset()
        self._begin("forward")
        self.counters.num_open_forwards += 1

    def _begin(self, phase: str) -> None:
        # COMMITTED ends with a vote, also after the update of one of several optimizers.
        if self.state is StepState.IDLE or (self.state is StepState.PUBLISHED and self.counters.num_updates):
            self.enter(StepState.OPEN)
        self._communicator.progress.enter(self.step, phase)

    def begin_step(self) -> None:
        """Open the next step, however the last one ended."""
        self._give_up_cleared_step()
        self.settle()
        if self.resets_late:
            self._reset()
        if self.state in (StepState.IDLE, StepState.PUBLISHED):
            self.enter(StepState.OPEN)

    def _give_up_cleared_step(self) -> None:
        """Give up a step that an exception has ended between forward and backward, as far as ``zero_grad()`` tells.

        Right after it a backward may still reach the forward. When the next forward begins instead, the other ranks wait for
        this one at the fence of that step. It does not wait for them before its own backward: other wrappers of the program may
        have such a step as well, and report it in their next forwards. If all ranks leave such a step, it is no fault.
        """
        if self.counters.has_cleared_forwards and not self._num_blocks:
            self.fail("forward", CLEARED)
            self.counters.forget_forwards()
            self._concludes_late = True

    # ``with ddp.step():`` is two methods, not a generator: StopIteration of a data loader cannot be thrown into a generator.

    def __enter__(self) -> None:
        """Begin a ``step()`` block: every failure inside belongs to the step."""
        self.begin_step()
        self._num_blocks += 1

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """End a ``step()`` block: an exception inside becomes the same error on all ranks.

        Raises:
            MegabucketError: the error of all ranks, from the exception of this rank; also if the caller caught the exception of
                a forward or backward inside the block.
        """
        self._num_blocks -= 1
        if error is None:
            self.settle()
            return
        self.is_unseen = False
        if error is self.last_error or self.state is StepState.BROKEN or isinstance(error, _GROUP_ERRORS):
            return
        if self.state is StepState.GIVING_UP and not self._fence.is_sent:
            self.counters.note_failure(self._communicator.progress.phase, describe(error), is_certain=True)
        elif not self.is_between_steps:
            self.fail(self._communicator.progress.phase, error)
        elif self._awaits_update:
            self.counters.note_missed_update(describe(error))
        if self.state is StepState.GIVING_UP:
            self.send_failure()
            if isinstance(error, Exception):  # an interrupt does not wait for other ranks
                raise (self._error_of_all() or error) from error

    def _error_of_all(self) -> MegabucketError | None:
        """Return the error that all ranks raise about the step that this rank has given up.

        Ranks that are not at their fence yet may be in a collective of the caller's own, which needs this rank. So it does not
        wait long for them. Its own report says what theirs will say, unless another rank has failed as well.
        """
        if self.broken is None and not self._is_answered_soon():
            return self._fence.own_error(self.step)
        return self.conclude_giving_up()

    def _is_answered_soon(self) -> bool:
        deadline_s = time.monotonic() + _ANSWER_WITHIN_S
        while not self._fence.is_answered():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
        return True

    @property
    def _awaits_update(self) -> bool:
        """Whether all ranks have agreed on gradients and this rank has not stepped on them."""
        return self.state in AGREED and not (self.counters.num_updates or self.skip_reason)

    def begin_backward(self) -> None:
        """Note that a backward has reached an output of the module.

        Raises:
            ConcurrentBackwardError: another backward of the module is running.
            MegabucketError: as ``begin_forward``.
        """
        backward = self.backward
        if backward is None or backward.has_failed:
            self._follow_backward()
        else:
            backward.check_is_this(rank=self._communicator.rank)

    def _follow_backward(self) -> Backward:
        self.settle()
        self._begin("backward")
        self.dropped = None
        backward = self.backward
        if backward is None or not backward.is_this():  # the hooks of a device and of the host run in two threads
            backward = self.backward = Backward(self)
        if self.state is StepState.LAUNCHING:  # the last microbatch runs several backwards
            for group in self.groups:
                group.show_withheld()
        return backward

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter. O(1), except for the first of each group in a backward.

        Args:
            index: of the bucket group.
            position: of the parameter in the group.
        """
        group, backward = self.groups[index], self.backward
        if backward is None or not backward.is_taking:
            backward = self._begin_taking(group, position)
        if group.grad_phase is not GradPhase.ACCUMULATING:
            self._note_late(group, position)
        elif group.receive(position, backward) and self.policy.overlaps_grads:
            self._schedule.launch_complete()

    def _begin_taking(self, group: _ParamAndGradBucketGroup, position: int) -> Backward:
        """Prepare for the first gradient of a backward.

        Raises:
            StepMismatchError: this rank dropped a step that other ranks take.
        """
        backward = self.backward or self._follow_backward()
        if self.is_reduced:
            self._start_implicitly(group, position)
        # With create_graph=True autograd makes a new sum, which needs the previous gradient in param.grad.
        may_stage = not (torch.is_grad_enabled() or any(self._backward_hooks))
        backward.is_taking, backward.is_last, backward.may_stage = True, self._no_sync_depth == 0, may_stage
        if backward.is_last:
            self.enter(StepState.LAUNCHING)
        elif self.state is not StepState.LAUNCHING:
            self.enter(StepState.OPEN)
        return backward

    def _start_implicitly(self, group: _ParamAndGradBucketGroup, position: int) -> None:
        """Start a step because a gradient arrives: plain torch code may clear gradients without calling the wrapper.

        After an all-reduce a cleared gradient (``None``) starts from zero. One that was zeroed in place, or kept, accumulates
        and is reduced again: the mean of equal values is that value, as with torch's own accumulation. A sum would count the
        old values once per rank, and after a reduce-scatter they are not whole gradients; both are noted as late. So is a
        gradient that was to be cleared before this step, and has been added to instead.
        """
        own = group.slots[position]
        slots = [slot for one in self.groups for slot in one.slots]
        kept = [
            slot for slot in slots if slot.param.grad is slot.in_buffer or (slot.param.grad is not None and slot is not own)
        ]
        if self.resets_late:
            if own.param.grad is own.in_buffer or type(own.param.grad) is WithheldGrad:
                self._note_late(group, position)
            for slot in slots:
                if slot is not own:
                    slot.param.grad = None
            kept = []
        elif self.policy.is_sharded or (not self.policy.averages and kept):
            self._note_late(group, position)
            kept = []
        try:
            self._vote_to_drop()
        except MegabucketError:
            own.param.grad = None
            self.backward = None  # it ends because of the last step, and is no failure of the next one
            raise
        self._reopen()
        self.counters.kept = tuple(slot.name for slot in kept if slot.name not in self._unlike)

    def _reopen(self) -> None:
        for group in self.groups:
            group.reopen()
        self.skip_reason, self.resets_late = "", False
        if self.state is not StepState.LAUNCHING:
            self.enter(StepState.OPEN)

    def _note_late(self, group: _ParamAndGradBucketGroup, position: int) -> None:
        """Keep a gradient out of a buffer that was sent, and note it for the report."""
        slot = group.slots[position]
        slot.param.grad = None
        phase = group.grad_phase.value
        self.counters.note_late(slot.name, bucket=group.index, num_buckets=len(self.groups), phase=phase)

    def grad_ready(self, param: torch.Tensor) -> None:
        """Take a gradient that was computed outside backward, and launch the groups that are complete with it.

        Raises:
            ConfigError: gradients of the parameter are taken from autograd.
            PhaseError: it comes after the gradient sync, or was added to values of an earlier step.
        """
        group = self._schedule.delayed_group_of(param)
        self.settle()
        position = group.position_of[id(param)]
        with self.failing_on_all_ranks("grad_ready()"):
            if group.grad_phase is GradPhase.REDUCED:
                if group.slots[position].name in group.missing:
                    # All ranks have taken the step without this gradient, so all of them learn it, at the next fence.
                    self.counters.note_delayed(
                        group.slots[position].name, "has come after the gradients of its step were reduced"
                    )
                raise PhaseError(
                    f"grad_ready() was called for {group.slots[position].name!r} when the gradients of the step were reduced: "
                    "this one would be left out. Call it before finish_grad_sync() or the optimizer's step, and zero_grad() "
                    "before the next step begins."
                )
            if group.grad_phase is GradPhase.IN_FLIGHT:
                self._note_late(group, position)
                return
            if self.state is StepState.IDLE:
                self.enter(StepState.OPEN)
            group.receive_delayed(position)
            if self.backward is None:
                self._launch_delayed()

    def take_assigned(self) -> None:
        """Take the gradients of one backward that were computed outside autograd and assigned or added to ``param.grad``.

        For parameters whose other gradients may come through autograd. Nothing is launched before ``start()``.
        """
        found = [(group, slot, slot.param.grad) for group in self.groups for slot in group.slots if slot.param.grad is not None]
        if found and self.is_reduced:
            for _, slot, grad in found:
                slot.param.grad = grad if grad is slot.in_buffer else None  # that in the buffer is kept from the last step
            group, slot, _ = found[0]
            self._start_implicitly(group, group.position_of[id(slot.param)])
        for group, slot, grad in found:
            if grad is not slot.in_buffer:
                slot.param.grad = grad
            if group.grad_phase is GradPhase.ACCUMULATING:
                group.receive_assigned(group.position_of[id(slot.param)])
            else:
                self._note_late(group, group.position_of[id(slot.param)])
        # With either of these, the backward through the outputs has counted.
        self.counters.num_microbatches += not (self.policy.allows_unused or self._schedule.delayed)

    def drop_dummy(self, index: int, position: int) -> None:
        """Drop the dummy gradient of a parameter whose gradient is computed outside backward. Note a real gradient."""
        slot = self.groups[index].slots[position]
        if getattr(slot.param, "zero_out_wgrad", False):
            return  # zeros, and gradients of the other end of a tied weight: taken with the delayed gradient
        if not (slot.param.grad is None or slot.param.grad_added_to_main_grad):  # type: ignore[attr-defined]
            self.counters.note_delayed(slot.name, "has come through autograd, in backward")
        slot.param.grad, slot.param.grad_added_to_main_grad = None, False  # type: ignore[attr-defined]

    def _launch_delayed(self) -> None:
        if self.state is StepState.LAUNCHING and self.policy.overlaps_grads:
            self._schedule.launch_delayed()

    def end_backward(self, backward: Backward) -> None:
        """Finish the sync if the end of a backward does so. Called by autograd; an error leaves ``backward()``.

        Raises:
            MegabucketError: the step is not whole on some rank.
        """
        with self.failing_on_all_ranks("backward"):
            self.backward = None
            has_changed = self._count_backward(backward)
            if has_changed or (self.state is StepState.LAUNCHING and self.policy.finishes_with_backward and backward.is_taking):
                self.finish()  # stores the staged gradients as well
            else:
                for group in self.groups:
                    group.end_backward()
                    if self.state is StepState.LAUNCHING:
                        group.withhold_grads()
                if self._schedule.delayed:
                    self._launch_delayed()
        self.pause()

    def _count_backward(self, backward: Backward) -> bool:
        """Count the backward; one without gradients counts if gradients may be missing, or are delayed.

        Returns whether it had no gradients because the module has changed: an optimizer over the new parameters would never
        call this wrapper. Parameters that are frozen now may be trainable again before their optimizer steps, as those of a
        discriminator are after the loss of the generator. That step would still find them frozen.
        """
        may_be_empty = self.policy.allows_unused or bool(self._schedule.delayed)
        counts = backward.is_taking or may_be_empty
        self.counters.num_microbatches += counts
        is_empty = not backward.is_taking and self._no_sync_depth == 0
        change = self._watch.find_change() if is_empty and self._watch is not None else None
        has_changed = change is not None and not only_freezes(change)
        if is_empty and (counts or has_changed):
            # The other ranks wait for this one: it takes part when an optimizer or the caller asks for gradients.
            if self.is_reduced:
                self._vote_to_drop()
                self._reopen()
                if self.policy.averages and not self.policy.is_sharded:  # as on ranks with a gradient
                    kept = [slot for group in self.groups for slot in group.slots if slot.param.grad is not None]
                    self.counters.kept = tuple(slot.name for slot in kept if slot.name not in self._unlike)
            self.enter(StepState.LAUNCHING)
        return has_changed

    def abandon_backward(self) -> None:
        """Report to the other ranks that a backward has failed here. Called from a destructor, so it never raises."""
        for group in self.groups:
            group.drop_staged()
        self.fail("backward", None)
        self.backward = None

    def pause(self) -> None:
        """Note for recorders that the caller's own code runs now."""
        for recorder in self._communicator.recorders.active:
            recorder.enter_phase(self.step, PAUSE)

    # The end of a step #

    def start(self) -> None:
        """Launch every group that was not launched yet."""
        self.settle()
        if not self.is_reduced:
            with self.failing_on_all_ranks("start_grad_sync()"):
                self.enter(StepState.LAUNCHING)
                self._schedule.launch_rest()

    def finish(self, *, is_committing: bool = False, force_all_reduce: bool = False) -> None:
        """Launch the remaining groups, wait for all, and finish the reduced gradients. Idempotent.

        Args:
            is_committing: whether the optimizer updates right afterwards.
            force_all_reduce: gather whole gradients in this step, although the distributed optimizer is on.

        Raises:
            MegabucketError: the step is not whole on some rank. All ranks raise the same error, the gradients are forgotten,
                and the next step may run.
        """
        before = self.force_all_reduce
        self.force_all_reduce = before or force_all_reduce
        try:
            with self.failing_on_all_ranks("the gradient sync"):
                for _ in self.agree(is_committing=is_committing):
                    pass
        finally:
            if force_all_reduce:
                self.force_all_reduce = before

    def check_is_trainable(self) -> None:
        """Finish a step of which a backward has found all parameters frozen, and an optimizer finds them so: an error.

        Raises:
            TrainabilityChangedError: on all ranks, also where they are not frozen.
        """
        if self.state is StepState.OPEN and not any(slot.param.requires_grad for group in self.groups for slot in group.slots):
            if self.is_reduced:
                self._reopen()
            self.finish()

    def agree(self, *, is_committing: bool = False) -> Iterator[_ParamAndGradBucketGroup]:
        """Finish as ``finish`` does, and yield each group once it is reduced, after all ranks have agreed.

        Args:
            is_committing: whether the optimizer updates right afterwards.

        Raises:
            MegabucketError: the step is not whole on some rank.
        """
        self.settle(raises_again=True)
        if is_committing:
            self._communicator.progress.enter(self.step, "fence")
        if self.state is StepState.COMMITTED and is_committing:
            # The fence was at ``finish_grad_sync()``; since then a rank may have decided not to step.
            self._vote(is_committing=True)
        with self.failing_on_all_ranks("the gradient sync", UPDATING if is_committing else REPORTED):
            if not self.is_reduced:
                self._send_fence(is_committing=is_committing, unused_counts=True)
                for group in self.groups:
                    group.finish_grad_sync(waits=False)  # while other ranks reach their fence
                self._resolve_fence()
            for group in self.groups:
                group.finish_grad_sync()
                yield group
            if self.state is StepState.FENCED:
                self._conclude_whole()

    def _send_fence(self, *, is_committing: bool = False, unused_counts: bool = False) -> None:
        """Launch the groups that were not launched yet and the fence."""
        if self._watch is not None and (change := self._watch.find_change()) is not None:
            self.counters.problems["change"] = change
        if self._schedule.delayed:
            self._schedule.check_delayed()
        self.enter(StepState.LAUNCHING)
        self._schedule.launch_rest()
        is_nonfinite = self._schedule.check_launched(unused_counts=unused_counts)
        self._fence.send(self._report(is_committing=is_committing), is_nonfinite)
        self.enter(StepState.FENCED)

    def _report(self, *, is_committing: bool = False) -> RankReport:
        return self.counters.report(
            is_committing=is_committing, force_all_reduce=self.force_all_reduce, sent_buckets=not self.is_reduced
        )

    def _resolve_fence(self) -> None:
        """Wait for the fence, and drop the step if a rank has a problem.

        Raises:
            MegabucketError: the same error on all ranks. The step is over, and forgotten, on all of them.
        """
        is_counted = self.is_reduced  # a second vote, on a step that all ranks had agreed on
        if self._is_leaving and not self._is_answered_soon():
            late = WrapperBrokenError(step=self.step, rank=self._communicator.rank, phase=_DETACH, cause=_MIDDLE)
            self._break(late)
            raise late
        reports = self._fence.take(self._schedule.note_nonfinite)
        if not reports:
            return
        error = resolve_error(self.step - 1 if is_counted else self.step, len(self.groups), reports)
        self._communicator.state.failure = None
        if all_have_left(reports):
            self._drop(None, is_counted=is_counted)
            return
        if error is None:
            raise InvariantError(
                f"[rank {self._communicator.rank}] the fence of step {self.step} failed, but no report has a reason"
            )
        if isinstance(error, NonFiniteGradientError) and self.policy.skips_nonfinite:
            self.skip_reason = str(error)
            return
        self._drop(error, takes_part=any(report.sent_buckets for report in reports), is_counted=is_counted)
        raise error

    def _drop(self, error: MegabucketError | None, *, takes_part: bool = False, is_counted: bool = False) -> None:
        """Forget a step together with all ranks.

        Args:
            error: why; ``None``: all of them cleared their gradients.
            takes_part: whether some rank has sent its buckets, so that this rank must send them as well.
            is_counted: whether ``step`` counts this step already, because all ranks had agreed on it.
        """
        self._schedule.finish_dropped(takes_part=takes_part)
        if error is not None:
            self.last_error = self.dropped = error
            if self._watch is not None:
                self._watch.forget_other_grads()
        if not is_counted:
            self.step += 1
        self.counters.start_step(is_over=error is not None, has_begun=self._concludes_late)
        self._forget()
        self._communicator.progress.enter(self.step, BETWEEN_STEPS)

    def _conclude_whole(self) -> None:
        """Publish the reduced gradients of a step that all ranks have agreed on.

        Raises:
            NonFiniteGradientError: the sum is not finite, on all ranks.
        """
        # Alike on all ranks: the fence has compared it.
        if self.policy.gathers_grads or (self.force_all_reduce and self.policy.is_sharded):
            for group in self.groups:
                group.launch_grad_gather()
            for group in self.groups:
                group.finish_grad_gather()
        if self._schedule.sum_tests and (fields := self._schedule.find_nonfinite_sums()):
            error = NonFiniteGradientError(step=self.step, rank=None, **fields)
            if not self.policy.skips_nonfinite:
                self._drop(error)
                raise error
            self.skip_reason = str(error)
        # A plain optimizer skips because it finds no gradients. A loss scaler needs those of a DistributedOptimizer.
        self._schedule.publish(is_withdrawn=bool(self.skip_reason) and not self.given_optimizers)
        self.step += 1
        self.counters.start_step()
        self.enter(StepState.COMMITTED if self.updates_jointly else StepState.PUBLISHED)
        self._communicator.progress.enter(self.step, BETWEEN_STEPS)

    def _vote(self, *, is_committing: bool) -> None:
        """Agree once more, after the sync: either every rank steps, or every rank drops the step."""
        with self.failing_on_all_ranks("the gradient sync"):
            self._fence.send(self._report(is_committing=is_committing))
            self.enter(StepState.FENCED)
            self._resolve_fence()
            self.counters.start_step()
            self.enter(StepState.COMMITTED)

    def _vote_to_drop(self) -> None:
        """Tell the ranks that this one does not step on its reduced gradients, in case others do."""
        if self.state is StepState.COMMITTED:
            if not self.counters.num_updates:  # else some of several optimizers have stepped, and the others may not
                self.counters.note_dropped_step()
            self._vote(is_committing=False)

    def set_force_all_reduce(self, value: bool) -> None:
        """Decide whether each step gathers whole gradients, although the distributed optimizer is on."""
        self.force_all_reduce = value

    def skip_update(self, reason: str) -> None:
        """Note why no rank steps on the gradients of this step. The first reason stays."""
        self.skip_reason = self.skip_reason or reason

    def expect_updates(self, *, jointly: bool) -> None:
        """Note whether the update of the wrapper's optimizer needs collectives. It may be made after the gradient sync."""
        after = StepState.COMMITTED if jointly and self.state is StepState.PUBLISHED else self.state
        # In one statement: after an interrupt both are set or neither is.
        self.updates_jointly, self.state = jointly, after

    def vote_again(self) -> None:
        """Agree once more before a collective on reduced gradients: the caller's own code has run since the last fence.

        Raises:
            MegabucketError: some rank does something else with its gradients, or has failed.
        """
        self._vote(is_committing=False)

    def end_update(self) -> None:
        """End the step: the optimizer has updated its shards, or no rank does."""
        if self.state is StepState.COMMITTED:
            self.enter(StepState.IDLE)
        self.pause()

    def reset(self) -> None:
        """Start a step: forget all gradients. A reduction that has begun is completed before: the rest of it is launched.

        Raises:
            StepMismatchError: this rank drops a step that other ranks take.
        """
        refuse_in_backward("zero_grad()")
        self.settle()
        self._reset()

    def reset_late(self) -> None:
        """Reset when the next step begins: on the reduced gradients of this one, other optimizers may still step."""
        self.resets_late = True

    def _reset(self) -> None:
        self.backward = None
        was_open = self.state is StepState.OPEN
        if self.state is StepState.LAUNCHING:
            self.counters.note_dropped_step()
            with self.failing_on_all_ranks("zero_grad()"):
                self._send_fence()
                self._resolve_fence()
                self._drop(None)
        else:
            self._vote_to_drop()
            self._forget()
        self.counters.forget_grads()
        self.dropped = None
        if was_open and self._num_blocks:
            self.enter(StepState.OPEN)  # a failure in the rest of the block still belongs to the step

    def reset_to_zeros(self, *, includes_all: bool = False) -> None:
        """Start a step as ``reset`` does, on gradients that the caller fills with zeros.

        With ``unused_parameters="skip"`` these count as gradients, on which optimizers step.

        Args:
            includes_all: whether parameters that had no gradient get zeros as well.
        """
        zeroed = self._schedule.find_zeroed(includes_all=includes_all)
        self.reset()
        self._schedule.zeroed = zeroed

    def _forget(self) -> None:
        """Forget the gradients, none of which a collective owns."""
        self.skip_reason, self._concludes_late, self.resets_late, self.is_unseen = "", False, False, False
        self._schedule.reset()
        self.enter(StepState.IDLE)

    # A rank that cannot go on #

    def settle(self, *, raises_again: bool = False) -> None:
        """Conclude a step that this rank has given up, if there is one.

        Args:
            raises_again: whether to raise the error about that step even if the caller has already seen its exception.

        Raises:
            MegabucketError: the wrapper is broken; or a forward or backward failed inside a ``step()`` block, and the caller
                caught the exception there.
        """
        backward = self.backward  # once: its destructor may run in another thread
        if backward is not None and backward.is_gone():
            self.abandon_backward()
        if self.state in REPORTED or (self.state is StepState.LAUNCHING and self._fence.is_sent):
            # A second interrupt arrived before the first was reported.
            self.break_off(self._communicator.progress.phase, "it was interrupted twice")
        if self.broken is not None:
            raise self.broken.copy()
        if self.state is StepState.GIVING_UP:
            # Gradients of the failed backward are already mixed with those of the step.
            was_caught = self.is_unseen or not self._fence.is_sent
            error = self.conclude_giving_up()
            if error is not None and (was_caught or raises_again):
                raise error

    def fail(self, phase: str, error: BaseException | str | None) -> None:
        """Give up the step on this rank: launch the rest of the schedule and a fence that reports the failure.

        Does not wait: the next call does. Never raises: it runs while an exception propagates, and in a destructor.

        Args:
            error: the cause; ``None`` if autograd does not reveal it.
        """
        if self.state not in _MAY_STEP_ASIDE or self._fence.is_sent or error is self.last_error is not None:
            return
        # Inside a ``step()`` block the exception is known at its end, unless the caller catches it before.
        is_deferred = self._num_blocks + self._num_noting > 0 and phase in ("forward", "backward")
        cause = "an exception" if is_deferred and error is None else describe(error)
        self.counters.note_failure(phase, cause + _CAUGHT * is_deferred)
        self.is_unseen = is_deferred
        if self.is_reduced and self.state is not StepState.COMMITTED:
            self._reopen()  # a new step has begun
        self.enter(StepState.GIVING_UP)
        # Last, so that ``settle`` finds the failed backward if another interrupt comes before this line.
        self.backward = None
        if not is_deferred:
            self.send_failure()

    @property
    def failure(self) -> PeerFailedError | None:
        """The error of the other ranks about the failure of this rank, if it has failed in this step."""
        problem = self.counters.problems.get("failure")
        return None if problem is None else PeerFailedError(step=self.step, rank=self._communicator.rank, **problem.fields)

    def send_failure(self, *, is_over: bool = True) -> None:
        """Send the rest of the schedule and the fence, without waiting. May be called again after an interrupt.

        Args:
            is_over: ``False`` leaves out the fence, so the caller will still get the error.
        """
        self._communicator.state.failure = self.failure
        try:
            if not self.is_reduced:
                self._schedule.send_dropped()
            for group in self.groups:
                group.withdraw_grads()  # the step is over on this rank, so the caller may clear gradients in any way
            if is_over and not self._fence.is_sent:
                self._fence.send(self._report())
        except MegabucketError as cause:  # the group is gone
            self._break(self.broken or cause)

    def conclude_giving_up(self) -> MegabucketError | None:
        """Wait for the other ranks; return the error that all ranks raise about the step that this rank has given up.

        There is none if all of them have left the step after its forwards.
        """
        with self.failing_on_all_ranks("the gradient sync", (StepState.GIVING_UP,)):
            self.send_failure()
            if self.broken is not None:
                raise self.broken.copy()
            try:
                self._resolve_fence()
            except MegabucketError as error:
                if error is self.last_error:
                    return error
                raise
        return None

    def leave(self) -> None:
        """End the last step, because the wrapper goes: with all ranks, or without waiting for them if this rank has failed.

        While an exception ends the program of this rank, the others may be anywhere, also in a collective of the caller's own.
        They find the reason in the store. So they do if they do not come to the end of an open step within seconds.
        """
        error = sys.exc_info()[1]
        has_begun = self.counters.num_open_forwards or self.counters.num_microbatches
        is_open = self.state in (StepState.LAUNCHING, StepState.FENCED) or (self.state is StepState.OPEN and has_begun)
        is_open |= self._awaits_update and self.state is StepState.COMMITTED
        failure = self.failure
        if self.state is StepState.GIVING_UP and failure is not None and not self._fence.is_answered():
            self._break(failure)
        elif is_open and error is not None:
            self.break_off(self._communicator.progress.phase, describe(error))
        else:
            self._is_leaving = True
            try:
                self.reset()
            except WrapperBrokenError as late:
                if late.phase != _DETACH:
                    raise

    def conclude_if_sent(self) -> None:
        """Conclude the step, if this rank has given it up and sent its report."""
        if self.state is StepState.GIVING_UP and self._fence.is_sent:
            self.conclude_giving_up()

    def abort(self, reason: str) -> None:
        """Give up the step at the caller's request.

        Raises:
            PhaseError: all ranks have agreed on its gradients, and the others step on them without another fence.
        """
        if self.state is StepState.GIVING_UP:
            return  # the step is dropped anyway
        self.settle()
        if self._awaits_update and self.state is StepState.PUBLISHED and not self.counters.num_open_forwards:
            self.counters.note_missed_update(f"abort_step(): {reason}")
            raise PhaseError(
                "abort_step() comes too late: all ranks have agreed on the gradients of this step and the others update with "
                "them. Step on this rank as well. If the next step is meant, call zero_grad() before, or set step_number."
            )
        self.fail("abort_step()", reason)

    @contextmanager
    def failing_on_all_ranks(self, phase: str, final: Sequence[StepState] = REPORTED) -> Iterator[None]:
        """Report an exception that ends the block, even an interrupt, to the other ranks.

        Before the fence this rank gives up its step; after it the wrapper is broken.

        Args:
            final: states in which giving up is impossible, because the other ranks go on with this rank.
        """
        try:
            yield
        except GeneratorExit:
            raise  # the consumer of ``agree`` handles its own exception
        except BaseException as error:
            # The others go from the fence of a grad_change to its collective, without another fence.
            is_final = self.state in final or (self.state is StepState.COMMITTED and self.counters.grad_change)
            if isinstance(error, _GROUP_ERRORS):
                self._break(self.broken or error)
            elif is_final or (self._fence.is_sent and self.state not in (StepState.GIVING_UP, StepState.BROKEN)):
                self.break_off(phase, describe(error))
            elif self.state in (StepState.OPEN, StepState.LAUNCHING) or (
                self._awaits_update and self.state is StepState.COMMITTED
            ):
                self.fail(phase, error)
            # Otherwise all ranks have agreed on the error and dropped the step.
            raise

    def break_off(self, phase: str, cause: str) -> None:
        """Break the wrapper: this rank sends nothing more. Waits of the other ranks end within two seconds."""
        step = self.step - 1 if self.state in AGREED else self.step  # it was counted when the ranks agreed
        self._break(WrapperBrokenError(step=step, rank=self._communicator.rank, phase=phase, cause=cause))

    def _break(self, error: MegabucketError) -> None:
        # From any state, and in one statement: after an interrupt both are set or neither is.
        self.state, self.broken = StepState.BROKEN, error
        if isinstance(error, PeerFailedError | PeerLostError | WrapperBrokenError):
            for communicator in self.ranks.communicators:
                communicator.break_off(error)  # no effect on the one that has found the error

    # Collective calls #

    def call(self, label: str) -> AbstractContextManager[CollectiveCall]:
        """Return a context for one collective call; see ``calls.making``."""
        return making(self, label)

    def calls(self, label: str) -> AbstractContextManager[None]:
        """Return a context for several calls that belong together; see ``calls.making_several``."""
        return making_several(self, label)

    def enter_call(self, label: str, call: CollectiveCall, failure: Exception | None) -> StepState:
        """Enter a call together with all ranks. If some are at the end of a step, all of them drop it.

        Returns the state to go back to.

        Raises:
            MegabucketError: the same error on all ranks.
        """
        self.settle()
        before = self.state
        self.enter(StepState.CALL)
        self.num_calls += 1
        # Other ranks may vote on the step that was counted last.
        step = self.step - 1 if before is StepState.COMMITTED else self.step
        error, reports = agree_on_call(label, call, failure, ranks=self.ranks, fence=self._fence, step=step)
        if any(report.ends_step for report in reports):
            takes_part = any(report.sent_buckets for report in reports)
            self._drop(error, takes_part=takes_part, is_counted=not takes_part)
        elif error is not None:
            self.enter(before)
        if error is not None:
            raise error from failure
        return before

    def leave_call(self, before: StepState) -> None:
        """Go back to the state before the call."""
        self.enter(before)

    def fail_in_call(self, label: str, error: BaseException, *, has_begun: bool = False) -> None:
        """Break the wrapper, if the exception leaves this rank at another place than the others.

        Args:
            has_begun: whether earlier calls that belong to this one are over.
        """
        if isinstance(error, _GROUP_ERRORS):
            self._break(self.broken or error)
        elif has_begun or self.state is StepState.CALL:
            self.break_off(label, describe(error))

    # Memory that was given back #

    def suspend(self, kinds: Sequence[str]) -> None:
        """Refuse every step and call until ``resume``, because memory of these kinds was given back."""
        if self.broken is None:
            self.enter(StepState.OFFLOADED)
            self.broken = PhaseError(
                f"ddp.offload() has given back {name_list(kinds)}. Call ddp.onload() on every rank before the next step, and "
                "before any other call on the wrapper or its optimizer."
            )

    def resume(self) -> None:
        """Allow steps and calls again, if they were refused by ``suspend``."""
        if self.state is StepState.OFFLOADED:
            self.state, self.broken = StepState.IDLE, None

    def restart(self) -> None:
        """Begin a step in new memory. Drops the gradient of a backward that was refused meanwhile."""
        if self._watch is not None:
            self._watch.note_places()
        self.reset()

    # Checks before an operation #

    def check_between_steps(self, operation: str) -> None:
        """Refuse an operation in the middle of a step.

        Raises:
            PhaseError: a step has begun, and no optimizer has ended it.
            MegabucketError: the last step was dropped on all ranks, and this rank has not raised its error yet.
        """
        self.settle(raises_again=True)
        has_stepped = self.state is StepState.COMMITTED and self.counters.num_updates and not self.counters.num_open_forwards
        if self.resets_late or has_stepped:
            self._reset()  # one of several optimizers has stepped, and the others do not
        # Gradients that no optimizer has used or cleared would be lost, like those of a microbatch.
        has_grads = self._awaits_update and any(slot.param.grad is not None for group in self.groups for slot in group.slots)
        if has_grads or not self.is_between_steps:
            raise PhaseError(
                f"{operation} in the middle of a step: gradients are part of no checkpoint, and buckets may be on their way. "
                "Call it between two steps, after optimizer.step() or ddp.zero_grad(), on every rank. A forward in train mode "
                "begins a step, and needs a backward: run one that is not for training under torch.no_grad() or in eval mode."
            )

    def check_not_dropped(self) -> None:
        """Refuse to step on gradients that an error was raised about.

        Raises:
            PhaseError: there was such an error since gradients were last cleared.
        """
        self.settle()
        if self.dropped is not None:
            raise PhaseError(
                "the gradients of this step are not usable: an error about them was raised before (and caught by the caller); "
                "ddp.last_error has it. Call zero_grad() and go on with the next step."
            ) from self.dropped

    def refuse_update(self, error: Exception) -> None:
        """Report that this rank does not step, because of ``error``."""
        if self.state is StepState.PUBLISHED:
            self.counters.note_missed_update(describe(error))  # they update; the next fence says so
        elif self.state is not StepState.LAUNCHING or not isinstance(error, UnreducedGradientsError):
            self.fail("optimizer.step()", error)  # ranks that did run their last backward are waiting

    def give_up_update(self, cause: str, *, is_agreed: bool) -> None:
        """Skip the update because another wrapper, which updates together with this one, skips its own.

        Args:
            is_agreed: whether all ranks have agreed on these gradients and skip the update as well.
        """
        if self.state is StepState.PUBLISHED:
            self.counters.note_missed_update(cause)
        elif not is_agreed:
            self.fail("optimizer.step()", cause)
        elif self.state is StepState.COMMITTED:
            self._drop(PhaseError(cause), is_counted=True)


@contextmanager
def all_or_none(syncs: Sequence[GradSync]) -> Iterator[list[GradSync]]:
    """Give up the steps of all wrappers if the block fails, or if this rank has given up one of them before.

    The block appends each one that all ranks have agreed on; the fences of the others carry the error.
    """
    _give_up_rest(syncs)
    agreed: list[GradSync] = []
    try:
        yield agreed
    except BaseException as error:
        _give_up_rest(syncs, agreed, describe(error))
        for sync in syncs:
            sync.is_unseen = False  # the caller has one error for all of them
        raise


def _give_up_rest(syncs: Sequence[GradSync], agreed: Sequence[GradSync] = (), cause: str = "") -> None:
    """If the step of one wrapper has failed, give up the others, as all ranks do when they learn of it."""
    failed = [sync for sync in syncs if sync.state in FAILED or sync.dropped is not None]
    causes = [failure.cause for sync in failed if (failure := sync.failure) is not None]
    for sync in syncs if agreed or failed else ():
        if sync not in failed:
            cause = cause or ": ".join(["another part has failed", *causes[:1]])
            sync.give_up_update(cause, is_agreed=sync in agreed)
        elif sync.state is StepState.GIVING_UP:
            sync.send_failure()  # in the same order on all ranks, which may have one channel for all wrappers
