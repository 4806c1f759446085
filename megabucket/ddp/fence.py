"""The fence: one small collective at the end of each step, after which all ranks know whether all of them are whole.

Each rank contributes a few integers; the collective takes their maximum. A number that must be equal goes in with both signs,
so its largest and its smallest value come out. Only when the ranks disagree, or one of them reports a fault, are the reports
themselves exchanged.

A rank that was asked to stop says so in the place of the faults, where a fault of any rank is louder: it is heard at the next
fence then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from megabucket.comm import AllReduce, Communicator, Exchange, Handle, ReduceOp
from megabucket.ddp.capture import check_not_capturing
from megabucket.ddp.step_report import StepReport, record_bytes

_NUM_PAIRS: Final = 8
_NUM_FLAGS: Final = 2
_FAULT: Final = 2 * _NUM_PAIRS
_NONFINITE: Final = 2 * _NUM_PAIRS + 1
_CAPTURABLE: Final = (
    "Wrap with fence=False and nonfinite_gradients='allow', which asks nothing, and capture forward, backward and a plain "
    "optimizer with capturable=True (docs/gpu.md)."
)
_WISH, _BROKEN = 1, 2


class Fence:
    """The agreement of one wrapper's ranks, step after step.

    Args:
        communicator: the ranks; ``None`` for a rank that asks nobody.
        device: where the collective runs.
    """

    def __init__(self, communicator: Communicator | None, *, device: torch.device) -> None:
        self.communicator = communicator if communicator is not None and communicator.size > 1 else None
        self._device = device
        # Two vectors in turn. An interrupt may come when a fence is launched and nobody has noted that yet. The rank gives up
        # its step then, with another fence, which must not be written over the one in flight.
        self._calls = []
        if self.communicator is not None:
            vectors = [torch.zeros(2 * _NUM_PAIRS + _NUM_FLAGS, dtype=torch.int64, device=device) for _ in range(2)]  # 1D
            self._calls = [self.communicator.prepare([AllReduce(vector, ReduceOp.MAX)]) for vector in vectors]
        self._turn = 0

    def launch(self, report: StepReport, *, nonfinite: torch.Tensor | None = None) -> PendingFence:
        """Say this rank's side and return without waiting.

        Args:
            nonfinite: 0D, not zero if a gradient on the device is not finite; the host does not know it yet.

        Raises:
            PhaseError: a CUDA graph is being captured.
        """
        if self.communicator is not None or nonfinite is not None:
            reader = "the end of a step asks whether it is whole on all ranks, and whether its gradients are finite"
            check_not_capturing(self._device, reader=reader, remedy=_CAPTURABLE)
        if self.communicator is None:
            is_whole = _is_faultless(_flags(report)) and (nonfinite is None or not bool(nonfinite))
            return PendingFence(self, report, handle=None, vector=None, is_whole=is_whole)
        calls = self._calls[self._turn]
        self._turn = 1 - self._turn
        vector = calls[0].full
        numbers = [*_signed_pairs(report), *_flags(report)]
        # From ordinary memory a copy to a device waits for everything queued there; from pinned memory it waits for nothing.
        vector.copy_(torch.tensor(numbers, dtype=torch.int64, pin_memory=vector.is_cuda), non_blocking=True)
        if nonfinite is not None:
            vector[_NONFINITE].logical_or_(nonfinite)
        self.communicator.progress.phase = "fence"
        handle = self.communicator.launch(calls, label="fence")
        return PendingFence(self, report, handle=handle, vector=vector)

    def exchange(self, report: StepReport) -> Exchange | None:
        """Send this rank's report; all ranks do so when the fence says that something is wrong."""
        if self.communicator is None:
            return None
        capacity_bytes = record_bytes(self.communicator.size)
        payload = report.to_bytes(capacity_bytes)
        return Exchange(self.communicator, payload, capacity_bytes=capacity_bytes, device=self._device, label="step report")


class PendingFence:
    """A fence that was launched."""

    def __init__(
        self,
        fence: Fence,
        report: StepReport,
        *,
        handle: Handle | None,
        vector: torch.Tensor | None,
        is_whole: bool | None = None,
    ) -> None:
        self._fence, self._report = fence, report
        self._handle, self._vector = handle, vector
        self._is_whole = is_whole
        self.stop_is_wanted = report.wants_stop
        """Whether some rank wants to stop, once ``is_whole`` has returned: the same on all ranks."""
        self._exchange: Exchange | None = None

    def send_report(self) -> None:
        """Take part in the exchange of reports without waiting for the fence: it cannot hold, so all ranks will do so."""
        self._exchange = self._fence.exchange(self._report)

    def is_whole(self) -> bool:
        """Wait; return whether all ranks agree and none reports a fault."""
        if self._is_whole is None and self._handle is not None and self._vector is not None:
            self._handle.wait()
            values = self._vector.tolist()
            pairs = values[: 2 * _NUM_PAIRS]
            agree = all(largest == -negated for largest, negated in zip(pairs[::2], pairs[1::2], strict=True))
            self._is_whole = agree and _is_faultless(values[2 * _NUM_PAIRS :])
            self.stop_is_wanted = values[_FAULT] == _WISH
        return bool(self._is_whole)

    def reports(self, report: StepReport | None = None) -> Sequence[StepReport]:
        """Wait; return the reports of all ranks. Only where the fence is not whole.

        Args:
            report: says more than the one the fence was launched with.
        """
        own = report or self._report
        if self._exchange is None:
            self._exchange = self._fence.exchange(own)  # kept: a wait that is interrupted goes on with the same one
        exchange = self._exchange
        return [own] if exchange is None else [StepReport.from_bytes(payload) for payload in exchange.wait()]


def _signed_pairs(report: StepReport) -> list[int]:
    values = (
        report.step_number,
        report.num_microbatches,
        report.num_skipped_forwards,
        report.num_dropped_steps,
        report.num_updates,
        report.checksum,
        int(report.is_committing),
        int(report.force_all_reduce),
    )
    return [signed for value in values for signed in (value, -value)]


def _flags(report: StepReport) -> list[int]:
    has_fault = any(part is not None for part in (report.failure, report.change, report.late, report.unused))
    return [_BROKEN if has_fault else _WISH * report.wants_stop, int(report.nonfinite is not None)]


def _is_faultless(flags: Sequence[int]) -> bool:
    fault, nonfinite = flags
    return fault != _BROKEN and not nonfinite
