"""Kinds of fault inside one step of living ranks: calls, microbatches, gradients, exceptions. Training goes on after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megabucket.errors import MegabucketError, PhaseError

from .acts import ALL_LAYERS, Act, Acts, Do, Edit, after, before, changed, find, make_step, until, without
from .cells import (
    BOOM,
    EVERY,
    EXPLICIT,
    FEW,
    FORMS,
    OWNERS,
    OWNERS_IN_FORMS,
    OWNERS_IN_GROUPS,
    PAIRS,
    RIGHT,
    SCALED,
    SKIPPED,
    TWO,
    AnyOf,
    Cell,
    Expectation,
    Fault,
    FaultError,
    Form,
    Kind,
    Recovery,
    in_forms,
    named,
)
from .model import layer_of_bucket
from .systems import SCALE, make_scaler
from .trip import boom, install

_UNUSED = 1
_ZERO = Act(Do.ZERO, value="ddp")
_NO_TORCH = "torch DDP has no such call"
DIVERGED = named("ReplicasDivergedError", later_by=1, recovery=Recovery.RELOAD)
_BROKEN = named("WrapperBrokenError", own_error=("FaultError",), later_by=1, same_text=False, recovery=Recovery.OVER)
"""The others go on to gather what the failed rank has not updated."""
_STALE = named("StepMismatchError")
"""A rank is in another step than the others."""


_DROPPED = ("StepMismatchError", "PeerFailedError")
"""What the others raise about a rank that has left a step."""


def late(cell: Cell) -> Expectation:
    """Return a gradient that came after its bucket was sent."""
    return named("LateGradientError")


def by_rank(cell: Cell, own: int, others: int) -> tuple[int, ...]:
    """Return numbers by rank."""
    return tuple(own if rank == cell.culprit else others for rank in range(cell.combo.num_ranks))


def steps(num_microbatches: int, **forward: Any) -> Callable[[Acts], Acts]:
    """Return the edit that makes another healthy step of the batch."""

    def edit(acts: Acts) -> Acts:
        is_explicit = any(act.do is Do.FINISH for act in acts)
        batch = acts[find(acts, Do.FORWARD)].batch
        return make_step(batch, num_microbatches=num_microbatches, is_explicit=is_explicit, **forward)

    return edit


def _unused(cell: Cell) -> Fault:
    who, policy = cell.place.split("-")
    names = (f"layers.{_UNUSED}.bias", f"layers.{_UNUSED}.weight")
    ranks = (cell.culprit,) if who == "one" else tuple(range(cell.combo.num_ranks))
    error = named("UnusedParameterError", fields={"ranks": ranks, "params": AnyOf((names, names[::-1]))})
    return Fault(
        RIGHT if policy == "zero" else error,
        edit=lambda acts: changed(acts, Do.FORWARD, layers=tuple(i for i in ALL_LAYERS if i != _UNUSED)),
        on_all=who == "all",
        config={"unused_parameters": policy},
    )


def _skipped_step(cell: Cell) -> Fault:
    """Leave a batch out on one rank, which goes on with the next one, while the others train on theirs."""

    def number(acts: Acts) -> Acts:
        return (Act(Do.NUMBER, value=acts[find(acts, Do.FORWARD)].batch), *acts)

    def skip(acts: Acts) -> Acts:
        ahead = acts[find(acts, Do.FORWARD)].batch + 1
        acts = changed(acts, Do.FORWARD, batch=ahead)
        if cell.place == "numbered":
            return changed(acts, Do.NUMBER, value=ahead)
        return before(acts, Do.FORWARD, Act(Do.FORWARD, slot=9, batch=ahead))

    return Fault(_STALE, edit=skip, edits_all=number if cell.place == "numbered" else None)


def _dropped_step(cell: Cell) -> Fault:
    """Clear the gradients on one rank instead of stepping on them."""
    at = Do.FINISH if cell.combo.is_explicit else Do.STEP
    drops = named(_DROPPED, own_error=("",))
    if not cell.combo.is_sharded and not cell.combo.is_explicit:
        # Where the optimizer is ours, a collective of its own may tell the others before they update.
        drops = replace(DIVERGED, otherwise=(drops,) * cell.combo.has_own_optimizer)
    # A plain optimizer's zero_grad() tells the wrapper nothing, so a rank would be a step behind for ever.
    how = "ddp" if cell.combo.is_explicit else "optimizer"
    return Fault(drops, edit=lambda acts: until(acts, at, Act(Do.ZERO, value=how)))


def _microbatches(cell: Cell) -> Fault:
    """Run other numbers of backwards, or none outside ``no_sync()``."""
    two, place = steps(2), cell.place

    def counted(own: int, others: int) -> Expectation:
        return named("MicrobatchMismatchError", fields={"by_rank": by_rank(cell, own, others)})

    def zero_between(acts: Acts) -> Acts:
        return before(acts, Do.BACKWARD, _ZERO, nth=-1)

    unsynced = named(
        ("MicrobatchMismatchError", "StepMismatchError", "PeerFailedError"), own_error=("UnreducedGradientsError",)
    )
    return {
        "one-more": Fault(counted(2, 1), edit=two),
        "one-less": Fault(counted(1, 2), edits_all=two, edit=steps(1)),
        "no-sync": Fault(unsynced, edit=lambda acts: without(changed(acts, Do.BACKWARD, depth=1), Do.FINISH)),
        "zero-between": Fault(counted(1, 2), edits_all=two, edit=zero_between),
        "all-zero-between": Fault(RIGHT, edits_all=two, edit=zero_between, on_all=True),
        "finish-only": Fault(counted(0, 1), edit=lambda acts: until(acts, Do.FORWARD, _ZERO, Act(Do.FINISH))),
        "all-more": Fault(RIGHT, edit=two, on_all=True),
    }[place]


def _raised(cell: Cell) -> Fault:
    """Raise on one rank. A place that ends in ``+block`` is inside ``with ddp.step():``."""
    place, _, block = cell.place.partition("+")
    is_sharded = cell.combo.is_sharded
    own = () if block else ("FaultError",)
    if place == "optimizer" and is_sharded:
        expect = _BROKEN
    elif place == "optimizer" or (place == "between" and not is_sharded):
        # The others have their reduced gradients and step; all find out in the next step. The step block cannot help: all
        # have agreed on the step before the exception, so it lets it pass.
        expect = replace(DIVERGED, own_error=("FaultError",))
        if cell.combo.has_own_optimizer:  # whose collectives, or whose wrapper, may tell the others before that
            at_once = named(_DROPPED, own_error=("FaultError",) if place == "optimizer" else own)
            expect = replace(expect, otherwise=(at_once, replace(_BROKEN, otherwise=())))
    elif place == "between" and not block:
        expect = named(_DROPPED, own_error=own)
    else:
        # Autograd does not tell which exception ended a backward; forward and the step block know it.
        texts = (BOOM,) if block or place == "forward" else ()
        expect = named("PeerFailedError", fields={"rank": cell.culprit}, texts=texts, own_error=own)
    if block and cell.combo.form is Form.CHAINED:
        # The blocks of the parts may end in another order than the others come to the parts: a cycle, which is named.
        over = named("WrapperBrokenError", within_s=8.0, recovery=Recovery.OVER)
        expect = replace(expect, otherwise=(over,))
    return Fault(expect, arm=lambda here: install(here, place, boom) if here.is_culprit else None, uses_block=bool(block))


def _raised_by_caller(cell: Cell) -> Fault:
    """Raise in the caller's own code, who goes on with the next batch, or catch an exception inside the step block."""
    if cell.place == "caught+block":
        expect = named("PeerFailedError", fields={"rank": cell.culprit}, texts=("caught inside",))
        return Fault(
            expect,
            edit=lambda acts: without(changed(acts, Do.BACKWARD, how="caught"), Do.LOOK),
            arm=lambda here: install(here, "backward-1", boom) if here.is_culprit else None,
            uses_block=True,
        )
    raises = Act(Do.RAISE)
    if cell.place == "loss+block":
        expect = named("PeerFailedError", fields={"rank": cell.culprit, "phase": "forward"}, texts=(BOOM,))
        return Fault(expect, edit=lambda acts: after(acts, Do.FORWARD, raises), uses_block=True)
    # The program catches it, clears its gradients and goes on. In a closure it comes out of step().
    # This rank gives the step up when its next forward begins.
    expect = named(_DROPPED, own_error=("FaultError", ""), is_agreed=False)
    caught = (Act(Do.ZERO, value="program"), *((raises,) if cell.combo.form is Form.CLOSURE else ()))
    return Fault(expect, edit=lambda acts: (*acts[: find(acts, Do.BACKWARD)], *caught))


def _aborted(cell: Cell) -> Fault:
    """Say with ``ddp.abort_step()`` that the batch of one rank is of no use."""
    fields = {"rank": cell.culprit, "phase": "abort_step()"}
    expect = named("PeerFailedError", fields=fields, texts=("the batch is empty",), own_error=("",))
    abort = Act(Do.ABORT, value="the batch is empty")
    edits: Mapping[str, Callable[[Acts], Acts]] = {
        "first": lambda acts: until(acts, Do.FORWARD, abort),
        "after-forward": lambda acts: until(acts, Do.BACKWARD, abort),
        "after-microbatch": lambda acts: until(changed(acts, Do.BACKWARD, depth=1), Do.LOOK, abort),
        "before-step": lambda acts: until(acts, Do.STEP, abort),
    }
    if cell.place == "before-step" and not cell.combo.updates_jointly:
        # Too late: all have agreed on the step, and the others update.
        expect = replace(DIVERGED, own_error=("PhaseError",))
    return Fault(expect, edit=edits[cell.place])


def _nonfinite(cell: Cell) -> Fault:
    """Let a gradient of one rank not be finite, or be huge. The place: ``bucket-1-error``, the bucket and the policy."""
    _, number, policy = cell.place.split("-")
    bucket = int(number)
    param = f"layers.{layer_of_bucket(bucket)}.weight"
    fields = {"rank": cell.culprit, "param": param, "bucket": bucket}
    error = named("NonFiniteGradientError", fields=fields, texts=(cell.kind,))
    return Fault(
        RIGHT if cell.kind == "huge" else SKIPPED if policy == "skip_step" else error,
        edit=lambda acts: changed(acts, Do.BACKWARD, edits=(Edit(param, cell.kind),)),
        config={"nonfinite_gradients": policy},
    )


def _scaled(cell: Cell) -> Fault:
    """Train with a loss scaler: with a gradient of one rank that is infinite, or with another scale there."""
    if cell.place == "overflow":
        return Fault(SKIPPED, edit=lambda acts: changed(acts, Do.BACKWARD, edits=(Edit("layers.1.weight", "inf"),)))

    def arm(here: Any) -> None:
        if here.is_culprit:
            here.announce()
            here.step_stack.callback(setattr, here.optimizer, "scaler", here.optimizer.scaler)
            here.optimizer.scaler = make_scaler(cell.combo.form, 2 * SCALE)

    return Fault(
        named("HyperparameterMismatchError", fields={"what": "loss scale"}) if cell.combo.is_sharded else DIVERGED, arm=arm
    )


def _unscaled(cell: Cell) -> Fault:
    """Unscale, let step() fail, catch the error, and run the step again without the scaler's update()."""
    what = cell.place

    def fail(here: Any) -> None:
        here.announce()
        here.optimizer.scaler.unscale_(here.optimizer.optimizer)
        groups = here.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            if what == "caller":
                raise FaultError  # noqa: TRY301 - as a caller does
            groups[0]["lr"] = math.nan
            here.optimizer.step()
        except (MegabucketError, FaultError) as error:
            here.send("caught", text=str(error))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def edit(acts: Acts) -> Acts:
        first = acts[: find(acts, Do.LOOK)]
        return (*first, Act(Do.RUN, value=fail), Act(Do.ZERO, value="optimizer"), *acts)

    # torch's scaler takes the second step's gradients for unscaled ones until update(): right, or an error that says so.
    expect = RIGHT
    if cell.combo.form is Form.AMP:
        asks = named("MegabucketError", texts=("update()",), same_text=False, is_agreed=False)
        expect = replace(RIGHT, otherwise=(asks,))
    return Fault(expect, edit=edit, on_all=True)


def _two_backwards(cell: Cell) -> Fault:
    """Run two backwards outside ``no_sync()``: of two microbatches, or of one graph that was kept."""
    who, _, what = cell.place.partition("-")

    def edit(acts: Acts) -> Acts:
        if what == "microbatches":
            return changed(steps(2)(acts), Do.BACKWARD, depth=0)
        return before(acts, Do.BACKWARD, Act(Do.BACKWARD, how="keeps_graph"))

    if cell.combo.is_sharded:
        if who == "one":
            expect = named("MicrobatchMismatchError", otherwise=(late(cell),))
        else:
            # Without overlap nothing was sent when the second backward comes, so it is just accumulated.
            late_one = named("LateGradientError", texts=("no_sync()",), otherwise=(RIGHT,))
            expect = late_one if cell.combo.overlaps else RIGHT
    elif who == "all":
        expect = RIGHT
    else:
        # The rank at fault starts a second sync while the others step; all meet in the next one.
        expect = named("ReplicasDivergedError", later_by=1, culprit_later_by=0, recovery=Recovery.RELOAD)
    return Fault(expect, edit=edit, on_all=who == "all")


def _checkpointed_twice(cell: Cell) -> Fault:
    """Use a layer in reentrant activation checkpointing twice, which it was not in the steps before."""
    params = tuple(f"layers.2.{part}" for part in ("weight", "bias"))
    fields = {"params": AnyOf((params, params[::-1], params[:1], params[1:]))}
    expect = named("LateGradientError", fields=fields, texts=("use_reentrant=False",)) if cell.combo.overlaps else RIGHT
    return Fault(
        expect,
        edit=lambda acts: changed(acts, Do.FORWARD, layers=(0, 1, 2, 2, 3), checkpointed=(2,)),
        on_all=cell.place == "all",
    )


def _launches(cell: Cell) -> Fault:
    """Send, finish or reduce in another way on one rank than on the others."""
    if cell.place == "start-early":
        edit = lambda acts: before(steps(2)(acts), Do.BACKWARD, Act(Do.START), nth=-1)  # noqa: E731
        return Fault(late(cell), edits_all=steps(2), edit=edit)
    if cell.place == "finish-first":
        # Where all ranks wait in backward or in finish_grad_sync() already, a finish is nothing new.
        expect = named("ScheduleMismatchError", fields={"by_rank": by_rank(cell, 0, 1)}) if cell.combo.waits_in_step else RIGHT
        return Fault(expect, edit=lambda acts: before(acts, Do.STEP, Act(Do.FINISH)))
    flags = by_rank(cell, 1, 0)
    expect = named("ScheduleMismatchError", fields={"by_rank": AnyOf((flags, tuple(map(bool, flags))))})
    return Fault(RIGHT if cell.place == "all-forced" else expect, arm=_force, on_all=cell.place == "all-forced")


def _force(here: Any) -> None:
    if here.is_culprit or here.cell.place == "all-forced":
        here.announce()
        here.ddp.force_all_reduce = True
        here.step_stack.callback(setattr, here.ddp, "force_all_reduce", False)


def _updates(cell: Cell) -> Fault:
    """Step twice, or not at all, or keep gradients, on one rank or on all."""
    who, _, what = cell.place.partition("-")
    on_all, is_sharded = who == "all", cell.combo.is_sharded
    edits: Mapping[str, Callable[[Acts], Acts]] = {
        "two": lambda acts: after(acts, Do.STEP, Act(Do.RUN, value=_step_again) if is_sharded else Act(Do.STEP)),
        "none": lambda acts: until(acts, Do.STEP, _ZERO),
        "unreduced": lambda acts: without(changed(acts, Do.BACKWARD, depth=1), Do.FINISH, Do.LOOK),
    }
    if what == "unreduced":
        expect = named("UnreducedGradientsError", same_text=False, is_agreed=False)
    elif what == "none":
        expect = RIGHT
    else:
        expect = RIGHT if on_all or is_sharded else replace(DIVERGED, fields={"by_rank": by_rank(cell, 2, 1)})
    return Fault(expect, edit=edits[what], on_all=on_all)


def _step_again(here: Any) -> None:
    """Step on shards twice, which is refused and changes nothing.

    Raises:
        AssertionError: it was not refused.
    """
    try:
        here.optimizer.step()
    except PhaseError:
        return
    raise AssertionError("a second step on the same gradients was not refused")


def _left_uncleared(cell: Cell) -> Fault:
    """Keep the gradients of a step on one rank, so that its next one accumulates on them."""
    uncleared = replace(DIVERGED, errors=("StepMismatchError",), texts=("without clearing the last gradients",))
    uncleared = replace(uncleared, otherwise=(replace(uncleared, errors=("LateGradientError",), texts=()),))
    return Fault(uncleared, edit=lambda acts: without(acts, Do.ZERO))


def _optimizer_fails_on_all(cell: Cell) -> Fault:
    """Let the optimizer raise on all ranks: nobody has updated."""
    recovery = Recovery.OVER if cell.combo.is_sharded else Recovery.RELOAD
    expect = named("FaultError", is_agreed=False, recovery=recovery)
    # Nobody dropped the step, so its gradients are there until somebody clears them, as in plain torch.
    return Fault(
        expect,
        arm=lambda here: install(here, "optimizer", boom),
        on_all=True,
        recover=lambda here: here.optimizer.zero_grad(),
    )


_RIGHT_ON_ALL: Mapping[str, Callable[[Acts], Acts]] = {
    "inner-module": lambda acts: changed(acts, Do.FORWARD, how="inner"),
    "forward-in-no-sync": lambda acts: changed(acts, Do.FORWARD, depth=1),
    "nested-no-sync": lambda acts: tuple(replace(act, depth=2 * act.depth) for act in steps(3)(acts)),
    "more-microbatches": steps(3),
    "zero-in-place": lambda acts: changed(acts, Do.ZERO, value="in place"),
    "layers-twice": lambda acts: changed(acts, Do.FORWARD, layers=(0, 1, 1, 2, 2, 3)),
    "joined-backward": lambda acts: _joined(steps(2)(acts)),
    "started-over": lambda acts: before(acts, Do.FORWARD, *_extra(acts, Act(Do.BACKWARD, slot=9, depth=1)), _ZERO),
    "finish-before-step": lambda acts: before(acts, Do.STEP, Act(Do.FINISH), Act(Do.FINISH)),
}
_RIGHT_ON_ONE: Mapping[str, Callable[[Acts], Acts]] = {
    "hook-order": lambda acts: changed(acts, Do.FORWARD, layers=(0, 2, 1, 3)),
    "zero-twice": lambda acts: before(acts, Do.ZERO, _ZERO),
    "start-after-backward": lambda acts: after(acts, Do.BACKWARD, Act(Do.START), nth=-1),
    "finish-after-finish": lambda acts: after(acts, Do.STEP, Act(Do.FINISH), Act(Do.FINISH)),
    "eval-forward": lambda acts: before(acts, Do.BACKWARD, *_extra(acts, how="no_grad")),
    "training-in-eval-mode": lambda acts: changed(acts, Do.FORWARD, how="eval"),
    "autograd-grad": lambda acts: before(acts, Do.BACKWARD, *_extra(acts, Act(Do.GRAD, slot=9))),
    "state-dict": lambda acts: before(acts, Do.FORWARD, Act(Do.RUN, value=lambda here: here.ddp.state_dict())),
}


def _extra(acts: Acts, *behind: Act, how: str = "") -> Acts:
    first = acts[find(acts, Do.FORWARD)]
    return (replace(first, slot=9, how=how), *behind)


def _joined(acts: Acts) -> Acts:
    """Differentiate the sum of two outputs in one backward."""
    first = acts[find(acts, Do.BACKWARD)]
    rest = tuple(act for act in acts if act is not first)
    return changed(rest, Do.BACKWARD, joins=first.slot)


def _odd(cell: Cell) -> Fault:
    """Do what users do and may do."""
    on_all = cell.place in _RIGHT_ON_ALL
    # Where what is unused is zero, a backward that brings nothing is a microbatch like any other, and nobody can tell it apart.
    config = {"unused_parameters": "error"} if cell.place == "autograd-grad" else {}
    return Fault(RIGHT, edit=(_RIGHT_ON_ALL if on_all else _RIGHT_ON_ONE)[cell.place], on_all=on_all, config=config)


_RAISE_PLACES = ("forward", "backward-0", "backward-1", "backward-3", "hook-1", "between", "optimizer")
_NO_BLOCK = {"+block": "torch DDP has no step block"}
_NO_POLICY = {"skip_step": "torch DDP has no policy for gradients that are not finite"}
_SOME = (*PAIRS, *EXPLICIT)

STEP_KINDS = (
    Kind(
        "none",
        "Every step is right: the control.",
        lambda _: Fault(),
        combos=(*EVERY, *EXPLICIT, *FORMS, *OWNERS, *OWNERS_IN_GROUPS, *OWNERS_IN_FORMS),
    ),
    Kind(
        "unused",
        "The error names parameters and ranks in the same step; under the policy zero the step is right.",
        _unused,
        places=("one-error", "all-error", "one-zero", "all-zero"),
    ),
    Kind(
        "skipped-step",
        "The step mismatch is named in the very step in which the ranks meet.",
        _skipped_step,
        places=("forward-only", "numbered"),
    ),
    Kind(
        "dropped-step",
        "A rank that does not step is named before anything else is updated.",
        _dropped_step,
        combos=(*_SOME, *FORMS, *OWNERS, *OWNERS_IN_GROUPS, *OWNERS_IN_FORMS),
    ),
    Kind(
        "microbatches",
        "Different numbers of backwards are named with the counts of all ranks.",
        _microbatches,
        places=(
            "one-more",
            "one-less",
            "no-sync",
            "zero-between",
            "all-zero-between",
            "finish-only",
            "all-more",
        ),
        combos=_SOME,
        not_in_torch={"finish-only": _NO_TORCH},
    ),
    Kind(
        "exception",
        "All ranks raise one error about the rank that failed; the next step is right.",
        _raised,
        places=(*_RAISE_PLACES, "forward+block", "backward-1+block", "between+block"),
        combos=(*EVERY, *FORMS, OWNERS[0]),
        not_in_torch=_NO_BLOCK,
    ),
    Kind(
        "exception-by-caller",
        "Named on all ranks, also where the caller has caught it or goes on with the next batch.",
        _raised_by_caller,
        places=("caught+block", "loss+block"),
        combos=PAIRS,
        not_in_torch="torch DDP has no step block",
    ),
    Kind(
        "loss-fails",
        "An exception between forward and backward, caught, with zero_grad(): named on the others; the next step is right.",
        _raised_by_caller,
        places=("loss",),
        combos=(*PAIRS, *FORMS),
    ),
    Kind(
        "abort-step",
        "The other ranks raise an error with the caller's reason; the next step is right.",
        _aborted,
        places=("first", "after-forward", "after-microbatch", "before-step"),
        combos=(*PAIRS, *in_forms(Form.COPIES, Form.CHAINED), OWNERS[1]),
        not_in_torch="torch DDP has no abort_step()",
    ),
    Kind(
        "nan",
        "The error names rank, bucket and parameter; under skip_step no rank takes the step.",
        _nonfinite,
        places=("bucket-0-error", "bucket-3-error", "bucket-1-skip_step"),
        not_in_torch=_NO_POLICY,
    ),
    Kind(
        "inf",
        "As nan.",
        _nonfinite,
        places=("bucket-1-error", "bucket-2-skip_step"),
        combos=PAIRS,
        not_in_torch=_NO_POLICY,
    ),
    Kind(
        "huge",
        "Right, without a false alarm.",
        _nonfinite,
        places=("bucket-1-error", "bucket-1-skip_step"),
        combos=FEW,
        soaks=False,  # the sums of the steps after it are not exact
    ),
    Kind(
        "loss-scaler",
        "An overflow on one rank skips the step on all; scales that differ are named.",
        _scaled,
        places=("overflow", "scales"),
        combos=SCALED,
        not_in_torch="the distributed optimizer answers the scaler",
        soaks=False,
    ),
    Kind(
        "unscaled-left",
        "A step that failed between unscaling and update() leaves nothing to the next one: right, or torch's scaler is named.",
        _unscaled,
        places=("rate", "caller"),
        combos=SCALED,
        not_in_torch="the distributed optimizer answers the scaler",
    ),
    Kind(
        "two-backwards",
        "Reduced again where that gives the sum; named where it cannot.",
        _two_backwards,
        places=("all-microbatches", "all-retain-graph", "one-microbatches", "one-retain-graph"),
        combos=PAIRS,
    ),
    Kind(
        "checkpoint-twice",
        "A gradient for a bucket that was sent is named, with the hint use_reentrant=False.",
        _checkpointed_twice,
        places=("one", "all"),
        combos=PAIRS,
        soaks=False,
    ),
    Kind("start-early", "Gradients for buckets that were sent are named.", _launches, places=("start-early",), combos=EXPLICIT),
    Kind(
        "other-schedule",
        "A rank that reduces in another way, or finishes where others do not, is named.",
        _launches,
        places=("forced", "all-forced", "finish-first"),
        combos=PAIRS,
        not_in_torch=_NO_TORCH,
    ),
    Kind(
        "updates",
        "A rank that steps twice is named; on all ranks a second step is right or refused, and none is right.",
        _updates,
        places=("one-two", "all-two", "all-none", "all-unreduced"),
        combos=_SOME,
    ),
    Kind("zero-left-out", "Gradients that one rank has kept are named in the next step.", _left_uncleared, combos=PAIRS),
    Kind("optimizer-fails-on-all", "Each rank has its own error; nobody has updated.", _optimizer_fails_on_all, combos=TWO),
    Kind(
        "odd-but-right",
        "Right: the inner module, nested no_sync(), other orders, calls that change nothing.",
        _odd,
        places=(*_RIGHT_ON_ALL, *_RIGHT_ON_ONE),
        combos=PAIRS,
        not_in_torch={"state-dict": "", "autograd-grad": "torch DDP reduces in every backward", "-backward": _NO_TORCH},
    ),
)
