"""Megatron's param-and-grad buffer as a component of its own.

Public names are resolved on first use, so ``import megabucket`` costs nothing and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabucket.checkpoint.checkpointer import Checkpointer, can_load, load_checkpoint, save_checkpoint
    from megabucket.checkpoint.restore import LoadedCheckpoint
    from megabucket.checkpoint.stored import open_checkpoint
    from megabucket.config.ddp import DistributedDataParallelConfig
    from megabucket.ddp import AgreedStop, DistributedDataParallel
    from megabucket.ddp.finalize import finalize_grads
    from megabucket.ddp.groups import ParallelGroups, ReductionGroup
    from megabucket.layout import ModelLayout, ParamSpec, build_layout
    from megabucket.measure.profile import ProfileCallback, WorkloadProfiler, profile_workload
    from megabucket.optim import ConstantGradScaler, DistributedOptimizer, DynamicGradScaler, StepResult
    from megabucket.optim.averaging import ParamNorms, ShardedEMA, param_groups, param_norms
    from megabucket.optim.chained import ChainedOptimizer
    from megabucket.testing.invariants import check_layout

__version__ = "0.1.0"

_HOME = {
    "AgreedStop": "megabucket.ddp",
    "ChainedOptimizer": "megabucket.optim.chained",
    "Checkpointer": "megabucket.checkpoint.checkpointer",
    "ConstantGradScaler": "megabucket.optim",
    "DistributedDataParallel": "megabucket.ddp",
    "DistributedDataParallelConfig": "megabucket.config.ddp",
    "DistributedOptimizer": "megabucket.optim",
    "DynamicGradScaler": "megabucket.optim",
    "LoadedCheckpoint": "megabucket.checkpoint.restore",
    "ModelLayout": "megabucket.layout",
    "ParallelGroups": "megabucket.ddp.groups",
    "ParamNorms": "megabucket.optim.averaging",
    "ParamSpec": "megabucket.layout",
    "ProfileCallback": "megabucket.measure.profile",
    "ReductionGroup": "megabucket.ddp.groups",
    "ShardedEMA": "megabucket.optim.averaging",
    "StepResult": "megabucket.optim",
    "WorkloadProfiler": "megabucket.measure.profile",
    "build_layout": "megabucket.layout",
    "can_load": "megabucket.checkpoint.checkpointer",
    "check_layout": "megabucket.testing.invariants",
    "finalize_grads": "megabucket.ddp.finalize",
    "load_checkpoint": "megabucket.checkpoint.checkpointer",
    "open_checkpoint": "megabucket.checkpoint.stored",
    "param_groups": "megabucket.optim.averaging",
    "param_norms": "megabucket.optim.averaging",
    "profile_workload": "megabucket.measure.profile",
    "save_checkpoint": "megabucket.checkpoint.checkpointer",
}

__all__ = [
    "AgreedStop",
    "ChainedOptimizer",
    "Checkpointer",
    "ConstantGradScaler",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "LoadedCheckpoint",
    "ModelLayout",
    "ParallelGroups",
    "ParamNorms",
    "ParamSpec",
    "ProfileCallback",
    "ReductionGroup",
    "ShardedEMA",
    "StepResult",
    "WorkloadProfiler",
    "build_layout",
    "can_load",
    "check_layout",
    "finalize_grads",
    "load_checkpoint",
    "open_checkpoint",
    "param_groups",
    "param_norms",
    "profile_workload",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'megabucket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
