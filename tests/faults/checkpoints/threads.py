"""Ranks as threads of one process, for saves that need no collectives but ``exchange``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_TIMEOUT_S = 60.0


class ThreadRanks:
    """One of several threads that exchange bytes; made by ``in_threads``."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def exchange(self, payload: bytes, place: str) -> list[bytes]:
        """Return what each rank gave, by rank."""
        self._slots[self.rank] = payload
        self._barrier.wait(_TIMEOUT_S)
        said = list(self._slots)
        self._barrier.wait(_TIMEOUT_S)
        return said


def in_threads(size: int, act: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """Run ``act`` on ``size`` ranks, and return what each gave or raised, by rank."""
    barrier, slots = threading.Barrier(size), [b""] * size
    results: list[T | Exception] = [RuntimeError("did not end")] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(ThreadRanks(rank, slots, barrier))
        except Exception as error:  # the result of this rank
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _TIMEOUT_S)
    return results
