"""``_ParamAndGradBucketGroup``: buckets whose collectives go out together, and the phases of their memory.

Owns readiness, launch and completion of one group. Does not know other groups: in which order groups are launched is the
wrapper's business (``ddp.launcher``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megabucket.buffer.buffer import _ParamAndGradBucket
from megabucket.buffer.finite import FiniteTest
from megabucket.buffer.phases import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradPhase, ParamPhase, PhaseMachine
from megabucket.buffer.readiness import Readiness
from megabucket.buffer.scaling import GradScale
from megabucket.comm import AllGather, AllReduce, Communicator, Handle, ReduceOp, ReduceScatter
from megabucket.errors import CollectiveError


@dataclass(frozen=True, slots=True)
class GradSyncPolicy:
    """What all groups of one wrapper do with their gradients."""

    reduce_scatters: bool
    op: ReduceOp
    average: bool
    """Whether the reduced gradient is a mean, by the collective or by scaling."""
    tests_finite: bool = True
    """Whether gradients are looked through for nan and inf before they are sent."""


class _ParamAndGradBucketGroup:
    """One or more buckets that are reduced and gathered as one batch.

    Args:
        index: position in the launch order.
        num_groups: groups of the wrapper, for error texts.
        buckets: at least one; their order is the order of the calls in the batch.
        communicator: the ranks to reduce with.
    """

    def __init__(
        self,
        buckets: Sequence[_ParamAndGradBucket],
        *,
        index: int,
        num_groups: int,
        communicator: Communicator,
        policy: GradSyncPolicy,
    ) -> None:
        self.buckets = list(buckets)
        self.index = index
        self.num_groups = num_groups
        self.communicator = communicator
        self.policy = policy
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.readiness = Readiness(len(self.slots))
        self.missing: tuple[str, ...] = ()
        """Parameters that had no gradient when the group was launched."""
        self.cleared: tuple[str, ...] = ()
        """Those of ``missing`` whose place held values of an earlier step, and zeros are reduced instead."""
        self.finite_test = FiniteTest(self.slots, [bucket.grad_data for bucket in self.buckets])
        self._grads = PhaseMachine(f"the gradients of bucket group {index}", GradPhase.ACCUMULATING, GRAD_TRANSITIONS)
        self._params = PhaseMachine(f"the parameters of bucket group {index}", ParamPhase.GATHERED, PARAM_TRANSITIONS)
        self._grad_handle: Handle | None = None
        self._param_handle: Handle | None = None
        self._values = [slot.param.data for slot in self.slots]
        self._nans = [values.new_full((), torch.nan).expand(values.shape) for values in self._values]
        self._value_pointers = [values.data_ptr() for values in self._values]
        self._nan_pointers = [nans.data_ptr() for nans in self._nans]
        self._are_params_hidden = False
        self._was_all_reduced = False
        num_ranks = communicator.size if policy.average and policy.op is ReduceOp.SUM else 1
        self._scales = [GradScale.mean_of(num_ranks, bucket.grad_data.dtype) for bucket in self.buckets]
        rank = communicator.rank
        self._reduce_calls = communicator.prepare([AllReduce(bucket.grad_data, policy.op) for bucket in self.buckets])
        if policy.reduce_scatters:
            self._grad_shards = [bucket.shard(bucket.grad_data, rank) for bucket in self.buckets]
            self._scatter_calls = communicator.prepare(
                [
                    ReduceScatter(shard, bucket.grad_data, policy.op)
                    for shard, bucket in zip(self._grad_shards, self.buckets, strict=True)
                ]
            )
            self._gather_calls = communicator.prepare(
                [AllGather(bucket.param_data, bucket.shard(bucket.param_data, rank)) for bucket in self.buckets]
            )

    @property
    def grad_phase(self) -> GradPhase:
        """Who may touch the gradients now."""
        return self._grads.current

    @property
    def param_phase(self) -> ParamPhase:
        """Who may touch the parameters now."""
        return self._params.current

    @cached_property
    def label(self) -> str:
        """Name of the group in traces and errors."""
        return f"bucket {self.index}"

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters of all buckets of the group, in buffer order."""
        return [slot.param for slot in self.slots]

    # Gradients #

    def receive_grad(self, position: int, *, counts: bool) -> bool:
        """Store the gradient autograd has just produced for one parameter; return whether the group is complete now.

        Args:
            position: of the parameter in ``slots``. The group is accumulating.
            counts: whether this is the backward that is going to be reduced.
        """
        self.slots[position].store()
        return counts and self.readiness.mark(position)

    def start_grad_sync(self, *, force_all_reduce: bool = False) -> None:
        """Hand the gradients to a collective. Parameters without a gradient are reduced as zeros and listed in ``missing``.

        May be called again when an exception (an interrupt, say) has kept the collective from being launched.

        Raises:
            PhaseError: the group is not accumulating.
        """
        if self._grads.current is not GradPhase.IN_FLIGHT or self._grad_handle is not None:
            self._grads.enter(GradPhase.IN_FLIGHT)
        missing, cleared = [], []
        for slot in self.slots:
            was_clean = slot.is_clean
            if not slot.hand_over():
                missing.append(slot.name)
                if not was_clean:
                    cleared.append(slot.name)
        self.missing, self.cleared = tuple(missing), tuple(cleared)
        if self.policy.tests_finite:
            self.finite_test.run()
        for scale, bucket in zip(self._scales, self.buckets, strict=True):
            scale.before(bucket.grad_data)
        self._was_all_reduced = force_all_reduce or not self.policy.reduce_scatters
        calls = self._reduce_calls if self._was_all_reduced else self._scatter_calls
        self._grad_handle = self.communicator.launch(calls, label=self.label)

    def finish_grad_sync(self) -> None:
        """Wait for the collective and leave reduced gradients behind. Does nothing when they are there already.

        Raises:
            PhaseError: the group was not launched.
            CollectiveError: the launch had failed.
        """
        if self._grads.current is GradPhase.REDUCED:
            return
        if self._grads.current is GradPhase.IN_FLIGHT:
            self._wait(self._grad_handle)
        self._grads.enter(GradPhase.REDUCED)
        self._grad_handle = None
        reduced = [bucket.grad_data for bucket in self.buckets] if self._was_all_reduced else self._grad_shards
        for scale, values in zip(self._scales, reduced, strict=True):
            scale.after(values)

    def publish(self) -> None:
        """Show the reduced gradients as ``param.grad``, where all of them are here.

        A reduce-scattered gradient is not published: only this rank's shard of it means anything.
        """
        if self._was_all_reduced:
            for slot in self.slots:
                slot.publish()

    def reopen(self) -> None:
        """Start a step on top of what plain torch code left in ``param.grad``: nothing, zeros, or reduced values."""
        self._grads.enter(GradPhase.ACCUMULATING)

    def reset(self) -> None:
        """Start a step: gradients of the last one are forgotten.

        Raises:
            PhaseError: a collective still owns the gradients.
        """
        if self._grads.current is not GradPhase.ACCUMULATING:
            self._grads.enter(GradPhase.ACCUMULATING)
        for slot in self.slots:
            slot.forget()
        self.readiness.abandon_step()

    # Parameters #

    @property
    def param_pointers(self) -> list[int]:
        """Where each parameter must live now, by address."""
        return self._nan_pointers if self._are_params_hidden else self._value_pointers

    def mark_params_stale(self) -> None:
        """Say that the optimizer has updated this rank's shard and the others' are out of date."""
        self._params.enter(ParamPhase.STALE)

    def start_param_sync(self) -> None:
        """Gather the shards of all ranks. Does nothing while a gather is in flight."""
        if self._params.current is ParamPhase.IN_FLIGHT:
            return
        self._params.enter(ParamPhase.IN_FLIGHT)
        self._param_handle = self.communicator.launch(self._gather_calls, label=f"param gather {self.index}")

    def finish_param_sync(self) -> None:
        """Return when every parameter of the group may be read, gathering first where needed.

        Raises:
            CollectiveError: the launch had failed.
        """
        if self._params.current is ParamPhase.GATHERED:
            return
        self.start_param_sync()
        self._wait(self._param_handle)
        self._params.enter(ParamPhase.GATHERED)
        self._param_handle = None
        self.show_params()

    def show_params(self) -> None:
        """Let the parameters look at the buffer again, whatever it holds by now. Does nothing when they do."""
        if self._are_params_hidden:
            self._are_params_hidden = False
            for slot, values in zip(self.slots, self._values, strict=True):
                slot.param.data = values

    def hide_params(self) -> None:
        """Let the parameters read as NaN until ``finish_param_sync``: what reads them too early must not get old values.

        Nothing is written; each parameter looks at a single NaN for a while. A write to it raises in torch.
        """
        self._are_params_hidden = True
        for slot, nans in zip(self.slots, self._nans, strict=True):
            slot.param.data = nans

    def _wait(self, handle: Handle | None) -> None:
        if handle is None:
            raise CollectiveError(
                f"[rank {self.communicator.rank}] a collective of {self.label} of {self.num_groups} could not be launched (the "
                "error was raised then), so there is nothing to wait for and this rank is out of step with the others. "
                "End the run and start again."
            )
        handle.wait()
