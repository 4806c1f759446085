"""Words between the processes of one machine. Threads stand for the processes: each has sockets of its own."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megabucket.comm.wires import Wires, can_meet

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="Linux only, as reading other processes is")


def on_ranks(function: Callable[[Wires, int], Any], *, ranks: int, timeout_s: float = 20.0) -> list[Any]:
    """Return what the function gives on each rank."""
    told: dict[int, bytes] = {}
    have_told = threading.Barrier(ranks, timeout=20)

    def on_rank(rank: int) -> Any:
        def tell_all(word: bytes) -> list[bytes]:
            told[rank] = word
            have_told.wait()
            return [told[other] for other in range(ranks)]

        wires = Wires(tell_all, rank=rank, size=ranks, timeout_s=timeout_s)
        try:
            return function(wires, rank)
        finally:
            wires.close()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(on_rank, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_rank_hears_all_words_round_by_round(ranks):
    def rounds(wires: Wires, rank: int) -> list[list[list[int]]]:
        return [wires.exchange([rank * 2**40 + number] * length) for number, length in enumerate([1, 3, 1, 4097])]

    expected = [[[rank * 2**40 + number] * length for rank in range(ranks)] for number, length in enumerate([1, 3, 1, 4097])]

    assert on_ranks(rounds, ranks=ranks) == [expected] * ranks


def test_who_listens_wakes_up_at_a_ring_and_at_a_word_and_loses_no_word():
    may_speak = threading.Event()

    def listen(wires: Wires, rank: int) -> Any:
        if rank == 1:
            may_speak.wait(20)
            return wires.exchange([1])
        wires.ring()  # before anybody listens
        heard = [wires.listen()]
        threading.Timer(0.05, wires.ring).start()
        heard.append(wires.listen())
        threading.Timer(0.05, may_speak.set).start()
        heard.append(wires.listen())
        return heard, wires.exchange([0])

    assert on_ranks(listen, ranks=2) == [([False, False, True], [[0], [1]]), [[0], [1]]]


def test_a_rank_that_is_gone_or_silent_is_an_error():
    def leave(wires: Wires, rank: int) -> str:
        if rank == 1:
            return "left"
        assert wires.listen()
        with pytest.raises(ConnectionError):
            wires.exchange([1])
        return "noticed"

    def keep_silent(wires: Wires, rank: int) -> str:
        if rank == 1:
            done.wait(20)
            return "silent"
        with pytest.raises(TimeoutError):
            wires.exchange([1])
        done.set()
        return "noticed"

    done = threading.Event()

    assert on_ranks(leave, ranks=2) == ["noticed", "left"]
    assert on_ranks(keep_silent, ranks=2, timeout_s=0.1) == ["noticed", "silent"]


def test_descriptors_of_a_program_with_many_files_do():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this system lets no process open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:

        def listen(wires: Wires, rank: int) -> bool:
            wires.exchange([rank])
            return rank == 1 or wires.listen()  # until the other rank is gone

        assert on_ranks(listen, ranks=2) == [True, True]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_waits_for_words_is_woken_up_by_close():
    def wait(wires: Wires, rank: int) -> str:
        if rank == 1:
            has_heard.wait(20)
            return ""
        threading.Timer(0.05, wires.close).start()
        with pytest.raises(OSError, match=r"gone|closed|Bad file"):
            wires.exchange([1])
        has_heard.set()
        return "woken up"

    has_heard = threading.Event()

    assert on_ranks(wait, ranks=2) == ["woken up", ""]


def test_ranks_meet_in_one_network_only():
    assert can_meet(lambda word: [word, word])
    assert not can_meet(lambda word: [word, b"net:[1]"])
    with mock.patch.object(Path, "readlink", side_effect=OSError):
        assert not can_meet(lambda word: [word, word])


@pytest.mark.parametrize("last_words", [b"", b"\0" * 24])
def test_a_stranger_is_turned_away(last_words):
    with socket.socket(socket.AF_UNIX) as stranger, ThreadPoolExecutor(1) as second:

        def tell_all(word: bytes) -> list[bytes]:
            """Knock before the other rank does."""
            stranger.connect(word.split(b" ")[0])
            stranger.sendall(last_words)
            stranger.shutdown(socket.SHUT_WR)
            made = second.submit(Wires, lambda own: [word, own], rank=1, size=2, timeout_s=20.0)
            others.append(made)
            return [word, b" "]

        others: list[Any] = []
        first = Wires(tell_all, rank=0, size=2, timeout_s=20.0)
        other = others[0].result()
        heard = second.submit(other.exchange, [1])

        assert first.exchange([0]) == heard.result() == [[0], [1]]
        assert not stranger.recv(1)
        first.close()
        other.close()


def test_a_rank_that_never_comes_is_an_error():
    with pytest.raises(TimeoutError):
        Wires(lambda word: [word, b" "], rank=0, size=2, timeout_s=0.1)
