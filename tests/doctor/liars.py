"""Communicators that do something else than they are asked for, in one way each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megabucket.comm import AllGather, AllReduce, Batch, Broadcast, Call, Communicator, Handle, ReduceOp, ReduceScatter
from megabucket.doctor import DoctorReport, run_doctor
from megabucket.testing import LoopbackWorld
from megabucket.trace.recorder import CollectiveRecord

Lie = Callable[[int, Call], Call]
"""Of a rank and a reduction of floats: what is launched instead, after changing the tensors at will."""


class Around(Communicator):
    """Passes everything on, on both channels."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(rank=inner.rank, size=inner.size)
        self._inner, self.progress = inner, inner.progress
        self._inner_control = inner.control if inner.control is not inner else None

    @property
    def control(self) -> Communicator:
        if self._inner_control is None:
            return self
        channel = copy.copy(self)
        channel._inner, channel._inner_control = self._inner_control, None
        return channel

    @control.setter
    def control(self, channel: Communicator) -> None:
        """The other channel is what is around the other channel."""

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        return self._inner.handle(batch, label=record.label)


class Liar(Around):
    """Passes everything on, reductions of floats after the lie."""

    def __init__(self, inner: Communicator, lie: Lie, *, only: str = "") -> None:
        super().__init__(inner)
        self._lie, self._only = lie, only

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        calls = [self._changed(call) if self._only in record.label else call for call in batch]
        return self._inner.handle(calls, label=record.label)

    def _changed(self, call: Call) -> Call:
        is_reduction = isinstance(call, AllReduce | ReduceScatter)
        return self._lie(self.rank, call) if is_reduction and call.full.is_floating_point() else call


def dropping(dropped: int) -> Lie:
    def lie(rank: int, call: Call) -> Call:
        if rank == dropped:
            call.full.zero_()
        return call

    return lie


def counting(counted: int, times: int) -> Lie:
    def lie(rank: int, call: Call) -> Call:
        if rank == counted:
            call.full.mul_(times)
        return call

    return lie


def rounding(rank: int, call: Call) -> Call:
    """Send fewer bits than were given."""
    call.full.copy_(call.full.to(torch.bfloat16))
    return call


def summing_instead_of_averaging(rank: int, call: Call) -> Call:
    return replace(call, op=ReduceOp.SUM) if call.op is ReduceOp.AVG else call


def scaling_before_averaging(size: int) -> Lie:
    """Multiply by 1/n rounded to the dtype and sum, as NCCL does."""

    def lie(rank: int, call: Call) -> Call:
        if call.op is ReduceOp.AVG:
            call.full.mul_(torch.tensor(1 / size, dtype=call.full.dtype))
            return replace(call, op=ReduceOp.SUM)
        return call

    return lie


class Refuser(Around):
    """Refuses one reduce op, as a back-end does that lacks it."""

    def __init__(self, inner: Communicator, refused: ReduceOp) -> None:
        super().__init__(inner)
        self._refused = refused

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        if any(getattr(call, "op", None) is self._refused for call in batch):
            raise RuntimeError(f"Cannot use ReduceOp.{self._refused.name} here\nwith a second line")
        return super()._handle(batch, record, is_kept=is_kept)


class _Spoiled(Handle):
    def __init__(self, inner: Handle, calls: Sequence[Call], spoil: Callable[[Call], object]) -> None:
        self._inner, self._calls, self._spoil, self._is_done = inner, calls, spoil, False

    @property
    def is_started(self) -> bool:
        return self._inner.is_started

    def start(self) -> None:
        self._inner.start()

    def wait(self) -> None:
        self._inner.wait()
        if not self._is_done:
            self._is_done = True
            for call in self._calls:
                self._spoil(call)


class Spoiler(Around):
    """Changes the first element of what one rank receives from collectives of one kind."""

    def __init__(self, inner: Communicator, kind: type[AllReduce | AllGather | Broadcast], *, rank: int) -> None:
        super().__init__(inner)
        self._kind, self._spoiled_rank = kind, rank

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        handle = super()._handle(batch, record, is_kept=is_kept)
        spoils = self.rank == self._spoiled_rank and isinstance(batch[0], self._kind) and batch[0].full.is_floating_point()
        return _Spoiled(handle, batch, lambda call: call.full.view(-1)[0].add_(1)) if spoils else handle


class Garbler(Around):
    """Overwrites what the ranks tell each other about what they saw."""

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        handle = super()._handle(batch, record, is_kept=is_kept)
        return _Spoiled(handle, batch, lambda call: call.full.fill_(7)) if record.label == "doctor facts" else handle


def examine(size: int, wrap: Callable[[Communicator], Communicator], config=None) -> DoctorReport:
    """Return the report of a loopback world, which is the same on every rank."""
    world = LoopbackWorld(size, timeout_s=60)
    reports = world.run(lambda rank: run_doctor(config, communicator=wrap(world.communicator(rank))))
    assert [replace(report, wall_s=0) for report in reports] == [replace(reports[0], wall_s=0)] * size
    return reports[0]


def line(report: DoctorReport, question: str):
    """Return the line of one question."""
    return next(line for line in report.lines if line.question == question)
