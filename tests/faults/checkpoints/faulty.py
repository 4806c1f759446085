"""A file system whose calls are counted, and can be made to fail, to stop half way, or to end the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from megabucket.checkpoint.file_system import FileSystem


class FaultyFileSystem(FileSystem):
    """The real file system, with ``before`` called before each call.

    Args:
        before: gets the position of the call, counted from 0, and its name; it may raise, or kill the process.
        torn: let a write that is about to fail write half of its bytes first.
    """

    __slots__ = ("_before", "_lock", "_torn", "num_calls")

    def __init__(self, before: Callable[[int, str], None], *, torn: bool = False) -> None:
        self._before, self._torn = before, torn
        self._lock = threading.Lock()
        self.num_calls = 0

    def _count(self) -> int:
        with self._lock:
            self.num_calls += 1
            return self.num_calls - 1

    def _call(self, name: str) -> None:
        self._before(self._count(), name)

    def make_directory(self, path: Path) -> None:
        self._call("make_directory")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._call("create")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        index = self._count()
        if self._torn:
            half = super().write(descriptor, data[: (len(data) + 1) // 2])
            self._before(index, "write")
            return half
        self._before(index, "write")
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        # Closed in any case: a descriptor that leaks would be a fault of the test.
        super().close(descriptor)
        self._call("close")

    def sync_directory(self, path: Path) -> None:
        self._call("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._call("remove")
        super().remove(path)


def nothing(_index: int, _name: str) -> None:
    """Let every call through."""


def kill_at(index: int) -> Callable[[int, str], None]:
    """End the process with SIGKILL before call ``index``."""

    def before(found: int, _name: str) -> None:
        if found == index:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def fail_at(index: int, code: int, *, for_good: bool) -> Callable[[int, str], None]:
    """Refuse call ``index`` with an error number, and every later one if ``for_good``."""

    def before(found: int, _name: str) -> None:
        if found == index or (for_good and found > index):
            raise OSError(code, os.strerror(code))

    return before
