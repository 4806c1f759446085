"""Hooks of parameters and modules that notify the step of gradients, and of the start and end of forwards and backwards.

Hooks of the outputs detect the start of a backward. Reentrant activation checkpointing runs backwards inside the backward, and
the first parameter hook may fire in an inner one; the outputs of the module belong to the outer one.

Autograd runs the callbacks of a backward only if it succeeds, but always drops them, before its exception reaches the caller.
So a callback that is dropped without having run shows, at the earliest moment, that the backward has failed, but not why.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup, refuse_pickles
from megabucket.buffer.bucket_group import LARGE_BYTES
from megabucket.config.resolve import StepPolicy
from megabucket.ddp.groups import RankGroups
from megabucket.ddp.owners import OwnerGuard
from megabucket.errors import ConcurrentBackwardError, ConfigError, PhaseError, name_list

if TYPE_CHECKING:
    from megabucket.ddp.step import GradSync

GradHook = Callable[[torch.Tensor], None]

_EARLIER: Final = -1  # ids that no handle of a hook has
_NONE: Final = -2


class ModuleHook(functools.partial[None]):
    """A function as a hook of a module. A deepcopy of the module gets a function in its place that does nothing.

    So the copy is a plain module, of which a pickle needs only torch and the standard library.
    """

    __reduce_ex__ = refuse_pickles

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that ignores its arguments."""
        return nullcontext().__exit__


def register_hooks(
    module: torch.nn.Module,
    groups: Sequence[_ParamAndGradBucketGroup],
    sync: GradSync,
    owners: OwnerGuard,
    *,
    on_load: Callable[[], None],
    into: list[RemovableHandle],
) -> Callable[..., Any]:
    """Hook parameters and module of one wrapper. Return a function that calls the compiled module.

    The hooks of the module keep ``sync`` alive as long as the module; those of the parameters refer to it weakly.

    Args:
        on_load: called after a ``load_state_dict`` of the module or of any submodule.
        into: gets each handle as soon as there is one, so that all are there when an interrupt ends this.
    """
    for group in groups:
        hooks = zip(group.params, grad_hooks(sync, group), strict=True)
        into.extend(_register_last(param, hook) for param, hook in hooks)
    call_compiled = watch_forwards(module, sync, owners, into=into)
    submodules = set(module.modules())

    def note_load(loaded: torch.nn.Module, _: Any) -> None:
        if loaded in submodules:  # a shallow copy shares the hook
            on_load()

    into.extend(submodule.register_load_state_dict_post_hook(ModuleHook(note_load)) for submodule in submodules)
    return call_compiled


def grad_hooks(sync: GradSync, group: _ParamAndGradBucketGroup) -> list[GradHook]:
    """Return the hook of each parameter of a bucket group.

    For parameters whose gradients are computed outside backward it drops the dummy of Megatron's layers.

    The hooks refer to ``sync`` weakly, because the garbage collector sees no cycles through hooks of tensors. All parameters
    share a few functions, because thousands of functions would not stay in the cache.
    """
    # None of these refers to a parameter.
    reference, index, position_of = weakref.ref(sync), group.index, group.position_of
    streams = group.streams

    def receive(param: torch.Tensor) -> None:
        sync = reference()
        if sync is None:
            raise PhaseError(
                "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
                "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
            )
        try:
            position = position_of[id(param)]
        except KeyError:
            return  # the result of another hook, which autograd passes on and refuses afterwards
        sync.receive(index, position)

    stage = group.staging.make_hook(receive)

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


def backward_hooks_of(module: torch.nn.Module) -> list[Sized]:
    """Return the dicts that hold the backward hooks of a module, its submodules, and all modules of the process."""
    found: list[Sized] = [hooks for part in module.modules() for hooks in (part._backward_hooks, part._backward_pre_hooks)]
    # Of ``register_module_full_backward_hook``. Without these names its hooks would find staged gradients missing.
    names = ("_global_backward_hooks", "_global_backward_pre_hooks")
    return found + [getattr(torch.nn.modules.module, name, ()) for name in names]


def _register_last(param: torch.Tensor, hook: GradHook) -> RemovableHandle:
    """Register a post-accumulate hook that runs after all others, also after those that are registered later.

    So the others see the gradient in ``param.grad``, and the hook finds what they leave there.
    """
    hooks: Any = param._post_accumulate_grad_hooks
    if not isinstance(hooks, _PostHooks):
        hooks = param._post_accumulate_grad_hooks = _PostHooks(hooks)
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)
    hooks.last = handle.id
    return handle


class _PostHooks(OrderedDict[int, Any]):
    """The post-accumulate hooks of one parameter, by the id of their handles. The one of the wrapper stays last.

    Relies on this of torch: ``register_post_accumulate_grad_hook`` adds to the dict that it finds in
    ``param._post_accumulate_grad_hooks``, and autograd calls a copy of its values, in order. If that changed, hooks would run
    in the order of their registration.

    Args:
        earlier: the dict that this one replaces. Its hooks are called from there, because their handles remove them there.
    """

    __slots__ = ("last",)

    def __init__(self, earlier: dict[int, Any] | None = None) -> None:
        super().__init__()
        self.last = _NONE
        """Id of the wrapper's hook."""
        if not earlier:
            return

        def call_earlier(param: torch.Tensor) -> Any:
            for hook in tuple(earlier.values()):
                if (result := hook(param)) is not None:
                    return result  # torch refuses it
            if not earlier:
                param._post_accumulate_grad_hooks.pop(_EARLIER, None)  # all were removed
            return None

        self[_EARLIER] = call_earlier

    def __setitem__(self, key: int, hook: Any) -> None:
        """Add a hook before that of the wrapper."""
        super().__setitem__(key, hook)
        if self.last in self and key != self.last:
            super().__setitem__(self.last, self.pop(self.last))

    def __reduce__(self) -> Any:
        """Copy and pickle the hooks of others only: handles refer to this dict, and modules may hold handles."""
        others = [(key, hook) for key, hook in self.items() if key not in (self.last, _EARLIER)]
        return OrderedDict, (others,)


def check_finish(params: Mapping[str, torch.Tensor], policy: StepPolicy, ranks: RankGroups) -> None:
    """Refuse ``finish="auto"`` if gradients may come after backward, or if other ranks wait for the end of backward.

    Raises:
        ConfigError: it cannot work.
    """
    if not policy.finishes_with_backward:
        return
    delayed = [name for name, param in params.items() if getattr(param, "skip_backward_post_hook", False)]
    why = f"gradients of {name_list(delayed)} may come after backward (skip_backward_post_hook=True)" if delayed else ""
    if not ranks.copies.keys().isdisjoint(("pp", "embd")):
        why = "an earlier pipeline stage waits for the result of backward on a later one"
    if why:
        raise ConfigError(
            f"{why}, but with finish='auto' and all-reduce backward waits for the gradient sync of all ranks. Set "
            "finish='explicit' and call ddp.finish_grad_sync() or finalize_grads() before the optimizer's step, or "
            "use_distributed_optimizer=True."
        )


def watch_forwards(
    module: torch.nn.Module, sync: GradSync, owners: OwnerGuard, *, into: list[RemovableHandle]
) -> Callable[..., Any]:
    """Notify ``sync`` of training forwards of ``module``: those in ``train()`` mode with gradients enabled.

    Hooks that ``torch.compile`` traces do nothing, so that the module may be one graph (``fullgraph=True``). The result calls
    the module and runs the hooks outside the graph.
    """
    outside = _Outside()

    def counts(called: torch.nn.Module) -> bool:
        if torch.compiler.is_compiling() or outside.is_watching:
            return False
        # Ignore a shallow copy of the module, which shares these hooks, and a forward that activation checkpointing reruns in a
        # backward, which may even end in an exception of its own.
        return called is module and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0

    def before(called: torch.nn.Module, _: Any) -> None:
        if counts(called) and module.training:
            sync.begin_forward()
            owners.check_forward()

    def after(called: torch.nn.Module, _: Any, output: Any) -> None:
        if not counts(called):
            return
        error = sys.exc_info()[1]
        if error is not None and output is None:  # torch also calls this hook after an exception in forward
            if module.training:
                sync.fail("forward", error)
            return
        note_reached = sync.counters.reached_forward() if module.training else None
        if not _watch_outputs(output, sync, note_reached) and note_reached is not None:
            note_reached()  # no backward can start here

    into.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))
    into.append(module.register_forward_hook(ModuleHook(after), always_call=True))
    return outside.make_call(module, before, after)


@dataclasses.dataclass(slots=True)
class _Outside:
    """Calls a compiled module, with its hooks around the call."""

    is_watching: bool = False
    """Whether the module's own hooks do nothing."""

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
    """Hook the outputs, to detect a backward that reaches them; return whether there are any."""

    def on_grad(_: torch.Tensor) -> None:
        if note_reached is not None:
            note_reached()
        sync.begin_backward()

    num_watched = 0
    for leaf in _leaves(output):
        # A tensor without grad_fn (a parameter that is returned) outlives this forward and would accumulate hooks.
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(on_grad)
            num_watched += 1
    return num_watched > 0


def _leaves(output: Any) -> Iterator[Any]:
    """Yield the leaves of an output: through containers that torch knows and through dataclasses."""
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        else:
            yield leaf


def refuse_in_backward(operation: str) -> None:
    """Refuse an operation that needs all ranks inside a backward, in which each rank sends its buckets at its own pace.

    Raises:
        PhaseError: a backward is running in this thread. The error ends it, and the other ranks learn that.
    """
    if torch._C._current_graph_task_id() >= 0:
        raise PhaseError(
            f"{operation} was called inside a backward, by a hook or by a forward that activation checkpointing reruns. It "
            "needs all ranks, and they run their backwards at different paces. Call it when backward() has returned."
        )


class BackwardWatch:
    """Follows one backward at a time, including inner backwards of activation checkpointing."""

    def __init__(self) -> None:
        self.running: int | None = None
        """Autograd's id of the running backward."""
        self.has_failed = False
        """Whether autograd has dropped it before its end."""
        self._thread = threading.current_thread()

    def open(self, follower: GradSync) -> None:
        """Follow the running backward. ``follower`` is referenced weakly, because autograd keeps callbacks in C++."""
        running = torch._C._current_graph_task_id()
        self._thread, self.has_failed = threading.current_thread(), False
        end = _EndOfBackward(self, running, weakref.ref(follower))
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self.running = running

    def is_gone(self) -> bool:
        """Return whether the backward has failed without notice, because an interrupt or its thread prevented that."""
        return self.has_failed or (torch._C._current_graph_task_id() < 0 and threading.current_thread() is self._thread)

    def check_is_one(self, *, rank: int) -> None:
        """Refuse a backward other than the open one.

        Threads are no criterion: torch runs all backwards of a device in one thread, and one backward through outputs on a
        device and on the host in two.

        Raises:
            ConcurrentBackwardError: it is another one.
        """
        if torch._C._current_graph_task_id() != self.running:
            thread = threading.current_thread()
            raise ConcurrentBackwardError(rank=rank, thread=thread.name, other_thread=self._thread.name)


@dataclasses.dataclass(slots=True, eq=False)
class _EndOfBackward:
    """A callback that autograd calls at the end of a successful backward, and drops in any case."""

    watch: BackwardWatch
    backward: int
    follower: weakref.ref[GradSync]

    def __call__(self) -> None:
        follower = self.follower()
        if follower is not None and self.watch.running == self.backward:
            follower.end_backward()  # ends the watch; after an interrupt before that, the destructor acts

    def __del__(self) -> None:
        follower = self.follower()
        if follower is not None and self.watch.running == self.backward:
            self.watch.has_failed = True
            # In a device thread of autograd, unknown to Python, the caller may already have the exception and go on: its next
            # call notifies the other ranks. See docs/decisions/agreement.md.
            if not isinstance(threading.current_thread(), threading._DummyThread):
                follower.abandon_backward()
