"""Gathers updated parameters from the ranks that own them, before they are read.

Gathers are launched in forward order, the reverse of the launch order of gradients. With overlap, a module waits for the
buckets of its own parameters just before its forward; ``state_dict``, ``load_state_dict`` and a deepcopy of any submodule wait
for all buckets. Until then a parameter is NaN, so other reads are noticed; such code calls ``finish_param_sync`` first.

Not every module with parameters is called: attention reads the weight of its output projection, a parameter list is indexed.
The nearest enclosing module that is called waits for their buckets. The first forward shows which modules are called; until it
has ended, every module waits for all buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import ParamPhase, _ParamAndGradBucketGroup
from megabucket.ddp.hooks import ModuleHook
from megabucket.errors import PhaseError


class ParamGather:
    """The param gather of one wrapper."""

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], *, overlaps: bool) -> None:
        self._groups = groups
        self._overlaps = overlaps
        self._called: set[torch.nn.Module] = set()
        self._needed: dict[torch.nn.Module, list[_ParamAndGradBucketGroup]] | None = None

    def start(self) -> None:
        """Launch the gather of every group."""
        for group in reversed(self._groups):
            group.start_param_sync(hides_params=self._overlaps)

    def finish(self) -> None:
        """Launch the remaining gathers, and return when every group is gathered."""
        for group in self._groups:
            if group.param_phase is ParamPhase.STALE:
                self.start()
                break
        for group in reversed(self._groups):
            group.finish_param_sync()

    @torch.no_grad()
    def finish_for_copy(self, copies: Mapping[int, Any]) -> None:
        """Return when every parameter may be read. Copies that were made before get the values.

        Args:
            copies: by the id of the copied object, as ``copy.deepcopy`` keeps them.
        """
        hidden = [group.params for group in self._groups if group.param_phase is not ParamPhase.GATHERED]
        self.finish()
        for param in chain.from_iterable(hidden):
            if id(param) in copies:
                copies[id(param)].copy_(param)

    def register_hooks(self, module: torch.nn.Module) -> Iterator[RemovableHandle]:
        """Hook the module and all in it; yield each handle as soon as there is one."""

        def after_first_forward(*_: Any) -> None:
            if self._needed is None:
                self._needed = self._learn(module)

        def before_load(_: torch.nn.Module, __: Any, ___: str, local_metadata: dict[str, Any], *____: Any) -> None:
            if local_metadata.get("assign_to_params_buffers", False):
                raise PhaseError(
                    "load_state_dict(assign=True) would replace the parameters that live in the buffers, and their gradients "
                    "would be reduced no more. Load with assign=False, which copies the values, or load before wrapping."
                )
            self.finish()

        before_read = _BeforeRead(_finish, self)
        for submodule in module.modules():
            yield submodule.register_load_state_dict_pre_hook(ModuleHook(before_load))
            if self._overlaps:
                # Before all other hooks, because some (weight normalization) read parameters.
                yield submodule.register_forward_pre_hook(ModuleHook(_uncompiled(self._make_forward_hook())), prepend=True)
                yield submodule.register_state_dict_pre_hook(before_read)
        if self._overlaps:
            yield module.register_forward_hook(ModuleHook(_uncompiled(after_first_forward)))

    def _make_forward_hook(self) -> Callable[[torch.nn.Module, Any], None]:
        def before_forward(called: torch.nn.Module, _: Any) -> None:
            if self._needed is None:
                self._called.add(called)
                self.finish()
            else:
                for group in self._needed.get(called, ()):
                    group.finish_param_sync()

        return before_forward

    def _learn(self, root: torch.nn.Module) -> dict[torch.nn.Module, list[_ParamAndGradBucketGroup]]:
        """Return the groups that each module waits for: its own, and those of submodules that are not called."""
        group_of = {param: group for group in self._groups for param in group.params}
        needed: dict[torch.nn.Module, set[_ParamAndGradBucketGroup]] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            own = {group_of[param] for param in module.parameters(recurse=False) if param in group_of}
            needed.setdefault(module, set()).update(own)
            path = name
            while module not in self._called and path:
                path = path.rpartition(".")[0]
                module = root.get_submodule(path)  # noqa: PLW2901 - from the module outwards
            needed.setdefault(module, set()).update(own)
        return {module: sorted(groups, key=lambda group: -group.index) for module, groups in needed.items() if groups}


def _finish(gather: ParamGather, *_: object) -> None:
    gather.finish()


class _BeforeRead(ModuleHook):
    """The hook before ``state_dict``. A deepcopy waits as well: it reaches the hooks of a module after its own parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Wait for the parameters, and give values to those that were copied before."""
        gather: ParamGather = self.args[0]
        gather.finish_for_copy(memo)
        return super().__deepcopy__(memo)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Exclude a hook from ``torch.compile``: waiting for a collective cannot be traced."""
    reason = "a module waits here for its parameters: use overlap_param_gather=False with fullgraph=True"
    disabled: Callable[..., None] = torch.compiler.disable(hook, reason=reason)
    return disabled
