"""The thread that completes large batches: what waiters see, and that it does its last jobs unless ranks are lost."""

import threading
from datetime import timedelta

import pytest

from megabucket.comm.liveness.watch import wait_slice
from megabucket.comm.torch import Job, Worker


@pytest.fixture
def worker():
    worker = Worker(name="test-worker")
    worker.begin()
    yield worker
    worker.give_up()
    worker.end(10.0)
    assert "test-worker" not in {thread.name for thread in threading.enumerate()}


class Peer:
    """Another rank, for which a job waits until it comes or is given up."""

    def __init__(self):
        self.comes = threading.Event()

    def job(self):
        def run(must_stop):
            while not self.comes.wait(0.005):
                if must_stop():
                    raise RuntimeError("Connection closed by peer")

        return Job(run)


def test_jobs_are_done_in_the_order_of_their_launch(worker):
    done, peer = [], Peer()
    jobs = [peer.job(), *(Job(lambda _, number=number: done.append(number)) for number in range(5))]
    for job in jobs:
        worker.jobs.put(job)

    assert done == []
    peer.comes.set()
    for job in jobs:
        job.wait()

    assert done == [0, 1, 2, 3, 4]


def test_a_job_is_waited_for_in_slices_as_a_work_of_gloo_is(worker):
    peer = Peer()
    job = peer.job()
    worker.jobs.put(job)

    assert not wait_slice(job)
    assert not job.is_completed()
    peer.comes.set()
    while not wait_slice(job):
        pass

    assert job.is_completed()
    assert job.wait(timedelta(seconds=0))  # again and again


def test_a_job_that_fails_says_so_to_each_waiter_and_the_next_one_is_done(worker):
    def fail(_):
        raise ValueError("no such memory")

    failed, next_one = Job(fail), Job(lambda _: None)
    for job in (failed, next_one):
        worker.jobs.put(job)

    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^no such memory$") as caught:
            failed.wait()
        errors.append(caught.value)
    assert next_one.wait()
    assert errors[0] is not errors[1]  # one that is raised twice would carry both tracebacks


def test_the_end_waits_for_a_rank_that_comes_late(worker):
    peer = Peer()
    job = peer.job()
    worker.jobs.put(job)
    threading.Timer(0.1, peer.comes.set).start()

    worker.end(20.0)

    assert job.is_completed()
    assert job.wait()


def test_the_end_waits_for_nobody_when_ranks_are_lost(worker):
    job = Peer().job()
    worker.jobs.put(job)

    worker.give_up()
    worker.end(20.0)

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        job.wait()


def test_the_end_waits_no_longer_than_its_time_limit(worker):
    job = Peer().job()
    worker.jobs.put(job)

    worker.end(0.05)  # and then the job must stop

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        job.wait()


def test_a_worker_that_never_began_ends_at_once():
    worker = Worker(name="never begun")

    worker.end(20.0)
    worker.end(20.0)
