"""When is a bucket group complete? Counts gradients per parameter; learns in the first step how many to expect.

A parameter usually receives one gradient per backward, but several when reentrant activation checkpointing re-runs a layer
that is used twice, or when the last microbatch runs several backwards. Nothing in the model says so in advance, so the first
step only counts; from then on a group is complete when every parameter has received as many gradients as it did then.

A step with fewer gradients is still right: the group is sent at the end of the step. A step with more gradients is refused
(a gradient comes too late), and the step after it only counts again.
"""

from __future__ import annotations

from collections.abc import Sequence


class Readiness:
    """Counts gradients of the parameters ``0 .. num_params - 1`` within one step. Every call is O(1) but the resets."""

    __slots__ = ("_counts", "_expected", "_num_complete")

    def __init__(self, num_params: int) -> None:
        self._counts = [0] * num_params
        self._expected: list[int] | None = None
        self._num_complete = 0

    def mark(self, param: int) -> bool:
        """Count one gradient; return whether it makes the group complete."""
        return self.mark_all((param,))

    def mark_all(self, params: Sequence[int]) -> bool:
        """Count one gradient of each; return whether one of them makes the group complete."""
        counts, expected = self._counts, self._expected
        num_complete = 0
        for param in params:
            count = counts[param] + 1
            counts[param] = count
            if expected is not None and count == expected[param]:
                num_complete += 1
        self._num_complete += num_complete
        return num_complete > 0 and self._num_complete == len(counts)

    @property
    def num_incomplete(self) -> int:
        """How many parameters have received fewer gradients than expected; all of them while nothing is known."""
        return len(self._counts) - self._num_complete

    def unlearn(self) -> None:
        """Go back to before the first step, because this one brought more gradients than that one had."""
        self._expected = None
        self.abandon_step()

    def abandon_step(self) -> None:
        """Forget the counts of a step that was cut short: it teaches nothing."""
        self._counts = [0] * len(self._counts)
        self._num_complete = 0

    def finish_step(self) -> None:
        """Learn from the first step that had gradients, and forget the counts."""
        if self._expected is None and any(self._counts):
            # A parameter without a gradient still holds its group back: sending early could only lose a later gradient.
            self._expected = [max(count, 1) for count in self._counts]
        self.abandon_step()
