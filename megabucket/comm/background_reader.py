"""Collectives of ranks on one host that a thread does: it reads the other ranks' memory, batch by batch, in launch order.

Ranks may wait when they like and in any order: the threads need nobody, and tell each other over sockets how far they are. What
a rank reads is there, because all have launched before anybody reads, and all have added up before sums are read. It stays,
because nobody's work is done before all have read. So memory of a rank is its own again when its work is done.
"""

from __future__ import annotations

import atexit
import queue
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch

from megabucket.comm.peer_memory import PeerMemory
from megabucket.comm.plan import InBackground, steps
from megabucket.comm.port import Call
from megabucket.comm.reading_paths import ReadingPlan, unread_ranks, word_of
from megabucket.comm.wires import Wires

MOST_CALLS: Final = 4096
"""In a batch: their addresses fit into what a socket keeps until it is read."""

_LAST_READ_S: Final = 10.0

_Failure = Callable[[], RuntimeError]
"""Makes the error of who waits."""

_STOPPED: Final[_Failure] = partial(RuntimeError, "the process group was destroyed")


class UnreadableError(RuntimeError):
    """Ranks are there and cannot be read; ``states`` says who, as ``unread_ranks`` does. All ranks raise it."""

    def __init__(self, states: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank} {state}" for rank, state in states.items()))
        self.states = states


class ReadWork:
    """A batch that the thread does; like a work of gloo to those who wait.

    Args:
        hasten: has the thread begin although nobody waits yet. It may have begun, because another rank waits.
    """

    def __init__(self, hasten: Callable[[], None]) -> None:
        self.hasten = hasten
        self._is_done = threading.Event()
        self._failure: _Failure | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def is_completed(self) -> bool:
        """Whether it is done or has failed; who asks wants it to be."""
        self.hasten()
        return self._is_done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done.

        Raises:
            RuntimeError: it failed, or ``timeout`` is over; it goes on then.
        """
        self.hasten()
        if not self._is_done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")  # gloo's text: who waits in slices looks for it
        if self._failure is not None:
            raise self._failure()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return what is complete when it is done or has failed, on the thread that does it."""
        return self._future

    def end(self, failure: _Failure | None) -> None:
        """Let go on who waits.

        Args:
            failure: makes the error that each of them raises.
        """
        self._failure = failure
        self._is_done.set()
        self._future.set_result(None)


class BackgroundReader:
    """Does batches for one rank of a group. Its thread starts with the first one.

    Args:
        on_start: called by the thread before anything else.
    """

    def __init__(
        self, memory: PeerMemory, wires: Wires, *, rank: int, size: int, on_start: Callable[[], None] = lambda: None
    ) -> None:
        self._memory, self._wires = memory, wires
        self._rank, self._size = rank, size
        self._on_start = on_start
        self._queue: queue.SimpleQueue[tuple[int, InBackground, ReadWork] | None] = queue.SimpleQueue()
        self._num_started = self._num_wanted = 0
        self._wanting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: _Failure | None = None
        """Why nothing is done any more. Ranks may be at different words then, and would take one for another."""
        self._is_ending = False
        self._patience_s: float | None = None  # whatever it takes, which is at most the time limit of the wires

    def start(self, batch: InBackground) -> ReadWork:
        """Do like calls, ``MOST_CALLS`` at most, after all that was started before, when somebody on any rank wants it.

        What is gathered is in its place already, as far as it is this rank's own. A batch that is started again is planned
        once, if all ranks have their calls where they had them.
        """
        self._num_started += 1
        number = self._num_started
        work = ReadWork(lambda: self._want(number))
        if self._is_ending:
            work.end(_STOPPED)
            return work
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"megabucket-reader-{self._rank}", daemon=True)
            thread.start()
            self._thread = thread
            # A thread that the end of the program kills in C++ aborts the process; and others may come late for its last works.
            atexit.register(self.stop)
        self._queue.put((number, batch, work))
        return work

    def finish(self) -> None:
        """Take no more, and have the thread end when it has done what was started, for which other ranks may come late."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._thread is None:
            self._wires.close()
        else:
            self._queue.put(None)
            self._want(self._num_started)

    def join(self, patience_s: float | None) -> None:
        """Wait for the end of the thread, so long at most; ``None``: as long as it takes."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience_s)

    def stop(self) -> None:
        """``finish``, and wait for the thread. Idempotent."""
        self.finish()
        self.join(self._patience_s)
        self._failure = self._failure or _STOPPED
        self._wires.close()  # so a thread that is still there does not wait for other ranks any more
        self.join(_LAST_READ_S)

    def give_up(self) -> None:
        """Let ``stop`` wait for nobody: ranks are lost."""
        self._patience_s = 0.0

    def _want(self, number: int) -> None:
        with self._wanting:
            self._num_wanted = max(number, self._num_wanted)
        self._wires.ring()  # also for what was wanted before, by somebody who was interrupted here

    def _run(self) -> None:
        self._on_start()
        with torch.inference_mode():  # tensors made in it may be written to, too
            while (job := self._queue.get()) is not None:
                number, batch, work = job
                self._failure = self._failure or self._try(number, batch)
                work.end(self._failure)
                del job, batch, work
        self._wires.close()
        atexit.unregister(self.stop)

    def _try(self, number: int, batch: InBackground) -> _Failure | None:
        failure: _Failure
        try:
            while number > self._num_wanted and not self._wires.listen():
                pass
            self._read(batch)
        except ConnectionError:
            failure = partial(RuntimeError, "Connection closed by peer")  # gloo's text
        except TimeoutError:
            failure = partial(RuntimeError, "Timed out waiting for another rank to read what this one has")
        except UnreadableError as error:
            failure = partial(UnreadableError, error.states)
        except Exception as error:
            failure = partial(RuntimeError, str(error) or repr(error))
        else:
            return None
        self._wires.close()
        return failure

    def _read(self, batch: InBackground) -> None:
        calls = batch.calls
        # Who has the addresses of all ranks knows that all have launched.
        said = self._wires.exchange([_kind_of(calls), *(call.full.data_ptr() for call in calls)])
        if others := [rank for rank, (kind, *_) in enumerate(said) if kind != said[self._rank][0]]:
            what = ", ".join(f"{call.kind.value} of {tuple(call.full.shape)} {call.full.dtype}" for call in calls[:3])
            raise RuntimeError(f"rank {self._rank} has launched {what}, and ranks {others} have launched something else")
        addresses = [of_rank for _, *of_rank in said]
        if batch.reading is None or batch.addresses != addresses:
            batch.addresses = addresses
            batch.reading = ReadingPlan(calls, self._memory, addresses, rank=self._rank, size=self._size).plan()
        results: list[object] = []
        for stage in batch.reading.stages:
            results += steps(stage)
            words = [word for (word,) in self._wires.exchange([word_of(batch.reading.reads, results)])]
            if any(words):
                raise UnreadableError(unread_ranks(words))


def _kind_of(calls: Sequence[Call]) -> int:
    """Return a number that is the same on all ranks if they do the same."""
    kinds = [
        (call.kind.value, call.full.numel(), str(call.full.dtype), getattr(call, "op", None), getattr(call, "root", None))
        for call in calls
    ]
    return zlib.crc32(repr(kinds).encode())
