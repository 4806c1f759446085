"""The pool itself: a test tool that lies would hide everything else."""

import warnings

import pytest
from pool import Rank, RankFailedError, WorkerPool

pytestmark = pytest.mark.dist


def warn_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        warnings.warn("look here", stacklevel=1)


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
