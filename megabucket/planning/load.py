"""``load_run``: from a file, a preset or a model, and ``section.field=value`` arguments, to a validated config or one error.

Owns the order of the steps (read, override, validate), the syntax of an override, and the text of what is wrong. Reads no
environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from pydantic import ValidationError

from megabucket.config.ddp import Section
from megabucket.errors import ConfigError, printable, quoted
from megabucket.planning.documents import Document, KeyPath, Plain, find_file, parse_yaml, read_yaml
from megabucket.planning.model_config import model_section

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Config = TypeVar("Config", bound=Section)

MAX_KEY_PARTS: Final = 20
"""Dots in the key of an override, plus one: no config is deeper."""

MAX_PROBLEMS: Final = 20
"""Problems shown in one error; the rest is counted."""

_KEY_PART: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PROBLEM_CHARS: Final = 500
_VALUE_CHARS: Final = 60
_YAML_1_1_BOOLEANS: Final = frozenset({"yes", "no", "on", "off", "y", "n"})
# What pydantic says about these is about Python, not about the file.
_MESSAGES: Final = {
    "missing": "is required",
    "union_tag_not_found": "kind is required; it says which sort of model this is",
    "model_type": "should be a section with keys",
    "model_attributes_type": "should be a section with keys",
    "dict_type": "should be a mapping of keys and values",
    "tuple_type": "should be a list",
}


def load_run(source: Path | str | None, overrides: Sequence[str], schema: type[Config]) -> Config:
    """Return what a user names as a run, with ``key=value`` overrides applied, validated.

    Args:
        source: a YAML file; the name of a preset (``gpt2-124m``); a Hugging Face ``config.json`` or ``module:function``, which
            give the model alone; ``None``: the overrides say everything.
        overrides: for example ``ddp.bucket_size=40M``; a later one wins over an earlier one, all win over the source.
        schema: ``RunConfig``, or a subclass that gives ``program`` a type.

    Raises:
        ConfigError: anything wrong with the source, an override or a value. The text lists at most 20 problems, each with
            its dotted path and the line or the argument it comes from; ``problems`` holds them one by one.
    """
    document = _open(source)
    if document.data is not None and not isinstance(document.data, dict):
        raise ConfigError(f"{document.source}:{document.lines[()]}: a config is a mapping with keys such as 'ddp:'")
    parsed = [parse_override(text) for text in overrides]
    data = apply_overrides(document.data or {}, parsed)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise explain_validation_error(error, data=data, document=document, overrides=parsed) from None


def _open(source: Path | str | None) -> Document:
    if source is None:
        return Document({}, {}, "command line")
    if model := model_section(str(source)):
        return Document({"model": model}, {}, str(source))
    return read_yaml(find_file(source, kind="models"))


@dataclass(frozen=True, slots=True)
class Override:
    """One ``key=value`` argument, taken apart."""

    path: tuple[str, ...]
    value: Plain
    text: str
    """The argument as it was given."""


def parse_override(text: str) -> Override:
    """Take one ``key=value`` argument apart.

    The key is a dotted path. The value is a YAML scalar, ``[...]`` or ``{...}``; nothing after the ``=`` means null.

    Raises:
        ConfigError: no ``=``, a key that is not a dotted path of names, or a value that is not YAML.

    >>> parse_override("optimizer.betas=[0.9,0.95]").value
    [0.9, 0.95]
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{quoted(text)} is not key=value; write for example ddp.bucket_size=40M")
    path = tuple(key.strip().split("."))
    if len(path) > MAX_KEY_PARTS or not all(_KEY_PART.fullmatch(part) for part in path):
        raise ConfigError(f"{quoted(text)}: the key must be names joined by dots, for example ddp.bucket_size=40M")
    document = parse_yaml(value, source=f"command line, {quoted(text)}", flow_only=True)
    return Override(path, document.data, text)


def apply_overrides(data: Mapping[str, Plain], overrides: Iterable[Override]) -> dict[str, Plain]:
    """Return ``data`` with each override in place; a later one wins over an earlier one. ``data`` is not changed.

    Sections on the way that are missing or null are made.

    Raises:
        ConfigError: an override reaches into something that is not a section.

    >>> apply_overrides({"ddp": {"num_buckets": 4}}, [parse_override("ddp.bucket_size=40M")])
    {'ddp': {'num_buckets': 4, 'bucket_size': '40M'}}
    """
    result = dict(data)
    for override in overrides:
        section = result
        for depth, part in enumerate(override.path[:-1], start=1):
            inner = section.get(part)
            if inner is not None and not isinstance(inner, dict):
                raise ConfigError(
                    f"{quoted(override.text)}: {'.'.join(override.path[:depth])} is {_kind(inner)}, not a section, so "
                    "nothing inside it can be set; override it as a whole"
                )
            # A copy on the way down keeps the caller's nested values unchanged.
            section[part] = inner = dict(inner or {})
            section = inner
        section[override.path[-1]] = override.value
    return result


def explain_validation_error(
    error: ValidationError, *, data: Plain, document: Document, overrides: Iterable[Override] = ()
) -> ConfigError:
    """Return what pydantic found as one ``ConfigError`` with paths and places.

    Args:
        data: the values that were validated.
        document: the file they come from.
        overrides: the arguments that were applied to them.
    """
    arguments: dict[KeyPath, str] = {override.path: override.text for override in overrides}
    problems = []
    for detail in error.errors(include_url=False)[:MAX_PROBLEMS]:
        path = _path_in_data(detail["loc"], data)
        dotted = ".".join(str(part) for part in path)
        text = f"{dotted}: {_message(detail)}" if dotted else _message(detail)
        problems.append(printable(f"{_place(path, document, arguments)}: {text}", _PROBLEM_CHARS))
    hidden = error.error_count() - len(problems)
    if hidden > 0:
        problems.append(f"and {hidden} more problems")
    if len(problems) == 1:
        return ConfigError(problems[0], problems=problems)
    count = error.error_count()
    return ConfigError("\n  ".join([f"{document.source}: {count} problems", *problems]), problems=problems)


def _kind(value: Plain) -> str:
    return "a list" if isinstance(value, list) else f"the value {quoted(str(value))}"


def _path_in_data(loc: tuple[int | str, ...], data: Plain) -> KeyPath:
    """Return where pydantic's location lies in the data: right inside a tagged union stands the tag, which is no key."""
    path: list[int | str] = []
    value, may_be_tag = data, False
    for number, part in enumerate(loc, start=1):
        if may_be_tag and isinstance(value, dict):
            # A key that is missing ends a location, so one that goes on names a kind that was left to a default.
            is_implied_kind = part not in value and number < len(loc)
            if part == value.get("kind") or is_implied_kind:
                may_be_tag = False
                continue
        path.append(part)
        if isinstance(value, dict) and isinstance(part, str):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            value = None
        may_be_tag = True
    return tuple(path)


def _place(path: KeyPath, document: Document, arguments: Mapping[KeyPath, str]) -> str:
    """Return the argument or the line of the innermost enclosing value that has one."""
    for length in range(len(path), -1, -1):
        outer = path[:length]
        if outer in arguments:
            return f"command line, {quoted(arguments[outer])}"
        if outer in document.lines:
            return f"{document.source}:{document.lines[outer]}"
    return document.source


def _message(detail: ErrorDetails) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "union_tag_invalid":
        context = detail.get("ctx", {})
        return f"kind should be one of {context['expected_tags']} (got {printable(repr(context['tag']), _VALUE_CHARS)})"
    message = _MESSAGES.get(kind, detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if kind in {"value_error", "missing", "unknown_key", "union_tag_not_found"}:
        return message
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _YAML_1_1_BOOLEANS:
        message = "should be true or false"
    return f"{message} (got {printable(repr(value), _VALUE_CHARS)})"
