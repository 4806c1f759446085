"""Episodes in which all ranks change the module and rebuild, or compare their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from megabucket.chaos.loopback_soak.acts import CheckReplicas, Finish, FlipBit, Rebuild, Restore, Save, Update
from megabucket.chaos.loopback_soak.drafts import Maker
from megabucket.chaos.loopback_soak.model_changes import Replace, SetTrained
from megabucket.chaos.loopback_soak.program import Agreed, Block, Ending, Episode, Outcome, Want
from megabucket.chaos.loopback_soak.slips import AGREED, FINE


def flipped_bit(maker: Maker) -> Episode:
    """Flip a bit of a weight on one rank; ``check_replicas()`` finds it, and the checkpoint repairs it."""
    at_fault = maker.pick_rank()
    param = maker.draw.choice([name for name, numel in maker.spec.model.numels.items() if numel])
    check = [Block((FlipBit(param), CheckReplicas()) if rank == at_fault else (CheckReplicas(),)) for rank in maker.ranks]
    tail = maker.tail()
    programs = tuple((Block((Save(),)), check[rank], Block((Restore(),)), tail) for rank in maker.ranks)
    agreed = Agreed("ReplicasDivergedError", {}, (f"the bits of {param!r} (CRC-32) differ",), is_last_error=False)
    outcome = Outcome(tuple((FINE, Want(Ending.AGREED, at="CheckReplicas"), FINE, FINE) for _ in maker.ranks), agreed)
    return Episode("flipped bit", programs, (outcome,), place=param)


def rebuilt(maker: Maker) -> Episode | None:
    """Freeze or unfreeze a parameter on all ranks, rebuild, and train on; sometimes only after the error about it."""
    model = maker.spec.model
    frozen = [name for name in model.numels if name not in maker.trained and name != "frozen"]
    is_unfreezing = bool(frozen) and maker.chance(0.6)
    candidates = frozen if is_unfreezing else sorted(name for name in maker.trained if model.numels[name])
    param = maker.draw.choice(candidates)
    trained = maker.trained | {param} if is_unfreezing else maker.trained - {param}
    if not any(name in trained and name.endswith(".p0") and model.numels[name] for name in trained):
        return None
    before = maker.step()
    maker.trained = trained
    change, after = SetTrained(param, is_unfreezing), maker.step()
    tail = maker.tail()
    # A step with a frozen layer might have nothing to differentiate.
    runs_into_it = is_unfreezing and maker.chance(0.4)
    first = [Block((change, *before.acts[rank]) if runs_into_it else (change,)) for rank in maker.ranks]
    programs = tuple((first[rank], Block((Rebuild(trained),)), after.block(rank), tail) for rank in maker.ranks)
    one = (param,)
    fields = {"rank": 0, "unfrozen": one if is_unfreezing else (), "frozen": () if is_unfreezing else one}
    agreed = Agreed("TrainabilityChangedError", fields) if runs_into_it else None
    outcome = Outcome(tuple((AGREED if runs_into_it else FINE, FINE, FINE, FINE) for _ in maker.ranks), agreed)
    return Episode("rebuild", programs, (outcome,), place=f"{'unfreeze' if is_unfreezing else 'freeze'} {param}")


def replaced(maker: Maker) -> Episode | None:
    """Replace a parameter on all ranks, rebuild, and train on."""
    model = maker.spec.model
    shared = {f"layers.{layer.shares_with}.p0" for layer in model.layers}
    params = sorted(name for name in maker.trained - shared if model.numels[name])
    if not params:
        return None
    param = maker.draw.choice(params)
    draft, tail = maker.step(), maker.tail()
    change = Block((Replace(param), Rebuild(maker.trained)))
    programs = tuple((change, draft.block(rank), tail) for rank in maker.ranks)
    outcome = Outcome(tuple((FINE, FINE, FINE) for _ in maker.ranks))
    return Episode("replace and rebuild", programs, (outcome,), place=param)


def rebuilt_in_open_step(maker: Maker) -> Episode:
    """Rebuild between the last backward and the optimizer's step, on all ranks: the gradients are dropped."""
    draft, after, tail = maker.step(), maker.step(), maker.tail()
    first_left_out = Finish if maker.spec.is_explicit and maker.chance(0.5) else Update
    for rank in maker.ranks:
        draft.acts[rank][draft.index(rank, first_left_out) :] = [Rebuild(maker.trained)]
    programs = tuple((draft.block(rank), after.block(rank), tail) for rank in maker.ranks)
    return Episode("rebuild in an open step", programs, (Outcome(tuple((FINE, FINE, FINE) for _ in maker.ranks)),))


REBUILD_KINDS: Final[Mapping[str, Callable[[Maker], Episode | None]]] = MappingProxyType(
    {
        "flipped bit": flipped_bit,
        "rebuild": rebuilt,
        "replace and rebuild": replaced,
        "rebuild in an open step": rebuilt_in_open_step,
    }
)
