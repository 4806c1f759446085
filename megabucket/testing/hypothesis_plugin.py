"""Entry point of hypothesis: lets ``st.from_type`` draw this library's types without any import. Calls no strategy itself.

Hypothesis runs it in every process of an environment in which this package is installed, so it imports as little as it can:
the three types, never torch, and the strategies only when one of them is asked for.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, ParamSpec


def register() -> None:
    """Teach hypothesis how to draw a ``ParamSpec``, a ``DistributedDataParallelConfig`` and a ``ModelLayout``."""
    st.register_type_strategy(ParamSpec, _param_spec)
    st.register_type_strategy(DistributedDataParallelConfig, _config)
    st.register_type_strategy(ModelLayout, _layout)


def _param_spec(_: type[ParamSpec]) -> SearchStrategy[ParamSpec]:
    from megabucket.testing.strategies import param_specs

    return param_specs(min_params=1, max_params=1).map(lambda specs: specs[0])


def _config(_: type[DistributedDataParallelConfig]) -> SearchStrategy[DistributedDataParallelConfig]:
    from megabucket.testing.strategies import ddp_configs

    return ddp_configs()


def _layout(_: type[ModelLayout]) -> SearchStrategy[ModelLayout]:
    from megabucket.testing.strategies import model_layouts

    return model_layouts()
