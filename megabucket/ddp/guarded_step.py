"""``with ddp.step():`` -- whatever goes wrong inside ends as the same error on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megabucket.ddp.grad_sync import GradSync
from megabucket.errors import ForkedProcessError, GroupDestroyedError, MegabucketError, PeerLostError


@contextmanager
def guarded_step(sync: GradSync) -> Iterator[None]:
    """Run one step; an exception is told to all ranks as a whole before it leaves the block.

    Raises:
        MegabucketError: the error all ranks agreed on, from the exception of this rank.
    """
    try:
        with sync.deferring_failures():
            yield
    except Exception as error:
        agreed = _agree_on(sync, error)
        if agreed is None or agreed is error:
            raise
        raise agreed from error
    except BaseException as error:
        sync.fail(sync.phase, error)
        raise  # an interrupt does not wait for other ranks


def _agree_on(sync: GradSync, error: Exception) -> MegabucketError | None:
    if error is sync.last_error or isinstance(error, PeerLostError | ForkedProcessError | GroupDestroyedError):
        return None
    sync.fail(sync.phase, error)
    return sync.settle()
