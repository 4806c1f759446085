"""Faults of one rank in one step. Two of them on different ranks make an episode, too.

Each function spoils the step of one rank and says what follows; it returns ``None`` where the world has no such fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megabucket.chaos.loopback_soak.acts import Abort, Backward, Finish, Forward, LookAtGrads, Number, Raise, Try, Update
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.program import Agreed, Block, Call, Ending, Trouble, Use, Want, WorldSpec

KEPT_BY_AUTOGRAD = "an exception that autograd keeps to itself; it stands in the log of that rank"


@dataclass(frozen=True)
class Slip:
    """What a fault of one rank leads to."""

    want: Want
    """How the rank's own block ends, unless nobody notices."""
    agreed: tuple[Agreed, ...]
    """What all ranks may agree on."""
    place: str = ""
    may_be_right: bool = False
    """Whether the step may also end as if nothing had happened."""
    after: tuple[tuple[Block, Want], ...] = ()
    """What this rank does then, while the others are still in the step."""
    spoils_step: bool = True
    """Whether ``optimizer.step()`` is refused afterwards on this rank."""


AGREED = Want(Ending.AGREED)
FINE = Want()
SlipMaker = Callable[[Maker, Draft, int], Slip | None]


def own(text: str, error: str = "ValueError") -> Want:
    """Return the ending of a block by its own exception."""
    return Want(Ending.OWN, error=error, text=text)


def failed(rank: int, phase: str, cause: str) -> Agreed:
    """Return what all ranks agree on after an exception on one of them."""
    return Agreed("PeerFailedError", {"rank": rank, "phase": phase}, (f"rank {rank} failed in {phase}: {cause}",))


def late(rank: int, spec: WorldSpec) -> Agreed:
    """Return the late gradient of a rank."""
    return Agreed("LateGradientError", {"rank": rank, "params": frozenset(spec.model.numels)}, (f"on rank {rank} ",))


def microbatches(draft: Draft, rank: int, count: int) -> Agreed:
    """Return the error about a rank with another number of microbatches."""
    counts = [draft.num_microbatches] * len(draft.calls)
    counts[rank] = count
    return Agreed("MicrobatchMismatchError", {"by_rank": tuple(counts)}, (f"{count} on rank {rank}",))


def step_mismatch(what: str) -> Agreed:
    """Return the error about a rank that is in another step."""
    return Agreed("StepMismatchError", {}, (what,))


SKIPPED_FORWARDS = "training forwards that no backward has reached differ between ranks"
DROPPED_STEPS = "dropped steps (zero_grad() without an optimizer step) differ between ranks"


def exception(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Raise in a forward, in a backward, or in a hook."""
    trouble = maker.draw.choice((Trouble.FORWARD, Trouble.BACKWARD, Trouble.TENSOR_HOOK, Trouble.PARAM_HOOK))
    return raise_in(maker, draft, rank, trouble)


def raise_in(maker: Maker, draft: Draft, rank: int, trouble: Trouble) -> Slip:
    """Raise at a given kind of place."""
    microbatch = maker.draw.randrange(draft.num_microbatches)
    text = maker.text()
    # A kind of exception that no handler of ordinary ones sees; only the block around the step does.
    interrupts = draft.guards[rank] and maker.chance(0.2)

    def spoil(call: Call) -> Call:
        places = _places(maker, call, trouble)
        if not places:
            call, places = replace(call, uses=(*call.uses, Use(free_layer(maker), maker.factor()))), [len(call.uses)]
        return replace(call, trouble=trouble, at=maker.draw.choice(places), text=text, interrupts=interrupts)

    draft.change_call(rank, microbatch, spoil)
    phase = "forward" if trouble is Trouble.FORWARD else "backward"
    error = "KeyboardInterrupt" if interrupts else "ValueError"
    knows_text = draft.guards[rank] or phase == "forward"
    agreed = failed(rank, phase, f"{error}: {text}." if knows_text else KEPT_BY_AUTOGRAD)
    want = AGREED if draft.guards[rank] and not interrupts else own(text, error)
    return Slip(want, (agreed,), place=f"{trouble.value}, microbatch {microbatch}")


def exception_caught(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Catch the exception of a backward inside ``with ddp.step():``, and go on with the next microbatch."""
    slip = raise_in(maker, draft, rank, Trouble.BACKWARD)
    if slip.want is not AGREED:
        return None
    acts = [act for act in draft.acts[rank] if not isinstance(act, LookAtGrads)]  # it would look at half of them
    draft.acts[rank] = [Try(act) if isinstance(act, Backward) else act for act in acts]
    return replace(slip, agreed=(failed(rank, "backward", "an exception (caught inside"),))


def _places(maker: Maker, call: Call, trouble: Trouble) -> list[int]:
    """Return the uses at which a trouble is sure to raise."""
    places = range(len(call.uses))
    if trouble is Trouble.FORWARD:
        return list(places)
    params_of = maker.spec.model.params_of
    if trouble is Trouble.PARAM_HOOK:
        return [place for place in places if f"layers.{call.uses[place].layer}.p0" in maker.trained]
    return [place for place in places if maker.trained.intersection(params_of(call.uses[place].layer))]


def free_layer(maker: Maker) -> int:
    """Return a layer whose first parameter is trained."""
    layers = range(len(maker.spec.model.layers))
    return next(layer for layer in layers if f"layers.{layer}.p0" in maker.trained)


def exception_in_loss(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Raise in the caller's code between forward and backward, or in the backward of the loss; the wrapper sees neither."""
    microbatch = maker.draw.randrange(draft.num_microbatches)
    text, abort = maker.text(), Abort("the loss is of no use")
    in_backward = maker.chance(0.5)
    if in_backward:
        draft.change_call(rank, microbatch, lambda call: replace(call, trouble=Trouble.LOSS, text=text))
    else:
        draft.acts[rank].insert(draft.index(rank, Forward, microbatch) + 1, Raise(text))
    place = f"{'backward of the loss' if in_backward else 'loss'}, microbatch {microbatch}"
    if draft.guards[rank]:
        acts = draft.acts[rank]
        at = draft.index(rank, Backward, microbatch) if in_backward else draft.index(rank, Raise)
        # How far the rank has got is told by the last forward or backward that the wrapper has seen.
        is_in_forward = isinstance([act for act in acts[:at] if isinstance(act, Forward | Backward)][-1], Forward)
        phase = "forward" if is_in_forward else "backward"
        return Slip(AGREED, (failed(rank, phase, f"ValueError: {text}."),), place=place)
    aborts = (Block((abort,)), FINE)
    return Slip(own(text), (failed(rank, "abort_step()", f"{abort.reason}."),), place=f"{place}, then abort", after=(aborts,))


def next_batch(maker: Maker, draft: Draft, rank: int) -> Slip | None:
    """Raise in the caller's code, who goes on with the next batch as if nothing had happened."""
    is_counted = maker.spec.switch("skipped_forwards", "error") == "error"
    if not (is_counted or maker.spec.numbers_steps) or draft.guards[rank]:
        return None
    text = maker.text()
    acts = draft.acts[rank]
    again = tuple(replace(act, number=act.number + 1) if isinstance(act, Number) else act for act in acts)
    acts.insert(draft.index(rank, Forward) + 1, Raise(text))
    what = "the caller's step numbers differ" if maker.spec.numbers_steps else SKIPPED_FORWARDS
    return Slip(own(text), (step_mismatch(what),), after=((Block(again), AGREED),), place="loss, then the next batch")


def abort(maker: Maker, draft: Draft, rank: int) -> Slip:
    """Call ``abort_step`` somewhere before the fence, and leave the rest of the step out."""
    acts = draft.acts[rank]
    fence = draft.index(rank, {"Backward": Backward, "Finish": Finish, "Update": Update}[maker.spec.fence_act], -1)
    # Without a step number, a call before the first forward would be about the last step, if that has failed here.
    first = draft.index(rank, Forward) + (not maker.spec.numbers_steps)
    at = maker.draw.randint(first, fence)
    reason = maker.text()
    acts[at:] = [Abort(reason)]
    return Slip(FINE, (failed(rank, "abort_step()", f"{reason}."),), place=f"before act {at}")
