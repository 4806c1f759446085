"""A wait that must be waited to its end: other ranks go on behind it, with collectives that need this rank, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def insist(wait: Callable[[], _Result]) -> tuple[_Result, BaseException | None]:
    """Call ``wait``, and once more when something interrupts it; return what came out and what has interrupted it.

    An exception of a signal handler (an alarm) comes once, so the second wait goes on where the first was. What is wrong with
    the wait itself, a lost rank say, is wrong the second time, too, and raised. So is a second interrupt, and at once what ends
    the program (``KeyboardInterrupt``, ``SystemExit``): who presses Ctrl-C does not wait for a rank that may never come.

    >>> insist(lambda: 1)
    (1, None)
    """
    try:
        return wait(), None
    except Exception as interrupt:
        return wait(), interrupt
