"""docs/where-is.md and the recipes in docs/contributing name files, functions and tests: each of them is there."""

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "where-is.md"
PLACES = re.findall(r"`([a-z_/]+\.py):([\w.]+)`", PAGE.read_text())
RECIPES = sorted(set((ROOT / "docs" / "contributing").glob("*.md")) - {ROOT / "docs" / "contributing" / "index.md"})
NAMED = re.compile(r"`((?:[a-z]\w*/)*\w+\.py)(?::{1,2}([\w.:]+))?`")
TESTS = re.compile(r"\btests/[\w/]+(?:\.py)?")


def defined_names(path: Path) -> set[str]:
    """Return functions, classes, methods and constants of a file, methods with the name of their class."""
    definition = ast.FunctionDef | ast.ClassDef
    body = ast.parse(path.read_text()).body
    top = [node for node in body if isinstance(node, definition)]
    targets = [
        node.targets if isinstance(node, ast.Assign) else [node.target]
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    return (
        {node.name for node in top}
        | {f"{node.name}.{part.name}" for node in top for part in node.body if isinstance(part, definition)}
        | {target.id for target in chain.from_iterable(targets) if isinstance(target, ast.Name)}
    )


def missing_places(page: str) -> list[str]:
    """Return what a page names that is not there: files below ``megabucket/`` or of tests, names in them, paths of tests."""
    missing = [path for path in TESTS.findall(page) if not (ROOT / path).exists()]
    for file, name in NAMED.findall(page):
        path = ROOT / file if file.startswith(("tests/", "examples/", "docs/")) else ROOT / "megabucket" / file
        if not path.exists():
            missing.append(file)
        elif name and name.replace("::", ".") not in defined_names(path):
            missing.append(f"{file}:{name}")
    return missing


@pytest.mark.parametrize(("file", "name"), sorted(set(PLACES)))
def test_a_named_place_exists(file, name):
    assert name in defined_names(ROOT / "megabucket" / file)


def test_every_row_names_a_place():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "?" in line]

    assert len(rows) >= 12
    assert [row for row in rows if not re.search(r"`[a-z_/]+\.py:[\w.]+`", row)] == []


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_what_a_recipe_names_exists(page):
    assert missing_places(page.read_text()) == []


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_names_the_test_that_must_pass(page):
    text = page.read_text()

    assert "must pass" in text
    assert re.search(r"`tests/[\w/]+\.py", text)


def test_a_place_that_a_page_makes_up_is_found():
    page = (
        "`units.py:DTYPE_BYTES`, `units.py:NOTHING`, `nowhere.py`, `tests/docs/test_where_is.py::defined_names`, tests/nowhere"
    )

    assert missing_places(page) == ["tests/nowhere", "units.py:NOTHING", "nowhere.py"]
