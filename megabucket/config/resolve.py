"""Derive the values a config leaves open, each with its reason.

All rules from a ``DistributedDataParallelConfig`` and a group size to gradient dtype, bucket size, padding, alignment, gradient
scale and collective. Changes no config and imports no torch. ``build_layout`` and the wrapper call single rules; ``resolve``
gives all of them to ``megabucket explain``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError, LayoutError, name_list
from megabucket.units import MIB, dtype_bytes

START_ALIGNMENT: Final = 64
"""Elements: a parameter starts at a multiple of this in a padded buffer."""

BUCKET_END_ALIGNMENT: Final = 128
"""Elements: with the group size, the divisor of a padded bucket's end."""

HIGH_BUSBW_ALIGNMENT: Final = 65_536
"""Elements: the further divisor under ``pad_buckets_for_high_nccl_busbw``."""

DEFAULT_BUCKET_NUMEL: Final = 40_000_000
"""Elements per bucket by default, for small groups."""

DEFAULT_BUCKET_NUMEL_PER_RANK: Final = 1_000_000
"""Elements per bucket and rank by default, for large groups."""

_HALF_PRECISION: Final = frozenset({"bfloat16", "float16"})

Value = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """One derived value and its reason."""

    name: str
    value: Value
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """All derived values of one config on one group."""

    dp_size: int
    param_dtype: str
    entries: tuple[Resolved, ...]

    def __getitem__(self, name: str) -> Resolved:
        """Return the entry called ``name``; ``KeyError`` if there is none."""
        return {entry.name: entry for entry in self.entries}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return name -> value and reason as plain data, ready for JSON."""
        return {entry.name: {"value": entry.value, "reason": entry.reason} for entry in self.entries}


def check_group_size(value: object, *, name: str = "dp_size") -> None:
    """Check a number of ranks.

    Raises:
        LayoutError: ``value`` is not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"{name}={value!r} is not a group size; give the number of data-parallel ranks, at least 1")


def resolve_grad_dtype(config: DistributedDataParallelConfig, param_dtype: str) -> str:
    """Return the dtype in which gradients of ``param_dtype`` parameters are stored and reduced.

    Raises:
        LayoutError: ``param_dtype`` is not a dtype that a buffer can hold.
    """
    return _grad_dtype(config, param_dtype)[0]


def fp32_local_params(config: DistributedDataParallelConfig, names: Iterable[str]) -> frozenset[str]:
    """Return which of the named parameters accumulate their 16-bit gradients in float32 on each rank.

    >>> config = DistributedDataParallelConfig(
    ...     grad_reduce_in_fp32=False, param_name_patterns_for_fp32_local_accumulation=("*.bias",)
    ... )
    >>> fp32_local_params(config, ["head.weight", "head.bias"])
    frozenset({'head.bias'})
    """
    patterns = config.param_name_patterns_for_fp32_local_accumulation
    return frozenset(name for name in names if "all" in patterns or any(fnmatchcase(name, one) for one in patterns))


def resolve_cuts(config: DistributedDataParallelConfig) -> tuple[str, ...] | None:
    """Return the names of the parameters that close a bucket, or ``None`` if a size closes buckets."""
    return None if _has_one_bucket(config) else config.bucket_cuts


def is_padded(config: DistributedDataParallelConfig) -> bool:
    """Return whether parameters are aligned and buckets padded to equal shards."""
    return config.layout == "stable" or config.use_distributed_optimizer


def bucket_end_multiple(config: DistributedDataParallelConfig, dp_size: int) -> int:
    """Return the number of elements that every bucket's end is a multiple of; 1 without padding.

    Raises:
        LayoutError: ``dp_size`` is not positive.

    >>> bucket_end_multiple(DistributedDataParallelConfig(), 3)
    384
    """
    check_group_size(dp_size)
    if not is_padded(config):
        return 1
    if config.pad_buckets_for_high_nccl_busbw:
        return math.lcm(dp_size, BUCKET_END_ALIGNMENT, HIGH_BUSBW_ALIGNMENT)
    return math.lcm(dp_size, BUCKET_END_ALIGNMENT)


def overlap_obstacle(config: DistributedDataParallelConfig, *, dp_size: int, is_one_bucket: bool) -> str | None:
    """Return why no bucket is sent before backward ends, or ``None`` if buckets are.

    Args:
        dp_size: ranks of the data-parallel group.
        is_one_bucket: whether one bucket holds everything.
    """
    if not config.overlap_grad_reduce:
        return "overlap_grad_reduce=False: buckets go out after backward"
    if dp_size == 1:
        return "dp_size=1: there is nothing to send"
    if config.bucket_groups == "single":
        return "bucket_groups='single': all buckets wait for the last gradient"
    if is_one_bucket:
        return "everything fits into one bucket, complete only when backward ends; a smaller bucket_size would overlap"
    return None


def resolve(
    config: DistributedDataParallelConfig,
    *,
    dp_size: int,
    total_numel: int | None = None,
    param_dtype: str = "float32",
    num_buffers: int = 1,
) -> ResolvedConfig:
    """Return every value that ``config`` leaves to the model and the group, each with its reason.

    Args:
        config: the section as the user wrote it.
        dp_size: ranks of the data-parallel group.
        total_numel: elements of all parameters, without padding; ``None`` if the model is not known.
        param_dtype: dtype of the parameters.
        num_buffers: buffers the model needs; more than one when parameters differ in dtype or group.

    Raises:
        ConfigError: more buckets were asked for than there are elements.
        LayoutError: ``dp_size`` is not positive, or no buffer can hold ``param_dtype``.
    """
    check_group_size(dp_size)
    grad_dtype, grad_reason = _grad_dtype(config, param_dtype)
    size = resolve_bucket_size(config, dp_size=dp_size, total_numel=total_numel, grad_itemsize_bytes=dtype_bytes(grad_dtype))
    return ResolvedConfig(
        dp_size=dp_size,
        param_dtype=param_dtype,
        entries=(
            Resolved("grad_dtype", grad_dtype, grad_reason),
            Resolved("bucket_size", size.numel if size.is_known else "unknown", size.reason),
            _order_entry(config),
            *_alignment_entries(config, dp_size),
            *_reduction_entries(config, dp_size, grad_dtype),
            _finish_entry(config),
            _overlap_entry(config, dp_size, is_one_bucket=num_buffers == 1 and size.holds(total_numel)),
        ),
    )


@dataclass(frozen=True, slots=True)
class BucketSize:
    """The rule that closes a bucket."""

    numel: int | None
    """Elements that close a bucket; ``None``: one bucket per buffer, cuts by name, or not known."""
    reason: str
    is_known: bool = True
    is_cut_by_name: bool = False

    def holds(self, total_numel: int | None) -> bool:
        """Return whether one bucket is known to hold everything."""
        if total_numel is None or not self.is_known or self.is_cut_by_name:
            return False
        return self.numel is None or total_numel <= self.numel


def _grad_dtype(config: DistributedDataParallelConfig, param_dtype: str) -> tuple[str, str]:
    dtype_bytes(param_dtype)
    if param_dtype not in _HALF_PRECISION:
        return param_dtype, f"{param_dtype} parameters keep {param_dtype} gradients"
    if config.grad_reduce_in_fp32:
        return "float32", f"grad_reduce_in_fp32=True: {param_dtype} gradients are accumulated and reduced in float32"
    reason = f"grad_reduce_in_fp32=False keeps the dtype of the {param_dtype} parameters"
    if patterns := config.param_name_patterns_for_fp32_local_accumulation:
        reason += f"; microbatches are added up in float32 where a name matches {name_list(patterns)}"
    return param_dtype, reason


def resolve_bucket_size(
    config: DistributedDataParallelConfig, *, dp_size: int, total_numel: int | None, grad_itemsize_bytes: int
) -> BucketSize:
    """Return how many elements close a bucket, and why.

    Args:
        config: the one of ``bucket_size``, ``bucket_cap_mb``, ``num_buckets`` and ``bucket_cuts`` that is given decides.
        dp_size: ranks of the data-parallel group.
        total_numel: elements of all parameters, without padding; ``None`` if the model is not known.
        grad_itemsize_bytes: bytes of one gradient element.

    Raises:
        ConfigError: more buckets were asked for than there are elements.
        LayoutError: ``dp_size`` is not positive.

    >>> resolve_bucket_size(DistributedDataParallelConfig(), dp_size=512, total_numel=10**9, grad_itemsize_bytes=4).numel
    512000000
    """
    check_group_size(dp_size)
    if _has_one_bucket(config):
        reason = "layout='megatron' without overlap_grad_reduce: one bucket per buffer, whatever sizes the buckets"
        return BucketSize(None, reason)
    if config.bucket_cuts is not None:
        return _size_from_cuts(config.bucket_cuts)
    if config.bucket_size is not None:
        return BucketSize(config.bucket_size, "bucket_size, as given")
    if config.bucket_cap_mb is not None:
        numel = max(1, int(config.bucket_cap_mb * MIB // grad_itemsize_bytes))
        reason = f"bucket_cap_mb={config.bucket_cap_mb:g} MiB of gradients at {grad_itemsize_bytes} bytes per element"
        return BucketSize(numel, reason)
    if config.num_buckets is not None:
        return _size_from_count(config.num_buckets, total_numel)
    per_rank = DEFAULT_BUCKET_NUMEL_PER_RANK * dp_size
    reason = f"default: max({DEFAULT_BUCKET_NUMEL:_}, {DEFAULT_BUCKET_NUMEL_PER_RANK:_} * dp_size={dp_size})"
    return BucketSize(max(DEFAULT_BUCKET_NUMEL, per_rank), reason)


def _has_one_bucket(config: DistributedDataParallelConfig) -> bool:
    return config.layout == "megatron" and not config.overlap_grad_reduce


def _size_from_cuts(cuts: tuple[str, ...]) -> BucketSize:
    if not cuts:
        return BucketSize(None, "bucket_cuts=[]: no parameter closes a bucket, so each buffer is one")
    places = "1 named parameter closes a bucket" if len(cuts) == 1 else f"{len(cuts)} named parameters close a bucket each"
    return BucketSize(None, f"bucket_cuts: {places}", is_cut_by_name=True)


def _order_entry(config: DistributedDataParallelConfig) -> Resolved:
    name = "buffer_order"
    if config.bucket_order is None:
        return Resolved(name, "reversed", "no bucket_order: registration reversed, roughly the order of backward")
    return Resolved(name, "recorded", f"bucket_order: {len(config.bucket_order)} parameters, the first gradient first")


def _size_from_count(num_buckets: int, total_numel: int | None) -> BucketSize:
    if total_numel is None:
        reason = f"num_buckets={num_buckets}: total elements // {num_buckets}, known once there is a model"
        return BucketSize(None, reason, is_known=False)
    # A model without elements still gets its one empty bucket.
    if num_buckets > max(total_numel, 1):
        raise ConfigError(
            f"num_buckets={num_buckets} is more than the {total_numel} elements there are to put into buckets. "
            f"Ask for at most {max(total_numel, 1)}, or give bucket_size instead."
        )
    reason = f"num_buckets={num_buckets}: {total_numel:_} elements // {num_buckets}"
    return BucketSize(max(1, total_numel // num_buckets), reason)


def _alignment_entries(config: DistributedDataParallelConfig, dp_size: int) -> tuple[Resolved, ...]:
    if not is_padded(config):
        why = "layout='megatron' without use_distributed_optimizer packs parameters back to back"
        return (
            Resolved("padded", False, why),
            Resolved("start_multiple", 1, "not padded: a parameter starts where the one before ends"),
            Resolved("bucket_end_multiple", 1, "not padded: a bucket ends where its last parameter ends"),
        )
    why = (
        "layout='stable': the same padded layout whatever is switched on"
        if config.layout == "stable"
        else "use_distributed_optimizer=True: every rank owns an equal shard of each bucket"
    )
    parts = f"dp_size={dp_size}, {BUCKET_END_ALIGNMENT}"
    if config.pad_buckets_for_high_nccl_busbw:
        parts += f", {HIGH_BUSBW_ALIGNMENT}"
    end = bucket_end_multiple(config, dp_size)
    return (
        Resolved("padded", True, why),
        Resolved("start_multiple", START_ALIGNMENT, f"padded: a parameter starts at a multiple of {START_ALIGNMENT}"),
        Resolved("bucket_end_multiple", end, f"padded: lcm({parts}), so that shards are equal"),
    )


def _reduction_entries(config: DistributedDataParallelConfig, dp_size: int, grad_dtype: str) -> tuple[Resolved, ...]:
    if config.use_distributed_optimizer:
        collective = Resolved("collective", "reduce_scatter", "use_distributed_optimizer=True: a rank needs its shard only")
    else:
        collective = Resolved("collective", "all_reduce", "use_distributed_optimizer=False: every rank steps on all parameters")
    if config.grad_reduction == "sum":
        op = Resolved("reduce_op", "sum", "grad_reduction='sum'")
        scale, why = 1.0, "grad_reduction='sum': the plain sum over the ranks"
    elif config.average_in_collective:
        op = Resolved("reduce_op", "avg", "average_in_collective=True: the collective divides")
        scale, why = 1.0, "average_in_collective=True: no scaling beside the collective"
    else:
        op = Resolved("reduce_op", "sum", "average_in_collective=False: the mean is a scaled sum")
        once = "applied once, after the sum"
        if grad_dtype in _HALF_PRECISION:
            once = "partly before and partly after the sum, so that 16 bits neither overflow nor underflow"
        scale, why = 1.0 / dp_size, f"grad_reduction='mean': 1 / dp_size={dp_size}, {once}"
    return collective, op, Resolved("gradient_scale", scale, why)


def _finish_entry(config: DistributedDataParallelConfig) -> Resolved:
    if config.finish == "explicit":
        return Resolved("finished_by", "finish_grad_sync()", "finish='explicit': the caller ends the gradient sync")
    if config.use_distributed_optimizer:
        why = "finish='auto' with reduce-scatter: DistributedOptimizer.step() waits for the gradients"
        return Resolved("finished_by", "optimizer step", why)
    why = "finish='auto' with all-reduce: gradients are ready when the last backward returns"
    return Resolved("finished_by", "end of backward", why)


def _overlap_entry(config: DistributedDataParallelConfig, dp_size: int, *, is_one_bucket: bool) -> Resolved:
    obstacle = overlap_obstacle(config, dp_size=dp_size, is_one_bucket=is_one_bucket)
    why = "overlap_grad_reduce=True: a bucket is launched as soon as its gradients are complete"
    return Resolved("overlaps_backward", obstacle is None, obstacle if obstacle is not None else why)


# The policy of a step #


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """The behaviour of a wrapper in each step, as ``resolve_step`` derives it from the config."""

    is_sharded: bool
    """Whether gradients are reduce-scattered, and each rank owns one shard of the optimizer."""
    overlaps_grads: bool
    overlaps_params: bool
    averages: bool
    """Whether the reduced gradient is a mean, by the collective or by division."""
    averages_in_collective: bool = False
    accumulates_in_fp32: bool = False
    """Whether a reduce-scatter adds 16-bit gradients up in float32."""
    is_one_batch: bool = False
    """Whether all buckets go out together."""
    finishes_with_backward: bool = False
    """Whether gradients are reduced at the end of the last backward; otherwise by an optimizer or the caller."""
    is_explicit: bool = False
    """Whether only the caller finishes the gradient sync."""
    tests_finite: bool = True
    tests_large: bool = False
    skips_nonfinite: bool = False
    unused_is_zero: bool = False
    counts_skipped_forwards: bool = True
    has_fence: bool = True
    watches_model: bool = True
    copies_on_host: bool = False
    """Whether ranks on one host may read each other's memory."""
    withheld_because: str = ""
    """Why ``param.grad`` may not be used from backward to its reduction, and what to do instead; empty if it may be."""


def resolve_step(config: DistributedDataParallelConfig) -> StepPolicy:
    """Return the policy of a config."""
    is_sharded = config.use_distributed_optimizer
    return StepPolicy(
        is_sharded=is_sharded,
        overlaps_grads=config.overlap_grad_reduce,
        overlaps_params=config.overlap_param_gather,
        averages=config.grad_reduction == "mean",
        averages_in_collective=config.average_in_collective,
        accumulates_in_fp32=config.reduce_scatter_with_fp32_accumulation,
        is_one_batch=config.bucket_groups == "single",
        finishes_with_backward=config.finish == "auto" and not is_sharded,
        is_explicit=config.finish == "explicit",
        tests_finite=config.nonfinite_gradients != "allow",
        tests_large=config.check_for_large_grads,
        skips_nonfinite=config.nonfinite_gradients == "skip_step",
        unused_is_zero=config.unused_parameters == "zero",
        counts_skipped_forwards=config.skipped_forwards == "error",
        has_fence=config.fence,
        watches_model=config.check_model_changes,
        # Without a fence only gloo finds ranks that are out of step, and it does not see same-host copies.
        copies_on_host=config.read_peer_memory and config.fence,
        withheld_because=_why_withheld(config),
    )


def _why_withheld(config: DistributedDataParallelConfig) -> str:
    if config.use_distributed_optimizer:
        return (
            "is reduce-scattered (use_distributed_optimizer=True): from backward to the optimizer's step each rank has a "
            "gradient of its own there, or one shard of the reduced one, in memory that a collective may own. Its norm, and "
            "what is clipped by it, would differ between ranks. Clip with DistributedOptimizer(..., clip_grad=1.0), and read "
            "the norm over all ranks from what its step() returns, or call its clip_grad_norm_(1.0); scale with "
            "ddp.scale_gradients() after finish_grad_sync(). "
            "With ddp.force_all_reduce = True before backward, finish_grad_sync() leaves whole gradients in param.grad."
        )
    if config.finish == "explicit":
        return (
            "is not reduced yet (finish='explicit'), and a collective may own its memory. Call ddp.finish_grad_sync() first; "
            "then read, scale or clip it."
        )
    return ""
