"""Hooks of parameters and modules that notify the step of gradients, and of the start and end of forwards and backwards.

What hooks need of the step is ``HookedStep``. Hooks that torch keeps once for a whole process serve all wrappers.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import nullcontext
from typing import Any, Final, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup, refuse_pickles
from megabucket.buffer.bucket_group import LARGE_BYTES
from megabucket.ddp.report import StepCounters
from megabucket.errors import PhaseError

GradHook = Callable[[torch.Tensor], None]

_Method = Callable[..., Any]

_EARLIER: Final = -1  # ids that no handle of a hook has
_NONE: Final = -2


class HookedStep(Protocol):
    """The step of one wrapper, as hooks see it."""

    counters: StepCounters

    def begin_forward(self) -> None:
        """Note that a training forward begins."""

    def begin_backward(self) -> None:
        """Note that a backward has reached an output of the module."""

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter, by its bucket group and its position there."""

    def drop_dummy(self, index: int, position: int) -> None:
        """Drop what autograd has for a parameter whose gradient is computed outside backward."""

    def fail(self, phase: str, error: BaseException) -> None:
        """Give up the step on this rank."""


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
    sync: HookedStep,
    *,
    check_forward: Callable[[], None],
    on_load: Callable[[], None],
    into: list[RemovableHandle],
) -> Callable[..., Any]:
    """Hook parameters and module of one wrapper. Return a function that calls the compiled module.

    The hooks of the module keep ``sync`` alive as long as the module; those of the parameters refer to it weakly.

    Args:
        check_forward: called at the start of each training forward; may refuse it.
        on_load: called after a ``load_state_dict`` of the module or of any submodule.
        into: gets each handle as soon as there is one, so that all are there when an interrupt ends this.
    """
    for group in groups:
        hooks = zip(group.params, grad_hooks(sync, group), strict=True)
        into.extend(_register_last(param, hook) for param, hook in hooks)
    call_compiled = watch_forwards(module, sync, check_forward, into=into)
    submodules = set(module.modules())

    def note_load(loaded: torch.nn.Module, _: Any) -> None:
        if loaded in submodules:  # a shallow copy shares the hook
            on_load()

    into.extend(submodule.register_load_state_dict_post_hook(ModuleHook(note_load)) for submodule in submodules)
    return call_compiled


def grad_hooks(sync: HookedStep, group: _ParamAndGradBucketGroup) -> list[GradHook]:
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


def watch_forwards(
    module: torch.nn.Module, sync: HookedStep, check_forward: Callable[[], None], *, into: list[RemovableHandle]
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
            check_forward()

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


def _watch_outputs(output: Any, sync: HookedStep, note_reached: Callable[[], None] | None) -> bool:
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


# Hooks for all modules and optimizers of the process #


class _SharedHook:
    """A hook in one of torch's process-wide lists that serves all guards.

    Torch iterates over that list when it calls the hooks, and raises if it changes meanwhile. But wrappers are made, detached
    and collected at any time, also in other threads, so this hook stays and has its own list. Its references to the guards are
    weak, so it keeps no model alive.
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[_Method], ...] = ()
        self._changing = threading.Lock()

    def add(self, method: _Method) -> None:
        with self._changing:
            self._methods = (*(known for known in self._methods if known() is not None), weakref.WeakMethod(method))

    def __call__(self, first: Any, *args: Any) -> Any:
        """Call all guards. What one returns takes the place of ``args``, for the others and for torch."""
        replaced = None
        for known in self._methods:
            method = known()
            if method is not None and (result := method(first, *args)) is not None:
                args = replaced = result
        return replaced


def shared_hook_in(hooks: dict[int, Any], register: Callable[[Any], RemovableHandle]) -> _SharedHook:
    """Return our hook in one of torch's lists; the first guard of the process adds it."""
    # dict.copy is atomic, unlike iteration over an OrderedDict: another thread may register a hook meanwhile.
    for hook in dict.copy(hooks).values():
        if isinstance(hook, _SharedHook):
            return hook
    hook = _SharedHook()
    register(hook)
    return hook
