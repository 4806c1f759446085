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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.buffer.bucket_group import LARGE_BYTES
from megabucket.config.resolve import StepPolicy
from megabucket.ddp.groups import RankGroups
from megabucket.errors import ConcurrentBackwardError, ConfigError, PhaseError, name_list

if TYPE_CHECKING:
    from megabucket.ddp.step import GradSync

GradHook = Callable[[torch.Tensor], None]


def register_hooks(
    module: torch.nn.Module, groups: Sequence[_ParamAndGradBucketGroup], sync: GradSync, on_load: Callable[[], None]
) -> tuple[list[RemovableHandle], Callable[..., Any]]:
    """Hook parameters and module of one wrapper. Return the hooks, and what calls the module when it is compiled.

    The hooks of the module also keep ``sync`` alive as long as the module: those of the parameters know it weakly.

    Args:
        on_load: called after a ``load_state_dict`` of the module or of any part of it.
    """
    handles: list[RemovableHandle] = [
        param.register_post_accumulate_grad_hook(hook)
        for group in groups
        for param, hook in zip(group.params, grad_hooks(sync, group), strict=True)
    ]
    watching, call_compiled = watch_forwards(module, sync)
    handles += watching
    submodules = set(module.modules())

    def note_load(loaded: torch.nn.Module, _: Any) -> None:
        if loaded in submodules:  # a deepcopy of the module shares the hook
            on_load()

    handles += [submodule.register_load_state_dict_post_hook(note_load) for submodule in submodules]
    return handles, call_compiled


def grad_hooks(sync: GradSync, group: _ParamAndGradBucketGroup) -> list[GradHook]:
    """Return the hook of each parameter of a bucket group.

    Parameters whose gradients are computed apart from backward have one that drops the dummy of Megatron's layers.

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

    def drop_dummy(param: torch.Tensor) -> None:
        if (sync := reference()) is not None:
            sync.drop_dummy(index, position_of[id(param)])

    hook_of_small = stage if streams is None else stage_on_stream
    hooks: list[GradHook] = [hook_of_small if param.nbytes <= LARGE_BYTES else receive for param in group.params]
    for position in group.delayed:
        hooks[position] = drop_dummy
    return hooks


def check_finish(params: Mapping[str, torch.Tensor], policy: StepPolicy, ranks: RankGroups) -> None:
    """Refuse to reduce gradients at the end of a backward where more is to come, or other ranks wait for what it returns.

    Raises:
        ConfigError: the config wants that.
    """
    if not policy.finishes_with_backward:
        return
    delayed = [name for name, param in params.items() if getattr(param, "skip_backward_post_hook", False)]
    why = f"gradients of {name_list(delayed)} may come after backward (skip_backward_post_hook=True)" if delayed else ""
    if not ranks.copies.keys().isdisjoint(("pp", "embd")):
        why = "an earlier pipeline stage waits for what backward of a later one returns"
    if why:
        raise ConfigError(
            f"{why}, but with finish='auto' and all-reduce backward waits for the gradient sync of all ranks. Set "
            "finish='explicit' and call ddp.finish_grad_sync() or finalize_grads() before the optimizer's step, or "
            "use_distributed_optimizer=True."
        )


def watch_forwards(module: torch.nn.Module, sync: GradSync) -> tuple[list[RemovableHandle], Callable[..., Any]]:
    """Tell ``sync`` about training forwards of ``module``: those in ``train()`` mode with gradients switched on.

    Hooks that ``torch.compile`` traces do nothing, so that the module may be one graph (``fullgraph=True``). The second result
    calls the module and does what the hooks would do, outside of the graph.
    """
    outside = _Outside()

    def counts(called: torch.nn.Module) -> bool:
        if torch.compiler.is_compiling() or outside.is_watching:
            return False
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

    handles = [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]
    return handles, outside.make_call(module, before, after)


@dataclasses.dataclass(slots=True)
class _Outside:
    """Calls a module that is compiled, and its hooks around it."""

    is_watching: bool = False
    """Whether hooks that run in spite of that do nothing."""

    def make_call(self, module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Callable[..., Any]:
        note_begin, note_end = torch.compiler.disable(before), torch.compiler.disable(after)

        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
        def call(*args: Any, **kwargs: Any) -> Any:
            note_begin(module, args)
            output, self.is_watching = None, True
            try:
                output = module(*args, **kwargs)
            finally:
                self.is_watching = False
                note_end(module, args, output)
            return output

        return call  # type: ignore[no-any-return]


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
        self.running: int | None = None
        """The id that autograd has given the backward that is running."""
        self.has_failed = False
        """Whether autograd has dropped it without an end."""
        self._thread = threading.current_thread()

    def open(self, follower: GradSync) -> None:
        """Begin to follow the backward that is running. ``follower`` is known weakly: autograd keeps callbacks in C++."""
        running = torch._C._current_graph_task_id()
        self._thread, self.has_failed = threading.current_thread(), False
        end = _EndOfBackward(self, running, weakref.ref(follower))
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self.running = running

    def is_gone(self) -> bool:
        """Whether the backward has failed and the step was not told: an interrupt or its thread kept the destructor from it."""
        return self.has_failed or (torch._C._current_graph_task_id() < 0 and threading.current_thread() is self._thread)

    def check_is_one(self, *, rank: int) -> None:
        """Refuse another backward than the one that is open.

        Threads tell nothing: torch runs all backwards of a device in one, and one backward through outputs on a device and on
        the host in two.

        Raises:
            ConcurrentBackwardError: it is another one.
        """
        if torch._C._current_graph_task_id() != self.running:
            thread = threading.current_thread()
            raise ConcurrentBackwardError(rank=rank, thread=thread.name, other_thread=self._thread.name)


@dataclasses.dataclass(slots=True, eq=False)
class _EndOfBackward:
    """What autograd calls at the end of one backward, or only drops."""

    watch: BackwardWatch
    backward: int
    follower: weakref.ref[GradSync]

    def __call__(self) -> None:
        follower = self.follower()
        if follower is not None and self.watch.running == self.backward:
            follower.end_backward()  # closes the watch: an interrupt before that leaves the rest to the destructor

    def __del__(self) -> None:
        follower = self.follower()
        if follower is not None and self.watch.running == self.backward:
            self.watch.has_failed = True
            # In a thread of autograd, which is one of a device and unknown to Python, the caller may have the exception already
            # and go on: the next call, in the caller's thread, tells the others. See docs/decisions/failed-backwards.md.
            if not isinstance(threading.current_thread(), threading._DummyThread):
                follower.abandon_backward()
