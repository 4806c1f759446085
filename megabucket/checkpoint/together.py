"""All ranks come to one end: what fails on one of them is the same error on all, before anybody changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from megabucket.checkpoint.ranks import Ranks, as_error, written
from megabucket.comm import Communicator, Exchange
from megabucket.ddp import DistributedDataParallel

_Result = TypeVar("_Result")
_LABEL: Final = "checkpoint"
_LENGTH_BYTES: Final = 8
_SHORT_BYTES: Final = 1024
"""What ranks say about a save mostly fits into this, and is heard after one collective."""


class GroupRanks:
    """The ranks of a communicator, for whoever knows nothing of tensors.

    Args:
        device: where the process group can work.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device
        self.rank, self.size = communicator.rank, communicator.size

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> GroupRanks:
        """Return the ranks of a wrapper."""
        return cls(ddp.communicator, ddp.param_and_grad_buffers[0].grad_data.device)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return what each rank gave, by rank: one collective, or two where some rank gives more than a little."""
        if self.size == 1:
            return [payload]
        beginning = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_SHORT_BYTES]
        heard = self._exchange(beginning, capacity_bytes=_LENGTH_BYTES + _SHORT_BYTES)
        longest = max(int.from_bytes(message[:_LENGTH_BYTES], "little") for message in heard)
        beginnings = [message[_LENGTH_BYTES:] for message in heard]
        if longest <= _SHORT_BYTES:
            return beginnings
        ends = self._exchange(payload[_SHORT_BYTES:], capacity_bytes=longest - _SHORT_BYTES)
        return [beginning + end for beginning, end in zip(beginnings, ends, strict=True)]

    def _exchange(self, payload: bytes, *, capacity_bytes: int) -> list[bytes]:
        exchange = Exchange(self._communicator, payload, capacity_bytes=capacity_bytes, device=self._device, label=_LABEL)
        return exchange.wait()


def tell(ranks: Ranks, act: Callable[[], Any]) -> list[Any]:
    """Call ``act``, which is no collective, and return what it gave on each rank; plain values only.

    Raises:
        MegabucketError: it has failed on some rank; as ``together``.
    """
    said: dict[str, Any] = {}
    cause = None
    try:
        said["result"] = act()
    except Exception as error:
        said["error"], cause = written(error, ranks.rank), error
    heard = [json.loads(payload) for payload in ranks.exchange(json.dumps(said).encode())]
    for other in heard:
        if "error" in other:
            raise as_error(other["error"]) from cause
    return [other["result"] for other in heard]


def together(ranks: Ranks, act: Callable[[], _Result]) -> _Result:
    """Call ``act``, which is no collective, and return its result when it has succeeded on every rank.

    Raises:
        MegabucketError: the error of the first rank that has failed, with the same text on every rank. What is no error of
            this library becomes a ``CheckpointError`` that names the rank.
    """
    result: list[_Result] = []
    tell(ranks, lambda: result.append(act()))
    return result[0]
