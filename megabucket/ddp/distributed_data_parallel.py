"""``DistributedDataParallel``: a module whose parameters and gradients live in buffers that are reduced while backward runs.

The public interface: ``wrap`` builds the parts, and ``step`` has the rules of a step.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from megabucket.buffer import GradPhase, ParamAndGradBuffer, ParamPhase, _ParamAndGradBucketGroup
from megabucket.buffer.param_and_grad_buffer import allocated
from megabucket.comm import Communicator, Exchange
from megabucket.comm.communicator import RankState
from megabucket.comm.device import profiler_range
from megabucket.config.ddp import DistributedDataParallelConfig, with_torch_arguments
from megabucket.config.resolve import StepPolicy, overlap_obstacle, resolve_step
from megabucket.ddp.backward import refuse_in_backward
from megabucket.ddp.calls import CollectiveCall
from megabucket.ddp.groups import DENSE, ParallelGroups, communicator_for, discover, single
from megabucket.ddp.offload import Memory, Offloaded, find_memory, give_back
from megabucket.ddp.replicas import (
    broadcast_replica,
    entries_by_group,
    find_divergence,
    naming_replaced,
    params_of,
    unbuffered_state,
)
from megabucket.ddp.report import step_number_of
from megabucket.ddp.step import GradSync
from megabucket.ddp.wrap import (
    Detached,
    FollowsRebuild,
    Unwrapped,
    Wrapping,
    exchange_device,
    find_difference,
    has_dtensors,
    has_prefix_of_torch,
    prepare_rebuild,
    restore_prefix,
)
from megabucket.errors import ConfigError, MegabucketError, PhaseError, log_once, refuse_copies
from megabucket.layout import ModelLayout
from megabucket.layout.identity import ParamIdentity, by_place
from megabucket.trace import ProfilerRanges, Recorder, StepRecorder, StepTrace

if TYPE_CHECKING:
    from megabucket.ddp.dtensors import DTensorParams
    from megabucket.weights.chunk import WeightChunk

_NO_SYNC: Final = "run every microbatch of a step but the last one inside `with ddp.no_sync():`"
_DIVIDE: Final = "set grad_reduction='sum' in the config, and call ddp.scale_gradients(1 / factor)"
_WHOLE: Final = "drop it: parameters are whole on every rank"
_COMMUNICATION: Final = "drop it, or write a Communicator (docs/contributing/communicator.md)"
_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "set_requires_gradient_sync": _NO_SYNC,
        "set_requires_all_reduce": f"{_NO_SYNC}, which holds back the all-reduce over replicas as well",
        "set_is_last_backward": _NO_SYNC,
        **dict.fromkeys(("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"), _DIVIDE),
        **dict.fromkeys(
            (
                "reset_iter_state",
                "reshard",
                "set_modules_to_backward_prefetch",
                "set_modules_to_forward_prefetch",
                "set_post_optim_event",
                "set_reshard_after_backward",
                "set_reshard_after_forward",
                "set_unshard_in_backward",
                "unshard",
            ),
            _WHOLE,
        ),
        **dict.fromkeys(
            (
                "set_all_reduce_hook",
                "set_allocate_memory_from_process_group_for_comm",
                "set_custom_all_gather",
                "set_custom_reduce_scatter",
                "set_force_sum_reduction_for_comms",
                "set_reduce_scatter_max_input_buffers",
                "set_separate_reduce_scatter_group",
                "set_symm_mem_for_comm",
            ),
            _COMMUNICATION,
        ),
        "set_reduce_scatter_unused_params": "set unused_parameters='skip' or 'zero' in the config",
        "clip_grad_norm_": "call clip_grad_norm_() of the DistributedOptimizer, or give it clip_grad=",
        "join": "give all ranks as many batches; ddp.abort_step(reason) drops a step on all of them",
        "register_comm_hook": "docs/contributing/wire.md says how gradients get another form on the wire",
    }
)
"""Methods of FSDP2 and of torch DDP that the wrapper lacks, and what to do instead."""


class DistributedDataParallel(torch.nn.Module):
    """Wrap a module for data-parallel training through buffers and buckets.

    Wrapping moves the trainable parameters into contiguous buffers (values, shapes and memory order stay), makes the replicas
    equal by a broadcast from the first rank, and hooks backward. ``param.main_grad`` is the gradient's place in the buffer;
    ``param.grad`` is the same view whenever plain torch code may read it. Frozen parameters stay where they are. Module buffers
    (running statistics) are made equal once, when wrapping.

    Args:
        module: on its final device and in its final dtypes.
        config: the defaults all-reduce with overlap.
        process_group: the ranks to reduce over; ``None``: the default group, or this process alone if ``torch.distributed`` is
            not initialized. The last dimension of a two-dimensional device mesh holds the shards of a replica, the first one
            the replicas (``ReductionGroup``).
        recorder: receives launches and phases, for traces and tests.
        communicator: an implementation of the port instead of a process group, for example of a ``LoopbackWorld``.
        groups: instead of ``process_group``, if parameters are reduced over different ranks or the model has other kinds of
            parallelism: ``ParallelGroups``, or a dict of its ``reduction`` groups alone.
        torch_arguments: arguments of torch DDP by name, with values that describe what this wrapper does anyway; and the
            fields ``bucket_cap_mb`` and ``init_sync``. Any other one is a ``ConfigError`` that names the alternative.
        disable_bucketing: one bucket per buffer, regardless of the config: for all pipeline stages but the first, whose
            reductions end while the first stage still computes. Must be equal on the ranks of a reduction group.

    Raises:
        NoTrainableParametersError: nothing requires a gradient.
        UnsupportedParameterError: a trainable parameter cannot live in a buffer; the text says which and why.
        AlreadyWrappedError: another wrapper holds some of the parameters.
        LayoutMismatchError: the ranks do not wrap the same module with the same config and versions.
        PeerFailedError: another rank could not wrap its module.
        ProcessGroupMissingError: several processes were launched, but they have no process group.
        ConfigError: the config, or the groups, cannot be honoured for this module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: DistributedDataParallelConfig | None = None,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        recorder: Recorder | None = None,
        communicator: Communicator | None = None,
        groups: ParallelGroups | Mapping[str, Any] | None = None,
        disable_bucketing: bool = False,
        **torch_arguments: Any,
    ) -> None:
        super().__init__()
        refuse_in_backward("DistributedDataParallel()")
        self.ddp_config = _checked(config, torch_arguments, disable_bucketing=disable_bucketing)
        if communicator is not None and (process_group is not None or recorder is not None):
            raise ConfigError("communicator= brings its own ranks and recorder; drop process_group= and recorder=")
        if groups is not None and (process_group is not None or communicator is not None):
            raise ConfigError("groups= names all ranks; drop process_group= and communicator=")
        if isinstance(process_group, DeviceMesh):
            groups, process_group = {DENSE: process_group}, None
        self._groups = groups if isinstance(groups, ParallelGroups | None) else ParallelGroups(groups)
        self.dtensors = self._find_dtensors(module, communicator or process_group)
        """The DTensor parameters of the module, if it has any."""
        device, state = exchange_device(module), RankState(recorder)
        policy = resolve_step(self.ddp_config)
        if self._groups is not None:
            self.ranks = discover(self._groups, self.ddp_config, policy, device=device, state=state)
        else:
            found = communicator or communicator_for(process_group, self.ddp_config, policy, device=device, state=state)
            self.ranks = single(found, policy, is_owned=communicator is None)
        self.communicator = self.ranks.step
        """Of the ranks that agree on steps."""
        self.num_value_changes = 0
        """Number of loads and broadcasts of parameter values. Optimizers with main parameters compare it."""
        self._optimizers: weakref.WeakSet[FollowsRebuild] = weakref.WeakSet()
        self._step_recorder: StepRecorder | None = None
        self._recorders: list[Recorder] = []
        self._away: list[Memory] = []  # that was given back, unless somebody else holds it
        self._kinds_away: set[str] = set()  # the same on all ranks
        self._wrapping: Wrapping | Detached = Detached()
        self.module = module
        self.__dict__["module"] = module  # for fast access in each step; setting another module removes this entry
        # With the signature of the module's forward, by which trainers choose the fields of a batch.
        forward = functools.partial(type(self).forward, self)
        self.forward = functools.wraps(module.forward)(forward)  # type: ignore[method-assign]
        try:
            self.__dict__["_wrapping"] = self._wrap(self.ddp_config, policy)  # as in rebuild()
            self.register_load_state_dict_pre_hook(restore_prefix)  # type: ignore[no-untyped-call]
            _warn_without_overlap(self.communicator, self.ddp_config, self.layout)
            self._add_recorders()
            if self.ddp_config.init_sync:
                with self.sync.call("wrap: parameters") as call:
                    with naming_replaced(self.param_names, self.communicator):
                        self._broadcast(call)
                    self._broadcast_copies()
        except BaseException:
            self.detach()  # leaves the module as it was
            raise

    def _find_dtensors(self, module: torch.nn.Module, ranks: Communicator | dist.ProcessGroup | None) -> DTensorParams | None:
        """Return the DTensors of the module, and take over the groups that they need."""
        if not (has_dtensors(module) and dist.is_initialized()):
            return None
        from megabucket.ddp.dtensors import DTensorParams  # takes a second, for torch.distributed.tensor

        found = DTensorParams(module, self._groups or ParallelGroups({DENSE: ranks or dist.group.WORLD}))
        self._groups = found.groups(self.ddp_config)
        return found

    def _wrap(self, config: DistributedDataParallelConfig, policy: StepPolicy) -> Wrapping:
        return Wrapping(
            self.module,
            config,
            policy,
            self.ranks,
            groups=self._groups,
            dtensors=self.dtensors,
            on_load=self._note_load,
        )

    def _add_recorders(self) -> None:
        device = self.param_and_grad_buffers[0].param_data.device
        if self.ddp_config.step_traces:
            self._step_recorder = StepRecorder(rank=self.communicator.rank, clock=self.communicator.clock_for(device))
            self._recorders.append(self._step_recorder)
        if self.ddp_config.profiler_ranges:
            self._recorders.append(ProfilerRanges(profiler_range(device)))
        if self._recorders:  # otherwise those of another wrapper on this communicator stay
            moments = [one.note_moment for one in self._recorders if isinstance(one, ProfilerRanges)]
            self.communicator.recorders.activate(self._recorders, on_moment=moments[0] if moments else None)

    def _note_load(self) -> None:
        self.num_value_changes += 1
        self.sync.settle()  # conclude a step that was given up
        self.sync.counters.note_load()

    # Parts of the wrapping #

    @property
    def layout(self) -> ModelLayout:
        """Where each parameter lies."""
        return self._wrapping.layout

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The names of the parameters in the buffers."""
        return self._wrapping.param_names

    @property
    def identities(self) -> dict[str, ParamIdentity]:
        """The identity of each parameter, frozen ones included, by name."""
        return self._wrapping.identities

    @property
    def param_and_grad_buffers(self) -> list[ParamAndGradBuffer]:
        """The buffers, in the order of the layout."""
        return self._wrapping.buffers

    @property
    def bucket_groups(self) -> list[_ParamAndGradBucketGroup]:
        """The bucket groups, in launch order."""
        return self._wrapping.groups

    @property
    def policy(self) -> StepPolicy:
        """The config, resolved for each step."""
        return self._wrapping.policy

    @property
    def sync(self) -> GradSync:
        """The state of the gradient sync, for optimizers."""
        return self._wrapping.sync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module. Calling ``ddp.module`` directly trains just as well: all hooks sit inside.

        Raises:
            PhaseError: the wrapper was detached, or ``ddp.module`` was replaced.
        """
        self._wrapping.check_is_wrapped(self.module)
        if torch.compiler.is_compiling() or self.module._compiled_call_impl is not None:
            return self._wrapping.call_compiled(*args, **kwargs)
        return self.module(*args, **kwargs)

    # Gradients #

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward only accumulates: for all but the last microbatch of a step.

        It applies to backwards that run inside, not to forwards. Contexts may be nested.
        """
        return self.sync.no_sync()

    def grad_ready(self, param: torch.Tensor) -> None:
        """Take the gradient of a parameter that is computed outside backward, perhaps after ``backward()`` has returned.

        Such a parameter needs the attribute ``skip_backward_post_hook = True`` before wrapping. Its gradient is in
        ``param.grad``, or was added to ``param.main_grad``. Call this once for each backward of a step; a bucket with such a
        parameter is launched when all of its gradients are there.

        Raises:
            ConfigError: gradients of the parameter are taken from autograd.
            PhaseError: it comes after the gradient sync, or was added to values of an earlier step.
        """
        self.sync.grad_ready(param)

    def start_grad_sync(self) -> None:
        """Launch the reduction of all remaining buckets, and return without waiting.

        Raises:
            PhaseError: a backward is running, which may still produce gradients.
        """
        refuse_in_backward("start_grad_sync()")
        self.sync.start()

    def finish_grad_sync(self, *, force_all_reduce: bool = False) -> None:
        """Launch the reduction of all remaining buckets, and wait for all of them. A second call does nothing.

        Gradients that the caller wrote into ``main_grad`` without a backward are reduced as well, if ``zero_grad_buffer`` (not
        ``zero_grad``) was called before.

        Args:
            force_all_reduce: with the distributed optimizer, gather the reduce-scattered gradients once all ranks have agreed
                on the step. The attribute ``force_all_reduce`` does so in every step.

        Raises:
            UnusedParameterError: a parameter had no gradient in the whole step (``unused_parameters="error"``).
            PhaseError: a backward is running, which may still produce gradients.
        """
        refuse_in_backward("finish_grad_sync()")
        self.sync.finish(force_all_reduce=force_all_reduce)

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step (forward, backward, optimizer), in which every failure is the same error on all ranks.

        Also without it an exception on one rank ends the step on all ranks; but that rank sees its own exception, and the text
        of an exception in backward is unknown to the others. Inside, all ranks raise the same ``PeerFailedError``.

        Raises:
            MegabucketError: the same error on all ranks.
        """
        return self.sync

    def abort_step(self, reason: str) -> None:
        """Give up this step, for example because the batch of this rank is unusable. All ranks drop the step.

        Returns at once; the others raise ``PeerFailedError`` with the reason at the end of the step. This rank goes on with the
        next step. Right after an exception of this rank, with no other call in between, it applies to the failed step; setting
        ``step_number`` or entering ``step()`` begins another one.

        Raises:
            PhaseError: all ranks have agreed on the gradients of this step, and the others update with them.
        """
        self.sync.abort(reason)

    @property
    def step_number(self) -> int | None:
        """The user's number of the step, compared across ranks at the end of each step; ``None``: not used."""
        return None if self.sync.counters.step_number < 0 else self.sync.counters.step_number

    @step_number.setter
    def step_number(self, number: int | None) -> None:
        value = step_number_of(number)
        self.sync.begin_step()
        self.sync.counters.step_number = value

    @property
    def last_error(self) -> MegabucketError | None:
        """The error of the last dropped step; the same text on every rank."""
        self.sync.conclude_if_sent()
        return self.sync.last_error

    @property
    def last_step_trace(self) -> StepTrace | None:
        """Trace of the last finished step, with the communication that was hidden (needs ``step_traces=True``)."""
        return None if self._step_recorder is None else self._step_recorder.last()

    @property
    def force_all_reduce(self) -> bool:
        """Whether whole gradients are gathered although the distributed optimizer is on."""
        return self.sync.force_all_reduce

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self.sync.set_force_all_reduce(value)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients in place, for example by one over the number of tokens of the global batch.

        After the reduction every rank must use the same factor: an optimizer step with different ones is an error. Before it,
        the factor is the weight of this rank's gradients.

        Raises:
            PhaseError: a collective owns some of the gradients.
            ConfigError: the factor is not finite.
        """
        busy = [group.index for group in self.bucket_groups if group.grad_phase is GradPhase.IN_FLIGHT]
        if busy:
            raise PhaseError(
                f"scale_gradients() would touch the gradients of bucket groups {busy[:5]} while a collective owns them; "
                "call finish_grad_sync() first."
            )
        value = float(self.communicator.read(factor, label="a factor") if isinstance(factor, torch.Tensor) else factor)
        if not math.isfinite(value):
            raise ConfigError(
                f"scale_gradients() needs a finite factor, got {value}: every gradient would be nan or inf, and the weights "
                "after it. One over the number of tokens is infinite for a batch without any: leave such a step out on all "
                "ranks, with zero_grad() in place of the optimizer's step."
            )
        for buffer in self.param_and_grad_buffers:
            buffer.scale_grads(value)
        if self.sync.is_reduced:
            self.sync.counters.note_grad_scale(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. The next ones overwrite them; with ``set_to_none=False`` the buffers are zeroed as well."""
        if set_to_none:
            self.sync.reset()
        else:
            self.sync.reset_to_zeros()
            self._zero_buffers()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, and fill the buffers with zeros. Needed only by code that adds gradients without autograd.

        These zeros count as gradients of all parameters, so ``unused_parameters="skip"`` leaves none alone in the next step.
        """
        self.sync.reset_to_zeros(includes_all=True)
        self._zero_buffers()

    def _zero_buffers(self) -> None:
        for buffer in self.param_and_grad_buffers:
            buffer.zero_grads()

    # Memory between steps #

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload(
        self, *, grads: bool = True, optimizer: bool = True, main_params: bool = True, params: bool = False
    ) -> Offloaded:
        """Give memory back until ``onload``: for a phase in which something else needs it, such as generation of text.

        A collective call, between two steps. Gradients are cleared, as by ``zero_grad()``. Until ``onload`` every step, and
        every other call on several ranks but ``export_weights``, is a ``PhaseError``; and so is every operation on a tensor
        whose memory is gone: ``param.main_grad``, ``param.grad`` and, if they were given back, the parameters. What was given
        back before stays so.

        Args:
            grads: free gradient buffers, float32 sums beside them, and memory in which gradients are received.
            optimizer: move the state of a ``DistributedOptimizer`` to the host. That of a plain torch optimizer stays.
            main_params: move its float32 main parameters of 16-bit parameters to the host.
            params: move the parameter buffers to the host. Without it the module may run, but not train.

        Returns:
            What was freed, and what was not because somebody else holds it. As a context it calls ``onload`` at the end.

        Raises:
            PhaseError: a step is open.
            LayoutMismatchError: other ranks give back something else.
            PeerFailedError: another rank has failed, perhaps to allocate memory on the host. No rank has given back anything.
        """
        wanted = {"grads": grads, "optimizer": optimizer, "main_params": main_params, "params": params}
        with self._moving_memory("offload()", wanted) as (call, moving, kinds):
            self.finish_param_sync()
            self.sync.reset()
            for group in self.bucket_groups:
                group.forget_plans()
            roots = [self._wrapping, self.dtensors, *self._optimizers, *self.param_names]
            moving.extend(find_memory([*self._memory()], kinds, roots))
            for memory in moving:
                memory.make_host_memory()
            call.open()
            if params:
                torch.autograd.graph.increment_version(self.param_names)  # graphs of them cannot be used any more
            self._away += moving
            added, self._kinds_away = kinds - self._kinds_away, kinds | self._kinds_away
            freed, held = give_back(moving)
        return Offloaded(freed, held, functools.partial(self.onload, **{kind: kind in added for kind in wanted}))

    @torch.inference_mode(False)
    @torch.no_grad()
    def onload(self, *, grads: bool = True, optimizer: bool = True, main_params: bool = True, params: bool = True) -> None:
        """Take memory again that ``offload`` has given back, with the values that were moved to the host.

        A collective call; does nothing if nothing is given back. When all of it is back, the next step may begin. Its bits
        are those of a run that has never given back anything. A call that fails may be repeated.

        Args:
            grads: and the others: what to take. By default all.

        Raises:
            LayoutMismatchError: other ranks take something else.
            PeerFailedError: another rank has failed, perhaps to allocate memory. No rank has taken anything.
        """
        if not self._kinds_away:
            return
        wanted = {"grads": grads, "optimizer": optimizer, "main_params": main_params, "params": params}
        with self._moving_memory("onload()", wanted) as (call, moving, kinds):
            moving.extend(memory for memory in self._away if memory.kind in kinds and memory.is_away)
            for memory in moving:
                memory.make_memory()
            call.open()
            for memory in moving:
                memory.take_back()
            self._away = [memory for memory in self._away if memory.kind not in kinds]
            self._kinds_away -= kinds
        if not self._kinds_away:
            self.sync.restart()

    def _memory(self) -> Iterator[Memory]:
        """Yield what can be given back: the buffers first."""
        for buffer in self.param_and_grad_buffers:
            communicator, places = self.ranks.by_name[buffer.layout.key.group].communicator, buffer.layout.params
            for kind, flat, fill in (("params", buffer.param_data, None), ("grads", buffer.grad_data, buffer.empty)):
                make = functools.partial(allocated, communicator, len(flat), flat.dtype, flat.device)
                yield Memory(kind, flat, places, make=make, fill=fill)
            for slot in buffer.slots.values():
                yield Memory("grads", slot.view, (slot.name,), fill=buffer.empty)  # of its own for float32 sums
        for one in self._optimizers:
            yield from (found for found in one.memory(settles=not self._kinds_away) if found.tensor.device == flat.device)

    @contextmanager
    def _moving_memory(self, label: str, wanted: Mapping[str, bool]) -> Iterator[tuple[CollectiveCall, list[Memory], set[str]]]:
        """Make a call that moves memory, which the block adds to a list; allow nothing else as long as some is away."""
        moving: list[Memory] = []
        self.sync.resume()
        try:
            with self.sync.call(label) as call:
                self.sync.check_between_steps(label)
                call.entries = [(f"{kind}={is_wanted}",) for kind, is_wanted in wanted.items()]
                yield call, moving, {kind for kind in wanted if wanted[kind]}
                self.communicator.wait_for(self.param_and_grad_buffers[0].param_data.device, label=label)
        finally:
            for memory in moving:
                memory.drop()
            self._suspend()

    @contextmanager
    def reading_params(self) -> Iterator[None]:
        """Allow calls that only read parameters while other memory is given back."""
        if "params" not in self._kinds_away:
            self.sync.resume()
        try:
            yield
        finally:
            self._suspend()

    def _suspend(self) -> None:
        if self._kinds_away:
            self.sync.suspend(sorted(self._kinds_away))

    # Parameters #

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gather updated parameters from the ranks that own them, the first layers first.

        Returns at once with ``overlap_param_gather=True``: forward then waits for each bucket when it needs it. Does nothing
        without the distributed optimizer. Where no optimizer has updated anything it is a collective call, between two steps.

        Args:
            force_sync: always wait.

        Raises:
            MegabucketError: nothing was updated, and a step is open or another rank does not make the call.
        """
        wrapping = self._wrapping
        if wrapping.policy.is_sharded:
            if any(group.param_phase is ParamPhase.GATHERED for group in wrapping.groups):
                with self.sync.call("start_param_sync()"):
                    self.sync.check_between_steps("start_param_sync()")
            wrapping.gather.start()
            if force_sync or not wrapping.policy.overlaps_params:
                wrapping.gather.finish()

    def finish_param_sync(self) -> None:
        """Return when every parameter may be read."""
        self._wrapping.gather.finish()

    def broadcast_params(self) -> None:
        """Copy parameters, frozen ones included, and module buffers of the group's first rank to all ranks.

        A collective call, between two steps. Tensors on the meta device are left out.

        Raises:
            ConfigError: a frozen parameter or module buffer is sparse.
            LayoutMismatchError: ranks hold other frozen parameters or module buffers.
            PhaseError: a step is open, or parameters were added after wrapping.
            PeerFailedError: another rank has failed.
        """
        with self.sync.call("broadcast_params()") as call:
            self.sync.check_between_steps("broadcast_params()")
            self._broadcast(call)
            self._broadcast_copies()

    @torch.no_grad()
    def _broadcast(self, call: CollectiveCall) -> None:
        self.finish_param_sync()
        flats = [(buffer.layout.key.group, buffer.param_data) for buffer in self.param_and_grad_buffers]
        is_alone = self.communicator.size == 1
        others = [] if is_alone else list(unbuffered_state(self.module, self.param_names, self.identities))
        call.by_group = entries_by_group(others)
        call.open()
        for group, tensor in [*flats, *((group, tensor) for _, group, tensor in others)]:
            for communicator in self.ranks.by_name[group].communicators:
                broadcast_replica(tensor, communicator)
        self.note_written()
        self.sync.counters.note_broadcast()

    def note_written(self) -> None:
        """Note that values were written into the buffers: optimizers read them, and autograd refuses graphs of the old ones."""
        self.num_value_changes += 1
        torch.autograd.graph.increment_version(self.param_names)

    def _broadcast_copies(self) -> None:
        """Make tied weights on different ranks equal, frozen ones included, in the same order on all ranks."""
        params = {name: param for name, param in self.module.named_parameters() if not param.is_meta}
        for name in by_place(params.keys() & self.identities.keys(), self.identities):
            for along in self.identities[name].partial:
                if along in self.ranks.copies:
                    broadcast_replica(params[name], self.ranks.copies[along])

    def export_weights(
        self, dtype: torch.dtype | None = None, *, max_bytes: int = 512 << 20, whole: bool = False
    ) -> Iterator[WeightChunk]:
        """Return all weights in chunks, for example for an inference engine: parameters, then frozen ones and module buffers.

        Between two steps. A chunk is a view of the parameter buffer where ``dtype`` allows: the next step changes it. What
        ``state_dict`` leaves out is left out here.

        Args:
            dtype: to convert floating weights to; ``None``: none is converted.
            max_bytes: of a chunk, at least 1024. A larger tensor is cut into ranges; ``megabucket.joined_weights`` puts them
                together.
            whole: yield whole tensors of the whole model, on all ranks in the same order: a collective call, as is taking each
                chunk. ``False``: what this rank holds, which are pieces under tensor parallelism and its own experts; nothing
                is sent.

        Raises:
            ConfigError: an argument is wrong; or a tensor is sparse, of a subclass (quantized), or cut over ranks that the
                wrapper does not know.
            LayoutMismatchError: the ranks give different arguments (``whole=True``).
            LayoutError: no ranks of the wrapper hold all of a tensor, or some do not know of each other (``whole=True``).
            PhaseError: a step is open; or, at the next chunk, weights have changed since the call.
            CallMismatchError: a rank does not take its chunks (``whole=True``).
            PeerFailedError: another rank has failed (``whole=True``).
        """
        from megabucket.weights.export import export_weights  # for those who call it alone

        return export_weights(self, dtype, max_bytes=max_bytes, whole=whole)

    def import_weights(self, chunks: Iterable[WeightChunk]) -> None:
        """Write exported weights into the parameters and module buffers. The inverse of ``export_weights``.

        A collective call, between two steps. Each rank gives the same values, whole or in pieces, and takes what it holds of
        them; it may leave out what only other ranks hold. All chunks are in memory before anything is written. Main parameters
        follow.

        Raises:
            LayoutError: a tensor is missing, unknown to all ranks, or of another shape or dtype; nothing was written.
            PhaseError: a step is open, or parameters were added after wrapping.
            PeerFailedError: another rank has failed; nothing was written.
        """
        from megabucket.weights.load import import_weights

        import_weights(self, chunks)

    # The wrapper as a module #

    def __getattr__(self, name: str) -> Any:
        """Return attributes that the wrapper lacks from the wrapped module: ``config``, ``generate``, ``save_pretrained``..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            if name not in _INSTEAD:
                raise
        text = f"{name} of torch's data parallelism is not here; {_INSTEAD[name]}"
        raise AttributeError(text, name=name, obj=self)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Return the modules as ``torch.nn.Module`` does, with the names of the wrapped module: without ``module.``.

        The names of parameters and module buffers follow, also those of an outer module that contains the wrapper. So they
        agree with ``state_dict`` and with errors. The wrapper and the wrapped module have the same name.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                path = prefix if name == "module" else f"{prefix}.{name}" if prefix else name
                yield from child.named_modules(memo, path, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the parameters as ``torch.nn.Module`` does, with the names of the wrapped module, once they may be read.

        Code that averages weights calls this.
        """
        if not isinstance(self._wrapping, Detached):
            self._wrapping.check_is_wrapped(self.module)
            self.finish_param_sync()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Describe names without ``module.`` to ``torch.distributed.checkpoint.state_dict``.

        It leaves out child modules that are among the values, and looks a name that is a key up in the attribute with the name
        of the value. Otherwise an attribute of the wrapper, such as ``layout``, would hide a submodule of that name.
        """
        module = self.module
        return dict.fromkeys((*module._modules, *module._parameters, *module._buffers), "module")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's ``state_dict``, with its own names and complete on every rank."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the wrapped module. Values are copied into the buffers, so ``assign`` is refused.

        A checkpoint of torch DDP, of which all names begin with ``module.``, is loaded without that prefix.

        Every rank loads, or every rank calls ``broadcast_params`` afterwards: a load on some ranks only is an error at the end
        of the next step.

        Raises:
            PhaseError: ``assign=True``, which would replace the parameters that live in the buffers.
        """
        if has_prefix_of_torch(self.module, state_dict):
            metadata = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict(state_dict)
            if metadata is not None:
                state_dict._metadata = OrderedDict(metadata)
            consume_prefix_in_state_dict_if_present(state_dict, "module.")
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    @torch.inference_mode(False)
    def rebuild(self, config: DistributedDataParallelConfig | None = None) -> None:
        """Wrap the module anew, after parameters were frozen, unfrozen, added, removed, replaced or moved.

        Every rank calls it between two steps. Layout, buffers and hooks are made anew; ``DistributedOptimizer`` keeps main
        parameters and moments of every parameter that stays in the module. Parameters that are trained for the first time must
        be in a group of the optimizer (``optimizer.add_param_group``). Gradients are dropped.

        If it fails, nothing is wrapped and nothing is lost: every further use is a ``PhaseError`` until the problem is repaired
        and ``rebuild`` is called again.

        Args:
            config: with new fields for cutting buckets; all other fields must be unchanged. A rebuild that fails leaves the
                old config.

        Raises:
            ConfigError: ``config`` differs in other fields, or cannot be honoured for the module.
            LayoutMismatchError: the module or the optimizer's groups are not alike on all ranks.
            OptimizerParametersError: a trainable parameter is in no group of the optimizer, or one of a group is not in the
                module.
            PhaseError: parameters were moved before their values had arrived; nothing was changed.
            StepMismatchError: other ranks take a step meanwhile; nothing was changed.
            PeerFailedError: another rank could not rebuild.
            MegabucketError: as for wrapping.
        """
        config = config if config is not None else self.ddp_config
        before = self._wrapping.sync_before if isinstance(self._wrapping, Unwrapped) else self.sync
        with before.calls("rebuild()"):
            self._rebuild(config, before)

    def _rebuild(self, config: DistributedDataParallelConfig, before: GradSync) -> None:
        optimizers = list(self._optimizers)
        obstacle = find_difference(self.ddp_config, config)
        prepare_rebuild(self._wrapping, before, num_optimizers=len(optimizers), obstacle=obstacle)
        for optimizer in optimizers:
            optimizer.before_rebuild()
        try:
            self._wrapping.undo()
            torch.nn.Module.zero_grad(self.module)  # also parameters that were in no buffer
            # Directly into the dict, because an interrupt inside torch's __setattr__ would lose it.
            self.__dict__["_wrapping"] = self._wrap(config, resolve_step(config))
            self.sync.continue_from(before)
            before = self.sync  # if the broadcast breaks it, the next rebuild is refused
            if self.ddp_config.init_sync:
                with self.sync.call("rebuild: parameters") as call:
                    self._broadcast(call)
                    self._broadcast_copies()
            for optimizer in optimizers:
                optimizer.after_rebuild()
            self.ddp_config = config
        except BaseException as error:
            self._wrapping.undo()
            self._wrapping = Unwrapped(self.module, before, reason=f"{type(error).__name__}: {error}")
            raise

    def follow_rebuilds(self, optimizer: FollowsRebuild) -> None:
        """Notify an optimizer whose tensors lie in the buffers before and after a rebuild.

        Only the last caller is notified: two optimizers cannot own the same shards, and an earlier one may be collected at
        different times on different ranks.
        """
        self._optimizers.clear()
        self._optimizers.add(optimizer)

    def check_replicas(self) -> None:
        """Compare the parameters of all ranks by checksums of all bits.

        A collective call, between two steps; reads every parameter once. Finds a flipped bit, a write on one rank only, an
        update that one rank missed. Also compares the copies that ``groups`` describes, and logs a warning if a sharded
        parameter is equal on all their ranks.

        Raises:
            ReplicasDivergedError: some parameter differs; the text names the first.
            LayoutMismatchError: ranks hold different parameters.
            PhaseError: a step is open, or parameters were added after wrapping.
            PeerFailedError: another rank has failed.
        """
        with self.sync.call("check_replicas()") as call:
            self.sync.check_between_steps("check_replicas()")
            self.finish_param_sync()
            params = params_of(self.module, self.identities)
            call.by_group = entries_by_group((name, self.identities[name].group, param) for name, param in params.items())
            call.open()
            failure = find_divergence(params, self.identities, self.ranks, step=self.sync.step)
        if not self.ranks.has_same_params:
            with self.sync.call("check_replicas(): findings"):
                if failure is not None:
                    raise failure
        if failure is not None:
            raise failure

    @torch.inference_mode(False)
    def detach(self) -> torch.nn.Module:
        """Undo the wrapping: give the parameters their own storage, remove all hooks, and return the module.

        Gradients are dropped, and optimizers over the buffers' shards no longer update the module. Every further use of the
        wrapper is an error. A second call does nothing.
        """
        if self._kinds_away:
            for memory in (memory for memory in self._away if memory.is_away):
                memory.make_memory()
                memory.take_back()
                memory.drop()
            self._kinds_away.clear()
            self.sync.resume()
        wrapping, self._wrapping = self._wrapping, Detached()
        try:
            wrapping.undo()
        finally:
            if self.dtensors is not None:
                self.dtensors.restore()
            self.communicator.recorders.deactivate(self._recorders)
            self.ranks.close()
        return self.module

    __reduce_ex__ = refuse_copies(
        "a wrapper cannot be copied or pickled: a copy would have neither the hooks nor the buffers, and its gradients "
        "would never be reduced. Save ddp.state_dict(), or copy the inner module: copy.deepcopy(ddp.module) is a plain one "
        "and AveragedModel(ddp.module) an average. To copy parameters in another way call ddp.finish_param_sync() first: they "
        "are NaN while they are gathered (overlap_param_gather=True)."
    )


def _checked(
    config: DistributedDataParallelConfig | list[Any] | None, torch_arguments: dict[str, Any], *, disable_bucketing: bool
) -> DistributedDataParallelConfig:
    if isinstance(config, list):  # torch DDP has device_ids here
        config, torch_arguments = None, {"device_ids": config, **torch_arguments}
    if not isinstance(config, DistributedDataParallelConfig | None):
        raise ConfigError(
            f"config must be a DistributedDataParallelConfig, got a {type(config).__name__}; "
            "DistributedDataParallelConfig(**fields) makes one of a dict"
        )
    if config is None or torch_arguments:
        config = with_torch_arguments(config, torch_arguments)
    if not disable_bucketing:
        return config
    sizes = dict.fromkeys(("bucket_size", "bucket_cap_mb", "num_buckets"))
    return config.model_copy(update={**sizes, "bucket_cuts": ()})


def _warn_without_overlap(communicator: Communicator, config: DistributedDataParallelConfig, layout: ModelLayout) -> None:
    """Log, on the first rank, why the reduction of gradients cannot overlap backward, if it cannot.

    It is a warning only if that is unexpected, or if traces are recorded.
    """
    why = overlap_obstacle(config, dp_size=communicator.size, is_one_bucket=layout.num_buckets == 1)
    if why is not None and communicator.rank == 0:
        is_surprising = config.step_traces or (config.overlap_grad_reduce and communicator.size > 1)
        text = f"communication cannot overlap backward: {why}"
        log_once(text, logging.WARNING if is_surprising else logging.INFO)


class AgreedStop:
    """A request to stop the program, made on any rank at any time, and seen by all ranks after the same step.

    The fence of each step carries the request, so agreement costs nothing. Without a fence (``fence=False``) ``poll`` is a
    small collective: every rank calls it after the same steps.

    Args:
        ddp: the wrapper.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp, self._is_requested = ddp, False

    def request(self) -> None:
        """Request a stop. Only sets flags, so a signal handler may call it."""
        self._is_requested = True
        self._ddp.sync.counters.wants_stop = True

    def poll(self) -> bool:
        """Return whether a stop was requested on any rank: the same on every rank. A collective call, after a step.

        A request that comes after the fence was sent is seen after the next step.

        Raises:
            MegabucketError: the step is not whole on some rank.
        """
        self._ddp.sync.settle(raises_again=True)
        communicator = self._ddp.communicator
        if self._ddp.policy.has_fence or communicator.size == 1:
            return self._ddp.sync.counters.stop_is_wanted
        device = self._ddp.param_and_grad_buffers[0].grad_data.device
        with self._ddp.sync.call("AgreedStop.poll()") as call:
            call.open()
            word = bytes([self._is_requested])
            by_rank = Exchange(communicator, word, capacity_bytes=1, device=device, label="stop").wait()
        return any(word != b"\0" for word in by_rank)
