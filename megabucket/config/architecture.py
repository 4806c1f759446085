"""``ArchitectureConfig``: which parameters a model has, by the ``kind`` of its description. No torch.

``megabucket.planning.architecture`` turns it into parameter descriptions.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from megabucket.config.decoders import GptConfig, LlamaConfig
from megabucket.config.model_sources import FactoryConfig, HfConfig, ParamEntry, ParamListConfig
from megabucket.config.moe import MlaConfig, MoeConfig

__all__ = [
    "ArchitectureConfig",
    "FactoryConfig",
    "GptConfig",
    "HfConfig",
    "LlamaConfig",
    "MlaConfig",
    "MoeConfig",
    "ParamEntry",
    "ParamListConfig",
]

ArchitectureConfig: TypeAlias = Annotated[
    GptConfig | LlamaConfig | MoeConfig | HfConfig | ParamListConfig | FactoryConfig, Field(discriminator="kind")
]
