"""All ranks come to one end: what fails on one of them is the same error on all, before anybody changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from megabucket.checkpoint.ranks import Ranks, as_error, written
from megabucket.comm import Communicator, exchange
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.step import GradSync

_Result = TypeVar("_Result")
_LABEL: Final = "saving or loading a checkpoint"


class GroupRanks:
    """The ranks of a communicator, for whoever knows nothing of tensors.

    Args:
        device: where the process group can work.
        sync: of the wrapper; finds ranks that are in another call.
        call: what the ranks do together, for them to compare.
    """

    def __init__(
        self, communicator: Communicator, device: torch.device, sync: GradSync | None = None, call: str = _LABEL
    ) -> None:
        self._communicator, self._device, self._sync, self._call = communicator, device, sync, call
        self.rank, self.size = communicator.rank, communicator.size

    @classmethod
    def of(cls, ddp: DistributedDataParallel, call: str = _LABEL) -> GroupRanks:
        """Return the ranks of a wrapper."""
        return cls(ddp.communicator, ddp.param_and_grad_buffers[0].grad_data.device, ddp.sync, call)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return what each rank gave, by rank.

        Raises:
            CallMismatchError: some rank is in another call, or in a step.
        """
        if self.size == 1:
            return [payload]
        if self._sync is not None:
            self._sync.call(self._call)
        return exchange(self._communicator, payload, device=self._device, label=self._call)


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
