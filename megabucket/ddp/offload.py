"""Memory that a wrapper gives back between two steps, and takes again.

All tensors of the package that lie in one storage are found, pointed at a single NaN, and guarded: their class raises a
``PhaseError`` in every operation, because a read through a view of freed memory would end the process. The storage has no
owner in the package then. Whether it is gone is asked, not assumed: if another owner (a view of the caller's, an autograd
graph) keeps it, it stays in use. New memory comes from where the old one came from, and the same tensor objects are
put back onto it, at their places: hooks, shards and batches stay as they are.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import time
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from megabucket.comm import Accelerator
from megabucket.errors import PhaseError, name_list
from megabucket.layout import ParamSlot, Span

KINDS: Final = {
    "params": "the parameter",
    "grads": "the gradient of",
    "main_params": "the main parameter of",
    "optimizer": "the optimizer state of",
}
"""What can be given back, by argument of ``DistributedDataParallel.offload``, and the words for it."""

_UNSEEN: Final = "what is no tensor of Python: an autograd graph, or another library"
_LARGEST_PART_BYTES: Final = 256 << 20
_SMALLEST_PART_BYTES: Final = 64 << 10
_RELEASED_WITHIN_S: Final = 0.2  # threads of gloo and NCCL drop their references a little after a wait has returned
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque, defaultdict, OrderedDict, partial, types.MethodType)
_METADATA: Final = re.compile(
    "shape|dtype|device|layout|ndim|names|grad|grad_fn|grad_dtype|requires_grad_?|retains_grad|itemsize|nbytes|output_nr|size|dim"
    "|numel|nelement|ndimension|element_size|get_device|__len__|_version|_backward_hooks|_post_accumulate_grad_hooks"
    "|register_hook|register_post_accumulate_grad_hook|is_(?!nonzero|contiguous).*"
)
"""Attributes and methods of tensors that read no memory. Strides are others meanwhile, so they are not among them."""


class OffloadedTensor(torch.Tensor):
    """A tensor whose memory was given back. Its metadata can be read; all else is a ``PhaseError``.

    Objects become of a subclass of this and of their own class, and are of their own class again when the memory is back.
    """

    _given_back: Callable[[], str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return metadata; refuse everything else.

        Raises:
            PhaseError: the values are used, or the memory.
        """
        name: str = func.__name__
        if name in ("__get__", "__set__", "__delete__"):  # of an attribute
            name = getattr(func.__self__, "__name__", "an attribute")
        if _METADATA.fullmatch(name):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, OffloadedTensor))
        raise PhaseError(
            f"{name} was called on {used._given_back()}, which ddp.offload() has given back: there is no memory behind it now. "
            "Call ddp.onload() on every rank first."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._given_back()}: given back by ddp.offload()>"


@functools.cache
def _guard_of(kind: type) -> type:
    return type(f"Offloaded{kind.__name__}", (OffloadedTensor, kind), {})


class _Alias(NamedTuple):
    """One tensor object in the memory, as it was."""

    tensor: torch.Tensor
    kind: type
    shape: torch.Size
    strides: tuple[int, ...]
    span: Span


@dataclass(eq=False)
class Memory:
    """One piece of memory, here or away."""

    kind: str
    """One of ``KINDS``."""
    tensor: torch.Tensor
    """Lies in it."""
    names: Sequence[str] | Mapping[str, ParamSlot] = ()
    """Of the parameters that it is about; or their places in it."""
    make: Callable[[], torch.Tensor] | None = None
    """Returns new memory like ``tensor``, which is 1D then and is all that is given back; ``None``: its whole storage is."""
    fill: float | None = None
    """The new values, where those of now are not kept."""
    span: Span = field(default_factory=lambda: Span(0, 0))
    """In its storage, in bytes."""
    storage: Callable[[], torch.UntypedStorage | None] = lambda: None
    """Returns the old storage, as long as it exists."""
    is_away: bool = False
    _flat: Any = None  # 1D, all of it: the old one, or the new one; None unless a call moves it
    _aliases: list[_Alias] = field(default_factory=list)
    _host: list[torch.Tensor] = field(default_factory=list)  # the values, meanwhile

    def locate(self) -> None:
        """Note where it is."""
        tensor = self.tensor.detach()
        self._flat = tensor if self.make is not None else tensor.new_empty(0).set_(tensor.untyped_storage())
        self.span, self.storage = _span_of(self._flat), weakref.ref(self._flat.untyped_storage())

    def add(self, tensor: torch.Tensor) -> None:
        """Take a tensor of the same storage, if it lies in this memory."""
        span = _span_of(tensor)
        if self.span.start <= span.start and span.stop <= self.span.stop:
            self._aliases.append(_Alias(tensor, type(tensor), tensor.shape, tensor.stride(), span))

    def _describe(self, span: Span) -> str:
        """Return what lies in a range of bytes of the storage."""
        names = self.names
        if isinstance(names, Mapping):
            start, stop = ((place - self.span.start) / self.tensor.itemsize for place in span)
            names = [name for name, place in names.items() if place.start < stop and start < place.stop]
        return f"{KINDS[self.kind]} {name_list(names) if names else 'no parameter'}"

    def make_host_memory(self) -> None:
        """Allocate what holds the values meanwhile."""
        accelerator = Accelerator.of(self.tensor.device)
        make = partial(torch.empty, device="cpu") if accelerator is None else accelerator.pinned
        parts = _parts(self.span.numel if self.fill is None else 0, are_pinned=accelerator is not None)
        self._host = [make(torch.Size((num_bytes,)), dtype=torch.uint8) for num_bytes in parts]

    def _copies(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts of the values on the host and in the memory."""
        return zip(self._host, flat.view(torch.uint8).split([*map(len, self._host)]) if self._host else (), strict=True)

    def give_back(self, nans: dict[torch.dtype, torch.Tensor]) -> None:
        """Copy the values to the host, and drop all references to the memory.

        Args:
            nans: one for each dtype; gets those that are missing.
        """
        for host, part in self._copies(self._flat):
            host.copy_(part, non_blocking=True)
        self._flat, self.is_away = None, True
        for tensor, kind, shape, _, span in self._aliases:
            if tensor.dtype not in nans:
                nans[tensor.dtype] = tensor.new_full((), math.nan if tensor.is_floating_point() else 0)
            tensor.data = nans[tensor.dtype].expand(shape)
            tensor.__class__ = _guard_of(kind)
            tensor._given_back = partial(self._describe, span)  # type: ignore[attr-defined]

    def find_holders(self, storage: torch.UntypedStorage) -> str:
        """Return who else holds the storage."""
        holders = [
            f"a {type(one).__name__} of shape {tuple(one.shape)} on {self._describe(_span_of(one))}"
            for one in gc.get_objects()
            if issubclass(type(one), torch.Tensor) and _storage_of(one) is storage
        ]
        return f"{self.kind}: {self.span.numel} bytes, by {', '.join(holders[:5]) or _UNSEEN}"

    def make_memory(self, storage: torch.UntypedStorage | None = None) -> None:
        """Allocate it again; or use the old storage."""
        like, numel = self.tensor, self.span.numel // self.tensor.itemsize
        if storage is not None:
            self._flat = _empty_like(like).set_(storage, self.span.start // like.itemsize, (numel,), (1,))
        else:
            self._flat = _empty_like(like, numel) if self.make is None else self.make()

    def take_back(self) -> None:
        """Put values and tensors into what ``make_memory`` has made. May be repeated after an interrupt."""
        flat = self._flat
        if self.fill is not None:
            flat.fill_(self.fill)
        for host, part in self._copies(flat):
            part.copy_(host, non_blocking=True)
        storage, moved_bytes = flat.untyped_storage(), _span_of(flat).start - self.span.start
        for tensor, kind, shape, strides, span in self._aliases:
            tensor.__class__ = kind
            tensor.__dict__.pop("_given_back", None)
            tensor.data = _empty_like(tensor).set_(storage, (span.start + moved_bytes) // tensor.itemsize, shape, strides)
        self.is_away = False

    def drop(self) -> None:
        """End a call, whatever has come of it. Its traceback may keep this object, which must not hold memory then."""
        self._flat, self._host = None, self._host if self.is_away else []


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What a call of ``DistributedDataParallel.offload`` has given back. As a context it is taken again at the end."""

    freed_bytes: Mapping[str, int]
    """Bytes of storages that were freed, by argument of ``offload``."""
    held: Sequence[str]
    """Storages that were not freed, because somebody else holds them: what, how many bytes, and by whom. They stay in use."""
    take_back: Callable[[], None]
    """Takes the kinds again that this call has given back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back()


def find_memory(memories: Sequence[Memory], kinds: Collection[str], roots: Iterable[object]) -> list[Memory]:
    """Return the memory of some kinds, with all tensors of the package that lie in it.

    Args:
        memories: of all kinds. Of one storage, later ones belong to the first, unless they have ``make``.
        roots: objects of the package, through which its tensors are found.
    """
    found: dict[int, list[Memory]] = {}  # by id of the storage
    for memory in memories:
        storage = _storage_of(memory.tensor)  # of one that is away already: None
        if storage is not None and storage.nbytes() and (id(storage) not in found or memory.make is not None):
            memory.locate()
            found.setdefault(id(storage), []).append(memory)
    for tensor in tensors_in([*roots, *(memory.tensor for memory in memories)]):
        for memory in found.get(id(_storage_of(tensor)), ()):
            memory.add(tensor)
    return [memory for of_storage in found.values() for memory in of_storage if memory.kind in kinds]


def give_back(memories: Sequence[Memory]) -> tuple[Mapping[str, int], list[str]]:
    """Free memory. Return the bytes of each kind, and what somebody else holds."""
    nans: dict[torch.dtype, torch.Tensor] = {}
    for memory in memories:
        memory.give_back(nans)
    deadline_s = time.monotonic() + _RELEASED_WITHIN_S
    while any(memory.storage() is not None for memory in memories):
        if time.monotonic() > deadline_s:
            gc.collect()
            break
        time.sleep(0.001)
    freed, held = Counter[str](), []
    for memory in memories:
        if (storage := memory.storage()) is None:
            freed[memory.kind] += memory.span.numel
        else:
            held.append(memory.find_holders(storage))
            memory.make_memory(storage)
            memory.take_back()
    return freed, held


def tensors_in(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield each tensor that is reachable through objects of the package, containers, and attributes of tensors."""
    seen: dict[int, object] = {}  # the objects as well, so that ids stay theirs
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if id(one) in seen or isinstance(one, OffloadedTensor):
            continue
        if isinstance(one, torch.Tensor):
            yield one
            waiting += [*one.__dict__.values(), one.grad if one.is_leaf else None]
        elif kind in _CONTAINERS or (kind.__module__.startswith("megabucket.") and not issubclass(kind, torch.nn.Module)):
            waiting += gc.get_referents(one)
        else:
            continue
        seen[id(one)] = one


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage; the same Python object as long as the storage exists, whoever holds it. ``None`` without one."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, guarded, or of a class with another memory
        return None


def _empty_like(tensor: torch.Tensor, numel: int = 0) -> torch.Tensor:
    return torch.empty(numel, dtype=tensor.dtype, device=tensor.device)


def _span_of(tensor: torch.Tensor) -> Span:
    """Return the bytes of its storage that a tensor lies in."""
    numel = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Span(start, start + numel * tensor.itemsize * bool(tensor.numel()))


def _parts(num_bytes: int, *, are_pinned: bool) -> Iterator[int]:
    """Yield the bytes of the parts of host memory. Torch rounds pinned memory up to powers of two, so parts are such.

    >>> list(_parts(200_000, are_pinned=True))
    [131072, 65536, 3392]
    """
    while num_bytes:
        power = 1 << (num_bytes.bit_length() - 1)
        part = min(power, _LARGEST_PART_BYTES) if are_pinned and power >= _SMALLEST_PART_BYTES else num_bytes
        yield part
        num_bytes -= part
