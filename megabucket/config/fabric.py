"""``FabricConfig``: run over an emulated link instead of the machine's own. No torch."""

from __future__ import annotations

from megabucket.config.ddp import Section
from megabucket.config.training import NonNegative, Positive


class FabricConfig(Section):
    """An emulated alpha-beta link between the ranks of one machine, in place of gloo or NCCL.

    See docs/emulated-fabric.md.
    """

    latency_s: NonNegative
    """Seconds of each step of a ring: ``2 (n-1)`` steps in an all-reduce of ``n`` ranks, half of that in other collectives."""

    bytes_per_s: Positive
    """Bytes per second from each rank to the next."""

    moves_data: bool = True
    """``False``: only the time passes, and gradients and parameters stay where they are (docs/emulated-fabric.md). The numbers
    are wrong then, but communication takes no time of the CPU that computes."""
