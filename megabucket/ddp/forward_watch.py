"""Follows the forwards of the wrapped module: when one fails, when a backward reaches its outputs, when none ever does.

Reentrant activation checkpointing runs backwards inside the backward, and the first parameter hook may well fire in an inner
one, whose end is not the end. The outputs of the module belong to the outer one, so they tell where it begins.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megabucket.ddp.grad_sync import GradSync


def watch_forwards(module: torch.nn.Module, sync: GradSync) -> list[RemovableHandle]:
    """Tell ``sync`` about training forwards of ``module``: those in ``train()`` mode with gradients switched on.

    The hooks also keep ``sync`` alive as long as the module: the hooks of the parameters know it weakly.
    """

    def counts(called: torch.nn.Module) -> bool:
        # A deepcopy of the module shares these hooks, and its training is none of our business. Neither is a forward that
        # activation checkpointing runs again inside a backward, which may even end in an exception of its own.
        return called is module and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0

    def before(called: torch.nn.Module, _: Any) -> None:
        if counts(called) and module.training:
            sync.begin_forward()

    def after(called: torch.nn.Module, _: Any, output: Any) -> None:
        if not counts(called):
            return
        error = sys.exc_info()[1]
        if error is not None and output is None:  # torch calls this hook also when forward has raised
            if module.training:
                sync.fail("forward", error)
            return
        note_reached = sync.tally.reached_forward() if module.training else None
        if not _watch_outputs(output, sync, note_reached) and note_reached is not None:
            note_reached()  # nothing that a backward could start from

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]


def _watch_outputs(output: Any, sync: GradSync, note_reached: Callable[[], None] | None) -> bool:
    """Let the outputs say when a backward reaches them; return whether there is any that can."""

    def on_grad(_: torch.Tensor) -> None:
        if note_reached is not None:
            note_reached()
        sync.begin_backward()

    num_watched = 0
    for leaf in _leaves(output):
        # A tensor without grad_fn (a parameter passed through) outlives this forward and would collect hooks.
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(on_grad)
            num_watched += 1
    return num_watched > 0


def _leaves(output: Any) -> Iterator[Any]:
    """Return what a forward returned, piece by piece: through containers torch knows and through dataclasses."""
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        else:
            yield leaf
