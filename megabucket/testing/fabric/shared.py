"""Memory that the ranks of one machine share: zeroed 8-byte words in a file without a name, and a lock.

Launch times must reach the other ranks within microseconds, also when all cores are busy, which a message of gloo does not
(docs/emulated-fabric.md). ``time.monotonic`` reads the same clock in all processes of a machine.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch._C._distributed_c10d import Store

from megabucket.errors import ConfigError

_WORD_BYTES: Final = 8
_LOCK_RETRY_S: Final = 20e-6


class SharedWords:
    """Words that all ranks read and write, each as a float or as an integer.

    Args:
        file: open for reading and writing, ``num_words`` long.
        lock_timeout_s: after which a lock that another rank does not release is an error.
    """

    def __init__(self, file: int, num_words: int, *, lock_timeout_s: float) -> None:
        self._file = file  # never closed by us: the mapping and the lock live until the process ends or drops them
        self._lock_timeout_s = lock_timeout_s
        self._threads = threading.Lock()  # locks of files do not keep threads of one process apart
        memory = memoryview(mmap.mmap(file, num_words * _WORD_BYTES))
        self.floats = memory.cast("d")
        self.ints = memory.cast("q")

    def __del__(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other ranks and threads out.

        Raises:
            TimeoutError: another rank holds the lock and does not move.
        """
        with self._threads:
            end_s = time.monotonic() + self._lock_timeout_s
            while not _try_lock(self._file):
                if time.monotonic() > end_s:
                    raise TimeoutError(
                        f"Timed out waiting {self._lock_timeout_s:g} s for the lock of the emulated fabric; a rank stands still"
                    )
                time.sleep(_LOCK_RETRY_S)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def share_words(store: Store, *, rank: int, size: int, num_words: int, lock_timeout_s: float) -> SharedWords:
    """Return words that all ranks of a group share. All ranks call it with the same store.

    Raises:
        ConfigError: on every rank, when one of them cannot open what the first has made: it runs on another machine.
    """
    path, file, failure = "", -1, ""
    try:
        if rank == 0:
            file, path = tempfile.mkstemp(prefix="megabucket-fabric-", dir=_memory_directory())
            os.ftruncate(file, num_words * _WORD_BYTES)
            store.set("file", json.dumps([path, _machine()]))
        else:
            file = _open(json.loads(store.get("file")))
    except OSError as error:
        failure = f"rank {rank} on {platform.node()}: {error}"
        if rank == 0:
            store.set("file", json.dumps([path, _machine()]))
    store.set(f"opened/{rank}", failure)
    failures = [text for other in range(size) if (text := bytes(store.get(f"opened/{other}")).decode())]
    if rank == 0 and path:
        Path(path).unlink()  # the memory lives as long as somebody has it open, and nothing is left behind by a crash
    if failures:
        if file >= 0:
            os.close(file)
        raise ConfigError(
            "the ranks of an emulated fabric share memory, so all of them must run on one machine; "
            f"{len(failures)} of {size} could not: {failures[0]}"
        )
    return SharedWords(file, num_words, lock_timeout_s=lock_timeout_s)


def _open(where: Any) -> int:
    path, machine = where
    if machine != _machine():
        raise FileNotFoundError(f"the first rank runs on another machine ({machine})")
    return os.open(path, os.O_RDWR)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown boot"
    return f"{platform.node()}, {boot}"


def _memory_directory() -> str | None:
    """Return where files are memory; ``None``: nowhere known, so the ordinary place for temporary files will do."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 - made by mkstemp, and unlinked


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
