"""Large tensors on the emulated fabric: ranks read each other's memory, on a thread, in the order in which they launched.

A network card moves data without the cores that compute; gloo takes them for two copies and the network stack of the system.
Reading (``comm/reading_paths.py``) costs a fraction of that, and is left for when a rank waits: its core is idle then. So what
is measured is the link, and little of its emulation.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from megabucket.comm.fabric.threads import hurry_this_thread
from megabucket.comm.fabric.wires import Wires
from megabucket.comm.gloo_paths import can_exchange_among
from megabucket.comm.peer_memory import PeerMemory, get_to_know
from megabucket.comm.plan import steps
from megabucket.comm.port import Call
from megabucket.comm.reading_paths import ReadingPlan

LEAST_BYTES: Final = 1 << 18
"""Of a collective that is read. Below, gloo's messages are as cheap."""

_JOIN_S: Final = 1.0


def is_worth_reading(calls: Sequence[Call]) -> bool:
    """Whether like calls are large enough, together."""
    return sum(call.full.nbytes for call in calls) >= LEAST_BYTES


class ReadWork:
    """A collective that the thread does; like a work of gloo to those who wait.

    Args:
        want: asks the thread to begin. It may have begun, because another rank waits.
    """

    def __init__(self, want: Callable[[], None]) -> None:
        self._want = want
        self._is_done = threading.Event()
        self._failure: str | None = None

    def is_completed(self) -> bool:
        """Whether it is done or has failed; who asks wants it to be."""
        self._want()
        return self._is_done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done.

        Raises:
            RuntimeError: it failed, or ``timeout`` is over; it goes on then.
        """
        self._want()
        if not self._is_done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")  # gloo's text: who waits in slices looks for it
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True

    def end(self, failure: str | None = None) -> None:
        """Let go on who waits."""
        self._failure = failure
        self._is_done.set()


class Reader:
    """Does the large collectives of one group. Its thread starts with the first one."""

    def __init__(self, memory: PeerMemory, wires: Wires, *, rank: int, size: int) -> None:
        self._memory, self._wires = memory, wires
        self._rank, self._size = rank, size
        self._queue: queue.SimpleQueue[tuple[int, Sequence[Call], ReadWork] | None] = queue.SimpleQueue()
        self._num_started = self._num_wanted = 0
        self._wanting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, calls: Sequence[Call]) -> ReadWork:
        """Do like calls after all that was started before, when somebody on any rank waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"megabucket-reader-{self._rank}", daemon=True)
            self._thread.start()
        self._num_started += 1
        number = self._num_started
        work = ReadWork(lambda: self._want(number))
        self._queue.put((number, calls, work))
        return work

    def stop(self) -> None:
        """Do what was started and end the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._want(self._num_started)
            self._thread.join(_JOIN_S)
        self._wires.close()

    def _want(self, number: int) -> None:
        with self._wanting:
            if number <= self._num_wanted:
                return
            self._num_wanted = number
        self._wires.ring()

    def _run(self) -> None:
        hurry_this_thread()
        failure: str | None = None
        while (job := self._queue.get()) is not None:
            number, calls, work = job
            # After a failure ranks may be at different words, and would take one for another.
            failure = failure or self._try(number, calls)
            work.end(failure)
            del job, calls, work

    def _try(self, number: int, calls: Sequence[Call]) -> str | None:
        try:
            while number > self._num_wanted and not self._wires.listen():
                pass
            self._read(calls)
        except ConnectionError:
            failure = "Connection closed by peer"  # gloo's text
        except TimeoutError:
            failure = "Timed out waiting for another rank on the emulated fabric"
        except (OSError, RuntimeError) as error:
            failure = str(error)
        else:
            return None
        self._wires.close()
        return failure

    def _read(self, calls: Sequence[Call]) -> None:
        # Who has the addresses of all ranks knows that all have launched.
        addresses = self._wires.exchange([call.full.data_ptr() for call in calls])
        plan = ReadingPlan(calls, self._memory, addresses, rank=self._rank, size=self._size).plan()
        results: list[object] = list(steps(plan.after))
        for later in plan.later:
            numbers = [result for result in results if isinstance(result, int)]
            is_blind = any(number != read.nbytes for number, read in zip(numbers, plan.reads, strict=False))
            blind = [rank for rank, (word,) in enumerate(self._wires.exchange([is_blind])) if word]
            if blind:
                raise RuntimeError(f"ranks {blind} of the emulated fabric could not read the memory of others")
            results += steps(later.operations)


def get_reader(store: Store, *, rank: int, size: int, timeout_s: float) -> Reader | None:
    """Return what reads for this rank, or ``None`` when ranks cannot read each other's memory. All ranks call it."""
    if size == 1 or not can_exchange_among(size):
        return None
    rounds = itertools.count()

    def tell_all(word: bytes) -> list[bytes]:
        number = next(rounds)
        store.set(f"{number}/{rank}", word.decode())
        return [bytes(store.get(f"{number}/{other}")) for other in range(size)]

    memory = get_to_know(tell_all, rank=rank)
    if memory is None:
        return None
    return Reader(memory, Wires(store, rank=rank, size=size, timeout_s=timeout_s), rank=rank, size=size)
