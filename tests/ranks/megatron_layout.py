"""Layouts that Megatron-Core has made, in this library's types, so that the assertions hold them to the same theorems."""

from __future__ import annotations

from typing import Any

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import START_ALIGNMENT, bucket_end_multiple
from megabucket.layout import BucketLayout, BufferKey, BufferLayout, ModelLayout, ParamSlot


def read_megatron_layout(wrapped: Any) -> ModelLayout:
    """Return the layout of Megatron-Core's ``DistributedDataParallel``, experts included.

    Args:
        wrapped: tried with megatron-core 0.16.1.
    """
    trainable = [(name, param) for name, param in wrapped.module.named_parameters() if param.requires_grad]
    buffers = [_read_buffer(wrapped, buffer, "dense", trainable) for buffer in wrapped.buffers]
    buffers += [_read_buffer(wrapped, buffer, "expert", trainable) for buffer in wrapped.expert_parallel_buffers]
    return ModelLayout(
        tuple(sorted(buffers, key=lambda buffer: min(slot.registration_index for slot in buffer.params.values())))
    )


def _read_buffer(wrapped: Any, theirs: Any, group: str, trainable: list[tuple[str, Any]]) -> BufferLayout:
    is_sharded = wrapped.ddp_config.use_distributed_optimizer
    pads = wrapped.ddp_config.pad_buckets_for_high_nccl_busbw
    config = DistributedDataParallelConfig(
        layout="megatron", use_distributed_optimizer=is_sharded, pad_buckets_for_high_nccl_busbw=pads
    )
    num_shards = theirs.data_parallel_world_size if is_sharded else 1
    params = {}
    for index, (name, param) in enumerate(trainable):
        if param in theirs.param_index_map:
            start, stop, bucket_index = theirs.param_index_map[param]
            is_shared = bool(getattr(param, "shared_embedding", False))
            params[name] = ParamSlot(start, stop, bucket_index, index, tuple(param.shape), shared_embedding=is_shared)
    in_order = sorted(params, key=lambda name: (params[name].start, -params[name].registration_index))
    buckets = [
        BucketLayout(
            index=bucket.bucket_id,
            start=bucket.offset,
            stop=bucket.offset + bucket.grad_data.numel(),
            numel_unpadded=bucket.numel_unpadded,
            params=tuple(name for name in in_order if params[name].bucket == bucket.bucket_id),
        )
        for bucket in theirs.buckets
    ]
    param_dtype, grad_dtype = (str(dtype).removeprefix("torch.") for dtype in (theirs.param_dtype, theirs.grad_dtype))
    return BufferLayout(
        key=BufferKey(param_dtype, grad_dtype, group),
        params=params,
        buckets=tuple(buckets),
        num_shards=num_shards,
        bucket_size=wrapped.bucket_size,
        start_alignment=START_ALIGNMENT if is_sharded else 1,
        end_multiple=bucket_end_multiple(config, num_shards),
    )
