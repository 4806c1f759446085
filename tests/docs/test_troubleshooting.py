"""docs/troubleshooting.md: who has just hit an error finds its class there."""

import re
from pathlib import Path

import pytest

from megabucket import errors

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = [
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.MegabucketError)
]


def entry_of(name: str) -> str:
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return found.group(1).strip() if found else ""


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_class_has_an_entry_that_says_something(name):
    assert len(entry_of(name)) > 20


def test_every_entry_is_a_class_that_exists():
    assert sorted(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == sorted(CLASSES)
