"""``ParamAndGradBuffer``: allocates the flat tensors of one buffer layout and binds parameters to them.

The only code that rebinds ``param.data`` and that sets and removes the published attributes ``main_grad``,
``main_grad_copy_in_grad_buffer`` and ``grad_added_to_main_grad`` (and ``main_grad_slot``, for ``megabucket.fused``). Positions
come from the layout.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from megabucket.buffer.grad_slot import GradSlot
from megabucket.comm import Communicator, LocalCommunicator
from megabucket.errors import ConfigError, refuse_copies
from megabucket.layout import BucketLayout, BufferLayout

refuse_pickles: Final = refuse_copies(
    "a wrapped module cannot be pickled, nor its parameters: they lie in buffers, and hooks of the wrapper are on the module. "
    "Save ddp.state_dict(), and the state_dict() of an optimizer that holds the parameters; or pickle a plain module, which "
    "copy.deepcopy(ddp.module) is, or ddp.module after ddp.detach()."
)
"""``__reduce_ex__`` of all that a wrapper adds to a module and its parameters."""


class _SlotReference(weakref.ref[GradSlot]):
    """Leads from a parameter to its slot."""

    __slots__ = ()
    __reduce_ex__ = refuse_pickles


class _ParamAndGradBucket:
    """Views of one bucket, for its collectives."""

    def __init__(self, layout: BucketLayout, buffer: ParamAndGradBuffer) -> None:
        self.layout = layout
        self.buffer = buffer
        self.slots = [buffer.slots[name] for name in layout.params]
        self.param_data = buffer.param_data[layout.start : layout.stop]  # 1D, parameter dtype
        self.grad_data = buffer.grad_data[layout.start : layout.stop]  # 1D, gradient dtype

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of ``param_data`` or ``grad_data`` that ``rank`` owns."""
        shard_numel = flat.numel() // self.buffer.layout.num_shards
        return flat[rank * shard_numel : (rank + 1) * shard_numel]


class ParamAndGradBuffer:
    """One contiguous buffer for parameters and one for their gradients.

    Constructing it moves the parameters in: values, shapes and memory order stay, the storage is new. The memory peak is the
    model plus both buffers plus the largest parameter, because each original is released as soon as it is copied.

    Args:
        layout: where each parameter lies.
        params: the parameters by name; all on one device, of the layout's dtype.
        fp32_local: names of parameters whose 16-bit gradients are accumulated in separate float32 memory.
        communicator: allocates both buffers; ``None``: torch does.

    Raises:
        ConfigError: the communicator has allocated something else than the memory it was asked for.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Mapping[str, torch.nn.Parameter],
        *,
        fp32_local: Collection[str] = (),
        communicator: Communicator | None = None,
    ) -> None:
        self.layout = layout
        self.params = {name: params[name] for name in layout.params}
        device = next(iter(self.params.values())).device
        allocator = communicator or LocalCommunicator()
        self.param_data = allocated(allocator, layout.numel, dtype_named(layout.key.param_dtype), device).zero_()  # 1D
        # The first gradient of a fresh buffer is added, not copied (grad_slot.py). Adding to -0.0 changes no value, not even
        # -0.0, so one rank has the bits of plain torch (tests/ranks/test_one_rank.py).
        self.grad_data = allocated(allocator, layout.numel, dtype_named(layout.key.grad_dtype), device).fill_(-0.0)  # 1D
        self.empty = -0.0
        """What places of gradients hold to which the first gradient is added."""
        self._fp32_local = fp32_local if self.grad_data.itemsize == 2 else ()
        self.local_grads: list[torch.Tensor] = []
        """float32 sums of microbatches: ``main_grad`` of the parameters in ``fp32_local``."""
        self._is_attached = True
        self._grad_dtypes = {name: param.grad_dtype for name, param in self.params.items()}
        self.slots: dict[str, GradSlot] = {}
        try:
            for name, param in self.params.items():
                self.slots[name] = self._attach(name, param)
            self.buckets = [_ParamAndGradBucket(bucket, self) for bucket in layout.buckets]
        except BaseException:
            self.detach()  # what could not move as a whole stays where it was
            raise

    def _attach(self, name: str, param: torch.nn.Parameter) -> GradSlot:
        # Allocate before anything moves, because this may run out of memory.
        is_local = name in self._fp32_local
        local = torch.full_like(param.detach(), -0.0, dtype=torch.float32) if is_local else None
        start, strides = self.layout.params[name].start, dense_strides(param)
        new_data = view_like(self.param_data, start, param.shape, strides)
        new_data.copy_(param.detach())
        param.data = new_data
        in_buffer = grad_view = view_like(self.grad_data, start, param.shape, strides)
        if local is not None:
            grad_view = local
            self.local_grads.append(grad_view)
            param.main_grad_copy_in_grad_buffer = in_buffer  # type: ignore[attr-defined]
        earlier_grad, param.grad = param.grad, None
        # With grad_dtype=None autograd hands over gradients in the dtype it computed them in and accepts any dtype as .grad,
        # so a 16-bit gradient reaches the float32 view in one casting copy.
        param.grad_dtype = None
        param.main_grad = grad_view  # type: ignore[attr-defined]
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        # A gradient from before wrapping counts, as it would without a wrapper.
        param.grad = earlier_grad
        slot = GradSlot(name, param, grad_view, in_buffer)
        param.main_grad_slot = _SlotReference(slot)  # type: ignore[attr-defined]
        if earlier_grad is not None:
            slot.store()
        return slot

    def detach(self) -> None:
        """Give every parameter its own storage again, with its current values, and remove the attributes set by attaching.

        Gradients are dropped. A second call does nothing.
        """
        if not self._is_attached:
            return
        for name, param in self.params.items():
            if name not in self.slots and param.untyped_storage().data_ptr() != self.param_data.untyped_storage().data_ptr():
                continue  # attaching failed before this parameter, or was interrupted
            param.grad = None
            own_data = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
            param.data = own_data.copy_(param.detach())
            # The default is the parameter's dtype, which a conversion may have changed meanwhile.
            was_default = self._grad_dtypes[name] == self.param_data.dtype
            param.grad_dtype = param.dtype if was_default else self._grad_dtypes[name]
            for published in ("main_grad", "main_grad_copy_in_grad_buffer", "grad_added_to_main_grad", "main_grad_slot"):
                param.__dict__.pop(published, None)  # other code may have deleted it
        self._is_attached = False  # last: an interrupted call is repeated

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply all gradients in place."""
        for grads in (self.grad_data, *self.local_grads):
            grads.mul_(factor)
        for slot in self.slots.values():
            slot.scale_outside(factor)

    def zero_grads(self) -> None:
        """Fill the gradient buffer with zeros, padding included: one pass over memory."""
        for grads in (self.grad_data, *self.local_grads):
            grads.zero_()
        self.empty = 0.0
        for slot in self.slots.values():
            slot.forget(is_zeroed=True)


def allocated(communicator: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of a communicator for a buffer: 1D, contiguous, not initialized.

    Raises:
        ConfigError: the communicator has allocated something else.
    """
    memory = communicator.allocate(numel, dtype, device)
    found = (memory.shape, memory.dtype, memory.device)
    if found != ((numel,), dtype, device) or not memory.is_contiguous():
        raise ConfigError(
            f"{type(communicator).__name__}.allocate({numel}, {dtype}, {device}) has returned a tensor of shape "
            f"{tuple(memory.shape)}, {memory.dtype}, on {memory.device}: parameters or gradients would not fit. It must return "
            "a contiguous 1D tensor of that many elements, of that dtype and on that device."
        )
    return memory


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of ``param``: its own if it is dense, so channels-last stays channels-last."""
    return torch.empty_like(param, device="meta").stride()


def view_like(flat: torch.Tensor, start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return the view of ``flat`` that begins at element ``start``.

    Args:
        flat: a 1D contiguous tensor, perhaps a view itself.
        shape: sizes of the view; ``flat`` must hold that many elements from ``start``.
        strides: a permutation of contiguous strides, from ``dense_strides``.
    """
    return flat.as_strided(tuple(shape), tuple(strides), flat.storage_offset() + start)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module, as layouts use it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a layout's dtype name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - names come from a checked BufferKey
    return dtype
