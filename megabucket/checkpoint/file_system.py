"""The calls to the operating system that saving and loading make.

Calls that write, rename or remove files of a checkpoint go through ``FileSystem.call``, so that tests can make each of them
fail or be the last. Making the root, locking it and reading do not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import numpy as np

NUM_FILE_THREADS: Final = min(4, os.cpu_count() or 1)
"""Files to hash at a time: hashing takes a core, and more cores than these do not make a disk faster."""

_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class FileSystem:
    """The real file system."""

    __slots__ = ()

    def call(self, function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        """Make one call of ``os`` that changes something and can fail with ``OSError``."""
        return function(*args, **kwargs)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the disk, if the file system supports it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _where_supported():
                self.call(os.fsync, descriptor)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> int:
        """Write a new file, and return its size in bytes when it is on the disk."""
        num_bytes = 0
        try:
            descriptor = self.call(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                for chunk in chunks:
                    num_bytes += len(chunk)
                    rest = memoryview(chunk)
                    while rest:
                        rest = rest[self.call(os.write, descriptor, rest) :]
                self.call(os.fsync, descriptor)
            finally:
                self.call(os.close, descriptor)  # some file systems report a failed write only here
        except OSError as error:  # calls by descriptor do not know the name
            raise OSError(error.errno, error.strerror, str(path)) from None
        return num_bytes

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory with the files in it; our directories have none below them."""
        if path.is_dir() and not path.is_symlink():
            for file in sorted(path.iterdir()):
                self.call(os.unlink, file)
            self.call(os.rmdir, path)
        else:
            self.call(os.unlink, path)


def lock(path: Path) -> FileIO:
    """Lock the file ``path`` until the returned one is unlocked, or is dropped because of an interrupt, or this process ends.

    Raises:
        BlockingIOError: it is locked already.
    """
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
    try:
        with _where_supported():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def unlock(file: FileIO) -> None:
    """Release a lock, also if a forked child still has the file."""
    try:
        with _where_supported():
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        file.close()


def read_file(path: Path, max_bytes: int) -> memoryview:
    """Return the contents of a regular file: no link out of its directory, no pipe (which could block for ever).

    Raises:
        ValueError: it is larger than it can be; a sparse file could ask for more memory than there is.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > max_bytes:
            raise ValueError(f"it has {found.st_size} bytes, and at most {max_bytes} belong there")
        # numpy asks the kernel for large pages; without them the faults of new memory cost as much as a hash.
        data = rest = np.empty(found.st_size, np.uint8).data
        while count := file.readinto(rest):
            rest = rest[count:]
    return data[: len(data) - len(rest)]


def check_regular(path: Path) -> None:
    """Refuse a pipe or a device, before a reader of another library waits for it for ever.

    Raises:
        OSError: it is one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def _where_supported() -> Iterator[None]:
    """Ignore that a file system does not support a call."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def reason_of(error: Exception) -> str:
    """Return what went wrong, in one line without a path."""
    if isinstance(error, OSError):
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
