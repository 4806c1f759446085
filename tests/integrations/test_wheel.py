"""The wheel in an environment of its own: adapters import on demand, and name what is missing. Nothing heavy is downloaded.

The environment sees the packages of the one that runs the tests, through links, all or but some of them; never this checkout.
"""

import importlib.util
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = {"lightning": "lightning", "transformers": "accelerate", "megatron": "megatron_core"}  # of each adapter
MODULES = {"lightning": "lightning", "transformers": "accelerate", "megatron": "megatron.core"}
EXTRAS = {"lightning": "lightning", "transformers": "hf", "megatron": "megatron"}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    (found,) = folder.glob("megabucket-*.whl")
    return found


@pytest.fixture
def environment(wheel, tmp_path):
    """Return a function that makes the environment, and returns its Python and the folder of links in it."""

    def make(*, without: str = "") -> tuple[Path, Path]:
        venv.create(tmp_path / "venv", symlinks=True)
        python = tmp_path / "venv/bin/python"
        run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)])
        links = tmp_path / "links"
        links.mkdir()
        for entry in (entry for folder in site.getsitepackages() for entry in Path(folder).iterdir()):
            if "megabucket" not in entry.name and (not without or entry.name.partition("-")[0] != without):
                (links / entry.name).symlink_to(entry)
        (installed,) = (tmp_path / "venv").rglob("site-packages")
        (installed / "links.pth").write_text(str(links))
        return python, links

    return make


def run(command: list[str], *, succeeds: bool = True) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may lead to the sources
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=300)
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    return done.stdout + done.stderr


def with_framework(adapter: str):
    is_missing = importlib.util.find_spec(MODULES[adapter].partition(".")[0]) is None
    reason = f"{FRAMEWORKS[adapter]} is not installed: make frameworks installs it"
    return pytest.param(adapter, marks=pytest.mark.skipif(is_missing, reason=reason))


@pytest.mark.parametrize("adapter", [with_framework(adapter) for adapter in FRAMEWORKS])
def test_an_adapter_of_the_wheel_imports_its_framework_on_demand(environment, adapter):
    python, _ = environment()
    code = f"""
import importlib.metadata, sys
import megabucket.ddp, megabucket.integrations
assert megabucket.__file__.startswith(sys.prefix), megabucket.__file__
assert any("extra == '{EXTRAS[adapter]}'" in line for line in importlib.metadata.requires("megabucket"))
assert {MODULES[adapter]!r} not in sys.modules
import megabucket.integrations.{adapter}
assert {MODULES[adapter]!r} in sys.modules
"""

    shown = run([str(python), "-c", code])

    assert "was tested with" not in shown


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_a_missing_framework_gives_the_line_that_installs_it(environment, adapter):
    python, _ = environment(without=FRAMEWORKS[adapter])

    shown = run([str(python), "-c", f"import megabucket.integrations.{adapter}"], succeeds=False)

    name = FRAMEWORKS[adapter].replace("_", "-")
    expected = f"needs {name}, which is not installed: pip install 'megabucket[{EXTRAS[adapter]}]'"
    assert expected in shown.splitlines()[-1]


@pytest.mark.parametrize("adapter", [with_framework(adapter) for adapter in FRAMEWORKS])
def test_an_untested_version_gives_one_warning(environment, adapter):
    python, links = environment()
    (link,) = links.glob(f"{FRAMEWORKS[adapter]}-*.dist-info")
    given = (link / "METADATA").read_text()
    link.unlink()
    link.mkdir()
    version = link.name.removesuffix(".dist-info").partition("-")[2]
    (link / "METADATA").write_text(given.replace(f"\nVersion: {version}\n", "\nVersion: 99.0.0\n"))
    module = f"megabucket.integrations.{adapter}"

    shown = run([str(python), "-W", "always", "-c", f"import {module}; import {module}"])

    assert shown.count(f"{module} was tested with") == 1
    assert "and this is 99.0.0" in shown
