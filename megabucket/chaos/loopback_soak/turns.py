"""Runs the ranks of a world in threads of which one runs at a time, and switches where a rank waits or pauses.

Which rank comes next is drawn from the seed, so an episode that went wrong goes wrong again when it is replayed. Ranks that all
wait for collectives that nobody will launch are noticed at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from megabucket.comm import Communicator, Handle
from megabucket.comm import Call
from megabucket.testing import LoopbackWorld

_Result = TypeVar("_Result")


class Turns:
    """Whose turn it is among the ranks of one world."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self._chance = random.Random(f"turns {seed}")  # noqa: S311 - no secret
        self._gates = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waits_for: list[Callable[[], bool] | None] = [None] * num_ranks
        self._running: set[int] = set()
        self.num_launched = [0] * num_ranks
        """Collectives by rank."""

    def run(self, function: Callable[[int], _Result]) -> list[_Result]:
        """Call ``function(rank)`` in a thread for each rank; return the results, or raise the first error."""
        results: dict[int, _Result] = {}
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            self._gates[rank].acquire()
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
            self._running.discard(rank)
            if self._running:
                self._gates[self._pick()].release()

        ranks = range(len(self._gates))
        threads = [threading.Thread(target=target, args=(rank,), name=f"loopback-rank-{rank}") for rank in ranks]
        self._running = set(ranks)
        for thread in threads:
            thread.start()
        self._gates[self._pick()].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in ranks]

    def pause(self, rank: int) -> None:
        """Let another rank run, perhaps."""
        chosen = self._pick()
        if chosen != rank:
            self._gates[chosen].release()
            self._gates[rank].acquire()

    def wait(self, rank: int, is_over: Callable[[], bool]) -> None:
        """Let others run until ``is_over``, or until no rank can go on."""
        if not is_over():
            self._waits_for[rank] = is_over
            self.pause(rank)
            self._waits_for[rank] = None

    def _pick(self) -> int:
        """Return a rank that can go on; one that cannot if there is none."""
        running = sorted(self._running)
        waits = self._waits_for
        ready = [rank for rank in running if (waits_for := waits[rank]) is None or waits_for()]
        return self._chance.choice(ready or running)


class TurnsCommunicator(Communicator):
    """The loopback communicator of one rank, which lets others run while it waits."""

    def __init__(self, world: LoopbackWorld, rank: int, turns: Turns) -> None:
        super().__init__(rank=rank, size=world.size)
        self._inner = world.communicator(rank)
        self._turns = turns

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        handle = self._inner.launch(calls, label=label)
        sequence = self._turns.num_launched[self.rank]
        self._turns.num_launched[self.rank] += 1
        return _TurnsHandle(handle, self._turns, self.rank, sequence)


class _TurnsHandle(Handle):
    def __init__(self, inner: Handle, turns: Turns, rank: int, sequence: int) -> None:
        self._inner, self._turns, self._rank, self._sequence = inner, turns, rank, sequence

    def wait(self) -> None:
        self._turns.wait(self._rank, lambda: min(self._turns.num_launched) > self._sequence)
        self._inner.wait()  # raises CollectiveDeadlockError where some rank has not launched it and never will
