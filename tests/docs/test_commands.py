"""Each command and each block of the pages: run where that is cheap, else read by the parser of its program.

``test_docs.py`` runs the ``python`` blocks. Here are the others, and commands in running text:

============================  =====================================================================================
``megabucket``                without ranks (plan, explain, simulate, report, checkpoint): run, and a shown output is
                              compared line by line; the others: options and config are read
``make``                      target and variables are in the Makefile; BENCH, FAULTS and GPU are read by their parsers
``torchrun``, ``python``      the program exists and knows each option; ``examples.bytegpt`` also reads the config
``pip install``               the extra exists
``yaml``, ``json``, ``ini``   read by what they are written for; so are ``py`` blocks, which need files of the reader
============================  =====================================================================================

``NOT_RUN`` says what is not run, and why.
"""

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import pytest
import torch
import typer
import yaml
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import megabucket as mb
from megabucket.cli.main import app
from megabucket.cli.workload import open_workload
from megabucket.planning import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^\$ megabucket ((?:plan|simulate).*)\n((?:(?!\$ ).*\n)+)", re.MULTILINE)
IN_TEXT = re.compile(r"`((?:make|megabucket|torchrun|python|pip install)\s[^`]+)`")
IN_A_SENTENCE = re.compile(r"torchrun --max-restarts|source ")  # no command of ours
PROGRAMS = {"examples.bytegpt": "examples.bytegpt.__main__", "faults": "faults.__main__", "megabucket": "megabucket.cli.main"}
ON_THE_PATH = ("tests", "tests/benchmarks", "tests/gpu")  # as the Makefile and PYTHONPATH=tests have it

NOT_RUN = {  # what is only read here -> why, or the test that runs it
    "megabucket calibrate": "tests/measure/test_calibrate.py",
    "megabucket doctor": "tests/doctor/test_doctor_command.py",
    "megabucket profile": "tests/bytegpt/test_demo_profiled.py",
    "megabucket tune": "tests/bytegpt/test_demo_tuned.py",
    "examples.bytegpt": "tests/bytegpt/test_train_under_torchrun.py",
    "examples/ladder.py": "tests/ranks/test_ladder_example.py",
    "loop.py": "tests/docs/test_docs.py",
    "make faults, faults": "takes long: make nightly",
    "make gpu": "tests/gpu/test_ready.py",
    "make bench, tests/benchmarks": "measures for minutes, and some of it needs packages that make test does not have",
    "make mutation": "takes half an hour",
    "make demo, test, check, nightly, docs, frameworks": "install packages, or run these tests",
    "pip install": "needs the network",
    "text": "blocks with pictures, formulas, and output of runs whose figures are the machine's",
}


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    text: str
    place: str
    is_in_text: bool = False  # then arguments may be left out, or stand for others

    @property
    def words(self) -> list[str]:
        """The words without variables of the environment before them."""
        words = [word for word in shlex.split(self.text, comments=True) if word != "..."]
        return list(dropwhile(re.compile(r"[A-Z_]+=").match, words))


def commands_of(page: Path) -> list[Command]:
    name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    found = []
    for block in BLOCK.finditer(text):
        first_line = text.count("\n", 0, block.start()) + 2
        for number, line in enumerate(block[2].splitlines(), first_line):
            if block[1] in {"sh", "bash"} or (block[1] == "console" and line.startswith("$ ")):
                found.append(Command(line.removeprefix("$ "), f"{name}:{number}"))
    spans = (" ".join(span.split()) for span in IN_TEXT.findall(BLOCK.sub("", text)))
    return found + [
        Command(part, name, is_in_text=True) for span in spans for part in span.split(" && ") if not IN_A_SENTENCE.match(part)
    ]


def first_of_each(commands: list[Command]) -> list[object]:
    """Return one parameter set for each text: pages repeat commands."""
    first = {command.text: command for command in reversed(commands)}
    return [pytest.param(command, id=f"{command.place} {command.text[:40]}") for command in reversed(first.values())]


OUTPUTS = [
    pytest.param(command, output, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8"))
    if language == "console"
    for number, (command, output) in enumerate(SHOWN.findall(block))
]
ALL = [command for page in PAGES for command in commands_of(page)]
WITHOUT_RANKS = tuple(f"megabucket {name} " for name in ("plan", "explain", "simulate", "report", "checkpoint"))
WITHOUT_OUTPUT = [
    command
    for command in ALL
    if command.text.startswith(WITHOUT_RANKS)
    and not command.is_in_text
    and command.text.removeprefix("megabucket ") not in {param.values[0] for param in OUTPUTS}
]


def read_by(program: typer.Typer, words: list[str]) -> dict[str, object]:
    """Return the parameters of a command line as its program reads them, without running it."""
    params: dict[str, object] = {}
    command = leaf = typer.main.get_command(program)
    for word in words:
        leaf = getattr(leaf, "commands", {}).get(word, leaf)
    leaf.callback = lambda **values: params.update(values)

    with pytest.raises(SystemExit) as ended:
        command.main(words, prog_name="program")

    assert ended.value.code in {0, None}, words
    return params


def check_options_in_text(program: typer.Typer, words: list[str]) -> None:
    """Look at commands and options only: their arguments may be missing."""
    leaf = command = typer.main.get_command(program)
    for word in words:
        leaf = getattr(leaf, "commands", {}).get(word, leaf)
    known = {name for param in leaf.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    if "COMMAND" not in words:  # any of them
        assert leaf is not command or not hasattr(command, "commands") or all(word.startswith("-") for word in words)
        assert {word for word in words if re.fullmatch(r"-\w|--\w[\w-]*", word)} <= known


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    values = dict(word.split("=", 1) for word in words if "=" in word)

    assert [word for word in words if "=" not in word and word not in targets] == []
    assert [name for name in values if not re.search(rf"^{name} \?=", makefile, re.MULTILINE)] == []
    for variable, value in values.items():
        arguments = shlex.split(value)
        if variable == "FAULTS":
            read_by(importlib.import_module("faults.__main__").app, ["table", *arguments])
        elif variable in {"BENCH", "GPU"}:
            module = importlib.import_module({"BENCH": "peers.options", "GPU": "ready"}[variable])
            if arguments != ["--help"]:
                module.read_options(arguments)


def check_program(program: str, words: list[str], *, is_in_text: bool) -> None:
    """Check that a module or script is there and takes the options."""
    if program in PROGRAMS:
        check = check_options_in_text if is_in_text else check_app
        check(importlib.import_module(PROGRAMS[program]).app, words)
    elif program == "loop.py":  # README's loop, as the reader has saved it
        assert not words
    else:
        path = program if "/" in program else f"{program.replace('.', '/')}.py"
        source = (ROOT / path).read_text()
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def check_app(program: typer.Typer, words: list[str]) -> None:
    params = read_by(program, words)
    config, overrides = params.get("config"), [str(one) for one in params.get("overrides") or []]
    path = Path(str(config)) if config else None
    if program is not app:
        if "overrides" in params:
            importlib.import_module("examples.bytegpt.config").load_demo_config(path, overrides)
    elif workload := params.get("workload"):
        open_workload(str(workload), path, overrides)
    elif "overrides" in params and (path is None or path.is_relative_to("configs")):
        load_config(path, overrides)


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return which program of this repository a command starts, and with which arguments."""
    match words:
        case ["megabucket", *arguments]:
            return "megabucket", arguments
        case ["torchrun", *arguments]:
            launch = get_args_parser().parse_args(arguments)
            return launch.training_script, launch.training_script_args
        case ["python" | ".venv/bin/python", *arguments]:
            program, *rest = arguments[1:] if arguments[0] == "-m" else arguments
            return program, rest
    return None


@pytest.mark.parametrize("command", first_of_each(ALL))
def test_a_command_is_one_that_its_program_takes(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    for folder in ON_THE_PATH:
        monkeypatch.syspath_prepend(str(ROOT / folder))
    match command.words:
        case ["make", *arguments]:
            check_make(arguments)
        case ["pip", "wheel" | "install", *arguments] if not any("[" in word for word in arguments):
            assert {"dist", "."} & {word.split("/")[0] for word in arguments}  # the wheel, made and installed
        case ["python", "-m", "build"]:
            assert "hatchling.build" in (ROOT / "pyproject.toml").read_text()
        case ["pip", "install", requirement]:
            (extra,) = re.fullmatch(r"megabucket\[(\w+)\]", requirement).groups()
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        case ["export", assignment]:
            assert assignment == "PYTHONPATH=tests"
        case words:
            program, arguments = program_of(words)
            check_program(program, arguments, is_in_text=command.is_in_text)


def test_what_is_only_read_here_is_run_by_a_test_that_exists():
    assert [place for place in NOT_RUN.values() if place.endswith(".py") and not (ROOT / place).exists()] == []


def blocks(language: str, page: str) -> list[str]:
    return [block for name, block in BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")) if name == language]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a checkpoint of the demo's model at the step that the pages name."""
    from examples.bytegpt.config import load_demo_config
    from examples.bytegpt.task import initial_model, trainable_model

    config = load_demo_config(ROOT / "configs/bytegpt.yaml", [])
    model = mb.DistributedDataParallel(initial_model(config, trainable_model(config), torch.device("cpu")))
    root = tmp_path_factory.mktemp("checkpoints") / "run"
    mb.save_checkpoint(root, model, torch.optim.AdamW(model.parameters()), step=1200)
    return root


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Be in a folder with what the reader of the pages has by then."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "run.yaml").write_text(blocks("yaml", "report.md")[0])
    (tmp_path / "runs/steps.jsonl").write_text(blocks("json", "report.md")[0])
    return tmp_path


@pytest.mark.parametrize("command", first_of_each(WITHOUT_OUTPUT))
def test_a_command_without_ranks_runs(command, reader, request):
    _, *arguments = command.words
    if arguments[0] == "checkpoint":
        root = request.getfixturevalue("checkpoint")
        for name in ("run", "other", "runs/a", "runs/b"):
            (reader / name).symlink_to(root)

    result = CliRunner().invoke(app, arguments)

    if "can-load" in arguments:  # the demo saves a data position and two groups, which this checkpoint lacks
        assert "things do not fit" in result.output
    else:
        assert result.exit_code == 0, result.output


def is_shown(output: str, printed: str) -> bool:
    """Return whether a page shows what was printed; a line ``...`` stands for any lines, then the rest may be left out."""
    pieces = [re.escape(piece) for piece in re.split(r"^\.\.\.\n", output, flags=re.MULTILINE)]
    match = re.match if len(pieces) > 1 else re.fullmatch
    return match(r"(?:.*\n)*?".join(pieces), printed) is not None


@pytest.mark.parametrize(("command", "output"), OUTPUTS)
def test_a_page_shows_what_the_command_prints(command, output, reader):
    result = CliRunner().invoke(app, shlex.split(command, comments=True))

    assert result.exit_code == 0, result.output
    assert is_shown(output, result.stdout), result.stdout


def test_pages_show_outputs():
    assert len(OUTPUTS) >= 5


def test_a_page_shows_what_the_ladder_counts():
    page = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
    command, output = re.search(
        r"^```console\n\$ python (examples/ladder_counts.*)\n((?:.*\n)*?)```$", page, re.MULTILINE
    ).groups()

    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == output.splitlines(), done.stderr


def test_the_calibrated_link_that_a_page_shows_can_be_read(tmp_path):
    for link in blocks("yaml", "tune.md"):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"link": yaml.safe_load(link)}))

        assert load_config(tmp_path / "run.yaml", []).link is not None


def test_the_tuned_config_is_loaded_as_a_page_shows(reader):
    (reader / "tuned.yaml").symlink_to(ROOT / "configs/bytegpt.yaml")
    (block,) = blocks("py", "tune.md")
    names = {"mb": mb, "model": torch.nn.Linear(2, 2)}

    exec(compile(block, "docs/tune.md", "exec"), names)  # noqa: S102

    assert isinstance(names["model"], mb.DistributedDataParallel)


@pytest.mark.nightly
def test_the_pytest_plugin_runs_as_a_page_shows(tmp_path):
    conftest, test = blocks("py", "property-test-your-layout.md")
    (ini,) = blocks("ini", "property-test-your-layout.md")
    models = "import torch\n\n\ndef small():\n    return torch.nn.Linear(1000, 1000)\n\n\nlarge = small\n"
    (tmp_path / "my_project").mkdir()
    for name, text in {"conftest.py": conftest, "pytest.ini": f"[pytest]\npythonpath = .\n{ini}", "test_it.py": test}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_project/models.py").write_text(models)

    done = subprocess.run([sys.executable, "-m", "pytest"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "24 passed" in done.stdout, done.stdout  # 2 models on 4 numbers of ranks with 3 bucket sizes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_read_or_stands_in_the_table(page):
    languages = {name for name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    run = {"python", "sh", "bash", "console"}
    read = {"report.md": {"yaml", "json"}, "tune.md": {"py", "yaml"}}
    read["property-test-your-layout.md"] = {"py", "ini"}
    read["more-than-one-machine.md"] = {"py"}  # test_cluster_files.py, with its blocks of text
    read |= {"lightning.md": {"yaml"}, "lora.md": {"py"}}  # tests/integrations: test_lightning_cli.py, test_peft.py

    assert languages <= run | read.get(page.name, set()) | NOT_RUN.keys()
