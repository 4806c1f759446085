"""Find, read and write the files of a user. A wrong file is a ``ConfigError`` that starts with ``file:line``. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import yaml

from megabucket.errors import ConfigError, printable, quoted

MAX_BYTES: Final = 1024 * 1024
"""Bytes of a YAML file. PyYAML takes seconds for as many, so a larger file is probably the wrong one."""

_PRESETS: Final = Path(__file__).parent / "presets"

KeyPath: TypeAlias = "tuple[str | int, ...]"


class _Loader(yaml.SafeLoader):
    """YAML 1.2 without octal and hexadecimal numbers, anchors and aliases, and without a key that is given twice.

    ``1e-4`` is a float, and ``yes`` and ``1:30`` are text. ``010``, which is ten or eight, is refused.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - of PyYAML

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the values of a mapping."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                problem = f"the key {quoted(key.value)} is given twice, first in line {lines[key.value]}; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            problem = "anchors (&) and aliases (*) are not read, as an override would change both places; write it twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def refuse_leading_zero(self, node: yaml.ScalarNode) -> Any:
        """Refuse a whole number whose base depends on the version of YAML."""
        decimal = node.value[0].strip("0123456789") + (node.value.lstrip("+-0") or "0")
        problem = f"{quoted(node.value)} is octal in some versions of YAML; write {decimal} for a number, or quote the text"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("leading-zero", r"[-+]?0[0-7]+", list("-+0")),
    (
        "float",
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))",
        list("-+.0123456789"),
    ),
    ("float", r"\.(nan|NaN|NAN)", ["."]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:leading-zero", _Loader.refuse_leading_zero)


@dataclass(frozen=True)
class Document:
    """The values of one file."""

    data: Any
    source: Path | str
    """The file, or what errors call the values if they come from none."""
    raw: bytes = b""
    """The YAML text."""

    def place(self, path: KeyPath) -> str:
        """Return the file and the line of the innermost value on a path; keys that are not in the file are skipped."""
        if self._root is None:
            return str(self.source)
        node, line = self._root, self._root.start_mark.line
        for part in path:
            items = list(enumerate(node.value)) if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                items = node.value
            for key, value in items:
                if part == getattr(key, "value", key):
                    node, line = value, getattr(key, "start_mark", value.start_mark).line
        return f"{self.source}:{line + 1}"

    @cached_property
    def _root(self) -> yaml.Node | None:
        return yaml.compose(self.raw, Loader=_Loader) if self.raw else None


def find_file(name: Path | str, *, kind: Literal["models", "links"]) -> Path:
    """Return the file that a user names: a path, or the name of a shipped preset such as ``gpt2-124m``.

    Raises:
        ConfigError: there is neither a preset nor a file of this name, or it is Python or a folder.
    """
    path, folder = Path(name), _PRESETS / kind
    presets = {preset.stem: preset for preset in sorted(folder.glob("*.yaml"))}
    if str(name) in presets:
        return presets[str(name)]
    if path.suffix == ".py" and kind == "models":
        how = f"write the module and the function that returns the model, as {path.stem}:build"
        raise ConfigError(f"{quoted(str(name))} is Python: {how}")
    if path.is_dir():
        example = f", as {path / 'config.json'}" if kind == "models" else ""
        raise ConfigError(f"{quoted(str(name))} is a folder: name a file in it{example}")
    if path.suffix not in {".yaml", ".yml", ".json"} and not path.exists():
        raise ConfigError(f"{quoted(str(name))} is neither a file nor a preset; presets of {kind}: {', '.join(presets)}")
    return path


def read_yaml(path: Path) -> Document:
    """Read one YAML file of at most 1 MiB.

    Raises:
        ConfigError: the file cannot be read, is too large, or breaks a rule of ``parse_yaml``.
    """
    raw = read_limited(path, max_bytes=MAX_BYTES, advice=", the limit for a config. Is it the right file?")
    return Document(parse_yaml(raw, source=path), path, raw)


def parse_yaml(text: bytes | str, *, source: Path | str) -> Any:
    """Return the values of one YAML document.

    Args:
        source: what errors call the text; a file is named with the line.

    Raises:
        ConfigError: the text is not YAML, or has a key twice, an alias, or a whole number that begins with a zero.

    >>> parse_yaml("lr: 1e-4", source="x.yaml")
    {'lr': 0.0001}
    """
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, IndexError, OverflowError, RecursionError) as error:
        # Malformed escapes make PyYAML's scanner fail in Python's own terms.
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None and isinstance(source, Path) else source
        raise ConfigError(f"{place}: not valid YAML: {printable(getattr(error, 'problem', None) or str(error))}") from None


def read_json(path: Path, *, max_bytes: int, what: str) -> Any:
    """Return the values of a JSON file.

    Args:
        what: the file is, for errors, with its article.

    Raises:
        ConfigError: the file cannot be read, is larger than ``max_bytes``, or is not JSON.
    """
    raw = read_limited(path, max_bytes=max_bytes, advice=f", the limit for {what}")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits as well
        raise ConfigError(f"{path}: not valid JSON: {printable(str(error))}") from None


def read_limited(path: Path, *, max_bytes: int, advice: str) -> bytes:
    """Return the bytes of a file.

    Args:
        advice: what follows in the error about a file that is too large.

    Raises:
        ConfigError: the file cannot be read, or is larger than ``max_bytes``.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes} bytes{advice}")
    return raw


def write_text(path: Path, text: str) -> None:
    """Write a file, and make its directory.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
