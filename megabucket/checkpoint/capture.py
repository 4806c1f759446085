"""Everything a training run needs to go on, by name: what one rank of it writes.

Nothing is gathered and no value is copied: pieces are views of where the values live, so they must be written, or copied to the
host, before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from megabucket.checkpoint.canonical import canonical_name, named_buffers, split_evenly, whole_piece
from megabucket.checkpoint.format import Json, Piece, Snapshot
from megabucket.checkpoint.optim_state import MODEL_PREFIX, describe_shards, hold_nothing, hold_plain, hold_shards
from megabucket.checkpoint.ranks import GroupRanks, tell, together
from megabucket.checkpoint.values import RNG_PREFIX, capture_rng, encode
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.replicas import checksum
from megabucket.errors import OptimizerParametersError, PeerFailedError
from megabucket.optim import DistributedOptimizer

EXTRA_PREFIX: Final = "extra."
RUN_PREFIX: Final = "run."
LOCAL_PREFIX: Final = "local."
"""Before a rank and the name of a module buffer, which differs from that of the first rank."""
VALUES_VERSION: Final = 1


class Stateful(Protocol):
    """What has a state dict of plain values: a scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take it."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingParts:
    """What is trained, and what else a run consists of.

    Args:
        optimizer: a ``DistributedOptimizer``, or a plain one over the parameters of the wrapped module (all-reduce only); None
            where only weights matter.
        scaler: a ``torch.amp.GradScaler`` or the like.
        schedulers: by a name of the caller's choice.
    """

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer | None = None
    scaler: Stateful | None = None
    schedulers: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Scaler and schedulers by the name under which their state is kept."""
        found: dict[str, Stateful] = {f"scheduler {name}": scheduler for name, scheduler in self.schedulers.items()}
        return found if self.scaler is None else {"scaler": self.scaler, **found}


def name_schedulers(schedulers: Any) -> dict[str, Stateful]:
    """Return schedulers by name: given as one, as several, or by name already."""
    if schedulers is None:
        return {}
    if isinstance(schedulers, Mapping):
        return dict(schedulers)
    if isinstance(schedulers, Sequence):
        return {str(index): scheduler for index, scheduler in enumerate(schedulers)}
    return {"0": schedulers}


def capture(
    parts: TrainingParts, *, data_position: Any = None, extras: Mapping[str, Any] | None = None, with_rng: bool = True
) -> Snapshot:
    """Return what this rank writes; see ``take``. A collective call, between two steps.

    Raises:
        PhaseError: a step is open on some rank.
        OptimizerParametersError: some optimizer state cannot be told apart by parameter, or belongs to none.
        ConfigError: something is no plain value.
        CheckpointError: what else failed on some rank.
    """
    told = tell_state(parts)
    return together(told.ranks, lambda: take(parts, told, data_position=data_position, extras=extras, with_rng=with_rng))


@dataclass(frozen=True, slots=True, eq=False)
class ToldState:
    """What ranks must have told one another before each can take its part."""

    ranks: GroupRanks
    described: Sequence[Any]
    """What the shards of each rank hold, by rank."""
    differing: Sequence[str]
    """Names of the module buffers that are not the same on all ranks: running statistics, which every rank has of its own."""


def tell_state(parts: TrainingParts) -> ToldState:
    """Make sure that every rank is between two steps, and return what ``take`` needs. A collective call.

    Raises:
        PhaseError: a step is open on some rank.
        OptimizerParametersError: some optimizer state cannot be told apart by parameter, alike on all ranks.
        PeerFailedError: it cannot on some rank.
        CheckpointError: what else failed on some rank.
    """
    ranks = GroupRanks.of(parts.ddp, "saving a checkpoint")
    unfit: list[OptimizerParametersError] = []
    by_rank = tell(ranks, lambda: _state_to_tell(parts, ranks, unfit))
    texts = [told["unfit"] for told in by_rank]
    if any(texts):
        if unfit and len(set(texts)) == 1:
            raise unfit[0]
        rank = next(rank for rank, text in enumerate(texts) if text)
        raise PeerFailedError(step=0, rank=rank, phase="save_checkpoint()", cause=texts[rank]) from next(iter(unfit), None)
    sums = zip(*(told["buffers"] for told in by_rank), strict=True)
    names = list(named_buffers(parts.ddp.module)) if ranks.size > 1 else []
    differing = [name for name, of_ranks in zip(names, sums, strict=True) if len(set(of_ranks)) > 1]
    return ToldState(ranks, [told["described"] for told in by_rank], differing)


def _state_to_tell(parts: TrainingParts, ranks: GroupRanks, unfit: list[OptimizerParametersError]) -> dict[str, Any]:
    settle(parts, "saving a checkpoint")
    described: list[Any] = []
    if isinstance(parts.optimizer, DistributedOptimizer):
        try:
            described = describe_shards(parts.optimizer)
        except OptimizerParametersError as error:
            unfit.append(error)
    buffers = named_buffers(parts.ddp.module).values() if ranks.size > 1 else ()  # alone, nobody has others
    return {
        "described": described,
        "buffers": [checksum(buffer) if buffer.numel() else 0 for buffer in buffers],
        "unfit": "".join(f"{type(error).__name__}: {error}" for error in unfit),
    }


def settle(parts: TrainingParts, operation: str) -> None:
    """Make sure that no step is open and that every value may be read.

    Raises:
        PhaseError: a step is open.
    """
    if isinstance(parts.optimizer, DistributedOptimizer):
        parts.optimizer.settle_values(operation)
    else:
        parts.ddp.sync.check_between_steps(operation)
        parts.ddp.finish_param_sync()


def take(
    parts: TrainingParts,
    told: ToldState,
    *,
    data_position: Any = None,
    extras: Mapping[str, Any] | None = None,
    with_rng: bool = True,
) -> Snapshot:
    """Return what this rank writes. No collective; nothing of the run may have changed since ``tell_state``.

    Model values are split over the ranks, shards of the optimizer are written by those who own them, module buffers by the
    first rank; where other ranks hold others (running statistics), they write theirs, too.

    Args:
        data_position: plain values that say which data comes next; the same on every rank.
        extras: plain values and tensors by name; the same on every rank.

    Raises:
        OptimizerParametersError: some optimizer state belongs to no parameter, or ranks hold different numbers for one.
        ConfigError: something is no plain value.
    """
    module, ranks = parts.ddp.module, told.ranks
    if isinstance(parts.optimizer, DistributedOptimizer):
        held = hold_shards(parts.optimizer, module, told.described)
    else:
        held = hold_nothing(module) if parts.optimizer is None else hold_plain(parts.optimizer, module)
    shared = {f"{MODEL_PREFIX}{name}": param.detach() for param, name in held.names.items() if not param.is_meta}
    shared |= held.shared
    keep = shared.__setitem__
    values = {
        **values_of_state(held.values or None),
        "stateful": {name: encode(item.state_dict(), f"{RUN_PREFIX}{name}", keep) for name, item in parts.stateful.items()},
        "module_extra_state": {
            name: encode(submodule.get_extra_state(), f"{RUN_PREFIX}module.{name}", keep)
            for name, submodule in with_extra_state(module).items()
        },
        "data_position": encode(data_position, f"{RUN_PREFIX}data_position", keep),
        "extras": {str(name): encode(value, f"{EXTRA_PREFIX}{name}", keep) for name, value in (extras or {}).items()},
        "rng_ranks": ranks.size if with_rng else 0,
    }
    pieces: list[Piece] = [*held.own, *split_evenly(shared, rank=ranks.rank, size=ranks.size)]
    for name, buffer in named_buffers(module).items():
        if ranks.rank == 0:
            pieces.append(whole_piece(f"{MODEL_PREFIX}{name}", buffer))
        elif name in told.differing:
            pieces.append(whole_piece(f"{LOCAL_PREFIX}{ranks.rank}.{name}", buffer))
    if with_rng:
        device = parts.ddp.param_and_grad_buffers[0].param_data.device
        pieces += [whole_piece(f"{RNG_PREFIX}{ranks.rank}.{what}", state) for what, state in capture_rng(device).items()]
    return Snapshot(pieces, values)


def values_of_state(optimizer: Json = None) -> dict[str, Json]:
    """Return what a checkpoint has beside its tensors where nothing of a run is known but weights and an optimizer's state."""
    return {
        "version": VALUES_VERSION,
        "optimizer": optimizer,
        "stateful": {},
        "module_extra_state": {},
        "data_position": None,
        "extras": {},
        "rng_ranks": 0,
    }


def with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the submodules that add something to their ``state_dict`` beside tensors, by name."""
    base = torch.nn.Module.get_extra_state
    return {canonical_name(name): sub for name, sub in module.named_modules() if type(sub).get_extra_state is not base}


def to_host(snapshot: Snapshot, reuse: Sequence[torch.Tensor] = ()) -> Snapshot:
    """Return a snapshot with values of its own in host memory, which training cannot change any more.

    Args:
        reuse: values of an earlier copy that nobody needs: those that fit their places are written again, so that a run that
            saves the same again takes no new memory.
    """
    theirs = [piece.values for piece in snapshot.pieces]
    own = list(reuse) if len(reuse) == len(theirs) else [torch.empty(0)] * len(theirs)
    for index, values in enumerate(theirs):
        if own[index].dtype is not values.dtype or own[index].numel() != values.numel():
            own[index] = torch.empty(values.shape, dtype=values.dtype)
    if own:
        torch._foreach_copy_(own, theirs)
    pieces = [Piece(piece.info, piece.start, piece.stop, mine) for piece, mine in zip(snapshot.pieces, own, strict=True)]
    return Snapshot(pieces, snapshot.values)
