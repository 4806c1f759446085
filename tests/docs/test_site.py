"""What `make docs` builds: pictures that are current, every public name, a way to every page."""

import re
from pathlib import Path

import pytest
from docs.tools import diagrams

import megabucket

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", sorted(diagrams.PICTURES))
def test_a_picture_shows_what_the_package_computes(name):
    committed = (ROOT / "docs/_static" / name).read_text(encoding="utf-8")

    assert committed == diagrams.PICTURES[name](), "run: python -m docs.tools.diagrams"


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    packages = ("checkpoint", "cli", "comm", "buffer", "config", "ddp", "integrations", "measure", "optim", "weights")  # inside
    others = {path.parent.name for path in Path(megabucket.__path__[0]).glob("*/__init__.py")} - set(packages)

    assert [name for name in megabucket.__all__ if not re.search(rf"\b{name}\b", reference)] == []
    assert [name for name in sorted(others) if f"automodule:: megabucket.{name}\n" not in reference] == []


def test_the_index_links_to_every_page_and_the_sidebar_lists_it():
    pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md")} - {Path("index.md")}
    of_sections = {
        page for page in pages if page.parent.name in ("contributing", "decisions", "migrate") and page.name != "index.md"
    }
    index = (DOCS / "index.md").read_text(encoding="utf-8")

    assert {Path(target) for target in re.findall(r"\]\(([\w/-]+\.md)\)", index)} == pages - of_sections
    assert {Path(f"{entry}.md") for entry in re.findall(r"^[a-z][\w/-]*$", index, re.MULTILINE)} == pages - of_sections
