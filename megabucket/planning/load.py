"""``load_run``: from a file, a preset or a model, and ``section.field=value`` arguments, to a validated config or one error.

Owns the order of the steps (read, override, validate), the syntax of an override, and the text of errors. Reads no
environment variables.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import ValidationError

from megabucket.config.ddp import Section
from megabucket.errors import ConfigError, printable, quoted
from megabucket.planning.documents import MAX_BYTES, Document, KeyPath, find_file, parse_yaml, read_json, read_yaml
from megabucket.planning.model_config import model_section

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Config = TypeVar("Config", bound=Section)

MAX_PROBLEMS: Final = 20
"""Problems shown in one error; the rest is counted."""

_KEY: Final = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)
_PROBLEM_CHARS: Final = 500
_VALUE_CHARS: Final = 60
# What pydantic says about these is about Python, not about the file.
_MESSAGES: Final = {
    "missing": "is required",
    "missing_argument": "is required",  # older pydantics say so of named tuples
    "union_tag_not_found": "kind is required; it says which sort this is",
    "model_type": "should be a section with keys",
    "dict_type": "should be a section with keys",
    "model_attributes_type": "should be a section with keys",
    "named_tuple_type": "should be a section with keys",
    "arguments_type": "should be a section with keys",
    "tuple_type": "should be a list",
    "extra_forbidden": "is not a known key",
    "unexpected_keyword_argument": "is not a known key",
}


def load_run(source: Path | str | None, overrides: Sequence[str], schema: type[Config]) -> Config:
    """Return a validated run, with ``key=value`` overrides applied.

    Args:
        source: a YAML file, or the same as JSON; the name of a preset (``gpt2-124m``); a Hugging Face ``config.json`` or
            ``module:function``, which give the model alone; ``None``: the overrides say everything.
        overrides: for example ``ddp.bucket_size=40M``; a later one wins over an earlier one, all win over the source.
        schema: ``RunConfig``, or a subclass that gives ``program`` a type.

    Raises:
        ConfigError: anything wrong with the source, an override or a value. The text lists at most 20 problems, each with
            its dotted path and the line or the argument it comes from; ``problems`` holds them one by one.
    """
    document = _open(source, schema)
    data = copy.deepcopy(document.data) if document.data is not None else {}
    if not isinstance(data, dict):
        raise ConfigError(f"{document.place(())}: a config is a mapping with keys such as 'ddp:'")
    arguments: dict[KeyPath, str] = {}
    for text in overrides:
        key, value = parse_override(text)
        _set(data, key, value, text)
        arguments[key] = text
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise explain_validation_error(error, data=data, document=document, arguments=arguments) from None


def _open(source: Path | str | None, schema: type[Section]) -> Document:
    if source is None:
        return Document({}, "command line")
    if not _has_sections(Path(source), schema) and (model := model_section(str(source))):
        return Document({"model": model}, str(source))
    return read_yaml(find_file(source, kind="models"))  # JSON is YAML as well


def _has_sections(path: Path, schema: type[Section]) -> bool:
    """Return whether a file is JSON with sections of ours, not a model's ``config.json``."""
    try:
        data = read_json(path, max_bytes=MAX_BYTES, what="a config") if path.suffix == ".json" else None
    except ConfigError:  # which is raised again where the model is read
        return False
    return isinstance(data, dict) and "model_type" not in data and not data.keys().isdisjoint(schema.model_fields)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Return the path and the value of one ``key=value`` argument. The value is YAML; nothing after the ``=`` means null.

    Raises:
        ConfigError: no ``=``, a key that is not a dotted path of names, or a value that is not YAML.

    >>> parse_override("optimizer.betas=[0.9,0.95]")
    (('optimizer', 'betas'), [0.9, 0.95])
    """
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"{quoted(text)} is not key=value with names joined by dots; write for example ddp.bucket_size=40M")
    return tuple(key.split(".")), parse_yaml(value, source=f"command line, {quoted(text)}")


def _set(data: dict[str, Any], path: Sequence[str], value: Any, text: str) -> None:
    """Put a value in its place; sections on the way that are missing or null are made."""
    for depth, part in enumerate(path[:-1], start=1):
        if data.get(part) is None:
            data[part] = {}
        data = data[part]
        if not isinstance(data, dict):
            raise ConfigError(
                f"{quoted(text)}: {'.'.join(path[:depth])} is {quoted(str(data))}, not a section, so nothing inside it can be "
                "set; override it as a whole"
            )
    data[path[-1]] = value


def explain_validation_error(
    error: ValidationError, *, data: Any, document: Document, arguments: Mapping[KeyPath, str] | None = None
) -> ConfigError:
    """Return what pydantic found as one ``ConfigError`` with paths and places.

    Args:
        data: the values that were validated.
        document: the file they come from.
        arguments: the overrides that were applied to them, by path.
    """
    problems = []
    for detail in error.errors(include_url=False)[:MAX_PROBLEMS]:
        path = _path_in_data(detail["loc"], data)
        argument = _argument_for(path, arguments or {}, document.data)
        place = document.place(path) if argument is None else f"command line, {quoted(argument)}"
        dotted = ".".join(str(part) for part in path)
        text = f"{dotted}: {_message(detail)}" if dotted else _message(detail)
        problems.append(printable(f"{place}: {text}", _PROBLEM_CHARS))
    count = error.error_count()
    if count == 1:
        return ConfigError(problems[0], problems=problems)
    if count > MAX_PROBLEMS:
        problems.append(f"and {count - MAX_PROBLEMS} more problems")
    return ConfigError("\n  ".join([f"{document.source}: {count} problems", *problems]), problems=problems)


def _argument_for(path: KeyPath, arguments: Mapping[KeyPath, str], data: Any) -> str | None:
    """Return the override that a problem comes from, or ``None`` if it comes from the file.

    It is the one that set the innermost value on the path. Where the file's own values end, it may also be one that made the
    section, or that chose its ``kind``.

    Args:
        data: the values of the file.
    """
    depth = 0  # of the path, as far as it is in the file
    while depth < len(path):
        try:
            data = data[path[depth]]
        except (TypeError, LookupError):
            break
        depth += 1
    for length in range(len(path), 0, -1):
        outer = path[:length]
        found = [
            text
            for key, text in arguments.items()
            if key == outer or (length > depth and key[:length] == outer) or (length >= depth and key == (*outer, "kind"))
        ]
        if found:
            return found[-1]
    return None


def _path_in_data(loc: KeyPath, data: Any) -> KeyPath:
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
        try:
            value = value[part]
        except (TypeError, LookupError):
            value = None
        may_be_tag = True
    return tuple(path)


def _message(detail: ErrorDetails) -> str:
    message = _MESSAGES.get(detail["type"], detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    kind = detail["type"]
    if kind.startswith("union_tag_") or kind in {"value_error", "missing", "unknown_key", "extra_forbidden"}:
        return message
    return f"{message} (got {printable(repr(detail['input']), _VALUE_CHARS)})"
