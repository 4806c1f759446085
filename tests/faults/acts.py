"""``Act``: one call of a training step, as data. The player makes the calls; the oracle reads them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

NUM_LAYERS = 4
ALL_LAYERS = tuple(range(NUM_LAYERS))


class Do(enum.Enum):
    """What an act calls."""

    NUMBER = "ddp.step_number = value"
    FORWARD = "the module"
    BACKWARD = "backward"
    GRAD = "torch.autograd.grad, which accumulates nothing"
    START = "ddp.start_grad_sync()"
    FINISH = "ddp.finish_grad_sync()"
    LOOK = "the gradients, which are compared with the oracle's"
    STEP = "optimizer.step()"
    ZERO = "clear gradients, value says how"
    ABORT = "ddp.abort_step()"
    RAISE = "an exception in the caller's code"
    RUN = "a function of the fault"


@dataclass(frozen=True, slots=True)
class Edit:
    """A gradient that a rank changes on its way into the buffer.

    ``nan`` or ``inf`` in one element, or all of it ``huge``.
    By a post-accumulate hook: ``doubled``, ``replaced`` or ``cleared``.
    """

    param: str
    what: str


@dataclass(frozen=True, slots=True)
class Act:
    """One call."""

    do: Do
    slot: int = 0
    """Under which an output is kept from forward to backward."""
    batch: int = 0
    microbatch: int = 0
    layers: tuple[int, ...] = ALL_LAYERS
    """The layers that run, in this order; one left out is not used."""
    checkpointed: tuple[int, ...] = ()
    """Layers inside reentrant activation checkpointing."""
    how: str = ""
    """Of a forward: ``inner`` (the module inside), ``eval``, ``no_grad``. Of a backward: ``keeps_graph``, ``caught``."""
    depth: int = 0
    """In how many ``no_sync()`` the call runs."""
    joins: int = -1
    """A slot whose output a backward adds to its own."""
    edits: tuple[Edit, ...] = ()
    value: Any = None


Acts = tuple[Act, ...]


def make_step(batch: int, *, num_microbatches: int = 1, is_explicit: bool = False, **forward: Any) -> Acts:
    """Return a healthy step: forward and backward by microbatch, all but the last one inside ``no_sync()``, then the update."""
    acts: list[Act] = []
    for index in range(num_microbatches):
        acts.append(Act(Do.FORWARD, slot=index, batch=batch, microbatch=index, **forward))
        acts.append(Act(Do.BACKWARD, slot=index, depth=int(index < num_microbatches - 1)))
    acts += [Act(Do.FINISH)] * is_explicit
    return (*acts, Act(Do.LOOK), Act(Do.STEP), Act(Do.ZERO, value="optimizer"))


def find(acts: Acts, do: Do, nth: int = 0) -> int:
    """Return where the nth act of a sort is; -1 is the last one.

    Raises:
        IndexError: there are not so many.
    """
    return [index for index, act in enumerate(acts) if act.do is do][nth]


def before(acts: Acts, do: Do, *new: Act, nth: int = 0) -> Acts:
    """Return the acts with others before one of them."""
    at = find(acts, do, nth)
    return (*acts[:at], *new, *acts[at:])


def after(acts: Acts, do: Do, *new: Act, nth: int = 0) -> Acts:
    """Return the acts with others behind one of them."""
    at = find(acts, do, nth) + 1
    return (*acts[:at], *new, *acts[at:])


def until(acts: Acts, do: Do, *new: Act, nth: int = 0) -> Acts:
    """Return the acts up to one of them, and others in place of it and of all that follow."""
    return (*acts[: find(acts, do, nth)], *new)


def changed(acts: Iterable[Act], do: Do, **fields: Any) -> Acts:
    """Return the acts with other fields in all of a sort."""
    return tuple(replace(act, **fields) if act.do is do else act for act in acts)


def without(acts: Iterable[Act], *dos: Do) -> Acts:
    """Return the acts without those of some sorts."""
    return tuple(act for act in acts if act.do not in dos)
