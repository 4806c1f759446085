"""Several heartbeats over one store in one process: what they write, read and agree on."""

import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from megabucket.comm.communicator import LaunchCount, RankState
from megabucket.comm.liveness.heartbeat import Heartbeat
from megabucket.errors import PeerLostError

STORE_HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def finding(text):
    return PeerLostError(ranks=(1,), states=(text,), during="noticed")


@pytest.fixture
def world():
    """Make heartbeats of ranks over one store; they are stopped afterwards."""
    made, store = [], dist.HashStore()

    def make(rank, *, members=(0, 1, 2), every_s=None, is_wanted=lambda: True, over=store):
        made.append(
            Heartbeat(
                over,
                rank=rank,
                members=members,
                state=RankState(),
                launches=LaunchCount(),
                every_s=every_s,
                is_wanted=is_wanted,
            )
        )
        return made[-1]

    yield make
    for heartbeat in made:
        heartbeat.stop()
        assert not heartbeat._thread.is_alive()


def test_a_rank_sees_who_has_come_and_not_itself(world):
    first, _ = world(0), world(2)

    view = first.ask(5.0)

    assert list(view.beats) == [2]
    assert view.beats[2].process == first.process  # one process plays all ranks here
    assert (view.beats[2].number, view.beats[2].every_s, view.beats[2].has_left) == (1, None, False)


def test_beats_go_on_and_carry_the_progress(world):
    first, second = world(0), world(1, every_s=0.02)
    second.state.progress.step, second.state.progress.phase, second.state.progress.bucket = 7, "forward", 3
    before = first.ask(5.0).beats[1]

    time.sleep(0.2)
    after = first.ask(5.0).beats[1]

    assert after.number >= before.number + 2
    assert after.place == "forward, step 7, bucket 3"


def test_who_the_others_are_is_known_before_anybody_asks(world):
    first, _, _ = world(0, every_s=0.02), world(1), world(2)

    deadline_s = time.monotonic() + 5
    while len(first.view.beats) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    seen = first.view
    time.sleep(0.1)

    assert list(seen.beats) == [1, 2]
    assert first.view is seen  # and then nothing is read any more


def test_without_a_period_there_is_one_beat(world):
    first, _ = world(0), world(1)

    time.sleep(0.1)

    assert first.ask(5.0).beats[1].number == 1


def test_requests_renew_the_view_in_the_background(world):
    first, second = world(0), world(1, every_s=0.02)
    before = first.ask(5.0).beats[1].number

    deadline_s = time.monotonic() + 5
    while first.view.beats[1].number == before and time.monotonic() < deadline_s:
        first.request()  # at most one at a time
        assert first._mailbox.qsize() <= 1
        time.sleep(0.001)

    assert first.view.beats[1].number > before
    assert first.view.beats[1].process == second.process


def test_the_first_finding_counts_for_all(world):
    ranks = [world(rank) for rank in range(3)]

    ranks[2].post(finding("died"))
    assert ranks[2].ask(5.0).finding.states == ("died",)
    ranks[0].post(finding("froze"))
    assert ranks[0].ask(5.0).finding.states == ("died",)
    assert ranks[1].ask(5.0).finding.states == ("died",)


def test_a_second_communicator_of_a_group_starts_afresh(world):
    before = world(0)
    before.post(finding("died"))
    assert before.ask(5.0).finding.states == ("died",)
    world(1)

    first, second = world(0), world(1)

    assert first.ask(5.0).finding is None
    assert second.ask(5.0).beats.keys() == {0}


def test_a_finding_of_an_attempt_before_a_restart_is_not_read(world):
    store = dist.HashStore()  # a launcher that starts ranks again keeps its store, and gives each attempt a prefix
    before = world(0, over=dist.PrefixStore("attempt 0", store))
    before.post(finding("died"))
    assert before.ask(5.0).finding.states == ("died",)

    again = world(0, over=dist.PrefixStore("attempt 1", store))

    assert again.name == "megabucket/1"
    assert again.ask(5.0).finding is None


def test_stopping_says_farewell_once_the_work_is_done(world):
    first, second = world(0), world(1, every_s=10.0)
    second.launches.last = 5

    second.stop()
    second.stop()
    beat = first.ask(5.0).beats[1]

    assert beat.has_left
    assert beat.num_launched == 5
    assert second.ask(1.0) is None


def test_a_heartbeat_that_is_not_wanted_any_more_ends_by_itself(world):
    wanted = threading.Event()
    wanted.set()
    heartbeat = world(0, every_s=0.02, is_wanted=wanted.is_set)

    wanted.clear()
    heartbeat._thread.join(5.0)

    assert not heartbeat._thread.is_alive()
    assert heartbeat.failure == ""


def test_a_store_whose_host_went_away_ends_the_thread_quietly_and_leaves_the_reason(world, capfd):
    with subprocess.Popen([sys.executable, "-c", STORE_HOST], stdout=subprocess.PIPE, text=True) as host:
        client = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
        heartbeat = world(0, members=(0,), every_s=0.02, over=client)
        assert heartbeat.ask(5.0).num_present == 1  # from now on it only writes, unless it is asked
        assert heartbeat.failure == ""
        host.kill()

    heartbeat._thread.join(5.0)

    assert heartbeat.failure == "ConnectionResetError: the host of the store has closed the connection"
    assert heartbeat.ask(1.0) is None
    assert capfd.readouterr().err == ""  # c10d prints a page for each request over a closed connection


def test_the_store_of_the_group_is_not_kept_alive(world):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    world(0, over=dist.PrefixStore("group", store))

    del store

    dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # the port is free again
