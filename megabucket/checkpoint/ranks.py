"""What a save needs from the other ranks: to hear what each of them says, errors among it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import megabucket.errors
from megabucket.errors import CheckpointError, MegabucketError


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


def written(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error of a rank as plain values."""
    if not isinstance(error, MegabucketError):
        error = CheckpointError(f"rank {rank}: {type(error).__name__}: {error}. Nothing was changed on any rank.")
    return {"kind": type(error).__name__, "text": str(error), "fields": vars(error)}


def as_error(said: Mapping[str, Any]) -> MegabucketError:
    """Return the error that ``written`` was given, or what it has become."""
    kind = getattr(megabucket.errors, said["kind"], CheckpointError)
    error: MegabucketError = kind.__new__(kind)
    error.args = (said["text"],)
    vars(error).update({name: tuple(value) if isinstance(value, list) else value for name, value in said["fields"].items()})
    return error
