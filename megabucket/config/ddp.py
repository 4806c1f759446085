"""``DistributedDataParallelConfig``: the settings of buffers, buckets and gradient sync. No torch."""

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

from megabucket.errors import ConfigError, name_list
from megabucket.units import parse_count

_UNKNOWN_KEY: Final = "unknown_key"
_UNKNOWN_KEYS_SHOWN: Final = 5
_KEY_CHARS_SHOWN: Final = 60
_LARGEST_NUMBER: Final = 2**62
_FLOAT_TEXT: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Section(BaseModel):
    """Base of every config section: frozen and strict, without unknown keys."""

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
        """Report unknown keys with the likely spelling, together with all other errors of the section."""
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
    """Return whether an annotation is a section. In Python 3.10 ``tuple[int]`` counts as a class without bases."""
    return isinstance(annotation, type(Section)) and issubclass(annotation, Section)


def _unknown_key(text: str, *, loc: tuple[str, ...]) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(_UNKNOWN_KEY, "{text}", {"text": text}), loc=loc, input=None)


def _as_problem(detail: Any) -> InitErrorDetails:
    """Convert a reported error to the input of a new one: custom types are given as objects, others by name."""
    kind: str | PydanticCustomError = detail["type"]
    if kind == _UNKNOWN_KEY:
        kind = PydanticCustomError(_UNKNOWN_KEY, "{text}", detail["ctx"])
    return InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"], ctx=detail.get("ctx", {}))


def _read_count(value: Any) -> Any:
    """Accept ``40M``, ``"5e8"`` and whole floats as a count; strict validation follows."""
    if isinstance(value, str):
        return parse_count(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _read_float(value: Any) -> Any:
    """Accept ``"3e-4"``; strict validation follows, which accepts whole numbers as well."""
    return float(value) if isinstance(value, str) and _FLOAT_TEXT.fullmatch(value) else value


def read_tuple(value: Any) -> Any:
    """Accept a YAML list as a tuple; strict validation follows."""
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

_ONE_DEVICE: Final = "a rank has one device; move the module there before wrapping, and inputs before each forward"
_OWN_BUFFERS: Final = (
    "module buffers are made equal when wrapping and are each rank's own afterwards (forward_sync_buffers=False); "
    "broadcast_params() makes them equal again"
)
_OWN_HOOK: Final = "every parameter is reduced in its bucket; bucket_order and bucket_cuts in the config say when"
_TORCH_FIELDS: Final = ("bucket_cap_mb", "init_sync")
_TORCH_ARGUMENTS: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "device_ids": ((None,), _ONE_DEVICE),
    "output_device": ((None,), _ONE_DEVICE),
    "dim": ((0,), "inputs are not scattered"),
    "broadcast_buffers": ((False,), _OWN_BUFFERS),
    "forward_sync_buffers": ((False,), _OWN_BUFFERS),
    "find_unused_parameters": ((False, True), "True is unused_parameters='skip' in the config"),
    "check_reduction": ((False,), "torch ignores it"),
    "gradient_as_bucket_view": ((True,), "gradients are views into the buffer wherever dtypes are equal"),
    "static_graph": ((False, True), "the first step learns the graph"),
    "delay_all_reduce_named_params": ((None,), _OWN_HOOK),
    "param_to_hook_all_reduce": ((None,), _OWN_HOOK),
    "mixed_precision": ((None,), "wrap a 16-bit module; DistributedOptimizer keeps float32 main parameters of it"),
    "device_mesh": ((None,), "pass the mesh as process_group="),
    "skip_all_reduce_unused_params": ((False,), "every rank sends every bucket in every step"),
    "bucket_cap_mb_list": ((None,), "bucket_cuts in the config names the parameters that close a bucket"),
    "batched_grad_copy": ((False, True), "gradients are copied in batches"),
}
"""Arguments of torch DDP: the values that describe this wrapper's behaviour, and the remedy for other values."""


class DistributedDataParallelConfig(Section):
    """How gradients are stored, cut into buckets and reduced. Field names are Megatron's where the meaning is Megatron's."""

    use_distributed_optimizer: bool = False
    """Reduce-scatter gradients, and let each rank own one shard of the optimizer (ZeRO-1), instead of all-reducing."""

    overlap_grad_reduce: bool = True
    """Launch each bucket while backward still runs. Result and layout do not depend on it."""

    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward, not at the end of the optimizer step. Until then they read as NaN;
    outside forward call ``finish_param_sync()`` first."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce the gradients of 16-bit parameters in float32. ``False`` keeps the parameter's dtype."""

    param_name_patterns_for_fp32_local_accumulation: ParamNames = ()
    """Accumulate the microbatches of these 16-bit parameters in float32 (4 bytes per element) and round once, before the
    reduction. Shell patterns of names (``*.experts.*``) or ``all``. Needs ``grad_reduce_in_fp32=False``."""

    grad_reduction: Literal["mean", "sum"] = "mean"
    """Reduce gradients to their mean over the data-parallel ranks, or to their sum."""

    average_in_collective: bool = False
    """Let the collective divide (AVG) instead of scaling once around a SUM. Only with ``grad_reduction="mean"``."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Send 16-bit gradients as they are, add them in float32 in rank order, and round once. Takes as much memory as the
    16-bit gradient buffer, half of it with 2 ranks. Does not change float32 gradients."""

    reduction_order: Literal["backend", "rank"] = "backend"
    """The order in which the values of the ranks are added; with three ranks or more it decides the last bits. ``backend``:
    that of the back-end, which depends on how buckets are cut. ``rank``: rank order, inside each replica and then over
    replicas, 16-bit values in float32 and rounded once; and the norm is added without rounding. Weights are then the same, bit
    by bit, for every bucket plan, mode and exchange. An all-reduce becomes a reduce-scatter and a gather after backward. Takes
    as much memory as the gradient buffer, half of it with 2 ranks; none for buckets that ranks read in each other's memory."""

    read_peer_memory: bool = True
    """Let the ranks of a gloo group read each other's memory instead of using sockets, if at most 8 of them run on one host
    and the kernel permits it. For buckets of 1 MiB and more; not with ``fence=False``. The result does not depend on it."""

    layout: Literal["stable", "megatron"] = "stable"
    """``stable``: the same padded layout for all switches. ``megatron``: as Megatron, no padding without the distributed
    optimizer and a single bucket without overlap."""

    bucket_size: PositiveCount | None = None
    """Close a bucket at the first parameter that brings it to this many elements (not bytes). ``None`` and no other way
    to size buckets: ``max(40_000_000, 1_000_000 * dp_size)``."""

    bucket_cap_mb: PositiveNumber | None = None
    """Size buckets by gradient bytes instead, in MiB."""

    num_buckets: PositiveCount | None = None
    """Cut about this many buckets: ``bucket_size = total elements // num_buckets``."""

    bucket_cuts: ParamNames | None = None
    """Close a bucket at each of these parameters instead, in any order. The end of a buffer needs no name: ``[]`` makes one
    bucket per buffer."""

    bucket_order: ParamNames | None = None
    """All trainable parameters in the order in which their gradients become ready. Buffers and launches follow it. ``None``:
    the reverse of registration, which suits most models."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad the end of each bucket to a multiple of 65536 elements, for NCCL's full bus bandwidth."""

    bucket_groups: Literal["per_bucket", "single"] = "per_bucket"
    """``per_bucket``: send each bucket as soon as it is complete. ``single``: send all buckets as one coalesced batch."""

    unused_parameters: Literal["error", "zero", "skip"] = "error"
    """A parameter without a gradient in a whole step, all microbatches included. ``error``: an error that names it. ``zero``: a
    gradient of zero, so that weight decay still shrinks it and momentum still moves it. ``skip``: as with torch DDP's
    ``find_unused_parameters=True``; if no rank has a gradient, ``.grad``, values and optimizer state stay as they are,
    otherwise the ranks without one count as zeros. This costs a collective of one byte per parameter in each step and reduction
    group, and ``DistributedOptimizer`` then has one flat tensor per parameter instead of one per bucket."""

    nonfinite_gradients: Literal["error", "skip_step", "allow"] = "error"
    """Nan or inf in a gradient before its reduction: an error that names rank, bucket and parameter; a step that no rank
    takes; or no test, because ``torch.amp.GradScaler`` tests, for instance."""

    check_for_large_grads: bool = False
    """Log a warning if the norm of a bucket before the reduction is ten times that of the first hundred steps. The host waits
    for each bucket."""

    skipped_forwards: Literal["error", "allow"] = "error"
    """Whether it is an error if ranks ran different numbers of training forwards without a backward in a step, as a skipped
    batch causes. Forwards in ``eval()`` mode or under ``no_grad()`` do not count."""

    fence: bool = True
    """Agree across ranks once per step, before any update, that the step is whole: step number, microbatches, failures.
    ``False`` saves one small collective; faults of single ranks then go unnoticed by the others."""

    check_model_changes: bool = True
    """Check in each step that the module is the one that was wrapped: storages, ``requires_grad``, parameters."""

    heartbeat_s: PositiveNumber | None = 1.0
    """Seconds between the heartbeats that each rank writes into the store of its process group. ``None``: none, and a frozen
    rank is noticed only by the timeout of the process group."""

    dead_after_s: PositiveNumber = 30.0
    """A rank without a heartbeat for this long is lost, and ranks that wait for it get an error that names it. More than
    twice ``heartbeat_s``, and less than the timeout of the process group."""

    straggler_warning_s: PositiveNumber | None = 30.0
    """Warn when others have waited this long for a rank that is alive, with its name and activity. ``None``: never."""

    finish: Literal["auto", "explicit"] = "auto"
    """``auto``: gradients are ready after the last backward (all-reduce) or in the optimizer's step (reduce-scatter).
    ``explicit``: the caller calls ``finish_grad_sync()``, as with Megatron."""

    step_traces: bool = False
    """Record when each bucket is ready, launched, done and waited for, for ``last_step_trace``. Costs a little per bucket."""

    profiler_ranges: bool = False
    """Name bucket launches and waits, the fence and the optimizer in profiler traces: ``torch.profiler.record_function`` and,
    on CUDA, NVTX."""

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
        if self.reduction_order == "rank" and self.layout == "megatron" and not self.use_distributed_optimizer:
            problems.append(
                "reduction_order='rank' adds equal parts of each bucket on each rank, but layout='megatron' without "
                "use_distributed_optimizer does not pad buckets to equal parts; use layout='stable'"
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


def is_what_happens(name: str, value: object) -> bool:
    """Return whether an argument of torch DDP describes what the wrapper does anyway."""
    return name in _TORCH_ARGUMENTS and value in _TORCH_ARGUMENTS[name][0]


def with_torch_arguments(
    config: DistributedDataParallelConfig | None, arguments: Mapping[str, Any]
) -> DistributedDataParallelConfig:
    """Return a config with the arguments of torch DDP that are fields of it.

    Raises:
        ConfigError: an argument asks for another behaviour; the text says what to do instead.
        TypeError: torch DDP has no such argument.
    """
    for name in sorted(arguments.keys() - set(_TORCH_FIELDS)):
        if name not in _TORCH_ARGUMENTS:
            raise TypeError(f"DistributedDataParallel.__init__() got an unexpected keyword argument {name!r}")
        if not is_what_happens(name, arguments[name]):
            raise ConfigError(f"torch DDP's argument {name}= cannot be honoured: {_TORCH_ARGUMENTS[name][1]}")
    config = config or DistributedDataParallelConfig()
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    if twice := sorted(fields.keys() & arguments.keys()):
        raise ConfigError(f"{name_list(twice)} given as an argument and in the config; keep one")
    given = {name: arguments[name] for name in _TORCH_FIELDS if name in arguments}
    if arguments.get("find_unused_parameters"):
        if (unused := fields.pop("unused_parameters", "skip")) != "skip":
            raise ConfigError(
                f"find_unused_parameters=True is unused_parameters='skip', but the config has unused_parameters={unused!r}; "
                "keep one"
            )
        given["unused_parameters"] = "skip"
    return type(config)(**fields, **given)
