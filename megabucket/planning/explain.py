"""Every value that a config leaves to the model and the group, each with its reason, as ``megabucket explain`` prints them.

The rules are those of ``config.resolve``; here they get words. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import (
    BUCKET_END_ALIGNMENT,
    HALF_PRECISION,
    HIGH_BUSBW_ALIGNMENT,
    START_ALIGNMENT,
    bucket_end_multiple,
    check_group_size,
    explain_grad_dtype,
    is_padded,
    overlap_obstacle,
    size_buckets,
)
from megabucket.units import dtype_bytes

Value = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """One derived value and why it is what it is."""

    name: str
    value: Value
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every derived value of one config on one group, in the order a reader needs them."""

    dp_size: int
    param_dtype: str
    entries: tuple[Resolved, ...]

    def __getitem__(self, name: str) -> Resolved:
        """Return the entry called ``name``; ``KeyError`` when there is none."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

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
        total_numel: elements of all parameters, without padding; ``None`` when the model is not known.
        param_dtype: dtype of the parameters the answer is for.
        num_buffers: buffers the model needs; more than one when parameters differ in dtype or group.

    Raises:
        ConfigError: more buckets were asked for than there are elements.
        LayoutError: ``dp_size`` is not positive, or no buffer can hold ``param_dtype``.
    """
    check_group_size(dp_size)
    grad_dtype, grad_reason = explain_grad_dtype(config, param_dtype)
    size = size_buckets(config, dp_size=dp_size, total_numel=total_numel, grad_itemsize_bytes=dtype_bytes(grad_dtype))
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


def _reduction_entries(config: DistributedDataParallelConfig, dp_size: int, grad_dtype: str) -> tuple[Resolved, ...]:
    if config.use_distributed_optimizer:
        collective = Resolved("collective", "reduce_scatter", "use_distributed_optimizer=True: a rank needs its shard only")
    else:
        collective = Resolved("collective", "all_reduce", "use_distributed_optimizer=False: every rank steps on all parameters")
    if config.grad_reduction == "sum":
        return (
            collective,
            Resolved("reduce_op", "sum", "grad_reduction='sum'"),
            Resolved("gradient_scale", 1.0, "grad_reduction='sum': the plain sum over the ranks"),
        )
    if config.average_in_collective:
        return (
            collective,
            Resolved("reduce_op", "avg", "average_in_collective=True: the collective divides"),
            Resolved("gradient_scale", 1.0, "average_in_collective=True: no scaling beside the collective"),
        )
    if grad_dtype in HALF_PRECISION:
        once = "partly before and partly after the sum, so that 16 bits neither overflow nor underflow"
    else:
        once = "applied once, after the sum"
    return (
        collective,
        Resolved("reduce_op", "sum", "average_in_collective=False: the mean is a scaled sum"),
        Resolved("gradient_scale", 1.0 / dp_size, f"grad_reduction='mean': 1 / dp_size={dp_size}, {once}"),
    )


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
