"""All ranks come to one end: what fails on one of them is the same error on all, before anybody changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

import megabucket.errors
from megabucket.checkpoint.ranks import Ranks
from megabucket.comm import Communicator, exchange_bytes
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointError, MegabucketError

_Result = TypeVar("_Result")
_LABEL: Final = "checkpoint"


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
        """Return what each rank gave, by rank; a collective."""
        return exchange_bytes(self._communicator, payload, device=self._device, label=_LABEL)


def together(ranks: Ranks, act: Callable[[], _Result]) -> _Result:
    """Call ``act``, which is no collective, and return its result when it has succeeded on every rank.

    Raises:
        MegabucketError: the error of the first rank that has failed, with the same text on every rank. What is no error of
            this library becomes a ``CheckpointError`` that names the rank.
    """
    result: list[_Result] = []
    said, cause = b"", None
    try:
        result.append(act())
    except Exception as error:
        said, cause = json.dumps(_written(error, ranks.rank)).encode(), error
    for heard in ranks.exchange(said):
        if heard:
            raise _read(json.loads(heard)) from cause
    return result[0]


def _written(error: Exception, rank: int) -> dict[str, Any]:
    if not isinstance(error, MegabucketError):
        error = CheckpointError(f"rank {rank}: {type(error).__name__}: {error}. Nothing was changed on any rank.")
    return {"kind": type(error).__name__, "text": str(error), "fields": vars(error)}


def _read(said: dict[str, Any]) -> MegabucketError:
    kind = getattr(megabucket.errors, said["kind"], CheckpointError)
    error: MegabucketError = kind.__new__(kind)
    error.args = (said["text"],)
    vars(error).update({name: tuple(value) if isinstance(value, list) else value for name, value in said["fields"].items()})
    return error
