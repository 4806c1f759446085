"""What saving and loading need of the other ranks: the results of each, and the same error on all.

What fails on one rank is the same error on all, before anybody changes anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

import megabucket.errors
from megabucket.comm import exchange
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointError, ConfigError, MegabucketError, name_list

_Result = TypeVar("_Result")
_LABEL: Final = "saving or loading a checkpoint"


class Ranks(Protocol):
    """The ranks that write one checkpoint together."""

    @property
    def rank(self) -> int:
        """Which one is asking, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return what each rank gave, by rank; a collective, called by all ranks as often as by any."""


class AloneRanks:
    """One process without others."""

    rank = 0
    size = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the payload."""
        return [payload]


class GroupRanks:
    """The ranks of a wrapper that agree on steps, and so on checkpoints.

    Args:
        call: what they do together; ranks that are in another call are found.
    """

    def __init__(self, ddp: DistributedDataParallel, call: str = _LABEL) -> None:
        self._communicator, self._sync, self._call = ddp.ranks.step, ddp.sync, call
        self._device = ddp.param_and_grad_buffers[0].grad_data.device
        self.rank, self.size = self._communicator.rank, self._communicator.size

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return what each rank gave, by rank.

        Raises:
            CallMismatchError: some rank is in another call, or in a step.
        """
        if self.size == 1:
            return [payload]
        self._sync.call(self._call)
        return exchange(self._communicator, payload, device=self._device, label=self._call)


def check_one_group(ddp: DistributedDataParallel, what: str) -> None:
    """Refuse a wrapper whose ranks hold different parameters, or parts of larger ones.

    Raises:
        ConfigError: it is one.
    """
    shapes = {name: tuple(param.shape) for name, param in ddp.module.named_parameters()}
    others = [name for name, own in ddp.identities.items() if (own.global_name, own.global_shape) != (name, shapes.get(name))]
    if others or not ddp.ranks.has_same_params:
        raise ConfigError(
            f"{what} is for wrappers whose ranks all hold the same whole parameters under their local names. This one has "
            f"the groups {name_list(list(ddp.ranks.by_name))}, and {len(others)} parameters with other names or shapes in the "
            "whole model. save_checkpoint and load_checkpoint take such wrappers."
        )


def gather_results(ranks: Ranks, act: Callable[[], Any]) -> list[Any]:
    """Call ``act``, which is no collective, and return what it gave on each rank; plain values only.

    Raises:
        MegabucketError: it has failed on some rank; as ``together``.
    """
    report: dict[str, Any] = {}
    cause = None
    try:
        report["result"] = act()
    except Exception as error:
        report["error"], cause = error_fields(error, ranks.rank), error
    reports = [json.loads(payload) for payload in ranks.exchange(json.dumps(report).encode())]
    failed = [rank for rank, other in enumerate(reports) if "error" in other]
    if failed:
        fields = reports[failed[0]]["error"]
        if len(failed) < ranks.size and f"rank {failed[0]}" not in fields["text"]:
            fields["text"] = f"rank {failed[0]}: {fields['text']}"
        raise error_of(fields) from cause
    return [other["result"] for other in reports]


def together(ranks: Ranks, act: Callable[[], _Result]) -> _Result:
    """Call ``act``, which is no collective, and return its result when it has succeeded on every rank.

    Raises:
        MegabucketError: the error of the first rank that has failed, with the same text on every rank. What is no error of
            this library becomes a ``CheckpointError`` that names the rank.
    """
    result: list[_Result] = []
    gather_results(ranks, lambda: result.append(act()))
    return result[0]


def error_fields(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error of a rank as plain values."""
    if not isinstance(error, MegabucketError):
        error = CheckpointError(f"rank {rank}: {type(error).__name__}: {error}. Nothing was changed on any rank.")
    return {"kind": type(error).__name__, "text": str(error), "fields": vars(error)}


def error_of(fields: Mapping[str, Any]) -> MegabucketError:
    """Return the error that ``error_fields`` was given, or what it has become."""
    kind = getattr(megabucket.errors, fields["kind"], CheckpointError)
    error: MegabucketError = kind.__new__(kind)
    error.args = (fields["text"],)
    of_kind = fields["fields"].items()
    vars(error).update({name: tuple(value) if isinstance(value, list) else value for name, value in of_kind})
    return error
