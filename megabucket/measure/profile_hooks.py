"""Hooks that note when a model needs its parameters and when its gradients are ready.

On a GPU a moment is an event in the device's queue, so nothing waits, and moments are read when profiling is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megabucket.comm import Accelerator
from megabucket.measure.profile_steps import Step, StepNotes
from megabucket.trace.clock import HostClock


class ProfileHooks:
    """The hooks on one model, from construction to ``remove``.

    Args:
        module: the model itself, not a wrapper around it.
        params: its trainable parameters by name, in registration order.
        counts_optimizer: whether a step of this torch optimizer belongs to the model.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        params: Mapping[str, torch.nn.Parameter],
        *,
        counts_optimizer: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        device = next(iter(params.values())).device
        self._accelerator = Accelerator.of(device)
        self.notes = StepNotes(HostClock() if self._accelerator is None else self._accelerator.clock())
        self._module = module
        self._counts_optimizer = counts_optimizer
        self._in_forward = False
        self._owners = _owners(module, params)
        self.module_params: list[tuple[int, ...]] = []
        """By module index: what it needs, as indices into ``params``. Filled once it is known what is called."""
        self._called: set[torch.nn.Module] = set()
        self._has_run = self._is_learned = False
        self._handles = self._register(params)

    def steps(self) -> list[Step]:
        """Return what was noted. On a device this waits for it."""
        if self._accelerator is not None:
            self._accelerator.synchronize()
        return self.notes.steps()

    def remove(self) -> None:
        """Take all hooks off. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _register(self, params: Mapping[str, torch.nn.Parameter]) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
            self._module.register_forward_pre_hook(self._before_model, prepend=True),
            self._module.register_forward_hook(self._after_model, always_call=True),
        ]
        handles += [
            param.register_post_accumulate_grad_hook(lambda _, index=index: self.notes.ready(index))
            for index, param in enumerate(params.values())
        ]
        self._learning = [
            submodule.register_forward_pre_hook(self._note_called, prepend=True) for submodule in self._module.modules()
        ]
        return handles + self._learning

    def _need_hook(self, index: int) -> Callable[..., None]:
        def on_need(*_: Any) -> None:
            # Not what activation checkpointing runs again inside a backward; its time belongs to the gradient after it.
            if (self._in_forward or torch.is_grad_enabled()) and torch._C._current_graph_task_id() < 0:
                self.notes.need(index)

        return on_need

    # The model #

    def _before_model(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        if self._has_run:
            self.learn()
        self._in_forward = True
        self.notes.forward()

    def _after_model(self, *_: Any) -> None:
        if self._in_forward:
            self._in_forward, self._has_run = False, True
            self.notes.forward_end()

    # Which modules need which parameters #

    def _note_called(self, called: torch.nn.Module, *_: Any) -> None:
        self._called.add(called)

    def learn(self) -> None:
        """Watch the modules that own parameters, or, where one is never called, the nearest one around it that is.

        Due once, after the first forward, or after the first step where the model itself is never called.
        """
        if self._is_learned or not self._called:
            return
        self._is_learned = True
        for handle in self._learning:
            handle.remove()
        needs: dict[torch.nn.Module, list[int]] = {}
        for index, paths in enumerate(self._owners):
            for path in paths:
                module = next((module for module in path if module in self._called), self._module)
                needs.setdefault(module, []).append(index)
        for index, (module, params) in enumerate(needs.items()):
            self.module_params.append(tuple(dict.fromkeys(params)))
            self._handles.append(module.register_forward_pre_hook(self._need_hook(index), prepend=True))

    # The optimizer #

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._counts_optimizer(optimizer):
            self.learn()
            self.notes.begin_optimizer()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._counts_optimizer(optimizer):
            self.notes.end_optimizer()


def _owners(module: torch.nn.Module, params: Mapping[str, torch.nn.Parameter]) -> list[list[tuple[torch.nn.Module, ...]]]:
    """Return for each parameter the chains of modules that hold it, from the owner outwards; several where it is tied."""
    index_of = {param: index for index, param in enumerate(params.values())}
    chains: list[list[tuple[torch.nn.Module, ...]]] = [[] for _ in params]
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, owner in modules.items():
        parts = name.split(".") if name else []
        outwards = tuple(modules[".".join(parts[:length])] for length in range(len(parts), -1, -1))
        for param in owner._parameters.values():
            if param is not None and param in index_of:
                chains[index_of[param]].append(outwards)
    return chains
