"""The phases of one bucket group, and the only ways from one to the next.

A phase says who may touch the memory. Every transition goes through ``enter``, so an illegal order of calls is an error that
names both phases.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from megabucket.errors import PhaseError


class GradPhase(enum.Enum):
    """Where one bucket group's gradients are within a step."""

    ACCUMULATING = "accumulating"  # backward may still add into the buffer
    IN_FLIGHT = "in flight"  # a collective owns the buffer; no other code may touch it
    REDUCED = "already reduced"  # reduced values: everywhere (all-reduce) or in this rank's shard (reduce-scatter)


class ParamPhase(enum.Enum):
    """Where one bucket group's parameters are within a step."""

    GATHERED = "gathered"  # every rank holds all values; forward may read
    STALE = "stale"  # the optimizer updated this rank's shard; the other shards hold last step's values
    IN_FLIGHT = "in flight"  # a gather owns the buffer; forward must wait


Phase = TypeVar("Phase", GradPhase, ParamPhase)

TRANSITIONS: Final[Mapping[GradPhase | ParamPhase, frozenset[GradPhase | ParamPhase]]] = MappingProxyType(
    {
        GradPhase.ACCUMULATING: frozenset({GradPhase.IN_FLIGHT}),
        GradPhase.IN_FLIGHT: frozenset({GradPhase.REDUCED}),
        GradPhase.REDUCED: frozenset({GradPhase.ACCUMULATING}),
        ParamPhase.GATHERED: frozenset({ParamPhase.STALE, ParamPhase.IN_FLIGHT}),
        ParamPhase.STALE: frozenset({ParamPhase.IN_FLIGHT}),
        ParamPhase.IN_FLIGHT: frozenset({ParamPhase.GATHERED}),
    }
)


def enter(current: Phase, following: Phase, *, group: int) -> Phase:
    """Return ``following``, if a bucket group in phase ``current`` may enter it.

    Raises:
        PhaseError: the table has no such transition.
    """
    if following not in TRANSITIONS[current]:
        what = "gradients" if isinstance(current, GradPhase) else "parameters"
        # Sorted, because the order of a set differs between processes and all ranks must raise the same text.
        allowed = ", ".join(sorted(f"'{phase.value}'" for phase in TRANSITIONS[current]))
        raise PhaseError(
            f"the {what} of bucket group {group} is '{current.value}' and cannot become '{following.value}' (only {allowed}). "
            "This order of calls would read or write memory that another owner uses; "
            "the order is backward, finish_grad_sync, step, zero_grad."
        )
    return following
