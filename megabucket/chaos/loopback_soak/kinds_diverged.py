"""Faults after the gradients are reduced: the replicas differ, the next step says so, and the last checkpoint repairs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from megabucket.chaos.loopback_soak.acts import Abort, Act, Backward, Raise, Restore, Sabotage, Save, Update, Zero
from megabucket.chaos.loopback_soak.drafts import Draft, Maker
from megabucket.chaos.loopback_soak.program import Agreed, Block, Clearing, Ending, Episode, Outcome, Want
from megabucket.chaos.loopback_soak.slips import AGREED, FINE, failed, late, own, step_mismatch


def diverged(maker: Maker, rank: int, num_updates: int, cause: str = "") -> Agreed:
    """Return the error about a rank that has updated more or less often than the others, who did once.

    Args:
        cause: what that rank has said about it.
    """
    counts = [1] * maker.spec.num_ranks
    counts[rank] = num_updates
    piece = "optimizer updates since the last agreement"
    return Agreed("ReplicasDivergedError", {"by_rank": tuple(counts)}, (piece, cause))


def made_none(rank: int, why: str) -> str:
    """Return the cause of a divergence, as a rank tells it that has not updated."""
    return f"(rank {rank} made none because of {why})"


def _episode(
    maker: Maker,
    kind: str,
    at_fault: int,
    *,
    own_part: Sequence[tuple[Block, Want]],
    others: tuple[Draft, Draft],
    agreed: Sequence[Agreed],
) -> Episode:
    """Return save, the step of the fault, the step that names it, restore, and a look.

    Args:
        own_part: two blocks of the rank at fault.
        others: the steps of all other ranks.
    """
    save, restore, tail = Block((Save(),)), Block((Restore(),)), maker.tail()
    programs, wants = [], []
    for rank in maker.ranks:
        part = own_part if rank == at_fault else [(others[0].block(rank), FINE), (others[1].block(rank), AGREED)]
        programs.append((save, *(block for block, _ in part), restore, tail))
        wants.append((FINE, *(want for _, want in part), FINE, FINE))
    # A shard that was not updated makes a mixture of old and new weights on every rank.
    spoils = kind == "optimizer fails" and maker.spec.is_sharded
    return Episode(kind, tuple(programs), tuple(Outcome(tuple(wants), one, spoils_weights=spoils) for one in agreed))


def _before_update(draft: Draft, rank: int) -> list[Act]:
    return draft.acts[rank][: draft.index(rank, Update)]


def optimizer_fails(maker: Maker) -> Episode:
    """Let the torch optimizer raise on one rank."""
    rank, text = maker.pick_rank(), maker.text()
    first, second = maker.step(), maker.step()
    first.guards[rank] = maker.chance(0.4)
    first.acts[rank].insert(draft_index_of_update(first, rank), Sabotage(text))
    if maker.spec.wraps_optimizer:
        agreed = failed(rank, "optimizer", f"ValueError: {text}.")
    else:
        agreed = diverged(maker, rank, 0, made_none(rank, f"ValueError: {text}") if first.guards[rank] else "")
    part = [(first.block(rank), replace(own(text), at="Update")), (second.block(rank), AGREED)]
    return _episode(maker, "optimizer fails", rank, own_part=part, others=(first, second), agreed=[agreed])


def draft_index_of_update(draft: Draft, rank: int) -> int:
    """Return where a rank steps."""
    return draft.index(rank, Update)


def optimizer_fails_on_all(maker: Maker) -> Episode:
    """Let the torch optimizer raise on all ranks: nobody has updated."""
    first, second = maker.step(), maker.step()
    first.guards = [False] * maker.spec.num_ranks
    texts = [maker.text() for _ in maker.ranks]
    for rank in maker.ranks:
        first.acts[rank].insert(first.index(rank, Update), Sabotage(texts[rank]))
    zero, tail = Block((Zero(Clearing.WRAPPER),)), maker.tail()
    save, restore = Block((Save(),)), Block((Restore(),))
    programs = tuple((save, first.block(rank), zero, second.block(rank), restore, tail) for rank in maker.ranks)
    is_told = maker.spec.wraps_optimizer
    agreed = failed(0, "optimizer", f"ValueError: {texts[0]}.") if is_told else None
    wants = tuple((FINE, own(texts[rank]), FINE, AGREED if is_told else FINE, FINE, FINE) for rank in maker.ranks)
    return Episode("optimizer fails on all ranks", programs, (Outcome(wants, agreed),))


def update_left_out(maker: Maker) -> Episode | None:
    """Clear reduced gradients instead of stepping on them, on one rank."""
    if maker.spec.is_sharded:
        return None
    rank = maker.pick_rank()
    first, second = maker.step(), maker.step()
    acts = [*_before_update(first, rank), Zero(Clearing.WRAPPER)]
    part = [(Block(tuple(acts), first.guards[rank]), FINE), (second.block(rank), AGREED)]
    agreed = diverged(maker, rank, 0)
    return _episode(maker, "update left out", rank, own_part=part, others=(first, second), agreed=[agreed])


def two_updates(maker: Maker) -> Episode | None:
    """Step twice on one rank. With shards the second one is refused, for nobody else would gather them."""
    rank = maker.pick_rank()
    first, second = maker.step(), maker.step()
    twice = first.copy()
    twice.guards[rank] = maker.spec.is_sharded and maker.chance(0.5)
    twice.acts[rank].insert(twice.index(rank, Update), Update())
    if maker.spec.is_sharded:
        return _refused_update(maker, rank, first, twice)
    part = [(twice.block(rank), FINE), (second.block(rank), AGREED)]
    agreed = diverged(maker, rank, 2)
    return _episode(maker, "two updates", rank, own_part=part, others=(first, second), agreed=[agreed])


def _refused_update(maker: Maker, rank: int, draft: Draft, twice: Draft) -> Episode:
    refused = Want(Ending.REFUSED, error="PhaseError", text="step() was called twice on the same gradients", at="Update")
    zero, tail = Block((Zero(Clearing.WRAPPER),)), maker.tail()
    programs = tuple(((twice if other == rank else draft).block(other), zero, tail) for other in maker.ranks)
    wants = tuple((refused if other == rank else FINE, FINE, FINE) for other in maker.ranks)
    return Episode("two updates", programs, (Outcome(wants),))


def second_backward_after_fence(maker: Maker) -> Episode | None:
    """Differentiate the last microbatch again on one rank, when the step is reduced on all of them."""
    if maker.spec.fence_act != "Backward":
        return None
    rank = maker.pick_rank()
    first, second = maker.step(), maker.step()
    last = first.index(rank, Backward, -1)
    backward = first.acts[rank][last]
    assert isinstance(backward, Backward)  # noqa: S101 - narrows
    acts = [replace(act, retains=True) if act is backward else act for act in _before_update(first, rank)]
    part = [(Block(tuple(acts)), FINE), (Block((backward,)), AGREED)]
    agreed = diverged(maker, rank, 0)
    return _episode(maker, "second backward after the fence", rank, own_part=part, others=(first, second), agreed=[agreed])


def exception_before_update(maker: Maker) -> Episode | None:
    """Raise between reduction and update on one rank, who goes on with the next step."""
    if maker.spec.is_sharded:
        return None
    rank, text = maker.pick_rank(), maker.text()
    first, second = maker.step(), maker.step()
    acts = [*_before_update(first, rank), Raise(text)]
    part = [(Block(tuple(acts)), own(text)), (second.block(rank), AGREED)]
    agreed = diverged(maker, rank, 0)
    return _episode(maker, "exception before the update", rank, own_part=part, others=(first, second), agreed=[agreed])


def exception_before_update_guarded(maker: Maker) -> Episode | None:
    """Raise between reduction and update on one rank, inside ``with ddp.step()``."""
    if maker.spec.is_sharded:
        return None
    rank, text = maker.pick_rank(), maker.text()
    first, second = maker.step(), maker.step()
    acts = [*_before_update(first, rank), Raise(text)]
    part = [(Block(tuple(acts), is_guarded=True), own(text)), (second.block(rank), AGREED)]
    agreed = diverged(maker, rank, 0, made_none(rank, f"ValueError: {text}"))
    kind = "exception before the update, guarded"
    return _episode(maker, kind, rank, own_part=part, others=(first, second), agreed=[agreed])


def abort_before_update(maker: Maker) -> Episode | None:
    """Call ``abort_step`` between reduction and update on one rank, where it is too late."""
    if maker.spec.is_sharded:
        return None
    rank, reason = maker.pick_rank(), maker.text()
    first, second = maker.step(), maker.step()
    acts = [*_before_update(first, rank), Abort(reason)]
    refused = Want(Ending.REFUSED, error="PhaseError", text="abort_step() comes too late", at="Abort")
    part = [(Block(tuple(acts)), refused), (second.block(rank), AGREED)]
    agreed = diverged(maker, rank, 0, made_none(rank, f"abort_step(): {reason}"))
    return _episode(maker, "abort before the update", rank, own_part=part, others=(first, second), agreed=[agreed])


def zero_left_out(maker: Maker) -> Episode | None:
    """Do not clear gradients between two steps, on one rank."""
    if maker.spec.clearing is Clearing.OPTIMIZER_ZEROS and not maker.spec.wraps_optimizer:
        return None
    rank = maker.pick_rank()
    first, second = maker.step(), maker.step()
    left_out = second if maker.spec.clears_first else first
    left_out.acts[rank] = [act for act in left_out.acts[rank] if not isinstance(act, Zero)]
    part = [(first.block(rank), FINE), (second.block(rank), AGREED)]
    uncleared = step_mismatch("steps begun without clearing the last gradients (zero_grad()) of ")
    both = [uncleared, late(rank, maker.spec)]
    episode = _episode(maker, "zero left out", rank, own_part=part, others=(first, second), agreed=both)
    # Gradients that are all zero need not be cleared.
    harmless = Outcome(tuple((FINE,) * len(blocks) for blocks in episode.programs))
    return replace(episode, outcomes=(*episode.outcomes, harmless))


DIVERGED_KINDS: Final[Mapping[str, Callable[[Maker], Episode | None]]] = MappingProxyType(
    {
        "optimizer fails": optimizer_fails,
        "optimizer fails on all ranks": optimizer_fails_on_all,
        "update left out": update_left_out,
        "two updates": two_updates,
        "second backward after the fence": second_backward_after_fence,
        "exception before the update": exception_before_update,
        "exception before the update, guarded": exception_before_update_guarded,
        "abort before the update": abort_before_update,
        "zero left out": zero_left_out,
    }
)
