"""Megatron's param-and-grad buffer as a component of its own.

Public names are resolved on first use, so ``import megabucket`` costs nothing and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megabucket._version import __version__ as __version__

if TYPE_CHECKING:
    from megabucket.checkpoint.checkpointer import Checkpointer, can_load, load_checkpoint, save_checkpoint
    from megabucket.checkpoint.restore import LoadedCheckpoint
    from megabucket.checkpoint.stored import open_checkpoint
    from megabucket.config.ddp import DistributedDataParallelConfig
    from megabucket.ddp import AgreedStop, DistributedDataParallel
    from megabucket.ddp.finalize import finalize_grads
    from megabucket.ddp.groups import ParallelGroups, ReductionGroup
    from megabucket.layout import ModelLayout, ParamSpec, build_layout
    from megabucket.layout.invariants import check_layout
    from megabucket.measure.profile import ProfileCallback, WorkloadProfiler, profile_workload
    from megabucket.optim import ConstantGradScaler, DistributedOptimizer, DynamicGradScaler, StepResult
    from megabucket.optim.averaging import ParamNorms, ShardedEMA, param_groups, param_norms
    from megabucket.optim.chained import ChainedOptimizer
    from megabucket.weights.chunk import WeightChunk, WeightEntry, joined_weights, named_weights

_NAMES_BY_MODULE = {
    "megabucket.checkpoint.checkpointer": ("Checkpointer", "can_load", "load_checkpoint", "save_checkpoint"),
    "megabucket.checkpoint.restore": ("LoadedCheckpoint",),
    "megabucket.checkpoint.stored": ("open_checkpoint",),
    "megabucket.config.ddp": ("DistributedDataParallelConfig",),
    "megabucket.ddp": ("AgreedStop", "DistributedDataParallel"),
    "megabucket.ddp.finalize": ("finalize_grads",),
    "megabucket.ddp.groups": ("ParallelGroups", "ReductionGroup"),
    "megabucket.layout": ("ModelLayout", "ParamSpec", "build_layout"),
    "megabucket.layout.invariants": ("check_layout",),
    "megabucket.measure.profile": ("ProfileCallback", "WorkloadProfiler", "profile_workload"),
    "megabucket.optim": ("ConstantGradScaler", "DistributedOptimizer", "DynamicGradScaler", "StepResult"),
    "megabucket.optim.averaging": ("ParamNorms", "ShardedEMA", "param_groups", "param_norms"),
    "megabucket.optim.chained": ("ChainedOptimizer",),
    "megabucket.weights.chunk": ("WeightChunk", "WeightEntry", "joined_weights", "named_weights"),
}
_HOME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

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
    "WeightChunk",
    "WeightEntry",
    "WorkloadProfiler",
    "build_layout",
    "can_load",
    "check_layout",
    "finalize_grads",
    "joined_weights",
    "load_checkpoint",
    "named_weights",
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
