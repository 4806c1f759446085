"""The package: what it exports, what it imports, and the entry point of hypothesis."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megabucket.testing
from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, ParamSpec
from megabucket.testing.hypothesis_plugin import register
from megabucket.testing.invariants import check_layout

register()  # as the entry point does; twice does no harm
few = settings(max_examples=50)


@pytest.mark.parametrize("name", megabucket.testing.__all__)
def test_every_exported_name_has_a_docstring(name):
    assert getattr(megabucket.testing, name).__doc__


def test_the_package_lists_its_names_and_no_others():
    assert dir(megabucket.testing) == sorted(megabucket.testing.__all__)
    with pytest.raises(AttributeError, match=r"module 'megabucket\.testing' has no attribute 'nothing'"):
        _ = megabucket.testing.nothing


@few
@given(spec=st.from_type(ParamSpec), config=st.from_type(DistributedDataParallelConfig), layout=st.from_type(ModelLayout))
def test_hypothesis_draws_our_types_by_name(spec, config, layout):
    assert isinstance(spec, ParamSpec)
    assert isinstance(config, DistributedDataParallelConfig)
    assert check_layout(layout) == []


@few
@given(...)
def test_hypothesis_draws_our_types_from_annotations(layout: ModelLayout):
    assert check_layout(layout) == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_entry_point_is_declared():
    declared = {entry.value for entry in entry_points(group="hypothesis") if entry.name == "megabucket"}

    assert declared == {"megabucket.testing.hypothesis_plugin:register"}


def test_importing_hypothesis_is_enough_to_draw_our_types():
    printed = run_python(
        "import hypothesis, sys\n"
        "loaded = [name for name in ('torch', 'numpy', 'megabucket.testing.strategies') if name in sys.modules]\n"
        "from megabucket.layout import ModelLayout\n"
        "found = hypothesis.find(hypothesis.strategies.from_type(ModelLayout), lambda layout: True)\n"
        "print(loaded, [list(buffer.params) for buffer in found.buffers])\n"
    )

    # Without the entry point hypothesis would make layouts up from the annotations of the fields: ours name their parameters.
    assert printed == "[] [['p0']]\n"  # and nothing heavy was imported for those who do not ask


def test_without_hypothesis_the_assertions_work_and_a_strategy_says_what_to_install():
    printed = run_python(
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "from megabucket.testing import assert_sound\n"
        "try:\n"
        "    from megabucket.testing import param_specs\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, '|', error)\n"
    )

    assert printed == (
        "hypothesis | megabucket.testing.param_specs draws examples with hypothesis, which is not installed: "
        "pip install 'megabucket[testing]'\n"
    )
