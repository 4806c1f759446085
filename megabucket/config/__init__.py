"""Configs: a pydantic model at the edge, and the rules that derive the rest. No torch."""

from __future__ import annotations

from megabucket.config.ddp import DistributedDataParallelConfig, Section

__all__ = [
    "DistributedDataParallelConfig",
    "Section",
]
