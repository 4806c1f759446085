"""Point-to-point on the emulated fabric: the moment of arrival travels ahead of each message, over gloo.

A message leaves when the sender's link is free, and needs no receiver to do so. So the sender knows the moment, and tells it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

_NO_LIMIT: Final = timedelta(0)


@dataclass(frozen=True, slots=True)
class FixedClock:
    """An end that is known from the beginning."""

    done_s: float
    duration_s: float = 0.0


class HeaderClock:
    """An end that another rank tells."""

    duration_s = 0.0

    def __init__(self) -> None:
        self.header = torch.zeros(1, dtype=torch.float64)
        self._launch_s = time.monotonic()

    @property
    def done_s(self) -> float | None:
        """Moment the message arrives; ``None`` before the header has."""
        told_s = self.header.item()
        return max(told_s, self._launch_s) if told_s else None


class AnySourceWork:
    """Receives a header from whoever sends first, then the message of the same rank."""

    def __init__(self, gloo: Any, header: dist.Work, tensors: list[torch.Tensor], tag: int) -> None:
        self._gloo, self._header, self._tensors, self._tag = gloo, header, tensors, tag
        self._body: dist.Work | None = None
        self._is_done = False

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return when the message is here."""
        if self._is_done:
            return True
        if self._body is None:
            self._header.wait(timeout)
            self._body = self._gloo.recv(self._tensors, self.source_rank(), self._tag)
        self._body.wait(timeout)
        self._is_done = True
        return True

    def source_rank(self) -> int:
        """Return who sent; known after ``wait``."""
        return int(self._header._source_rank())


def send(gloo: Any, tensors: list[torch.Tensor], done_s: float, dst: int, tag: int) -> Sequence[dist.Work]:
    """Send the header and the message."""
    return [gloo.send([torch.tensor([done_s], dtype=torch.float64)], dst, tag), gloo.send(tensors, dst, tag)]


def receive(gloo: Any, tensors: list[torch.Tensor], src: int, tag: int) -> tuple[HeaderClock, Sequence[dist.Work]]:
    """Receive a header and the message."""
    clock = HeaderClock()
    return clock, [gloo.recv([clock.header], src, tag), gloo.recv(tensors, src, tag)]


def receive_from_any(gloo: Any, tensors: list[torch.Tensor], tag: int) -> tuple[HeaderClock, AnySourceWork]:
    """Receive a header from any rank, and its message."""
    clock = HeaderClock()
    return clock, AnySourceWork(gloo, gloo.recv_anysource([clock.header], tag), tensors, tag)
