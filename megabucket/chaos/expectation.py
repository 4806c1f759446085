"""What a fault must lead to: the promise, as data beside the kind that makes it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Outcome(enum.Enum):
    """How the step of the fault must end."""

    RIGHT = "right"  # no error anywhere, gradients and weights as the oracle's
    SKIPPED = "skipped"  # no error anywhere, no weight changed on any rank
    NAMED = "named"  # an error on every live rank


class Recovery(enum.Enum):
    """What a careful user does after the error, before the next step."""

    NOTHING = "nothing"
    FIX = "what the error text says, for this fault: undo the change, or rebuild"
    RELOAD = "load the last good weights on every rank"
    OVER = "nothing can go on: the group is gone"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must be seen on the ranks.

    Attributes:
        errors: names of the classes that every live rank may raise; all of them must raise the same one.
        fields: attributes of the error; a value, or a tuple of which one must be equal when wrapped in ``AnyOf``.
        texts: what the text must contain.
        own_error: what the rank at fault may show instead, for instance its own exception.
        later_by: how many steps after the fault the error comes; 0 for the same step.
        culprit_later_by: the same for the rank at fault where that is another; all meet after it, as after a checkpoint.
        at_wrap: the error comes out of the wrapper's constructor.
        same_text: all ranks must show the same text.
        is_agreed: the error was agreed on across ranks, so ``ddp.last_error`` must be the same; not where a call is refused.
        lost: ranks that are gone and need not report.
        within_s: longest time from the fault to the last rank's report.
        child_error: class that a forked child must report.
        signal_within_s: longest time from a signal to its Python handler.
        warning: what some rank's warnings must contain.
    """

    outcome: Outcome
    errors: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    own_error: tuple[str, ...] = ()
    later_by: int = 0
    culprit_later_by: int | None = None
    at_wrap: bool = False
    same_text: bool = True
    is_agreed: bool = True
    lost: tuple[int, ...] = ()
    within_s: float = 3.0
    recovery: Recovery = Recovery.NOTHING
    child_error: str = ""
    signal_within_s: float = 0.0
    warning: str = ""

    def steps_late(self, *, is_culprit: bool) -> int:
        """Return how many steps after the fault a rank has its error."""
        return self.later_by if self.culprit_later_by is None or not is_culprit else self.culprit_later_by


RIGHT = Expectation(Outcome.RIGHT)
SKIPPED = Expectation(Outcome.SKIPPED)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of several values of a field."""

    values: tuple[Any, ...]


def named(error: str | tuple[str, ...], **details: Any) -> Expectation:
    """Return the expectation of an error on every live rank; see ``Expectation`` for the details."""
    return Expectation(Outcome.NAMED, errors=(error,) if isinstance(error, str) else error, **details)
