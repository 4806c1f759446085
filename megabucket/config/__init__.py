"""Configs: pydantic models at the edge, a careful YAML loader, and the rules that derive the rest. No torch."""

from __future__ import annotations

from megabucket.config.architecture import ArchitectureConfig
from megabucket.config.ddp import DistributedDataParallelConfig, Section
from megabucket.config.load import load_config
from megabucket.config.resolve import Resolved, ResolvedConfig, resolve
from megabucket.config.run import RunConfig
from megabucket.config.training import DataConfig, OptimizerConfig, TrainConfig

__all__ = [
    "ArchitectureConfig",
    "DataConfig",
    "DistributedDataParallelConfig",
    "OptimizerConfig",
    "Resolved",
    "ResolvedConfig",
    "RunConfig",
    "Section",
    "TrainConfig",
    "load_config",
    "resolve",
]
