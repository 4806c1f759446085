"""Documentation that runs: every Python block, every example, every relative link, every doctest."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import run_launched, run_script

import megabucket

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
# tests/integrations runs what needs a framework, and make frameworks runs these tests.
OF_FRAMEWORKS = {
    *("lightning.md", "hugging-face.md", "megatron-core.md"),
    *("lightning_trainer.py", "hugging_face_trainer.py", "megatron_loop.py"),
}
# By day smaller tests hold what these show: README's loop, tests/checkpoint, and in tests/ranks test_ladder_example.py,
# test_fabric.py, test_parallel_groups_on_ranks.py and test_two_dimensions_example.py.
BY_NIGHT = (
    "checkpoint_resume.py",
    "elastic.py",
    "hsdp.py",
    "ladder.py",
    "overlap_on_a_fabric.py",
    "train_loop.py",
    "two_dimensions.py",
)
BY_DAY = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - set(BY_NIGHT) - OF_FRAMEWORKS)
ON_FOUR_RANKS = ("hsdp.py", "two_dimensions.py", *BY_DAY)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#{1,3} (.*)$", re.MULTILINE)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in OF_FRAMEWORKS and PYTHON_BLOCK.search(page.read_text())],
    ids=page_id,
)
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    program = "\n".join(PYTHON_BLOCK.findall(page.read_text()))

    exec(compile(program, page_id(page), "exec"), {"__name__": "__docs__"})  # noqa: S102


@pytest.mark.dist
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]], ids=["alone", "2 ranks"]
)
def test_the_loop_of_the_readme_runs_as_it_is_pasted(launcher, tmp_path):
    (tmp_path / "loop.py").write_text(PYTHON_BLOCK.search((ROOT / "README.md").read_text()).group(1))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, *launcher, "loop.py"]

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_relative_link_is_broken(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link[0] and not link[0].startswith("mailto:")]
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]

    assert [str(path) for path, _ in targets if not path.exists()] == []
    assert [f"{path}#{anchor}" for path, anchor in targets if anchor and anchor not in anchors_of(path)] == []


@pytest.mark.dist
@pytest.mark.parametrize("name", BY_DAY)
def test_an_example_runs_on_two_ranks(name, tmp_path):
    check_example(run_launched(run_script, (ROOT / "examples" / name, tmp_path), tmp_path / "said"))


@pytest.mark.dist
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "num_ranks"), [*((name, 2) for name in BY_NIGHT), *((name, 4) for name in ON_FOUR_RANKS)])
def test_an_example_runs_under_torchrun(name, num_ranks, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launcher, str(ROOT / "examples" / name)]

    check_example(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False))


def check_example(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example shows something"


def test_the_examples_in_docstrings_give_what_they_say():
    failed = attempted = 0
    for info in pkgutil.walk_packages(megabucket.__path__, "megabucket."):
        if info.name != "megabucket.__main__" and not info.name.startswith("megabucket.integrations."):  # which may be missing
            result = doctest.testmod(importlib.import_module(info.name))
            failed, attempted = failed + result.failed, attempted + result.attempted

    assert failed == 0
    assert attempted > 20
