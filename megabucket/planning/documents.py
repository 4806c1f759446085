"""Read the YAML and JSON files of a user: with a limit, the line of every value, and one meaning for every number.

PyYAML parses; here its nodes become plain values. Everything wrong with a file is a ``ConfigError`` that starts with
``file:line``. Called by ``load`` for files and for values on the command line; knows nothing about config sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import yaml

from megabucket.errors import ConfigError, printable, quoted

MAX_BYTES: Final = 1024 * 1024
"""Bytes of a file. PyYAML takes seconds for as many, so a larger file is taken for another one by mistake."""

_PRESETS: Final = Path(__file__).parent / "presets"

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
KeyPath: TypeAlias = "tuple[str | int, ...]"

_MAX_NUMBER_CHARS: Final = 100  # longer ones are text, which no section takes for a number

# YAML 1.2, core schema. Hexadecimal and octal are left out with the ambiguous spellings below.
_WORDS: Final[Mapping[str, bool | None]] = MappingProxyType(
    dict.fromkeys(("", "~", "null", "Null", "NULL"), None)
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
)
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
# Read as numbers by some YAML versions and as others, or as text, by the rest: 010 is 8 or 10, 1:30 is 90, 4_0 is 40.
_AMBIGUOUS: Final = re.compile(r"[-+]?(0[0-9_]+|0[xob][0-9A-Fa-f_]+|[0-9]+_[0-9_]*|[0-9]+(:[0-5]?[0-9])+)")


@dataclass(frozen=True, slots=True)
class Document:
    """The values of one document and where each came from."""

    data: Plain
    lines: Mapping[KeyPath, int]
    """Line, counted from 1, of each value by its path of keys and list positions; ``()`` is the document."""
    source: str
    """What to call the document in errors, usually the file's path."""


def find_file(name: Path | str, *, kind: Literal["models", "links"]) -> Path:
    """Return the file that a user names: a path, or the name of a shipped preset such as ``gpt2-124m``.

    Raises:
        ConfigError: there is neither a preset nor a file of this name.
    """
    path, folder = Path(name), _PRESETS / kind
    presets = {preset.stem: preset for preset in sorted(folder.glob("*.yaml"))}
    found = presets.get(str(name), path)
    if found is path and path.suffix not in {".yaml", ".yml", ".json"} and not path.exists():
        raise ConfigError(f"{quoted(str(name))} is neither a file nor a preset; presets of {kind}: {', '.join(presets)}")
    return found


def read_yaml(path: Path) -> Document:
    """Read one YAML file of at most 1 MiB.

    Raises:
        ConfigError: the file cannot be read, is too large, or breaks a rule of ``parse_yaml``.
    """
    source = str(path)
    raw = read_limited(path, max_bytes=MAX_BYTES, advice=", the limit for a config. Is it the right file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    return parse_yaml(text, source=source)


def read_json(path: Path, *, max_bytes: int, what: str) -> Document:
    """Return the values of a JSON file, which has no lines to point to.

    Args:
        what: the file is, for errors, with its article.

    Raises:
        ConfigError: the file cannot be read, is larger than ``max_bytes``, or is not JSON.
    """
    source = str(path)
    raw = read_limited(path, max_bytes=max_bytes, advice=f", the limit for {what}")
    try:
        return Document(json.loads(raw), {}, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON: {printable(str(error))}") from None


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


def parse_yaml(text: str, *, source: str, flow_only: bool = False) -> Document:
    """Parse one YAML document into plain values.

    Numbers and booleans follow YAML 1.2: ``1e-4`` is a float, ``yes`` is text, and spellings that YAML versions read
    differently (``010``, ``1:30``, ``4_0``) are refused. So are anchors, aliases, tags, several documents, keys that are not
    text, and a key given twice.

    Args:
        source: what errors call the text.
        flow_only: accept scalars, ``[...]`` and ``{...}`` only, as fits a value on a command line; errors tell no line.

    Raises:
        ConfigError: the text is not such a document; the message starts with ``source:line``.

    >>> parse_yaml("lr: 1e-4", source="x.yaml").data
    {'lr': 0.0001}
    """
    lines: dict[KeyPath, int] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        if flow_only and isinstance(node, yaml.CollectionNode) and not node.flow_style:
            problem = "only a plain value, [...] or {...} can stand here; quote text that contains ': ' or '- '"
            raise _Refusal(node.start_mark, problem)
        return Document(None if node is None else _plain(node, (), lines), MappingProxyType(lines), source)
    except yaml.YAMLError as error:
        line, problem = _problem(error, text)
    except RecursionError:
        line, problem = None, "not valid YAML: nested too deeply"
    except (ValueError, IndexError, OverflowError) as error:
        # Malformed escapes make PyYAML's scanner fail in Python's own terms.
        line, problem = None, f"not valid YAML: {type(error).__name__}: {printable(str(error))}"
    place = source if flow_only or line is None else f"{source}:{line}"
    raise ConfigError(f"{place}: {problem}")


class _Refusal(yaml.MarkedYAMLError):
    """Something that is YAML, but has no place in a config."""

    def __init__(self, mark: yaml.Mark, problem: str) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    """Composes the nodes of one document without anchors, aliases and tags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node: one value, in one place, of the type that its text says."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias:
            raise _Refusal(event.start_mark, f"the alias {quoted(event.anchor)} is not allowed; write the value out")
        if event.anchor is not None:
            problem = f"the anchor {quoted(event.anchor)} is not allowed; write the value out where it is used"
            raise _Refusal(event.start_mark, problem)
        if event.tag is not None:
            raise _Refusal(event.start_mark, f"the tag {quoted(event.tag)} is not allowed; write the plain value")
        return super().compose_node(parent, index)


def _plain(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Plain:
    """Return the value of a node, and note the lines of all values inside it."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, index), lines) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(node)
    values: dict[str, Plain] = {}
    for key_node, value_node in node.value:
        mark = key_node.start_mark
        if isinstance(key_node, yaml.CollectionNode):
            raise _Refusal(mark, "a key must be text, not a list or a mapping")
        key = _scalar(key_node)
        if not isinstance(key, str):
            raise _Refusal(mark, f"a key must be text; quote {quoted(key_node.value)} if it is a name")
        key_path = (*path, key)
        if key in values:
            first = lines[key_path]
            raise _Refusal(mark, f"the key {quoted(key)} is given twice, first in line {first}; keep one of them")
        lines[key_path] = mark.line + 1  # a value may stand lines below its key; the key is what a reader looks for
        values[key] = _plain(value_node, key_path, lines)
    return values


def _scalar(node: yaml.Node) -> bool | int | float | str | None:
    text: str = node.value
    is_quoted = getattr(node, "style", None) is not None
    if is_quoted or len(text) > _MAX_NUMBER_CHARS:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _AMBIGUOUS.fullmatch(text):
        raise _Refusal(
            node.start_mark,
            f"{quoted(text)} is a different number, or text, depending on the YAML version; write plain decimal digits, "
            "or quote it if it is text",
        )
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    not_finite = _NOT_FINITE.fullmatch(text)
    return float(not_finite[1] + not_finite[2]) if not_finite else text


def _problem(error: yaml.YAMLError, text: str) -> tuple[int | None, str]:
    """Return the line, where PyYAML knows it, and what is wrong there."""
    if isinstance(error, yaml.reader.ReaderError):
        character = text[error.position : error.position + 1]
        return text.count("\n", 0, error.position) + 1, f"not valid YAML: the character {character!r} is not allowed"
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark or error.context_mark) is None:
        return None, f"not valid YAML: {printable(str(error))}"
    if isinstance(error, _Refusal):
        return mark.line + 1, str(error.problem)
    return mark.line + 1, f"not valid YAML: {printable(str(error.problem or error.context))}"
