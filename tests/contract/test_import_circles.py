"""No file of the wheel imports itself by way of others, also not inside a function or under ``TYPE_CHECKING``."""

import ast
from collections import deque
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megabucket

Graph = dict[str, dict[str, int]]
"""By file: the files that it imports, each with the line that does it first."""


def files_by_module(root: Path) -> dict[str, str]:
    """Return the file of each module of a package, below the directory that holds the package."""
    files = [path.relative_to(root.parent) for path in sorted(root.rglob("*.py"))]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): str(file) for file in files}


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line and module of each import, and the name that is taken from the module, if any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def graph_of(root: Path) -> Graph:
    """Return which files of a package import which; a name from an ``__init__`` is an import of that ``__init__``."""
    files = files_by_module(root)
    graph: Graph = {file: {} for file in files.values()}
    for file, targets in graph.items():
        for line, module, name in sorted(imported_modules(ast.parse((root.parent / file).read_text()))):
            target = files.get(f"{module}.{name}", files.get(module))
            if target not in (None, file):
                targets.setdefault(target, line)
    return graph


def circle_through(graph: Graph, start: str) -> tuple[str, ...]:
    """Return a shortest way from a file to itself; empty if there is none."""
    came_from: dict[str, str] = {}
    waiting = deque([start])
    while waiting:
        file = waiting.popleft()
        for target in graph[file]:
            if target == start:
                way = [file]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return tuple(reversed(way))
            if target not in came_from:
                came_from[target] = file
                waiting.append(target)
    return ()


def circles(graph: Graph) -> list[str]:
    """Return a shortest circle through each file that lies on one, each once, as ``file:line -> file:line``."""
    found = {}
    for file in graph:
        if way := circle_through(graph, file):
            first = way.index(min(way))
            found[frozenset(way)] = way[first:] + way[:first]
    return sorted(
        " -> ".join(f"{file}:{graph[file][target]}" for file, target in zip(way, (*way[1:], way[0]), strict=True))
        for way in found.values()
    )


def test_no_files_of_the_wheel_import_each_other_in_a_circle():
    found = circles(graph_of(Path(megabucket.__file__).parent))

    assert not found, "\n".join(["each file imports the next one at this line, and the last one the first:", *found])


CIRCLES = {
    "of two": (
        {"a": "import pack.b", "b": "\nfrom pack.a import x"},
        ["pack/a.py:1 -> pack/b.py:2"],
    ),
    "of three": (
        {"a": "from pack import b", "b": "from pack.c import x", "c": "from pack.a import x", "d": "import pack.a"},
        ["pack/a.py:1 -> pack/b.py:1 -> pack/c.py:1"],
    ),
    "under TYPE_CHECKING": (
        {"a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.b import X", "b": "import pack.a"},
        ["pack/a.py:3 -> pack/b.py:1"],
    ),
    "inside a function": (
        {"a": "import pack.b", "b": "def f():\n    from pack.a import x"},
        ["pack/a.py:1 -> pack/b.py:2"],
    ),
    "through an __init__": (
        {"__init__": "from pack.a import x", "a": "from pack import x"},
        ["pack/__init__.py:1 -> pack/a.py:1"],
    ),
    "two with one file in common": (
        {"a": "import pack.b", "b": "import pack.a, pack.c", "c": "import pack.b"},
        ["pack/a.py:1 -> pack/b.py:1", "pack/b.py:1 -> pack/c.py:1"],
    ),
    "none": (
        {"__init__": "", "a": "from pack import b, c\nimport os", "b": "from pack.c import x", "c": "import pack.sub.d as d"},
        [],
    ),
}


@pytest.mark.parametrize(("sources", "expected"), CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_found_with_its_lines(sources, expected, tmp_path):
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    for name, source in {"__init__": "", "sub/__init__": "", "sub/d": "", **sources}.items():
        (tmp_path / "pack" / f"{name}.py").write_text(source)

    assert circles(graph_of(tmp_path / "pack")) == expected


@given(edges=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda edge: edge[0] != edge[1])))
def test_a_circle_is_found_where_no_order_of_imports_exists_and_nowhere_else(edges):
    graph = {str(number): {str(target): 1 for source, target in edges if source == number} for number in range(8)}

    try:
        TopologicalSorter(graph).prepare()
        has_order = True
    except CycleError:
        has_order = False

    assert (circles(graph) == []) is has_order
