"""``DistributedDataParallelConfig``: what a user may say about buffers, buckets and gradient sync. No torch."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeGuard

import annotated_types as at
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import Self

from megabucket.errors import name_list
from megabucket.units import parse_count

_UNKNOWN_KEY: Final = "unknown_key"
_UNKNOWN_KEYS_SHOWN: Final = 5
_KEY_CHARS_SHOWN: Final = 60
_LARGEST_NUMBER: Final = 2**62
_FLOAT_TEXT: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Section(BaseModel):
    """Base of every config section: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse unknown keys with the likely spelling, next to whatever else is wrong in the section."""
        known = cls.model_fields
        unknown = [key for key in data if key not in known] if isinstance(data, Mapping) else []
        if not unknown:
            return handler(data)
        problems = _unknown_key_problems(unknown, cls)
        try:
            handler({key: value for key, value in data.items() if key in known})
        except ValidationError as error:
            problems += [_as_problem(detail) for detail in error.errors(include_url=False)]
        raise ValidationError.from_exception_data(cls.__name__, problems)


def _unknown_key_problems(unknown: list[Any], section: type[Section]) -> list[InitErrorDetails]:
    problems: list[InitErrorDetails] = []
    fields = section.model_fields
    # Also one level down: bucket_size is ddp.bucket_size at the top.
    children = {parent: field.annotation for parent, field in fields.items() if is_section(field.annotation)}
    known = [*fields, *(f"{parent}.{name}" for parent, child in children.items() for name in child.model_fields)]
    otherwise = f"; known keys are {', '.join(fields)}"
    for name in (str(key)[:_KEY_CHARS_SHOWN] for key in unknown[:_UNKNOWN_KEYS_SHOWN]):
        likely = difflib.get_close_matches(name, known, n=1)
        answer = f"; did you mean {likely[0]!r}?" if likely else otherwise
        problems.append(_unknown_key(f"unknown key {name!r}{answer}", loc=(name,)))
        if not likely:
            otherwise = ""  # once is enough
    hidden = len(unknown) - _UNKNOWN_KEYS_SHOWN
    if hidden > 0:
        problems.append(_unknown_key(f"and {hidden} more unknown keys", loc=()))
    return problems


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Return whether an annotation is a section. In Python 3.10 ``tuple[int]`` passes for a class, and has no bases."""
    return isinstance(annotation, type(Section)) and issubclass(annotation, Section)


def _unknown_key(text: str, *, loc: tuple[str, ...]) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(_UNKNOWN_KEY, "{text}", {"text": text}), loc=loc, input=None)


def _as_problem(detail: Any) -> InitErrorDetails:
    """Turn a reported error back into what an error is made from: custom types are given as objects, others by name."""
    kind: str | PydanticCustomError = detail["type"]
    if kind == _UNKNOWN_KEY:
        kind = PydanticCustomError(_UNKNOWN_KEY, "{text}", detail["ctx"])
    return InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"], ctx=detail.get("ctx", {}))


def _read_count(value: Any) -> Any:
    """Accept ``40M``, ``"5e8"`` and whole floats for a count; leave the rest to strict validation."""
    if isinstance(value, str):
        return parse_count(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _read_float(value: Any) -> Any:
    """Accept ``"3e-4"``; leave the rest to strict validation, which takes whole numbers, too."""
    return float(value) if isinstance(value, str) and _FLOAT_TEXT.fullmatch(value) else value


def read_tuple(value: Any) -> Any:
    """Accept a YAML list where a tuple is meant; leave the rest to strict validation."""
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, BeforeValidator(_read_count), at.Ge(0), at.Le(_LARGEST_NUMBER)]
PositiveCount = Annotated[int, BeforeValidator(_read_count), at.Gt(0), at.Le(_LARGEST_NUMBER)]
PositiveNumber = Annotated[float, at.Gt(0), at.Le(_LARGEST_NUMBER)]
Positive = Annotated[float, BeforeValidator(_read_float), at.Gt(0)]
NonNegative = Annotated[float, BeforeValidator(_read_float), at.Ge(0)]
ParamNames = Annotated[tuple[Annotated[str, at.MinLen(1)], ...], BeforeValidator(read_tuple)]


_NEEDS: Final = (
    ("reduce_scatter_with_fp32_accumulation", "use_distributed_optimizer", ": without it nothing is reduce-scattered"),
    ("overlap_param_gather", "use_distributed_optimizer", ": without it there is nothing to gather"),
    ("overlap_param_gather", "overlap_grad_reduce", ", as in Megatron"),
)
"""Switches that need another one, and why."""


class DistributedDataParallelConfig(Section):
    """How gradients are stored, cut into buckets and reduced.

    Field names are Megatron's where the meaning is Megatron's. The object is frozen and never changed by its users;
    ``megabucket.config.resolve`` derives the values that depend on the model and the group, each with its reason.
    """

    use_distributed_optimizer: bool = False
    """Reduce-scatter gradients and let each rank own one shard of the optimizer (ZeRO-1) instead of all-reducing."""

    overlap_grad_reduce: bool = True
    """Launch each bucket while backward still runs. The result and the layout do not depend on it."""

    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward instead of at the end of the optimizer step. Until then they read as
    NaN; code that touches parameters outside forward calls ``finish_param_sync()`` first."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce the gradients of 16-bit parameters in float32. ``False`` keeps the parameter's dtype."""

    param_name_patterns_for_fp32_local_accumulation: ParamNames = ()
    """Accumulate the microbatch gradients of these 16-bit parameters in float32 on each rank; round the sum to 16 bits once,
    before it is sent. Shell patterns of parameter names (``*.experts.*``), or ``all``. Takes 4 bytes per element, and needs
    ``grad_reduce_in_fp32=False``."""

    grad_reduction: Literal["mean", "sum"] = "mean"
    """What the reduced gradient is: the mean over the data-parallel ranks, or their sum."""

    average_in_collective: bool = False
    """Let the collective divide (AVG) instead of scaling once around a SUM. Only with ``grad_reduction="mean"``."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients as they are, but add them up in float32, in rank order, and round once: an exchange of parts in
    place of the back-end's reduce-scatter. Takes memory as large as the 16-bit gradient buffer (half of it with 2 ranks).
    Gradients that are float32 already (``grad_reduce_in_fp32=True``) are reduced as ever."""

    read_peer_memory: bool = True
    """Let the ranks of a gloo group read each other's memory in place of sending over sockets, where all of them (at most 8)
    run on one host and the kernel permits it: buckets of 1 MiB and more, and not with ``fence=False``. A thread of each rank
    reads, beside backward and the next forward. The result does not depend on it."""

    layout: Literal["stable", "megatron"] = "stable"
    """``stable``: one padded layout, whatever is switched on. ``megatron``: Megatron's own choices, that is no padding
    without the distributed optimizer and a single bucket without overlap."""

    bucket_size: PositiveCount | None = None
    """Close a bucket at the first parameter that brings it to this many elements (not bytes). ``None`` and no other way
    to size buckets: ``max(40_000_000, 1_000_000 * dp_size)``."""

    bucket_cap_mb: PositiveNumber | None = None
    """Size buckets by gradient bytes instead, in MiB."""

    num_buckets: PositiveCount | None = None
    """Size buckets so that about this many are cut: ``bucket_size = total elements // num_buckets``."""

    bucket_cuts: ParamNames | None = None
    """Cut buckets at named parameters instead: each name closes a bucket, as the last one in it. In which order they are given
    does not matter, and the end of a buffer needs no name, so ``[]`` asks for one bucket per buffer. What a planner finds."""

    bucket_order: ParamNames | None = None
    """Every trainable parameter, in the order in which gradients become ready in backward, the first one first. Buffers are
    laid out and buckets are launched in this order. ``None``: the reverse of registration, which is right for most models."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad the end of each bucket to a multiple of 65536 elements, which lets NCCL reach its full bus bandwidth."""

    bucket_groups: Literal["per_bucket", "single"] = "per_bucket"
    """``per_bucket``: each bucket is sent as soon as it is complete. ``single``: all buckets go out as one coalesced
    batch."""

    unused_parameters: Literal["error", "zero"] = "error"
    """What a parameter without a gradient in a whole step means: an error that names it, or a gradient of zero."""

    nonfinite_gradients: Literal["error", "skip_step", "allow"] = "error"
    """What nan or inf in a gradient of any rank means, looked for before it is reduced: an error that names rank, bucket and
    parameter; a step that no rank takes; or nothing, because ``torch.amp.GradScaler``, for instance, looks itself."""

    check_for_large_grads: bool = False
    """Warn in the log of gradients of a bucket whose norm before the reduction is ten times what it was in the first hundred
    steps, with rank, bucket and parameter. The host waits for each bucket."""

    skipped_forwards: Literal["error", "allow"] = "error"
    """What it means that ranks ran different numbers of training forwards that no backward has reached when gradients are
    reduced: a rank that skipped a batch, which is an error; or nothing. Forwards in ``eval()`` mode or under ``no_grad()``
    do not count."""

    fence: bool = True
    """Agree across ranks, once per step and before any optimizer steps, that the step is whole: step number, microbatches,
    failures. ``False`` saves one small collective and leaves faults of single ranks unnoticed by the others."""

    check_model_changes: bool = True
    """Look in each step whether the module is still the one that was wrapped: storages, ``requires_grad``, parameters."""

    heartbeat_s: PositiveNumber | None = 1.0
    """How often each rank writes a sign of life into the store of its process group. ``None``: never, so a frozen rank is
    noticed only when the process group times out."""

    dead_after_s: PositiveNumber = 30.0
    """A rank without a sign of life for this long is lost: whoever waits for it gets an error that names it. More than twice
    ``heartbeat_s``, and less than the time limit of the process group."""

    straggler_warning_s: PositiveNumber | None = 30.0
    """Warn, naming the rank and what it does, when others have waited this long for a rank that is alive. ``None``: never."""

    finish: Literal["auto", "explicit"] = "auto"
    """``auto``: gradients are ready for use after the last backward (all-reduce) or inside the optimizer's step
    (reduce-scatter). ``explicit``: the caller calls ``finish_grad_sync()``, as with Megatron."""

    step_traces: bool = False
    """Note when each bucket is ready, launched, done and waited for, so that ``last_step_trace`` tells what of the
    communication was hidden. Costs a little per bucket, nothing per parameter."""

    profiler_ranges: bool = False
    """Name the launch of each bucket and the wait for it, the fence and the optimizer in the traces of profilers:
    ``torch.profiler.record_function`` and, on CUDA, NVTX."""

    init_sync: bool = True
    """Broadcast parameters and module buffers from the first rank of the group when wrapping."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> DistributedDataParallelConfig:
        problems = []
        sizes: dict[str, object] = {
            name: value
            for name in ("bucket_size", "bucket_cap_mb", "num_buckets")
            if (value := getattr(self, name)) is not None
        }
        if self.bucket_cuts is not None:
            sizes["bucket_cuts"] = f"[{len(self.bucket_cuts)} names]"
        if len(sizes) > 1:
            given = ", ".join(f"{name}={value}" for name, value in sizes.items())
            problems.append(f"{' and '.join(sizes)} all size the buckets; keep one of them (got {given})")
        if self.average_in_collective and self.grad_reduction == "sum":
            problems.append(
                "average_in_collective=True divides, but grad_reduction='sum' asks for the plain sum; drop one of them"
            )
        problems += [
            f"{field}=True needs {needed}=True{why}"
            for field, needed, why in _NEEDS
            if getattr(self, field) and not getattr(self, needed)
        ]
        if self.param_name_patterns_for_fp32_local_accumulation and self.grad_reduce_in_fp32:
            problems.append(
                "param_name_patterns_for_fp32_local_accumulation rounds float32 sums to 16 bits before they are sent, but "
                "grad_reduce_in_fp32=True sends float32; set it to False, or drop the patterns"
            )
        if self.heartbeat_s is not None and self.dead_after_s <= 2 * self.heartbeat_s:
            problems.append(
                f"dead_after_s={self.dead_after_s:g} must be more than twice heartbeat_s={self.heartbeat_s:g}: a rank whose "
                "last sign of life is one beat old is not dead"
            )
        for field in ("bucket_cuts", "bucket_order"):
            if twice := [name for name, count in Counter(getattr(self, field) or ()).items() if count > 1]:
                problems.append(f"{field} has {name_list(twice)} more than once; a parameter has one place in its buffer")
        if problems:
            raise ValueError("; ".join(problems))
        return self
