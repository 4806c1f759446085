"""Answers about a model that need no model: its parameters and where they would lie. No torch."""

from megabucket.planning.architecture import param_specs

__all__ = ["param_specs"]
