"""The pool of ranks, one per test run, and the single process to compare with."""

from collections.abc import Iterator

import pytest
from cells import SingleProcess
from pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    # Forked ranks end without the interpreter's shutdown, in which a thread that torch keeps for a group of DDP or FSDP2 may
    # abort the process. Programs that end by themselves are those of test_end_of_a_run.py.
    pool = WorkerPool("forkserver")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool_of_one() -> Iterator[WorkerPool]:
    pool = WorkerPool(num_ranks=1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool_of_two() -> Iterator[WorkerPool]:
    pool = WorkerPool(num_ranks=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool_of_three() -> Iterator[WorkerPool]:
    pool = WorkerPool(num_ranks=3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def alone() -> SingleProcess:
    return SingleProcess()
