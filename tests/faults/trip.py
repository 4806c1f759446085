"""Places in a step and what can happen there: wires that are tripped once, and actions.

A place is a word: ``forward``, ``backward-k`` (in backward, before bucket k is complete), ``hook-k`` (a hook on a gradient of
bucket k), ``posthook-k`` (a post-accumulate hook there), ``between`` (after backward, before the optimizer), ``optimizer``
(inside its step, before anything is updated), ``fence``, ``gather`` and ``gradient-gather`` (when megabucket launches that
collective). Where weights have owners: ``to-owners`` and ``return`` (those collectives), ``owner`` (behind the update of the
first matrix of this rank), ``muon-before``, ``muon-after``, ``adamw-before``, ``adamw-after`` (hooks around the step of one of
the two optimizers).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megabucket import DistributedOptimizer

from .cells import FaultError, Form, Here
from .model import layer_of_bucket
from .systems import Scaled

Action = Callable[[Here], None]

_FORWARD_LAYER = "2"
_LABELS = {
    "fence": "fence",
    "gather": "param gather",
    "gradient": "gradient gather",
    "to": "gradients to owners",
    "return": "values to shards",
}
_GIVEN = {"muon": 0, "adamw": 1}


def install(here: Here, place: str, action: Action) -> None:
    """Let ``action`` happen once at ``place``."""
    armed = [action]

    def trip() -> None:
        if armed:
            armed.pop()(here)

    kind, _, bucket = place.partition("-")
    if kind in ("before", "between"):
        here.points[place] = trip
    elif kind in _LABELS:
        here.on_collective[_LABELS[kind]] = trip
    elif kind == "optimizer":
        last = here.optimizer.optimizers[-1] if here.cell.combo.form is Form.CHAINED else here.optimizer
        # Hooks of the given optimizer run inside the update, when all ranks have agreed on it.
        is_ours = isinstance(last, DistributedOptimizer | Scaled)
        given = last.torch_optimizers[0] if is_ours else last
        _hold(here, given.register_step_pre_hook(lambda *_: trip()))
    elif kind == "owner" or kind in _GIVEN:
        _install_in_update(here, kind, bucket, trip)
    elif kind == "forward":
        _hold(here, here.model.layers[_FORWARD_LAYER].register_forward_pre_hook(lambda *_: trip()))
    else:
        name = f"layers.{layer_of_bucket(int(bucket))}"
        if kind == "posthook":
            _hold(here, here.model.get_parameter(f"{name}.weight").register_post_accumulate_grad_hook(lambda _: trip()))
        elif kind == "hook":
            _hold(here, here.model.get_parameter(f"{name}.weight").register_hook(lambda _: trip()))
        else:
            _hold(here, here.model.get_submodule(name).register_forward_hook(lambda _, __, out: _tripping(out, trip)))


def _install_in_update(here: Here, kind: str, when: str, trip: Callable[[], None]) -> None:
    """Trip behind the update of a matrix, or in a hook of one of the optimizers."""
    last = here.optimizer.optimizers[-1] if here.cell.combo.form is Form.CHAINED else here.optimizer
    if kind == "owner":
        muon = last.torch_optimizers[0]
        here.step_stack.callback(setattr, muon, "on_update", muon.on_update)
        muon.on_update = lambda _: trip()
        return
    given = last.torch_optimizers[_GIVEN[kind]]
    register = given.register_step_pre_hook if when == "before" else given.register_step_post_hook
    _hold(here, register(lambda *_: trip()))


def _hold(here: Here, handle: Any) -> None:
    here.step_stack.callback(handle.remove)


def _tripping(value: torch.Tensor, trip: Callable[[], None]) -> Any:
    return _TripInBackward.apply(value, trip)  # type: ignore[no-untyped-call]


class _TripInBackward(torch.autograd.Function):
    """Passes values and gradients on, and calls something on the way back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, trip: Callable[[], None]) -> torch.Tensor:
        ctx.trip = trip
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.trip()
        return grads[0], None


def boom(here: Here) -> NoReturn:
    """Raise the exception that stands for all exceptions."""
    here.announce()
    raise FaultError


def die_by(number: signal.Signals) -> Action:
    """Return an action that ends the process by a signal."""

    def act(here: Here) -> None:
        here.announce()
        os.kill(os.getpid(), number)

    return act


def abort(here: Here) -> None:
    """End the process as a failed C++ assertion would."""
    here.announce()
    os.abort()


def leave(here: Here) -> None:
    """End the process without a word."""
    here.announce()
    os._exit(3)


def freeze(here: Here) -> None:
    """Stop the process for good."""
    here.announce()
    os.kill(os.getpid(), signal.SIGSTOP)


def freeze_for(seconds: float) -> Action:
    """Return an action that stops the process and has it continued."""

    def act(here: Here) -> None:
        here.send("ask", signal=int(signal.SIGCONT), to=here.rank, after_s=seconds)
        here.announce()
        os.kill(os.getpid(), signal.SIGSTOP)

    return act


def sleep_for(seconds: float) -> Action:
    """Return an action that sleeps as Python does: other threads run, signals are handled."""

    def act(here: Here) -> None:
        here.announce()
        time.sleep(seconds)

    return act


def hold_lock_for(seconds: float) -> Action:
    """Return an action that sleeps with Python's lock held, so that no other thread of the process runs."""

    def act(here: Here) -> None:
        here.announce()
        ctypes.PyDLL(None).usleep(round(seconds * 1e6))  # PyDLL, unlike CDLL, keeps the lock during the call

    return act
