"""Layouts that other libraries have made, in this library's types: so its assertions hold them to the same theorems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import START_ALIGNMENT, bucket_end_multiple
from megabucket.errors import LayoutError
from megabucket.layout import BucketLayout, BufferKey, BufferLayout, ModelLayout, ParamSlot


def read_megatron_layout(wrapped: Any) -> ModelLayout:
    """Return the layout of Megatron-Core's ``DistributedDataParallel``, experts included.

    Args:
        wrapped: tried with megatron-core 0.16.1.
    """
    numbers = _numbers(wrapped.module)
    theirs = wrapped.ddp_config
    is_sharded = theirs.use_distributed_optimizer
    pads = theirs.pad_buckets_for_high_nccl_busbw
    config = DistributedDataParallelConfig(
        layout="megatron", use_distributed_optimizer=is_sharded, pad_buckets_for_high_nccl_busbw=pads
    )
    buffers = []
    for group, made in (("dense", wrapped.buffers), ("expert", wrapped.expert_parallel_buffers)):
        for buffer in made:
            places = {param: buffer.param_index_map[param] for param in numbers if param in buffer.param_index_map}
            buckets = tuple(
                BucketLayout(
                    index=bucket.bucket_id,
                    start=bucket.offset,
                    stop=bucket.offset + bucket.grad_data.numel(),
                    numel_unpadded=bucket.numel_unpadded,
                    params=_in_order({numbers[param][1]: places[param][0] for param in bucket.params_list}),
                )
                for bucket in buffer.buckets
            )
            num_shards = buffer.data_parallel_world_size if is_sharded else 1
            buffers.append(
                BufferLayout(
                    key=BufferKey(_name(buffer.param_dtype), _name(buffer.grad_dtype), group),
                    params={
                        numbers[param][1]: ParamSlot(
                            start,
                            stop,
                            bucket,
                            numbers[param][0],
                            tuple(param.shape),
                            bool(getattr(param, "shared_embedding", False)),
                        )
                        for param, (start, stop, bucket) in places.items()
                    },
                    buckets=buckets,
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
    numbers = _numbers(wrapped.module)
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for bucket in tell():
        by_dtype.setdefault(bucket.buffer().dtype, []).append(bucket)
    return ModelLayout(tuple(_of_buckets(dtype, buckets, numbers) for dtype, buckets in by_dtype.items()))


def _of_buckets(dtype: torch.dtype, given: Sequence[Any], numbers: Mapping[torch.Tensor, tuple[int, str]]) -> BufferLayout:
    slots: dict[str, ParamSlot] = {}
    buckets, end = [], 0
    for index, bucket in enumerate(given):
        starts = {}
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            number, name = numbers[param]
            starts[name] = start = end + grad.storage_offset()
            slots[name] = ParamSlot(start, start + param.numel(), index, number, tuple(param.shape))
        stop = end + bucket.buffer().numel()
        buckets.append(BucketLayout(index, end, stop, max(slots[name].stop for name in starts) - end, _in_order(starts)))
        end = stop
    in_registration_order = sorted(slots, key=lambda name: slots[name].registration_index)
    return BufferLayout(
        key=BufferKey(_name(dtype), _name(dtype), "dense"),
        params={name: slots[name] for name in in_registration_order},
        buckets=tuple(buckets),
        num_shards=1,
        bucket_size=None,
        start_alignment=1,
        end_multiple=1,
    )


def _numbers(module: torch.nn.Module) -> dict[torch.Tensor, tuple[int, str]]:
    """Return the position and the name of each trainable parameter."""
    trainable = ((name, param) for name, param in module.named_parameters() if param.requires_grad)
    return {param: (number, name) for number, (name, param) in enumerate(trainable)}


def _in_order(starts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(starts, key=starts.__getitem__))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
