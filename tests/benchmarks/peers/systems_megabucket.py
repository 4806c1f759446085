"""megabucket in both modes, with all checks on, as by default."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import megabucket as mb
from megabucket.planning.memory import exchange_bytes, rank_memory
from peers.system import Setup, System, fused_adamw


class Megabucket(System):
    def __init__(self, module: mb.DistributedDataParallel, optimizer: Any) -> None:
        super().__init__(module, optimizer)

    def settle(self) -> None:
        self.module.finish_param_sync()

    def memory_bytes(self) -> int:
        config = self.module.ddp_config
        layout = self.module.layout
        received_bytes = 0
        if dist.get_backend() == "gloo":
            is_sharded = config.use_distributed_optimizer
            received_bytes = exchange_bytes(layout, reads_peers=config.read_peer_memory, receives=is_sharded)
        memory = rank_memory(
            layout,
            rank=dist.get_rank(),
            is_sharded=config.use_distributed_optimizer,
            has_main_params=isinstance(self.optimizer, mb.DistributedOptimizer),
            has_fence=dist.get_world_size() > 1,
        )
        return memory.total_bytes + received_bytes


def all_reduce(module: torch.nn.Module, setup: Setup) -> System:
    wrapped = _wrapped(module, setup)
    return Megabucket(wrapped, fused_adamw(wrapped.parameters()))


def all_reduce_sent(module: torch.nn.Module, setup: Setup) -> System:
    wrapped = _wrapped(module, setup, read_peer_memory=False)
    return Megabucket(wrapped, fused_adamw(wrapped.parameters()))


def reduce_scatter_sent(module: torch.nn.Module, setup: Setup) -> System:
    return _flat(module, setup, use_distributed_optimizer=True, read_peer_memory=False)


def all_reduce_flat(module: torch.nn.Module, setup: Setup) -> System:
    return _flat(module, setup)


def reduce_scatter(module: torch.nn.Module, setup: Setup) -> System:
    return _flat(module, setup, use_distributed_optimizer=True)


def reduce_scatter_overlapped(module: torch.nn.Module, setup: Setup) -> System:
    return _flat(module, setup, use_distributed_optimizer=True, overlap_param_gather=True)


def all_reduce_planned(module: torch.nn.Module, setup: Setup) -> System:
    return _flat(module, setup, **_planned(setup, "all_reduce"))


def reduce_scatter_planned(module: torch.nn.Module, setup: Setup) -> System:
    modes = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    return _flat(module, setup, **modes, **_planned(setup, "reduce_scatter"))


def _planned(setup: Setup, mode: str) -> dict[str, Any]:
    cuts = dict(setup.cuts)[mode]
    return {"bucket_cuts": cuts, "bucket_cap_mb": None}


def _flat(module: torch.nn.Module, setup: Setup, **fields: Any) -> System:
    wrapped = _wrapped(module, setup, **fields)
    # Nobody clips, so nobody needs a norm; of the peers DeepSpeed alone computes one.
    return Megabucket(wrapped, mb.DistributedOptimizer(fused_adamw(wrapped.parameters()), wrapped, returns_grad_norm=False))


def _wrapped(module: torch.nn.Module, setup: Setup, **fields: Any) -> mb.DistributedDataParallel:
    fields = {"bucket_cap_mb": setup.bucket_bytes / 2**20, "init_sync": setup.moves_data, **fields}
    return mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(**fields))
