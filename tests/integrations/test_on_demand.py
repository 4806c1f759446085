"""Frameworks are asked for by the adapter that needs them, and by nothing else."""

import subprocess
import sys
import warnings

import pytest

from megabucket import integrations
from megabucket.integrations import Framework, require

PACKAGES = {"lightning", "accelerate", "megatron", "transformers"}


@pytest.mark.slow
def test_the_package_imports_no_framework():
    code = f"import sys, megabucket.integrations, megabucket.ddp, megabucket.optim; assert not {PACKAGES} & set(sys.modules)"

    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.slow
def test_a_missing_framework_gives_the_line_that_installs_it():
    needs = {  # by adapter: the framework, and the extra that installs it
        "lightning": ("lightning", "lightning"),
        "transformers": ("accelerate", "hf"),
        "megatron": ("megatron-core", "megatron"),
    }
    code = f"""
import importlib
import importlib.metadata as metadata

def without(name):
    if name in {[framework for framework, _ in needs.values()]!r}:
        raise metadata.PackageNotFoundError(name)
    return "5.23.0"
metadata.version = without
for adapter in {[*needs]!r}:
    try:
        importlib.import_module("megabucket.integrations." + adapter)
    except ImportError as error:
        print(str(error).replace(chr(10), " "))
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    said = done.stdout.splitlines()
    assert len(said) == len(needs)
    for line, (framework, extra) in zip(said, needs.values(), strict=True):
        assert f"which is not installed: pip install 'megabucket[{extra}]'" in line
        assert framework in line


@pytest.mark.parametrize(
    ("found", "is_tested"), [("2.5.9", False), ("2.6.0", True), ("2.6.99rc1", True), ("2.7.0", False), ("3.0", False)]
)
def test_a_version_that_was_not_tested_gives_one_warning(monkeypatch, found, is_tested):
    monkeypatch.setattr(integrations, "version", lambda _: found)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        require(Framework("lightning", (2, 6), (2, 7)), adapter="the adapter", extra="lightning")

    expected = [] if is_tested else [f"the adapter was tested with lightning >=2.6,<2.7, and this is {found}"]
    assert [str(warning.message).split(":")[0] for warning in caught] == expected
