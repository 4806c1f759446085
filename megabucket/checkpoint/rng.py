"""The state of random number generators as bytes: torch's (of the CPU and of this rank's GPU), Python's and numpy's.

Each rank has its own, so they are read back only by as many ranks as have written them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

PREFIX: Final = "rng."


def capture_rng(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of each generator as bytes, by what it is of.

    Args:
        device: where the parameters are.
    """
    found = {"torch": torch.get_rng_state(), "python": _text(random.getstate()), "numpy": _text(_numpy_state())}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def check_rng(states: Mapping[str, torch.Tensor], device: torch.device) -> list[str]:
    """Return what is wrong with states that were read: they are set, and set back, so nothing changes."""
    before, problems = capture_rng(device), []
    try:
        restore_rng(states, device)
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, OverflowError) as error:
        problems.append(f"the state of the random number generators cannot be used: {error}")
    restore_rng(before, device)
    return problems


def restore_rng(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to states that ``capture_rng`` has returned."""
    setters: dict[str, Callable[[torch.Tensor], None]] = {
        "torch": torch.set_rng_state,
        "python": lambda state: random.setstate(_tuples(_value(state))),
        "numpy": lambda state: _set_numpy_state(_value(state)),
    }
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    for what, state in states.items():
        if what in setters:
            setters[what](state)


def _numpy_state() -> list[Any]:
    # The generator behind np.random.rand and its like; generators that a program makes itself are its own business.
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = state
    return [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)]


def _set_numpy_state(state: list[Any]) -> None:
    name, keys, position, has_gauss, cached = state
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _text(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.tolist()))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
