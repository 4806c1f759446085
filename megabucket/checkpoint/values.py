"""Plain Python values as JSON, and random numbers as bytes: the state of schedulers, scalers and users, bit by bit.

JSON has no tuples, no nan, and only text as keys; each of them becomes an object with one key that begins with ``!``. The JSON
only names tensors; the caller stores them. Other kinds of values are refused: reading them would run code named by a file.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.format import Json
from megabucket.comm import Accelerator
from megabucket.errors import ConfigError

_PLAIN_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)

UNREADABLE: Final = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError)
"""What reading the values of a checkpoint may raise if they make no sense."""

Keep = Callable[[str, torch.Tensor], None]
"""Stores a tensor under a name."""

Find = Callable[[str], torch.Tensor]
"""Returns a tensor by its name."""


def encode(value: Any, name: str, keep: Keep) -> Json:
    """Return JSON from which ``decode`` makes an equal value.

    Args:
        name: of the value; tensors in it are named after it and their place.
        keep: called with every tensor of more than one element.

    Raises:
        ConfigError: a part of it is no plain value; the text names it.

    >>> encode({"a": (1, float("inf"))}, "x", lambda *_: None)
    {'a': {'!tuple': [1, {'!float': 'inf'}]}}
    """
    encoded: Json
    if value is None or isinstance(value, bool | str) or type(value) is int:
        encoded = value
    elif isinstance(value, float):
        encoded = float(value) if math.isfinite(value) else {"!float": str(float(value))}
    elif isinstance(value, bytes):
        encoded = {"!bytes": value.hex()}
    elif isinstance(value, torch.Tensor):
        encoded = _encode_tensor(value, name, keep)
    elif isinstance(value, Mapping | list | tuple):
        encoded = _encode_items(value, name, keep)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigError(
            f"{name} cannot be saved in a checkpoint: it is a {kind}. A checkpoint holds numbers, text, bytes, None, tensors, "
            "and lists, tuples and dicts of them: nothing that would run code when it is read."
        )
    return encoded


def _encode_items(value: Any, name: str, keep: Keep) -> Json:
    if isinstance(value, Mapping):
        if type(value) not in _PLAIN_DICTS:
            raise ConfigError(f"{name} cannot be saved in a checkpoint: it is a {type(value).__name__}; make a dict of it")
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {key: encode(item, f"{name}.{key}", keep) for key, item in value.items()}
        return {"!dict": [[encode(key, name, keep), encode(item, f"{name}.{key}", keep)] for key, item in value.items()]}
    items = [encode(item, f"{name}.{index}", keep) for index, item in enumerate(value)]
    return items if isinstance(value, list) else {"!tuple": items}


def _encode_tensor(value: torch.Tensor, name: str, keep: Keep) -> Json:
    if value.numel() == 1 and not value.is_complex():
        number = encode(value.item(), name, keep)
        return {"!number": [dtype_name(value.dtype), list(value.shape), number]}
    keep(name, value.detach())
    return {"!tensor": name}


def _no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


def decode(value: Json, find: Find = _no_tensor) -> Any:
    """Return the value that ``encode`` was given; subclasses of ``dict`` become dicts.

    Args:
        find: returns the tensors that ``encode`` passed to ``keep``.

    Raises:
        LookupError: a tensor is missing, or the JSON is not of ``encode``; then also another of ``UNREADABLE``.
    """
    if isinstance(value, str) or not isinstance(value, Mapping | list):
        return value
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("!"):
        return _decode_tagged(tag, value[tag], find)
    return {key: decode(item, find) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any, find: Find) -> Any:
    readers: dict[str, Callable[[Any], Any]] = {
        "!float": float,
        "!bytes": bytes.fromhex,
        "!tuple": lambda items: tuple(decode(item, find) for item in items),
        "!dict": lambda items: {decode(key, find): decode(item, find) for key, item in items},
        # In two steps, because a shape that is wrong must not take memory.
        "!number": lambda parts: torch.full((), decode(parts[2], find), dtype=dtype_named(parts[0]), device="cpu").reshape(
            parts[1]
        ),
        "!tensor": find,
    }
    return readers[tag](content)


def capture_rng(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of each generator as bytes, by name.

    Args:
        device: of the parameters.
    """
    # numpy: the global generator, behind np.random.rand. A program saves generators that it has made itself.
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=True)}
    texts = {name: json.dumps(state, default=np.ndarray.tolist) for name, state in states.items()}
    found = {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in texts.items()}
    # Not get_rng_state(): it makes a Python object under the generator's lock, so garbage may be collected there. Holding the
    # generator lock across a GC can deadlock with a thread holding the GIL.
    found["torch"] = torch.default_generator.clone_state().get_state()
    if Accelerator.of(device) is not None:
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def restore_rng(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to states that ``capture_rng`` has returned."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "python":
            version, numbers, next_gauss = json.loads(bytes(state.tolist()))
            random.setstate((version, tuple(numbers), next_gauss))
        elif name == "numpy":
            np.random.set_state(tuple(json.loads(bytes(state.tolist()))))
        elif name == device.type:
            torch.get_device_module(device).set_rng_state(state, device)
