"""Faults of one rank that makes the same calls as the others with other things: gradients, weights, a learning rate."""

# ruff: noqa: ARG001 - functions of one table have the same parameters
from __future__ import annotations

from dataclasses import replace

from megabucket.chaos.loopback_soak.acts import Backward, ClearAsTorch, LoadOwnWeights, SetRate, Update
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.program import Agreed, Block
from megabucket.chaos.loopback_soak.slips import AGREED, FINE, Slip, step_mismatch


def cleared_between(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Clear gradients between two microbatches as plain torch does."""
    if draft.num_microbatches < 2:
        return None
    last = draft.index(rank, Backward, -1)
    before = draft.index(rank, Backward, -2)
    draft.acts[rank].insert(maker.draw.randint(before + 1, last), ClearAsTorch())
    return Slip(AGREED, (step_mismatch("steps whose gradients were cleared or replaced between two backwards"),))


def weights_loaded(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Load weights; nobody can know that they are the same ones."""
    draft.acts[rank].insert(0, LoadOwnWeights())
    return Slip(AGREED, (Agreed("ReplicasDivergedError", {}, ("loads of weights (load_state_dict(), by submodule)",)),))


def other_rate(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Update with another learning rate; with whole parameters that is an error of the next step."""
    if not maker.spec.is_sharded:
        return None
    draft.acts[rank].insert(draft.index(rank, Update), SetRate(0.5))
    rates = tuple("0.5" if other == rank else "1.0" for other in maker.ranks)
    agreed = Agreed("HyperparameterMismatchError", {"what": "lr of group 0", "by_rank": rates})
    return Slip(AGREED, (replace(agreed, at="Update"),), after=((Block((SetRate(1.0),)), FINE),))
