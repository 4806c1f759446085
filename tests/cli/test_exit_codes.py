"""Exit codes: the table, what each error gives, and that it is in --help and in the docs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megabucket import errors
from megabucket.cli.exit_codes import ExitCode, exit_code_of, exit_code_table, reports_errors
from megabucket.cli.main import app

ROOT = Path(__file__).parents[2]


def test_the_codes_are_the_promised_ones():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "MISMATCH": 3,
        "NUMERICAL": 4,
        "PEER_LOST": 5,
        "CHECKPOINT": 6,
        "INTERRUPTED": 130,
        "CLOSED_PIPE": 141,
        "TERMINATED": 143,
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.LayoutError("x"), 2),
        (errors.ProcessGroupMissingError(world_size=2), 2),
        (errors.CheckpointNotSavedError(step=1, ranks=[0], path="p", reason="r", last_good_step=-1), 6),
        (errors.CheckpointInvalidError(path="p", file="f", problem="r"), 6),
        (errors.CheckpointMissingError(root="p", wanted="step 1", steps=[]), 6),
        (errors.CheckpointMismatchError(path="p", problems=["a"]), 6),
        (errors.CheckpointUnavailableError(optimizer="AdamW", method="state_dict()", rank=0, num_shards=2), 6),
        (errors.PhaseError("x"), 2),
        (errors.UnusedParameterError(step=0, ranks=[0], params=["a"], bucket=0, num_buckets=1, num_ranks=2), 2),
        (errors.StorageMovedError(step=0, rank=0, params=["a"], found="x", expected="y"), 2),
        (errors.LayoutMismatchError(differences=["x"], num_different=1, num_entries=2), 3),
        (errors.MicrobatchMismatchError(step=0, by_rank=[1, 2]), 3),
        (errors.NonFiniteGradientError(step=0, rank=0, param="a", bucket=0, num_buckets=1, finding="nan"), 4),
        (errors.PeerLostError(ranks=[1], states=["died"], during="in a test"), 5),
        (errors.PeerFailedError(step=0, rank=1, phase="forward", cause="x"), 1),
        (errors.InvariantError("x"), 1),
    ],
)
def test_each_error_has_its_code(error, code):
    assert exit_code_of(error) == code


def test_the_table_is_in_the_help():
    result = CliRunner().invoke(app, ["--help"])

    assert result.exit_code == 0
    for line in exit_code_table().splitlines():
        assert line.strip() in result.stdout


@pytest.mark.parametrize("command", ["plan", "explain", "profile", "tune"])
def test_every_command_has_its_help_and_its_docs(command):
    result = CliRunner().invoke(app, [command, "--help"])

    assert result.exit_code == 0
    assert "--config" in result.stdout
    assert f"## `megabucket {command}`" in (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def test_the_table_is_in_the_docs():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")

    assert [f"| {code.value} | {code.meaning} |" for code in ExitCode] == [
        line for line in page.splitlines() if line[:3].strip("| ").isdigit()
    ]


def command_that(raises):
    one = typer.Typer(pretty_exceptions_enable=False)

    def run() -> None:
        raise raises

    one.command()(reports_errors(run))
    return CliRunner().invoke(one, [])


def test_an_error_of_ours_is_its_text_on_stderr_without_control_characters():
    result = command_that(errors.ConfigError("bad \x1b[31mname\nsecond line"))

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: bad \\x1b[31mname\nsecond line\n"


@pytest.mark.parametrize(
    ("raised", "recorded"),
    [
        (errors.ConfigError("bad name"), "ConfigError: bad name"),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug"),
        (typer.Exit(4), None),  # the command has said why
        (KeyboardInterrupt(), None),
    ],
    ids=["of ours", "another", "an exit code", "an interrupt"],
)
def test_an_error_is_where_torchrun_looks_for_the_cause_of_an_exit_code(raised, recorded, tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    command_that(raised)

    assert (json.loads(file.read_text())["message"]["message"] if file.exists() else None) == recorded


def test_an_interrupt_is_130():
    assert command_that(KeyboardInterrupt()).exit_code == 130


def test_a_reader_that_has_ended_is_141_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)

    command = [sys.executable, "-m", "megabucket", "plan", "-c", "gpt2-124m"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)

    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [("plan -c gpt2-124m --dp-size -2", "-2"), ("checkpoint reshard a b --ranks many", "many"), ("tune --modes all", "all")],
)
def test_an_option_that_is_refused_is_told_with_its_value(arguments, value):
    result = CliRunner().invoke(app, arguments.split())

    assert result.exit_code == 2
    assert f"Invalid value for '{arguments.split()[-2]}'" in result.stderr
    assert value in result.stderr.split("Invalid value for")[1]


def test_an_error_that_is_not_ours_keeps_its_traceback():
    result = command_that(ZeroDivisionError("a bug"))

    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_no_command_is_answered_with_the_help():
    result = CliRunner().invoke(app, [])

    assert result.exit_code == 2
    assert "Usage:" in result.output


def test_a_misspelt_command_is_answered_with_the_likely_one():
    result = CliRunner().invoke(app, ["plam"])

    assert result.exit_code == 2
    assert "Did you mean 'plan'?" in result.stderr


def test_sigterm_is_143_and_ends_in_good_order():
    one = typer.Typer(pretty_exceptions_enable=False)
    cleaned_up = []

    def run() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned_up.append(True)

    one.command()(reports_errors(run))
    before = signal.getsignal(signal.SIGTERM)

    result = CliRunner().invoke(one, [])

    assert (result.exit_code, cleaned_up) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_does_not_hide_an_error_that_is_on_its_way_out(tmp_path, monkeypatch):
    """Torchrun sends it to the other ranks of a host once one is lost, which they may have noticed by then."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    one = typer.Typer(pretty_exceptions_enable=False)

    def run() -> None:
        try:
            raise errors.ConfigError("bad name")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    one.command()(reports_errors(run))

    result = CliRunner().invoke(one, [])

    assert (result.exit_code, result.stderr) == (2, "error: bad name\n")
    assert json.loads(file.read_text())["message"]["message"] == "ConfigError: bad name"
