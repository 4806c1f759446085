"""Megatron's param-and-grad buffer as a component of its own.

Public names are resolved on first use, so ``import megabucket`` costs nothing and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabucket.config.ddp import DistributedDataParallelConfig
    from megabucket.ddp import DistributedDataParallel
    from megabucket.layout import ModelLayout, ParamSpec, build_layout, check_layout
    from megabucket.measure.profile import ProfileCallback, WorkloadProfiler, profile_workload
    from megabucket.optim import DistributedOptimizer, StepResult

__version__ = "0.1.0"

_HOME = {
    "DistributedDataParallel": "megabucket.ddp",
    "DistributedDataParallelConfig": "megabucket.config.ddp",
    "DistributedOptimizer": "megabucket.optim",
    "ModelLayout": "megabucket.layout",
    "ParamSpec": "megabucket.layout",
    "ProfileCallback": "megabucket.measure.profile",
    "StepResult": "megabucket.optim",
    "WorkloadProfiler": "megabucket.measure.profile",
    "build_layout": "megabucket.layout",
    "check_layout": "megabucket.layout",
    "profile_workload": "megabucket.measure.profile",
}

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "ModelLayout",
    "ParamSpec",
    "ProfileCallback",
    "StepResult",
    "WorkloadProfiler",
    "build_layout",
    "check_layout",
    "profile_workload",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'megabucket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
