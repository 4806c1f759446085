"""The calls to the operating system that saving and loading make.

Calls that write, rename or remove files of a checkpoint go through ``FileSystem``, so that tests can make each of them fail or
be the last. Making the root, locking it and reading do not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_MAX_THREADS: Final = 4


class FileSystem:
    """The real one. It has no state; every method is one call that changes something and can fail, with ``OSError``."""

    __slots__ = ()

    def make_directory(self, path: Path) -> None:
        """Make a directory that must not be there yet."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a file for writing that must not be there yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``, and return how much."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Return when the file's contents are on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file; some file systems report a failed write only here."""
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the disk, where the file system can say so."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _where_supported():
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, at once; a file takes the place of another."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a symbolic link or an empty directory."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def free_bytes(path: Path) -> int:
    """Return how much can still be written, quotas not counted; without end where the file system cannot tell."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else 2**62


def lock(path: Path) -> int:
    """Take the lock that ``path`` stands for, until the returned descriptor is unlocked or this process ends.

    Raises:
        BlockingIOError: another has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with _where_supported():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def unlock(descriptor: int) -> None:
    """Let go of a lock, also if a forked child still has the descriptor."""
    try:
        with _where_supported():
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


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


@contextmanager
def _where_supported() -> Iterator[None]:
    """Go on where a file system does not know a call."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def num_file_threads() -> int:
    """Return how many files to hash at a time: hashing takes a core, and more cores than these do not make a disk faster."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        num_cores = os.cpu_count() or 1
    return min(_MAX_THREADS, num_cores)


def reason_of(error: Exception) -> str:
    """Return what went wrong, in one line without a path."""
    if isinstance(error, OSError):
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def check_regular(path: Path, kind: type[Exception]) -> None:
    """Refuse what is there and no file, before somebody else's reader waits for a pipe for ever."""
    if path.exists() and not path.is_file():
        raise kind(f"{path}: it is no regular file")


def write_file(file_system: FileSystem, path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a file that is not there yet, and return how many bytes it has when they are on the disk."""
    num_bytes = 0
    try:
        descriptor = file_system.create(path)
        try:
            for chunk in chunks:
                num_bytes += len(chunk)
                rest = memoryview(chunk)
                while rest:
                    rest = rest[file_system.write(descriptor, rest) :]
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
    except OSError as error:  # calls by descriptor do not know the name
        raise OSError(error.errno, error.strerror, str(path)) from None
    return num_bytes


def remove_tree(file_system: FileSystem, path: Path) -> None:
    """Remove a directory and the files in it, or a file; a directory of ours has none below it."""
    if path.is_dir() and not path.is_symlink():
        for file in sorted(path.iterdir()):
            file_system.remove(file)
    file_system.remove(path)
