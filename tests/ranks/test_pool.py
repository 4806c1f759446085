"""The pool itself: a test tool that lies would hide everything else."""

import signal
import time
import warnings

import pytest
from pool import Rank, RankFailedError, WorkerPool

pytestmark = pytest.mark.dist


def warn_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        warnings.warn("look here", stacklevel=1)


def answer_late(rank: Rank) -> str:
    time.sleep(0.5)
    return "late"


def answer(rank: Rank) -> str:
    return "at once"


@pytest.fixture(scope="module")
def doomed_pool():
    pool = WorkerPool("forkserver")
    yield pool
    pool.kill()


def test_a_failure_shows_the_traceback_of_its_rank_and_a_warning_is_one(doomed_pool):
    with pytest.raises(RankFailedError, match="--- rank 1 ---") as caught:
        doomed_pool.run(warn_on_rank_1, ranks=2)

    assert "in warn_on_rank_1" in str(caught.value)
    assert "UserWarning: look here" in str(caught.value)
    assert isinstance(caught.value.errors[1], UserWarning)


def test_after_a_call_that_was_interrupted_the_next_one_gets_no_answer_of_it(doomed_pool):
    doomed_pool.run(answer, ranks=2)  # the processes are there

    def time_limit(signal_number: int, frame: object) -> None:
        pytest.fail("the time limit of the test")

    before = signal.signal(signal.SIGALRM, time_limit)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(pytest.fail.Exception):
            doomed_pool.run(answer_late, ranks=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert doomed_pool.run(answer, ranks=2) == ["at once", "at once"]
