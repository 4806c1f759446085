"""Every rank's bytes on every rank: for digests and reports, not for gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megabucket.comm.port import AllGather, Broadcast, Communicator

_LENGTH_BYTES = 8


class Exchange:
    """One all-gather of at most ``capacity_bytes`` from each rank, launched by the constructor.

    Args:
        payload: what this rank says; at most ``capacity_bytes`` long.
        capacity_bytes: the same on every rank.
        device: where the process group can work.
    """

    def __init__(
        self, communicator: Communicator, payload: bytes, *, capacity_bytes: int, device: torch.device, label: str
    ) -> None:
        if len(payload) > capacity_bytes:
            raise ValueError(f"{label}: {len(payload)} bytes do not fit into {capacity_bytes}")
        record = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
        self._record_bytes = _LENGTH_BYTES + capacity_bytes
        self._records = torch.zeros(communicator.size * self._record_bytes, dtype=torch.uint8, device=device)  # 1D
        start = communicator.rank * self._record_bytes
        own = self._records[start : start + self._record_bytes]
        own[: len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        self._handle = communicator.launch([AllGather(self._records, own)], label=label)

    def wait(self) -> list[bytes]:
        """Return what each rank said, by rank."""
        self._handle.wait()
        flat = self._records.cpu().numpy().tobytes()
        records = [flat[start : start + self._record_bytes] for start in range(0, len(flat), self._record_bytes)]
        return [record[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(record[:_LENGTH_BYTES], "little")] for record in records]


def exchange_bytes(communicator: Communicator, payload: bytes, *, device: torch.device, label: str) -> list[bytes]:
    """Return the payloads of all ranks, of any length, by rank: two collectives."""
    length = len(payload).to_bytes(_LENGTH_BYTES, "little")
    lengths = Exchange(communicator, length, capacity_bytes=_LENGTH_BYTES, device=device, label=f"{label} length").wait()
    longest = max(int.from_bytes(length, "little") for length in lengths)
    return Exchange(communicator, payload, capacity_bytes=longest, device=device, label=label).wait()


def exchange_some(
    communicator: Communicator, payload: bytes, *, speakers: Sequence[int], device: torch.device, label: str
) -> list[bytes]:
    """Return what some ranks say, of any length, in the order of ``speakers``: what is sent does not grow with the other ranks.

    Args:
        payload: of this rank; of no interest if it is none of the speakers.
        speakers: the same on every rank.
    """
    lengths = [torch.tensor([len(payload)], dtype=torch.int64, device=device) for _ in speakers]  # 1D each
    calls = [Broadcast(length, root) for length, root in zip(lengths, speakers, strict=True)]
    communicator.launch(calls, label=f"{label} length").wait()
    texts = [torch.zeros(int(length), dtype=torch.uint8, device=device) for length in lengths]  # 1D each
    if payload and communicator.rank in speakers:
        texts[speakers.index(communicator.rank)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    calls = [Broadcast(text, root) for text, root in zip(texts, speakers, strict=True)]
    communicator.launch(calls, label=label).wait()
    return [text.cpu().numpy().tobytes() for text in texts]
