"""Answers about a model that need no model: its parameters, where they would lie, and how long a step would take. No torch."""

from megabucket.planning.architecture import param_specs
from megabucket.planning.run_config import RunConfig, load_config

__all__ = ["RunConfig", "load_config", "param_specs"]
