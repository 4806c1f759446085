"""``WithheldGrad``: what stands in ``.grad`` while the gradient must not be read or changed.

With ``None`` there, ``torch.nn.utils.clip_grad_norm_`` and its like would find nothing to do and say nothing; with the gradient
there, they would work on one rank's part of it, in memory that a collective may own. This refuses by name. It has no memory of
its own. Why it is more than ``None``: docs/decisions/withheld-gradients.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from megabucket.errors import PhaseError


class WithheldGrad(torch.Tensor):
    """A gradient that nobody may use now. It can be looked at from outside and converted; all else is a ``PhaseError``.

    Args:
        like: the tensor it stands for.
        what: names it, in texts.
        reason: why it is withheld, and what to do instead.
        accumulates: whether what a backward brings now is to be added to ``like``; otherwise it is dropped. The hook of the
            parameter, which runs afterwards, knows what that means.
    """

    # Everything is refused where torch dispatches, because calls that begin in C++ come by there, too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _what: str
    _reason: str
    _like: torch.Tensor
    _accumulates: Callable[[], bool]

    def __new__(cls, like: torch.Tensor, *, what: str, reason: str, accumulates: Callable[[], bool]) -> WithheldGrad:  # noqa: PYI034 - Python 3.10 has no Self
        """Make a tensor without memory."""
        made = _without_memory(cls, like, dtype=like.dtype, device=like.device)
        made._what, made._reason, made._like, made._accumulates = what, reason, like, accumulates
        return made

    def refuse(self, operation: str) -> NoReturn:
        """Say why the gradient cannot be used.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(f"{operation} was called on {self._what}, which {self._reason}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let autograd add to it, and the conversion of a module convert it; refuse everything else.

        Raises:
            PhaseError: somebody uses the gradient.
        """
        if func is torch.ops.aten._to_copy.default and kwargs is not None:
            return args[0]._converted(**kwargs)
        if torch._C._current_graph_task_id() >= 0 and isinstance(args[0], WithheldGrad):
            if func is torch.ops.aten.add_.Tensor:
                return args[0]._accumulate(args[1])
            if func is torch.ops.aten.add.Tensor:  # create_graph=True
                return args[0]._like + args[1] if args[0]._accumulates() else args[1].clone()
        withheld = next(used for used in tree_leaves((args, kwargs)) if isinstance(used, WithheldGrad))
        return withheld.refuse(str(func.overloadpacket).removeprefix("aten."))

    def _converted(self, *, dtype: Any = None, device: Any = None, **_: Any) -> WithheldGrad:
        made = _without_memory(type(self), self, dtype=dtype or self.dtype, device=device or self.device)
        made.__dict__.update(self.__dict__)
        return made

    def _accumulate(self, grad: torch.Tensor) -> WithheldGrad:
        if self._accumulates():
            self._like.add_(grad)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._what}: withheld, because it {self._reason}>"


def _without_memory(cls: type[WithheldGrad], like: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> WithheldGrad:
    made: WithheldGrad = torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=device)
    return made
