"""What ``megabucket explain`` prints: each derived value of a config with its reason. The rules are in ``config.resolve``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import (
    BUCKET_END_ALIGNMENT,
    DEFAULT_BUCKET_NUMEL,
    DEFAULT_BUCKET_NUMEL_PER_RANK,
    HALF_PRECISION,
    HIGH_BUSBW_ALIGNMENT,
    START_ALIGNMENT,
    bucket_end_multiple,
    check_group_size,
    is_padded,
    overlap_obstacle,
    resolve_bucket_size,
    resolve_cuts,
    resolve_grad_dtype,
)
from megabucket.errors import name_list
from megabucket.units import dtype_bytes

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
    grad_dtype = _grad_dtype_entry(config, param_dtype)
    size = _size_entry(config, dp_size, total_numel, grad_itemsize_bytes=dtype_bytes(str(grad_dtype.value)))
    is_one_bucket = num_buffers == 1 and _is_one_bucket(config, size.value, total_numel)
    return ResolvedConfig(
        dp_size=dp_size,
        param_dtype=param_dtype,
        entries=(
            grad_dtype,
            size,
            _order_entry(config),
            *_alignment_entries(config, dp_size),
            *_reduction_entries(config, dp_size, is_float16=grad_dtype.value == "float16"),
            _finish_entry(config),
            _overlap_entry(config, dp_size, is_one_bucket=is_one_bucket),
        ),
    )


def _grad_dtype_entry(config: DistributedDataParallelConfig, param_dtype: str) -> Resolved:
    grad_dtype = resolve_grad_dtype(config, param_dtype)
    if param_dtype not in HALF_PRECISION:
        why = f"{param_dtype} parameters keep {param_dtype} gradients"
    elif config.grad_reduce_in_fp32:
        why = f"grad_reduce_in_fp32=True: {param_dtype} gradients are accumulated and reduced in float32"
    else:
        why = f"grad_reduce_in_fp32=False keeps the dtype of the {param_dtype} parameters"
        if patterns := config.param_name_patterns_for_fp32_local_accumulation:
            why += f"; microbatches are added up in float32 where a name matches {name_list(patterns)}"
    return Resolved("grad_dtype", grad_dtype, why)


def _size_entry(
    config: DistributedDataParallelConfig, dp_size: int, total_numel: int | None, *, grad_itemsize_bytes: int
) -> Resolved:
    size = resolve_bucket_size(config, dp_size=dp_size, total_numel=total_numel, grad_itemsize_bytes=grad_itemsize_bytes)
    value: Value = size.numel
    if size.decided_by == "layout":
        why = "layout='megatron' without overlap_grad_reduce: one bucket per buffer, whatever sizes the buckets"
    elif size.decided_by == "bucket_cuts":
        why = _cuts_reason(config.bucket_cuts or ())
    elif size.decided_by == "bucket_size":
        why = "bucket_size, as given"
    elif size.decided_by == "bucket_cap_mb":
        why = f"bucket_cap_mb={config.bucket_cap_mb:g} MiB of gradients at {grad_itemsize_bytes} bytes per element"
    elif size.decided_by == "num_buckets" and total_numel is None:
        value = "unknown"
        why = f"num_buckets={config.num_buckets}: total elements // {config.num_buckets}, known once there is a model"
    elif size.decided_by == "num_buckets":
        why = f"num_buckets={config.num_buckets}: {total_numel:_} elements // {config.num_buckets}"
    else:
        why = f"default: max({DEFAULT_BUCKET_NUMEL:_}, {DEFAULT_BUCKET_NUMEL_PER_RANK:_} * dp_size={dp_size})"
    return Resolved("bucket_size", value, why)


def _cuts_reason(cuts: tuple[str, ...]) -> str:
    if not cuts:
        return "bucket_cuts=[]: no parameter closes a bucket, so each buffer is one"
    places = "1 named parameter closes a bucket" if len(cuts) == 1 else f"{len(cuts)} named parameters close a bucket each"
    return f"bucket_cuts: {places}"


def _is_one_bucket(config: DistributedDataParallelConfig, bucket_size: Value, total_numel: int | None) -> bool:
    """Return whether one bucket is known to hold a whole buffer."""
    if total_numel is None:
        return False
    return total_numel <= bucket_size if isinstance(bucket_size, int) else not resolve_cuts(config)


def _order_entry(config: DistributedDataParallelConfig) -> Resolved:
    name = "buffer_order"
    if config.bucket_order is None:
        return Resolved(name, "reversed", "no bucket_order: registration reversed, roughly the order of backward")
    return Resolved(name, "recorded", f"bucket_order: {len(config.bucket_order)} parameters, the first gradient first")


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


def _reduction_entries(config: DistributedDataParallelConfig, dp_size: int, *, is_float16: bool) -> tuple[Resolved, ...]:
    order = "; reduction_order='rank': added in rank order" if config.reduction_order == "rank" else ""
    if config.use_distributed_optimizer:
        collective = Resolved("collective", "reduce_scatter", "use_distributed_optimizer=True: a rank needs its shard only")
    elif order:
        why = "reduction_order='rank': every rank adds its part of each bucket, and all parts are gathered after backward"
        collective = Resolved("collective", "reduce_scatter, all_gather", why)
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
        once = "each gradient is multiplied by it before the sum"
        if is_float16:
            once = "partly before and partly after the sum, so that float16 neither overflows nor underflows"
        scale, why = 1.0 / dp_size, f"grad_reduction='mean': 1 / dp_size={dp_size}, {once}"
    op = replace(op, reason=op.reason + order)
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
