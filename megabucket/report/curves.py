"""Memory and scaling over the number of ranks. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megabucket.errors import ConfigError
from megabucket.planning.memory import RankMemory, memory_by_mode
from megabucket.planning.outlook import MANY_TENSORS
from megabucket.planning.setting import Setting
from megabucket.planning.sweep import RANKS, scaling_row
from megabucket.report.layouts import layout_of, layout_plan, specs_of


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of rank 0, which never owns less than another rank, by category in both modes."""

    dp_size: int
    all_reduce: Mapping[str, int]
    reduce_scatter: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A step on so many ranks. Efficiency is the step without communication divided by the step with it."""

    num_ranks: int
    config_s: float
    config_efficiency: float
    optimal_s: float
    optimal_efficiency: float


@dataclass(frozen=True, slots=True)
class Curves:
    """Both curves, and why points of the second one are missing."""

    memory: tuple[MemoryRow, ...]
    scaling: tuple[ScalingRow, ...]
    scaling_gaps: tuple[str, ...]


def curves_of(setting: Setting, *, moments_per_element: int) -> Curves:
    """Return memory and scaling from 1 to 4096 ranks, with the layout that each number of ranks gives.

    Args:
        moments_per_element: tensors of optimizer state.

    Raises:
        ConfigError: the config cannot be honoured for these parameters.
        LayoutError: no buffer can hold them.
    """
    memory, scaling = [], []
    gaps: dict[str, None] = {}
    # Each point lays the model out anew.
    ranks = RANKS if len(setting.workload.tensors) < MANY_TENSORS else RANKS[::6]
    for num_ranks in sorted({*ranks, setting.dp_size}):
        there = setting.on(num_ranks)
        memory.append(_memory_row(there, moments_per_element))
        try:
            scaling.append(_scaling_row(there))
        except ConfigError as error:  # a measured link knows its own number of ranks only; two levels want whole nodes
            gaps[str(error)] = None
    return Curves(tuple(memory), tuple(scaling), tuple(gaps))


def _memory_row(setting: Setting, moments_per_element: int) -> MemoryRow:
    modes = memory_by_mode(
        specs_of(setting),
        setting.ddp,
        dp_size=setting.dp_size,
        expert_dp_size=setting.expert_dp_size,
        moments_per_element=moments_per_element,
    )
    return MemoryRow(setting.dp_size, _categories(modes["all_reduce"]), _categories(modes["reduce_scatter"]))


def _categories(memory: RankMemory) -> dict[str, int]:
    return {field.name.removesuffix("_bytes"): getattr(memory, field.name) for field in fields(memory)}


def _scaling_row(setting: Setting) -> ScalingRow:
    config = scaling_row(setting, lambda there: layout_plan(there, layout_of(there)))
    optimal = scaling_row(setting, lambda there: there.optimal_plan)
    return ScalingRow(setting.dp_size, config.step_s, config.efficiency, optimal.step_s, optimal.efficiency)
