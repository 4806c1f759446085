"""Faults of one rank in what its gradients are: not finite, missing, late."""

from __future__ import annotations

from dataclasses import replace

from megabucket.chaos.loopback_soak.acts import Backward, Start
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.program import Agreed, Rerun, Use
from megabucket.chaos.loopback_soak.slips import AGREED, FINE, Slip, free_layer, late


def nonfinite(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Let one layer's gradient be nan or infinite."""
    if maker.spec.switch("nonfinite_gradients", "error") != "error":
        return None
    what = maker.draw.choice(("nan", "inf"))
    params = spoil_gradient(maker, draft, rank, float(what))
    if not params:
        return None
    fields = {
        "rank": rank,
        "param": params,
        "finding": frozenset(f"{what} in {n} of {n} elements, first at [0]" for n in _NUMELS),
    }
    return Slip(AGREED, (Agreed("NonFiniteGradientError", fields, (f"on rank {rank} (bucket ",)),), place=what)


_NUMELS = (1, 3, 7, 64, 70, 130)


def spoil_gradient(maker: Maker, draft: Draft, rank: int, factor: float) -> frozenset[str]:
    """Give one layer a factor that is not finite in some microbatch; return the parameters that get it."""
    microbatch = maker.draw.randrange(draft.num_microbatches)
    uses = draft.calls[rank][microbatch].uses
    numels, model = maker.spec.model.numels, maker.spec.model

    def reached(use: Use) -> frozenset[str]:
        return frozenset(name for name in model.params_of(use.layer) if numels[name] and name in maker.trained)

    places = [place for place, use in enumerate(uses) if reached(use)]
    if not places:
        return frozenset()
    at = maker.draw.choice(places)
    changed = tuple(replace(use, factor=factor) if place == at else use for place, use in enumerate(uses))
    draft.change_call(rank, microbatch, lambda call: replace(call, uses=changed))
    return reached(uses[at])


def unused(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Leave one layer out of all forwards of the step."""
    params = leave_out(maker, draft, rank)
    if not params:
        return None
    if not maker.spec.notices_unused:
        return Slip(FINE, (), may_be_right=True, place="zeros")
    fields = {"ranks": (rank,), "params": params}
    return Slip(AGREED, (Agreed("UnusedParameterError", fields, (f"got no gradient on rank {rank} of ",)),))


def leave_out(maker: Maker, draft: Draft, rank: int, layer: int | None = None) -> frozenset[str]:
    """Leave a layer out; return the trained parameters that nothing uses then (none, and no change, where that cannot be)."""
    layers, params_of = range(len(maker.spec.model.layers)), maker.spec.model.params_of
    gone = maker.draw.choice(layers) if layer is None else layer
    others = {name for other in layers if other != gone for name in params_of(other)}
    params = maker.trained.intersection(params_of(gone)) - others
    stand_in = next((other for other in layers if other != gone and maker.trained.intersection(params_of(other))), None)
    if not params or stand_in is None:
        return frozenset()
    for microbatch in range(draft.num_microbatches):
        kept = tuple(use for use in draft.calls[rank][microbatch].uses if use.layer != gone)
        if not any(maker.trained.intersection(params_of(use.layer)) for use in kept):
            kept = (*kept, Use(stand_in, maker.factor()))
        draft.change_call(rank, microbatch, lambda call, kept=kept: replace(call, uses=kept, at=0))  # type: ignore[misc]
    return params


def reentrant(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Run a layer twice under reentrant checkpointing, which gives its parameters two gradients in one backward."""
    layer = free_layer(maker)
    if not maker.trained.issuperset(maker.spec.model.params_of(layer)):
        return None
    twice = tuple(Use(layer, maker.factor(), Rerun.REENTRANT) for _ in range(2))
    draft.change_call(rank, -1 % draft.num_microbatches, lambda call: replace(call, uses=(*call.uses, *twice)))
    return Slip(AGREED, (late(rank, maker.spec),), may_be_right=True)


def start_early(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Launch all buckets before the last backward."""
    draft.acts[rank].insert(draft.index(rank, Backward, -1), Start())
    return Slip(AGREED, (late(rank, maker.spec),), may_be_right=True)
