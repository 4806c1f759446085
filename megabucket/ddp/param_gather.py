"""Brings updated parameters from the ranks that own them, before anything reads them.

Gathers are launched in forward order, which is the reverse of the launch order of gradients. With overlap, a module waits for
the buckets of its own parameters just before its forward, and ``state_dict`` and ``load_state_dict`` of any submodule wait for
all. Code that reads parameters in other ways calls ``finish_param_sync`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import ParamPhase, _ParamAndGradBucketGroup


class ParamGather:
    """The param gather of one wrapper.

    A parameter that a module uses but another module registers (functional use of ``other.weight``) is waited for when the
    registering module runs; let that one run first, or switch the overlap off.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], module: torch.nn.Module, *, overlaps: bool) -> None:
        self._groups = groups
        self._handles: list[RemovableHandle] = self._register_hooks(module) if overlaps else []

    def start(self) -> None:
        """Launch the gather of every group."""
        for group in reversed(self._groups):
            group.start_param_sync()

    def finish(self) -> None:
        """Return when every group is gathered, launching what was not launched."""
        for group in self._groups:
            if group.param_phase is ParamPhase.STALE:
                self.start()
                break
        for group in reversed(self._groups):
            group.finish_param_sync()

    def remove(self) -> None:
        """Remove the forward hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _register_hooks(self, module: torch.nn.Module) -> list[RemovableHandle]:
        group_of = {param: group for group in self._groups for param in group.params}

        # Plain functions, not bound methods: a deepcopy of the module (to average weights) keeps functions as they are,
        # but would copy the object behind a method, and with it all buffers.
        def finish(*_: Any) -> None:
            self.finish()

        handles = []
        for submodule in module.modules():
            own = {group_of[param] for param in submodule.parameters(recurse=False) if param in group_of}
            if own:
                needed = sorted(own, key=lambda group: -group.index)
                handles.append(submodule.register_forward_pre_hook(_waiter(needed)))
            handles.append(submodule.register_state_dict_pre_hook(finish))
            handles.append(submodule.register_load_state_dict_pre_hook(finish))
        return handles


def _waiter(groups: Sequence[_ParamAndGradBucketGroup]) -> Any:
    def wait(*_: Any) -> None:
        for group in groups:
            group.finish_param_sync()

    return wait
