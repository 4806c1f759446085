"""SIGTERM and SIGINT as a wish: the first one is noted, the second one does what it did before. Knows no ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

CAUGHT: Final = (signal.SIGTERM, signal.SIGINT)

SAME_REQUEST_S: Final = 1.0
"""A signal this soon after the first one is the same request: a service manager signals every process of a job, and torchrun
passes on to its ranks what it gets itself."""


class StopSignals:
    """What this process was told, while ``caught()``.

    Args:
        on_request: called by the signal handler, once.
        now_s: a monotonic clock.
    """

    def __init__(self, on_request: Callable[[], None], *, now_s: Callable[[], float] = time.monotonic) -> None:
        self.first: signal.Signals | None = None
        """The signal that came first."""
        self._on_request, self._now_s = on_request, now_s
        self._first_s = 0.0
        self._before: dict[int, Any] = {}

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Note the first signal, instead of what it does otherwise. Signals that are ignored stay ignored."""
        if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
            yield
            return
        # None: a handler that was not set by Python, which could not be put back.
        self._before = {
            number: before for number in CAUGHT if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None)
        }
        for number in self._before:
            signal.signal(number, self._take)
        try:
            yield
        finally:
            for number, before in self._before.items():
                signal.signal(number, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_s = signal.Signals(number), self._now_s()
            self._on_request()
        elif self._now_s() - self._first_s >= SAME_REQUEST_S:
            before = self._before[number]
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, before)
                os.kill(os.getpid(), number)
