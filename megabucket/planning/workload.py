"""``Workload``: what a step computes and sends, tensor by tensor, and the ``workload`` section of a config. No torch.

``megabucket profile`` writes one from a real step. Without a profile, when gradients become ready is guessed from a list of
parameters and a rate, by the rule of Kaplan et al. ("Scaling Laws for Neural Language Models", 2020, section 2.1): a parameter
takes 2 operations per token in forward and 4 in backward. Attention's own products and all memory-bound work are left out, so
``flops_per_s`` is the rate a step reaches as a whole. A look-up in an embedding multiplies nothing: embeddings take no time,
and a tied one takes its time where it serves as the output projection, at the end of forward and the beginning of backward. An
expert computes its share of the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import annotated_types as at
from pydantic import BeforeValidator, ValidationError, model_validator

from megabucket.config import DistributedDataParallelConfig
from megabucket.config.ddp import Count, NonNegative, Positive, PositiveCount, Section, read_tuple
from megabucket.config.resolve import resolve_grad_dtype
from megabucket.errors import ConfigError, name_list, printable
from megabucket.layout import ParamSpec
from megabucket.planning.architecture import decoder_of
from megabucket.planning.documents import Document, read_json
from megabucket.planning.load import explain_validation_error
from megabucket.planning.model_config import ArchitectureConfig, MoeConfig
from megabucket.units import dtype_bytes

SCHEMA: Final = "megabucket.workload"
SCHEMA_VERSION: Final = 1

MAX_WORKLOAD_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a workload file: 100,000 tensors take a sixth of it."""

FORWARD_FLOPS: Final = 2
"""Operations per parameter and token in forward: a multiplication and an addition."""

BACKWARD_FLOPS: Final = 4
"""Operations per parameter and token in backward: the same for the input's gradient and for the weight's."""

_OUTPUT_NAMES: Final = {"lm_head", "head", "unembed", "embed_out"}
_DTYPE_OF_BYTES: Final = {8: "float64", 4: "float32", 2: "bfloat16"}
_FIELDS: Final = ("bytes_per_element", "param_bytes_per_element", "optimizer_s", "num_microbatches", "ready_order")


class TensorWork(NamedTuple):
    """One trainable tensor: its size and its part of the passes."""

    name: Annotated[str, at.Len(1, 1_000)]
    """Unique in the workload."""
    numel: Count
    """Elements; 0 is allowed and sends nothing."""
    backward_s: NonNegative = 0.0
    """Seconds between the moment the gradient before it (in ready order) became ready and its own."""
    forward_s: NonNegative = 0.0
    """Seconds of forward from the moment it is first needed to the moment the next tensor is."""


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
        tensors = tuple(tensor._replace(backward_s=own_s[index]) for index, tensor in enumerate(self.tensors))
        return replace(self, tensors=tensors, ready_order=order)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; ``read_workload`` gives the workload back unchanged."""
        tensors = [tensor._asdict() for tensor in self.tensors]
        return {"schema": SCHEMA, "version": SCHEMA_VERSION, **asdict(self), "tensors": tensors}


def _check_order(order: Sequence[int], count: int) -> None:
    if sorted(order) != list(range(count)):
        raise ConfigError(
            f"workload.ready_order must name each of the {count} tensors once, by its index from 0 to {count - 1}; got "
            f"{printable(repr(list(order)), 80)}"
        )


def check_workload_matches(workload: Workload, specs: Sequence[ParamSpec], *, fingerprint: str | None = None) -> None:
    """Return if the workload has the trainable parameters of a model: names, order and elements.

    Args:
        specs: the trainable parameters, in registration order.
        fingerprint: of the model that was profiled, as ``model_fingerprint`` returns it, to compare shapes as well.

    Raises:
        ConfigError: it is a workload of another model; the text names the first difference.
    """
    found = [(tensor.name, tensor.numel) for tensor in workload.tensors]
    wanted = [(spec.name, spec.numel) for spec in specs]
    if found == wanted and fingerprint in (None, model_fingerprint(specs)):
        return
    difference = "some parameters have other shapes (the fingerprints of names and shapes differ)"
    for position, pair in enumerate(zip_longest(found, wanted)):
        if pair[0] != pair[1]:
            own, other = (f"{printable(each[0])!r} with {each[1]} elements" if each else "nothing" for each in pair)
            difference = f"parameter {position} is {own} instead of {other}"
            break
    raise ConfigError(
        f"this workload ({len(found)} tensors) is from another model ({len(wanted)} trainable parameters): {difference}. "
        "Profile this model, or describe the one that was profiled."
    )


def model_fingerprint(specs: Sequence[ParamSpec]) -> str:
    """Return the SHA-256 of names and shapes, in registration order, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([[spec.name, list(spec.shape)] for spec in specs]).encode()).hexdigest()


# The section, and files #


class WorkloadConfig(Section):
    """The compute of a step: tensors, or a file, or a rate at which the ``model`` is computed."""

    tensors: Annotated[tuple[TensorWork, ...], BeforeValidator(read_tuple), at.MinLen(1)] | None = None
    """The tensors in forward order: ``name`` and ``numel`` of each, ``backward_s`` from the gradient before it to its own, and
    ``forward_s`` from its first need to that of the next one."""

    path: Annotated[str, at.Len(1, 4_096)] | None = None
    """A ``workload.json`` of ``megabucket profile``, relative to the working directory."""

    tokens_per_microbatch: PositiveCount | None = None
    """Tokens that one rank computes in one forward and backward. With ``flops_per_s`` and a ``model``: a parameter takes 2
    operations per token in forward and 4 in backward."""

    flops_per_s: Positive | None = None
    """Floating-point operations per second that one rank really reaches."""

    bytes_per_element: Annotated[PositiveCount, at.Le(8)] | None = None
    """Bytes of a gradient element on the wire. ``None``: as in the file or the model, else 4."""

    param_bytes_per_element: Annotated[PositiveCount, at.Le(8)] | None = None
    """Bytes of a parameter element on the wire. ``None``: as in the file or the model, else 4."""

    optimizer_s: NonNegative | None = None
    """Seconds of the optimizer in a step. ``None``: as in the file, else 0."""

    num_microbatches: PositiveCount | None = None
    """Forward and backward passes in a step; the last one sends. ``None``: as in the file, else 1."""

    ready_order: Annotated[tuple[Count, ...], BeforeValidator(read_tuple)] | None = None
    """Positions in ``tensors`` in the order in which gradients become ready. ``None``: last tensor first."""

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadConfig:
        if (self.tokens_per_microbatch is None) != (self.flops_per_s is None):
            raise ValueError("tokens_per_microbatch and flops_per_s belong together; give both, or neither")
        given = [name for name in ("tensors", "path", "flops_per_s") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} all say what is computed; keep one of them")
        if self.ready_order is not None and self.tensors is None:
            raise ValueError("ready_order gives positions in tensors; with a model, give ddp.bucket_order instead")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are those of a ``Workload`` as well, as far as they are given."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}

    def listed(self) -> Workload:
        """Return the workload of ``tensors``."""
        return Workload(self.tensors or (), **self.given)


def read_workload(path: Path, specs: Sequence[ParamSpec] | None = None) -> Workload:
    """Read a ``workload.json``, which must be of a model with these trainable parameters, if they are given.

    Raises:
        ConfigError: the file cannot be read, is larger than 64 MiB, or is no workload of the model.
    """
    data = read_json(path, max_bytes=MAX_WORKLOAD_BYTES, what="a workload")
    workload = workload_from_dict(data, source=str(path))
    if specs is not None:
        facts = data.get("facts")
        fingerprint = facts.get("model_fingerprint") if isinstance(facts, dict) else None  # as ``megabucket profile`` writes it
        check_workload_matches(workload, specs, fingerprint=fingerprint)
    return workload


def workload_from_dict(data: Any, *, source: str = "workload") -> Workload:
    """Return the workload whose ``to_dict`` gave these data. Keys of other tools may stand beside ours, not inside tensors.

    Raises:
        ConfigError: not such data; the text names ``source`` and the field.
    """
    if not isinstance(data, dict) or not isinstance(data.get("tensors"), list | tuple):
        raise ConfigError(f"{source}: a workload is a mapping with a list of tensors under the key 'tensors'")
    if (data.get("schema", SCHEMA), data.get("version", SCHEMA_VERSION)) != (SCHEMA, SCHEMA_VERSION):
        raise ConfigError(f"{source}: not {SCHEMA} version {SCHEMA_VERSION}. Profile again with this version of megabucket")
    fields = {name: data[name] for name in ("tensors", *_FIELDS) if name in data}
    try:
        return WorkloadConfig.model_validate(fields).listed()
    except ValidationError as error:
        raise explain_validation_error(error, data=fields, document=Document(fields, source)) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


# A model at a rate #


def is_lookup(name: str) -> bool:
    """Return whether a parameter is an embedding table by its name: a part contains ``embed``, or is ``wte`` or ``wpe``.

    Output projections called ``unembed`` or ``embed_out`` are none.

    >>> [is_lookup(name) for name in ("model.embed_tokens.weight", "wpe.weight", "lm_head.weight", "embed_out.weight")]
    [True, True, False, False]
    """
    parts = name.lower().split(".")
    return any(
        part in {"wte", "wpe"} or ("embed" in part and "unembed" not in part and "out" not in part.split("_")) for part in parts
    )


def hidden_matrices(specs: Iterable[ParamSpec]) -> frozenset[str]:
    """Return the names of the matrices between embedding and output projection, which Muon is for.

    A matrix has two dimensions. The output projection is known by its name, or by the shape of the largest embedding.

    >>> shapes = {"wte.weight": (9, 4), "h.0.mlp.weight": (8, 4), "h.0.norm.weight": (4,), "score.weight": (9, 4)}
    >>> hidden_matrices(ParamSpec(name, shape) for name, shape in shapes.items())
    frozenset({'h.0.mlp.weight'})
    """
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    tables = [spec for spec in matrices if is_lookup(spec.name)]
    vocabulary = max(tables, key=lambda spec: spec.numel).shape if tables else None
    hidden = (spec.name for spec in matrices if not is_lookup(spec.name) and spec.shape != vocabulary)
    return frozenset(name for name in hidden if _OUTPUT_NAMES.isdisjoint(name.lower().split(".")))


def workload_of_specs(
    specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig, *, flop_s: float, model: ArchitectureConfig | None = None
) -> Workload:
    """Return the workload of a model.

    Args:
        flop_s: seconds of one operation on each token of a microbatch.
        specs: trainable parameters in registration order, tied ones once.
        ddp: decides the gradients' dtype, and the ready order if it has one.
        model: says whether the token embedding is also the output projection, and how many of the experts a token passes.

    Raises:
        ConfigError: no parameters, ``ddp.bucket_order`` names others, or the model's ``config.json`` cannot be read.
    """
    decoder = decoder_of(model) if model is not None else None
    routed = decoder.num_experts_per_token / decoder.num_experts if isinstance(decoder, MoeConfig) else 1.0
    tensors = []
    for spec in specs:
        numel = 0.0 if is_lookup(spec.name) else spec.numel * (routed if spec.group == "expert" else 1.0)
        tensors.append(TensorWork(spec.name, spec.numel, BACKWARD_FLOPS * numel * flop_s, FORWARD_FLOPS * numel * flop_s))
    if decoder is not None and decoder.tied_embeddings:
        # The output projection comes last: the gradient of the last parameter has to wait until it was passed.
        numel, last = max(spec.numel for spec in specs if is_lookup(spec.name)), tensors[-1]
        backward_s = last.backward_s + BACKWARD_FLOPS * numel * flop_s
        tensors[-1] = last._replace(backward_s=backward_s, forward_s=last.forward_s + FORWARD_FLOPS * numel * flop_s)
    wire = wire_bytes(specs, ddp)
    return Workload(
        tuple(tensors),
        bytes_per_element=wire.gradient,
        param_bytes_per_element=wire.parameter,
        ready_order=_ready_order(specs, ddp),
    )


class WireBytes(NamedTuple):
    """Bytes of an element on the wire."""

    parameter: int
    gradient: int


def wire_bytes(specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig) -> WireBytes:
    """Return the bytes of a parameter and of a gradient element, in the dtype most elements have."""
    numel_of: Counter[str] = Counter()
    for spec in specs:
        numel_of[spec.dtype] += spec.numel
    dtype = numel_of.most_common(1)[0][0] if numel_of else "float32"
    return WireBytes(dtype_bytes(dtype), dtype_bytes(resolve_grad_dtype(ddp, dtype)))


def _ready_order(specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig) -> tuple[int, ...] | None:
    if ddp.bucket_order is None:
        return None
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    if set(ddp.bucket_order) != set(index_of):
        raise ConfigError("ddp.bucket_order does not name exactly the trainable parameters of the model; record it anew")
    return tuple(index_of[name] for name in ddp.bucket_order)
