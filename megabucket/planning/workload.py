"""``Workload``: what a step computes and sends, tensor by tensor, as data. No torch.

Written by ``megabucket profile`` from a real step, derived from a model and a rate by ``planning.inputs``, or typed into a
config. Read by the simulator, the partitioner and the report.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

from megabucket.errors import ConfigError, name_list, printable
from megabucket.layout import ParamSpec

SCHEMA: Final = "megabucket.workload"
SCHEMA_VERSION: Final = 1

_DIFFERENCES_SHOWN: Final = 3
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
        ConfigError: no tensors, names given twice, numbers that are negative or not finite, an order that is none.
    """

    tensors: tuple[TensorWork, ...]
    bytes_per_element: int = 4
    param_bytes_per_element: int = 4
    optimizer_s: float = 0.0
    num_microbatches: int = 1
    ready_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_tensors(self.tensors)
        for name in ("bytes_per_element", "param_bytes_per_element", "num_microbatches"):
            _check_count(getattr(self, name), at_least=1, what=f"workload.{name}")
        _check_seconds(self.optimizer_s, what="workload.optimizer_s")
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
        """Return plain data, ready for JSON; ``from_dict`` gives the workload back unchanged."""
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

    @staticmethod
    def from_dict(data: object) -> Workload:
        """Read what ``to_dict`` wrote, checking everything.

        Keys of other tools are allowed beside ours at the top (a profile keeps its facts there), not inside tensors.

        Raises:
            ConfigError: not such data; the text names the field.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"a workload is a mapping with the key 'tensors', not {type(data).__name__}")
        if data.get("schema", SCHEMA) != SCHEMA or data.get("version", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ConfigError(
                f"this is {_shown(data.get('schema'))} version {_shown(data.get('version'))}; expected {SCHEMA} version "
                f"{SCHEMA_VERSION}. Profile again with this version of megabucket"
            )
        entries = data.get("tensors")
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise ConfigError(f"workload.tensors must be a list of tensors, got {_shown(entries)}")
        order = data.get("ready_order")
        if order is not None and (not isinstance(order, Sequence) or isinstance(order, str)):
            raise ConfigError(f"workload.ready_order must be a list of tensor indices or null, got {_shown(order)}")
        names = ("bytes_per_element", "param_bytes_per_element", "optimizer_s", "num_microbatches")
        return Workload(
            tensors=tuple(_read_tensor(entry, index) for index, entry in enumerate(entries)),
            ready_order=None if order is None else tuple(order),
            **{name: data[name] for name in names if name in data},
        )


def check_workload_matches(workload: Workload, specs: Sequence[ParamSpec], *, fingerprint: str | None = None) -> None:
    """Return if the workload has the trainable parameters of a model: names, order and elements.

    Args:
        specs: the trainable parameters, in registration order.
        fingerprint: what ``model_fingerprint`` gave for the model that was profiled, to compare shapes, too.

    Raises:
        ConfigError: it is a workload of another model; the text names what differs.
    """
    found = {tensor.name: tensor.numel for tensor in workload.tensors}
    wanted = {spec.name: spec.numel for spec in specs}
    if list(found.items()) == list(wanted.items()) and fingerprint in (None, model_fingerprint(specs)):
        return
    differences = []
    if missing := [name for name in wanted if name not in found]:
        differences.append(f"it lacks {name_list(missing)}")
    if extra := [name for name in found if name not in wanted]:
        differences.append(f"the model has no {name_list(extra)}")
    if not differences:
        sizes = [
            f"{printable(name)} ({found[name]} instead of {wanted[name]})" for name in wanted if found[name] != wanted[name]
        ]
        moved = [position for position, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        if sizes:
            more = "" if len(sizes) <= _DIFFERENCES_SHOWN else f" and {len(sizes) - _DIFFERENCES_SHOWN} more"
            differences.append(f"other numbers of elements: {', '.join(sizes[:_DIFFERENCES_SHOWN])}{more}")
        elif moved:
            names = (printable(list(each)[moved[0]]) for each in (found, wanted))
            differences.append("the order differs from parameter {} on: {!r} instead of {!r}".format(moved[0], *names))
        else:
            differences.append("some parameters have other shapes (the fingerprints of names and shapes differ)")
    raise ConfigError(
        f"this workload ({len(found)} tensors) is from another model ({len(wanted)} trainable parameters): "
        f"{'; '.join(differences)}. Profile this model, or describe the one that was profiled."
    )


def model_fingerprint(specs: Sequence[ParamSpec]) -> str:
    """Return the SHA-256 of names and shapes, in registration order, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([[spec.name, list(spec.shape)] for spec in specs]).encode()).hexdigest()


def _read_tensor(entry: object, index: int) -> TensorWork:
    if not isinstance(entry, Mapping) or not {"name", "numel"} <= entry.keys() <= set(TensorWork.__slots__):
        raise ConfigError(
            f"workload.tensors[{index}] must be a mapping with name and numel, and perhaps backward_s and forward_s, got "
            f"{_shown(entry)}"
        )
    return TensorWork(**entry)


def _check_tensors(tensors: Sequence[TensorWork]) -> None:
    if not tensors:
        raise ConfigError("a workload needs at least one tensor, got none; there is nothing to compute or to send")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor.name, str) or not tensor.name:
            raise ConfigError(f"workload.tensors[{index}].name must be text, not empty; got {_shown(tensor.name)}")
        # The good case first and without building texts: a large model has 100,000 of them.
        if type(tensor.numel) is int and tensor.numel >= 0:
            times = (tensor.backward_s, tensor.forward_s)
            if all(type(seconds) is float and 0 <= seconds < math.inf for seconds in times):
                continue
        place = f"workload.tensors[{index}].{{}} ({printable(tensor.name, 60)!r})"
        _check_count(tensor.numel, at_least=0, what=place.format("numel"))
        _check_seconds(tensor.backward_s, what=place.format("backward_s"))
        _check_seconds(tensor.forward_s, what=place.format("forward_s"))
    counts = Counter(tensor.name for tensor in tensors)
    if len(counts) < len(tensors):
        twice = [name for name, count in counts.items() if count > 1]
        raise ConfigError(f"workload.tensors: the same name is given twice: {name_list(twice)}; a tensor is named once")


def _check_count(value: object, *, at_least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{what} must be an integer >= {at_least}, got {_shown(value)}")


def _check_seconds(value: object, *, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{what} must be a finite number of seconds >= 0, got {_shown(value)}")


def _check_order(order: Sequence[object], count: int) -> None:
    if any(isinstance(index, bool) or not isinstance(index, int) for index in order) or sorted(order) != list(range(count)):  # type: ignore[type-var]
        raise ConfigError(
            f"workload.ready_order must name each of the {count} tensors once, by its index from 0 to {count - 1}; got "
            f"{_shown(list(order))}"
        )


def _shown(value: object) -> str:
    return printable(repr(value), 80)
