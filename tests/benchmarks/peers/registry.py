"""The systems: what each is called, where it is built, and what it should hold. No torch.

Plain all-reduce holds parameters, gradients and two moments on every rank: 16 bytes per float32 parameter. DeepSpeed keeps a
float32 copy of its partition of the parameters also where they are float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any


class Role(str, Enum):
    LIMIT = "limit"  # what no system can beat
    PEER = "peer"
    OURS = "ours"


@dataclass(frozen=True)
class SystemCase:
    """How to make a system, and what the reader of a table should know about it.

    Attributes:
        title: in tables.
        where: module and name of the function that builds it. Imported on demand: a peer that is not there is reported.
        expected: bytes per parameter on one of n ranks: parameters, gradients, optimizer state.
        mode: of ours, as the planner calls it, for its lower bound.
        only_on: the one kind of link it runs on: "fabric", where the planner has found cuts, or "loopback".
    """

    title: str
    where: str
    role: Role
    expected: Callable[[int], float]
    mode: str = ""
    only_on: str = ""

    def builder(self) -> Callable[[Any, Any], Any]:
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), function)


def whole(ranks: int) -> float:
    return 16.0


def zero_1(ranks: int) -> float:
    return 8 + 8 / ranks


def zero_2(ranks: int) -> float:
    return 4 + 12 / ranks


def zero_3(ranks: int) -> float:
    return 16 / ranks


def _ours(name: str, title: str, function: str, *, only_on: str = "") -> dict[str, SystemCase]:
    mode, expected = ("reduce_scatter", zero_1) if name.startswith("mb-rs") else ("all_reduce", whole)
    case = SystemCase(f"megabucket {title}", f"systems_megabucket:{function}", Role.OURS, expected, mode, only_on)
    return {name: case}


SYSTEMS = MappingProxyType(
    {
        "none": SystemCase("no synchronization (the limit)", "systems_torch:alone", Role.LIMIT, whole),
        "ddp": SystemCase("torch DDP", "systems_torch:ddp", Role.PEER, whole),
        "zero": SystemCase("torch DDP + ZeroRedundancyOptimizer", "systems_torch:zero", Role.PEER, zero_1),
        "fsdp2": SystemCase("FSDP2 per block", "systems_torch:fsdp_per_block", Role.PEER, zero_3),
        "fsdp2-groups": SystemCase("FSDP2, groups of a bucket, no reshard", "systems_torch:fsdp_groups", Role.PEER, zero_3),
        "megatron": SystemCase("Megatron DDP, overlap", "systems_megatron:ddp", Role.PEER, whole),
        "megatron-do": SystemCase("Megatron DistOpt, overlap grads", "systems_megatron:sharded", Role.PEER, zero_1),
        "megatron-do-both": SystemCase("Megatron DistOpt, overlap both", "systems_megatron:overlapped", Role.PEER, zero_1),
        "deepspeed-1": SystemCase("DeepSpeed ZeRO-1", "systems_deepspeed:zero_1", Role.PEER, lambda ranks: 8 + 12 / ranks),
        "deepspeed-2": SystemCase("DeepSpeed ZeRO-2", "systems_deepspeed:zero_2", Role.PEER, lambda ranks: 4 + 16 / ranks),
        **_ours("mb-ar", "all-reduce, plain AdamW", "all_reduce"),
        **_ours("mb-ar-flat", "all-reduce, flat", "all_reduce_flat"),
        **_ours("mb-rs", "reduce-scatter", "reduce_scatter"),
        **_ours("mb-rs-both", "reduce-scatter, overlap both", "reduce_scatter_overlapped"),
        **_ours("mb-ar-sent", "all-reduce, over sockets", "all_reduce_sent", only_on="loopback"),
        **_ours("mb-rs-sent", "reduce-scatter, over sockets", "reduce_scatter_sent", only_on="loopback"),
        **_ours("mb-ar-cuts", "all-reduce, planned cuts", "all_reduce_planned", only_on="fabric"),
        **_ours("mb-rs-cuts", "reduce-scatter, planned cuts", "reduce_scatter_planned", only_on="fabric"),
    }
)

NAMES = tuple(SYSTEMS)
PEERS = tuple(name for name, case in SYSTEMS.items() if case.role is Role.PEER)
