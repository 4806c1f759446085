"""Messages between ranks on the control channel: agreement (``Gate``) and bytes (``Exchange``).

Every fence and every collective call opens with the same all-reduce of a few integers. So ranks in different calls still meet
in it, see the same numbers, and all know that they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from megabucket.comm.communicator import AllGather, AllReduce, Broadcast, Call, Communicator, Handle, ReduceOp
from megabucket.comm.device import Accelerator
from megabucket.errors import CollectiveError
from megabucket.units import FENCE_BYTES

_LENGTH_BYTES: Final = 8
_NONFINITE: Final = 5  # place of the number that is set if a gradient is not finite
_MOST_BYTES: Final = 1 << 30
"""Limit per rank and exchange. No message of this package is longer."""


class GateResult(NamedTuple):
    """The combined message of all ranks, the same on all of them."""

    is_alike: bool
    """Whether kind and fingerprint are equal on all ranks."""
    flag: int
    """The largest of all ranks."""
    is_nonfinite: bool
    """Whether a gradient of some rank is not finite."""


class Gate:
    """The message by which ranks learn whether they are in the same call: the maximum of six integers over the ranks.

    A number that must be equal goes in with both signs, so its largest and its smallest value come out. Only one message can be
    pending at a time.

    Args:
        device: where the collective runs.
    """

    def __init__(self, communicator: Communicator, *, device: torch.device) -> None:
        self._control = communicator.control
        self._vector = torch.zeros(FENCE_BYTES // 8, dtype=torch.int64, device=device)
        self._accelerator = Accelerator.of(device)
        self._batch = self._control.prepare([AllReduce(self._vector, ReduceOp.MAX)])
        self._handle: Handle | None = None

    @property
    def is_sent(self) -> bool:
        """Whether a message is pending: sent, and its answer not taken."""
        return self._handle is not None and self._handle.is_started

    def is_answered(self) -> bool:
        """Return whether the answer to a pending message is there, without waiting."""
        return self._handle is not None and self._handle.has_arrived()

    def send(self, kind: int, fingerprint: int, *, flag: int, label: str, nonfinite: torch.Tensor | None = None) -> None:
        """Send this rank's message without waiting. An interrupt leaves it sent as a whole or not at all.

        Args:
            kind: of the call or fence.
            fingerprint: of everything that must be equal, below 2**62.
            nonfinite: 0D, nonzero if a gradient is not finite, where only the device knows.
        """
        numbers = [kind, -kind, fingerprint, -fingerprint, flag, 0]
        message = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self._accelerator is not None:
            # A copy to a device from pageable memory waits for its queue; a copy from pinned memory does not.
            message = self._accelerator.pinned(message.shape, message.dtype).copy_(message)
        self._vector.copy_(message, non_blocking=True)
        if nonfinite is not None:
            self._vector[_NONFINITE].logical_or_(nonfinite)
        self._handle = self._control.handle(self._batch, label=label)
        self._handle.start()

    def take(self) -> GateResult:
        """Wait for all ranks and return their answer. Then the next message may be sent.

        Raises:
            MegabucketError: a rank was lost, or interrupted for good.
        """
        if self._handle is None:
            raise CollectiveError("there is no message whose answer could be taken")
        kind, no_kind, fingerprint, no_fingerprint, flag, nonfinite = self._handle.read(self._vector).tolist()
        self._handle = None
        return GateResult(kind == -no_kind and fingerprint == -no_fingerprint, flag, bool(nonfinite))


class Exchange:
    """Sends bytes of some ranks to every rank, at most ``capacity_bytes`` each. Nothing is sent before ``start``.

    Args:
        payload: bytes of this rank.
        capacity_bytes: the same on every rank.
        device: on which the process group works.
        speakers: the sending ranks, the same on every rank. ``None``: all of them, in one all-gather.

    Raises:
        ValueError: the payload does not fit.
    """

    def __init__(
        self,
        communicator: Communicator,
        payload: bytes,
        *,
        capacity_bytes: int,
        device: torch.device,
        label: str,
        speakers: Sequence[int] | None = None,
    ) -> None:
        if len(payload) > capacity_bytes:
            raise ValueError(f"{label}: {len(payload)} bytes do not fit into {capacity_bytes}")
        roots = range(communicator.size) if speakers is None else speakers
        row = (len(payload).to_bytes(_LENGTH_BYTES, "little") + payload).ljust(_LENGTH_BYTES + capacity_bytes, b"\0")
        rows = self._rows = torch.zeros(len(roots), len(row), dtype=torch.uint8, device=device)
        if communicator.rank in roots:
            rows[roots.index(communicator.rank)].copy_(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        calls: list[Call] = [Broadcast(row, root) for row, root in zip(rows.unbind(), roots, strict=True)]
        if speakers is None:
            calls = [AllGather(rows.view(-1), rows[communicator.rank])]
        self._handle = communicator.control.handle(calls, label=label)

    def start(self) -> None:
        """Send this rank's bytes, unless they were sent before."""
        self._handle.start()

    def wait(self) -> list[bytes]:
        """Return the payload of each speaker, in their order."""
        self._handle.start()
        rows = [row.tobytes() for row in self._handle.read(self._rows).numpy()]
        return [row[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(row[:_LENGTH_BYTES], "little")] for row in rows]


def exchange(
    communicator: Communicator, payload: bytes, *, device: torch.device, label: str, speakers: Sequence[int] | None = None
) -> list[bytes]:
    """Return the payloads of all ranks by rank, or those of some ranks, of any length up to 1 GiB.

    The ranks first agree on the longest length. Ranks that are not speakers add no traffic.

    Args:
        speakers: the sending ranks, the same on every rank; the result is in this order. ``None``: all ranks.

    Raises:
        CollectiveError: a payload is too long, on every rank.
    """
    said = payload if speakers is None or communicator.rank in speakers else b""
    longest = torch.tensor([len(said)], dtype=torch.int64, device=device)  # 1D
    handle = communicator.control.launch([AllReduce(longest, ReduceOp.MAX)], label=f"{label} length")
    capacity_bytes = int(handle.read(longest))
    if capacity_bytes > _MOST_BYTES:
        raise CollectiveError(f"{label}: a rank sends {capacity_bytes} bytes; the limit is {_MOST_BYTES}")
    whole = Exchange(communicator, said, capacity_bytes=capacity_bytes, device=device, label=label, speakers=speakers)
    return whole.wait()
