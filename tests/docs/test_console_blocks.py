"""What pages show as the output of `megabucket simulate` and of an example is what it prints, line by line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabucket.cli.main import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console\n\$ megabucket (simulate .*)\n((?:.*\n)*?)```$", re.MULTILINE)
PAGES = ("docs/plan-and-simulate.md", "docs/exercises/bucketing-and-overlap.md", "docs/exercises/lessons.md")
SHOWN = [
    pytest.param(command, output, id=f"{page}:{number}")
    for page in PAGES
    for number, (command, output) in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8")))
]


def test_every_page_shows_some_output():
    assert {param.id.partition(":")[0] for param in SHOWN} == set(PAGES)


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_a_page_shows_what_the_command_prints(command, output, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")

    result = CliRunner().invoke(app, shlex.split(command))

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == output.splitlines()


def test_a_page_shows_what_the_ladder_counts():
    page = (ROOT / "docs/exercises/lessons.md").read_text(encoding="utf-8")
    command, output = re.search(
        r"^```console\n\$ python (examples/ladder_counts.*)\n((?:.*\n)*?)```$", page, re.MULTILINE
    ).groups()

    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == output.splitlines(), done.stderr
