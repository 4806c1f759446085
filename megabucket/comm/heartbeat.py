"""The thread of one communicator that talks to the store of its group, so that the caller's thread never waits for it.

It writes this rank's signs of life, and reads those of the others until all have come. Later it reads them on request of a
rank that is blocked, and what any of them has found. Nobody else in the package uses the store.

::

    waiting thread                    this thread                       store
      request() / ask()  --mailbox-->   read, compare_set   <------->   <instance>/rank/<r>   Beat
      view               <----------    publish a View                  <instance>/lost       Finding
                                        every heartbeat_s   -------->   <instance>/rank/<r>   Beat
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store

from megabucket.comm.peers import identify_this_process
from megabucket.comm.port import Progress
from megabucket.comm.signs import NO_VIEW, Beat, Finding, View, decode_beat, decode_finding
from megabucket.comm.store_connection import StoreConnection

_START_S: Final = 5.0
_JOIN_S: Final = 1.0
_READ_EVERY_S: Final = 0.2
_READ_S_PER_RANK: Final = 0.01  # all ranks may be blocked at once, and each reads as many values as there are ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    finding: Finding | None = None  # to be written, unless another rank was first
    reply: queue.SimpleQueue[View] | None = None
    is_last: bool = False


class Heartbeat:
    """Signs of life of this rank and a view of the others.

    Args:
        store: of the process group. A TCP store is cloned, so that no request of this thread holds up the caller's.
        progress: of the communicator; read at each beat.
        every_s: seconds between beats; ``None``: only the first one is written, which says who this process is.
        is_wanted: asked at each beat; ``False`` ends the thread.
        on_unwanted: called by the thread then.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        progress: Progress,
        every_s: float | None,
        is_wanted: Callable[[], bool],
        on_unwanted: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.every_s = rank, size, every_s
        self.process = identify_this_process()
        self.read_every_s = max(_READ_EVERY_S, _READ_S_PER_RANK * size)
        self.view = NO_VIEW
        self.num_answers = 0
        self.failure = ""
        """Why the thread ended, when the store was the reason."""
        self.is_stopped = False
        self._num_requests = 0
        self._progress = progress
        self._is_wanted, self._on_unwanted = is_wanted, on_unwanted
        self._count = 0
        self._known: set[int] = set()  # ranks that have ever written
        # SimpleQueue, because the garbage collector may end a communicator at any moment, in this thread, too: a put from
        # there must not need a lock that the interrupted code holds.
        self._mailbox: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._is_ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        # In a list, which the thread empties: a thread refers to its arguments as long as it runs, and whoever destroys the
        # group of a TCP store may want to listen on the same port again.
        self._thread = threading.Thread(target=self._run, args=([store],), name=f"megabucket-heartbeat-{rank}", daemon=True)
        self._thread.start()
        # A program that ends at once would find the thread inside of a connect that is tried again and again, which nothing
        # can end: see stop(). Usually this takes a millisecond.
        with contextlib.suppress(queue.Empty):
            self._is_ready.get(timeout=_START_S)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for the store, or will wait for ever."""
        return self._num_requests != self.num_answers

    def request(self) -> None:
        """Have ``view`` renewed soon, unless that is under way."""
        if not self.is_busy:
            self._send(_Request())

    def ask(self, timeout_s: float, *, finding: Finding | None = None) -> View | None:
        """Return what the store says now, or ``None`` when it does not answer in time.

        Args:
            finding: written first, unless another rank has written one; the returned view holds the one that counts.
        """
        if not self._thread.is_alive() or os.getpid() != self.process.pid:
            return None
        reply: queue.SimpleQueue[View] = queue.SimpleQueue()
        self._send(_Request(finding, reply))
        try:
            return reply.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Say farewell and end the thread. Waits for it up to a second: only a store that does not answer takes so long.

        A daemon thread that returns from C++ into an interpreter that is gone aborts the process, so this runs at exit.
        """
        if os.getpid() != self.process.pid:
            return  # a forked child has no such thread, and its parent's is not to be ended
        self.is_stopped = True
        self._mailbox.put(_Request(is_last=True))
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _send(self, request: _Request) -> None:
        self._num_requests += 1
        self._mailbox.put(request)

    # In the thread #

    def _run(self, stores: list[Store]) -> None:
        try:
            connection = StoreConnection(stores.pop())
            try:
                self._serve(connection)
            finally:
                connection.close()
        except Exception as error:
            # Not reported here: it happens at the end of programs, too, when the host of the store is the first to go. A rank
            # that is blocked notices that nobody answers.
            self.failure = f"{type(error).__name__}: {error}"
            self._is_ready.put(None)

    def _serve(self, connection: StoreConnection) -> None:
        # Several wrappers may share a group, one after the other, too. All ranks make them in the same order.
        instance = connection.store.add(f"megabucket/instances/{self.rank}", 1)
        store = PrefixStore(f"megabucket/{instance}", connection.store)
        self._beat(store)
        self._meet(store)
        self._is_ready.put(None)
        next_beat_s = time.monotonic() + (self.every_s or 0.0)
        while True:
            request = self._next_request(next_beat_s)
            if not self._is_wanted():
                self._on_unwanted()
                return  # the group was destroyed: nobody waits over it any more
            connection.check()
            if request is None:
                self._beat(store)
                self._meet(store)
                next_beat_s = time.monotonic() + (self.every_s or 0.0)
            elif request.is_last:
                self._beat(store, has_left=True)
                return
            else:
                self._answer(store, request)

    def _next_request(self, next_beat_s: float) -> _Request | None:
        """Return the next request, or ``None`` when it is time for a beat."""
        timeout_s = None if self.every_s is None else next_beat_s - time.monotonic()
        if timeout_s is not None and timeout_s <= 0:
            return None
        try:
            return self._mailbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _beat(self, store: Store, *, has_left: bool = False) -> None:
        progress = self._progress
        self._count += 1
        beat = Beat(
            process=self.process,
            count=self._count,
            every_s=self.every_s,
            step=progress.step,
            phase=progress.phase,
            bucket=progress.bucket,
            num_launched=progress.num_launched,
            at_s=time.time(),
            has_left=has_left,
        )
        store.set(_rank_key(self.rank), beat.encode())

    def _meet(self, store: Store) -> None:
        """Read who the others are, until all have come: when it matters, the store may be out of reach.

        A process that is stopped while it holds the lock of a file store, for instance, stops the store.
        """
        if len(self._known) < self.size:
            self.view = View(time.monotonic(), self._read_beats(store), self.view.finding)

    def _answer(self, store: Store, request: _Request) -> None:
        finding, view = self.view.finding, self.view
        if request.finding is not None:
            finding = decode_finding(store.compare_set("lost", "", request.finding.encode()))
        elif finding is None and store.check(["lost"]):
            finding = decode_finding(store.get("lost"))
        now_s = time.monotonic()
        if request.reply is not None or now_s - view.asked_at_s >= self.read_every_s:
            self.view = View(now_s, self._read_beats(store), finding)
        else:
            self.view = View(view.asked_at_s, view.beats, finding)
        self.num_answers += 1
        if request.reply is not None:
            request.reply.put(self.view)

    def _read_beats(self, store: Store) -> dict[int, Beat]:
        unknown = [rank for rank in range(self.size) if rank not in self._known]
        if unknown:
            # get() would wait for a rank that has not written yet.
            all_wrote = store.check([_rank_key(rank) for rank in unknown])
            self._known.update(rank for rank in unknown if all_wrote or store.check([_rank_key(rank)]))
        ranks = sorted(self._known - {self.rank})
        values = store.multi_get([_rank_key(rank) for rank in ranks]) if ranks else []
        beats = {rank: decode_beat(value) for rank, value in zip(ranks, values, strict=True)}
        return {rank: beat for rank, beat in beats.items() if beat is not None}


def _rank_key(rank: int) -> str:
    return f"rank/{rank}"
