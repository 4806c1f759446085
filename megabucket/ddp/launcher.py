"""Strictly ordered launches: group ``k`` goes out only after group ``k - 1``, whatever order gradients arrive in.

This is what keeps ranks in step: hooks may fire in any order on each rank, the schedule of collectives never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megabucket.buffer import _ParamAndGradBucketGroup


class InOrderLauncher:
    """Launches bucket groups by index as they become complete.

    Args:
        groups: in launch order.
        launch: starts the gradient sync of one group.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], launch: Callable[[_ParamAndGradBucketGroup], None]) -> None:
        self._groups = groups
        self._launch = launch
        self._is_complete = [False] * len(groups)
        self._next = 0

    @property
    def num_launched(self) -> int:
        """Groups launched in this step; always a prefix of the order."""
        return self._next

    def mark_complete(self, index: int) -> None:
        """Note that a group is complete, and launch every group whose turn has come."""
        self._is_complete[index] = True
        while self._next < len(self._groups) and self._is_complete[self._next]:
            self._launch_next(self._launch)

    def flush(self, launch: Callable[[_ParamAndGradBucketGroup], None] | None = None) -> None:
        """Launch all groups that were not launched yet, complete or not.

        Args:
            launch: another way to start a group than the usual one.
        """
        while self._next < len(self._groups):
            self._launch_next(launch or self._launch)

    def start_step(self) -> None:
        """Begin again with the first group."""
        self._is_complete = [False] * len(self._groups)
        self._next = 0

    def _launch_next(self, launch: Callable[[_ParamAndGradBucketGroup], None]) -> None:
        launch(self._groups[self._next])
        self._next += 1  # only now: a launch that raises is still due
