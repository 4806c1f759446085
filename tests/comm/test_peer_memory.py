"""Who may be read: found out with real processes, without a process group."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
from unittest import mock

import pytest

from megabucket.comm import samehost
from megabucket.comm.liveness.observations import identify_this_process
from megabucket.comm.samehost import find_peer_memory


def hold_nonce(connection):
    """Another process: says where it has a number, and keeps it there until it is told to go."""
    nonce = bytes(range(16))
    kept = ctypes.create_string_buffer(nonce, len(nonce))
    process = identify_this_process()
    spaces = [process.pid_space, samehost.network_space()]
    connection.send({"spaces": spaces, "pid": process.pid, "nonce_address": ctypes.addressof(kept), "nonce": nonce.hex()})
    connection.recv()


@pytest.fixture
def peer():
    ours, theirs = multiprocessing.get_context("forkserver").Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=hold_nonce, args=(theirs,))
    process.start()
    yield ours.recv()
    ours.send("go")
    process.join()


def telling(answers):
    """Return what stands for two ranks that tell each other: the other one says the answers, in turn."""
    said = iter(answers)
    words = []

    def send_to_all(word):
        words.append(word)
        return [word, next(said)]

    return send_to_all, words


def meet(peer, vote=b"yes", **changes):
    send_to_all, words = telling([json.dumps(list({**peer, **changes}.values())).encode(), vote])
    found = find_peer_memory(send_to_all, rank=0)
    assert len(words) == 2  # every rank votes, whatever it has found, so nobody waits for a vote that never comes
    return found, words[1]


def test_a_process_of_this_host_can_be_read_or_is_not(peer):
    found, vote = meet(peer)

    if vote == b"no":
        pytest.skip("here the kernel lets no process read another one's memory")
    assert found is not None
    assert found.pids == (identify_this_process().pid, peer["pid"])


@pytest.mark.parametrize(
    "changes",
    [
        {"spaces": ["another boot pid:[1]", samehost.network_space()]},
        {"spaces": [identify_this_process().pid_space, "net:[1]"]},
        {"nonce": "00" * 16},
        {"nonce_address": 8},
        {"pid": 2**22 + 1},  # nobody
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_who_is_not_what_it_says_is_not_read(peer, changes):
    assert meet(peer, **changes) == (None, b"no")


def test_one_rank_that_cannot_read_keeps_all_from_it(peer):
    found, _ = meet(peer, vote=b"no")

    assert found is None


def test_where_processes_cannot_be_told_apart_nobody_is_read(peer):
    here = identify_this_process()
    with mock.patch.object(samehost, "identify_this_process", return_value=here._replace(pid_space="")):
        assert meet(peer, spaces=["", samehost.network_space()]) == (None, b"no")
    with mock.patch.object(samehost, "network_space", return_value=""):
        assert meet(peer, spaces=[here.pid_space, ""]) == (None, b"no")


def test_where_the_system_has_no_such_call_nobody_is_read(peer):
    with mock.patch.object(samehost, "_process_vm_readv", side_effect=AttributeError("process_vm_readv")):
        assert meet(peer) == (None, b"no")
