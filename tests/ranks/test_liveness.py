"""Ranks that die, freeze, dawdle or are interrupted: who notices, when, and in which words. Real processes, real signals."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from crew import Message, Place, crew

import megabucket.comm.torch
from megabucket.comm import AllReduce, Handle, Liveness, ProcessGroupCommunicator
from megabucket.errors import ForkedProcessError, GroupDestroyedError, PeerLostError

pytestmark = pytest.mark.dist

DEAD_NOTICED_S = 5.0  # a fraction of a second on a quiet machine; without a sign of life only after 20
INTERRUPT_NOTICED_S = 5.0  # a fraction of it, too; otherwise when the wait ends
QUICK = Liveness(heartbeat_s=0.3, dead_after_s=1.5, straggler_warning_s=None)
PATIENT = Liveness(heartbeat_s=0.3, dead_after_s=20.0, straggler_warning_s=None)


def reduce_ones(communicator: ProcessGroupCommunicator, *, label: str = "bucket 2") -> tuple[Handle, torch.Tensor]:
    ones = torch.ones(1000)
    return communicator.launch([AllReduce(ones)], label=label), ones


def first_reduction(communicator: ProcessGroupCommunicator) -> None:
    handle, ones = reduce_ones(communicator)
    handle.wait()
    assert ones[0].item() == communicator.size


def made(liveness: Liveness | None) -> ProcessGroupCommunicator:
    communicator = ProcessGroupCommunicator(None, liveness=liveness)
    communicator.progress.step = 12
    communicator.progress.phase = "forward"
    first_reduction(communicator)
    return communicator


def lost_errors(messages: list[Message]) -> list[PeerLostError]:
    for message in messages:
        assert isinstance(message.content, PeerLostError), message.traceback
    return [message.content for message in messages]


# Dead processes #


def wait_without_the_last(place: Place, liveness: Liveness | None, busy_s: float = 0.0) -> None:
    """The last rank never launches; the first one is busy for a while before it waits."""
    communicator = made(liveness)
    place.report("ready")
    if place.index == place.size - 1:
        time.sleep(60)
    communicator.progress.phase = "backward"
    handle, _ = reduce_ones(communicator)
    if place.index == 0:
        time.sleep(busy_s)
    place.report("waiting")
    handle.wait()


@pytest.mark.parametrize(("ranks", "liveness"), [(2, PATIENT), (3, PATIENT), (4, PATIENT), (4, None)])
def test_a_killed_process_is_noticed_before_its_beats_are_missed_on_every_rank_in_the_same_words(ranks, liveness):
    alive = list(range(ranks - 1))
    with crew(wait_without_the_last, liveness, ranks=ranks) as ours:
        ours.expect_all("ready")
        ours.expect_all("waiting", alive)
        time.sleep(0.7)
        killed_s = ours.signal(ranks - 1, signal.SIGKILL)
        messages = ours.expect_all("raised", alive)

    errors = lost_errors(messages)
    print("noticed after", [f"{message.at_s - killed_s:.3f} s" for message in messages])
    assert [error.ranks for error in errors] == [(ranks - 1,)] * len(alive)
    assert len({str(error) for error in errors}) == 1
    assert max(message.at_s for message in messages) - killed_s <= DEAD_NOTICED_S
    assert "while waiting for bucket 2 of step 12 (backward)" in errors[0].during
    assert errors[0].states[0].startswith("died: process ")
    assert ("last seen in forward, step 12" in errors[0].states[0]) == (liveness is not None)


def test_who_comes_late_to_the_wait_reads_who_was_found_first_although_the_finder_is_gone_by_then():
    with crew(wait_without_the_last, PATIENT, 1.5, ranks=3) as ours:
        ours.expect_all("ready")
        ours.expect(1, "waiting")
        ours.signal(2, signal.SIGKILL)
        (finder,) = lost_errors([ours.expect(1, "raised")])
        ours.signal(1, signal.SIGKILL)
        ours.expect(0, "waiting")
        (late,) = lost_errors([ours.expect(0, "raised")])

    assert late.ranks == (2,)
    assert str(late) == str(finder)


def kill_one_in_a_tcp_store(port: int) -> tuple[list[Message], float]:
    with crew(wait_without_the_last, PATIENT, ranks=3, tcp_port=port) as ours:
        ours.expect_all("ready")
        ours.expect_all("waiting", [0, 1])
        time.sleep(0.7)
        killed_s = ours.signal(2, signal.SIGKILL)
        return ours.expect_all("raised", [0, 1]), killed_s


def test_a_killed_process_is_noticed_over_a_tcp_store_too():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    messages, killed_s = kill_one_in_a_tcp_store(store.port)

    errors = lost_errors(messages)
    assert [error.ranks for error in errors] == [(2,), (2,)]
    assert str(errors[0]) == str(errors[1])
    assert max(message.at_s for message in messages) - killed_s <= DEAD_NOTICED_S


def test_a_killed_process_is_noticed_although_it_takes_the_store_with_it():
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    with crew(wait_without_the_first, ranks=3, tcp_port=port, is_host_first=True) as ours:
        ours.expect_all("ready")
        ours.expect_all("waiting", [1, 2])
        time.sleep(0.7)
        killed_s = ours.signal(0, signal.SIGKILL)
        messages = ours.expect_all("raised", [1, 2])

    errors = lost_errors(messages)
    assert [error.ranks for error in errors] == [(0,), (0,)]
    assert str(errors[0]) == str(errors[1])  # nobody could tell anybody, so only what all can see is in the text
    assert max(message.at_s for message in messages) - killed_s <= DEAD_NOTICED_S


def wait_without_the_first(place: Place) -> None:
    communicator = made(PATIENT)
    place.report("ready")
    if place.index == 0:
        time.sleep(60)
    handle, _ = reduce_ones(communicator)
    place.report("waiting")
    handle.wait()


def wait_on_separate_hosts(place: Place) -> None:
    """As far as looking at processes goes: their ids mean nothing to each other."""
    communicator = made(QUICK)
    assert communicator.link.watch is not None
    heartbeat = communicator.link.watch.heartbeat
    heartbeat.process = heartbeat.process._replace(pid_space=f"host {place.index}")
    time.sleep(0.5)  # a beat
    place.report("ready")
    if place.index == 2:
        time.sleep(60)
    handle, _ = reduce_ones(communicator)
    place.report("waiting")
    handle.wait()


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (signal.SIGKILL, "went away: no sign of life for 0.75 s; last seen in forward, step 12"),
        (signal.SIGSTOP, "froze: no sign of life for 1.5 s; last seen in forward, step 12"),
    ],
)
def test_a_process_on_another_host_is_named_by_its_missing_beats(number, state):
    with crew(wait_on_separate_hosts, ranks=3) as ours:
        ours.expect_all("ready")
        ours.expect_all("waiting", [0, 1])
        signalled_s = ours.signal(2, number)
        messages = ours.expect_all("raised", [0, 1])

    errors = lost_errors(messages)
    print("noticed after", [f"{message.at_s - signalled_s:.3f} s" for message in messages])
    assert [error.ranks for error in errors] == [(2,), (2,)]
    assert str(errors[0]) == str(errors[1])
    assert errors[0].states[0].startswith(state)
    assert max(message.at_s for message in messages) - signalled_s <= QUICK.dead_after_s + 1


def lose_a_rank_and_go_on(place: Place, new_store: str) -> list[float]:
    """After the loss: the same error at each launch, and a group of those that are left."""
    communicator = made(PATIENT)
    place.report("ready")
    if place.index == 2:
        time.sleep(60)
    handle, _ = reduce_ones(communicator)
    with pytest.raises(PeerLostError) as caught:
        handle.wait()
    with pytest.raises(PeerLostError) as again:
        reduce_ones(communicator)
    assert str(again.value) == str(caught.value)
    assert again.value is not caught.value
    communicator.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(new_store, 2), rank=place.index, world_size=2)
    handle, ones = reduce_ones(ProcessGroupCommunicator(None, liveness=PATIENT))
    handle.wait()
    return ones[:3].tolist()


def test_after_a_loss_nothing_can_be_launched_until_those_who_are_left_make_a_group(tmp_path):
    with crew(lose_a_rank_and_go_on, str(tmp_path / "store"), ranks=3) as ours:
        ours.expect_all("ready")
        ours.signal(2, signal.SIGKILL)
        results = [message.content for message in ours.expect_all("returned", [0, 1])]

    assert results == [[2.0, 2.0, 2.0]] * 2


# Frozen processes #


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stopped_process_is_lost_after_dead_after_s_on_every_rank_in_the_same_words(ranks):
    alive = list(range(ranks - 1))
    with crew(wait_without_the_last, QUICK, ranks=ranks) as ours:
        ours.expect_all("ready")
        ours.expect_all("waiting", alive)
        time.sleep(0.5)  # a beat
        stopped_s = ours.signal(ranks - 1, signal.SIGSTOP)
        messages = ours.expect_all("raised", alive)

    errors = lost_errors(messages)
    print("noticed after", [f"{message.at_s - stopped_s:.3f} s" for message in messages])
    assert [error.ranks for error in errors] == [(ranks - 1,)] * len(alive)
    assert len({str(error) for error in errors}) == 1
    assert min(message.at_s for message in messages) - stopped_s >= QUICK.dead_after_s - 0.3  # the last beat was before
    assert max(message.at_s for message in messages) - stopped_s <= QUICK.dead_after_s + 1
    assert errors[0].states[0].startswith("froze: no sign of life for 1.5 s; last seen in forward, step 12")


def wait_for_late_rank(place: Place) -> float:
    communicator = made(QUICK)
    place.report("ready")
    if place.index == 1:
        place.wait_for_word()
    handle, ones = reduce_ones(communicator)
    handle.wait()
    return ones[0].item()


def test_a_process_that_goes_on_in_time_is_not_lost():
    with crew(wait_for_late_rank, ranks=2) as ours:
        ours.expect_all("ready")
        ours.signal(1, signal.SIGSTOP)
        time.sleep(1.0)
        ours.signal(1, signal.SIGCONT)
        time.sleep(1.0)  # the two pauses together are longer than dead_after_s
        ours.signal(1, signal.SIGSTOP)
        time.sleep(1.0)
        ours.signal(1, signal.SIGCONT)
        ours.tell(1)
        results = [message.content for message in ours.expect_all("returned")]

    assert results == [2.0, 2.0]


def test_a_rank_that_was_stopped_itself_does_not_take_the_others_for_lost():
    with crew(wait_for_late_rank, ranks=2) as ours:
        ours.expect_all("ready")
        time.sleep(0.5)
        ours.signal(0, signal.SIGSTOP)
        time.sleep(3.0)  # twice dead_after_s
        ours.signal(0, signal.SIGCONT)
        time.sleep(0.5)
        ours.tell(1)
        results = [message.content for message in ours.expect_all("returned")]

    assert results == [2.0, 2.0]


def hold_the_gil(place: Place) -> None:
    communicator = made(QUICK)
    place.report("ready")
    if place.index == 1:
        communicator.progress.phase = "backward"
        communicator.progress.bucket = 3
        time.sleep(0.5)  # a beat
        ctypes.PyDLL(None).sleep(30)
    reduce_ones(communicator)[0].wait()


def test_a_rank_that_holds_pythons_lock_counts_as_frozen_and_its_last_phase_is_told():
    with crew(hold_the_gil, ranks=2) as ours:
        ours.expect_all("ready")
        (error,) = lost_errors([ours.expect(0, "raised")])

    assert error.ranks == (1,)
    assert error.states[0].startswith("froze: no sign of life for 1.5 s; last seen in backward, step 12, bucket 3")


def host_a_store(connection: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_does_not_answer_any_more_ends_the_wait_with_an_error_that_says_so(number):
    context = multiprocessing.get_context("forkserver")
    ours_end, theirs = context.Pipe()
    host = context.Process(target=host_a_store, args=(theirs,), daemon=True)
    host.start()
    try:
        with crew(wait_for_late_rank, ranks=2, tcp_port=ours_end.recv()) as ours:
            ours.expect_all("ready")
            time.sleep(0.5)
            os.kill(host.pid or 0, number)
            at_s = time.monotonic()
            message = ours.expect(0, "raised")
            ours.tell(1)
    finally:
        host.kill()
        host.join()

    (error,) = lost_errors([message])
    assert error.ranks == ()
    assert "the store of the process group has not answered for 1.5 s" in error.during
    assert message.at_s - at_s <= QUICK.dead_after_s + 1


# Lost while groups are made #


def make_groups_after_a_word(place: Place) -> None:
    """Wrap, which makes groups: torch then waits for the other ranks and the store by itself."""
    make_groups = megabucket.comm.torch.groups_like

    def after_a_word(*arguments: Any) -> list[dist.ProcessGroup]:
        place.report("makes groups")
        place.wait_for_word()
        return make_groups(*arguments)

    with patch.object(megabucket.comm.torch, "groups_like", after_a_word):
        ProcessGroupCommunicator(None, liveness=QUICK, owns_groups=True)


def test_a_process_that_dies_before_it_makes_its_groups_is_noticed_while_the_others_make_theirs():
    with crew(make_groups_after_a_word, ranks=3) as ours:
        ours.expect_all("makes groups")
        killed_s = ours.signal(2, signal.SIGKILL)
        ours.tell(0)
        ours.tell(1)
        messages = ours.expect_all("raised", [0, 1])

    errors = lost_errors(messages)
    assert [error.ranks for error in errors] == [(2,), (2,)]
    assert "while waiting for wrap" in errors[0].during
    assert errors[0].states[0].startswith("died: process ")  # not: no sign of life
    assert max(message.at_s for message in messages) - killed_s <= DEAD_NOTICED_S


def test_a_store_that_stops_answering_while_groups_are_made_ends_the_wait():
    context = multiprocessing.get_context("forkserver")
    ours_end, theirs = context.Pipe()
    host = context.Process(target=host_a_store, args=(theirs,), daemon=True)
    host.start()
    try:
        with crew(make_groups_after_a_word, ranks=2, tcp_port=ours_end.recv()) as ours:
            ours.expect_all("makes groups")
            os.kill(host.pid or 0, signal.SIGSTOP)
            at_s = time.monotonic()
            ours.tell(0)
            ours.tell(1)
            messages = ours.expect_all("raised")
    finally:
        host.kill()
        host.join()

    for error in lost_errors(messages):
        assert "the store of the process group has not answered for 1.5 s: its host 127.0.0.1 may be gone" in error.during
    assert max(message.at_s for message in messages) - at_s <= QUICK.dead_after_s + 1


# Alive, but not there #


def warn_of_a_straggler(place: Place) -> list[str]:
    notices = list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = notices.append
    logging.getLogger("megabucket").addHandler(handler)
    liveness = Liveness(heartbeat_s=0.2, dead_after_s=20, straggler_warning_s=0.8)
    communicator = made(liveness)
    place.report("ready")
    if place.index == 1:
        place.wait_for_word()
    handle, _ = reduce_ones(communicator)
    handle.wait()
    logging.getLogger("megabucket").removeHandler(handler)
    return [f"{notice.levelname} {notice.getMessage()}" for notice in notices]


def test_one_warning_names_the_rank_that_others_wait_for_and_what_it_does():
    with crew(warn_of_a_straggler, ranks=3) as ours:
        ours.expect_all("ready")
        time.sleep(2.5)
        ours.tell(1)
        by_rank = [message.content for message in ours.expect_all("returned")]

    (warning,) = (text for found in by_rank for text in found)  # of the waiting rank that reads all beats
    said = r"WARNING megabucket: \[rank [02]\] has waited ([0-9.]+) s for bucket 2 of step 12 \(forward\): rank 1 is alive"
    waited = re.match(said, warning)
    assert waited is not None
    assert 0.8 <= float(waited[1]) < 2
    assert "rank 1 is alive but has not launched its part; it is in forward, step 12" in warning


def leave_early(place: Place) -> None:
    communicator = made(PATIENT)
    if place.index == 1:
        communicator.close()
        return
    time.sleep(0.5)
    place.report("waiting")
    reduce_ones(communicator)[0].wait()


def test_a_rank_that_detached_while_others_go_on_is_named_at_once():
    with crew(leave_early, ranks=3) as ours:
        ours.expect(1, "returned")
        waiting = ours.expect_all("waiting", [0, 2])
        messages = ours.expect_all("raised", [0, 2])

    errors = lost_errors(messages)
    assert [error.ranks for error in errors] == [(1,), (1,)]
    assert str(errors[0]) == str(errors[1])
    assert errors[0].states == (
        (
            "left: its program ended, its process group was destroyed, or its wrapper was detached, after 1 launches; this "
            "was launch 2"
        ),
    )
    assert max(message.at_s for message in messages) - waiting[0].at_s <= DEAD_NOTICED_S


def come_after_the_time_limit(place: Place) -> None:
    communicator = made(Liveness(heartbeat_s=0.3, dead_after_s=1.9, straggler_warning_s=None))
    if place.index == 1:
        place.wait_for_word()
    reduce_ones(communicator)[0].wait()


def test_a_living_rank_that_misses_the_time_limit_of_the_group_is_named_on_all_ranks_itself_too():
    with crew(come_after_the_time_limit, ranks=3, group_timeout_s=2.0) as ours:
        messages = ours.expect_all("raised", [0, 2])
        ours.tell(1)
        messages.append(ours.expect(1, "raised"))

    errors = lost_errors(messages)
    assert [error.ranks for error in errors] == [(1,)] * 3
    assert len({str(error) for error in errors}) == 1
    assert errors[0].states[0].startswith("did not come in time: it is alive but has not launched its part; it is in forward,")
    assert "the time limit of the process group (2 s) was over" in errors[0].during


class SlowStore(dist.Store):
    """Takes its time for everything once it is slow."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.delay_s = 0.0

    def _slowly(self, function: Any, *args: Any) -> Any:
        time.sleep(self.delay_s)
        return function(*args)

    def set(self, key: str, value: str) -> None:
        self._slowly(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        return self._slowly(self._store.get, key)

    def add(self, key: str, value: int) -> int:
        return self._slowly(self._store.add, key, value)

    def check(self, keys: list[str]) -> bool:
        return self._slowly(self._store.check, keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._slowly(self._store.multi_get, keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._slowly(self._store.wait, keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._slowly(self._store.compare_set, key, expected, desired)


def wait_over_a_slow_store(place: Place, path: str) -> float:
    dist.destroy_process_group()
    store = SlowStore(dist.FileStore(path, place.size))
    dist.init_process_group("gloo", store=store, rank=place.index, world_size=place.size)
    store.delay_s = 0.3
    return wait_for_late_rank(place)


def test_a_slow_store_makes_nobody_look_dead(tmp_path):
    with crew(wait_over_a_slow_store, str(tmp_path / "slow"), ranks=2) as ours:
        ours.expect_all("ready")
        time.sleep(4.0)
        ours.tell(1)
        results = [message.content for message in ours.expect_all("returned")]

    assert results == [2.0, 2.0]


# Signals to the rank that waits #


def be_interrupted(place: Place) -> list[float]:
    communicator = made(PATIENT)
    place.report("ready")
    handle, ones = None, None
    if place.index == 0:
        handle, ones = reduce_ones(communicator)
        try:
            handle.wait()
        except KeyboardInterrupt as interrupt:
            place.report("interrupted", repr(interrupt.__context__))
    place.wait_for_word()
    if handle is None or ones is None:
        handle, ones = reduce_ones(communicator)
    handle.wait()
    first_reduction(communicator)
    return ones[:2].tolist()


def test_an_interrupt_ends_a_wait_at_once_and_harms_neither_the_collective_nor_the_group():
    with crew(be_interrupted, ranks=2) as ours:
        ours.expect_all("ready")
        time.sleep(0.55)
        signalled_s = ours.signal(0, signal.SIGINT)
        interrupted = ours.expect(0, "interrupted")
        ours.tell(0)
        ours.tell(1)
        results = [message.content for message in ours.expect_all("returned")]

    print(f"interrupted after {interrupted.at_s - signalled_s:.3f} s")
    assert interrupted.at_s - signalled_s <= INTERRUPT_NOTICED_S
    if sys.version_info >= (3, 11):  # Python 3.10 runs signal handlers between any two instructions
        assert interrupted.content == "None"  # no "during handling of" a time-out of ours
    assert results == [[2.0, 2.0]] * 2


def handle_sigterm(place: Place) -> float:
    signal.signal(signal.SIGTERM, lambda *_: place.report("handled"))
    return wait_for_late_rank(place)


def test_a_signal_handler_runs_during_a_wait_and_the_wait_goes_on():
    with crew(handle_sigterm, ranks=2) as ours:
        ours.expect_all("ready")
        time.sleep(0.33)
        signalled_s = ours.signal(0, signal.SIGTERM)
        handled = ours.expect(0, "handled")
        ours.tell(1)
        results = [message.content for message in ours.expect_all("returned")]

    assert handled.at_s - signalled_s <= INTERRUPT_NOTICED_S
    assert results == [2.0, 2.0]


# Where nothing may be launched #


def use_in_a_fork(place: Place) -> list[str]:
    communicator = made(PATIENT)
    handle, _ = reduce_ones(communicator) if place.index == 0 else (None, None)
    found = []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reduce_ones(communicator)
        except ForkedProcessError as error:
            os.write(writing, f"{error}\n".encode())
        try:
            if handle is not None:
                handle.wait()
        except ForkedProcessError as error:
            os.write(writing, f"{error}\n".encode())
        communicator.close()  # not the parent's
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        found = lines.read().splitlines()
    os.waitpid(child, 0)
    (handle or reduce_ones(communicator)[0]).wait()  # the parent is as it was
    time.sleep(0.4)
    first_reduction(communicator)
    return found


def test_a_forked_child_is_refused_and_its_parent_goes_on():
    with crew(use_in_a_fork, ranks=2) as ours:
        texts = [message.content for message in ours.expect_all("returned")]

    what = (
        " in a forked child process. The threads of the process group exist in the parent only, so this would wait for ever. "
    )
    remedy = (
        "Train in the process that wrapped the module; start helpers with the 'spawn' method, or let them work on a copy "
        "that was made before the fork (copy.deepcopy(ddp.module))."
    )
    launched, waited = "bucket 2 was launched", "bucket 2 was waited for"
    assert texts[0] == [f"[rank 0] {launched}{what}{remedy}", f"[rank 0] {waited}{what}{remedy}"]
    assert texts[1] == [f"[rank 1] {launched}{what}{remedy}"]


def use_after_destruction(place: Place, path: str) -> list[str]:
    found = []
    default, subgroup = made(PATIENT), ProcessGroupCommunicator(dist.new_group(), liveness=PATIENT)
    first_reduction(subgroup)
    dist.destroy_process_group()
    for again in (False, True):
        if again:
            dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=place.index, world_size=2)
        for communicator in (default, subgroup):
            with pytest.raises(GroupDestroyedError) as caught:
                reduce_ones(communicator)
            found.append(str(caught.value))
    first_reduction(ProcessGroupCommunicator(None, liveness=PATIENT))
    return found


def test_a_destroyed_group_is_refused_also_when_there_is_another_default_group_by_then(tmp_path):
    with crew(use_after_destruction, str(tmp_path / "again"), ranks=2) as ours:
        texts = [message.content for message in ours.expect_all("returned")]

    text = (
        "[rank 0] bucket 2 was launched, but the process group of the wrapper was destroyed, so nothing can be reduced any "
        "more and this replica would go on alone. Call ddp.detach() and wrap the module again over a living group; at the "
        "end of a program call ddp.detach() before destroy_process_group()."
    )
    assert texts[0] == [text] * 4
    assert len(texts[1]) == 4


# The end of the program #

PROGRAM = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from megabucket.comm import AllReduce, Liveness, ProcessGroupCommunicator
from megabucket.errors import PeerLostError

rank, size, store, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if store.isdigit():
    meeting = dist.TCPStore("127.0.0.1", int(store), size, rank == 0, wait_for_workers=False)
else:
    meeting = dist.FileStore(store, size)
dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
communicator = ProcessGroupCommunicator(None, liveness=Liveness(heartbeat_s=0.05, dead_after_s=1.0))
for _ in range(20):
    communicator.launch([AllReduce(torch.ones(10))], label="a").wait()
if how == "frozen":
    print("ready", flush=True)
    time.sleep(0 if rank == 0 else 60)
    try:
        communicator.launch([AllReduce(torch.ones(10))], label="a").wait()
    except PeerLostError as error:
        print(error.ranks, flush=True)
        raise
if how == "destroyed":
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)
print(f"{time.monotonic():.3f}", flush=True)
"""


@contextmanager
def started_programs(ranks: int, store: str, how: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Real programs, which end as programs do, unlike the processes of a crew."""
    with ExitStack() as stack:
        programs = []
        for rank in range(ranks):
            command = [sys.executable, "-W", "error", "-c", PROGRAM, str(rank), str(ranks), store, how]
            program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(program)
            stack.callback(program.kill)
            programs.append(program)
        yield programs


@pytest.mark.parametrize("how", ["nothing", pytest.param("destroyed", marks=pytest.mark.nightly)])
def test_a_program_that_ends_without_detaching_ends_cleanly_and_at_once(how, tmp_path):
    with started_programs(3, str(tmp_path / "store"), how) as programs:
        outputs = [program.communicate(timeout=60) for program in programs]
        ended_s = time.monotonic()

    assert [errors for _, errors in outputs] == ["", "", ""]
    assert [program.returncode for program in programs] == [0, 0, 0]
    assert ended_s - min(float(output) for output, _ in outputs) < 10  # the time limit of the group is 60 s


def test_a_program_ends_although_a_rank_is_frozen_in_its_group(tmp_path):
    """Gloo's threads would wait for the frozen rank, and the end of the program for gloo's threads: here for 60 s."""
    with started_programs(2, str(tmp_path / "store"), "frozen") as programs:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        programs[1].send_signal(signal.SIGSTOP)
        started_s = time.monotonic()
        output, errors = programs[0].communicate(timeout=50)
        ended_s = time.monotonic()

    assert output == "(1,)\n"
    assert programs[0].returncode == 1
    assert "PeerLostError: rank 1 froze" in errors.rstrip().splitlines()[-1]
    assert ended_s - started_s < 20
