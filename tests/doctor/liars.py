"""Communicators that do something else than they are asked for, in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megabucket.comm import AllGather, AllReduce, Broadcast, Communicator, Handle, ReduceOp, ReduceScatter
from megabucket.comm import Call
from megabucket.doctor import Report, run_doctor
from megabucket.testing import LoopbackWorld

Lie = Callable[[int, Call], Call]
"""Of a rank and a reduction of floats: what is launched instead, after changing the tensors at will."""


class Liar(Communicator):
    """Passes everything on, reductions of floats after the lie."""

    def __init__(self, inner: Communicator, lie: Lie, *, only: str = "") -> None:
        super().__init__(rank=inner.rank, size=inner.size)
        self._inner, self._lie, self._only = inner, lie, only

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        return self._inner.launch([self._changed(call) if self._only in label else call for call in calls], label=label)

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


class Refuser(Communicator):
    """Refuses one reduce op, as a back-end does that lacks it."""

    def __init__(self, inner: Communicator, refused: ReduceOp) -> None:
        super().__init__(rank=inner.rank, size=inner.size)
        self._inner, self._refused = inner, refused

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        if any(getattr(call, "op", None) is self._refused for call in calls):
            raise RuntimeError(f"Cannot use ReduceOp.{self._refused.name} here\nwith a second line")
        return self._inner.launch(calls, label=label)


class _Spoiled(Handle):
    def __init__(self, inner: Handle, calls: Sequence[Call]) -> None:
        self._inner, self._calls, self._is_done = inner, calls, False

    def wait(self) -> None:
        self._inner.wait()
        if not self._is_done:
            self._is_done = True
            for call in self._calls:
                call.full.view(-1)[0] += 1


class Spoiler(Communicator):
    """Changes the first element of what one rank receives from collectives of one kind."""

    def __init__(self, inner: Communicator, kind: type[AllReduce | AllGather | Broadcast], *, rank: int) -> None:
        super().__init__(rank=inner.rank, size=inner.size)
        self._inner, self._kind, self._spoiled_rank = inner, kind, rank

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        handle = self._inner.launch(calls, label=label)
        spoils = self.rank == self._spoiled_rank and isinstance(calls[0], self._kind) and calls[0].full.is_floating_point()
        return _Spoiled(handle, calls) if spoils else handle


def examine(size: int, wrap: Callable[[Communicator], Communicator], config=None) -> Report:
    """Return the report of a loopback world, which is the same on every rank."""
    world = LoopbackWorld(size, timeout_s=60)
    reports = world.run(lambda rank: run_doctor(config, communicator=wrap(world.communicator(rank))))
    assert [replace(report, wall_s=0) for report in reports] == [replace(reports[0], wall_s=0)] * size
    return reports[0]


def line(report: Report, probe: str):
    """Return the line of one question."""
    return next(line for line in report.lines if line.probe == probe)
