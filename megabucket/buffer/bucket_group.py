"""``_ParamAndGradBucketGroup``: buckets whose collectives go out together, and the phases of their memory.

Owns readiness, launch and completion of one group. Does not know other groups: in which order groups are launched is the
wrapper's business (``ddp.launcher``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from megabucket.buffer.buffer import _ParamAndGradBucket
from megabucket.buffer.finite import FiniteTest
from megabucket.buffer.intake import GradIntake
from megabucket.buffer.phases import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradPhase, ParamPhase, PhaseMachine
from megabucket.buffer.readiness import Readiness
from megabucket.buffer.scaling import GradScale
from megabucket.buffer.streams import GradStreams
from megabucket.buffer.withheld_grad import WithheldGrad
from megabucket.comm import AllGather, AllReduce, Communicator, Handle, ReduceOp, ReduceScatter
from megabucket.comm.plan import run_through
from megabucket.comm.port import Batch
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
    accumulates_in_fp32: bool = False
    """Whether a reduce-scatter adds 16-bit gradients up in float32."""
    reduces_in_place: bool = False
    """Whether a reduce-scatter may take no memory beside the gradients."""
    reads_peers: bool = False
    """Whether ranks on one host may read each other's memory."""
    withholds_because: str = ""
    """Why ``param.grad`` is not for the caller from backward to its reduction, and what to do instead; empty where it is."""


def _is_accumulating(grads: PhaseMachine[GradPhase]) -> bool:
    return grads.current is GradPhase.ACCUMULATING


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
        self._streams = GradStreams.of(self.buckets[0].grad_data.device)
        self.missing: tuple[str, ...] = ()
        """Parameters that had no gradient when the group was launched."""
        self.cleared: tuple[str, ...] = ()
        """Those of ``missing`` whose place held values of an earlier step, and zeros are reduced instead."""
        self.interrupted: list[str] = []
        """Parameters whose gradient of this step was cleared or replaced before the step was over."""
        self.intake = GradIntake(self.slots, self.readiness, self.interrupted, self._streams)
        self._grads = PhaseMachine(f"the gradients of bucket group {index}", GradPhase.ACCUMULATING, GRAD_TRANSITIONS)
        self._params = PhaseMachine(f"the parameters of bucket group {index}", ParamPhase.GATHERED, PARAM_TRANSITIONS)
        self._grad_handle: Handle | None = None
        self._param_handle: Handle | None = None
        # It knows the phases only: nothing may lead back to a parameter from its .grad, where no garbage collector looks.
        accumulates = functools.partial(_is_accumulating, self._grads)
        for slot in self.slots:
            slot.accumulates = accumulates
        if policy.withholds_because:
            for slot in self.slots:
                what = f"the gradient of {slot.name!r}"
                slot.withheld = WithheldGrad(slot.view, what=what, reason=policy.withholds_because, accumulates=accumulates)
        self._values = [slot.param.data for slot in self.slots]
        self._nans = [values.new_full((), torch.nan).expand(values.shape) for values in self._values]
        self._are_params_hidden = False
        self._is_everywhere = False  # what was reduced, not only this rank's shard of it
        self._grad_gather: Handle | None = None
        self._divisions: Iterator[object] = iter(())
        num_ranks = communicator.size if policy.average and policy.op is ReduceOp.SUM else 1
        self._scales = [GradScale.mean_of(num_ranks, bucket.grad_data.dtype) for bucket in self.buckets]
        self.finite_test, self.sum_test = self._make_finite_tests()
        self._prepare_calls()

    def _prepare_calls(self) -> None:
        communicator, policy, rank = self.communicator, self.policy, self.communicator.rank
        grads = [(bucket.grad_data, scale.divisor_after) for bucket, scale in zip(self.buckets, self._scales, strict=True)]
        self._reduce_calls = communicator.prepare([AllReduce(grad, policy.op, divisor=divisor) for grad, divisor in grads])
        if policy.reduce_scatters:
            self._grad_shards = [bucket.shard(bucket.grad_data, rank) for bucket in self.buckets]
            self._scatter_calls = communicator.prepare(
                [
                    ReduceScatter(
                        shard,
                        grad,
                        policy.op,
                        in_fp32=policy.accumulates_in_fp32 and shard.element_size() == 2,
                        in_place=policy.reduces_in_place,
                        divisor=divisor,
                    )
                    for shard, (grad, divisor) in zip(self._grad_shards, grads, strict=True)
                ]
            )
            self._gather_calls = communicator.prepare(
                [AllGather(bucket.param_data, bucket.shard(bucket.param_data, rank)) for bucket in self.buckets]
            )

    def _make_finite_tests(self) -> tuple[FiniteTest, FiniteTest]:
        """Return the test of what is sent and that of the sum.

        A float32 gradient (bfloat16 and float64 have as much room) whose sum over the ranks could be infinite is as good as
        infinite itself. Gradients that a float16 can hold, but not their sum, are common; so the sum is tested, too.
        """
        num_ranks = self.communicator.size
        is_half = [bucket.grad_data.dtype == torch.float16 and num_ranks > 1 for bucket in self.buckets]
        headrooms = [
            1.0 if half else max(2.0 ** (num_ranks - 1).bit_length() / scale.divisor_before, 1.0)
            for half, scale in zip(is_half, self._scales, strict=True)
        ]
        halves = [bucket for bucket, half in zip(self.buckets, is_half, strict=True) if half]
        return (
            FiniteTest(self.slots, [bucket.grad_data for bucket in self.buckets], headrooms),
            FiniteTest([slot for bucket in halves for slot in bucket.slots], [bucket.grad_data for bucket in halves]),
        )

    @property
    def readable_batches(self) -> list[Batch]:
        """What the ranks may do by reading each other's memory."""
        if not self.policy.reads_peers:
            return []
        return [self._scatter_calls, self._gather_calls] if self.policy.reduce_scatters else [self._reduce_calls]

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

    def receive_grad(self, position: int, *, counts: bool, may_wait: bool = False) -> bool:
        """Store the gradient autograd has just produced for one parameter; return whether the group is complete now.

        Args:
            position: of the parameter in ``slots``. The group is accumulating.
            counts: whether this is the backward that is going to be reduced.
            may_wait: whether small gradients of this backward may wait for each other.
        """
        is_complete = self.intake.receive(position, counts=counts, may_wait=may_wait)
        if is_complete:
            self.communicator.tell_ready(self.label)
        return is_complete

    def start_grad_sync(self) -> None:
        """Hand the gradients to a collective. Parameters without a gradient are reduced as zeros and listed in ``missing``.

        May be called again when an exception (an interrupt, say) has kept the collective from being launched.

        Raises:
            PhaseError: the group is not accumulating.
        """
        if self._grads.current is not GradPhase.IN_FLIGHT or self._grad_handle is not None:
            self._grads.enter(GradPhase.IN_FLIGHT)
        self.missing, self.cleared = self.intake.hand_over()
        if self.policy.tests_finite:
            self.finite_test.run()
        for scale, bucket in zip(self._scales, self.buckets, strict=True):
            scale.before(bucket.grad_data)
        self._launch_grads()

    def start_dropped_sync(self) -> None:
        """Take part in the reduction of a step that is dropped, with whatever the buffer holds: nothing can go wrong here.

        Does nothing when the group was launched.
        """
        if self._grads.current is GradPhase.IN_FLIGHT and self._grad_handle is not None:
            return
        self.intake.drop()
        if self._grads.current is not GradPhase.IN_FLIGHT:
            self._grads.enter(GradPhase.IN_FLIGHT)
        if self._streams is not None:
            self._streams.join()
        for slot in self.slots:
            slot.param.grad = None
            slot.is_clean = False
        self.missing = self.cleared = ()
        self.finite_test.forget()
        self._launch_grads()

    def _launch_grads(self) -> None:
        self._is_everywhere, self._grad_gather = not self.policy.reduce_scatters, None
        reduced = [bucket.grad_data for bucket in self.buckets] if self._is_everywhere else self._grad_shards
        # An iterator in C: a finish that is interrupted and begun again goes on where it was, and divides nothing twice.
        self._divisions = chain(*(scale.divisions(values) for scale, values in zip(self._scales, reduced, strict=True)))
        self._grad_handle = self.communicator.launch(
            self._reduce_calls if self._is_everywhere else self._scatter_calls, label=self.label
        )

    def finish_grad_sync(self) -> None:
        """Wait for the collective and leave reduced gradients behind. Does nothing when they are there already.

        Raises:
            PhaseError: the group was not launched.
            CollectiveError: the launch had failed.
        """
        if self._grads.current is GradPhase.REDUCED:
            return
        if self._grads.current is GradPhase.IN_FLIGHT:
            if not self._wait(self._grad_handle).has_divided:
                run_through(self._divisions)
            self.sum_test.forget()
            if self.policy.tests_finite and self._is_everywhere:
                self.sum_test.run()
        self._grads.enter(GradPhase.REDUCED)
        self._grad_handle = None

    def gather_grads(self) -> None:
        """Collect the reduced shards of all ranks, for ``force_all_reduce``. The ranks have agreed that all of them do so.

        Does nothing when they are here already. May be called again when a wait was interrupted.
        """
        if self._is_everywhere:
            return
        if self._grad_gather is None:
            calls = [AllGather(bucket.grad_data, shard) for bucket, shard in zip(self.buckets, self._grad_shards, strict=True)]
            self._grad_gather = self.communicator.launch(calls, label=f"gradient gather {self.index}")
        self._grad_gather.wait()
        if self.policy.tests_finite:
            self.sum_test.run()
        self._is_everywhere, self._grad_gather = True, None

    def publish(self) -> None:
        """Show the reduced gradients as ``param.grad``, where all of them are here.

        A reduce-scattered gradient is not published: only this rank's shard of it means anything.
        """
        if self._is_everywhere:
            for slot in self.slots:
                slot.publish()

    def withhold_grads(self) -> None:
        """Let ``param.grad`` refuse to be used until the gradients are published, or forgotten, if that is the policy."""
        if self.policy.withholds_because and self._grads.current is not GradPhase.REDUCED:
            is_sent = self._grads.current is GradPhase.IN_FLIGHT
            for slot in self.slots:
                slot.withhold(is_sent=is_sent)

    def withdraw_grads(self) -> None:
        """Show no gradients, in place of ``publish``: nobody steps on them."""
        for slot in self.slots:
            slot.withdraw()

    def reopen(self) -> None:
        """Start a step on top of what plain torch code left in ``param.grad``: nothing, zeros, or reduced values."""
        self._grads.enter(GradPhase.ACCUMULATING)
        self.interrupted.clear()

    def reset(self) -> None:
        """Start a step: gradients of the last one are forgotten.

        Raises:
            PhaseError: a collective still owns the gradients.
        """
        self.intake.drop()
        if self._grads.current is not GradPhase.ACCUMULATING:
            self._grads.enter(GradPhase.ACCUMULATING)
        self.interrupted.clear()
        for slot in self.slots:
            slot.forget()
        self.readiness.abandon_step()

    # Parameters #

    @property
    def param_values(self) -> list[torch.Tensor]:
        """What each parameter must look at now: memory, shape and memory order."""
        return self._nans if self._are_params_hidden else self._values

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

    def _wait(self, handle: Handle | None) -> Handle:
        if handle is None:
            raise CollectiveError(
                f"[rank {self.communicator.rank}] a collective of {self.label} of {self.num_groups} could not be launched (the "
                "error was raised then), so there is nothing to wait for and this rank is out of step with the others. "
                "End the run and start again."
            )
        handle.wait()
        return handle
