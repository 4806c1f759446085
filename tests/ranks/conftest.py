"""The pool of ranks, one per test run, and the single process to compare with."""

from collections.abc import Iterator

import pytest
import torch
from cells import SingleProcess
from pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as the ranks do, so that matrix products round alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def alone() -> SingleProcess:
    return SingleProcess()
