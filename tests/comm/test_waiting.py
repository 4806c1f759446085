"""Slices of a wait, and what the text of a failed work means."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megabucket.comm.liveness.watch import is_lost_connection, is_time_limit, wait_slice

CLOSED = (
    "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2453. This is typically caused by a remote "
    "worker crashing."
)
LIMIT = "[/build/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"


@pytest.fixture
def pair():
    """Two ranks of gloo in one process, one of which can wait for the other."""
    store, groups = dist.HashStore(), {}

    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups.pop(0), groups.pop(1)]


def test_a_wait_that_takes_longer_than_a_slice_harms_nothing(pair):
    values = [torch.ones(2), torch.ones(2)]
    early = pair[0].allreduce([values[0]])
    started_s = time.monotonic()

    is_done = wait_slice(early)
    waited_s = time.monotonic() - started_s
    late = pair[1].allreduce([values[1]])
    while not (wait_slice(early) and wait_slice(late)):
        assert time.monotonic() - started_s < 10

    assert not is_done
    assert 0.09 <= waited_s < 5
    assert [value.tolist() for value in values] == [[2.0, 2.0]] * 2
    assert wait_slice(early)  # again and again


class NeverDone:
    """A work that only ever takes longer."""

    def wait(self, _):
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


def test_a_wait_that_took_long_keeps_nothing_of_the_work():
    """Neither the work nor its tensors: whoever waits for gloo to let go of them would wait for the garbage collector."""
    work = NeverDone()
    reference = weakref.ref(work)
    gc.disable()
    try:
        assert not wait_slice(work)
        del work
        assert reference() is None
    finally:
        gc.enable()


def wait_long(work):
    while not wait_slice(work):
        pass


def test_a_work_that_fails_says_so_and_not_that_it_takes_long(pair):
    work = pair[0].allreduce([torch.ones(2)])
    assert not wait_slice(work)

    pair.pop()  # the other rank's connections are closed

    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        wait_long(work)
    assert is_lost_connection(str(caught.value))


@pytest.mark.parametrize(
    ("failure", "is_lost", "is_limit"),
    [
        (CLOSED, True, False),
        (LIMIT, True, True),
        ("Application timeout caused pair closure", True, True),
        ("[pair.cc:1] Connection reset by peer", True, False),
        ("writev: Broken pipe", True, False),
        ("[pair.cc:1] op.preamble.length <= op.nbytes. 32 vs 20", False, False),
        ("Invalid scalar type", False, False),
    ],
)
def test_only_lost_connections_and_time_limits_mean_that_a_rank_is_lost(failure, is_lost, is_limit):
    assert is_lost_connection(failure) == is_lost
    assert is_time_limit(failure) == is_limit
