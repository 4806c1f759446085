"""Layouts that other libraries have made, in this library's types: so its assertions hold them to the same theorems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import START_ALIGNMENT, bucket_end_multiple
from megabucket.errors import LayoutError
from megabucket.layout import BucketLayout, BufferKey, BufferLayout, ModelLayout, ParamSlot


class _Bucket(NamedTuple):
    """A bucket of another library, in elements of its buffer."""

    start: int
    stop: int
    numel_unpadded: int
    starts: Mapping[torch.Tensor, int]
    """Where each parameter begins."""


def read_megatron_layout(wrapped: Any) -> ModelLayout:
    """Return the layout of Megatron-Core's ``DistributedDataParallel``, experts included.

    Args:
        wrapped: tried with megatron-core 0.16.1.
    """
    theirs = wrapped.ddp_config
    is_sharded = theirs.use_distributed_optimizer
    config = DistributedDataParallelConfig(
        layout="megatron",
        use_distributed_optimizer=is_sharded,
        pad_buckets_for_high_nccl_busbw=theirs.pad_buckets_for_high_nccl_busbw,
    )
    buffers = []
    for group, made in (("dense", wrapped.buffers), ("expert", wrapped.expert_parallel_buffers)):
        for buffer in made:
            num_shards = buffer.data_parallel_world_size if is_sharded else 1
            buckets = []
            for bucket in buffer.buckets:
                starts = {param: buffer.param_index_map[param][0] for param in bucket.params_list}
                stop = bucket.offset + bucket.grad_data.numel()
                buckets.append(_Bucket(bucket.offset, stop, bucket.numel_unpadded, starts))
            buffers.append(
                _buffer(
                    wrapped.module,
                    BufferKey(_name(buffer.param_dtype), _name(buffer.grad_dtype), group),
                    buckets,
                    num_shards=num_shards,
                    bucket_size=wrapped.bucket_size,
                    start_alignment=START_ALIGNMENT if is_sharded else 1,
                    end_multiple=bucket_end_multiple(config, num_shards),
                )
            )
    return ModelLayout(
        tuple(sorted(buffers, key=lambda buffer: min(slot.registration_index for slot in buffer.params.values())))
    )


def read_torch_ddp_layout(wrapped: torch.nn.parallel.DistributedDataParallel) -> ModelLayout:
    """Return the buckets of torch DDP, one behind the other, in the order in which they are sent.

    Buckets are those of the next backward: torch arranges them anew after the first one.

    Raises:
        LayoutError: this torch does not tell its buckets.
    """
    tell = getattr(wrapped.reducer, "_get_zeros_like_grad_buckets", None)
    if tell is None:
        raise LayoutError(
            f"torch {torch.__version__} has no reducer._get_zeros_like_grad_buckets, so its buckets cannot be read"
        )
    by_dtype: dict[torch.dtype, list[_Bucket]] = {}
    for bucket in tell():
        of_dtype = by_dtype.setdefault(bucket.buffer().dtype, [])
        start = of_dtype[-1].stop if of_dtype else 0
        held = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        starts = {param: start + grad.storage_offset() for param, grad in held}
        unpadded = max(grad.storage_offset() + param.numel() for param, grad in held)
        of_dtype.append(_Bucket(start, start + bucket.buffer().numel(), unpadded, starts))
    rules = {"num_shards": 1, "bucket_size": None, "start_alignment": 1, "end_multiple": 1}
    return ModelLayout(
        tuple(
            _buffer(wrapped.module, BufferKey(_name(dtype), _name(dtype), "dense"), buckets, **rules)
            for dtype, buckets in by_dtype.items()
        )
    )


def _buffer(module: torch.nn.Module, key: BufferKey, given: Iterable[_Bucket], **rules: Any) -> BufferLayout:
    trainable = ((name, param) for name, param in module.named_parameters() if param.requires_grad)
    numbers: dict[torch.Tensor, tuple[int, str]] = {param: (number, name) for number, (name, param) in enumerate(trainable)}
    slots: dict[str, ParamSlot] = {}
    buckets = []
    for index, bucket in enumerate(given):
        in_order = sorted(bucket.starts, key=bucket.starts.__getitem__)
        for param in in_order:
            start, (number, name) = bucket.starts[param], numbers[param]
            is_shared = bool(getattr(param, "shared_embedding", False))
            slots[name] = ParamSlot(start, start + param.numel(), index, number, tuple(param.shape), is_shared)
        names = tuple(numbers[param][1] for param in in_order)
        buckets.append(BucketLayout(index, bucket.start, bucket.stop, bucket.numel_unpadded, names))
    params = dict(sorted(slots.items(), key=lambda item: item[1].registration_index))
    return BufferLayout(key=key, params=params, buckets=tuple(buckets), **rules)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
