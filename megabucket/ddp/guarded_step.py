"""``with ddp.step():`` -- whatever goes wrong inside ends as the same error on all ranks."""

from __future__ import annotations

from types import TracebackType

from megabucket.ddp.step_sync import StepSync
from megabucket.errors import ForkedProcessError, GroupDestroyedError, MegabucketError, PeerLostError


class GuardedStep:
    """One step; an exception is told to all ranks as a whole before it leaves the block.

    A class, not a generator: into a generator no ``StopIteration`` can be thrown, which is how a data loader ends.

    Raises:
        MegabucketError: the error all ranks agreed on, from the exception of this rank.
    """

    def __init__(self, sync: StepSync) -> None:
        self._sync = sync
        self._is_inside_another = sync.defers_failures

    def __enter__(self) -> None:
        self._sync.settle()  # what is pending belongs to the step before
        self._sync.begin_step()
        self._is_inside_another, self._sync.defers_failures = self._sync.defers_failures, True

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._sync.defers_failures = self._is_inside_another
        if error is None:
            self._sync.tell_swallowed()
        elif isinstance(error, Exception):
            agreed = _agree_on(self._sync, error)
            if agreed is not None and agreed is not error:
                raise agreed from error
        elif not self._sync.is_between_steps:
            self._sync.fail(self._sync.phase, error)  # an interrupt does not wait for other ranks


def _agree_on(sync: StepSync, error: Exception) -> MegabucketError | None:
    """Return the error of all ranks about the step that ``error`` has ended; none if it came when the step was over."""
    if error is sync.last_error or isinstance(error, PeerLostError | ForkedProcessError | GroupDestroyedError):
        return None
    agreed = sync.settle()
    if agreed is None and not sync.is_between_steps:
        sync.fail(sync.phase, error)
        return sync.settle()
    sync.note_missed_update(error)
    return agreed
