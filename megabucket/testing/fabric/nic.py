"""The thread that completes futures at the moments the emulated link says, one for all groups of a process."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from megabucket.testing.fabric.flight import Flight
from megabucket.testing.fabric.threads import hurry_this_thread

_JOIN_S: Final = 1.0


@dataclass(order=True, slots=True)
class _Promise:
    look_s: float
    number: int
    flight: Flight = field(compare=False)
    future: torch.futures.Future[Any] = field(compare=False)
    since_s: float = field(compare=False, default_factory=time.monotonic)


class Nic:
    """Sleeps until the next future is due. Waits of the caller's own threads do without it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._promises: list[_Promise] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def promise(self, flight: Flight, future: torch.futures.Future[Any]) -> None:
        """Complete ``future`` when ``flight`` is done."""
        with self._changed:
            if self._is_stopped:
                raise RuntimeError("the process group of the emulated fabric was destroyed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            promise = _Promise(flight.next_look_s(time.monotonic()) or 0.0, next(self._numbers), flight, future)
            heapq.heappush(self._promises, promise)
            if self._promises[0] is promise:  # otherwise the thread is to wake up earlier anyway
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; futures that are not complete fail. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        hurry_this_thread()
        while (promise := self._next()) is not None:
            self._keep(promise)
        for promise in self._promises:
            promise.future.set_exception(RuntimeError("the process group of the emulated fabric was destroyed"))
        self._promises.clear()

    def _next(self) -> _Promise | None:
        """Return the next promise that is due, or ``None`` when the thread shall end."""
        with self._changed:
            while not self._is_stopped:
                if not self._promises:
                    self._changed.wait()
                elif (rest_s := self._promises[0].look_s - time.monotonic()) > 0:
                    self._changed.wait(rest_s)
                else:
                    return heapq.heappop(self._promises)
        return None

    def _keep(self, promise: _Promise) -> None:
        """Complete the future, or look again later."""
        flight, look_s = promise.flight, promise.flight.next_look_s(time.monotonic())
        if look_s is not None:
            promise.look_s = look_s
            with self._changed:
                heapq.heappush(self._promises, promise)
            return
        try:
            flight.settle(since_s=promise.since_s)
        except BaseException as error:  # it belongs to whoever waits for the future
            promise.future.set_exception(error)
        else:
            promise.future.set_result(flight.result)
