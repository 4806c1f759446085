"""``PipelineStage``: the stage of ``torch.distributed.pipelining`` for a module that megabucket has wrapped.

torch's stage knows its own wrappers by their class. This one runs every backward of a schedule under ``no_sync()``, takes the
gradients that zero-bubble schedules assign outside autograd, and launches the reduction where the schedule says that the last
backward of the stage is over. The reduction then runs beside the rest of the schedule. Docs: ``docs/pipelining.md``.

The ranks of a pipeline wait for each other in torch's sends and receives, which nothing ends when a rank fails. So a stage that
fails keeps its place in the schedule: its outputs and gradients are nan until the end of the step, where the error is raised.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage as _TorchStage
from torch.utils._pytree import tree_map_only

from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.groups import DENSE
from megabucket.ddp.step import FAILED, StepState
from megabucket.errors import ConfigError, MegabucketError, log_once


class PipelineStage(_TorchStage):
    """torch's ``PipelineStage`` around a ``DistributedDataParallel`` of megabucket, for any schedule of torch.

    ``scale_grads`` of the schedule divides the gradients before they are reduced. The gradients of several calls of
    ``schedule.step()`` accumulate if all calls but the last are made under ``no_sync()`` of the wrapper. An exception in a
    forward or backward is logged on its rank, which goes on to the end of the schedule with nan. It then ends the step with the
    same error on all ranks of the wrapper's ``step_group``, as soon as they call the optimizer or ``finalize_grads``.

    Args:
        submodule: the wrapped part of the model.
        *args: those of torch's stage.
        **kwargs: those of torch's stage.

    Raises:
        ConfigError: the module is not wrapped, or the gradient sync of a stage would wait for other stages.
    """

    submod: DistributedDataParallel
    _outputs: Any = None
    """Tensors on the meta device like the outputs; ``None`` until they are known."""

    def __init__(self, submodule: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if not isinstance(submodule, DistributedDataParallel):
            raise ConfigError(
                f"PipelineStage() got a {type(submodule).__name__} that megabucket has not wrapped: nothing would reduce its "
                "gradients. Pass mb.DistributedDataParallel(part, ...), or use torch's PipelineStage."
            )
        num_alike = math.prod(one.size for one in submodule.ranks.by_name[DENSE].communicators)
        if submodule.policy.finishes_with_backward and submodule.communicator.size > num_alike:
            raise ConfigError(
                f"{submodule.communicator.size} ranks agree on the steps of a stage that {num_alike} ranks hold, and with "
                "finish='auto' it would wait for the other stages inside the schedule, which wait for it. Set "
                "finish='explicit' in the config and call mb.finalize_grads() after schedule.step()."
            )
        super().__init__(submodule, *args, **kwargs)
        self._note_outputs(kwargs.get("output_args"))
        if submodule.policy.is_sharded and submodule.ranks.norm is None and self.num_stages > 1:
            log_once(
                "a pipeline stage was wrapped without norm_group=: its gradient norm, and what is clipped by it, is that of "
                "the stage alone. Pass groups=mb.ParallelGroups({'dense': dp}, step_group=world, norm_group=world)."
            )

    @property
    def _has_failed(self) -> bool:
        return self.submod.sync.state in FAILED

    def _run(self, phase: str, function: Callable[[], Any], *, instead: Callable[[], Any], can_go_on: bool = True) -> Any:
        """Call a function, or ``instead`` from the first exception of a step on."""
        if not self._has_failed:
            try:
                with self.submod.sync.noting(phase):
                    return function()
            except Exception:
                if not can_go_on:
                    raise
                text = "megabucket: pipeline stage %d failed in %s. It goes on with nan, and the step ends with an error."
                logging.getLogger("megabucket").exception(text, self.stage_index, phase)
        return instead()

    def reporting(self, loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return ``loss_fn`` for the schedule, so that an exception in it is handled as one in forward."""

        def loss_or_nan(*args: Any, **kwargs: Any) -> Any:
            if not self.has_backward:
                return loss_fn(*args, **kwargs)
            return self._run("forward", lambda: loss_fn(*args, **kwargs), instead=self._nan_loss)

        return loss_or_nan

    def _nan_loss(self) -> torch.Tensor:
        return torch.full((), torch.nan, dtype=torch.float32, device=self.device, requires_grad=True)

    def _nan_outputs(self) -> Any:
        return tree_map_only(
            torch.Tensor, lambda one: self._nan_like(one).requires_grad_(one.is_floating_point()), self._outputs
        )

    def _nan_like(self, example: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(example, device=self.device, requires_grad=False)
        return made.fill_(torch.nan if made.is_floating_point() else 0)

    # What torch's stage calls #

    def _compute_outputs(self, *args: Any, module: torch.nn.Module, **kwargs: Any) -> Any:
        """Run the forward from which torch infers shapes. It is part of no step: hooks ignore a shallow copy of the module."""
        return self._note_outputs(copy.copy(self.submod.module)(*args, **kwargs))

    def _configure_outputs_meta(self, outputs_meta: tuple[torch.Tensor, ...]) -> None:
        """Note the outputs that torch 2.11 has inferred, which calls no ``_compute_outputs``."""
        super()._configure_outputs_meta(outputs_meta)  # type: ignore[misc]
        self._note_outputs(outputs_meta)

    def _note_outputs(self, outputs: Any) -> Any:
        if self._outputs is None:
            self._outputs = tree_map_only(torch.Tensor, lambda one: one.detach().to("meta"), outputs)
        return outputs

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward. Without a backward it is part of no step."""
        if not self.has_backward:
            with torch.no_grad():
                return self.submod(*args, **kwargs)
        return self._run(
            "forward",
            lambda: self._note_outputs(self.submod(*args, **kwargs)),
            instead=self._nan_outputs,
            can_go_on=self._outputs is not None,
        )

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run one backward, or the part of it that the schedule asks for, without a reduction."""

        def run() -> Any:
            with self.submod.no_sync():
                result = super(PipelineStage, self).backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                self.submod.sync.take_assigned()
            return result

        def nan_grads() -> Any:
            inputs = bwd_kwargs.get("input_values", ())
            return tuple(self._nan_like(one) if _needs_grad(one) else None for one in inputs), []

        return self._run("backward", run, instead=nan_grads)  # type: ignore[no-any-return]

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients, which no collective owns yet."""
        self.submod.scale_gradients(1.0 / grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Launch the reduction; with ``finish="auto"`` and all-reduce, wait for it as well."""
        ddp = self.submod
        if ddp.sync.only_accumulates or not self.has_backward:
            return
        if ddp.sync.state is StepState.GIVING_UP:
            ddp.sync.send_failure(is_over=False)  # the buckets, where the other ranks send theirs
        elif ddp.sync.state is not StepState.BROKEN:
            if grad_scale_factor != 1:
                self.scale_grads(grad_scale_factor)
            ddp.start_grad_sync()
        if ddp.policy.finishes_with_backward:
            # The optimizer's step refuses a step that was dropped. Until then other ranks wait for the rest of the schedule.
            with suppress(MegabucketError):
                ddp.finish_grad_sync()


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
