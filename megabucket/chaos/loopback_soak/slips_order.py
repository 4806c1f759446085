"""Faults of one rank in the number and the order of its calls."""

# ruff: noqa: ARG001 - functions of one table have the same parameters
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megabucket.chaos.loopback_soak.acts import Abort, Backward, Finish, Force, Forward, Number, Raise, Update, Zero
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.program import Agreed, Block, Clearing, Ending, Rerun, Use, Want
from megabucket.chaos.loopback_soak.slips import (
    AGREED,
    DROPPED_STEPS,
    FINE,
    SKIPPED_FORWARDS,
    Slip,
    failed,
    late,
    microbatches,
    own,
    step_mismatch,
)


def microbatch_more(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Accumulate one microbatch more than the others."""
    at = draft.index(rank, Forward)
    call = draft.calls[rank][0]
    draft.acts[rank][at:at] = [Forward(90, call), Backward(90, depth=1)]
    return Slip(AGREED, (microbatches(draft, rank, draft.num_microbatches + 1),))


def microbatch_less(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Accumulate one microbatch less, without leaving a layer out."""
    if draft.num_microbatches < 2:
        return None
    gone = draft.calls[rank][0].uses
    draft.change_call(rank, draft.num_microbatches - 1, lambda call: replace(call, uses=(*call.uses, *_plain(gone))))
    draft.acts[rank] = [act for act in draft.acts[rank] if not (isinstance(act, Forward | Backward) and act.slot == 0)]
    return Slip(AGREED, (microbatches(draft, rank, draft.num_microbatches - 1),))


def _plain(uses: Sequence[Use]) -> list[Use]:
    return [replace(use, rerun=Rerun.NONE) for use in uses]


def no_sync_left_out(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Run a backward outside ``no_sync`` that is not the last one."""
    if draft.num_microbatches < 2:
        return None
    at = draft.index(rank, Backward, maker.draw.randrange(draft.num_microbatches - 1))
    act = draft.acts[rank][at]
    assert isinstance(act, Backward)  # noqa: S101 - narrows
    draft.acts[rank][at] = replace(act, depth=0)
    if maker.spec.fence_act == "Backward":
        # Where all forwards come first, those of the other microbatches are still waiting for their backward.
        return Slip(AGREED, (microbatches(draft, rank, act.slot + 1), step_mismatch(SKIPPED_FORWARDS)))
    return Slip(AGREED, (late(rank, maker.spec),), may_be_right=True)


def forward_more(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Run a training forward that is not differentiated."""
    draft.acts[rank].insert(draft.index(rank, Forward), Forward(91, draft.calls[rank][0]))
    if maker.spec.switch("skipped_forwards", "error") == "allow":
        return Slip(FINE, (), may_be_right=True, place="allowed")
    return Slip(AGREED, (step_mismatch(SKIPPED_FORWARDS),))


def other_number(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Say that this is another step than the others say."""
    if not maker.spec.numbers_steps:
        return None
    at = draft.index(rank, Number)
    number = draft.acts[rank][at]
    assert isinstance(number, Number)  # noqa: S101 - narrows
    draft.acts[rank][at] = Number(number.number + maker.draw.choice((1, 1000)))
    return Slip(AGREED, (step_mismatch("the caller's step numbers differ between ranks"),))


def second_backward(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Differentiate the last microbatch twice."""
    if maker.spec.fence_act == "Backward":
        return None  # that is an error of the step after it
    at = draft.index(rank, Backward, -1)
    act = draft.acts[rank][at]
    assert isinstance(act, Backward)  # noqa: S101 - narrows
    draft.acts[rank][at : at + 1] = [replace(act, retains=True), act]
    return Slip(AGREED, (microbatches(draft, rank, draft.num_microbatches + 1), late(rank, maker.spec)))


def zero_instead(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Clear gradients instead of stepping on them."""
    spec = maker.spec
    if not (spec.is_sharded or spec.is_explicit):
        return None  # the gradients are reduced by then: an error of the next step
    at = draft.index(rank, Finish) if spec.is_explicit else draft.index(rank, Update)
    last = draft.acts[rank][draft.index(rank, Backward, -1)]
    agreed = step_mismatch(DROPPED_STEPS)
    if spec.is_explicit and spec.is_sharded and maker.chance(0.5):
        at += 1
        agreed = replace(agreed, at="Update")
    elif isinstance(last, Backward) and last.depth:
        return None  # nothing was going to be reduced yet: this rank forgets some microbatches
    draft.acts[rank][at:] = [Zero(maker.draw.choice((Clearing.WRAPPER, Clearing.BUFFER)))]
    return Slip(AGREED, (agreed,), place=f"before act {at}")


def zero_between(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Forget the microbatches so far."""
    if draft.num_microbatches < 2:
        return None
    last = draft.index(rank, Backward, -1)
    before = draft.index(rank, Backward, -2)
    draft.acts[rank].insert(maker.draw.randint(before + 1, last), Zero(Clearing.WRAPPER))
    return Slip(AGREED, (microbatches(draft, rank, 1),))


def only_finish(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Run no backward at all, but finish the sync."""
    at = draft.index(rank, Forward)
    draft.acts[rank][at:] = [Zero(Clearing.WRAPPER), Finish()]
    return Slip(AGREED, (microbatches(draft, rank, 0),))


def unreduced(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Step although every backward ran inside ``no_sync``."""
    last = draft.index(rank, Backward, -1)
    acts = [replace(act, depth=1) if isinstance(act, Backward) else act for act in draft.acts[rank][: last + 1]]
    draft.acts[rank] = [*acts, Update()]
    cause = "UnreducedGradientsError: step() was called"
    want = Want(Ending.REFUSED, error="UnreducedGradientsError", text="step() was called", at="Update")
    if draft.guards[rank]:
        want = AGREED
    return Slip(want, (failed(rank, "optimizer.step()", cause),))


def finish_first(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Finish the sync before the optimizer does, on one rank only."""
    if maker.spec.fence_act != "Update":
        return None
    draft.acts[rank].insert(draft.index(rank, Update), Finish())
    flags = tuple(int(other != rank) for other in maker.ranks)
    piece = "finish_grad_sync() before the optimizer step (0: called) differs between ranks"
    return Slip(AGREED, (Agreed("ScheduleMismatchError", {"by_rank": flags}, (piece,)),))


def exception_before_step(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Raise between the last backward (or ``finish_grad_sync``) and the optimizer's step, with gradients scattered."""
    if not maker.spec.is_sharded:
        return None  # the others update: an error of the next step
    text = maker.text()
    again = tuple(act for act in draft.acts[rank] if not isinstance(act, Number))
    draft.acts[rank].insert(draft.index(rank, Update), Raise(text))
    if draft.guards[rank]:
        phase = "between steps" if maker.spec.is_explicit else "backward"
        agreed = replace(failed(rank, phase, f"ValueError: {text}."), at="Update")
        return Slip(AGREED, (agreed,))
    # The caller goes on with the next step: this rank has dropped one that the others take.
    gone_on = [step_mismatch(DROPPED_STEPS), late(rank, maker.spec), Agreed("MicrobatchMismatchError")]
    # With an explicit finish, this rank begins its next block after the step was counted.
    gone_on = [replace(one, at="Update", later_by=-int(maker.spec.is_explicit)) for one in gone_on]
    return Slip(own(text), tuple(gone_on), after=((Block(again), AGREED),), place="then the next step")


def abort_before_step(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Call ``abort_step`` between ``finish_grad_sync`` and the optimizer's step, with gradients scattered."""
    if not (maker.spec.is_sharded and maker.spec.is_explicit):
        return None
    reason = maker.text()
    draft.acts[rank][draft.index(rank, Update) :] = [Abort(reason)]
    return Slip(FINE, (replace(failed(rank, "abort_step()", f"{reason}."), at="Update"),))


def force_all_reduce(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Ask for whole gradients on one rank."""
    draft.acts[rank].insert(0, Force(True))
    flags = tuple(int(other == rank) for other in maker.ranks)
    agreed = Agreed("ScheduleMismatchError", {"by_rank": flags}, ("force_all_reduce differs between ranks",))
    return Slip(AGREED, (agreed,), after=((Block((Force(False),)), FINE),))
