"""``megabucket --version``: what is installed."""

from importlib.metadata import version

from typer.testing import CliRunner

import megabucket
from megabucket.cli.main import app


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(app, ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"megabucket {megabucket.__version__}\n")
    assert version("megabucket") == megabucket.__version__


def test_help_still_says_what_the_program_is_for():
    assert "Megatron's param-and-grad buffers" in CliRunner().invoke(app, ["--help"]).stdout
