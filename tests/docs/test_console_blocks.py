"""What pages show as the output of a command that needs no ranks is what it prints, line by line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabucket.cli.main import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
WITHOUT_RANKS = re.compile(r"megabucket (?:explain|plan|simulate) ")


def commands_with_output(wanted: re.Pattern) -> list:
    """Return the commands of all console blocks that match, each with the lines shown below it."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        lines = (line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in COMMAND.findall(block))
        shown = [(command, output) for command, output in lines if wanted.match(command)]
        found += [
            pytest.param(command, output, id=f"{page.relative_to(ROOT)}:{number}")
            for number, (command, output) in enumerate(shown)
        ]
    return found


def is_shown(output: str, printed: str) -> bool:
    """Return whether a page shows what was printed; a line ``...`` stands for any lines, then the rest may be left out."""
    pieces = [re.escape(piece) for piece in re.split(r"^\.\.\.\n", output, flags=re.MULTILINE)]
    match = re.match if len(pieces) > 1 else re.fullmatch
    return match(r"(?:.*\n)*?".join(pieces), printed) is not None


@pytest.mark.parametrize(("command", "output"), commands_with_output(WITHOUT_RANKS))
def test_a_page_shows_what_the_command_prints(command, output, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")

    result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])

    assert result.exit_code == 0, result.output
    assert not output or is_shown(output, result.stdout), result.stdout


@pytest.mark.parametrize(("command", "output"), commands_with_output(re.compile("python examples/ladder_counts")))
def test_a_page_shows_what_the_ladder_counts(command, output):
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == output.splitlines(), done.stderr


def test_pages_show_commands_with_their_output():
    assert len([param for param in commands_with_output(WITHOUT_RANKS) if param.values[1]]) >= 8
    assert commands_with_output(re.compile("python examples/ladder_counts"))
