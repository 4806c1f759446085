"""The lower bounds of ``pyproject.toml`` are what ``make oldest`` installs and tests."""

import re
from pathlib import Path

from packaging.version import Version

TOP = Path(__file__).parents[2]


def test_make_oldest_installs_the_lower_bounds():
    project = (TOP / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|testing) = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
    bounds = dict(re.findall(r'"([a-z]+)>=([\d.]+)', "".join(lists)))
    pins = dict(re.findall(r"^([a-z]+)==([\d.]+)$", (TOP / "tests" / "versions" / "oldest.txt").read_text(), re.MULTILINE))

    assert len(lists) == 2
    assert {name: Version(bound) for name, bound in bounds.items()} == {name: Version(pins[name]) for name in bounds}
