"""The phases of one bucket group, and the only ways from one to the next.

A phase says who may touch the memory. Every transition goes through ``enter``, so an illegal order of calls is an error with
both phases in it and never a flag that somebody forgot.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from megabucket.errors import PhaseError


class GradPhase(enum.Enum):
    """Where one bucket group's gradients are within a step."""

    ACCUMULATING = "accumulating"  # backward may still add into the buffer
    IN_FLIGHT = "in flight"  # a collective owns the buffer; nobody else may touch it
    REDUCED = "already reduced"  # reduced values: everywhere (all-reduce) or in this rank's shard (reduce-scatter)


class ParamPhase(enum.Enum):
    """Where one bucket group's parameters are within a step."""

    GATHERED = "gathered"  # every rank holds all values; forward may read
    STALE = "stale"  # the optimizer updated this rank's shard; the other shards hold last step's values
    IN_FLIGHT = "in flight"  # a gather owns the buffer; forward must wait


Phase = TypeVar("Phase", GradPhase, ParamPhase)

GRAD_TRANSITIONS: Final[Mapping[GradPhase, frozenset[GradPhase]]] = MappingProxyType(
    {
        GradPhase.ACCUMULATING: frozenset({GradPhase.IN_FLIGHT}),
        GradPhase.IN_FLIGHT: frozenset({GradPhase.REDUCED}),
        GradPhase.REDUCED: frozenset({GradPhase.ACCUMULATING}),
    }
)
PARAM_TRANSITIONS: Final[Mapping[ParamPhase, frozenset[ParamPhase]]] = MappingProxyType(
    {
        ParamPhase.GATHERED: frozenset({ParamPhase.STALE, ParamPhase.IN_FLIGHT}),
        ParamPhase.STALE: frozenset({ParamPhase.IN_FLIGHT}),
        ParamPhase.IN_FLIGHT: frozenset({ParamPhase.GATHERED}),
    }
)


class PhaseMachine(Generic[Phase]):
    """The current phase and the table of legal transitions."""

    __slots__ = ("_owner", "_transitions", "current")

    def __init__(self, owner: str, initial: Phase, transitions: Mapping[Phase, frozenset[Phase]]) -> None:
        self._owner = owner
        self.current: Phase = initial
        self._transitions: Mapping[Phase, frozenset[Phase]] = transitions

    def enter(self, phase: Phase) -> None:
        """Go to ``phase``.

        Raises:
            PhaseError: the table has no way from the current phase to ``phase``.
        """
        if phase not in self._transitions[self.current]:
            # Sorted: a set of texts has another order in every process, and all ranks shall say the same.
            allowed = ", ".join(sorted(f"'{following.value}'" for following in self._transitions[self.current]))
            raise PhaseError(
                f"{self._owner} is '{self.current.value}' and cannot become '{phase.value}' (only {allowed}). "
                "The calls of a step came in an order that would read or write memory somebody else owns; "
                "the order is backward, finish_grad_sync, step, zero_grad."
            )
        self.current = phase
