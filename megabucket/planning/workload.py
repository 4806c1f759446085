"""``Workload``: what a step computes and sends, tensor by tensor, as data. No torch.

Written by ``megabucket profile`` from a real step, derived from a model and a rate by ``planning.inputs``, or typed into a
config. Read by the simulator, the partitioner and the report.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

from megabucket.errors import ConfigError, name_list, printable
from megabucket.layout import ParamSpec

SCHEMA: Final = "megabucket.workload"
SCHEMA_VERSION: Final = 1

_DTYPE_OF_BYTES: Final = {8: "float64", 4: "float32", 2: "bfloat16"}


@dataclass(frozen=True, slots=True)
class TensorWork:
    """One trainable tensor: its size and what it adds to the passes.

    Args:
        name: unique in the workload.
        numel: elements; 0 is allowed and sends nothing.
        backward_s: seconds between the moment the gradient before it (in ready order) became ready and its own.
        forward_s: seconds of forward from the moment it is first needed to the moment the next tensor is.
    """

    name: str
    numel: int
    backward_s: float = 0.0
    forward_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """One training step of one rank.

    Args:
        tensors: in forward order, which is registration order.
        bytes_per_element: of gradients on the wire.
        param_bytes_per_element: of parameters on the wire, in the all-gather.
        optimizer_s: seconds of the optimizer in a step, on one rank.
        num_microbatches: forward and backward passes in a step; only the last backward sends.
        ready_order: indices of the tensors in the order in which their gradients become ready; ``None``: reversed.

    Raises:
        ConfigError: no tensors, names given twice, an order that is none.
    """

    tensors: tuple[TensorWork, ...]
    bytes_per_element: int = 4
    param_bytes_per_element: int = 4
    optimizer_s: float = 0.0
    num_microbatches: int = 1
    ready_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ConfigError("a workload needs at least one tensor, got none; there is nothing to compute or to send")
        counts = Counter(tensor.name for tensor in self.tensors)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"workload.tensors: the same name is given twice: {name_list(twice)}; a tensor is named once")
        if self.ready_order is not None:
            _check_order(self.ready_order, len(self.tensors))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of the tensors, first ready first."""
        return self.ready_order if self.ready_order is not None else tuple(reversed(range(len(self.tensors))))

    @cached_property
    def ready_s(self) -> tuple[float, ...]:
        """Seconds from the start of a backward to each gradient, by tensor index."""
        ready = [0.0] * len(self.tensors)
        for index, moment in zip(self.order, accumulate(self.tensors[i].backward_s for i in self.order), strict=True):
            ready[index] = moment
        return tuple(ready)

    @cached_property
    def needed_s(self) -> tuple[float, ...]:
        """Seconds from the start of a forward that waits for nothing to the first need of each tensor, and to its end."""
        return tuple(accumulate((tensor.forward_s for tensor in self.tensors), initial=0.0))

    @cached_property
    def backward_s(self) -> float:
        """Seconds of one backward."""
        return self.ready_s[self.order[-1]]

    @property
    def forward_s(self) -> float:
        """Seconds of one forward that waits for nothing."""
        return self.needed_s[-1]

    @property
    def compute_s(self) -> float:
        """Seconds of a step that sends nothing: all forwards and backwards, and the optimizer."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.optimizer_s

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def grad_dtype(self) -> str:
        """Dtype of gradients on the wire, as far as their size tells: links are measured per dtype."""
        return _DTYPE_OF_BYTES.get(self.bytes_per_element, "float32")

    @property
    def param_dtype(self) -> str:
        """Dtype of parameters on the wire, as far as their size tells."""
        return _DTYPE_OF_BYTES.get(self.param_bytes_per_element, "float32")

    def in_order(self, order: Sequence[int]) -> Workload:
        """Return the workload as buckets see it that are launched in another order than gradients become ready.

        A bucket waits for those before it, so a gradient counts as ready when all before it in ``order`` are.

        Raises:
            ConfigError: the order does not name each tensor once.

        >>> workload = Workload((TensorWork("a", 1, 1.0), TensorWork("b", 1, 2.0)), ready_order=(0, 1))
        >>> workload.in_order((1, 0)).ready_s  # b is ready after 3 s, a after 1 s
        (3.0, 3.0)
        """
        order = tuple(order)
        if order == self.order:
            return self
        _check_order(order, len(self.tensors))
        ready_s = list(accumulate((self.ready_s[index] for index in order), max))
        own_s = {index: now - before for index, before, now in zip(order, [0.0, *ready_s[:-1]], ready_s, strict=True)}
        tensors = tuple(replace(tensor, backward_s=own_s[index]) for index, tensor in enumerate(self.tensors))
        return replace(self, tensors=tensors, ready_order=order)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; ``planning.inputs.read_workload`` gives the workload back unchanged."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "bytes_per_element": self.bytes_per_element,
            "param_bytes_per_element": self.param_bytes_per_element,
            "optimizer_s": self.optimizer_s,
            "num_microbatches": self.num_microbatches,
            "ready_order": None if self.ready_order is None else list(self.ready_order),
            "tensors": [{name: getattr(tensor, name) for name in TensorWork.__slots__} for tensor in self.tensors],
        }


def check_workload_matches(workload: Workload, specs: Sequence[ParamSpec], *, fingerprint: str | None = None) -> None:
    """Return if the workload has the trainable parameters of a model: names, order and elements.

    Args:
        specs: the trainable parameters, in registration order.
        fingerprint: what ``model_fingerprint`` gave for the model that was profiled, to compare shapes, too.

    Raises:
        ConfigError: it is a workload of another model; the text names what differs.
    """
    found = [(tensor.name, tensor.numel) for tensor in workload.tensors]
    wanted = [(spec.name, spec.numel) for spec in specs]
    if found == wanted and fingerprint in (None, model_fingerprint(specs)):
        return
    names, own_names = dict(found), dict(wanted)
    differences = []
    if missing := [name for name in own_names if name not in names]:
        differences.append(f"it lacks {name_list(missing)}")
    if extra := [name for name in names if name not in own_names]:
        differences.append(f"the model has no {name_list(extra)}")
    if not differences:
        moved = (
            f"parameter {position} is {printable(name)!r} with {numel} elements instead of {printable(own)!r} with {own_numel}"
            for position, ((name, numel), (own, own_numel)) in enumerate(zip(found, wanted, strict=True))
            if (name, numel) != (own, own_numel)
        )
        differences.append(next(moved, "some parameters have other shapes (the fingerprints of names and shapes differ)"))
    raise ConfigError(
        f"this workload ({len(found)} tensors) is from another model ({len(wanted)} trainable parameters): "
        f"{'; '.join(differences)}. Profile this model, or describe the one that was profiled."
    )


def model_fingerprint(specs: Sequence[ParamSpec]) -> str:
    """Return the SHA-256 of names and shapes, in registration order, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([[spec.name, list(spec.shape)] for spec in specs]).encode()).hexdigest()


def _check_order(order: Sequence[int], count: int) -> None:
    if sorted(order) != list(range(count)):
        raise ConfigError(
            f"workload.ready_order must name each of the {count} tensors once, by its index from 0 to {count - 1}; got "
            f"{printable(repr(list(order)), 80)}"
        )
