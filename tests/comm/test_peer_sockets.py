"""Words between the processes of one machine. Threads stand for the processes: each has sockets of its own."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from megabucket.comm.samehost import PeerSockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only, as copies between processes are")


def never() -> bool:
    return False


def on_ranks(function: Callable[[PeerSockets, int], Any], *, ranks: int, timeout_s: float = 20.0) -> list[Any]:
    """Return what the function gives on each rank."""
    told: dict[int, bytes] = {}
    have_told = threading.Barrier(ranks, timeout=20)

    def on_rank(rank: int) -> Any:
        def send_to_all(word: bytes) -> list[bytes]:
            told[rank] = word
            have_told.wait()
            return [told[other] for other in range(ranks)]

        sockets = PeerSockets(send_to_all, rank=rank, size=ranks, timeout_s=timeout_s)
        try:
            return function(sockets, rank)
        finally:
            sockets.close()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(on_rank, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_rank_hears_all_words_round_by_round(ranks):
    def rounds(sockets: PeerSockets, rank: int) -> list[list[list[int]]]:
        return [sockets.exchange([rank * 2**40 + number] * length, never) for number, length in enumerate([1, 3, 1, 4097])]

    expected = [[[rank * 2**40 + number] * length for rank in range(ranks)] for number, length in enumerate([1, 3, 1, 4097])]

    assert on_ranks(rounds, ranks=ranks) == [expected] * ranks


def test_a_rank_that_is_gone_is_an_error_in_the_words_of_gloo():
    def leave(sockets: PeerSockets, rank: int) -> str:
        if rank == 1:
            return "left"
        with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
            sockets.exchange([1], never)
        return "noticed"

    assert on_ranks(leave, ranks=2) == ["noticed", "left"]


def test_a_rank_that_says_nothing_is_an_error_after_the_time_limit():
    done = threading.Event()

    def keep_silent(sockets: PeerSockets, rank: int) -> str:
        if rank == 1:
            done.wait(20)
            return "silent"
        with pytest.raises(RuntimeError, match=r"^Timed out waiting for another rank to read"):
            sockets.exchange([1], never)
        done.set()
        return "noticed"

    assert on_ranks(keep_silent, ranks=2, timeout_s=0.1) == ["noticed", "silent"]


def test_who_must_stop_waits_no_longer():
    noticed, started_s = threading.Event(), time.monotonic()

    def stop(sockets: PeerSockets, rank: int) -> str:
        if rank == 1:
            noticed.wait(20)
            return "silent"
        with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
            sockets.exchange([1], lambda: True)
        noticed.set()
        return "stopped"

    assert on_ranks(stop, ranks=2, timeout_s=60.0) == ["stopped", "silent"]
    assert time.monotonic() - started_s < 10


def test_ranks_that_say_more_than_others_have_launched_something_else():
    def say(sockets: PeerSockets, rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            sockets.exchange([1] * (2 + rank), never)
        return str(caught.value)

    errors = on_ranks(say, ranks=2)

    assert "rank 1 has launched another batch than rank 0" in errors
    assert set(errors) <= {
        "rank 1 has launched another batch than rank 0",
        "rank 0 has launched another batch than rank 1",
        "Connection closed by peer",  # the other one was first
    }


def test_descriptors_of_a_program_with_many_files_do():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this system lets no process open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert on_ranks(lambda sockets, rank: sockets.exchange([rank], never), ranks=2) == [[[0], [1]]] * 2
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_waits_for_words_is_woken_up_by_close():
    has_heard = threading.Event()

    def wait(sockets: PeerSockets, rank: int) -> str:
        if rank == 1:
            has_heard.wait(20)
            return ""
        threading.Timer(0.05, sockets.close).start()
        with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
            sockets.exchange([1], never)
        has_heard.set()
        return "woken up"

    assert on_ranks(wait, ranks=2) == ["woken up", ""]


def test_closing_leaves_no_descriptor_and_may_be_done_again():
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()

    on_ranks(lambda sockets, _: sockets.close(), ranks=3)

    assert count() == before


def test_a_stranger_is_turned_away():
    with socket.socket(socket.AF_UNIX) as stranger, ThreadPoolExecutor(1) as second:
        names: SimpleQueue[bytes] = SimpleQueue()
        others: list[Any] = []

        def send_to_all(word: bytes) -> list[bytes]:
            """Knock before the other rank does."""
            stranger.connect(word)
            others.append(second.submit(PeerSockets, lambda own: names.put(own) or [word, own], rank=1, size=2, timeout_s=20.0))
            return [word, names.get(timeout=20)]

        first = PeerSockets(send_to_all, rank=0, size=2, timeout_s=20.0)
        other = others[0].result()

        heard = second.submit(other.exchange, [1], never)
        assert first.exchange([0], never) == heard.result() == [[0], [1]]
        assert not stranger.recv(1)
        first.close()
        other.close()


def test_a_rank_that_never_comes_is_an_error():
    with pytest.raises(TimeoutError):
        PeerSockets(lambda word: [word, b" "], rank=0, size=2, timeout_s=0.1)
