"""Weights and module buffers out of a checkpoint: which stored tensors they come from, and where they go.

With sharded parameters each rank reads its shards only, and the ranks gather them as after a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megabucket.buffer import ParamAndGradBuffer, dtype_name
from megabucket.checkpoint.canonical import canonical_name, named_buffers, named_params
from megabucket.checkpoint.capture import LOCAL_PREFIX, MODEL_PREFIX
from megabucket.checkpoint.optim_state import MAIN_PREFIX
from megabucket.checkpoint.pieces import TensorInfo
from megabucket.checkpoint.staging import Staging, Stored, find_difference
from megabucket.ddp import DistributedDataParallel
from megabucket.layout.shards import shard_slices


def source_of(tensors: Mapping[str, TensorInfo], name: str, dtype: torch.dtype) -> str:
    """Return the stored tensor from which a weight comes that is kept in a dtype here.

    A main parameter is what its 16-bit weight was rounded from, so it is the better source for what is wider than the weight.
    """
    weight, main = tensors.get(f"{MODEL_PREFIX}{name}"), tensors.get(f"{MAIN_PREFIX}{name}")
    wanted = dtype_name(dtype)
    takes_main = main is not None and main.dtype == wanted and (weight is None or weight.dtype != wanted)
    return f"{MAIN_PREFIX if takes_main else MODEL_PREFIX}{name}"


def check_model(stored: Stored, module: torch.nn.Module, *, cast: bool) -> list[str]:
    """Return everything in which the stored model and the module differ."""
    own = {**named_params(module), **named_buffers(module)}
    differences = [
        find_difference(stored.tensors.get(f"{MODEL_PREFIX}{name}"), f"{MODEL_PREFIX}{name}", tensor, tensor.dtype, cast=cast)
        for name, tensor in own.items()
    ]
    unknown = [
        f"{name!r} is in the checkpoint and not in the model"
        for name in stored.tensors
        if name.startswith(MODEL_PREFIX) and name.removeprefix(MODEL_PREFIX) not in own
    ]
    return [difference for difference in differences if difference is not None] + unknown


def stage_model(staging: Staging, ddp: DistributedDataParallel) -> None:
    """Want all weights and module buffers."""
    tensors, is_sharded = staging.stored.tensors, ddp.ddp_config.use_distributed_optimizer
    for buffer in ddp.param_and_grad_buffers:
        if is_sharded:
            _stage_shards(staging, ddp, buffer)
            continue
        for name, param in buffer.params.items():
            values = staging.want_like(source_of(tensors, canonical_name(name), param.dtype), param)
            staging.copies.append((param.detach(), values))
    buffered = set(ddp.param_names)
    rest: dict[str, torch.Tensor] = {name: param for name, param in named_params(ddp.module).items() if param not in buffered}
    sources = {name: source_of(tensors, name, param.dtype) for name, param in rest.items()}
    for name, running in named_buffers(ddp.module).items():
        rest[name], local = running, f"{LOCAL_PREFIX}{ddp.communicator.rank}.{name}"
        is_own = local in tensors and staging.stored.world_size == ddp.communicator.size
        sources[name] = local if is_own else f"{MODEL_PREFIX}{name}"
    for name, tensor in rest.items():
        staging.copies.append((tensor.detach(), staging.want_like(sources[name], tensor)))
    if is_sharded:
        staging.finish.append(lambda: _gather(ddp))


def _stage_shards(staging: Staging, ddp: DistributedDataParallel, buffer: ParamAndGradBuffer) -> None:
    rank, layout = ddp.communicator.rank, buffer.layout
    for bucket in layout.buckets:
        span = layout.shard_span(bucket=bucket.index, rank=rank)
        target = buffer.param_data[span.start : span.stop]
        values = target.clone()  # with the padding, which stays
        for piece in shard_slices(layout, bucket=bucket.index, rank=rank):
            source = source_of(staging.stored.tensors, canonical_name(piece.param), values.dtype)
            own = values[piece.in_shard.start : piece.in_shard.stop]
            staging.want(source, buffer.params[piece.param], piece.in_param.start, own)
        staging.copies.append((target, values))


def _gather(ddp: DistributedDataParallel) -> None:
    for group in ddp.bucket_groups:
        group.mark_params_stale()
    ddp.start_param_sync(force_sync=True)
