"""Episodes in which all ranks do alike, or some do what harms nobody."""

# ruff: noqa: ARG001 - functions of one table have the same parameters
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from megabucket.chaos.loopback_soak.acts import (
    Abort,
    Act,
    Backward,
    CheckReplicas,
    ClipTooEarly,
    Differentiate,
    Finish,
    Forward,
    ReadLastError,
    Rebuild,
    Save,
    Start,
    Update,
    Zero,
)
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.model_changes import Move
from megabucket.chaos.loopback_soak.program import Agreed, Block, Call, Clearing, Ending, Episode, Outcome, Rerun, Trouble, Want
from megabucket.chaos.loopback_soak.slips import AGREED, FINE, failed, late, raise_in
from megabucket.chaos.loopback_soak.slips_grads import leave_out, nonfinite, reentrant, spoil_gradient
from megabucket.chaos.loopback_soak.slips_model import model_change


def simple(maker: Maker, kind: str, draft: Draft, *agreed: Agreed, may_be_right: bool = True, place: str = "") -> Episode:
    """Return one step of all ranks that ends right, or in one of some errors for all of them."""
    blocks = [(draft.block(rank), maker_tail) for rank, maker_tail in zip(maker.ranks, _tails(maker), strict=True)]
    outcomes = [Outcome(tuple((FINE, FINE) for _ in maker.ranks))] if may_be_right else []
    outcomes += [Outcome(tuple((AGREED, FINE) for _ in maker.ranks), one) for one in agreed]
    return Episode(kind, tuple(blocks), tuple(outcomes), place)


def _tails(maker: Maker) -> list[Block]:
    return [maker.tail()] * maker.spec.num_ranks


def healthy(maker: Maker) -> Episode:
    """Run a step."""
    return simple(maker, "healthy", maker.step())


def joined(maker: Maker) -> Episode:
    """Differentiate the sum of the last two outputs, in one backward."""
    draft = maker.step(num_microbatches=maker.draw.choice((2, 3)))
    for rank in maker.ranks:
        for microbatch in range(draft.num_microbatches):
            draft.change_call(rank, microbatch, without_reentrant)  # it would give a layer two gradients in one backward
        acts = draft.acts[rank]
        first, last = acts[draft.index(rank, Backward, -2)], acts[draft.index(rank, Backward, -1)]
        assert isinstance(first, Backward) and isinstance(last, Backward)  # noqa: S101, PT018 - narrows
        draft.acts[rank] = [replace(act, joins=first.slot) if act is last else act for act in acts if act is not first]
    return simple(maker, "joined backward", draft)


def without_reentrant(call: Call) -> Call:
    """Return a call that uses no reentrant checkpointing."""
    uses = tuple(replace(use, rerun=Rerun.NONE) if use.rerun is Rerun.REENTRANT else use for use in call.uses)
    return replace(call, uses=uses)


def fault_in_dropped_step(maker: Maker) -> Episode | None:
    """Clear gradients instead of stepping on them on all ranks, when one of them is at fault: the error comes all the same."""
    if maker.spec.fence_act == "Backward":
        return None
    draft = maker.step()
    rank = maker.pick_rank()
    last = draft.acts[rank][draft.index(rank, Backward, -1)]
    if isinstance(last, Backward) and last.depth:
        return None  # nothing was going to be reduced yet, so nobody is told
    draft.guards = [False] * maker.spec.num_ranks
    slip = maker.draw.choice((nonfinite, model_change, reentrant))(maker, draft, rank)
    if slip is None:
        return None
    for other in maker.ranks:
        fence = draft.index(other, Finish if maker.spec.is_explicit else Update)
        draft.acts[other][fence:] = [Zero(Clearing.WRAPPER)]
    after = Block(tuple(act for block, _ in slip.after for act in block.acts))
    tail = maker.tail()
    programs = tuple((draft.block(other), after if other == rank else Block(), tail) for other in maker.ranks)
    at_zero = Want(Ending.AGREED, at="Zero")
    outcomes = [Outcome(tuple((at_zero, FINE, FINE) for _ in maker.ranks), agreed) for agreed in slip.agreed]
    if slip.may_be_right:
        outcomes.append(Outcome(tuple((FINE, FINE, FINE) for _ in maker.ranks)))
    return Episode("fault in a dropped step", programs, tuple(outcomes), slip.place)


def earlier_forward(maker: Maker) -> Episode:
    """Differentiate an output of the step before, which may have been dropped."""
    first, second = maker.step(), maker.step()
    for rank in maker.ranks:
        call = first.calls[rank][0]
        first.acts[rank].insert(first.index(rank, Forward), Forward(95, call))
        second.acts[rank].insert(second.index(rank, Backward, -1), Backward(95, depth=1))
    tail = maker.tail()
    if maker.chance(0.5):
        programs = tuple((first.block(rank), second.block(rank), tail) for rank in maker.ranks)
        return Episode("earlier forward", programs, (Outcome(tuple((FINE, FINE, FINE) for _ in maker.ranks)),))
    at_fault, reason = maker.pick_rank(), maker.text()
    first.acts[at_fault][first.index(at_fault, Forward, 1) :] = [Abort(reason), Abort(maker.text())]
    programs = tuple((first.block(rank), second.block(rank), tail) for rank in maker.ranks)
    agreed = failed(at_fault, "abort_step()", f"{reason}.")
    wants = tuple((FINE if rank == at_fault else AGREED, FINE, FINE) for rank in maker.ranks)
    return Episode("earlier forward", programs, (Outcome(wants, agreed),), place="of a dropped step")


def forced(maker: Maker) -> Episode:
    """All-reduce although the world scatters."""
    draft = maker.step()
    maker.forced(draft)
    return simple(maker, "forced all-reduce", draft)


def harmless(maker: Maker) -> Episode:
    """Make calls in between, on some ranks only, that change nothing."""
    draft = maker.step()
    place = maker.draw.choice(tuple(_HARMLESS))
    insert = _HARMLESS[place]
    for rank in maker.ranks:
        if place in _FOR_ALL or maker.chance(0.6):
            insert(maker, draft, rank)
    return simple(maker, "harmless", draft, place=place)


def _insert(draft: Draft, rank: int, at: int, *acts: Act) -> None:
    draft.acts[rank][at:at] = acts


def _zero_again(maker: Maker, draft: Draft, rank: int) -> None:
    _insert(draft, rank, draft.index(rank, Zero), Zero(maker.draw.choice((Clearing.WRAPPER, maker.spec.clearing))))


def _finish_again(maker: Maker, draft: Draft, rank: int) -> None:
    at = draft.index(rank, Update) + (maker.spec.fence_act == "Update")
    _insert(draft, rank, at, Finish(), Finish())


def _start_late(maker: Maker, draft: Draft, rank: int) -> None:
    _insert(draft, rank, draft.index(rank, Backward, -1) + 1, Start())


def _forward_unseen(maker: Maker, draft: Draft, rank: int) -> None:
    at = maker.draw.randint(draft.index(rank, Forward), draft.index(rank, Update))
    _insert(draft, rank, at, Forward(92, draft.calls[rank][0], how=maker.draw.choice(("eval", "no_grad"))))


def _differentiate_outside(maker: Maker, draft: Draft, rank: int) -> None:
    # Also before gradients of the last step are cleared, and after the optimizer's step.
    at = maker.draw.choice((0, draft.index(rank, Forward), draft.index(rank, Update) + 1))
    _insert(draft, rank, at, Forward(93, draft.calls[rank][0]), Differentiate(93))


def _train_in_eval_mode(maker: Maker, draft: Draft, rank: int) -> None:
    at = draft.index(rank, Forward)
    act = draft.acts[rank][at]
    assert isinstance(act, Forward)  # noqa: S101 - narrows
    draft.acts[rank][at] = replace(act, how="eval")


def _read(maker: Maker, draft: Draft, rank: int) -> None:
    at = maker.draw.randrange(len(draft.acts[rank]) + 1)
    _insert(draft, rank, at, maker.draw.choice((Save(), ReadLastError())))


def _check(maker: Maker, draft: Draft, rank: int) -> None:
    _insert(draft, rank, 0, CheckReplicas())


def _rebuild(maker: Maker, draft: Draft, rank: int) -> None:
    _insert(draft, rank, 0, Rebuild(maker.trained))


def _differentiate(maker: Maker, draft: Draft, rank: int) -> None:
    at = draft.index(rank, Backward, -1)
    _insert(draft, rank, at, Forward(93, draft.calls[rank][0]), Differentiate(93))


def _move(maker: Maker, draft: Draft, rank: int) -> None:
    param = min(name for name in maker.trained if maker.spec.model.numels[name])
    _insert(draft, rank, 0, Move(param), Rebuild(maker.trained))


def _finish_all(maker: Maker, draft: Draft, rank: int) -> None:
    _insert(draft, rank, draft.index(rank, Update), Finish())


def _clip_too_early(maker: Maker, draft: Draft, rank: int) -> None:
    at = draft.index(rank, Backward, -1)
    last = draft.acts[rank][at]
    if maker.spec.fence_act != "Backward" and isinstance(last, Backward) and not last.depth:
        _insert(draft, rank, at + 1, ClipTooEarly())


def _start_over(maker: Maker, draft: Draft, rank: int) -> None:
    at = draft.index(rank, Forward)
    call = draft.calls[rank][0]
    _insert(draft, rank, at, Forward(94, call), Backward(94, depth=1), Zero(Clearing.WRAPPER))


_HARMLESS: Final[Mapping[str, Callable[[Maker, Draft, int], None]]] = MappingProxyType(
    {
        "zero twice": _zero_again,
        "finish twice": _finish_again,
        "start after backward": _start_late,
        "forward that is not for training": _forward_unseen,
        "training in eval mode": _train_in_eval_mode,
        "autograd.grad outside": _differentiate_outside,
        "autograd.grad between": _differentiate,
        "state_dict or last_error": _read,
        "check_replicas": _check,
        "rebuild": _rebuild,
        "move and rebuild": _move,
        "finish before step": _finish_all,
        "clip too early": _clip_too_early,
        "started over": _start_over,
    }
)
_FOR_ALL: Final = frozenset({"check_replicas", "rebuild", "move and rebuild", "finish before step"})


def dropped(maker: Maker) -> Episode:
    """Clear gradients instead of stepping on them, on all ranks."""
    draft = maker.step()
    for rank in maker.ranks:
        at = draft.index(rank, Update)
        if maker.spec.is_explicit and maker.spec.seed % 2:
            at = draft.index(rank, Finish)
        draft.acts[rank][at:] = [Zero(Clearing.WRAPPER)]
    return simple(maker, "dropped by all", draft)


def huge(maker: Maker) -> Episode | None:
    """Let huge gradients of two ranks cancel: a finite test must not overflow."""
    draft = maker.step(uses_all=True)
    layers = maker.spec.model.layers
    shared = {layer.shares_with for layer in layers}
    free = [index for index, layer in enumerate(layers) if layer.shares_with < 0 and index not in shared]
    if not free:
        return None
    layer = maker.draw.choice(free)
    plus, minus = maker.draw.sample(maker.ranks, 2)
    for rank in maker.ranks:
        amount = 2.0**100 if rank == plus else -(2.0**100) if rank == minus else 0.0
        for microbatch in range(draft.num_microbatches):
            is_first = True
            uses = []
            for use in draft.calls[rank][microbatch].uses:
                is_it = use.layer == layer
                uses.append(replace(use, factor=amount if is_it and is_first and not microbatch else 0.0) if is_it else use)
                is_first = is_first and not is_it
            draft.change_call(rank, microbatch, lambda call, uses=tuple(uses): replace(call, uses=uses))  # type: ignore[misc]
    return simple(maker, "huge but finite", draft)


def nonfinite_by_policy(maker: Maker) -> Episode | None:
    """Let a gradient be nan or infinite where the config skips such steps, or allows them."""
    policy = maker.spec.switch("nonfinite_gradients", "error")
    if policy == "error":
        return None
    draft = maker.step()
    rank = maker.pick_rank()
    if not spoil_gradient(maker, draft, rank, float(maker.draw.choice(("nan", "inf")))):
        return None
    if policy == "skip_step":
        outcome = Outcome(tuple((FINE, FINE) for _ in maker.ranks), skips=f"on rank {rank} (bucket ")
        return replace(simple(maker, "nan or inf, skip_step", draft), outcomes=(outcome,))
    for other in maker.ranks:
        at = draft.index(other, Update)
        draft.acts[other][at] = Update(updates=False) if maker.spec.wraps_optimizer else Zero(Clearing.WRAPPER)
    return simple(maker, "nan or inf, allow", draft)


def unused_on_all(maker: Maker) -> Episode | None:
    """Leave one layer out on all ranks."""
    draft = maker.step()
    layer = maker.draw.randrange(len(maker.spec.model.layers))
    params, *_ = [leave_out(maker, draft, rank, layer) for rank in maker.ranks]
    if not params:
        return None
    if not maker.spec.notices_unused:
        return simple(maker, "unused on all ranks", draft)
    fields = {"ranks": tuple(maker.ranks), "params": params}
    agreed = Agreed("UnusedParameterError", fields, ("got no gradient on any rank",))
    return simple(maker, "unused on all ranks", draft, agreed, may_be_right=False)


def late_anywhere(maker: Maker) -> Agreed:
    """Return the late gradient of any rank: which of them had launched by then depends on what each has seen before."""
    agreed = late(0, maker.spec)
    return replace(
        agreed,
        fields={**agreed.fields, "rank": frozenset(maker.ranks)},
        pieces=(),
        later_by=int(maker.spec.fence_act == "Backward"),
    )


def second_backward_on_all(maker: Maker) -> Episode:
    """Differentiate the last microbatch twice, on all ranks: accumulated like any other, or late."""
    draft = maker.step(uses_all=True)
    for rank in maker.ranks:
        at = draft.index(rank, Backward, -1)
        act = draft.acts[rank][at]
        assert isinstance(act, Backward)  # noqa: S101 - narrows
        draft.acts[rank][at : at + 1] = [replace(act, retains=True), act]
    return simple(maker, "second backward on all ranks", draft, late_anywhere(maker))


def no_sync_left_out_on_all(maker: Maker) -> Episode:
    """Run every backward outside ``no_sync``, on all ranks."""
    draft = maker.step(num_microbatches=maker.draw.choice((2, 3)), uses_all=True)
    for rank in maker.ranks:
        draft.acts[rank] = [replace(act, depth=0) if isinstance(act, Backward) else act for act in draft.acts[rank]]
    return simple(maker, "no_sync left out on all ranks", draft, late_anywhere(maker))


def zero_between_on_all(maker: Maker) -> Episode:
    """Forget the first microbatches, on all ranks."""
    draft = maker.step(num_microbatches=maker.draw.choice((2, 3)), uses_all=True)
    for rank in maker.ranks:
        draft.acts[rank].insert(draft.index(rank, Backward, -1), Zero(Clearing.WRAPPER))
    return simple(maker, "zero between microbatches on all ranks", draft)


def two_updates_on_all(maker: Maker) -> Episode:
    """Step twice on the same gradients, on all ranks."""
    draft = maker.step()
    if maker.spec.is_sharded:
        draft.guards = [False] * maker.spec.num_ranks
    for rank in maker.ranks:
        draft.acts[rank].insert(draft.index(rank, Update), Update())
    episode = simple(maker, "two updates on all ranks", draft)
    if not maker.spec.is_sharded:
        return episode
    refused = Want(Ending.REFUSED, error="PhaseError", text="step() was called twice on the same gradients", at="Update")
    zero = Block((Zero(Clearing.WRAPPER),))
    programs = tuple((step, zero, tail) for step, tail in episode.programs)
    return replace(episode, programs=programs, outcomes=(Outcome(tuple((refused, FINE, FINE) for _ in maker.ranks)),))


def exception_on_all(maker: Maker) -> Episode:
    """Raise on every rank, each at a place of its own."""
    draft = maker.step()
    draft.guards = [False] * maker.spec.num_ranks
    trouble = [maker.draw.choice((Trouble.FORWARD, Trouble.BACKWARD, Trouble.PARAM_HOOK)) for _ in maker.ranks]
    slips = [raise_in(maker, draft, rank, trouble[rank]) for rank in maker.ranks]
    outcome = Outcome(tuple((slip.want, FINE) for slip in slips), slips[0].agreed[0])
    return replace(simple(maker, "exception on all ranks", draft), outcomes=(outcome,))


def unreduced_on_all(maker: Maker) -> Episode:
    """Step although every backward ran inside ``no_sync``, on all ranks."""
    draft = maker.step()
    draft.guards = [False] * maker.spec.num_ranks
    for rank in maker.ranks:
        acts = draft.acts[rank][: draft.index(rank, Backward, -1) + 1]
        draft.acts[rank] = [*(replace(act, depth=1) if isinstance(act, Backward) else act for act in acts), Update()]
    want = Want(Ending.REFUSED, error="UnreducedGradientsError", text="the gradients are not reduced", at="Update")
    agreed = failed(0, "optimizer.step()", "UnreducedGradientsError: step() was called")
    outcome = Outcome(tuple((want, FINE) for _ in maker.ranks), agreed)
    return replace(simple(maker, "unreduced on all ranks", draft), outcomes=(outcome,))


ALL_RANK_KINDS: Final[Mapping[str, Callable[[Maker], Episode | None]]] = MappingProxyType(
    {
        "healthy": healthy,
        "forced all-reduce": forced,
        "joined backward": joined,
        "fault in a dropped step": fault_in_dropped_step,
        "earlier forward": earlier_forward,
        "harmless": harmless,
        "dropped by all": dropped,
        "huge but finite": huge,
        "nan or inf by policy": nonfinite_by_policy,
        "unused on all ranks": unused_on_all,
        "second backward on all ranks": second_backward_on_all,
        "no_sync left out on all ranks": no_sync_left_out_on_all,
        "zero between microbatches on all ranks": zero_between_on_all,
        "two updates on all ranks": two_updates_on_all,
        "exception on all ranks": exception_on_all,
        "unreduced on all ranks": unreduced_on_all,
    }
)
