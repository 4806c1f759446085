"""Which parameters of a module are held, under which names, and which ones cannot be.

Turns a module into parameter descriptions; every refusal names the parameter, the reason and the way out. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.parameter import UninitializedParameter

from megabucket.buffer.views import dtype_name
from megabucket.errors import AlreadyWrappedError, NoTrainableParametersError, UnsupportedParameterError
from megabucket.layout import ParamSpec
from megabucket.units import DTYPE_BYTES


@dataclass(frozen=True)
class DiscoveredParams:
    """The parameters of one module, in registration order."""

    trainable: Mapping[str, torch.nn.Parameter]
    """By first name: a tied parameter stands here once."""
    frozen: tuple[str, ...]

    @property
    def specs(self) -> list[ParamSpec]:
        """Descriptions for ``build_layout``."""
        return [
            ParamSpec(
                name=name,
                shape=tuple(param.shape),
                dtype=dtype_name(param.dtype),
                shared_embedding=bool(getattr(param, "shared_embedding", False)),
            )
            for name, param in self.trainable.items()
        ]


def discover_params(module: torch.nn.Module) -> DiscoveredParams:
    """Return the parameters of ``module`` that buffers will hold.

    Raises:
        NoTrainableParametersError: nothing requires a gradient.
        UnsupportedParameterError: a trainable parameter cannot live in a buffer.
        AlreadyWrappedError: a wrapper holds some of the parameters already.
    """
    params = dict(module.named_parameters())  # a tied parameter comes once, under its first name
    frozen = tuple(name for name, param in params.items() if not param.requires_grad)
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    if not trainable:
        raise NoTrainableParametersError(module=type(module).__name__, frozen=frozen)

    wrapped = [name for name, param in trainable.items() if getattr(param, "main_grad", None) is not None]
    if wrapped:
        raise AlreadyWrappedError(params=wrapped)
    for name, param in trainable.items():
        _check_supported(name, param)
    _check_one_device(trainable)
    _check_disjoint_memory(module, trainable)
    return DiscoveredParams(trainable, frozen)


def _check_supported(name: str, param: torch.nn.Parameter) -> None:
    if isinstance(param, UninitializedParameter):
        raise UnsupportedParameterError(
            param=name, reason="it is uninitialized (a lazy module)", remedy="Run one forward before wrapping."
        )
    if param.is_meta:
        raise UnsupportedParameterError(
            param=name,
            reason="it is on the meta device and has no values",
            remedy="Call module.to_empty(device=...) and initialize the parameters before wrapping.",
        )
    if param.layout is not torch.strided:
        raise UnsupportedParameterError(
            param=name, reason=f"it is sparse ({param.layout})", remedy="Use a dense parameter, or freeze it."
        )
    if type(param.data) is not torch.Tensor:
        raise UnsupportedParameterError(
            param=name,
            reason=f"it is a {type(param.data).__name__}, not a plain tensor",
            remedy="Wrap the module before sharding or quantizing it, or freeze the parameter.",
        )
    if dtype_name(param.dtype) not in DTYPE_BYTES:
        raise UnsupportedParameterError(
            param=name,
            reason=f"its dtype is {dtype_name(param.dtype)}",
            remedy=f"Buffers hold {', '.join(DTYPE_BYTES)}; convert the parameter before wrapping, or freeze it.",
        )
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise UnsupportedParameterError(
            param=name,
            reason=f"it is expanded: shape {tuple(param.shape)} with strides {param.stride()} repeats the same memory",
            remedy="Make it a parameter of its own with .clone() before wrapping.",
        )
    if getattr(param, "allreduce", True) is False:
        raise UnsupportedParameterError(
            param=name,
            reason="it is an expert parameter (allreduce=False), which is reduced over another group than the others",
            remedy="Expert groups can be planned with build_layout(), but not be trained in this version.",
        )


def _check_one_device(params: Mapping[str, torch.nn.Parameter]) -> None:
    first_name, first = next(iter(params.items()))
    for name, param in params.items():
        if param.device != first.device:
            raise UnsupportedParameterError(
                param=name,
                reason=f"it is on {param.device}, but {first_name!r} is on {first.device}",
                remedy="One buffer lives on one device: move the module to a single device before wrapping.",
            )


def _check_disjoint_memory(module: torch.nn.Module, trainable: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse a trainable parameter that shares memory with another tensor: it would move away and the tie would be lost."""
    by_storage: dict[int, dict[str, torch.Tensor]] = {}
    # Trainable parameters last, so that the later one of a pair is a parameter that would move.
    for name, tensor in [*module.named_buffers(), *_frozen(module, trainable), *trainable.items()]:
        if type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor.detach()
    for tensors in by_storage.values():
        moving = [name for name in tensors if name in trainable]
        if moving and len(tensors) > 1 and _ranges_overlap(tensors.values()):
            _check_no_byte_twice(tensors, moving)


def _frozen(module: torch.nn.Module, trainable: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in module.named_parameters():
        if name not in trainable and not isinstance(param, UninitializedParameter):
            yield name, param


def _ranges_overlap(tensors: Iterable[torch.Tensor]) -> bool:
    ranges = sorted(_byte_range(tensor) for tensor in tensors)
    return any(start < stop for (_, stop), (start, _) in pairwise(ranges))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _check_no_byte_twice(tensors: Mapping[str, torch.Tensor], moving: Sequence[str]) -> None:
    """Mark the bytes of each tensor, because overlapping ranges need not share any: the columns of one matrix do not."""
    storage_bytes = next(iter(tensors.values())).untyped_storage().nbytes()
    marks = torch.zeros(storage_bytes, dtype=torch.bool)
    for name, tensor in tensors.items():
        own = _bytes_of(marks, tensor)
        if name in moving and bool(own.any()):
            for before, other in tensors.items():
                _bytes_of(marks.zero_(), other).fill_(True)
                if before != name and bool(own.any()):
                    raise UnsupportedParameterError(
                        param=name,
                        reason=f"it shares memory with {before!r} but is a different tensor, so the tie would be lost",
                        remedy="Register the same Parameter object under both names, or clone() one of them before wrapping.",
                    )
        own.fill_(True)


def _bytes_of(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of ``marks`` (one element per byte of the storage) that a tensor covers."""
    bytes_per_element = tensor.itemsize
    # An expanded dimension covers the same bytes again and again: once is enough, and it could not be filled.
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * bytes_per_element for stride in tensor.stride()]
    return marks.as_strided([*shape, bytes_per_element], [*strides, 1], tensor.storage_offset() * bytes_per_element)
