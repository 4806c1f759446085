"""The pool of ranks, one per test run, and the single process to compare with."""

from collections.abc import Iterator

import pytest
from cells import SingleProcess
from pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def alone() -> SingleProcess:
    return SingleProcess()
