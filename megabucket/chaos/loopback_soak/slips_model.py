"""Changes of one rank's module after wrapping."""

from __future__ import annotations

from dataclasses import replace

from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.model_changes import Break, Change, Repair
from megabucket.chaos.loopback_soak.program import Agreed, Block, Call, Rerun, Use
from megabucket.chaos.loopback_soak.slips import AGREED, FINE, Slip


def model_change(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Change the module after wrapping."""
    return change_model(maker, draft, rank, maker.draw.choice(tuple(Change)))


def change_model(maker: Maker, draft: Draft, rank: int, change: Change) -> Slip | None:
    """Change the module in a given way; it is repaired afterwards."""
    params = [name for name in maker.spec.model.numels if name in maker.trained and _is_own(maker, name)]
    if not params:
        return None
    param = "frozen" if change is Change.UNFROZEN else maker.draw.choice(params)
    if change in (Change.FROZEN, Change.REPLACED) and not _do_without(maker, draft, rank, param):
        return None
    for microbatch in range(draft.num_microbatches if change is Change.HALF else 0):
        draft.change_call(rank, microbatch, lambda call: replace(call, rounds=True))
    draft.acts[rank].insert(0, Break(change, param))
    one = (param,)
    agreed = {
        Change.FROZEN: Agreed("TrainabilityChangedError", {"rank": rank, "frozen": one, "unfrozen": ()}),
        Change.UNFROZEN: Agreed("TrainabilityChangedError", {"rank": rank, "frozen": (), "unfrozen": one}),
        Change.HALF: Agreed("StorageMovedError", {"rank": rank, "params": maker.trained}, ("float16 on cpu",)),
        Change.MOVED: Agreed("StorageMovedError", {"rank": rank, "params": one}, ("in memory of its own",)),
        Change.REPLACED: Agreed("ParametersChangedError", {"rank": rank, "replaced": one, "added": ()}),
        Change.ADDED: Agreed("ParametersChangedError", {"rank": rank, "added": ("added",), "replaced": ()}),
        Change.MAIN_GRAD: Agreed("DetachedGradError", {"rank": rank, "params": one}),
    }[change]
    return Slip(AGREED, (agreed,), place=change.value, after=((Block((Repair(),)), FINE),))


def _do_without(maker: Maker, draft: Draft, rank: int, param: str) -> bool:
    """Let every forward of a rank have something to differentiate without a parameter; return whether it can."""
    layers, params_of = range(len(maker.spec.model.layers)), maker.spec.model.params_of
    other = next((layer for layer in layers if (maker.trained - {param}).intersection(params_of(layer))), None)
    if other is None:
        return False

    def add(call: Call) -> Call:
        uses = tuple(use if use.rerun is Rerun.NON_REENTRANT else replace(use, rerun=Rerun.NONE) for use in call.uses)
        return replace(call, uses=(*uses, Use(other, maker.factor())))

    for microbatch in range(draft.num_microbatches):
        draft.change_call(rank, microbatch, add)
    return True


def _is_own(maker: Maker, name: str) -> bool:
    """Whether a parameter belongs to one layer only, and has elements."""
    model = maker.spec.model
    is_shared = any(name == f"layers.{layer.shares_with}.p0" for layer in model.layers)
    return not is_shared and model.numels[name] > 0
