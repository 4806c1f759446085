"""Parameter descriptions, from which layouts are built, and the key that sorts them into buffers. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megabucket.errors import LayoutError
from megabucket.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One trainable parameter, without its tensor.

    Args:
        name: unique in the model; layouts, errors and checkpoints are keyed by it.
        shape: sizes of the dimensions; ``()`` is a scalar, a zero makes an empty parameter.
        dtype: storage dtype, by torch's name without the module (``"bfloat16"``).
        group: name of the reduction group. ``"dense"`` parameters are reduced over all data-parallel ranks.
        shared_embedding: a copy of this parameter lives on another pipeline stage. It gets a bucket of its own in padded
            layouts, so that both copies are cut into the same shards.

    Raises:
        LayoutError: a field has a value that no buffer can hold.

    >>> ParamSpec("head.weight", (3, 4)).numel
    12
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    group: str = "dense"
    shared_embedding: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise LayoutError(f"a parameter needs a non-empty name, got {self.name!r}")
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        if any(type(size) is not int or size < 0 for size in shape):  # the exact type: a bool is no size
            raise LayoutError(f"parameter {self.name!r}: the shape must hold integers >= 0, got {self.shape!r}")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise LayoutError(f"parameter {self.name!r}: dtype {self.dtype!r} cannot be held by a buffer; use one of {known}")
        if not isinstance(self.group, str) or not self.group:
            raise LayoutError(f"parameter {self.name!r}: group must be a non-empty string, got {self.group!r}")
        if not isinstance(self.shared_embedding, bool):
            raise LayoutError(f"parameter {self.name!r}: shared_embedding must be a bool, got {self.shared_embedding!r}")
        object.__setattr__(self, "shape", shape)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, order=True)
class BufferKey:
    """The properties that all parameters of one buffer share."""

    param_dtype: str
    grad_dtype: str
    group: str

    def __str__(self) -> str:
        """Return the short form used in tables and errors, for example ``dense/bfloat16->float32``."""
        return f"{self.group}/{self.param_dtype}->{self.grad_dtype}"
