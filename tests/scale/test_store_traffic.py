"""What ranks that wrap and wait ask of the store: formulas in docs/scale.md, exact at every number of ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from counting_store import CountingStore

from megabucket.comm.communicator import LaunchCount, RankState
from megabucket.comm.liveness import heartbeat as heartbeat_module
from megabucket.comm.liveness.heartbeat import Heartbeat
from megabucket.comm.liveness.observations import identify_this_process, look_every_s, read_every_s

HOST_SIZE = 4
SIZES = (8, 16, 32, 64, 128)


def formula_of_wrapping(size: int) -> Counter[str]:
    """Each rank comes and then looks once; the first one to look is the watcher."""
    return Counter(
        {
            "add": 3 * size,  # the name of the wrapper, a place in the list of its host, and itself as present
            "compare_set": 3 * size + 1,  # token, finding and claim are there from the start; one rank claims the watch
            "set": 3 * size + 1,  # where it waits (nowhere), its beat, its place in the list; the first one writes the members
            "check": size,  # of the list of its host
            # What has been found and who has come; the list; beats of the ranks of its host, then those of all for the watcher,
            # and again those of their host for the others.
            "multi_get": 4 * size,
        }
    )


def values_of_wrapping(size: int) -> Counter[str]:
    """The part of it that is read."""
    return Counter(
        {
            "check host": HOST_SIZE * size,
            "multi_get finding": size,
            "multi_get watch": size,
            "multi_get present": size,
            "multi_get host": (1 + HOST_SIZE) * size,
            "multi_get rank": (HOST_SIZE - 1) * (2 * size - 1) + (size - 1),
        }
    )


def formula_of_looking(size: int) -> Counter[str]:
    """All ranks wait, and each looks once: two values for each rank, and all beats for the watcher alone."""
    return Counter(
        {
            "multi_get finding": size,
            "multi_get watch": size,
            "compare_set watch": 1,
            "multi_get rank": size - 1,
        }
    )


def formula_of_long_waits(size: int) -> Counter[str]:
    """The same where the waits are written to the board: the watcher reads all of them, to find a cycle."""
    ours = {"check board rank": size, "multi_get board rank": size}
    return formula_of_looking(size) + Counter(ours)


class Ranks:
    """Heartbeats of many ranks over one store, on hosts of four."""

    def __init__(self, size: int) -> None:
        self.store = CountingStore()
        self.heartbeats: list[Heartbeat] = []
        for rank in range(size):
            self.heartbeats.append(
                Heartbeat(
                    self.store,
                    rank=rank,
                    members=range(size),
                    state=RankState(),
                    launches=LaunchCount(),
                    every_s=None,
                    is_wanted=lambda: True,
                )
            )

    def look(self) -> None:
        """Let each rank look once."""
        time.sleep(max(read_every_s(len(self.heartbeats)), look_every_s(len(self.heartbeats))))
        for heartbeat in self.heartbeats:
            before = heartbeat.view
            heartbeat.request()
            while heartbeat.view is before:
                time.sleep(0.0005)

    def flush(self) -> None:
        """Return when all ranks have done what they were asked."""
        for heartbeat in self.heartbeats:
            assert heartbeat.ask(10.0) is not None


@pytest.fixture
def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    """Make ranks; those of one host are neighbours."""
    made: list[Ranks] = []
    process = identify_this_process()

    def identify_next() -> object:
        host = f"host {num_made[0] // HOST_SIZE}"
        num_made[0] += 1
        return process._replace(host=host, pid_space=host)

    num_made = [0]
    monkeypatch.setattr(heartbeat_module, "identify_this_process", identify_next)

    def make(size: int) -> Ranks:
        num_made[0] = 0
        made.append(Ranks(size))
        return made[-1]

    yield make
    for ranks in made:
        for heartbeat in ranks.heartbeats:
            heartbeat.stop()


def reads(values: Counter[str]) -> Counter[str]:
    """Return the counts of what was read."""
    return Counter({name: count for name, count in values.items() if name.startswith(("multi_get", "get", "check"))})


@pytest.mark.parametrize("size", SIZES)
def test_wrapping_asks_the_store_as_often_as_the_formula_says(ranks_of, size):
    ranks = ranks_of(size)

    ranks.flush()

    assert ranks.store.operations == formula_of_wrapping(size)
    assert reads(ranks.store.values) == values_of_wrapping(size)


@pytest.mark.parametrize("size", SIZES)
def test_of_all_waiting_ranks_one_reads_the_beats_of_all(ranks_of, size):
    ranks = ranks_of(size)
    ranks.flush()
    ranks.store.clear()

    ranks.look()

    assert ranks.store.values == formula_of_looking(size)


@pytest.mark.parametrize("size", SIZES)
def test_waits_on_the_board_are_read_by_one_rank(ranks_of, size):
    ranks = ranks_of(size)
    for heartbeat in ranks.heartbeats:
        heartbeat.block("fence")
    ranks.flush()
    ranks.store.clear()

    ranks.look()

    assert ranks.store.values == formula_of_long_waits(size)


def test_what_one_rank_writes_is_no_longer_where_there_are_more_ranks(ranks_of):
    longest = {}
    for size in (8, 64):
        ranks = ranks_of(size)
        for heartbeat in ranks.heartbeats:
            heartbeat.block("fence")
        ranks.flush()
        counts = ranks.store
        longest[size] = {
            name: counts.num_bytes[f"set {name}"] / counts.values[f"set {name}"] for name in ("rank", "board rank")
        }

    assert longest[64]["rank"] <= 250
    assert longest[64]["board rank"] <= 60
    assert longest[64] == pytest.approx(longest[8], abs=2)  # digits


def test_many_values_are_asked_for_in_parts_of_1024():
    """A TCP store of torch 2.13 spends 4 us on each key of a request for 1,024, and 60 us on each key of one for 16,384."""
    store = CountingStore()
    for rank in range(2_500):
        store.set(f"rank/{rank}", f"beat of {rank}")

    values = heartbeat_module._read(store, set(range(2_500)), known={7})

    assert values == {rank: f"beat of {rank}".encode() for rank in range(2_500)}
    assert (store.operations["check"], store.operations["multi_get"]) == (3, 3)


class TestTheWatcher:
    """Who it is, and who follows."""

    def test_a_rank_that_no_longer_waits_lets_another_one_be_the_watcher(self, ranks_of):
        ranks = ranks_of(8)
        ranks.flush()
        assert [one.view.watcher_since_s is not None for one in ranks.heartbeats] == [True] + [False] * 7

        ranks.heartbeats[0].block(None)
        ranks.heartbeats[0].leave_watch()
        deadline_s = time.monotonic() + 10.0
        while ranks.heartbeats[0].view.watcher_since_s is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)  # its thread does so
        for heartbeat in (ranks.heartbeats[3], *ranks.heartbeats[1:]):
            heartbeat.ask(10.0)

        assert [rank for rank, one in enumerate(ranks.heartbeats) if one.view.watcher_since_s is not None] == [3]
        assert len(ranks.heartbeats[3].view.beats) == 7

    def test_a_watcher_that_does_not_renew_its_claim_is_replaced_and_its_host_counts_as_silent_for_so_long(self, ranks_of):
        ranks = ranks_of(8)
        ranks.flush()
        lost, others = ranks.heartbeats[0], ranks.heartbeats[4:]  # those of the other host
        deadline_s = time.monotonic() + 10.0

        while not any(one.view.watcher_since_s for one in others) and time.monotonic() < deadline_s:
            for heartbeat in others:
                heartbeat.ask(10.0)
            time.sleep(0.1)

        (watcher,) = (one for one in others if one.view.watcher_since_s)
        assert sorted(watcher.view.silent_before_s) == [0, 1, 2, 3]
        assert min(watcher.view.silent_before_s.values()) >= 1.0
        assert lost.ask(10.0).watcher_since_s is None  # it comes again, and sees that it was replaced

    def test_a_broken_connection_lets_one_rank_take_the_watch_from_one_that_waits(self, ranks_of):
        ranks = ranks_of(8)
        ranks.flush()

        for heartbeat in ranks.heartbeats[2:5]:
            heartbeat.ask(10.0, takes_watch=True)
        ranks.flush()

        assert [rank for rank, one in enumerate(ranks.heartbeats) if one.view.watcher_since_s] == [2]
