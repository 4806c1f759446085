"""JSON of a file that may be damaged or hostile: limits first, no duplicate keys, nothing that JSON does not know. No torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megabucket.checkpoint.pieces import Json

MAX_DEPTH = 20
MAX_MARKS = 2_000_000
"""Limit for ``,``, ``[`` and ``{`` together. Each can cost some 100 bytes once parsed, so this bounds the memory."""


def parse_strict(raw: bytes, *, allow_negative: bool) -> Any:
    """Return the value of a JSON text.

    Args:
        allow_negative: take negative integers; where sizes are meant, ``-0`` is one that other readers refuse.

    Raises:
        ValueError: not UTF-8, not JSON, too much of it, a key twice, a number that is not finite, half a surrogate pair.
    """
    marks = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if marks > MAX_MARKS:
        raise ValueError(f"more than {MAX_MARKS} entries")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=int if allow_negative else _natural,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check(value)
    return value


def check_json(value: Json, *, what: str) -> None:
    """Raise ``ValueError`` unless JSON can hold ``value`` and give it back: string keys, finite numbers, plain types."""
    try:
        _check(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r:.100} is there twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value


def _natural(text: str) -> int:
    if text.startswith("-"):
        raise ValueError(f"{text:.40} where no negative number can be")
    return int(text)


def _check(root: object) -> None:
    # A list to work off instead of recursion: depth is one of the things to check. Only containers go on it.
    todo: list[tuple[Sequence[object] | Mapping[object, object], int]] = []
    _check_one(root, 1, todo)
    while todo:
        container, depth = todo.pop()
        if isinstance(container, Mapping):
            for key in container:
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r:.100} is {type(key).__name__}, and JSON has strings only")  # noqa: TRY004
                _check_text(key)
        for item in container.values() if isinstance(container, Mapping) else container:
            _check_one(item, depth + 1, todo)


def _check_one(value: object, depth: int, todo: list[tuple[Sequence[object] | Mapping[object, object], int]]) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number that JSON has")
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        todo.append((value, depth))
    elif value is not None and not isinstance(value, bool | int):
        raise ValueError(f"{type(value).__name__} is nothing that JSON has")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{text!r:.100} holds half a surrogate pair") from None
