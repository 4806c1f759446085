"""What a collective costs on the emulated link, in seconds. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """A collective as the link sees it: how often the buffer goes round the ring, and how large it is.

    Attributes:
        passes: 2 for an all-reduce and a barrier, else 1; ``CollectiveKind.ring_passes`` for those that have a kind.
        payload_bytes: of the full buffer, as all ranks together see it.
    """

    passes: int
    payload_bytes: int


def ring_s(cost: Cost, *, num_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the seconds of one collective on a ring: ``passes * ((n-1) latency + S (n-1)/n / bandwidth)``.

    >>> ring_s(Cost(passes=2, payload_bytes=4_000_000), num_ranks=4, latency_s=1e-4, bytes_per_s=1e9)  # 6 steps, 6 MB
    0.0066
    """
    wire_bytes = cost.payload_bytes * (num_ranks - 1) / num_ranks
    return cost.passes * ((num_ranks - 1) * latency_s + wire_bytes / bytes_per_s)


def together(costs: tuple[Cost, ...], *, num_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the seconds of a coalesced batch: the bytes of all, the latency of the one with the most steps."""
    bandwidth_s = sum(ring_s(cost, num_ranks=num_ranks, latency_s=0.0, bytes_per_s=bytes_per_s) for cost in costs)
    return bandwidth_s + max((cost.passes for cost in costs), default=0) * (num_ranks - 1) * latency_s
