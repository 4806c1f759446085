"""Derive the values a config leaves open.

The rules from a ``DistributedDataParallelConfig`` and a group size to gradient dtype, bucket size, padding and the policy of a
step. Changes no config and imports no torch. ``build_layout`` and the wrapper call them; their reasons are in
``cli.explain_text``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError, LayoutError
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

HALF_PRECISION: Final = frozenset({"bfloat16", "float16"})
"""Dtypes whose gradients ``grad_reduce_in_fp32`` turns into float32."""


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
    dtype_bytes(param_dtype)
    return "float32" if param_dtype in HALF_PRECISION and config.grad_reduce_in_fp32 else param_dtype


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


@dataclass(frozen=True, slots=True)
class BucketSize:
    """The rule that closes a bucket."""

    numel: int | None
    """Elements that close a bucket; ``None``: one bucket per buffer, cuts by name, or not known without a model."""
    decided_by: Literal["layout", "bucket_cuts", "bucket_size", "bucket_cap_mb", "num_buckets", "default"]
    """The field of the config that gave it, or `default`."""


def resolve_bucket_size(
    config: DistributedDataParallelConfig, *, dp_size: int, total_numel: int | None, grad_itemsize_bytes: int
) -> BucketSize:
    """Return how many elements close a bucket, and which field says so.

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
        return BucketSize(None, "layout")
    if config.bucket_cuts is not None:
        return BucketSize(None, "bucket_cuts")
    if config.bucket_size is not None:
        return BucketSize(config.bucket_size, "bucket_size")
    if config.bucket_cap_mb is not None:
        return BucketSize(max(1, int(config.bucket_cap_mb * MIB // grad_itemsize_bytes)), "bucket_cap_mb")
    if config.num_buckets is not None:
        return BucketSize(_numel_from_count(config.num_buckets, total_numel), "num_buckets")
    return BucketSize(max(DEFAULT_BUCKET_NUMEL, DEFAULT_BUCKET_NUMEL_PER_RANK * dp_size), "default")


def _has_one_bucket(config: DistributedDataParallelConfig) -> bool:
    return config.layout == "megatron" and not config.overlap_grad_reduce


def _numel_from_count(num_buckets: int, total_numel: int | None) -> int | None:
    if total_numel is None:
        return None
    # A model without elements still gets its one empty bucket.
    if num_buckets > max(total_numel, 1):
        raise ConfigError(
            f"num_buckets={num_buckets} is more than the {total_numel} elements there are to put into buckets. "
            f"Ask for at most {max(total_numel, 1)}, or give bucket_size instead."
        )
    return max(1, total_numel // num_buckets)


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
    sums_in_rank_order: bool = False
    """Whether all sums over ranks that reach the weights have one order, so that their bits do not depend on buckets."""
    gathers_grads: bool = False
    """Whether gradients are reduce-scattered, and gathered in every step, instead of all-reduced."""
    is_one_batch: bool = False
    """Whether all buckets go out together."""
    finishes_with_backward: bool = False
    """Whether gradients are reduced at the end of the last backward; otherwise by an optimizer or the caller."""
    is_explicit: bool = False
    """Whether only the caller finishes the gradient sync."""
    tests_finite: bool = True
    tests_large: bool = False
    skips_nonfinite: bool = False
    allows_unused: bool = False
    """Whether a parameter may have no gradient in a step; it is then reduced as zeros."""
    skips_unused: bool = False
    """Whether a parameter without a gradient on any rank is left alone."""
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
        sums_in_rank_order=config.reduction_order == "rank",
        gathers_grads=config.reduction_order == "rank" and not is_sharded,
        is_one_batch=config.bucket_groups == "single",
        finishes_with_backward=config.finish == "auto" and not is_sharded,
        is_explicit=config.finish == "explicit",
        tests_finite=config.nonfinite_gradients != "allow",
        tests_large=config.check_for_large_grads,
        skips_nonfinite=config.nonfinite_gradients == "skip_step",
        allows_unused=config.unused_parameters != "error",
        skips_unused=config.unused_parameters == "skip",
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
