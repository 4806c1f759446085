"""Read YAML that strangers may have written: small, flat enough, without aliases, and with one meaning per number.

Owns the rules of the files this library accepts. It walks the events of PyYAML's pure Python parser and builds the values
itself, so limits hold before anything is built and every value knows its line. Everything wrong with a file is a
``ConfigError`` that starts with ``file:line``. Called by ``load`` for files and by ``overrides`` for values on the command
line; knows nothing about config sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn, TypeAlias

import yaml

from megabucket.config.text import printable, quoted
from megabucket.errors import ConfigError

MAX_BYTES: Final = 1024 * 1024
"""Bytes of a file."""

MAX_DEPTH: Final = 20
"""Collections inside each other."""

MAX_NODES: Final = 10_000
"""Scalars (keys count) and collections together."""

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
KeyPath: TypeAlias = "tuple[str | int, ...]"

_MAX_NUMBER_CHARS: Final = 100

# YAML 1.2, core schema. Hexadecimal and octal are left out with the ambiguous spellings below.
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS: Final = MappingProxyType({"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False})
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
# Read as numbers by some YAML versions and as others, or as text, by the rest: 010 is 8 or 10, 1:30 is 90, 4_0 is 40.
_AMBIGUOUS: Final = re.compile(r"[-+]?(0[0-9_]+|0[xob][0-9A-Fa-f_]+|[0-9]+_[0-9_]*|[0-9]+(:[0-5]?[0-9])+)")
# Strings with these cannot be written to any file.
_SURROGATES: Final = frozenset(chr(code) for code in range(0xD800, 0xE000))


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """The values of one document and where each came from."""

    data: Plain
    lines: Mapping[KeyPath, int]
    """Line, counted from 1, of each value by its path of keys and list positions; ``()`` is the document."""
    source: str
    """What to call the document in errors, usually the file's path."""


def read_yaml(path: Path) -> YamlDocument:
    """Read one YAML file of at most 1 MiB.

    Raises:
        ConfigError: the file cannot be read, is too large, or breaks a rule of ``parse_yaml``.
    """
    source = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{source}: cannot be read: {reason}. Give the path of a YAML file.") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_BYTES} bytes, the limit for a config. Is it the right file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    return parse_yaml(text, source=source)


def parse_yaml(text: str, *, source: str, flow_only: bool = False) -> YamlDocument:
    """Parse one YAML document into plain values.

    Numbers and booleans follow YAML 1.2: ``1e-4`` is a float, ``yes`` is text, and spellings that YAML versions read
    differently (``010``, ``1:30``, ``4_0``) are refused. So are anchors, aliases, tags, merge keys, several documents, keys
    that are not text, and a key given twice. At most 20 levels and 10,000 nodes.

    Args:
        source: what errors call the text.
        flow_only: accept scalars, ``[...]`` and ``{...}`` only, as fits a value on a command line.

    Raises:
        ConfigError: the text is not such a document; the message starts with ``source:line``.

    >>> parse_yaml("lr: 1e-4", source="x.yaml").data
    {'lr': 0.0001}
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: longer than {MAX_BYTES} characters, the limit for a config")
    builder = _Builder(source, flow_only=flow_only)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.accept(event)
    except yaml.YAMLError as error:
        line, problem = _syntax_problem(error, text)
        place = source if flow_only or line is None else f"{source}:{line}"
        raise ConfigError(f"{place}: not valid YAML: {problem}") from None
    except ConfigError:
        raise
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        # Malformed escapes and directives make PyYAML's scanner fail in Python's own terms.
        raise ConfigError(
            f"{source}:{builder.line}: not valid YAML after this line: {type(error).__name__}: {printable(str(error))}"
        ) from None
    return YamlDocument(builder.root, MappingProxyType(builder.lines), source)


def _syntax_problem(error: yaml.YAMLError, text: str) -> tuple[int | None, str]:
    """Return the line, where PyYAML knows it, and what is wrong there."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or getattr(error, "context", None) or "syntax error"
        return mark.line + 1, printable(str(problem))
    position = getattr(error, "position", None)
    if isinstance(position, int):
        line = text.count("\n", 0, position) + 1
        return line, f"the character {text[position : position + 1]!r} is not allowed"
    return None, printable(str(error))


@dataclass(slots=True)
class _OpenList:
    """A list whose end has not come yet."""

    value: list[Plain]
    path: KeyPath


@dataclass(slots=True)
class _OpenMapping:
    """A mapping whose end has not come yet."""

    value: dict[str, Plain]
    path: KeyPath
    key: str | None = None
    """The key whose value comes next; ``None``: a key comes next."""
    key_lines: dict[str, int] = field(default_factory=dict)


class _Builder:
    """Builds the value from events, without recursion; checks every limit before it stores anything."""

    def __init__(self, source: str, *, flow_only: bool) -> None:
        self.root: Plain = None
        self.lines: dict[KeyPath, int] = {}
        self.line = 1
        self._source = source
        self._flow_only = flow_only
        self._stack: list[_OpenList | _OpenMapping] = []
        self._num_nodes = 0
        self._num_documents = 0

    def accept(self, event: yaml.Event) -> None:
        line = self.line = event.start_mark.line + 1 if event.start_mark is not None else self.line
        if isinstance(event, yaml.DocumentStartEvent):
            self._start_document(event, line)
        elif isinstance(event, yaml.AliasEvent):
            self._fail(line, f"the alias {quoted(event.anchor or '')} is not allowed; write the value out")
        elif isinstance(event, yaml.NodeEvent):
            self._check_node(event, line)
            if isinstance(event, yaml.ScalarEvent):
                self._scalar(event, line)
            else:
                self._open(event, line)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self._stack.pop()

    def _start_document(self, event: yaml.DocumentStartEvent, line: int) -> None:
        self._num_documents += 1
        if self._num_documents > 1:
            self._fail(line, "a second document starts here; a config is one document")
        if event.tags or event.version:
            self._fail(line, "directives (%YAML, %TAG) are not allowed; remove them")

    def _check_node(self, event: yaml.NodeEvent, line: int) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            self._fail(line, f"more than {MAX_NODES} values, the limit for a config")
        if event.anchor is not None:
            self._fail(
                line,
                f"the anchor {quoted(event.anchor)} is not allowed; write the value out where it is used",
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._fail(line, f"the tag {quoted(tag)} is not allowed; write the plain value")

    def _open(self, event: yaml.NodeEvent, line: int) -> None:
        if self._flow_only and not getattr(event, "flow_style", True):
            self._fail(line, "only a plain value, [...] or {...} can stand here; quote text that contains ': ' or '- '")
        if self._is_key_next():
            self._fail(line, "a key must be text, not a list or a mapping")
        if len(self._stack) >= MAX_DEPTH:
            self._fail(line, f"nested deeper than {MAX_DEPTH} levels, the limit for a config")
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Plain] = []
            self._stack.append(_OpenList(items, self._store(items, line)))
        else:
            pairs: dict[str, Plain] = {}
            self._stack.append(_OpenMapping(pairs, self._store(pairs, line)))

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        # The first of the pair is true for plain scalars: quoted and block scalars are always text.
        is_plain = event.implicit[0]
        if not event.value.isascii() and any(char in _SURROGATES for char in event.value):
            self._fail(line, "an escape for half a character (a surrogate); write the character itself")
        if is_plain and event.value == "<<" and self._is_key_next():
            self._fail(line, "the merge key << is not allowed; write the keys out")
        value = self._resolve(event.value, line) if is_plain else event.value
        top = self._stack[-1] if self._stack else None
        if isinstance(top, _OpenMapping) and top.key is None:
            if not isinstance(value, str):
                self._fail(line, f"a key must be text; quote {quoted(event.value)} if it is a name")
            if value in top.key_lines:
                first = top.key_lines[value]
                self._fail(line, f"the key {quoted(value)} is given twice, first in line {first}; keep one of them")
            top.key, top.key_lines[value] = value, line
        else:
            self._store(value, line)

    def _is_key_next(self) -> bool:
        top = self._stack[-1] if self._stack else None
        return isinstance(top, _OpenMapping) and top.key is None

    def _store(self, value: Plain, line: int) -> KeyPath:
        """Put ``value`` where the innermost open collection expects it and return its path."""
        top = self._stack[-1] if self._stack else None
        path: KeyPath = ()
        if isinstance(top, _OpenList):
            path = (*top.path, len(top.value))
            top.value.append(value)
        elif top is not None and top.key is not None:
            path = (*top.path, top.key)
            top.value[top.key] = value
            # A value may stand lines below its key; the key is what a reader looks for.
            line = top.key_lines[top.key]
            top.key = None
        else:
            self.root = value
        self.lines[path] = line
        return path

    def _resolve(self, text: str, line: int) -> Plain:
        if text in _NULL:
            return None
        if text in _BOOLEANS:
            return _BOOLEANS[text]
        if _AMBIGUOUS.fullmatch(text):
            self._fail(
                line,
                f"{quoted(text)} is a different number, or text, depending on the YAML version; write plain decimal digits, "
                "or quote it if it is text",
            )
        is_int = _INT.fullmatch(text) is not None
        if not is_int and not _FLOAT.fullmatch(text):
            not_finite = _NOT_FINITE.fullmatch(text)
            return float(not_finite[1] + not_finite[2]) if not_finite else text
        if len(text) > _MAX_NUMBER_CHARS:
            self._fail(line, f"a number of {len(text)} characters; at most {_MAX_NUMBER_CHARS} are read")
        return int(text) if is_int else float(text)

    def _fail(self, line: int, problem: str) -> NoReturn:
        place = self._source if self._flow_only else f"{self._source}:{line}"
        raise ConfigError(f"{place}: {problem}")
