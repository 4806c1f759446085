"""Ranks that are meant to die: processes of one test, with signals, stores of several kinds, and times on one clock.

A test starts a ``Crew`` with a top-level function, which runs as ``function(place, *args)`` on every rank. What a rank reports
or returns, or the error that ended it, comes with the moment it happened, on the monotonic clock all processes of a host
share. Everything has a time limit, and no process outlives its crew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_S = 60.0


@dataclass(frozen=True)
class Message:
    """Something a rank said. ``kind`` is its own word, or ``returned`` or ``raised`` (an error, and its traceback)."""

    kind: str
    content: Any
    at_s: float
    traceback: str = ""


@dataclass(frozen=True)
class Place:
    """What a rank knows about its place."""

    index: int
    size: int
    connection: Connection

    def report(self, kind: str, content: Any = None) -> None:
        """Tell the test something."""
        self.connection.send(Message(kind, content, time.monotonic()))

    def wait_for_word(self, timeout_s: float = 30.0) -> None:
        """Return when the test has called ``Crew.tell``."""
        assert self.connection.poll(timeout_s), "the test never said a word"
        self.connection.recv()


class Crew:
    """The processes of one test."""

    def __init__(self, processes: list[multiprocessing.process.BaseProcess], connections: list[Connection]) -> None:
        self._processes = processes
        self._connections = connections

    def expect(self, rank: int, kind: str, timeout_s: float = 20.0) -> Message:
        """Return the next message of a rank, which must be of the kind."""
        assert self._connections[rank].poll(timeout_s), f"rank {rank} said nothing for {timeout_s} s instead of {kind!r}"
        try:
            message: Message = self._connections[rank].recv()
        except EOFError:
            raise AssertionError(f"rank {rank} died instead of {kind!r}") from None
        assert message.kind == kind, f"rank {rank}: {message.kind} {message.content!r} instead of {kind!r}\n{message.traceback}"
        return message

    def expect_all(self, kind: str, ranks: list[int] | None = None, timeout_s: float = 20.0) -> list[Message]:
        """Return the next message of each of the ranks."""
        return [self.expect(rank, kind, timeout_s) for rank in (ranks if ranks is not None else range(len(self._processes)))]

    def tell(self, rank: int) -> None:
        """Let the rank return from ``wait_for_word``."""
        self._connections[rank].send("go on")

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal and return the moment."""
        pid = self._processes[rank].pid
        assert pid is not None
        at_s = time.monotonic()
        os.kill(pid, number)
        return at_s

    def join(self, rank: int, timeout_s: float = 10.0) -> int | None:
        """Return the exit code of a process that ends, or ``None`` when it does not."""
        self._processes[rank].join(timeout_s)
        return self._processes[rank].exitcode

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()


@contextmanager
def crew(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    tcp_port: int | None = None,
    is_host_first: bool = False,
    group_timeout_s: float = 60.0,
) -> Iterator[Crew]:
    """Start processes that run ``function(place, *args)`` as ranks of the default group; end them all afterwards.

    Args:
        tcp_port: of a TCP store on this host; without, the ranks meet in a file.
        is_host_first: the TCP store is in the process of the first rank.
    """
    # Forked from a server that has loaded torch (tests/conftest.py): starting is quick. They end without Python's farewells
    # (os._exit).
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="megabucket-crew-", ignore_cleanup_errors=True) as directory:
        meeting = tcp_port if tcp_port is not None else str(Path(directory) / "store")
        processes, connections = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, ranks, meeting, is_host_first and rank == 0, group_timeout_s, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        started = Crew(processes, connections)
        try:
            started.expect_all("started", timeout_s=START_S)
            yield started
        finally:
            started.end()


def _serve(
    connection: Connection,
    rank: int,
    size: int,
    meeting: int | str,
    is_host: bool,
    group_timeout_s: float,
    function: Callable[..., Any],
    args: Any,
) -> None:
    warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if isinstance(meeting, int):
        store: dist.Store = dist.TCPStore("127.0.0.1", meeting, is_master=is_host, wait_for_workers=False)
    else:
        store = dist.FileStore(meeting, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=group_timeout_s))
    place = Place(rank, size, connection)
    place.report("started")
    try:
        place.report("returned", function(place, *args))
    except BaseException as error:
        connection.send(Message("raised", error, time.monotonic(), traceback.format_exc()))
    connection.poll(None)  # until the test ends it: who sees it exit could take that for the fault
