"""The fence: one small message at the end of each step, by which all ranks learn whether the step is whole on all of them.

It compares a fingerprint of the values that must be equal, and a flag for problems. Only if ranks differ, or one has a problem,
do they exchange their reports (``report.py``), and each builds the same error from them. Collective calls outside a step
(``calls.py``) open with the same message, so a rank in another call is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch

from megabucket.comm import Communicator, Exchange, Gate
from megabucket.config.resolve import StepPolicy
from megabucket.ddp.report import RECORD_BYTES, RankReport, StepCounters, resolve_error
from megabucket.errors import MegabucketError, PhaseError

_LEAST_RECORD_BYTES: Final = 4_096  # with one name of each list every report fits
_ALL_RECORDS_BYTES: Final = 1 << 26  # after a failed step every rank receives the reports of all ranks
_STOP_IS_WANTED, _HAS_PROBLEM = 1, 2  # a problem hides a request to stop, which the next fence repeats
_END_KIND: Final = 1  # of the message at the end of a step; calls have larger ones


class Fence:
    """Agreement of the ranks of one wrapper, about steps and collective calls.

    Args:
        num_buckets: for error texts.
        policy: says whether there is a fence at the end of a step.
        device: of the messages.
    """

    def __init__(self, communicator: Communicator, *, num_buckets: int, policy: StepPolicy, device: torch.device) -> None:
        self.communicator, self.device, self.num_buckets = communicator, device, num_buckets
        self._gate = Gate(communicator, device=device) if communicator.size > 1 else None
        self._step_gate = self._gate if policy.has_fence else None  # at the end of a step
        self._record_bytes = max(_LEAST_RECORD_BYTES, min(RECORD_BYTES, _ALL_RECORDS_BYTES // communicator.size))
        self._report: RankReport | None = None  # of the pending message
        self._is_nonfinite: torch.Tensor | None = None
        self._exchange: Exchange | None = None
        self.counters = StepCounters(communicator.rank, counts_skipped_forwards=policy.counts_skipped_forwards)
        """For this rank's next report."""

    @property
    def is_sent(self) -> bool:
        """Whether a message is pending."""
        return self._report is not None and (self._step_gate is None or self._step_gate.is_sent)

    def own_error(self, step: int) -> MegabucketError | None:
        """Return the error about the pending report of this rank; ``None`` if it has no problem."""
        report = self._pending()
        return resolve_error(step, self.num_buckets, [RankReport.from_bytes(report.to_bytes(self._record_bytes))])

    def _pending(self) -> RankReport:
        if self._report is None:
            raise PhaseError("there is no fence to wait for")
        return self._report

    def is_answered(self) -> bool:
        """Return whether all ranks have reached the pending fence, without waiting."""
        return self._step_gate is None or self._step_gate.is_answered()

    def send(self, report: RankReport, nonfinite: torch.Tensor | None = None) -> None:
        """Send this rank's fingerprint and flags without waiting. A rank with a problem sends its report right after.

        Args:
            nonfinite: 0D flag on the device, set if gradients are not finite, where only the device knows.
        """
        self._is_nonfinite = nonfinite
        self._report = report
        if self._step_gate is not None:
            self.communicator.progress.phase = "fence"
            num_others = len(report.problems)
            if "nonfinite" in self.counters.problems:  # the answer has a place of its own for it
                num_others, nonfinite = num_others - 1, torch.ones((), dtype=torch.float32, device="cpu")
            flag = _HAS_PROBLEM if num_others > 0 else _STOP_IS_WANTED * self.counters.wants_stop
            self._step_gate.send(_END_KIND, report.fingerprint, flag=flag, label="fence", nonfinite=nonfinite)
            if report.problems:
                self._start_exchange(report)

    def take(self, name_culprits: Callable[[], object]) -> Sequence[RankReport]:
        """Wait for all ranks; return their reports if one has a problem, and nothing if the step is whole on all.

        Args:
            name_culprits: adds nonfinite gradients that only the device knew of to the problems of this rank.

        Raises:
            MegabucketError: a rank was lost or interrupted.
        """
        report = self._pending()
        if self._step_gate is not None:
            is_alike, flag, is_nonfinite = self._step_gate.take()
            self.counters.stop_is_wanted = flag == _STOP_IS_WANTED
            is_whole = is_alike and flag != _HAS_PROBLEM and not is_nonfinite
        else:
            is_whole = not report.problems and (self._is_nonfinite is None or not self._reads(self._is_nonfinite))
            self.counters.stop_is_wanted = self.counters.wants_stop
        if not is_whole and self._exchange is None and self._is_nonfinite is not None and self._reads(self._is_nonfinite):
            name_culprits()
            report = dataclasses.replace(report, problems=tuple(self.counters.problems.values()))
        reports = [] if is_whole else self.exchange_reports(report)
        self._report = None
        return reports

    def _reads(self, is_nonfinite: torch.Tensor) -> bool:
        return bool(self.communicator.read(is_nonfinite, label="finite test"))

    def _start_exchange(self, report: RankReport) -> Exchange:
        if self._exchange is None:
            self._exchange = Exchange(
                self.communicator,
                report.to_bytes(self._record_bytes),
                capacity_bytes=self._record_bytes,
                device=self.device,
                label="step report",
            )
        self._exchange.start()
        return self._exchange

    def exchange_reports(self, report: RankReport) -> list[RankReport]:
        """Return the reports of all ranks, which all of them exchange now; this rank's own where there is no fence.

        Raises:
            MegabucketError: a rank was lost or interrupted.
        """
        if self._gate is None or (self._step_gate is None and report.ends_step):
            return [RankReport.from_bytes(report.to_bytes())]
        payloads = self._start_exchange(report).wait()
        self._exchange = None
        return [RankReport.from_bytes(payload) for payload in payloads]

    def compare(self, kind: int, fingerprint: int, *, has_problem: bool, label: str) -> tuple[bool, bool]:
        """Open a collective call: return whether call and fingerprint are the same on all ranks, and whether one has a problem.

        Args:
            kind: of the call, above 1.
            fingerprint: of what must be equal on all ranks.

        Raises:
            MegabucketError: a rank was lost or interrupted.
        """
        if self._gate is None:
            return True, has_problem
        self._gate.send(kind, fingerprint, flag=_HAS_PROBLEM * has_problem, label=label)
        is_alike, flag, _ = self._gate.take()
        return is_alike, flag == _HAS_PROBLEM
