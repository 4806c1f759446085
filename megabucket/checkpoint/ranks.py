"""Exchanges of ranks that save or load together: the results of all ranks, or the same error on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import megabucket.errors
from megabucket.comm import exchange
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointError, MegabucketError

_Result = TypeVar("_Result")


class CheckpointRanks(Protocol):
    """The ranks that write or load one checkpoint together."""

    rank: int
    size: int

    def exchange(self, payload: bytes, place: str) -> list[bytes]:
        """Return the payloads of all ranks, by rank; a collective.

        Args:
            place: names this exchange among those of one call, so that a rank which makes the call anew after an interrupt
                meets no later exchange of the others.
        """


class AloneRanks:
    """One process without others."""

    rank = 0
    size = 1

    def exchange(self, payload: bytes, place: str) -> list[bytes]:  # noqa: ARG002 - there is nobody at another place
        """Return the payload."""
        return [payload]


class GroupRanks:
    """The ranks of a wrapper that agree on steps, and so on checkpoints.

    Args:
        call: names the collective call, so that ranks in another one are found.
    """

    def __init__(self, ddp: DistributedDataParallel, call: str) -> None:
        self._communicator, self._sync, self._call = ddp.ranks.step, ddp.sync, call
        self._device = ddp.param_and_grad_buffers[0].grad_data.device
        self.rank, self.size = self._communicator.rank, self._communicator.size

    def exchange(self, payload: bytes, place: str) -> list[bytes]:
        """Return the payloads of all ranks, by rank.

        Raises:
            CallMismatchError: some rank is at another place or in another call, or in a step.
        """
        if self.size == 1:
            return [payload]
        label = f"{self._call}: {place}"
        with self._sync.call(label) as call:
            call.open()
            return exchange(self._communicator, payload, device=self._device, label=label)


def gather_results(ranks: CheckpointRanks, place: str, act: Callable[[], Any]) -> list[Any]:
    """Call ``act``, which is not collective, and return its results on all ranks; plain values only.

    Args:
        place: as for ``CheckpointRanks.exchange``.

    Raises:
        MegabucketError: it has failed on some rank; as ``together``.
    """
    report: dict[str, Any] = {}
    cause = None
    try:
        report["result"] = act()
    except Exception as error:
        cause = error
        if not isinstance(error, MegabucketError):
            error = CheckpointError(f"rank {ranks.rank}: {type(error).__name__}: {error}. Nothing was changed on any rank.")
        report["error"] = {"kind": type(error).__name__, "text": str(error), "fields": vars(error)}
    reports = [json.loads(payload) for payload in ranks.exchange(json.dumps(report).encode(), place)]
    failed = [rank for rank, other in enumerate(reports) if "error" in other]
    if failed:
        found = reports[failed[0]]["error"]
        is_named = len(failed) == ranks.size or f"rank {failed[0]}" in found["text"]
        kind = getattr(megabucket.errors, found["kind"], CheckpointError)
        raised: MegabucketError = kind.__new__(kind)
        raised.args = (found["text"] if is_named else f"rank {failed[0]}: {found['text']}",)
        vars(raised).update(
            {name: tuple(value) if isinstance(value, list) else value for name, value in found["fields"].items()}
        )
        raise raised from cause
    return [other["result"] for other in reports]


def together(ranks: CheckpointRanks, place: str, act: Callable[[], _Result]) -> _Result:
    """Call ``act``, which is not collective, and return its result when it has succeeded on every rank.

    Args:
        place: as for ``CheckpointRanks.exchange``.

    Raises:
        MegabucketError: the error of the first rank that has failed, with the same text on every rank. An error of another kind
            becomes a ``CheckpointError`` that names the rank.
    """
    result: list[_Result] = []
    gather_results(ranks, place, lambda: result.append(act()))
    return result[0]
