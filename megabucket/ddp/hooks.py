"""The hooks through which autograd and the module tell the step: a gradient has come, a forward or backward begins or ends.

The output hooks tell where a backward begins. Reentrant activation checkpointing runs backwards inside the backward, and the
first parameter hook may well fire in an inner one, whose end is not the end; the outputs of the module belong to the outer one.

Autograd runs the callbacks of a backward only when it succeeds, but drops them in any case, and before its exception reaches
the caller. So a callback that is dropped without having run tells, at the earliest moment, that the backward has failed.
Autograd does not say why; the caller's traceback does.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.buffer.bucket_group import LARGE_BYTES
from megabucket.errors import ConcurrentBackwardError, PhaseError

if TYPE_CHECKING:
    from megabucket.ddp.step import GradSync

GradHook = Callable[[torch.Tensor], None]


def register_hooks(
    module: torch.nn.Module, groups: Sequence[_ParamAndGradBucketGroup], sync: GradSync, on_load: Callable[[], None]
) -> list[RemovableHandle]:
    """Hook parameters and module of one wrapper.

    The hooks of the module also keep ``sync`` alive as long as the module: those of the parameters know it weakly.

    Args:
        on_load: called after a ``load_state_dict`` of the module or of any part of it.
    """
    handles: list[RemovableHandle] = [
        param.register_post_accumulate_grad_hook(hook)
        for group in groups
        for param, hook in zip(group.params, grad_hooks(sync, group), strict=True)
    ]
    handles += watch_forwards(module, sync)
    submodules = set(module.modules())

    def note_load(loaded: torch.nn.Module, _: Any) -> None:
        if loaded in submodules:  # a deepcopy of the module shares the hook
            on_load()

    handles += [submodule.register_load_state_dict_post_hook(note_load) for submodule in submodules]
    return handles


def grad_hooks(sync: GradSync, group: _ParamAndGradBucketGroup) -> list[GradHook]:
    """Return the hook of each parameter of a bucket group.

    They know ``sync`` weakly: Python's garbage collector does not see cycles through hooks of tensors. And they are the same
    few functions for all parameters, not one for each: thousands of functions do not stay in the cache.
    """
    # None of them leads to a parameter.
    reference, index, position_of = weakref.ref(sync), group.index, group.position_of
    staging, streams = group.staging, group.streams

    def receive(param: torch.Tensor) -> None:
        sync = reference()
        if sync is None:
            raise PhaseError(
                "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
                "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
            )
        sync.receive(index, position_of[id(param)])

    def stage(param: torch.Tensor) -> None:
        # All that most small gradients cost in Python, so not a call more.
        if len(staging) < staging.room and not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            staging.append(param)
            staging.grads.append(param.grad)  # type: ignore[arg-type]
            param.grad = None
        else:
            receive(param)

    def stage_on_stream(param: torch.Tensor) -> None:
        if streams is not None and streams.is_here():
            stage(param)
        else:
            receive(param)

    hook_of_small = stage if streams is None else stage_on_stream
    return [hook_of_small if param.nbytes <= LARGE_BYTES else receive for param in group.params]


def watch_forwards(module: torch.nn.Module, sync: GradSync) -> list[RemovableHandle]:
    """Tell ``sync`` about training forwards of ``module``: those in ``train()`` mode with gradients switched on."""

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
        note_reached = sync.counters.reached_forward() if module.training else None
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


class BackwardWatch:
    """Follows one backward at a time. Those that activation checkpointing runs inside another one belong to it."""

    def __init__(self) -> None:
        self.running: object | None = None
        """Stands for the backward that is running."""
        self._task_id = -1
        self._thread = threading.current_thread()

    def open(self, follower: GradSync) -> None:
        """Begin to follow the backward that is running. ``follower`` is known weakly: autograd keeps callbacks in C++."""
        self._task_id = torch._C._current_graph_task_id()
        self._thread = threading.current_thread()
        running = object()
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self, running, follower))
        self.running = running

    def is_gone(self) -> bool:
        """Whether the backward has ended without a word: an interrupt met the destructor that should have said so."""
        return torch._C._current_graph_task_id() < 0 and threading.current_thread() is self._thread

    def check_is_one(self, *, rank: int) -> None:
        """Refuse another backward than the one that is open.

        Threads tell nothing: torch runs all backwards of a device in one, and one backward through outputs on a device and on
        the host in two.

        Raises:
            ConcurrentBackwardError: it is another one.
        """
        if torch._C._current_graph_task_id() != self._task_id:
            thread = threading.current_thread()
            raise ConcurrentBackwardError(rank=rank, thread=thread.name, other_thread=self._thread.name)


class _EndOfBackward:
    __slots__ = ("_backward", "_follower", "_watch")

    def __init__(self, watch: BackwardWatch, backward: object, follower: GradSync) -> None:
        self._watch, self._backward = watch, backward
        self._follower = weakref.ref(follower)

    def __call__(self) -> None:
        follower = self._follower()
        if follower is not None and self._watch.running is self._backward:
            follower.end_backward()  # closes the watch: an interrupt before that leaves the rest to the destructor

    def __del__(self) -> None:
        follower = self._follower()
        if follower is not None and self._watch.running is self._backward:
            follower.abandon_backward()
