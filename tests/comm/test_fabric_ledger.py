"""The times of the emulated fabric without processes: several ledgers over the same memory stand for the ranks."""

import fcntl
import os
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.testing.fabric.work import NUM_SLOTS, FabricWork, Ledger, Machine, share_memory

MACHINE = 4  # ranks


def file_of(num_bytes):
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)  # noqa: PTH108
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def ledgers(groups):
    """Return, for each group, the ledger of each of its members."""
    machine = Machine(file_of(8 * MACHINE), MACHINE, rank=0)
    made = []
    for members in groups:
        file = file_of(Ledger.NUM_BYTES)
        made.append({rank: Ledger(os.dup(file), machine, members) for rank in members})
        os.close(file)
    return made


def done_s(slot):
    return float(slot["done_s"]) or None


GROUPS = st.lists(
    st.lists(st.integers(0, MACHINE - 1), min_size=2, max_size=MACHINE, unique=True).map(sorted), min_size=1, max_size=3
)


@st.composite
def schedules(draw):
    """Groups, the durations of their collectives, and an order in which the ranks launch their parts."""
    groups = draw(GROUPS)
    durations = [draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)) for _ in groups]
    # Each entry is one launch of one member; a member launches the collectives of a group in their order.
    launches = [(group, rank) for group, members in enumerate(groups) for rank in members for _ in range(len(durations[group]))]
    return groups, durations, draw(st.permutations(launches))


def play(groups, durations, launches):
    """Return the arrivals by group, collective and rank, and the last launch of each collective, one second per launch."""
    made = ledgers(groups)
    arrivals = [[{} for _ in row] for row in durations]
    last_launch = [[0.0] * len(row) for row in durations]
    num_launched = {}
    for now_s, (group, rank) in enumerate(launches, start=1):
        number = num_launched.get((group, rank), 0)
        num_launched[group, rank] = number + 1
        before = [done_s(other) for other in arrivals[group][number].values()]
        assert before == [None] * len(before)  # nobody knows the end before the last one has launched
        arrivals[group][number][rank] = made[group][rank].launch(float(now_s), float(durations[group][number]))
        last_launch[group][number] = float(now_s)
    return arrivals, last_launch


@given(schedules())
def test_collectives_start_when_all_have_launched_and_no_link_carries_two_at_once(schedule):
    groups, durations, launches = schedule
    arrivals, last_launch = play(groups, durations, launches)

    spans = []
    for group, members in enumerate(groups):
        for number, duration_s in enumerate(durations[group]):
            (end_s,) = {done_s(arrival) for arrival in arrivals[group][number].values()}  # the same on every rank
            assert end_s >= last_launch[group][number] + duration_s
            spans.append((end_s - duration_s, end_s, set(members), last_launch[group][number]))
    for start_s, end_s, members, launch_s in spans:
        others = [other for other in spans if other[2] & members and other != (start_s, end_s, members, launch_s)]
        assert all(end_s <= other[0] or other[1] <= start_s for other in others)
        # No link stands idle: it starts at the last launch, or when something before it ends.
        assert start_s == launch_s or start_s in {other[1] for other in others}


def test_a_rank_too_far_ahead_is_refused():
    ((first, second),) = [tuple(made.values()) for made in ledgers([[0, 1]])]
    for number in range(NUM_SLOTS + 2):  # the slots are used again
        slots = [each.launch(float(number), 0.5) for each in (first, second)]
        assert [done_s(slot) for slot in slots] == [number + 0.5] * 2

    for number in range(NUM_SLOTS):
        first.launch(float(number), 0.5)

    with pytest.raises(RuntimeError, match="a rank is 8192 collectives behind on the emulated fabric"):
        first.launch(0.0, 0.5)


def test_threads_never_hold_the_lock_together():
    shared = Machine(file_of(8), 1, rank=0)

    def count():
        for _ in range(300):
            with shared.locked():
                shared.free_s[0] += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert shared.free_s[0] == 4 * 300


def test_a_rank_waits_for_the_lock_of_another_process():
    descriptor, path = tempfile.mkstemp()
    os.ftruncate(descriptor, 8)
    shared, order = Machine(descriptor, 1, rank=0), []

    def take():
        with shared.locked():
            order.append("taken")

    with open(path) as other:  # noqa: PTH123 - a lock belongs to an open file, so this one stands for another process
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(0.05)
        order.append("given back")
        fcntl.flock(other, fcntl.LOCK_UN)
        thread.join()
    os.unlink(path)  # noqa: PTH108

    assert order == ["given back", "taken"]


def test_ranks_that_do_not_share_memory_are_refused(tmp_path):
    store = dist.HashStore()
    store.set("file", str(tmp_path / "missing"))
    store.set("opened/0", "")

    with pytest.raises(ConfigError, match=r"must run on one machine; 1 of 2 could not: rank 1 on .*No such file or directory"):
        share_memory(store, rank=1, size=2, num_bytes=4)


def test_the_first_rank_hears_that_another_one_has_no_such_memory():
    store = dist.HashStore()
    store.set("opened/1", "rank 1 on elsewhere: no such file")

    with pytest.raises(ConfigError, match="must run on one machine; 1 of 2 could not: rank 1 on elsewhere"):
        share_memory(store, rank=0, size=2, num_bytes=4)

    assert not os.path.exists(store.get("file").decode())  # noqa: PTH110


def test_the_shared_file_has_no_name_any_more():
    store = dist.HashStore()

    file = share_memory(store, rank=0, size=1, num_bytes=4)

    assert not os.path.exists(store.get("file").decode())  # noqa: PTH110
    assert os.read(file, 10) == bytes(4)
    os.close(file)


def test_a_future_that_nobody_would_complete_any_more_is_refused_each_time():
    machine = Machine(file_of(8), 1, rank=0)
    ledger = Ledger(file_of(Ledger.NUM_BYTES), machine, [0])
    work = FabricWork(SimpleNamespace(machine=machine), ledger.launch(0.0, 0.0), duration_s=0.0, works=(), result=[])
    machine.nic.stop()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="was destroyed"):
            work.get_future()
