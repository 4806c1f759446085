"""When collectives are done, agreed on by the ranks of one machine through shared memory. No thread, no data.

A rank notes the moment of its launch. The one that launches last knows when the collective can start: when it has launched,
and when the link ("NIC") of every member is free. It writes the end for all to read, and occupies the links until then::

    done = max(last launch, latest link of a member free) + duration

So collectives are served in the order in which they become complete, one at a time on each link, across all groups.
Nobody waits here: an end that is not known at some moment cannot come before that moment plus the duration.

Launch times must reach the other ranks within microseconds, also when all cores are busy, which a message of gloo does not.
``time.monotonic`` reads the same clock in all processes of a machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch._C._distributed_c10d import Store

from megabucket.errors import ConfigError

NUM_SLOTS: Final = 4096
"""Collectives a rank may be ahead of the slowest one in a group, less one; a launch beyond that waits."""

_ARRIVED, _LAUNCH, _DURATION, _DONE, _SLOT_WORDS = 0, 1, 2, 3, 4
_ROOM_S: Final = 1e-3
_WORD_BYTES: Final = 8


class SharedWords:
    """Zeroed 8-byte words that all ranks read and write, each as a float or as an integer, and a lock.

    Args:
        file: open for reading and writing, ``num_words`` long; closed with the last reference to the words.
    """

    def __init__(self, file: int, num_words: int) -> None:
        self._file = file
        self._threads = threading.Lock()  # locks of files do not keep threads of one process apart
        memory = memoryview(mmap.mmap(file, num_words * _WORD_BYTES))
        self.floats = memory.cast("d")
        self.ints = memory.cast("q")

    def __del__(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other ranks and threads out. The system releases the lock of a rank that dies."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def share_words(store: Store, *, rank: int, size: int, num_words: int) -> SharedWords:
    """Return words that all ranks of a group share. All ranks call it with the same store.

    Raises:
        ConfigError: on every rank, when one of them cannot open what the first has made: it runs on another machine.
    """
    path, file, failure = "", -1, ""
    try:
        if rank == 0:
            # A file in memory where that is known; it has no name as soon as all have opened it.
            directory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 - made by mkstemp
            file, path = tempfile.mkstemp(prefix="megabucket-fabric-", dir=directory)
            os.ftruncate(file, num_words * _WORD_BYTES)
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
    return SharedWords(file, num_words)


class Links:
    """When the link of each rank of a machine is free, shared by all groups.

    Args:
        words: one for each rank of the machine.
    """

    def __init__(self, words: SharedWords) -> None:
        self.words = words

    def occupy(self, ranks: Sequence[int], *, from_s: float, duration_s: float) -> float:
        """Return when a transfer ends that needs the links of all ``ranks``. The caller holds the lock."""
        free = self.words.floats
        done_s = max(from_s, *(free[rank] for rank in ranks)) + duration_s
        for rank in ranks:
            free[rank] = done_s
        return done_s

    def send(self, rank: int, *, from_s: float, duration_s: float) -> float:
        """Return when a message has left: the link is full duplex, and the sender's side is occupied."""
        with self.words.locked():
            return self.occupy((rank,), from_s=from_s, duration_s=duration_s)


class Arrival:
    """The end of one launched collective."""

    __slots__ = ("_done_s", "_index", "_words", "duration_s", "sequence")

    def __init__(self, words: SharedWords, index: int, *, sequence: int, duration_s: float) -> None:
        self._words, self._index, self._done_s = words, index, 0.0
        self.sequence, self.duration_s = sequence, duration_s

    @property
    def done_s(self) -> float | None:
        """Moment on ``time.monotonic``; ``None`` while another rank has not launched."""
        # One aligned word, written once: there is nothing to lock.
        if not self._done_s:
            self._done_s = self._words.floats[self._index]
        return self._done_s or None


class Ledger:
    """The collectives of one group, by their place in the order in which each rank launches them.

    The caller launches from one thread at a time.

    Args:
        words: ``ledger_words(size)`` of them.
        members: positions of the group's ranks in ``links``.
        timeout_s: of the group.
    """

    def __init__(self, words: SharedWords, links: Links, *, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self._words, self._links = words, links
        self._rank, self._members, self._timeout_s = rank, tuple(members), timeout_s
        self._count = 0
        self._room_until = NUM_SLOTS
        self._pending: deque[Arrival] = deque()

    def launch(self, launch_s: float, duration_s: float) -> Arrival:
        """Note a launch of this rank.

        Args:
            launch_s: when, on ``time.monotonic``.
            duration_s: on a free link; where the ranks differ, the longest counts.

        Raises:
            TimeoutError: another rank is ``NUM_SLOTS`` collectives behind and does not move.
        """
        self._make_room()
        floats, ints = self._words.floats, self._words.ints
        with self._links.words.locked():
            slot = len(self._members) + _SLOT_WORDS * (self._count % NUM_SLOTS)
            if ints[slot + _ARRIVED] == 0:
                floats[slot + _LAUNCH] = floats[slot + _DURATION] = floats[slot + _DONE] = 0.0
            ints[slot + _ARRIVED] += 1
            floats[slot + _LAUNCH] = max(floats[slot + _LAUNCH], launch_s)
            floats[slot + _DURATION] = max(floats[slot + _DURATION], duration_s)
            if ints[slot + _ARRIVED] == len(self._members):
                ints[slot + _ARRIVED] = 0
                floats[slot + _DONE] = self._links.occupy(
                    self._members, from_s=floats[slot + _LAUNCH], duration_s=floats[slot + _DURATION]
                )
            arrival = Arrival(self._words, slot + _DONE, sequence=self._count, duration_s=duration_s)
            self._count += 1
            self._pending.append(arrival)
        return arrival

    def _make_room(self) -> None:
        """Say up to where this rank has read, and wait until the slot that comes next was read by all ranks."""
        # A launch that was dropped is read here, too: it must not keep its slot.
        while self._pending and self._pending[0].done_s is not None:
            self._pending.popleft()
        self._words.ints[self._rank] = self._pending[0].sequence if self._pending else self._count
        end_s = time.monotonic() + self._timeout_s
        while self._count >= self._room_until:
            self._room_until = min(self._words.ints[: len(self._members)]) + NUM_SLOTS
            if self._count < self._room_until:
                return
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"Timed out waiting {self._timeout_s:g} s for a rank that is {NUM_SLOTS} collectives behind on the "
                    "emulated fabric"
                )
            time.sleep(_ROOM_S)


def ledger_words(size: int) -> int:
    """Return how many words a group of ``size`` ranks needs."""
    return size + _SLOT_WORDS * NUM_SLOTS
