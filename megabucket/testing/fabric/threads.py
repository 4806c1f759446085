"""Priority of the thread that stands for a network card, which needs no turn on a core.

Best effort: real-time scheduling and a lower niceness are privileges. Gloo's threads are left alone: its TCP loop tries locks
again and again instead of waiting, so with a priority it keeps their owner from running (measured: ten times the time).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from typing import Final

_NICE: Final = -10
_PR_SET_TIMERSLACK: Final = 29


def hurry_this_thread() -> None:
    """Let the calling thread run as soon as it wakes up, and wake up when it wants to. It must sleep nearly all of the time."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds; the default is 50 microseconds
    thread = threading.get_native_id()
    try:
        # The lowest real-time priority: before everything that computes, also where the system shares cores among sessions.
        os.sched_setscheduler(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
