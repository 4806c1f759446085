"""Memory that a wrapper gives back between two steps, and takes again.

All tensors of the package that lie in one storage are found, pointed at a single NaN, and guarded: their class raises a
``PhaseError`` in every operation, because a read through a view of freed memory would end the process. The storage has no
owner in the package then. Whether it is gone is asked, not assumed: another owner (a view of the caller's, an autograd graph)
keeps it, and gets it back at the end. New memory comes from where the old one came from, and the same tensor objects are put
back onto it, at their places: hooks, shards and batches stay as they are.
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
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from megabucket.buffer import GradState, ParamAndGradBuffer
from megabucket.comm import Accelerator
from megabucket.errors import PhaseError, name_list
from megabucket.layout import Span

KINDS: Final = ("params", "grads", "main_params", "optimizer")
"""What can be given back: arguments of ``DistributedDataParallel.offload``."""

_WHAT: Final = {
    "params": "the parameter",
    "grads": "the gradient of",
    "main_params": "the main parameter of",
    "optimizer": "the optimizer state of",
}
_UNSEEN: Final = "what is no tensor of Python: an autograd graph, or another library"
_LARGEST_PART_BYTES: Final = 256 << 20
_SMALLEST_PART_BYTES: Final = 64 << 10
_RELEASED_WITHIN_S: Final = 0.5  # threads of gloo and NCCL drop their references a little after a wait has returned
_CONTAINERS: Final = frozenset({list, tuple, dict, set, frozenset, deque, defaultdict, OrderedDict, partial, types.MethodType})
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


class HeldMemory(NamedTuple):
    """A storage that was not freed, because somebody else holds it. It is used again at ``onload``, with what it holds then."""

    kind: str
    """Argument of ``offload`` that it belongs to."""
    num_bytes: int
    holders: tuple[str, ...]
    """Descriptions of the tensors that hold it."""


class Source(NamedTuple):
    """Memory that can be given back."""

    kind: str
    tensor: torch.Tensor
    """One tensor that lies in it."""
    names: Sequence[str] = ()
    """Parameters that it is about."""
    make: Callable[[], torch.Tensor] | None = None
    """Returns new memory like ``tensor``, which is 1D then and is all that is given back; ``None``: the whole storage is."""
    buffer: ParamAndGradBuffer | None = None
    """Whose layout tells the parameter at a place."""
    fill: float | None = None
    """For values that are not kept: those of the new memory."""


class _Alias(NamedTuple):
    """One tensor object in the memory, as it was."""

    tensor: torch.Tensor
    kind: type
    shape: torch.Size
    strides: tuple[int, ...]
    span: Span
    """In bytes, from the start of the memory."""


class Memory:
    """One piece of memory, here or away."""

    def __init__(self, source: Source) -> None:
        tensor = source.tensor.detach()
        flat = tensor if source.make is not None else tensor.new_empty(0).set_(tensor.untyped_storage())
        self.source = source
        self.num_bytes = flat.nbytes
        self._start_bytes = flat.storage_offset() * flat.itemsize  # in its storage
        self._flat: torch.Tensor | None = flat  # 1D: all of it, or the new one; None while it is away
        self._is_away = False
        self._aliases: list[_Alias] = []
        self._host: list[torch.Tensor] = []  # the values, meanwhile
        self._storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(flat.untyped_storage())
        self._kept: torch.UntypedStorage | None = None

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage, as long as it exists."""
        return self._storage()

    def add(self, tensor: torch.Tensor) -> None:
        """Take an alias of the storage, if it lies in this memory."""
        span = self._span_of(tensor)
        if 0 <= span.start <= span.stop <= self.num_bytes:
            self._aliases.append(_Alias(tensor, type(tensor), tensor.shape, tensor.stride(), span))

    def _span_of(self, tensor: torch.Tensor) -> Span:
        start = int(tensor.storage_offset()) * tensor.itemsize - self._start_bytes
        last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(start, start + (last + 1) * tensor.itemsize if tensor.numel() else start)

    def _describe(self, span: Span) -> str:
        """Return what lies in a range of bytes."""
        names, buffer = self.source.names, self.source.buffer
        if buffer is not None:
            start, stop = (place / self.source.tensor.itemsize for place in span)
            names = [name for name, place in buffer.layout.params.items() if place.start < stop and start < place.stop]
        return f"{_WHAT[self.source.kind]} {name_list(names) if names else 'no parameter'}"

    def make_host_memory(self) -> None:
        """Allocate what holds the values meanwhile."""
        tensor = self.source.tensor
        accelerator = Accelerator.of(tensor.device)
        make = partial(torch.empty, device="cpu") if accelerator is None else accelerator.pinned
        if self.source.fill is None:
            parts = _parts(self.num_bytes, are_pinned=accelerator is not None)
            self._host = [make(torch.Size((num_bytes,)), dtype=torch.uint8) for num_bytes in parts]

    def _copies(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of the values on the host and in the memory."""
        return zip(self._host, flat.view(torch.uint8).split([len(part) for part in self._host]), strict=True)

    def give_back(self, nans: dict[torch.dtype, torch.Tensor]) -> None:
        """Copy the values to the host, and drop all references to the memory.

        Args:
            nans: one for each dtype; gets those that are missing.
        """
        if self._host and self._flat is not None:
            for host, part in self._copies(self._flat):
                host.copy_(part, non_blocking=True)
        self._flat, self._is_away = None, True
        for tensor, kind, shape, _, span in self._aliases:
            if tensor.dtype not in nans:
                value = math.nan if tensor.is_floating_point() else 0
                nans[tensor.dtype] = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
            tensor.data = nans[tensor.dtype].expand(shape)
            tensor.__class__ = _guard_of(kind)
            tensor._given_back = partial(self._describe, span)  # type: ignore[attr-defined]

    def keep_if_held(self) -> HeldMemory | None:
        """Keep the storage, if it still exists. Its values stay in it then."""
        self._kept = self.storage
        if self._kept is None:
            return None
        self._host.clear()
        holders = tuple(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} on {self._describe(self._span_of(tensor))}"
            for tensor in _holders(self._kept)
        )
        return HeldMemory(self.source.kind, self.num_bytes, holders or (_UNSEEN,))

    def make(self) -> None:
        """Allocate the memory again, unless that is done."""
        tensor, make = self.source.tensor, self.source.make
        if self._flat is None and self._kept is not None:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            place = self._start_bytes // tensor.itemsize, (self.num_bytes // tensor.itemsize,), (1,)
            self._flat = flat.set_(self._kept, *place)
        elif self._flat is None:
            numel = self.num_bytes // tensor.itemsize
            self._flat = make() if make is not None else torch.empty(numel, dtype=tensor.dtype, device=tensor.device)

    def drop(self) -> None:
        """Free what ``make`` has allocated, because ``take_back`` does not come."""
        self._flat = None

    def take_back(self) -> None:
        """Put values and tensors back. Does nothing if they are there; may be repeated after an interrupt."""
        if not self._is_away:
            return
        self.make()
        flat = self._flat
        assert flat is not None  # noqa: S101 - for mypy
        if self.source.fill is not None:
            flat.fill_(self.source.fill)
        if self._host:
            for host, part in self._copies(flat):
                part.copy_(host, non_blocking=True)
        storage, start_bytes = flat.untyped_storage(), flat.storage_offset() * flat.itemsize
        for tensor, kind, shape, strides, span in self._aliases:
            tensor.__class__ = kind
            tensor.__dict__.pop("_given_back", None)
            place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = place.set_(storage, (start_bytes + span.start) // tensor.itemsize, shape, strides)
        self._is_away = False


class Offloaded:
    """What ``DistributedDataParallel.offload`` has given back. As a context it is taken again at the end of the block.

    Args:
        take_back: takes it again.
        bytes_of: freed, by kind.
        held: what was not freed.
    """

    def __init__(self, take_back: Callable[[], None], freed_bytes: Mapping[str, int], held: Sequence[HeldMemory]) -> None:
        self._take_back = take_back
        self.freed_bytes = dict(freed_bytes)
        """Bytes of storages that were freed, by argument of ``offload``."""
        self.held = tuple(held)
        """Storages that were not freed, because somebody else holds them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._take_back()

    def __repr__(self) -> str:
        lines = [f"{kind}: {num_bytes} bytes freed" for kind, num_bytes in self.freed_bytes.items()]
        lines += [f"{one.kind}: {one.num_bytes} bytes held by {', '.join(one.holders[:5])}" for one in self.held]
        return "\n".join(lines)


def find_memory(sources: Iterable[Source], kinds: Collection[str], roots: Iterable[object]) -> list[Memory]:
    """Return the memory of some kinds, with all tensors of the package that lie in it.

    Args:
        sources: of all kinds. Those of one storage that come later belong to the first, unless all of them have ``make``.
        roots: objects of the package, through which its tensors are found.
    """
    found: dict[int, list[Memory]] = {}  # by id of the storage
    tensors = []
    for source in sources:
        tensors.append(source.tensor)
        storage = _storage_of(source.tensor)  # of one that is away already: None
        if storage is not None and storage.nbytes() and (id(storage) not in found or source.make is not None):
            found.setdefault(id(storage), []).append(Memory(source))
    for tensor in tensors_in([*roots, *tensors]):
        for memory in found.get(id(_storage_of(tensor)), ()):
            memory.add(tensor)
    return [memory for of_storage in found.values() for memory in of_storage if memory.source.kind in kinds]


def give_back(memories: Sequence[Memory]) -> tuple[dict[str, int], list[HeldMemory]]:
    """Free memory. Return the bytes of each kind, and what somebody else holds."""
    nans: dict[torch.dtype, torch.Tensor] = {}
    for memory in memories:
        memory.give_back(nans)
    deadline_s = time.monotonic() + _RELEASED_WITHIN_S
    while any(memory.storage is not None for memory in memories):
        if time.monotonic() > deadline_s:
            gc.collect()
            break
        time.sleep(0.001)
    held = {id(memory): one for memory in memories if (one := memory.keep_if_held()) is not None}
    freed = Counter[str]()
    for memory in memories:
        freed[memory.source.kind] += memory.num_bytes * (id(memory) not in held)
    return freed, list(held.values())


def zeroed_views(buffers: Iterable[ParamAndGradBuffer]) -> list[torch.Tensor]:
    """Return the gradients that were zeroed, for the next ones to be added. A fresh buffer has -0.0 there."""
    clean = [slot.view for buffer in buffers for slot in buffer.slots.values() if slot.state is GradState.CLEAN and slot.numel]
    firsts = [view[(0,) * view.dim()].float() for view in clean]
    signs = torch.stack(firsts).signbit().tolist() if firsts else ()
    return [view for view, is_negative in zip(clean, signs, strict=True) if not is_negative]


# Tensors and their storages #


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage; the same Python object as long as the storage exists, whoever holds it. ``None`` without one."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or of a class with another memory
        return None


def tensors_in(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield each tensor that is reachable through objects of the package, containers, and attributes of tensors."""
    seen: dict[int, object] = {}  # the objects as well, so that ids stay theirs
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if id(one) in seen:
            continue
        if isinstance(one, torch.Tensor):
            yield one
            waiting += one.__dict__.values()
            waiting += [one.grad] if one.is_leaf else []
        elif kind in _CONTAINERS or (kind.__module__.startswith("megabucket.") and not issubclass(kind, torch.nn.Module)):
            waiting += gc.get_referents(one)
        else:
            continue
        seen[id(one)] = one


def _holders(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [one for one in tensors if _storage_of(one) is storage]


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
