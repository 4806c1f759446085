"""A pytest plugin: every layout that the models of a project can get is a test of that project.

In ``conftest.py``: ``pytest_plugins = ["megabucket.testing.pytest_plugin"]``. In the configuration of pytest::

    megabucket_models = my_project.models:small my_project.models:large
    megabucket_dp_sizes = 1 2 8 64
    megabucket_bucket_sizes = 1 1000000 default
    megabucket_group_sizes = expert=2

A test with the argument ``megabucket_layout`` then runs once for each model, number of ranks and bucket size. Before it does,
the layout is built and held to all invariants. Attributes of Megatron's layers mark experts (``allreduce=False``) and shared
embeddings (``shared_embedding=True``); ``megabucket_group_sizes`` gives a group another number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, ParamSpec, build_layout
from megabucket.planning import param_specs
from megabucket.planning.model_config import FactoryConfig
from megabucket.testing.invariants import assert_places, assert_sound

_FIXTURE = "megabucket_layout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the configuration file."""
    parser.addini("megabucket_models", "functions that return a module: package.module:function", type="args", default=[])
    parser.addini("megabucket_dp_sizes", "numbers of data-parallel ranks", type="args", default=["1", "2", "8"])
    parser.addini("megabucket_bucket_sizes", "elements, or 'default'", type="args", default=["1", "default"])
    parser.addini("megabucket_group_sizes", "ranks of a reduction group: expert=2", type="args", default=[])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a layout once for each of them."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    models, dp_sizes, bucket_sizes = (
        metafunc.config.getini(f"megabucket_{name}") for name in ("models", "dp_sizes", "bucket_sizes")
    )
    if not models:
        raise pytest.UsageError(
            f"{metafunc.function.__name__} asks for {_FIXTURE}; set megabucket_models in pytest's configuration"
        )
    metafunc.parametrize(_FIXTURE, list(itertools.product(models, dp_sizes, bucket_sizes)), indirect=True, ids="-".join)


@pytest.fixture
def megabucket_layout(request: pytest.FixtureRequest) -> ModelLayout:
    """A layout of one of the project's models, which violates no invariant."""
    path, dp_size, bucket_size = request.param
    specs = _specs_of(path)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, bucket_size=None if bucket_size == "default" else int(bucket_size)
    )
    given = (entry.partition("=") for entry in request.config.getini("megabucket_group_sizes"))
    group_sizes = {group: int(size) for group, _, size in given}
    layout = build_layout(specs, config, dp_size=int(dp_size), group_sizes=group_sizes)
    assert_sound(layout)
    assert_places(layout, specs)
    return layout


@cache
def _specs_of(factory: str) -> Sequence[ParamSpec]:
    """Return the trainable parameters of a model. It is made on the device ``meta``, so it takes no memory."""
    return param_specs(FactoryConfig(kind="factory", factory=factory))
