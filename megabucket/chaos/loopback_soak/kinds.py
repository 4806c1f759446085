"""Every kind of episode: what is drawn, and what must come of it.

Most are slips of one rank, or of two at a time, in one step. The others take all ranks, or several steps: a fault after the
gradients are reduced shows in the next step, and the replicas differ until the last checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from megabucket.chaos.loopback_soak.acts import Finish, Update, Zero
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.kinds_all import ALL_RANK_KINDS
from megabucket.chaos.loopback_soak.kinds_diverged import DIVERGED_KINDS
from megabucket.chaos.loopback_soak.kinds_rebuild import REBUILD_KINDS
from megabucket.chaos.loopback_soak.program import Agreed, Block, Clearing, Ending, Episode, Outcome, Want
from megabucket.chaos.loopback_soak.slips import (
    FINE,
    Slip,
    SlipMaker,
    abort,
    exception,
    exception_caught,
    exception_in_loss,
    next_batch,
)
from megabucket.chaos.loopback_soak.slips_grads import nonfinite, reentrant, start_early, unused
from megabucket.chaos.loopback_soak.slips_model import model_change
from megabucket.chaos.loopback_soak.slips_order import (
    abort_before_step,
    exception_before_step,
    finish_first,
    force_all_reduce,
    forward_more,
    microbatch_less,
    microbatch_more,
    no_sync_left_out,
    only_finish,
    other_number,
    second_backward,
    unreduced,
    zero_between,
    zero_instead,
)
from megabucket.chaos.loopback_soak.slips_values import cleared_between, other_rate, weights_loaded

EpisodeMaker = Callable[[Maker], Episode | None]

SLIPS: Final[Mapping[str, SlipMaker]] = MappingProxyType(
    {
        "exception": exception,
        "exception that is caught": exception_caught,
        "exception in the loss": exception_in_loss,
        "next batch": next_batch,
        "abort": abort,
        "nan or inf": nonfinite,
        "unused": unused,
        "reentrant layer twice": reentrant,
        "start early": start_early,
        "microbatch more": microbatch_more,
        "microbatch less": microbatch_less,
        "no_sync left out": no_sync_left_out,
        "forward more": forward_more,
        "other step number": other_number,
        "second backward": second_backward,
        "zero instead of step": zero_instead,
        "zero between microbatches": zero_between,
        "finish only": only_finish,
        "unreduced": unreduced,
        "finish first": finish_first,
        "exception before the step": exception_before_step,
        "abort before the step": abort_before_step,
        "force_all_reduce": force_all_reduce,
        "model change": model_change,
        "cleared between microbatches": cleared_between,
        "weights loaded": weights_loaded,
        "other learning rate": other_rate,
    }
)
_REFUSED: Final = Want(Ending.REFUSED, error="PhaseError", text="an error about them was raised before", at="Update")


def slip_episode(maker: Maker, kinds: Sequence[str]) -> Episode | None:
    """Return a step in which one rank, or several, each make one slip; ``None`` where the world has no such fault."""
    draft = maker.step()
    healthy = draft.copy()
    at_fault = maker.draw.sample(maker.ranks, len(kinds))
    slips: dict[int, Slip] = {}
    for kind, rank in zip(kinds, at_fault, strict=True):
        draft.guards[rank] = maker.chance(0.4)
        slip = SLIPS[kind](maker, draft, rank)
        if slip is None:
            return None
        slips[rank] = slip
    outcomes = _outcomes(maker, slips)
    programs = [
        [draft.block(rank), *(block for block, _ in slips[rank].after)] if rank in slips else [draft.block(rank)]
        for rank in maker.ranks
    ]
    place = "; ".join(f"rank {rank}: {slip.place}" for rank, slip in slips.items() if slip.place)
    parts = _Parts(programs, [[list(wants) for wants in outcome.wants] for outcome in outcomes], [o.agreed for o in outcomes])
    is_sure = all(outcome.agreed is not None for outcome in outcomes)
    what_follows = maker.draw.random()
    if what_follows < 0.25:
        parts.add_cleanup(maker, slips)
    elif what_follows < 0.5 and is_sure:
        parts.add_insistence(maker, slips)
    if maker.chance(0.4):
        parts.add_step(healthy)
    parts.add_tail(maker)
    return Episode(" + ".join(kinds), parts.programs_of(), parts.outcomes(), place)


def _outcomes(maker: Maker, slips: Mapping[int, Slip]) -> list[Outcome]:
    """Return in what an episode of slips may end: one of the errors, or right if every slip may be."""

    def wants_of(agreed: Agreed) -> list[tuple[Want, ...]]:
        healthy = Want(Ending.AGREED, at=agreed.at or maker.spec.fence_act)
        wants = []
        for rank in maker.ranks:
            slip = slips.get(rank)
            after = [] if slip is None else [want for _, want in slip.after]
            # One whose own fault came to nothing is at the fence like the others.
            is_harmless = slip is None or (slip.want.ending is Ending.FINE and slip.may_be_right)
            wants.append((healthy if slip is None or is_harmless else slip.want, *after))
        return wants

    alternatives = [agreed for slip in slips.values() for agreed in slip.agreed]
    if len(slips) > 1:
        alternatives = [agreed.loosened() for agreed in alternatives]
    outcomes = [Outcome(tuple(wants_of(agreed)), agreed) for agreed in alternatives]
    if all(slip.may_be_right for slip in slips.values()):
        fine = tuple((FINE, *(want for _, want in slips[rank].after)) if rank in slips else (FINE,) for rank in maker.ranks)
        outcomes.append(Outcome(fine))
    return outcomes


class _Parts:
    """An episode that is still being put together: blocks by rank, and for each outcome the endings of the blocks."""

    def __init__(self, programs: list[list[Block]], wants: list[list[list[Want]]], agreed: Sequence[Agreed | None]) -> None:
        self._programs, self._wants, self._agreed = programs, wants, agreed
        self._pad()

    def _pad(self) -> None:
        depth = max(len(blocks) for blocks in self._programs)
        for blocks in self._programs:
            blocks.extend([Block()] * (depth - len(blocks)))
        for by_rank in self._wants:
            for wants in by_rank:
                wants.extend([FINE] * (depth - len(wants)))

    def _add(self, blocks: Sequence[Block], wants: Sequence[Want]) -> None:
        for rank, block in enumerate(blocks):
            self._programs[rank].append(block)
            for by_rank in self._wants:
                by_rank[rank].append(wants[rank])
        self._pad()

    def add_insistence(self, maker: Maker, slips: Mapping[int, Slip]) -> None:
        """Let ranks step on the gradients of a dropped step, after having caught the error."""
        insists = [maker.chance(0.7) and (rank not in slips or slips[rank].spoils_step) for rank in maker.ranks]
        self._add([Block((Update(),)) if yes else Block() for yes in insists], [_REFUSED if yes else FINE for yes in insists])

    def add_cleanup(self, maker: Maker, slips: Mapping[int, Slip]) -> None:
        """Let ranks that have raised an exception of their own clean up, as callers do who know nothing of the protocol."""
        blocks, wants = [Block()] * len(self._programs), [FINE] * len(self._programs)
        for rank, slip in slips.items():
            if slip.want.ending is Ending.OWN and not slip.after:
                finishes = maker.chance(0.5)
                blocks[rank] = Block((Finish() if finishes else Zero(Clearing.WRAPPER),))
                wants[rank] = Want(Ending.AGREED, at="Finish") if finishes else FINE
        self._add(blocks, wants)

    def add_step(self, draft: Draft) -> None:
        """Let all ranks run a healthy step: the same batches once more."""
        self._add([draft.block(rank) for rank in range(len(draft.acts))], [FINE] * len(draft.acts))

    def add_tail(self, maker: Maker) -> None:
        """Let all ranks look at what there is now."""
        self._add([maker.tail()] * len(self._programs), [FINE] * len(self._programs))

    def programs_of(self) -> tuple[tuple[Block, ...], ...]:
        """Return the blocks by rank."""
        return tuple(tuple(blocks) for blocks in self._programs)

    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the ways to end."""
        return tuple(
            Outcome(tuple(tuple(wants) for wants in by_rank), agreed)
            for by_rank, agreed in zip(self._wants, self._agreed, strict=True)
        )


KINDS: Final[Mapping[str, EpisodeMaker]] = MappingProxyType(dict(ALL_RANK_KINDS) | dict(REBUILD_KINDS) | dict(DIVERGED_KINDS))
"""Kinds that are not made of slips."""
