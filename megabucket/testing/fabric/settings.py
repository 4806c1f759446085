"""``EmulatedFabric``: the settings of the emulated link, the costs of its operations, and the back-end's registration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from megabucket.comm.torch import FABRIC
from megabucket.errors import ConfigError
from megabucket.testing.fabric.group import FabricGroup
from megabucket.testing.fabric.work import Lateness

_ALWAYS_MOVED_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class EmulatedFabric:
    """A network of one machine that takes the time of a slower one: gloo moves the data, an alpha-beta link delays it.

    ``n`` ranks, ``S`` bytes of the full buffer: an all-reduce takes ``2 (n-1) latency + 2 S (n-1)/n / bandwidth`` from the
    moment the last rank has launched it and the link of every member is free; every other collective half of that. A rank that
    waits sleeps.

    Args:
        latency_s: of each step, seconds; 0 or more.
        bytes_per_s: from each rank to the next; more than 0.
        moves_data: ``False``: only the time of reductions and broadcasts passes, and of gathers into memory that was gathered
            into before, for floating-point tensors over 256 bytes. Overlap can then be measured without the CPU time of
            communication. The results are wrong: each rank keeps its own numbers.

    Raises:
        ConfigError: a value is out of range.
    """

    latency_s: float
    bytes_per_s: float
    moves_data: bool = True

    def __post_init__(self) -> None:
        if not (_is_number(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(f"EmulatedFabric: latency_s must be a finite number >= 0, got {self.latency_s!r}")
        if not (_is_number(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ConfigError(f"EmulatedFabric: bytes_per_s must be a finite number > 0, got {self.bytes_per_s!r}")

    def init_process_group(self, **arguments: Any) -> None:
        """Call ``torch.distributed.init_process_group`` with this fabric as the back-end; under torchrun without arguments."""
        dist.init_process_group(self.register(), pg_options=self, **arguments)

    def register(self) -> str:
        """Register the back-end and return its name, for programs that make their groups themselves.

        ``init_process_group(name)`` takes the settings of the fabric that was registered last, or those given as
        ``pg_options``. Groups made by ``new_group`` afterwards take those of the default group.
        """
        plugin = dist.Backend._plugins.get(FABRIC.upper())
        if plugin is None:
            dist.Backend.register_backend(FABRIC, _Creator(self), extended_api=True, devices=["cpu"])
        elif isinstance(plugin.creator_fn, _Creator):
            plugin.creator_fn.fabric = self
        else:
            raise ConfigError(f"torch knows another back-end called {FABRIC!r}; the emulated fabric cannot be registered")
        return FABRIC

    def collective_s(self, *, ring_passes: int, payload_bytes: int, num_ranks: int) -> float:
        """Return how long a collective, or a coalesced batch of them, takes on free links.

        Args:
            ring_passes: how often the buffer goes round the ring: 2 for an all-reduce and a barrier, else 1.
            payload_bytes: of the full buffers, as all ranks together see them.

        >>> EmulatedFabric(1e-4, 1e9).collective_s(ring_passes=2, payload_bytes=4_000_000, num_ranks=4)  # 6 steps, 6 MB
        0.0066
        """
        wire_bytes = payload_bytes * (num_ranks - 1) / num_ranks
        return ring_passes * ((num_ranks - 1) * self.latency_s + wire_bytes / self.bytes_per_s)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether the data of a tensor is moved: always, or when it controls the program more than it fills the wire."""
        return self.moves_data or not tensor.is_floating_point() or tensor.nbytes <= _ALWAYS_MOVED_BYTES


class _Creator:
    """Makes groups when torch asks; torch's registry of back-ends keeps it, and with it the settings."""

    def __init__(self, fabric: EmulatedFabric) -> None:
        self.fabric = fabric

    def __call__(self, options: Any, pg_options: Any) -> FabricGroup:
        world = dist.group.WORLD
        parent = world if isinstance(world, FabricGroup) else None
        if pg_options is None:
            pg_options = parent.fabric if parent is not None else self.fabric
        if not isinstance(pg_options, EmulatedFabric):
            raise ConfigError(f"pg_options of a group on the emulated fabric must be an EmulatedFabric, got {pg_options!r}")
        return FabricGroup(pg_options, options, machine=parent.machine if parent is not None else None)


def fabric_lateness(group: dist.ProcessGroup | None = None) -> Lateness:
    """Return how late operations of a group completed on this rank since the last call, and reset the counts.

    Raises:
        ConfigError: the group is not on an emulated fabric.
    """
    real = group if group is not None else dist.group.WORLD
    if not isinstance(real, FabricGroup):
        raise ConfigError(f"the group is no emulated fabric, so it has no lateness: {real!r}")
    taken, real.lateness = real.lateness, Lateness()
    return taken


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
