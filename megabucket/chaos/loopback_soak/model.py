"""The module of a soaked world: layers whose gradients and outputs are whole numbers, and that fail on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from megabucket.chaos.loopback_soak.program import Call, ModelSpec, Rerun, Trouble, Use


def pattern(numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return 1, 2, 3, 4, 1, 2, ...: a gradient, or a weight, of 1. Tells elements apart that are in the wrong place."""
    return (torch.arange(numel) % 4 + 1).to(dtype)


def first_weight(index: int) -> int:
    """Return the multiple of the pattern that the parameter at ``index`` starts with."""
    return index % 7 - 3


class SoakLayer(torch.nn.Module):
    """Sums up its parameters, each weighed by its pattern; in float64, so every sum is exact."""

    def __init__(self, numels: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        for position, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True)):
            self.register_parameter(f"p{position}", torch.nn.Parameter(torch.zeros(numel, dtype=dtype)))
        self._patterns: dict[int, torch.Tensor] = {}

    def forward(self, factor: float, anchor: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return the weighed sum times ``factor``; ``anchor`` is there for reentrant checkpointing and counts nothing."""
        total = torch.zeros((), dtype=torch.float64)
        for param in self.parameters(recurse=False):
            numel = param.numel()
            if numel not in self._patterns:
                self._patterns[numel] = pattern(numel)
            total = total + torch.dot(param.double().reshape(-1), self._patterns[numel])
        return total * factor


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        return value * 1

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise error_of(ctx.call)


def error_of(call: Call) -> BaseException:
    """Return what a call in trouble raises."""
    return KeyboardInterrupt(call.text) if call.interrupts else ValueError(call.text)


class SoakModel(torch.nn.Module):
    """The layers of a ``ModelSpec``. Its forward does what a ``Call`` says."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._spec = spec
        dtypes = (torch.float32, torch.float64 if spec.mixes_dtypes else torch.float32)
        self.layers = torch.nn.ModuleList(
            SoakLayer(layer.numels, tuple(dtypes[position % 2] for position in range(len(layer.numels))))
            for layer in spec.layers
        )
        for index, layer in enumerate(spec.layers):
            if layer.shares_with >= 0:
                shared = self.get_parameter(f"layers.{layer.shares_with}.p0")
                self.layers[index].register_parameter("shared", shared)
        self.frozen = torch.nn.Parameter(torch.zeros(spec.numels["frozen"]), requires_grad=False)
        for index, (name, numel) in enumerate(spec.numels.items()):
            self.get_parameter(name).data.copy_(pattern(numel) * first_weight(index))
        self.pause: Callable[[], None] = lambda: None
        """Called before each layer: lets collectives complete."""
        self.hooks: list[RemovableHandle] = []
        """Hooks of calls in trouble; whoever calls takes them away."""

    def forward(self, call: Call) -> Any:
        """Run the layers of a call in its order."""
        total = torch.zeros((), dtype=torch.float64)
        for position, use in enumerate(call.uses):
            self.pause()
            is_at_fault = call.trouble is not None and position == call.at
            if is_at_fault and call.trouble is Trouble.FORWARD:
                raise error_of(call)
            out = self._run(use)
            if is_at_fault:
                out = self._prepare_trouble(call, use, out)
            total = total + out
        return {"tensor": total, "tuple": (total, None), "dict": {"loss": total}}[self._spec.output]

    def _run(self, use: Use) -> torch.Tensor:
        layer = self.layers[use.layer]
        if use.rerun is Rerun.NONE:
            out: Any = layer(use.factor)
        else:
            anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
            is_reentrant = use.rerun is Rerun.REENTRANT
            out = checkpoint(layer, use.factor, anchor, use_reentrant=is_reentrant, preserve_rng_state=False)
        assert isinstance(out, torch.Tensor)  # noqa: S101 - narrows Any
        return out

    def _prepare_trouble(self, call: Call, use: Use, out: torch.Tensor) -> torch.Tensor:
        def fail(*_: Any) -> None:
            raise error_of(call)

        if call.trouble is Trouble.BACKWARD:
            return _Raises.apply(out, call)  # type: ignore[no-any-return, no-untyped-call]
        if call.trouble is Trouble.TENSOR_HOOK:
            self.hooks.append(out.register_hook(fail))
        elif call.trouble is Trouble.PARAM_HOOK:
            param = next(self.layers[use.layer].parameters())
            self.hooks.append(param.register_post_accumulate_grad_hook(fail))
        return out


def loss_of(output: Any, call: Call) -> torch.Tensor:
    """Return the loss of a forward: the sum in its output."""
    loss = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    assert isinstance(loss, torch.Tensor)  # noqa: S101 - narrows Any
    return _Raises.apply(loss, call) if call.trouble is Trouble.LOSS else loss  # type: ignore[no-untyped-call]
