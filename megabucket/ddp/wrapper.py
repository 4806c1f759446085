"""``DistributedDataParallel``: a module whose parameters and gradients live in buffers that are reduced while backward runs.

Puts the parts together: discovery -> layout -> buffers -> bucket groups -> hooks. Holds no rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import GradSyncPolicy, ParamAndGradBuffer, _ParamAndGradBucketGroup
from megabucket.comm import Broadcast, Communicator, ReduceOp, discover_communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.agreement import agree, agree_on_model
from megabucket.ddp.discovery import DiscoveredParams
from megabucket.ddp.forward_watch import watch_forwards
from megabucket.ddp.grad_sync import GradSync
from megabucket.ddp.guard import PlainOptimizerGuard
from megabucket.ddp.model_watch import ModelWatch
from megabucket.ddp.param_gather import ParamGather
from megabucket.errors import ConfigError, MegabucketError, PhaseError
from megabucket.layout import ModelLayout, launch_order
from megabucket.trace.recorder import Recorder


class DistributedDataParallel(torch.nn.Module):
    """Wrap a module for data-parallel training through buffers and buckets.

    Wrapping moves the trainable parameters into contiguous buffers (values, shapes and memory order stay), makes the replicas
    equal by a broadcast from the first rank, and hooks backward. ``param.main_grad`` is the gradient's place in the buffer;
    ``param.grad`` is the same view whenever it holds something a plain torch user may read. Frozen parameters stay where
    they are. Module buffers (running statistics) are made equal once, when wrapping.

    Args:
        module: on its final device and in its final dtypes.
        config: the defaults all-reduce with overlap.
        process_group: the ranks to reduce with; the default group when not given, or this process alone when
            ``torch.distributed`` is not initialized.
        recorder: receives collectives and intervals, for traces and tests.
        communicator: an implementation of the port to use instead of a process group, for instance of a ``LoopbackWorld``.

    Raises:
        NoTrainableParametersError: nothing requires a gradient.
        UnsupportedParameterError: a trainable parameter cannot live in a buffer; the text says which and why.
        AlreadyWrappedError: another wrapper holds some of the parameters.
        LayoutMismatchError: the ranks do not wrap the same module with the same config and versions.
        PeerFailedError: another rank could not wrap its module.
        ProcessGroupMissingError: several processes were launched, but they have no process group.
        ConfigError: the config cannot be honoured for this module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: DistributedDataParallelConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        recorder: Recorder | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, DistributedDataParallelConfig | None):
            raise ConfigError(
                f"config must be a DistributedDataParallelConfig, got a {type(config).__name__}; "
                "DistributedDataParallelConfig(**fields) makes one of a dict"
            )
        self.ddp_config = config if config is not None else DistributedDataParallelConfig()
        if communicator is not None and (process_group is not None or recorder is not None):
            raise ConfigError("communicator= brings its own ranks and recorder; drop process_group= and recorder=")
        self._is_attached = True
        self.communicator = communicator or discover_communicator(process_group, recorder)
        found, self.layout = agree_on_model(module, self.ddp_config, self.communicator)
        self.param_names = {param: name for name, param in found.trainable.items()}
        self.module = module
        self.param_and_grad_buffers = _attach(self.layout, found, self.communicator)
        self.bucket_groups = self._make_groups()
        watch = ModelWatch(module, found.trainable, self.bucket_groups) if self.ddp_config.check_model_changes else None
        self._sync = GradSync(self.bucket_groups, self.ddp_config, watch)
        self._gather = ParamGather(self.bucket_groups, module, overlaps=self.ddp_config.overlap_param_gather)
        self._guard = PlainOptimizerGuard(
            found.trainable,
            self._sync,
            reduce_scatters=self.ddp_config.use_distributed_optimizer,
            rank=self.communicator.rank,
        )
        self.num_value_changes = 0
        """How often parameter values were loaded or broadcast. Optimizers with main parameters of their own compare it."""
        self._handles = self._register_hooks()
        self.register_load_state_dict_pre_hook(_restore_prefix)  # type: ignore[no-untyped-call]
        if self.ddp_config.init_sync:
            try:
                self.broadcast_params()
            except BaseException:
                self.detach()  # a module that could not be wrapped is as it was
                raise

    def _make_groups(self) -> list[_ParamAndGradBucketGroup]:
        config = self.ddp_config
        policy = GradSyncPolicy(
            reduce_scatters=config.use_distributed_optimizer,
            op=ReduceOp.AVG if config.average_in_collective else ReduceOp.SUM,
            average=config.grad_reduction == "mean",
            tests_finite=config.nonfinite_gradients != "allow",
        )
        buckets = [self.param_and_grad_buffers[i].buckets[j] for i, j in launch_order(self.layout)]
        batches = [buckets] if config.bucket_groups == "single" else [[bucket] for bucket in buckets]
        return [
            _ParamAndGradBucketGroup(batch, index=index, num_groups=len(batches), communicator=self.communicator, policy=policy)
            for index, batch in enumerate(batches)
        ]

    def _register_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = [
            slot.param.register_post_accumulate_grad_hook(self._sync.hook(group, position))
            for group in self.bucket_groups
            for position, slot in enumerate(group.slots)
        ]
        handles += watch_forwards(self.module, self._sync)
        # These hooks also keep this wrapper alive as long as the module: the hooks of the parameters know it weakly.
        submodules = set(self.module.modules())

        def note_load(loaded: torch.nn.Module, _: Any) -> None:
            if loaded in submodules:  # a deepcopy of the module shares the hook
                self.num_value_changes += 1

        handles += [submodule.register_load_state_dict_post_hook(note_load) for submodule in submodules]
        return handles

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module. Calling ``ddp.module`` directly trains just as well: all hooks sit inside."""
        return self.module(*args, **kwargs)

    # Gradients #

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward only accumulates: for all but the last microbatch of a step.

        What counts is where backward runs, not forward. Contexts may be nested.
        """
        return self._sync.no_sync()

    def start_grad_sync(self) -> None:
        """Launch the reduction of every bucket that was not launched yet, and return without waiting."""
        self._sync.start()

    def finish_grad_sync(self, *, force_all_reduce: bool = False) -> None:
        """Leave reduced gradients behind: launch what was not launched, wait for all. A second call does nothing.

        Gradients that the caller wrote into ``main_grad`` without a backward are reduced as they are, if ``zero_grad_buffer``
        (not ``zero_grad``) has prepared the place for them.

        Args:
            force_all_reduce: all-reduce what is launched here, although the distributed optimizer is on. Set the attribute
                ``force_all_reduce`` before backward to reach what backward launches, too.

        Raises:
            UnusedParameterError: a parameter had no gradient in the whole step (``unused_parameters="error"``).
        """
        before = self._sync.force_all_reduce
        self._sync.force_all_reduce = before or force_all_reduce
        try:
            self._sync.finish()
        finally:
            self._sync.force_all_reduce = before

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step (forward, backward, optimizer), in which every fault ends alike on all ranks.

        Without it, too, an exception on one rank ends the step on all ranks; but that rank sees its own exception, and the
        others cannot be told the text of one that was raised in backward. Inside, all ranks raise the same ``PeerFailedError``.

        Raises:
            MegabucketError: the error all ranks agreed on.
        """
        return self._sync.guarded_step()

    def abort_step(self, reason: str) -> None:
        """Give up this step on this rank, for instance because its batch is of no use. All ranks drop the step.

        Returns at once; the others raise ``PeerFailedError`` with the reason when they come to the end of the step. This rank
        goes on with the next step.
        """
        self._sync.fail("abort_step()", reason)

    @property
    def step_number(self) -> int | None:
        """The caller's own number of the step, compared across ranks at the end of each; ``None`` when it gives none."""
        number = self._sync.tally.step_number
        return None if number < 0 else number

    @step_number.setter
    def step_number(self, number: int | None) -> None:
        if number is not None and (isinstance(number, bool) or not 0 <= number < 2**62):
            raise ConfigError(f"step_number must be None or an integer from 0 to 2**62, got {number!r}")
        self._sync.tally.step_number = -1 if number is None else number

    @property
    def last_error(self) -> MegabucketError | None:
        """The error all ranks agreed on for the last step that was dropped; the same text on every rank."""
        self._sync.settle()
        return self._sync.last_error

    @property
    def force_all_reduce(self) -> bool:
        """Whether gradients are all-reduced although the distributed optimizer is on."""
        return self._sync.force_all_reduce

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self._sync.force_all_reduce = value

    @property
    def sync(self) -> GradSync:
        """The state of the gradient sync, for optimizers."""
        return self._sync

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients in place, for instance by one over the number of tokens of the global batch.

        Raises:
            PhaseError: a collective owns some of them.
        """
        self._sync.check_not_in_flight("scale_gradients()")
        for buffer in self.param_and_grad_buffers:
            # Not the whole buffer: infinity (one over no tokens) would make NaN of the zeros between parameters, for good.
            torch._foreach_mul_([slot.view for slot in buffer.slots.values()], factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. The next ones overwrite them, so nothing is zeroed unless ``set_to_none`` is false."""
        self._sync.reset()
        if not set_to_none:
            self.zero_grad_buffer()

    def zero_grad_buffer(self) -> None:
        """Fill the gradient buffers with zeros now, and forget all gradients. ``zero_grad`` does less and is enough."""
        self._sync.reset()
        for buffer in self.param_and_grad_buffers:
            buffer.zero_grads()

    # Parameters #

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Gather updated parameters from the ranks that own them, the first layers first.

        Returns at once with ``overlap_param_gather=True``: forward then waits for each bucket where it is needed. Does
        nothing without the distributed optimizer.

        Args:
            force_sync: wait in any case.
        """
        if self.ddp_config.use_distributed_optimizer:
            self._gather.start()
            if force_sync or not self.ddp_config.overlap_param_gather:
                self._gather.finish()

    def finish_param_sync(self) -> None:
        """Return when every parameter may be read."""
        self._gather.finish()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Copy parameters (frozen ones too) and module buffers of the group's first rank to all ranks.

        What has no values (meta) is left out.

        Raises:
            ConfigError: a frozen parameter or module buffer is sparse.
        """
        self.finish_param_sync()
        if self.communicator.size > 1:
            for tensor in [*(buffer.param_data for buffer in self.param_and_grad_buffers), *self._unbuffered_state()]:
                dense = tensor if tensor.is_contiguous() else tensor.contiguous()
                self.communicator.launch([Broadcast(dense)], label="initial broadcast").wait()
                if dense is not tensor:
                    tensor.copy_(dense)
        self.num_value_changes += 1

    def _unbuffered_state(self) -> Iterator[torch.Tensor]:
        frozen = [(name, param) for name, param in self.module.named_parameters() if param not in self.param_names]
        for name, tensor in [*frozen, *self.module.named_buffers()]:
            if tensor.layout is not torch.strided:
                raise ConfigError(
                    f"init_sync=True cannot make {name!r} equal on all ranks, because it is sparse ({tensor.layout}). Make it "
                    "equal yourself and pass init_sync=False, or use a dense tensor."
                )
            if not tensor.is_meta:
                # Of an expanded dimension one element is all there is; torch refuses to write through the expanded view.
                yield tensor.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]

    # The wrapper as a module #

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's ``state_dict``, with its own names and complete on every rank."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the wrapped module. Values are copied into the buffers, so ``assign`` is refused.

        Raises:
            PhaseError: ``assign=True``, which would replace the parameters that live in the buffers.
        """
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def detach(self) -> torch.nn.Module:
        """Undo the wrapping: give the parameters storages of their own, remove all hooks, and return the module.

        Gradients are dropped, and optimizers over the buffers' shards no longer reach the module. A second call does nothing.
        """
        if not self._is_attached:
            return self.module
        self._is_attached = False
        try:
            self._sync.reset()
            self.finish_param_sync()
        finally:  # a lost peer is no reason to keep the module
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._gather.remove()
            self._guard.remove()
            for group in self.bucket_groups:
                group.show_params()
            for buffer in self.param_and_grad_buffers:
                buffer.detach()
        return self.module

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(
            "a wrapper cannot be copied or pickled: a copy would have neither the hooks nor the buffers, and its gradients "
            "would never be reduced. Save ddp.state_dict(), or copy the inner module: copy.deepcopy(ddp.module) is a plain one."
        )


def _attach(layout: ModelLayout, found: DiscoveredParams, communicator: Communicator) -> list[ParamAndGradBuffer]:
    """Move the parameters into buffers, on all ranks or on none."""
    buffers: list[ParamAndGradBuffer] = []
    failure = None
    try:
        try:
            buffers.extend(ParamAndGradBuffer(buffer, found.trainable) for buffer in layout.buffers)
        except Exception as error:
            failure = error
        device = next(iter(found.trainable.values())).device
        agree(communicator, [], failure=failure, device=device, label="wrap: buffers")
    except BaseException:
        for buffer in buffers:
            buffer.detach()
        raise
    return buffers


def _restore_prefix(_: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """Let an outer module that contains the wrapper load what its ``state_dict`` gave: names without ``module.``."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
