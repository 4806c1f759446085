"""What ranks talk over: gloo on loopback, or the emulated fabric around it. No torch before ``start``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("loopback", "timing", "data")


@dataclass(frozen=True)
class LinkCase:
    """One link.

    Attributes:
        kind: ``loopback``; ``timing``: a fabric on which only time passes; ``data``: a fabric that moves data, too.
        latency_s: of a step of the ring; 0 on loopback.
        bytes_per_s: of a rank's link; 0 on loopback.
    """

    kind: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0

    @property
    def name(self) -> str:
        if self.kind == "loopback":
            return "loopback"
        return f"{self.kind}, {self.latency_s * 1e6:g} us, {self.bytes_per_s / 1e9:g} GB/s"

    @property
    def is_fabric(self) -> bool:
        return self.kind != "loopback"

    @property
    def moves_data(self) -> bool:
        return self.kind != "timing"

    def start(self) -> None:
        """Start the default process group of this rank, which torchrun has started."""
        import torch.distributed as dist

        if self.is_fabric:
            from megabucket.testing import EmulatedFabric

            EmulatedFabric(self.latency_s, self.bytes_per_s, moves_data=self.moves_data).init_process_group()
        else:
            dist.init_process_group("gloo")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name}


def link_cases(kinds: list[str], latencies_us: list[float], bandwidths_gb: list[float]) -> tuple[LinkCase, ...]:
    """Return loopback once, and each kind of fabric with each latency and bandwidth."""
    cases: list[LinkCase] = []
    for kind in kinds:
        if kind == "loopback":
            cases.append(LinkCase(kind))
        else:
            cases += [LinkCase(kind, us * 1e-6, gb * 1e9) for gb in bandwidths_gb for us in latencies_us]
    return tuple(cases)
