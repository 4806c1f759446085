"""``ProfilerRanges``: a recorder that opens and closes named ranges for profilers. No torch.

::

    |- launch bucket 0 -|  |- launch bucket 1 -|  |- launch fence -|  |- wait for bucket 0 -|  |-------------- optimizer ----
    |-- all_reduce ---|    |-- all_reduce ---|                                                     |- launch param gather 1 -|

Buckets in flight overlap, but ranges of a thread must nest. So the ranges are the calls on the caller's thread: the launch of
each collective, inside which profilers show the back-end's own range, and the wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from megabucket.trace.recorder import Launch, Moment

_CALLS: Final = {"launched": "launch", "wait_start": "wait for"}


class ProfilerRanges:
    """The recorder behind ``profiler_ranges=True``.

    Args:
        new_range: returns the context of a range, for instance ``torch.profiler.record_function``.
    """

    records_time: Final = False
    """No clock is read."""

    def __init__(self, new_range: Callable[[str], AbstractContextManager[object]]) -> None:
        self._new_range = new_range
        self._phase: AbstractContextManager[object] | None = None
        self._call: AbstractContextManager[object] | None = None

    def note_moment(self, label: str, moment: Moment) -> None:
        """Open the range of a launch or a wait, or close that of a wait. Completion, in a thread of gloo, changes nothing."""
        if moment != "done":
            self._end_call()
        if moment in _CALLS:
            self._call = self._begin(f"{_CALLS[moment]} {label}")

    def record_launch(self, launch: Launch) -> None:  # noqa: ARG002 - the port's
        """Close the range of a launch."""
        self._end_call()

    def enter_phase(self, step: int, phase: str) -> None:  # noqa: ARG002 - the port's
        """Close the range of the previous phase, and a call that an exception has left open in it."""
        self._end_call()
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = self._begin(phase) if phase == "optimizer" else None

    def note_ready(self, label: str) -> None:
        """Do nothing."""

    def _begin(self, name: str) -> AbstractContextManager[object]:
        opened = self._new_range(f"megabucket: {name}")
        opened.__enter__()
        return opened

    def _end_call(self) -> None:
        if self._call is not None:
            self._call.__exit__(None, None, None)
            self._call = None
