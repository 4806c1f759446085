"""``Schedule``: the bucket groups of one wrapper in launch order, and how many of them this step has launched.

In every step each rank launches all groups in this order, whatever hooks do and whatever fails. What a launch finds (values
that are not finite, parameters without a gradient) is noted for the report of this rank. When to launch, and what follows from
the reports of other ranks, is decided by ``GradSync``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.buffer.finite import FiniteTest, any_beyond, find_nonfinite
from megabucket.comm import Communicator
from megabucket.ddp.report import Problem, StepCounters
from megabucket.errors import ConfigError, NonFiniteGradientError


class Schedule:
    """The launches of one wrapper.

    Args:
        groups: in launch order.
        communicator: its progress says which bucket is being launched.
        counters: get the problems that are found.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], communicator: Communicator, counters: StepCounters) -> None:
        self._groups, self._communicator, self._counters = groups, communicator, counters
        self.delayed = [group for group in groups if group.delayed]
        """Groups with gradients that are computed outside backward."""
        self.sum_tests = [(group.index, group.sum_test) for group in groups if group.sum_test.flats]
        """Of sums that may overflow."""
        self.skipped: frozenset[str] = frozenset()
        """Names of the parameters that no rank has used in the last whole step and that had no gradient before it."""
        self.zeroed: frozenset[str] = frozenset()
        """Names of the parameters whose gradients were cleared to zeros, not removed. For ``SkippingSchedule``."""
        self._num_launched = 0  # always a prefix of the groups

    def find_zeroed(self, *, includes_all: bool) -> frozenset[str]:  # noqa: ARG002 - of ``SkippingSchedule``
        """Return the names of the parameters to be in ``zeroed`` if all gradients are cleared to zeros now.

        Args:
            includes_all: whether to include those without a gradient.
        """
        return self.zeroed

    # Launches #

    def launch_complete(self, *, withholds: bool = False) -> None:
        """Launch complete groups. Strictly in order, in whatever order gradients arrive: all ranks must launch alike.

        Args:
            withholds: whether to withhold their gradients at once, because no backward is running.
        """
        while self._num_launched < len(self._groups) and self._groups[self._num_launched].is_complete:
            self._launch_next()
            if withholds:
                self._groups[self._num_launched - 1].withhold_grads()

    def launch_delayed(self) -> None:
        """Launch groups that a delayed gradient has completed. No backward is running."""
        for group in self.delayed:
            group.update_completeness(self._counters.num_microbatches)
        self.launch_complete(withholds=True)

    def launch_rest(self) -> None:
        """Launch all groups that were not launched yet, complete or not."""
        while self._num_launched < len(self._groups):
            self._launch_next()

    def _launch_next(self) -> None:
        group = self._groups[self._num_launched]
        self._communicator.progress.bucket = group.index
        group.start_grad_sync()
        self._num_launched += 1
        if group.finite_test.found:
            self.note_nonfinite()

    # What they have found #

    def check_launched(self, *, unused_counts: bool) -> torch.Tensor | None:
        """Note parameters without a gradient, when all groups are launched.

        Returns a 0D flag on the device, set if a gradient is not finite; ``None`` if the host knows already.
        """
        tests: list[FiniteTest] = []
        for group in self._groups:
            # Without a backward, values that the caller wrote into zeroed views count; views that had to be zeroed are unused.
            unused = group.missing if self._counters.num_microbatches else group.cleared
            if unused and unused_counts and not group.policy.allows_unused:
                self._counters.note_unused(unused, bucket=group.index)
            if group.finite_test.peaks:
                tests.append(group.finite_test)
                if group.streams is not None:
                    group.streams.follow()
        return any_beyond(tests) if tests else None

    def note_nonfinite(self) -> None:
        """Note the gradients of launched groups that are not finite."""
        launched = self._groups[: self._num_launched]  # findings of other groups are from the last step
        if fields := self._find_nonfinite([(group.index, group.finite_test) for group in launched]):
            self._counters.problems["nonfinite"] = Problem(NonFiniteGradientError.__name__, fields)

    def find_nonfinite_sums(self) -> dict[str, Any]:
        """Return the fields of the error about sums that are not finite, alike on all ranks; empty if all are finite."""
        return self._find_nonfinite(self.sum_tests)

    def _find_nonfinite(self, tests: Sequence[tuple[int, FiniteTest]]) -> dict[str, Any]:
        return find_nonfinite(tests, self._communicator, num_buckets=len(self._groups))

    def check_delayed(self) -> None:
        """Note parameters with fewer or more delayed gradients than backwards."""
        expected = self._counters.num_microbatches
        for group in self.delayed:
            for position, count in group.delayed.items():
                if count > expected or (count < expected and not group.policy.allows_unused):
                    finding = f"has come {count} times in {expected} backwards"
                    self._counters.note_delayed(group.slots[position].name, finding)

    def delayed_group_of(self, param: torch.Tensor) -> _ParamAndGradBucketGroup:
        """Return the group that takes the gradient of ``param`` outside backward.

        Raises:
            ConfigError: gradients of the parameter are taken from autograd.
        """
        for group in self.delayed:
            if group.position_of.get(id(param)) in group.delayed:
                return group
        raise ConfigError(
            f"grad_ready() was called with a parameter of shape {tuple(param.shape)} whose gradients are taken from autograd: "
            "they would count twice. Set param.skip_backward_post_hook = True before wrapping if they are computed outside "
            "backward."
        )

    # The end of a step #

    def publish(self, *, is_withdrawn: bool) -> None:
        """Show the reduced gradients of a whole step, or none."""
        self._num_launched = 0
        for group in self._groups:
            group.readiness.end_step(learns=True)
            if is_withdrawn:
                group.withdraw_grads()
            else:
                group.publish()

    def send_dropped(self) -> None:
        """Send the groups that were not launched yet, with any values, without waiting. May be called again."""
        for group in self._groups:
            group.start_dropped_sync()

    def finish_dropped(self, *, takes_part: bool) -> None:
        """Wait for the launched groups of a step that is dropped.

        Args:
            takes_part: whether some rank has sent its buckets, so that this rank must send them as well.
        """
        was_late = self._counters.late_phase == GradPhase.IN_FLIGHT.value
        if takes_part:
            for group in self._groups:
                if group.grad_phase is GradPhase.REDUCED:
                    group.reopen()
                group.start_dropped_sync()
        for group in self._groups:
            if group.is_launched:
                group.finish_grad_sync()
            if was_late:
                group.readiness.end_step(unlearns=True)  # the number of gradients has changed, probably in other groups too

    def reset(self) -> None:
        """Forget the gradients, none of which a collective owns."""
        self._num_launched = 0
        for group in self._groups:
            group.reset()
