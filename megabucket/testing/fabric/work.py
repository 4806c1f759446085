"""``torch.distributed.Work`` of the emulated fabric: done when the data has moved and the link would have delivered it.

A rank notes the moment of its launch in memory that the ranks of a machine share. The last rank to launch knows when the
collective can start: when it has launched, and when the link ("NIC") of every member is free. It writes the end for all to
read, and occupies the links until then::

    done = max(last launch, latest link of a member free) + duration

So collectives are served in the order in which they become complete, one at a time on each link, across all groups. Waits
sleep in the caller's thread; futures are completed by one thread for all groups of a process.

Launch times must reach the other ranks within microseconds, also when all cores are busy, which a message of gloo does not.
``time.monotonic`` reads the same clock in all processes of a machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megabucket.errors import ConfigError

NUM_SLOTS: Final = 8192
"""Collectives of a group that a rank may be ahead of the slowest one."""

_SLOT: Final = np.dtype([("number", "i8"), ("num_launched", "i8"), ("launch_s", "f8"), ("duration_s", "f8"), ("done_s", "f8")])
_NO_LIMIT: Final = timedelta(0)
_SHORTEST_PAUSE_S: Final = 100e-6
_LONGEST_PAUSE_S: Final = 20e-3
_PAUSE_FRACTION: Final = 0.02  # after a second of waiting, a look may come twenty milliseconds late
_JOIN_S: Final = 1.0
_DESTROYED: Final = "the process group of the emulated fabric was destroyed"


@dataclass(slots=True)
class Lateness:
    """How far completions came after the moments they were meant for.

    Attributes:
        num_done: collectives that completed.
        total_s: sum of their delays, seconds.
        worst_s: the longest delay.
        num_slow_data: how many were late because the data had not moved yet, so that moving was measured, not the link.
    """

    num_done: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0
    num_slow_data: int = 0


def share_memory(store: Store, *, rank: int, size: int, num_bytes: int) -> int:
    """Return a file of zeros that all ranks of a group can map. All ranks call it with the same store.

    Raises:
        ConfigError: on every rank, if one of them cannot open the file: it runs on another machine.
    """
    path, file, failure = "", -1, ""
    try:
        if rank == 0:
            # A file in memory where that is known; it has no name as soon as all have opened it.
            directory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 - made by mkstemp
            file, path = tempfile.mkstemp(prefix="megabucket-fabric-", dir=directory)
            os.ftruncate(file, num_bytes)
        else:
            file = os.open(store.get("file").decode(), os.O_RDWR)
    except OSError as error:
        failure = f"rank {rank} on {platform.node()}: {error}"
    if rank == 0:
        store.set("file", path)
    store.set(f"opened/{rank}", failure)
    failures = [text for other in range(size) if (text := store.get(f"opened/{other}").decode())]
    if path:
        Path(path).unlink()
    if failures:
        if file >= 0:
            os.close(file)
        raise ConfigError(
            "the ranks of an emulated fabric share memory, so all of them must run on one machine; "
            f"{len(failures)} of {size} could not: {failures[0]}"
        )
    return file


class Machine:
    """The links of the ranks of a machine, and the thread that completes futures: shared by all groups of a process.

    Args:
        file: of ``share_memory``; 8 bytes for each rank.
    """

    def __init__(self, file: int, size: int, *, rank: int) -> None:
        self._file = file
        self._threads = threading.Lock()  # locks of files do not keep threads of one process apart
        self.free_s = np.frombuffer(mmap.mmap(file, 8 * size), dtype="f8")  # when each link is free
        self.nic = Nic(f"megabucket-nic-{rank}")
        weakref.finalize(self, os.close, file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other ranks and threads out. The system releases the lock of a rank that dies."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class Ledger:
    """The collectives of one group, by their place in the order in which each rank launches them.

    The caller launches from one thread at a time.

    Args:
        file: of ``share_memory``, ``NUM_BYTES`` long. It is closed here.
        members: positions of the group's ranks among the links.
    """

    NUM_BYTES: Final = NUM_SLOTS * _SLOT.itemsize

    def __init__(self, file: int, machine: Machine, members: Sequence[int]) -> None:
        self._slots = np.frombuffer(mmap.mmap(file, self.NUM_BYTES), dtype=_SLOT)
        os.close(file)
        self._machine, self._members = machine, list(members)
        self._num_launched = 0

    def launch(self, launch_s: float, duration_s: float) -> Any:
        """Note a launch of this rank and return its slot, whose ``done_s`` is 0 until all ranks have launched.

        Args:
            launch_s: when, on ``time.monotonic``.
            duration_s: on a free link; if the ranks differ, the longest counts.

        Raises:
            RuntimeError: another rank is ``NUM_SLOTS`` collectives behind.
        """
        number, slot = self._num_launched, self._slots[self._num_launched % NUM_SLOTS]
        self._num_launched += 1
        with self._machine.locked():
            if slot["num_launched"] == 0:
                slot["number"], slot["launch_s"], slot["duration_s"], slot["done_s"] = number, 0.0, 0.0, 0.0
            if slot["number"] != number:
                raise RuntimeError(f"a rank is {NUM_SLOTS} collectives behind on the emulated fabric; wait for some of them")
            slot["num_launched"] += 1
            slot["launch_s"] = max(slot["launch_s"], launch_s)
            slot["duration_s"] = max(slot["duration_s"], duration_s)
            if slot["num_launched"] == len(self._members):
                slot["num_launched"] = 0
                free_s = self._machine.free_s
                slot["done_s"] = max(slot["launch_s"], free_s[self._members].max()) + slot["duration_s"]
                free_s[self._members] = slot["done_s"]
        return slot


class _Group(Protocol):
    """A process group on the fabric, as its works see it."""

    machine: Machine
    timeout_s: float
    lateness: Lateness


class FabricWork(dist.Work):
    """One launched collective.

    Args:
        group: it was launched on; kept alive until the end of the work.
        slot: of the ledger.
        duration_s: on a free link.
        works: of gloo, which move the data; none when nothing is moved.
        result: of the future.
        finish: puts the data where the caller wants it; called once, when all has arrived.
    """

    def __init__(
        self,
        group: _Group,
        slot: Any,
        *,
        duration_s: float,
        works: Sequence[dist.Work],
        result: Any,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._group, self._slot, self._duration_s = group, slot, duration_s
        self._works, self._result, self._finish = works, result, finish
        self._launch_s = time.monotonic()
        self._done_s = 0.0
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._failure: BaseException | None = None
        self._is_done = self._is_data_late = False

    # The interface of a work #

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the operation is done.

        Raises:
            RuntimeError: it failed, or ``timeout``, or else the time limit of the group, is over; the operation goes on then.
        """
        limit_s = timeout.total_seconds() if timeout > _NO_LIMIT else None
        start_s = time.monotonic()
        end_s = start_s + (self._group.timeout_s if limit_s is None else limit_s)
        for work in self._works:
            if limit_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(end_s - time.monotonic(), 1e-3)))
        done_s = self._known_done_s()
        if self._works and done_s is not None and time.monotonic() > max(done_s, start_s) + _SHORTEST_PAUSE_S:
            self._is_data_late = True
        while (next_s := self.next_look_s(now_s := time.monotonic())) is not None:
            if now_s >= end_s:
                # The texts of gloo: a caller that waits in slices or looks for a time limit need not know the difference.
                limit = f"Timed out waiting {self._group.timeout_s * 1000:.0f}ms for the other ranks to launch on the"
                raise RuntimeError("Operation timed out!" if limit_s is not None else f"{limit} emulated fabric")
            time.sleep(max(min(next_s, end_s) - now_s, 0.0))
        self._settle(since_s=start_s)
        return True

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        now_s = time.monotonic()
        if self.next_look_s(now_s) is not None:
            return False
        with suppress(RuntimeError):
            self._settle(since_s=now_s)
        return True

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.is_completed() and self._failure is None

    def exception(self) -> BaseException | None:
        """Return why it failed."""
        return self._failure

    def result(self) -> Any:
        """Return the tensors it wrote."""
        return self._result

    def synchronize(self) -> None:
        """Do nothing: there are no streams."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that the thread of the process completes.

        Raises:
            RuntimeError: the thread has ended.
        """
        with self._lock:
            if self._future is None:
                self._group.machine.nic.promise(self)
                self._future = torch.futures.Future()  # the thread takes it after the lock
            return self._future

    # Completion #

    def _known_done_s(self) -> float | None:
        """Return the moment the link delivers, on ``time.monotonic``; ``None`` while another rank has not launched."""
        # One aligned word, written once: there is nothing to lock.
        if not self._done_s:
            self._done_s = float(self._slot["done_s"])
        return self._done_s or None

    def next_look_s(self, now_s: float) -> float | None:
        """Return the moment before which nothing can be done, or ``None`` when there is nothing to wait for any more."""
        if self._is_done or self._failure is not None:
            return None
        done_s = self._known_done_s()
        if done_s is None:
            # An end that is not known yet cannot come before the duration has passed.
            return None if self._has_failed() else now_s + max(self._duration_s, _pause_s(now_s - self._launch_s))
        if now_s < done_s:
            return done_s
        if all(work.is_completed() for work in self._works):
            return None
        self._is_data_late = True
        return now_s + _pause_s(now_s - done_s)

    def _has_failed(self) -> bool:
        """Whether gloo has given up, so that the other ranks may never come."""
        try:
            for work in self._works:
                if work.is_completed():
                    work.wait()  # at once; the only way to ask that torch does not warn about
        except RuntimeError:
            return True
        return False

    def _settle(self, *, since_s: float) -> None:
        """Take the result over; ``next_look_s`` has returned ``None``. Idempotent.

        Args:
            since_s: when the caller began to wait; a completion is not late before.

        Raises:
            RuntimeError: gloo failed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_done:
                return
            try:
                for work in self._works:
                    work.wait()
                if self._finish is not None:
                    self._finish()
            except BaseException as error:
                self._failure = error
                raise
            late_s = time.monotonic() - max(self._done_s, since_s)
            lateness = self._group.lateness
            lateness.num_done += 1
            lateness.total_s += late_s
            lateness.worst_s = max(lateness.worst_s, late_s)
            lateness.num_slow_data += self._is_data_late
            self._is_done = True
            self._works, self._finish = (), None

    def keep_promise(self) -> None:
        """Complete the future; ``next_look_s`` has returned ``None``."""
        future = self.get_future()
        try:
            self._settle(since_s=self._launch_s)
        except BaseException as error:  # it belongs to the caller that waits for the future
            future.set_exception(error)
        else:
            future.set_result(self._result)


def _pause_s(waited_s: float) -> float:
    """Return how long to sleep before looking again for an event that may come at any moment."""
    return min(max(_SHORTEST_PAUSE_S, _PAUSE_FRACTION * waited_s), _LONGEST_PAUSE_S)


class Nic:
    """The thread that completes futures: it sleeps until the next one is due."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._promised: queue.SimpleQueue[FabricWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        # Nothing may be promised after the last word to the thread. Re-entrant, because the garbage collector may call stop().
        self._promising = threading.RLock()

    def promise(self, work: FabricWork) -> None:
        """Complete the future of ``work`` when it is done.

        Raises:
            RuntimeError: the thread was stopped.
        """
        with self._promising:
            if self._is_stopped:
                raise RuntimeError(_DESTROYED)
            self._promised.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread; futures that are not complete fail. Idempotent."""
        with self._promising:
            self._is_stopped = True
            self._promised.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        # A network card needs no turn on a core. The lowest real-time priority, where the system allows it.
        with suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        pending: list[FabricWork] = []
        pause_s: float | None = None
        while True:
            with suppress(queue.Empty):
                work = self._promised.get(timeout=pause_s)
                if work is None:
                    break
                pending.append(work)
            now_s = time.monotonic()
            looks_s = [(work.next_look_s(now_s), work) for work in pending]
            for look_s, work in looks_s:
                if look_s is None:
                    work.keep_promise()
            pending = [work for look_s, work in looks_s if look_s is not None]
            pause_s = (
                max(min(look_s for look_s, _ in looks_s if look_s is not None) - time.monotonic(), 0.0) if pending else None
            )
        for work in pending:
            work.get_future().set_exception(RuntimeError(_DESTROYED))
