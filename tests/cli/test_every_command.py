"""What holds for every command: help fits into 80 columns, answers keep to ``COLUMNS``, and ``--json`` prints JSON alone."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

import megabucket as mb
from megabucket.cli.main import app

PLAN, STUDY = "gpt2-124m", "configs/studies/output-15-5-2.yaml"
ANSWERS = {  # the arguments of each command that needs no ranks
    "plan": "-c {plan} --dp-size 64",
    "explain": "-c {plan}",
    "simulate": "-c {study} --cuts",
    "report": "-c {study} --out {out}/report.html",
    "checkpoint inspect": "{run}",
    "checkpoint verify": "{run}",
    "checkpoint diff": "{run} {run} --step 1 --other-step 2",
    "checkpoint reshard": "{run} {out}/resharded --ranks 3",
    "checkpoint convert": "{run} {out}/weights --to safetensors",
}
OF_RANKS = ["calibrate", "checkpoint can-load", "doctor", "profile", "tune"]  # tested with their programs


def names_of(group, before=""):
    for name, command in group.commands.items():
        yield from names_of(command, f"{name} ") if hasattr(command, "commands") else [before + name]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two checkpoints with a name that is longer than a terminal is wide."""
    path = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        module = torch.nn.ModuleDict({"a_module_whose_name_is_long_" * 3: torch.nn.Linear(40, 30)})
        mb.save_checkpoint(path, mb.DistributedDataParallel(module), step=step)
    return path


def invoke(command, *arguments, columns=160):
    return CliRunner().invoke(app, [*command.split(), *arguments], env={"COLUMNS": str(columns)})


def answer_of(command, run, out):
    return [part.format(plan=PLAN, study=STUDY, run=run, out=out) for part in ANSWERS[command].split()]


def test_every_command_is_here():
    assert sorted(names_of(typer.main.get_command(app))) == sorted([*ANSWERS, *OF_RANKS])


@pytest.mark.parametrize("command", [*ANSWERS, *OF_RANKS])
def test_help_fits_into_80_columns_and_offers_json(command):
    result = invoke(command, "--help", columns=80)

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "--json" in result.stdout


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", ANSWERS)
def test_answers_keep_to_the_columns(command, columns, run, tmp_path):
    result = invoke(command, *answer_of(command, run, tmp_path), columns=columns)

    # A path or a fingerprint may go beyond, in a line that it begins.
    wide = [line for line in result.stdout.splitlines() if len(line) > columns and len(line.split()[0]) < columns - 20]
    assert result.stdout
    assert wide == []


@pytest.mark.parametrize("command", ANSWERS)
def test_json_is_all_there_is_on_stdout(command, run, tmp_path):
    result = invoke(command, *answer_of(command, run, tmp_path), "--json")

    assert json.loads(result.stdout)
