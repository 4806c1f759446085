"""Apply ``section.field=value`` arguments to the nested values of a config file.

Owns the syntax of one override and where it lands. Values are read by the YAML rules of ``yaml_loader``; what they may be
is decided by the sections afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from megabucket.config.text import quoted
from megabucket.config.yaml_loader import Plain, parse_yaml
from megabucket.errors import ConfigError

MAX_KEY_PARTS: Final = 20
"""Dots in a key, plus one: no config is deeper."""

_PART: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


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
    if len(path) > MAX_KEY_PARTS or not all(_PART.fullmatch(part) for part in path):
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


def _kind(value: Plain) -> str:
    return "a list" if isinstance(value, list) else f"the value {quoted(str(value))}"
