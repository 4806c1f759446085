"""torch's own: alone, DDP, ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peers.system import EPSILON, LEARNING_RATE, Setup, System, fused_adamw


def alone(module: torch.nn.Module, setup: Setup) -> System:
    return System(module, fused_adamw(module.parameters()))


def _wrapped(module: torch.nn.Module, setup: Setup) -> DistributedDataParallel:
    # Its first bucket is 1 MiB where nobody names a size; naming torch's own default keeps that out of larger ones.
    size = {} if setup.bucket_bytes == 25 * 2**20 else {"bucket_cap_mb": setup.bucket_bytes / 2**20}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **size)


def ddp(module: torch.nn.Module, setup: Setup) -> System:
    wrapped = _wrapped(module, setup)
    return System(wrapped, fused_adamw(wrapped.parameters()))


def zero(module: torch.nn.Module, setup: Setup) -> System:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _wrapped(module, setup)
    arguments = {"lr": LEARNING_RATE, "eps": EPSILON, "fused": True}
    return System(
        wrapped,
        ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **arguments
        ),
    )


def fsdp_per_block(module: torch.nn.Module, setup: Setup) -> System:
    layers, size = list(module.layers), setup.blocks_per_group
    return _fsdp(module, [layers[start : start + size] for start in range(0, len(layers), size)], reshards=True)


def fsdp_groups(module: torch.nn.Module, setup: Setup) -> System:
    groups: list[list[torch.nn.Module]] = [[]]
    filled = 0
    for layer in module.layers:
        num_bytes = sum(param.nbytes for param in layer.parameters())
        if groups[-1] and filled + num_bytes > setup.bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(layer)
        filled += num_bytes
    return _fsdp(module, [group for group in groups if group], reshards=False)


def _fsdp(module: torch.nn.Module, groups: list[list[torch.nn.Module]], *, reshards: bool) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message=".*(reduce_scatter_tensor|all_gather_into_tensor).*")  # torch's own calls
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    return System(module, fused_adamw(module.parameters()))
