"""What `make docs` builds: pictures that are current, every public name, every page."""

import re
from pathlib import Path

import pytest
from docs.tools import diagrams

import megabucket

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(diagrams.PICTURES))
def test_a_picture_shows_what_the_package_computes(name):
    committed = (ROOT / "docs/_static" / name).read_text(encoding="utf-8")

    assert committed == diagrams.PICTURES[name](), "run: python -m docs.tools.diagrams"


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    packages = ("checkpoint", "cli", "comm", "buffer", "config", "ddp", "integrations", "measure", "optim")  # inside megabucket
    others = {path.parent.name for path in Path(megabucket.__path__[0]).glob("*/__init__.py")} - set(packages)

    assert [name for name in megabucket.__all__ if not re.search(rf"\b{name}\b", reference)] == []
    assert [name for name in sorted(others) if f"automodule:: megabucket.{name}\n" not in reference] == []


def test_the_index_leads_to_every_page():
    listed = re.findall(r"^[a-z][\w/-]*$", (ROOT / "docs/index.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}

    assert {page for page in pages if not page.startswith("decisions/")} - {"index"} == set(listed) - {"decisions/index"}
