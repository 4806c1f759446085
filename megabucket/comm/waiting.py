"""Waiting in slices: a wait that signals can interrupt, and that looks around while it lasts.

C++ does not return to Python while it waits, so a signal handler would run only when the collective ends or times out. Gloo
lets a wait time out without harm to the collective or the group, so a wait here is many short ones.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed as dist

SLICE: Final = timedelta(milliseconds=100)

_SLICE_ENDED: Final = "Operation timed out!"
_TIME_LIMIT: Final = ("Timed out waiting", "Application timeout caused pair closure")
_LOST: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection timed out",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
)


def wait_slice(work: dist.Work) -> bool:
    """Wait for a work of gloo, up to a tenth of a second; return whether it is done.

    Raises:
        RuntimeError: the work has failed.
    """
    try:
        work.wait(SLICE)
    except RuntimeError as error:
        # Nothing is called in here: a signal handler that ran now would raise "during handling of" a time-out of ours
        # (in Python 3.10 it does all the same, now and then).
        failure = error
    else:
        return True
    try:
        if not str(failure).startswith(_SLICE_ENDED):
            raise failure
    finally:
        del failure  # it knows this frame, and so would keep the work and its tensors until garbage is collected
    if not work.is_completed():
        return False
    work.wait()  # it ended at the same moment: well, or with an error of its own
    return True


def is_lost_connection(failure: str) -> bool:
    """Whether the text of a failed work says that another rank cannot be reached or did not come."""
    return any(text in failure for text in (*_LOST, *_TIME_LIMIT))


def is_time_limit(failure: str) -> bool:
    """Whether the text of a failed work says that the time limit of the group was over."""
    return any(text in failure for text in _TIME_LIMIT)
