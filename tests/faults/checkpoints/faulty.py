"""A file system whose calls are counted, and can be made to fail, to stop half way, or to end the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from megabucket.checkpoint.file_system import FileSystem

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


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

    def sync_directory(self, path: Path) -> None:
        self._before(self._count(), "sync_directory")
        FileSystem().sync_directory(path)

    def call(self, function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        index = self._count()
        if function is os.close:  # in any case: a descriptor that leaks would be a fault of the test
            closed = super().call(function, *args, **kwargs)
            self._before(index, "close")
            return closed
        if function is os.write and self._torn:
            descriptor, data = args
            half = os.write(descriptor, data[: (len(data) + 1) // 2])  # type: ignore[arg-type, index]
            self._before(index, "write")
            return half  # type: ignore[return-value]
        self._before(index, function.__name__)
        return super().call(function, *args, **kwargs)


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
