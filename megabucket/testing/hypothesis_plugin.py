"""Entry point of hypothesis: lets ``st.from_type`` draw this library's types without any import. Draws nothing itself.

Hypothesis runs it in every process of an environment in which this package is installed, so it imports only the three types,
never torch, and the strategies only when one of them is used.
"""

from __future__ import annotations

from types import ModuleType

from hypothesis import strategies as st

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, ParamSpec


def register() -> None:
    """Teach hypothesis how to draw a ``ParamSpec``, a ``DistributedDataParallelConfig`` and a ``ModelLayout``."""
    one_spec = {"min_params": 1, "max_params": 1}
    st.register_type_strategy(ParamSpec, lambda _: _strategies().param_specs(**one_spec).map(lambda specs: specs[0]))
    st.register_type_strategy(DistributedDataParallelConfig, lambda _: _strategies().ddp_configs())
    st.register_type_strategy(ModelLayout, lambda _: _strategies().model_layouts())


def _strategies() -> ModuleType:
    from megabucket.testing import strategies

    return strategies
