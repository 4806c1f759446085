"""What surrounds the code: the workflow, the hooks, the notes on versions; and Markdown that an editor shows whole."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import megabucket

TOP = Path(__file__).parents[2]
MAKEFILE = (TOP / "Makefile").read_text()
WORKFLOW = yaml.safe_load((TOP / ".github" / "workflows" / "ci.yml").read_text())
PROJECT = (TOP / "pyproject.toml").read_text()


def test_the_workflow_calls_targets_of_the_makefile():
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    versions = [case["target"] for case in WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]]
    targets = {command.split()[1] for command in commands} - {"${{"} | set(versions)
    known = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE).group(1).split())

    assert {command.split()[0] for command in commands} == {"make"}
    assert {"check", "demo", "docs", "newest", "oldest", "test"} == targets <= known


def test_the_workflow_runs_every_python_that_the_project_names():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)

    assert WORKFLOW["jobs"]["check"]["strategy"]["matrix"]["python"] == named
    assert f'requires-python = ">={named[0]}"' in PROJECT


def test_the_hooks_run_what_make_lint_and_types_run():
    hooks = yaml.safe_load((TOP / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]

    for entry in (hook["entry"] for hook in hooks):
        assert entry.replace(".venv/bin", "$(BIN)").replace(" --force-exclude", "") in MAKEFILE


def test_the_version_is_the_same_wherever_it_stands():
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text())
    newest = re.search(r"^## \[([\d.]+)\]", (TOP / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)

    assert citation["version"] == newest == megabucket.__version__


def prose_of(page):
    """Yield the lines of a page that can be broken: no code, no table, no image, no word that is too long by itself."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if not (is_code or is_fence or line.lstrip().startswith(("|", "!["))):
            yield number, line


@pytest.mark.parametrize(
    "page",
    [TOP / name for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=TOP, text=True).split()],
    ids=lambda page: str(page.relative_to(TOP)),
)
def test_no_line_of_prose_is_longer_than_160_columns(page):
    assert [f"{page.name}:{number}" for number, line in prose_of(page) if len(line) > 160] == []
