"""``GradSync``: the state of the steps of one wrapper, from the first forward to the update, and every way to end a step.

::

    IDLE      -> OPEN       a training forward or a gradient
    IDLE      -> LAUNCHING  a gradient of the last microbatch, or a flush, without a forward before
    OPEN      -> LAUNCHING  the same; may stay here between backward and step()
    OPEN      -> IDLE       cleared before anything was sent
    LAUNCHING -> FENCED     the last bucket and the fence are sent
    FENCED    -> AGREED     all ranks are whole and the buckets are reduced (an overflow of the sum is found here)
    FENCED    -> IDLE       a rank has a problem: buckets reduced and forgotten, the same error on all ranks; or all ranks have
                            cleared their gradients
    AGREED    -> IDLE       updated and the gather sent; or cleared
    AGREED    -> OPEN       all-reduced: the next step begins, perhaps on gradients that were kept
    AGREED    -> FENCED     a second vote: explicit finish and then step() or zero_grad(); before any joint update or change
    GIVING_UP -> IDLE       the same error on all ranks
    CALL      -> IDLE       another rank has sent the buckets of a step, or votes on it: it is dropped on all ranks

    IDLE, OPEN, LAUNCHING, AGREED -> GIVING_UP   this rank failed before its fence: it sends the rest of the schedule and a
                                                 fence that reports the failure; may stay here until the next call
    IDLE, OPEN, LAUNCHING, AGREED -> CALL        a collective call, until its exchange is over; and back. In OPEN and LAUNCHING,
                                                 where other buckets may be sent on other ranks, calls only compare entries, or
                                                 are refused on all ranks
    any -> BROKEN                                interrupted after the fence was sent, or in a call, or a peer was lost; only
                                                 detach() is left

Hooks never raise about the open step and never change the order of launches; they note problems. Whatever goes wrong, each rank
sends the same collectives in the same order: all buckets, then the fence. The phases of the buckets (``buffer/phases.py``) say
who owns their memory.
"""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Any, Final

import torch

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.buffer.finite import FiniteTest, any_beyond
from megabucket.config.resolve import StepPolicy
from megabucket.ddp.fence import CLEARED, Call, Fence, Report, all_have_left, describe, opening, resolve_error
from megabucket.ddp.groups import RankGroups
from megabucket.ddp.guards import ModelWatch, Problem
from megabucket.ddp.hooks import BackwardWatch, refuse_in_backward
from megabucket.errors import (
    ConfigError,
    DelayedGradientError,
    ForkedProcessError,
    GroupDestroyedError,
    InvariantError,
    MegabucketError,
    NonFiniteGradientError,
    PeerFailedError,
    PeerLostError,
    PhaseError,
    UnreducedGradientsError,
    UnusedParameterError,
    WrapperBrokenError,
)
from megabucket.trace.step_recorder import BETWEEN_STEPS, PAUSE


class StepState(enum.Enum):
    """The state of a step."""

    IDLE = "between two steps"  # no step has begun; calls are allowed
    OPEN = "open"  # forwards and microbatches; gradients accumulate on this rank
    LAUNCHING = "launching"  # the last microbatch runs or has run; buckets are sent
    FENCED = "fenced"  # this rank's report was sent and cannot be taken back
    AGREED = "agreed"  # gradients are reduced, and optimizers may step on them
    GIVING_UP = "giving up"  # this rank failed; the others learn it at their fence
    CALL = "in a call"  # all ranks are in the same collective call
    BROKEN = "broken"  # nothing more can be sent


_TRANSITIONS: Final[Mapping[StepState, frozenset[StepState]]] = MappingProxyType(
    {
        StepState.IDLE: frozenset({StepState.OPEN, StepState.LAUNCHING, StepState.GIVING_UP, StepState.CALL}),
        StepState.OPEN: frozenset({StepState.LAUNCHING, StepState.GIVING_UP, StepState.CALL, StepState.IDLE}),
        StepState.LAUNCHING: frozenset({StepState.FENCED, StepState.GIVING_UP, StepState.CALL}),
        StepState.FENCED: frozenset({StepState.AGREED, StepState.IDLE}),
        StepState.AGREED: frozenset({StepState.IDLE, StepState.OPEN, StepState.FENCED, StepState.GIVING_UP, StepState.CALL}),
        StepState.GIVING_UP: frozenset({StepState.IDLE}),
        StepState.CALL: frozenset({StepState.IDLE, StepState.OPEN, StepState.LAUNCHING, StepState.AGREED}),
        StepState.BROKEN: frozenset(),
    }
)


_ANSWER_WITHIN_S: Final = 2.0
"""How long a rank waits for the others where its program may end: at the end of a step() block, and in detach()."""
_DETACH, _MIDDLE = "detach()", "its wrapper was detached in the middle of a step"

REPORTED: Final = (StepState.FENCED, StepState.CALL)
"""States in which the other ranks have this rank's report, so that a failure breaks the wrapper."""
UPDATING: Final = (StepState.FENCED, StepState.AGREED)
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
    """

    def __init__(
        self,
        groups: Sequence[_ParamAndGradBucketGroup],
        policy: StepPolicy,
        watch: ModelWatch | None = None,
        *,
        ranks: RankGroups,
        backward_hooks: Sequence[Sized] = (),
    ) -> None:
        self.groups = groups
        self.ranks = ranks
        self.policy = policy
        self._watch = watch
        self._backward_hooks = backward_hooks
        self._sum_tests = [(group.index, group.sum_test) for group in groups if group.sum_test.flats]
        self._delayed = [group for group in groups if group.delayed]
        self._communicator = self.ranks.step
        self._device = groups[0].buckets[0].grad_data.device
        self._fence = Fence(self._communicator, num_buckets=len(groups), policy=policy, device=self._device)
        self.counters = self._fence.counters
        """The contents of this rank's next report."""
        self.step = 0
        """Number of steps that all ranks agreed on or dropped."""
        self.last_error: MegabucketError | None = None
        """The error that all ranks raised for the last dropped step."""
        has_grads = any(slot.has_grad for group in groups for slot in group.slots)  # from before wrapping
        self.state = StepState.OPEN if has_grads else StepState.IDLE
        self.broken: MegabucketError | None = None
        """Why nothing more can be sent."""
        self.dropped: MegabucketError | None = None
        """The error of a step whose gradients were not cleared since: no optimizer may step on them."""
        self.skip_reason = ""
        """Why no optimizer steps on the gradients of this step (``nonfinite_gradients="skip_step"``); otherwise empty."""
        self.force_all_reduce = False
        """Whether to gather whole gradients although the distributed optimizer is on."""
        self.updates_jointly = policy.is_sharded
        """Whether an update needs collectives: then all ranks make it or none, as the fence before it decides."""
        self._num_launched = 0  # always a prefix of the groups
        self._is_leaving = False  # detach() waits for the other ranks, but not for long
        self._concludes_late = False  # forwards of the next step may begin before the step that was given up is concluded
        self._no_sync_depth = self._num_blocks = self._num_calls = 0
        # Of the running backward:
        self._backward = BackwardWatch()
        self._is_taking = False  # it has produced a gradient
        self._is_last = self._may_stage = self._has_reached_outputs = False

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
        is_over = self.state is StepState.IDLE or (self.state is StepState.AGREED and not self.updates_jointly)
        return is_over and not self.counters.num_open_forwards

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

    def begin_forward(self) -> None:
        """Note that a training forward begins.

        Raises:
            MegabucketError: a forward or backward of this step failed before, and the caller caught the exception.
        """
        self._give_up_cleared_step()
        if not self._concludes_late:
            self.settle()
        self._begin("forward")
        self.counters.num_open_forwards += 1

    def _begin(self, phase: str) -> None:
        if self.state is StepState.IDLE or (self.state is StepState.AGREED and self.counters.num_updates):
            self.enter(StepState.OPEN)
        self._communicator.progress.enter(self.step, phase)

    def begin_step(self) -> None:
        """Open the next step, however the last one ended."""
        self._give_up_cleared_step()
        self.settle()
        if self.state is StepState.IDLE or (self.state is StepState.AGREED and not self.updates_jointly):
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
        if error is self.last_error or self.state is StepState.BROKEN or isinstance(error, _GROUP_ERRORS):
            return
        if self.state is StepState.GIVING_UP and not self._fence.is_sent:
            self.counters.note_failure(self._communicator.progress.phase, describe(error), is_certain=True)
        elif not self.is_between_steps:
            self.fail(self._communicator.progress.phase, error)
        elif self._awaits_update:
            self.counters.note_missed_update(describe(error))
        if self.state is StepState.GIVING_UP:
            self._send_failure()
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
        return self.state is StepState.AGREED and not (self.counters.num_updates or self.skip_reason)

    def begin_backward(self) -> None:
        """Note that a backward has reached an output of the module.

        Raises:
            ConcurrentBackwardError: another backward of the module is running.
            MegabucketError: as ``begin_forward``.
        """
        if self._backward.running is None or self._backward.has_failed:
            self._open_backward()
        else:
            self._backward.check_is_one(rank=self._communicator.rank)
        self._has_reached_outputs = True

    def _open_backward(self) -> None:
        self.settle()
        self._begin("backward")
        self._is_taking = self._has_reached_outputs = False
        self.dropped = None
        self._backward.open(self)
        if self.state is StepState.LAUNCHING:  # the last microbatch runs several backwards
            for group in self.groups:
                group.show_withheld()

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter. O(1), except for the first of each group in a backward.

        Args:
            index: of the bucket group.
            position: of the parameter in the group.
        """
        group = self.groups[index]
        if not self._is_taking:
            self._begin_taking(group, position)
        if group.grad_phase is not GradPhase.ACCUMULATING:
            self._note_late(group, position)
        elif group.receive(position, counts=self._is_last, may_stage=self._may_stage) and self.policy.overlaps_grads:
            # Strictly in launch order, in whatever order gradients arrive: all ranks must launch alike.
            while self._num_launched < len(self.groups) and self.groups[self._num_launched].is_complete:
                self._launch_next()

    def _begin_taking(self, group: _ParamAndGradBucketGroup, position: int) -> None:
        """Prepare for the first gradient of a backward.

        Raises:
            StepMismatchError: this rank dropped a step that other ranks take.
        """
        if self._backward.running is None:
            self._open_backward()
        if self.is_reduced:
            self._start_implicitly(group, position)
        self._is_taking, self._is_last = True, self._no_sync_depth == 0
        # With create_graph=True autograd makes a new sum, which needs the previous gradient in param.grad.
        self._may_stage = not (torch.is_grad_enabled() or any(self._backward_hooks))
        if self._is_last:
            self.enter(StepState.LAUNCHING)
        elif self.state is not StepState.LAUNCHING:
            self.enter(StepState.OPEN)

    def _start_implicitly(self, group: _ParamAndGradBucketGroup, position: int) -> None:
        """Start a step because a gradient arrives: plain torch code may clear gradients without calling the wrapper.

        After an all-reduce a cleared gradient (``None``) starts from zero. One that was zeroed in place, or kept, accumulates
        and is reduced again: the mean of equal values is that value, as with torch's own accumulation. A sum would count the
        old values once per rank, and after a reduce-scatter they are not whole gradients; both are noted as late.
        """
        own = group.slots[position]
        slots = [slot for one in self.groups for slot in one.slots]
        kept = [
            slot for slot in slots if slot.param.grad is slot.in_buffer or (slot.param.grad is not None and slot is not own)
        ]
        if self.policy.is_sharded or (not self.policy.averages and kept):
            self._note_late(group, position)
            kept = []
        try:
            self._vote_to_drop()
        except MegabucketError:
            own.param.grad = None
            self._backward.running = None  # this backward ends because of the last step; it is no failure of the next one
            raise
        self._reopen()
        self.counters.kept = tuple(slot.name for slot in kept)

    def _reopen(self) -> None:
        for group in self.groups:
            group.reopen()
        self.skip_reason = ""
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
        group = next((group for group in self._delayed if group.position_of.get(id(param)) in group.delayed), None)
        if group is None:
            raise ConfigError(
                f"grad_ready() was called with a parameter of shape {tuple(param.shape)} whose gradients are taken from "
                "autograd: they would count twice. Set param.skip_backward_post_hook = True before wrapping if they are "
                "computed outside backward."
            )
        self.settle()
        position = group.position_of[id(param)]
        with self.failing_on_all_ranks("grad_ready()"):
            if group.grad_phase is GradPhase.REDUCED:
                if group.slots[position].name in group.missing:
                    # All ranks have taken the step without this gradient, so all of them learn it, at the next fence.
                    self._note_delayed(group.slots[position].name, "has come after the gradients of its step were reduced")
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
            if self._backward.running is None:
                self._launch_delayed()

    def drop_dummy(self, index: int, position: int) -> None:
        """Drop the dummy gradient of a parameter whose gradient is computed outside backward. Note a real gradient."""
        slot = self.groups[index].slots[position]
        if getattr(slot.param, "zero_out_wgrad", False):
            return  # zeros, and gradients of the other end of a tied weight: taken with the delayed gradient
        if not (slot.param.grad is None or slot.param.grad_added_to_main_grad):  # type: ignore[attr-defined]
            self._note_delayed(slot.name, "has come through autograd, in backward")
        slot.param.grad, slot.param.grad_added_to_main_grad = None, False  # type: ignore[attr-defined]

    def _note_delayed(self, name: str, finding: str) -> None:
        """Note a problem of a delayed gradient. The error text describes the first problem."""
        problem = Problem(DelayedGradientError.__name__, {"params": [], "finding": finding})
        params = self.counters.problems.setdefault("delayed", problem).fields["params"]
        if name not in params:
            params.append(name)

    def _launch_delayed(self) -> None:
        """Launch groups that a delayed gradient has completed. No backward is running."""
        if self.state is not StepState.LAUNCHING or not self.policy.overlaps_grads:
            return
        for group in self._delayed:
            group.note_delayed(self.counters.num_microbatches)
        while self._num_launched < len(self.groups) and self.groups[self._num_launched].is_complete:
            self._launch_next()
            self.groups[self._num_launched - 1].withhold_grads()

    def _check_delayed(self) -> None:
        """Note parameters with fewer or more delayed gradients than backwards."""
        expected = self.counters.num_microbatches
        for group in self._delayed:
            for position, count in group.delayed.items():
                if count > expected or (count < expected and not group.policy.unused_is_zero):
                    self._note_delayed(group.slots[position].name, f"has come {count} times in {expected} backwards")

    def end_backward(self) -> None:
        """Finish the sync if the end of a backward does so. Called by autograd; an error leaves ``backward()``.

        Raises:
            MegabucketError: the step is not whole on some rank.
        """
        with self.failing_on_all_ranks("backward"):
            self._backward.running = None
            has_received, self._is_taking = self._is_taking, False
            has_changed = self._count_backward(has_received=has_received)
            if has_changed or (self.state is StepState.LAUNCHING and self.policy.finishes_with_backward and has_received):
                self.finish()  # stores the staged gradients as well
            else:
                for group in self.groups:
                    group.end_backward()
                    if self.state is StepState.LAUNCHING:
                        group.withhold_grads()
                if self._delayed:
                    self._launch_delayed()
        self.pause()

    def _count_backward(self, *, has_received: bool) -> bool:
        """Count the backward; one without gradients counts if missing gradients are zeros, or delayed.

        Returns whether it had no gradients because the module has changed: an optimizer over the new parameters would never
        call this wrapper.
        """
        may_be_empty = self.policy.unused_is_zero or bool(self._delayed)
        counts = has_received or (self._has_reached_outputs and may_be_empty)
        self.counters.num_microbatches += counts
        is_empty = self._has_reached_outputs and not has_received and self._no_sync_depth == 0
        has_changed = is_empty and self._watch is not None and self._watch.find_change() is not None
        if is_empty and (counts or has_changed):
            # The other ranks wait for this one: it takes part when an optimizer or the caller asks for gradients.
            if self.is_reduced:
                self._vote_to_drop()
                self._reopen()
            self.enter(StepState.LAUNCHING)
        return has_changed

    def abandon_backward(self) -> None:
        """Report to the other ranks that a backward has failed here. Called from a destructor, so it never raises."""
        for group in self.groups:
            group.drop_staged()
        self.fail("backward", None)
        self._is_taking, self._backward.running = False, None

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
                self._flush()

    def finish(self, *, is_committing: bool = False) -> None:
        """Launch the remaining groups, wait for all, and finish the reduced gradients. Idempotent.

        Raises:
            MegabucketError: the step is not whole on some rank. All ranks raise the same error, the gradients are forgotten,
                and the next step may run.
        """
        with self.failing_on_all_ranks("the gradient sync"):
            for _ in self.agree(is_committing=is_committing):
                pass

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
        if self.state is StepState.AGREED and is_committing and self.updates_jointly:
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

    def _flush(self) -> None:
        """Launch all groups that were not launched yet, complete or not."""
        self.enter(StepState.LAUNCHING)
        while self._num_launched < len(self.groups):
            self._launch_next()

    def _launch_next(self) -> None:
        group = self.groups[self._num_launched]
        self._communicator.progress.bucket = group.index
        group.start_grad_sync()
        self._num_launched += 1
        if group.finite_test.found:
            self._note_nonfinite()

    def _send_fence(self, *, is_committing: bool = False, unused_counts: bool = False) -> None:
        """Launch the groups that were not launched yet and the fence."""
        problems = self.counters.problems
        if self._watch is not None and (change := self._watch.find_change()) is not None:
            problems["change"] = change
        if self._delayed:
            self._check_delayed()
        self._flush()
        tests: list[FiniteTest] = []
        for group in self.groups:
            # Without a backward, values that the caller wrote into zeroed views count; views that had to be zeroed are unused.
            unused = group.missing if self.counters.num_microbatches else group.cleared
            if unused and unused_counts and not group.policy.unused_is_zero:
                fields: dict[str, Any] = {"params": [], "bucket": group.index}
                problems.setdefault("unused", Problem(UnusedParameterError.__name__, fields)).fields["params"] += unused
            if group.finite_test.peaks:
                tests.append(group.finite_test)
                if group.streams is not None:
                    group.streams.follow()
        self._fence.send(self._report(is_committing=is_committing), any_beyond(tests) if tests else None)
        self.enter(StepState.FENCED)

    def _report(self, *, is_committing: bool = False) -> Report:
        return self.counters.report(
            is_committing=is_committing, force_all_reduce=self.force_all_reduce, sent_buckets=not self.is_reduced
        )

    def _note_nonfinite(self) -> None:
        launched = self.groups[: self._num_launched]  # findings of other groups are from the last step
        if fields := self._nonfinite_fields([(group.index, group.finite_test) for group in launched]):
            self.counters.problems["nonfinite"] = Problem(NonFiniteGradientError.__name__, fields)

    def _nonfinite_fields(self, tests: Sequence[tuple[int, FiniteTest]]) -> dict[str, Any]:
        """Return the fields of the error about findings of the tests; empty if all gradients are finite."""
        is_bad = any_beyond(test for _, test in tests)
        if is_bad is not None and self._communicator.read(is_bad, label="finite test"):
            for _, test in tests:
                if bool(any_beyond([test])):
                    test.name_culprits()  # only now does the host know of them
        found = [(index, one) for index, test in tests for one in test.found]
        if not found:
            return {}
        bucket, first = found[0]
        counts = {"num_buckets": len(self.groups), "num_others": len(found) - 1}
        return {"param": first.param, "bucket": bucket, "finding": first.finding, **counts}

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
        reports = self._fence.take(self._note_nonfinite)
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
        was_late = self.counters.late_phase == GradPhase.IN_FLIGHT.value
        if takes_part:
            for group in self.groups:
                if group.grad_phase is GradPhase.REDUCED:
                    group.reopen()
                group.start_dropped_sync()
        for group in self.groups:
            if group.is_launched:
                group.finish_grad_sync()
            if was_late:
                group.readiness.end_step(unlearns=True)  # the number of gradients has changed, probably in other groups too
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
        if self.force_all_reduce and self.policy.is_sharded:  # alike on all ranks: the fence has compared it
            for group in self.groups:
                group.gather_grads()
        if self._sum_tests and (fields := self._nonfinite_fields(self._sum_tests)):  # alike on all ranks, like the sum
            error = NonFiniteGradientError(step=self.step, rank=None, **fields)
            if not self.policy.skips_nonfinite:
                self._drop(error)
                raise error
            self.skip_reason = str(error)
        self.step += 1
        self.counters.start_step()
        self._num_launched = 0
        for group in self.groups:
            group.readiness.end_step(learns=True)
            if self.skip_reason:
                group.withdraw_grads()
            else:
                group.publish()
        self.enter(StepState.AGREED)
        self._communicator.progress.enter(self.step, BETWEEN_STEPS)

    def _vote(self, *, is_committing: bool) -> None:
        """Agree once more, after the sync: either every rank steps, or every rank drops the step."""
        with self.failing_on_all_ranks("the gradient sync"):
            self._fence.send(self._report(is_committing=is_committing))
            self.enter(StepState.FENCED)
            self._resolve_fence()
            self.counters.start_step()
            self.enter(StepState.AGREED)

    def _vote_to_drop(self) -> None:
        """Tell the ranks that this one does not step on its reduced gradients, in case others do."""
        if self.state is StepState.AGREED and self.updates_jointly:
            self.counters.note_dropped_step()
            self._vote(is_committing=False)

    def expect_updates(self, *, jointly: bool) -> None:
        """Note whether the update of the wrapper's optimizer needs collectives."""
        self.updates_jointly = jointly

    @contextmanager
    def comparing(self, grad_change: str) -> Iterator[None]:
        """Compare, in the fences of the block, which change of the reduced gradients each rank makes after them."""
        self.counters.grad_change = grad_change
        try:
            yield
        finally:
            self.counters.grad_change = ""

    def vote_again(self) -> None:
        """Agree once more before a collective on reduced gradients: the caller's own code has run since the last fence.

        Raises:
            MegabucketError: some rank does something else with its gradients, or has failed.
        """
        self._vote(is_committing=False)

    def end_update(self) -> None:
        """End the step: the optimizer has updated its shards, or no rank does."""
        if self.state is StepState.AGREED and self.updates_jointly:
            self.enter(StepState.IDLE)
        self.pause()

    def reset(self) -> None:
        """Start a step: forget all gradients. A reduction that has begun is completed before.

        Raises:
            StepMismatchError: this rank drops a step that other ranks take.
        """
        refuse_in_backward("zero_grad()")
        self.settle()
        self._backward.running = None
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

    def _forget(self) -> None:
        """Forget the gradients, none of which a collective owns."""
        self._num_launched, self.skip_reason, self._concludes_late = 0, "", False
        for group in self.groups:
            group.reset()
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
        if self._backward.running is not None and self._backward.is_gone():
            self.abandon_backward()
        if self.state in REPORTED or (self.state is StepState.LAUNCHING and self._fence.is_sent):
            # One interrupt has ended the operation, and another one has prevented its report.
            self.break_off(self._communicator.progress.phase, "it was interrupted twice")
        if self.broken is not None:
            raise self.broken.copy()
        if self.state is StepState.GIVING_UP:
            # Gradients of the failed backward are already mixed with those of the step.
            was_caught = not self._fence.is_sent
            error = self.conclude_giving_up()
            if error is not None and (was_caught or raises_again):
                raise error

    def fail(self, phase: str, error: BaseException | str | None) -> None:
        """Give up the step on this rank: launch the rest of the schedule and a fence that reports the failure.

        Does not wait: the next call does. Never raises: it runs while an exception propagates, and in a destructor.

        Args:
            error: the cause; ``None`` if autograd does not reveal it.
        """
        if StepState.GIVING_UP not in _TRANSITIONS[self.state] or self._fence.is_sent or error is self.last_error is not None:
            return
        # Inside a ``step()`` block the exception is known at its end, unless the caller catches it before.
        is_deferred = self._num_blocks > 0 and phase in ("forward", "backward")
        cause = "an exception" if is_deferred and error is None else describe(error)
        self.counters.note_failure(phase, cause + _CAUGHT * is_deferred)
        if self.is_reduced and not (self.state is StepState.AGREED and self.updates_jointly):
            self._reopen()  # a new step has begun
        self.enter(StepState.GIVING_UP)
        # Last, so that ``settle`` finds the failed backward if another interrupt comes before this line.
        self._is_taking, self._backward.running = False, None
        if not is_deferred:
            self._send_failure()

    @property
    def _failure(self) -> PeerFailedError | None:
        """The error of the other ranks about the failure of this rank, if it has failed in this step."""
        problem = self.counters.problems.get("failure")
        return None if problem is None else PeerFailedError(step=self.step, rank=self._communicator.rank, **problem.fields)

    def _send_failure(self) -> None:
        """Send the rest of the schedule and the fence, without waiting. May be called again after an interrupt."""
        self._communicator.state.failure = self._failure
        try:
            if not self.is_reduced:
                for group in self.groups:
                    group.start_dropped_sync()
            for group in self.groups:
                group.withdraw_grads()  # the step is over on this rank, so the caller may clear gradients in any way
            if not self._fence.is_sent:
                self._fence.send(self._report())
        except MegabucketError as cause:  # the group is gone
            self._break(self.broken or cause)

    def conclude_giving_up(self) -> MegabucketError | None:
        """Wait for the other ranks; return the error that all ranks raise about the step that this rank has given up.

        There is none if all of them have left the step after its forwards.
        """
        with self.failing_on_all_ranks("the gradient sync", (StepState.GIVING_UP,)):
            self._send_failure()
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
        is_open |= self._awaits_update and self.updates_jointly
        failure = self._failure
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
        if self._awaits_update and not (self.updates_jointly or self.counters.num_open_forwards):
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
            is_final = self.state in final or (self.state is StepState.AGREED and self.counters.grad_change)
            if isinstance(error, _GROUP_ERRORS):
                self._break(self.broken or error)
            elif is_final or (self._fence.is_sent and self.state not in (StepState.GIVING_UP, StepState.BROKEN)):
                self.break_off(phase, describe(error))
            elif self.state in (StepState.OPEN, StepState.LAUNCHING) or (self._awaits_update and self.updates_jointly):
                self.fail(phase, error)
            # Otherwise all ranks have agreed on the error and dropped the step.
            raise

    def break_off(self, phase: str, cause: str) -> None:
        """Break the wrapper: this rank sends nothing more. Waits of the other ranks end within two seconds."""
        step = self.step - 1 if self.state is StepState.AGREED else self.step  # it was counted when the ranks agreed
        self._break(WrapperBrokenError(step=step, rank=self._communicator.rank, phase=phase, cause=cause))

    def _break(self, error: MegabucketError) -> None:
        # From any state, and in one statement: after an interrupt both are set or neither is.
        self.state, self.broken = StepState.BROKEN, error
        if isinstance(error, PeerFailedError | PeerLostError | WrapperBrokenError):
            for communicator in self.ranks.communicators:
                communicator.break_off(error)  # no effect on the one that has found the error

    # Collective calls #

    @contextmanager
    def call(self, label: str) -> Iterator[Call]:
        """Make a collective call: the block prepares this rank's side, opens the call, and exchanges.

        An exception before ``open`` fails the call on all ranks, which go on. One after it, even an interrupt, breaks the
        wrapper on all ranks, because the others are in the exchange. Errors that all ranks find alike in the exchange are
        raised after the block.

        Args:
            label: of the call; the part before a colon is its name.

        Raises:
            CallMismatchError: some rank is in another call, or in a step.
            LayoutMismatchError: entries differ.
            PeerFailedError: some ranks failed, or all but with different errors.
            Exception: that of the block, where all ranks failed alike.
        """
        refuse_in_backward(label.partition(":")[0])
        self.settle()
        before = self.state

        def agree(call: Call, failure: Exception | None) -> None:
            nonlocal before
            before = self._agree_on_call(label, call, failure)

        try:
            with opening(agree) as call:
                yield call
            self.enter(before)
        except BaseException as error:
            if isinstance(error, _GROUP_ERRORS):
                self._break(self.broken or error)
            elif self.state is StepState.CALL:
                self.break_off(label, describe(error))
            raise

    @contextmanager
    def calls(self, label: str) -> Iterator[None]:
        """Make several collective calls, each of which goes on from what the ones before have changed on all ranks.

        Errors that all ranks find alike leave the block. Any other exception after the first call has begun, even an interrupt,
        breaks the wrapper on all ranks: at the next try this rank would be at another place than they.

        Args:
            label: as for ``call``.
        """
        num_calls = self._num_calls
        try:
            yield
        except BaseException as error:
            if isinstance(error, _GROUP_ERRORS):
                self._break(self.broken or error)
            elif self._num_calls > num_calls and not isinstance(error, MegabucketError):
                self.break_off(label, describe(error))
            raise

    def _agree_on_call(self, label: str, call: Call, failure: Exception | None) -> StepState:
        """Enter the call together with all ranks. Return the state to go back to at its end."""
        self.settle()
        before = self.state
        self.enter(StepState.CALL)
        self._num_calls += 1
        may_vote = before is StepState.AGREED and self.updates_jointly  # other ranks, on the step that was counted last
        step = self.step - may_vote
        error, reports = self.ranks.agree(self._fence, label, call, failure, device=self._device, step=step)
        if any(report.ends_step for report in reports):
            takes_part = any(report.sent_buckets for report in reports)
            self._drop(error, takes_part=takes_part, is_counted=not takes_part)
        elif error is not None:
            self.enter(before)
        if error is not None:
            raise error from failure
        return before

    # Checks before an operation #

    def check_between_steps(self, operation: str) -> None:
        """Refuse an operation in the middle of a step.

        Raises:
            PhaseError: a step has begun, and no optimizer has ended it.
            MegabucketError: the last step was dropped on all ranks, and this rank has not raised its error yet.
        """
        self.settle(raises_again=True)
        # Gradients that no optimizer has used or cleared would be lost, like those of a microbatch.
        has_grads = self._awaits_update and any(slot.param.grad is not None for group in self.groups for slot in group.slots)
        if has_grads or not self.is_between_steps:
            raise PhaseError(
                f"{operation} in the middle of a step: gradients are part of no checkpoint, and buckets may be on their way. "
                "Call it between two steps, after optimizer.step() or ddp.zero_grad(), on every rank. A forward in train mode "
                "begins a step, and needs a backward: run one that is not for training under torch.no_grad() or in eval mode."
            )

    def check_may_update(self, *, has_grads: bool, is_stale: bool = False) -> None:
        """Refuse an optimizer step on gradients that were not reduced.

        Args:
            has_grads: whether the optimizer would find any.
            is_stale: whether it has already stepped on the reduced gradients, and would now find others.

        Raises:
            PhaseError: an error about the gradients was raised before, and caught.
            UnreducedGradientsError: they are local.
        """
        self.check_not_dropped()
        if self.state is StepState.LAUNCHING and self.policy.finishes_with_backward and self.policy.unused_is_zero:
            self.finish()  # a backward had no gradient, and the other ranks wait for zeros
        elif self.state is StepState.LAUNCHING or (has_grads and (self.state is not StepState.AGREED or is_stale)):
            in_backward = self._backward.running is not None
            error = UnreducedGradientsError(rank=self._communicator.rank, in_backward=in_backward)
            self.refuse_update(error)
            raise error
        self._communicator.progress.enter(self.step, "optimizer")

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
            )

    def refuse_update(self, error: Exception) -> None:
        """Report that this rank does not step, because of ``error``."""
        if self.state is StepState.AGREED and not self.updates_jointly:
            self.counters.note_missed_update(describe(error))  # they update; the next fence says so
        elif self.state is not StepState.LAUNCHING or not isinstance(error, UnreducedGradientsError):
            self.fail("optimizer.step()", error)  # ranks that did run their last backward are waiting

    def give_up_update(self, cause: str, *, is_agreed: bool) -> None:
        """Skip the update because another wrapper, which updates together with this one, skips its own.

        Args:
            is_agreed: whether all ranks have agreed on these gradients and skip the update as well.
        """
        if self.state is StepState.AGREED and not self.updates_jointly:
            self.counters.note_missed_update(cause)
        elif not is_agreed:
            self.fail("optimizer.step()", cause)
        elif self.state is StepState.AGREED:
            self._drop(PhaseError(cause), is_counted=True)

    def check_not_in_flight(self, operation: str) -> None:
        """Refuse an operation on gradients that a collective owns.

        Raises:
            PhaseError: a group is in flight.
        """
        busy = [group.index for group in self.groups if group.grad_phase is GradPhase.IN_FLIGHT]
        if busy:
            raise PhaseError(
                f"{operation} would touch the gradients of bucket groups {busy[:5]} while a collective owns them; "
                "call finish_grad_sync() first."
            )
