"""``_ParamAndGradBucketGroup``: buckets whose collectives are launched together, and the phases of their memory.

Owns storing gradients, launch and completion of one group. Does not know other groups: the step (``ddp/step.py``) decides their
launch order.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence, Sized
from contextlib import nullcontext
from typing import Final, Protocol

import torch

from megabucket.buffer.finite import FiniteTest, LargeTest
from megabucket.buffer.grad_slot import GradSlot, GradState, WithheldGrad
from megabucket.buffer.param_and_grad_buffer import _ParamAndGradBucket
from megabucket.buffer.phases import GradPhase, ParamPhase, enter
from megabucket.comm import (
    Accelerator,
    AllGather,
    AllReduce,
    Arrival,
    Call,
    Communicator,
    GradStreams,
    Handle,
    ReduceOp,
    ReduceScatter,
    ReplicaReducer,
)
from megabucket.config.resolve import StepPolicy

LARGE_BYTES: Final = 128 << 10
"""A larger gradient is stored at once, together with the staged ones."""

MOST_STAGED: Final = 64
"""Most gradients that are staged, so that their Python objects are still in the cache when they are stored."""

STAGED_BYTES: Final = 1 << 20
"""Most bytes that are staged, if all small gradients have the average size."""


def grad_scale(divisor: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the factor of gradients of ``dtype`` before a sum over ranks, and the divisor after it: the sum becomes a mean.

    Each gradient is multiplied by ``1 / divisor`` before, as in torch DDP and in Megatron, so the bits are theirs. That would
    flush small float16 gradients to zero, and the sum alone could overflow: they are divided by a power of two near the square
    root of the divisor before, which is exact, and by the rest after.

    >>> grad_scale(4, torch.float32), grad_scale(6, torch.float16)
    ((0.25, 1.0), (0.5, 3.0))
    """
    if dtype != torch.float16:
        return 1.0 / divisor, 1.0
    before = 2.0 ** math.floor(math.log2(math.sqrt(divisor)))
    return 1.0 / before, divisor / before


class RunningBackward(Protocol):
    """The backward that produces gradients; see ``ddp/backward.py``. Neither value changes after its first gradient."""

    is_last: bool
    """Whether its gradients will be reduced, and so count."""
    may_stage: bool
    """Whether they may be staged, if the group allows it."""


class Readiness:
    """Decides when a bucket group is complete. Counts gradients per parameter; learns in the first step how many to expect.

    A parameter usually receives one gradient per backward, but several if reentrant activation checkpointing reruns a layer
    that is used twice, or if the last microbatch runs several backwards. This is not known in advance, so the first step only
    counts; from then on a group is complete when every parameter has received as many gradients as it did then.

    A step with fewer gradients is still right: the group is sent at the end of the step. A step with more gradients is refused
    (a gradient comes too late), and the step after it only counts again.
    """

    __slots__ = ("_counts", "_expected", "num_incomplete")

    def __init__(self, num_params: int) -> None:
        self._counts = [0] * num_params
        self._expected: list[int] | None = None
        self.num_incomplete = num_params
        """Number of parameters with fewer gradients than expected; all of them until the expected number is known."""

    def mark(self, params: Sequence[int]) -> bool:
        """Count one gradient of each parameter; return whether the group is complete with them. O(1) for each."""
        counts, expected = self._counts, self._expected
        num_complete = 0
        for param in params:
            count = counts[param] + 1
            counts[param] = count
            if expected is not None and count == expected[param]:
                num_complete += 1
        self.num_incomplete -= num_complete
        return num_complete > 0 and self.num_incomplete == 0

    def end_step(self, *, learns: bool = False, unlearns: bool = False) -> None:
        """Forget the counts.

        Args:
            learns: whether the step was whole; the first whole step sets the expected numbers.
            unlearns: whether this step had more gradients than expected, so that the numbers are learned anew.
        """
        if unlearns:
            self._expected = None
        elif learns and self._expected is None and any(self._counts):
            # A parameter without a gradient still delays its group: sending early could lose a later gradient.
            self._expected = [max(count, 1) for count in self._counts]
        self._counts = [0] * len(self._counts)
        self.num_incomplete = len(self._counts)


class Staging(list[torch.Tensor]):
    """Parameters of a group whose gradients were moved out of ``param.grad`` and will be stored together in one call.

    Parameter hooks refer to it, where the garbage collector sees no cycles, so it must be empty between backwards.
    """

    __slots__ = ("grads", "room")

    def __init__(self) -> None:
        super().__init__()
        self.grads: list[torch.Tensor] = []
        """Their gradients."""
        self.room = 0
        """Number of gradients that may be staged before the group must check them; 0 before the first one of a backward."""

    def add(self, param: torch.Tensor) -> None:
        """Move the gradient of a parameter out of ``param.grad``."""
        self.append(param)
        self.grads.append(param.grad)  # type: ignore[arg-type]
        param.grad = None

    def make_hook(self, receive: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Return a parameter hook that stages the gradient while there is room, and otherwise calls ``receive``.

        It is the only Python code for most small gradients.
        """

        def stage(param: torch.Tensor) -> None:
            if len(self) < self.room and not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
                self.add(param)
            else:
                receive(param)

        return stage


class _ParamAndGradBucketGroup:
    """One or more buckets that are reduced and gathered as one batch.

    Args:
        index: position in the launch order.
        buckets: at least one; their order is the order of the calls in the batch.
        communicator: the ranks to reduce with.
        divisor: of the mean.
        replicas: over which the reduced shards are summed, if other ranks hold the same ones.
    """

    def __init__(
        self,
        buckets: Sequence[_ParamAndGradBucket],
        *,
        index: int,
        communicator: Communicator,
        policy: StepPolicy,
        divisor: float,
        replicas: ReplicaReducer | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.index, self.label = index, f"bucket {index}"
        self.communicator, self._replicas, self.policy = communicator, replicas, policy
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.params = [slot.param for slot in self.slots]
        """In buffer order."""
        self.position_of = {id(slot.param): position for position, slot in enumerate(self.slots)}
        """Position of each parameter in ``slots``, by id, so that hooks may hold it."""
        self.delayed = {at: 0 for at, param in enumerate(self.params) if getattr(param, "skip_backward_post_hook", False)}
        """Number of gradients of this step for each parameter whose gradients are computed outside backward."""
        self.readiness = Readiness(len(self.slots))
        self.staging = Staging()
        self._accelerator = Accelerator.of(self.buckets[0].grad_data.device)
        self.streams = GradStreams(self._accelerator) if self._accelerator is not None else None
        self.is_complete = False
        """Whether all expected gradients of this step have arrived."""
        self.missing: tuple[str, ...] = ()
        """Parameters that had no gradient when the group was launched."""
        self.cleared: tuple[str, ...] = ()
        """Those of ``missing`` whose place held values of an earlier step, which were replaced by zeros."""
        small_bytes = [param.nbytes for param in self.params if param.nbytes <= LARGE_BYTES]
        self._most_staged = min(MOST_STAGED, STAGED_BYTES * len(small_bytes) // max(sum(small_bytes), 1))
        self._post_hooks: Sequence[Sized] = ()
        self._backward: RunningBackward | None = None  # whose gradients the group is taking
        self._limit = 0  # of staged gradients, in this backward
        self._staged: list[GradSlot] = []  # whose state is STAGED
        self.grad_phase = GradPhase.ACCUMULATING
        """Who may touch the gradients."""
        self.param_phase = ParamPhase.GATHERED
        """Who may touch the parameters."""
        self._grad_handle: Handle | None = None
        self._param_handle: Handle | None = None
        self._arrival: Arrival | None = None  # of gathered parameters, on a device
        self._values = [param.data for param in self.params]
        self._nans = [values.new_full((), torch.nan).expand(values.shape) for values in self._values]
        self.param_values = self._values
        """The memory to which each parameter must point now."""
        self._is_everywhere = False  # all reduced values are here, not only this rank's shard
        self.is_withheld = False  # every ``param.grad`` stands for a gradient that was sent
        self._scaled_before: list[tuple[torch.Tensor, float]] = []
        self.grad_shards: list[torch.Tensor] = []
        """Of this rank, by bucket, where gradients are reduce-scattered; gathered in each step, or by ``force_all_reduce``."""
        self._prepare_slots()
        self._prepare(divisor)

    def _prepare_slots(self) -> None:
        # A weak reference: nothing in .grad may refer back to the parameter, because the garbage collector sees no such cycle.
        accumulates, reason = functools.partial(_is_accumulating, weakref.ref(self)), self.policy.withheld_because
        for position, slot in enumerate(self.slots):
            slot.accumulates, slot.settle = accumulates, self._prepare_write
            if reason:
                what = f"the gradient of {slot.name!r}"
                slot.withheld = WithheldGrad(slot.view, what=what, reason=reason, accumulates=accumulates)
                slot.withheld.is_delayed = position in self.delayed

    def _prepare(self, divisor: float) -> None:
        """Make the batches."""
        communicator, policy, replicas, rank = self.communicator, self.policy, self._replicas, self.communicator.rank
        num_ranks = communicator.size * (1 if replicas is None else replicas.communicator.size)
        op, in_order = ReduceOp.AVG if policy.averages_in_collective else ReduceOp.SUM, policy.sums_in_rank_order
        if not policy.averages:
            divisor = 1.0
        reductions: list[Call] = []
        over_replicas: list[Call] = []
        gathers: list[Call] = []
        headrooms: list[float] = []
        halves: list[_ParamAndGradBucket] = []
        for bucket in self.buckets:
            grad, param = bucket.grad_data, bucket.param_data
            factor, after = grad_scale(divisor, grad.dtype)
            if policy.averages_in_collective:
                factor, after = 1.0, divisor / num_ranks
            if num_ranks == 1:  # no collective, whose result would be divided
                factor, after = 1.0 / divisor, 1.0
            if factor != 1:
                self._scaled_before.append((grad, factor))
            if policy.is_sharded or policy.gathers_grads:
                shard, in_fp32 = bucket.shard(grad, rank), policy.accumulates_in_fp32 and grad.itemsize == 2
                if replicas is not None:  # divided once, after the last sum
                    over_replicas.append(AllReduce(shard, op, after, in_order))
                    after = 1.0
                reductions.append(ReduceScatter(shard, grad, op, in_fp32, after, in_order))
                if policy.is_sharded:
                    gathers.append(AllGather(param, bucket.shard(param, rank)))
                self.grad_shards.append(shard)
            else:
                reductions.append(AllReduce(grad, op, after))
            # A float32 gradient (bfloat16 and float64 have as large a range) whose sum over the ranks could overflow counts as
            # infinite. In float16 sums that overflow are common, so there the sum itself is tested.
            if grad.dtype == torch.float16 and num_ranks > 1:
                halves.append(bucket)
                headrooms.append(1.0)
            else:
                headrooms.append(max(2.0 ** (num_ranks - 1).bit_length() * factor, 1.0))
        wholes = [AllGather(bucket.grad_data, shard) for bucket, shard in zip(self.buckets, self.grad_shards, strict=False)]
        self._whole_grads = communicator.prepare(wholes)
        self._grad_calls, self._gather_calls = communicator.prepare(reductions), communicator.prepare(gathers)
        self._over_replicas = (communicator if replicas is None else replicas.communicator).prepare(over_replicas)
        self.finite_test = FiniteTest(self.slots, [bucket.grad_data for bucket in self.buckets], headrooms)
        """Of the gradients before they are sent."""
        local = [slot for slot in self.slots if slot.view is not slot.in_buffer]
        self._local_grads, self._local_copies = [slot.view for slot in local], [slot.in_buffer for slot in local]
        self._large_test = LargeTest(self.slots, communicator, f"bucket {self.index} on rank {communicator.number_of(rank)}")
        half_slots = [slot for bucket in halves for slot in bucket.slots]
        self.sum_test = FiniteTest(half_slots, [bucket.grad_data for bucket in halves])
        """Of the sum, if it may overflow although all addends are finite."""

    # Storing gradients #

    def receive(self, position: int, backward: RunningBackward) -> bool:
        """Take the gradient of one parameter, and store the staged gradients if it is time.

        Returns whether the group is complete now.

        Args:
            position: of the parameter in ``slots``. The group is accumulating.
            backward: that has produced it.
        """
        if self._backward is not backward:
            self._backward = backward
            self._limit = self._most_staged if backward.may_stage and self._has_no_other_hooks() else 0
        is_complete = False
        if self.streams is not None and not self.streams.is_here():
            is_complete = self._store_staged()  # on the stream that computed them
            self.streams.note()
        slot = self.slots[position]
        param = slot.param
        if not self._limit or param.grad_added_to_main_grad or param.grad is None:  # type: ignore[attr-defined]
            self._prepare_write(param)
            slot.store(keeps_graph=not backward.is_last and torch.is_grad_enabled())  # create_graph=True under no_sync
            is_complete = (backward.is_last and self.readiness.mark((position,))) or is_complete
        else:
            self.staging.add(param)
        num_awaited = self._num_awaited(backward)
        if len(self.staging) >= num_awaited or (self.staging and param.nbytes > LARGE_BYTES):
            is_complete = self._store_staged() or is_complete
            num_awaited = self._num_awaited(backward)
        self.staging.room = num_awaited - 1
        if is_complete:
            self.is_complete = True
            for recorder in self.communicator.recorders.active:
                recorder.note_ready(self.label)
        return is_complete

    def receive_delayed(self, position: int) -> None:
        """Take a gradient that was computed outside backward. The group is accumulating.

        Raises:
            PhaseError: it was added to values of an earlier step.
        """
        self._slot_outside(position).store_delayed()
        self.delayed[position] += 1

    def receive_assigned(self, position: int) -> None:
        """Take a gradient that was assigned or added to ``param.grad`` outside backward. The group is accumulating."""
        self._slot_outside(position).store()

    def _slot_outside(self, position: int) -> GradSlot:
        """Return the slot of a gradient that was computed outside backward, ready to be written."""
        if self.streams is not None and not self.streams.is_here():
            self._store_staged()  # on the stream that computed them
            self.streams.note()
        slot = self.slots[position]
        self._prepare_write(slot.param)
        return slot

    def update_completeness(self, num_backwards: int) -> None:
        """Note whether the group is complete, after the last backward: delayed gradients are not counted as ready."""
        self.is_complete = self.readiness.num_incomplete == len(self.delayed) and all(
            count == num_backwards for count in self.delayed.values()
        )

    def end_backward(self) -> None:
        """Store the staged gradients, and show all of them as ``param.grad``, at the end of a backward."""
        self._store_staged()
        if self.streams is not None:
            self.streams.follow()  # the caller uses the gradients on the current stream
        for slot in self._staged:
            slot.show()
        self._end_taking()

    def drop_staged(self) -> None:
        """Forget the staged gradients: those of this step are not used."""
        self.staging.clear()
        self.staging.grads.clear()
        for slot in self._staged:
            slot.state = GradState.STALE
        self._end_taking()

    def _end_taking(self) -> None:
        self._staged.clear()
        self._backward, self.staging.room = None, 0

    def _has_no_other_hooks(self) -> bool:
        """Return whether no other code has hooks on the parameters, which would expect ``param.grad``."""
        if not self._post_hooks:  # the dicts of hooks, which never change
            hooks = [param._post_accumulate_grad_hooks for param in self.params]
            if None in hooks:
                return False
            self._post_hooks = hooks
        return sum(map(len, self._post_hooks)) == len(self._post_hooks)

    def _num_awaited(self, backward: RunningBackward) -> int:
        """Return the number of staged gradients at which the group must store them: they may be the last ones."""
        return min(self._limit, self.readiness.num_incomplete) if backward.is_last else self._limit

    def _prepare_write(self, param: torch.Tensor) -> None:
        """Store the staged gradients if one is of ``param``: other code is about to write into its place.

        On a device that code may run on another stream than the previous writer.
        """
        if self.staging and any(staged is param for staged in self.staging):
            self._store_staged()
        if self.streams is not None:
            self.streams.order(id(param))

    def _store_staged(self) -> bool:
        """Store and count the staged gradients; return whether the group is complete now."""
        staging = self.staging
        if not staging:
            return False
        positions, grads = list(map(self.position_of.__getitem__, map(id, staging))), staging.grads
        staging.clear()
        staging.grads = []
        with torch.no_grad(), nullcontext() if self.streams is None else self.streams.last():
            self._store_all(positions, grads)
        return self._backward is not None and self._backward.is_last and self.readiness.mark(positions)

    def _store_all(self, positions: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Store gradients that were moved out of ``param.grad`` in their views: one call to copy, one to add.

        Raises:
            PhaseError: a fused kernel has added to ``main_grad`` although a gradient was staged.
        """
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        added: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        clean, kernel, staged = GradState.CLEAN, GradState.KERNEL, GradState.STAGED  # looked up once
        slots = self.slots
        for position, grad in zip(positions, grads, strict=True):
            slot = slots[position]
            state = slot.state
            # Check the size: a copy would broadcast if the parameter's shape has changed.
            is_plain = type(grad) is torch.Tensor and not grad.is_sparse and grad.numel() == slot.numel
            if not is_plain or state is kernel or slot.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
                _flush(copied, added)  # the next gradient may be added to them
                slot.param.grad = slot.view if slot.param.grad_added_to_main_grad else grad  # type: ignore[attr-defined]
                slot.store()
                if slot.param.grad is not slot.view:
                    continue
                slot.param.grad = None
            elif state is staged:  # a second gradient in this backward, which autograd could not add itself
                _flush(copied, added)
                added[0].append(slot.view)
                added[1].append(grad)
                continue
            elif grad is not slot.view:
                targets, sources = added if state is clean else copied
                targets.append(slot.view)
                sources.append(grad)
            slot.state = staged
            self._staged.append(slot)
        _flush(copied, added)

    # Reducing gradients #

    @property
    def is_launched(self) -> bool:
        """Whether the reduction of this step was sent and is not finished."""
        return self._grad_handle is not None and self._grad_handle.is_started

    def start_grad_sync(self) -> None:
        """Hand the gradients to a collective. Parameters without a gradient are reduced as zeros and listed in ``missing``.

        Raises:
            PhaseError: the group is not accumulating.
        """
        self.grad_phase = enter(self.grad_phase, GradPhase.IN_FLIGHT, group=self.index)
        self._hand_over()
        if self._local_grads:
            torch._foreach_copy_(self._local_copies, self._local_grads)  # rounds float32 sums of microbatches once
        if self.policy.tests_finite:
            self.finite_test.run()
            if self.streams is not None:
                self.streams.note()  # for the fence, which must wait for the stream of a delayed gradient
        if self.policy.tests_large:
            self._large_test.run()
        for values, factor in self._scaled_before:
            values.mul_(factor)
        self._launch_grads()

    def start_dropped_sync(self) -> None:
        """Take part in the reduction of a step that is dropped, with any contents of the buffer. Cannot fail.

        Does nothing if the group was launched. May be called again after an interrupt.
        """
        if self.is_launched:
            return
        self.drop_staged()
        if self.grad_phase is GradPhase.REDUCED:
            self.grad_phase = enter(self.grad_phase, GradPhase.ACCUMULATING, group=self.index)
        if self.grad_phase is GradPhase.ACCUMULATING:
            self.grad_phase = enter(self.grad_phase, GradPhase.IN_FLIGHT, group=self.index)
        if self.streams is not None:
            self.streams.join()
        self.is_withheld = False
        for slot in self.slots:
            slot.param.grad, slot.state = None, GradState.STALE
        self.missing = self.cleared = ()
        self.finite_test.found, self.finite_test.peaks = (), []
        self._launch_grads()

    def _hand_over(self) -> None:
        """Release all views to a collective."""
        self._store_staged()
        if self.streams is not None:
            self.streams.join()
        rest = (
            [slot for slot in self.slots if slot.state is not GradState.STAGED] if len(self._staged) < len(self.slots) else []
        )
        for slot in self._staged:
            slot.state = GradState.STALE
        self._end_taking()
        missing, cleared = [], []
        for slot in rest:
            was_clean = slot.state is GradState.CLEAN
            if not slot.hand_over():
                missing.append(slot.name)
                if not was_clean:
                    cleared.append(slot.name)
        self.missing, self.cleared = tuple(missing), tuple(cleared)

    def _launch_grads(self) -> None:
        self._is_everywhere = not self.grad_shards
        self._grad_handle = self.communicator.handle(self._grad_calls, label=self.label)
        if self._replicas is not None:
            label = f"{self.label} over replicas"
            self._grad_handle = self._replicas.behind(self._grad_handle, self._over_replicas, label=label)
        self._grad_handle.start()

    def finish_grad_sync(self, *, waits: bool = True) -> None:
        """Wait for the collective and finish the reduced gradients. Does nothing if they are there already.

        Args:
            waits: ``False`` only runs the additions of parts that have arrived from all ranks, on a host.

        Raises:
            PhaseError: the group was not launched.
        """
        if self.grad_phase is GradPhase.REDUCED:
            return
        if not waits:
            if self._grad_handle is not None:
                self._grad_handle.poll()
            return
        if self._grad_handle is not None:
            self._grad_handle.wait()
            self.sum_test.found, self.sum_test.peaks = (), []
            if self.policy.tests_finite and self._is_everywhere:
                self.sum_test.run()
        if self._local_grads:
            self.copy_to_local_grads()
        self.grad_phase = enter(self.grad_phase, GradPhase.REDUCED, group=self.index)
        self._grad_handle = None

    def copy_to_local_grads(self) -> None:
        """Copy reduced gradients from the buffer to ``main_grad`` of parameters with separate float32 memory."""
        if self._local_grads:
            torch._foreach_copy_(self._local_grads, self._local_copies)

    def launch_grad_gather(self) -> None:
        """Gather the reduced shards of all ranks. The ranks have agreed that all of them do so.

        Does nothing if they are here already.
        """
        if not self._is_everywhere:
            self._grad_handle = self.communicator.launch(self._whole_grads, label=f"gradient gather {self.index}")

    def finish_grad_gather(self) -> None:
        """Wait for the gather, if one was launched, and finish the whole gradients."""
        if self._is_everywhere or self._grad_handle is None:
            return
        self._grad_handle.wait()
        self._grad_handle = None
        self.copy_to_local_grads()
        if self.policy.tests_finite:
            self.sum_test.run()
        self._is_everywhere = True

    def publish(self) -> None:
        """Show the reduced gradients as ``param.grad``, if they are complete on this rank.

        A reduce-scattered gradient is not published: only this rank's shard of it is valid.
        """
        if self._is_everywhere:
            for slot in self.slots:
                slot.publish()

    def withhold_grads(self) -> None:
        """Make ``param.grad`` unusable until the gradients are published or forgotten, if that is the policy."""
        if self.policy.withheld_because and self.grad_phase is not GradPhase.REDUCED:
            self.is_withheld = is_sent = self.grad_phase is GradPhase.IN_FLIGHT
            for slot in self.slots:
                slot.withhold(is_sent=is_sent)

    def show_withheld(self) -> None:
        """Show withheld gradients that were not sent, for other hooks and kernels of the backward that begins."""
        if self.policy.withheld_because and self.grad_phase is GradPhase.ACCUMULATING:
            has_other_hooks = not self._has_no_other_hooks()
            for slot in self.slots:
                slot.show_withheld(has_other_hooks=has_other_hooks)

    def withdraw_grads(self) -> None:
        """Show no gradients, instead of ``publish``: no optimizer steps on them."""
        self.is_withheld = False
        for slot in self.slots:
            slot.withdraw()

    def reopen(self) -> None:
        """Start a step on top of ``param.grad`` as plain torch code left it: ``None``, zeros, or reduced values."""
        if self.grad_phase is not GradPhase.ACCUMULATING:
            self.grad_phase = enter(self.grad_phase, GradPhase.ACCUMULATING, group=self.index)
        self.is_complete = self.is_withheld = False
        self.delayed = dict.fromkeys(self.delayed, 0)

    def reset(self) -> None:
        """Start a step: forget the gradients of the last one.

        Raises:
            PhaseError: a collective still owns the gradients.
        """
        if self._backward is not None:
            self.drop_staged()
        self.reopen()
        for slot in self.slots:
            slot.forget()
        self.readiness.end_step()

    def forget_plans(self) -> None:
        """Drop what back-ends keep for the batches, because the buffers move."""
        self.communicator.forget(self._grad_calls)
        self.communicator.forget(self._gather_calls)
        self.communicator.forget(self._whole_grads)
        if self._replicas is not None:
            self._replicas.communicator.forget(self._over_replicas)

    # Parameters #

    def mark_params_stale(self) -> None:
        """Note that the optimizer has updated this rank's shard and the other shards are out of date."""
        self.param_phase = enter(self.param_phase, ParamPhase.STALE, group=self.index)

    def start_param_sync(self, *, hides_params: bool = False) -> None:
        """Gather the shards of all ranks. Does nothing while a gather is in flight.

        Args:
            hides_params: let the parameters read as NaN until ``finish_param_sync``, so that early reads do not get old values.
                Nothing is written: each parameter points at a single NaN meanwhile, and torch refuses writes to it.
        """
        if self.param_phase is not ParamPhase.IN_FLIGHT:
            self.param_phase = enter(self.param_phase, ParamPhase.IN_FLIGHT, group=self.index)
        if self._param_handle is None:
            self._param_handle = self.communicator.handle(self._gather_calls, label=f"param gather {self.index}")
        self._param_handle.start()
        if hides_params:
            self.param_values = self._nans
            for param, nans in zip(self.params, self._nans, strict=True):
                param.data = nans

    def finish_param_sync(self) -> None:
        """Return when every parameter of the group may be read, gathering first if needed."""
        if self.param_phase is ParamPhase.GATHERED:
            if self._arrival is not None:
                self._arrival.follow()  # they were awaited on another stream
            return
        self.start_param_sync()
        if self._param_handle is not None:
            self._param_handle.wait()
            if self._accelerator is not None:
                self._arrival = Arrival(self._accelerator)
        self.show_params()
        # In one statement: after an interrupt both are set or neither is, so the next gather is sent once.
        self.param_phase, self._param_handle = enter(self.param_phase, ParamPhase.GATHERED, group=self.index), None

    def show_params(self) -> None:
        """Let the parameters point at the buffer again. Does nothing if they do."""
        if self.param_values is not self._values:
            for param, values in zip(self.params, self._values, strict=True):
                param.data = values
            self.param_values = self._values


def _is_accumulating(reference: weakref.ref[_ParamAndGradBucketGroup]) -> bool:
    group = reference()
    return group is not None and group.grad_phase is GradPhase.ACCUMULATING


def _flush(copied: tuple[list[torch.Tensor], list[torch.Tensor]], added: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    if copied[0]:
        torch._foreach_copy_(*copied)
    if added[0]:
        torch._foreach_add_(*added)
    for tensors in (*copied, *added):
        tensors.clear()
