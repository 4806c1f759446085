"""What a save needs from the other ranks: to hear what each of them says. No torch."""

from __future__ import annotations

from typing import Protocol


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
