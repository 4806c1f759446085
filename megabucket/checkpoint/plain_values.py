"""Plain Python values as JSON and back, exactly: what state dicts of schedulers, scalers and users hold beside tensors.

JSON has no tuples, no keys but text, no nan; each of them becomes an object with one key that begins with ``!``. Tensors are
handed to the caller, by name, and only named in the JSON. Values of other kinds are refused: to read them back would mean to
run code that a file names.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.pieces import Json
from megabucket.errors import ConfigError

_PLAIN_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_MAX_SAFE_INT: Final = 1 << 53
_MAX_LEVELS: Final = 4
"""Readers bound the depth of a manifest; what is deeper than this becomes text."""

Keep = Callable[[str, torch.Tensor], None]
"""Receives a tensor and its name."""


def encode(value: Any, name: str, keep: Keep, *, level: int = 0) -> Json:
    """Return JSON from which ``decode`` makes an equal value.

    Args:
        name: of the value; tensors in it are named after it and their place.
        keep: called with every tensor of more than one element.

    Raises:
        ConfigError: something in it is no plain value; the text says what and where.

    >>> encode({"a": (1, float("inf"))}, "x", lambda *_: None)
    {'a': {'!tuple': [1, {'!float': 'inf'}]}}
    """
    encoded: Json
    if value is None or isinstance(value, bool | str):
        encoded = value
    elif type(value) is int:
        encoded = value if abs(value) <= _MAX_SAFE_INT else {"!int": str(value)}
    elif isinstance(value, float):
        encoded = float(value) if math.isfinite(value) else {"!float": str(float(value))}
    elif isinstance(value, bytes):
        encoded = {"!bytes": value.hex()}
    elif isinstance(value, torch.Tensor):
        encoded = _encode_tensor(value, name, keep)
    elif isinstance(value, Mapping | list | tuple):
        is_deep = level >= _MAX_LEVELS
        encoded = _encode_items(value, name, keep, level=-1_000_000 if is_deep else level)
        encoded = {"!json": json.dumps(encoded)} if is_deep else encoded
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigError(
            f"{name} cannot be saved in a checkpoint: it is a {kind}. A checkpoint holds numbers, text, bytes, None, tensors, "
            "and lists, tuples and dicts of them: nothing that would run code when it is read."
        )
    return encoded


def _encode_items(value: Any, name: str, keep: Keep, *, level: int) -> Json:
    if isinstance(value, Mapping):
        if type(value) not in _PLAIN_DICTS:
            raise ConfigError(f"{name} cannot be saved in a checkpoint: it is a {type(value).__name__}; make a dict of it")
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {key: encode(item, f"{name}.{key}", keep, level=level + 1) for key, item in value.items()}
        return {
            "!dict": [
                [encode(key, name, keep, level=level + 2), encode(item, f"{name}.{key}", keep, level=level + 2)]
                for key, item in value.items()
            ]
        }
    items = [encode(item, f"{name}.{index}", keep, level=level + 1) for index, item in enumerate(value)]
    return items if isinstance(value, list) else {"!tuple": items}


def _encode_tensor(value: torch.Tensor, name: str, keep: Keep) -> Json:
    if value.numel() == 1 and not value.is_complex():
        number = encode(value.item(), name, keep)
        return {"!number": [dtype_name(value.dtype), list(value.shape), number]}
    keep(name, value.detach())
    return {"!tensor": name}


def decode(value: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that ``encode`` was given; subclasses of ``dict`` become dicts.

    Args:
        tensors: what ``encode`` gave away, by name.

    Raises:
        KeyError: a tensor is not there.
        ValueError: the JSON is not of ``encode``.
    """
    if isinstance(value, str) or not isinstance(value, Mapping | list):
        return value
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("!"):
        return _decode_tagged(tag, value[tag], tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    readers: dict[str, Callable[[Any], Any]] = {
        "!int": int,
        "!float": float,
        "!bytes": bytes.fromhex,
        "!tuple": lambda items: tuple(decode(item, tensors) for item in items),
        "!dict": lambda items: {decode(key, tensors): decode(item, tensors) for key, item in items},
        "!number": lambda parts: torch.full(parts[1], decode(parts[2], tensors), dtype=dtype_named(parts[0])),
        "!tensor": lambda name: tensors[name],
        "!json": lambda text: decode(json.loads(text), tensors),
    }
    if tag not in readers:
        raise ValueError(f"unknown kind of value {tag!r}")
    return readers[tag](content)


def tensor_names(value: Json) -> list[str]:
    """Return the names of the tensors that ``decode`` will ask for.

    Raises:
        ValueError: the JSON is not of ``encode``.
    """
    if isinstance(value, str) or not isinstance(value, Mapping | list):
        return []
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if set(value) == {"!tensor"}:
        return [str(value["!tensor"])]
    if set(value) == {"!json"}:
        return tensor_names(json.loads(str(value["!json"])))
    return [name for item in value.values() for name in tensor_names(item)]
