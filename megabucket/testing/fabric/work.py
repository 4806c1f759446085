"""``torch.distributed.Work`` of the emulated fabric."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from megabucket.testing.fabric.flight import Flight
from megabucket.testing.fabric.nic import Nic

_NO_LIMIT: Final = timedelta(0)


class FabricWork(dist.Work):
    """What a collective on the fabric returns. Waits sleep in the caller's thread; futures are the NIC thread's."""

    def __init__(self, flight: Flight, nic: Nic, *, source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._flight, self._nic, self._source = flight, nic, source
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the operation is done.

        Raises:
            RuntimeError: it failed, or ``timeout`` is over; the operation goes on then.
        """
        self._flight.wait(timeout.total_seconds() if timeout > _NO_LIMIT else None)
        return True

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        now_s = time.monotonic()
        if self._flight.next_look_s(now_s) is not None:
            return False
        with suppress(RuntimeError):
            self._flight.settle(since_s=now_s)
        return True

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.is_completed() and self._flight.failure is None

    def exception(self) -> BaseException | None:
        """Return why it failed."""
        return self._flight.failure

    def result(self) -> Any:
        """Return the tensors it wrote."""
        return self._flight.result

    def synchronize(self) -> None:
        """Do nothing: there are no streams."""

    def source_rank(self) -> int:
        """Return the rank that a message came from.

        Raises:
            RuntimeError: this is no receive.
        """
        if self._source is None:
            raise RuntimeError("sourceRank() may only be called on work objects that correspond to a recv")
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that the NIC thread completes."""
        with self._lock:
            if self._future is None:
                if self._flight.is_message:
                    raise RuntimeError("a message has no future, as with gloo: wait() for it")
                self._future = torch.futures.Future()
                self._flight.hasten()
                self._nic.promise(self._flight, self._future)
            return self._future


class BatchedWork(dist.Work):
    """Stands for a collective inside of a coalescing block. It is launched at the end of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: dist.Work | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the batch is done; inside of the block at once, because whoever coalesces waits for the batch."""
        return self.launched.wait(timeout) if self.launched is not None else True
