"""docs/where-is.md names files and functions: each of them is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "where-is.md"
PLACES = re.findall(r"`([a-z_/]+\.py):([\w.]+)`", PAGE.read_text())


def defined_names(path: Path) -> set[str]:
    """Return functions, classes and methods of a file, methods with the name of their class."""
    definition = ast.FunctionDef | ast.ClassDef
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, definition)]
    return {node.name for node in top} | {
        f"{node.name}.{part.name}" for node in top for part in node.body if isinstance(part, definition)
    }


@pytest.mark.parametrize(("file", "name"), sorted(set(PLACES)))
def test_a_named_place_exists(file, name):
    assert name in defined_names(ROOT / "megabucket" / file)


def test_every_row_names_a_place():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "?" in line]

    assert len(rows) >= 12
    assert [row for row in rows if not re.search(r"`[a-z_/]+\.py:[\w.]+`", row)] == []
