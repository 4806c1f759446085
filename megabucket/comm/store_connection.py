"""A store over a connection of its own, and whether somebody is still at its other end.

The first request over a closed connection makes c10d print a page of C++ frames. That would be the usual last output of a
program in which rank 0 hosts the store and ends before the others, so the heartbeat looks before it talks.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


class StoreConnection:
    """A clone of a TCP store, so that no request over it holds up those of others; any other store as it is."""

    def __init__(self, store: Store) -> None:
        bottom = store
        while isinstance(bottom, PrefixStore):
            bottom = bottom.underlying_store
        clone: Callable[[], Store] | None = getattr(store, "clone", None)  # not in every torch
        self._fd: int | None = None
        if clone is None or not isinstance(bottom, TCPStore):
            self.store = store
            return
        sockets_before = _socket_fds()
        self.store = clone()
        opened = _socket_fds() - sockets_before
        if len(opened) == 1:  # otherwise another thread has opened some meanwhile, and ours is not known
            self._fd = os.dup(opened.pop())

    def check(self) -> None:
        """Do nothing while the connection is open, as far as is known.

        Raises:
            ConnectionResetError: the host of the store has closed it.
        """
        if self._fd is None:
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        if poll.poll(0):
            raise ConnectionResetError("the host of the store has closed the connection")

    def close(self) -> None:
        """Let go of the connection; the store must not be used any more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _socket_fds() -> set[int]:
    """Return the descriptors of this process that are sockets; none where the system does not list them."""
    try:
        names = [entry.name for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return set()
    return {int(name) for name in names if _is_socket(int(name))}


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # closed meanwhile
        return False
