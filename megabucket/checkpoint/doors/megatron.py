"""From Megatron-Core: the state of its ``DistributedOptimizer`` in bucket space (``dp_zero_gather_scatter``), by name.

No file is read here. The caller reads it, and of what that gives only tensors and numbers are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from megabucket.buffer import dtype_name
from megabucket.checkpoint.canonical import canonical_name, flat, named_buffers, named_params, whole_piece
from megabucket.checkpoint.capture import MODEL_PREFIX, TrainingParts, values_of_state
from megabucket.checkpoint.doors.dp_zero import MOMENTS, PARAM, DpZeroState
from megabucket.checkpoint.optim_state import MAIN_PREFIX, members_by_name, members_of, optimizer_values, state_name
from megabucket.checkpoint.pieces import Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.restore import LoadedCheckpoint, restore
from megabucket.checkpoint.save import SaveSettings, save_now
from megabucket.checkpoint.staging import in_shape
from megabucket.checkpoint.stored import copy_checked
from megabucket.checkpoint.together import GroupRanks, together
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointMismatchError, name_list
from megabucket.optim import DistributedOptimizer
from megabucket.optim.state_dict import Description, StateEntry, describe_number

__all__ = ["DpZeroState", "import_dp_zero", "load_dp_zero"]

_SOURCE: Final = "the state of Megatron's DistributedOptimizer"

Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]
"""The names of the parameters of each group, and its hyperparameters."""


def load_dp_zero(
    found: DpZeroState, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None, *, cast: bool = False
) -> LoadedCheckpoint:
    """Put the state into a run of any number of ranks and any buckets. A collective call, between two steps.

    Every rank passes the same state and takes its shards out of it. Hyperparameters stay as they are here, and so do frozen
    parameters and module buffers that are not among ``found.weights``.

    Args:
        optimizer: torch's Adam or AdamW, plain or in a ``DistributedOptimizer``; None to take the weights only.
        cast: floating-point tensors may be converted to what they are here.

    Raises:
        CheckpointMismatchError: state, layout and run do not fit; the text names everything that does not.
        MegabucketError: as ``load_checkpoint``; in any case nothing was changed.
    """
    stored = together(GroupRanks.of(ddp, "loading a checkpoint"), lambda: _for_run(found, ddp, optimizer))
    return restore(stored, TrainingParts(ddp, optimizer), cast=cast)


def import_dp_zero(
    found: DpZeroState,
    root: Path | str,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    settings: SaveSettings | None = None,
) -> Path:
    """Write the state as a checkpoint of a run with AdamW, and return its directory. Needs neither a model nor other ranks.

    Args:
        groups: as a torch optimizer takes them, with names under ``"params"``; hyperparameters that they do not give stay
            what they are in the run that loads the checkpoint. When left out: one group of all parameters.

    Raises:
        CheckpointMismatchError: state, layout and groups do not fit; the text names everything that does not.
        CheckpointNotSavedError: the checkpoint cannot be written.
    """
    given = [{"params": found.params}] if groups is None else groups
    named = [([canonical_name(name) for name in group["params"]], group) for group in given]
    snapshot = _snapshot(found, named, "AdamW", {})
    return save_now(Path(root), int(found.step), snapshot, AloneRanks(), settings or SaveSettings())


class _HeldSnapshot:
    """A snapshot that is whole on this rank, as a checkpoint that was opened."""

    path = _SOURCE
    world_size = 1

    def __init__(self, snapshot: Snapshot, step: int) -> None:
        self.step, self.values = step, snapshot.values
        self.tensors: Mapping[str, TensorInfo] = {piece.info.name: piece.info for piece in snapshot.pieces}
        self._flats = {piece.info.name: piece.values for piece in snapshot.pieces}

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:  # noqa: ARG002 - dtypes were checked before
        """Fill the values of pieces."""
        for piece in wanted:
            info = self.tensors[piece.info.name]
            values = flat(in_shape(self._flats[info.name], info.shape, info.order), piece.info.order)
            copy_checked(values[piece.start : piece.stop], piece.values, info.name)


def _for_run(found: DpZeroState, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> _HeldSnapshot:
    trained = {canonical_name(name) for name in ddp.param_names.values()}
    here: dict[str, torch.Tensor] = {**named_params(ddp.module), **named_buffers(ddp.module)}
    others = {name: tensor.detach() for name, tensor in here.items() if name not in trained}
    if optimizer is None:
        return _HeldSnapshot(_snapshot(found, None, "", others), int(found.step))
    inner = optimizer.torch_optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
    kind = type(inner).__name__
    is_adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    if not is_adam or any(group["amsgrad"] for group in inner.param_groups):
        _refuse([f"the optimizer here is {kind}, and the state is that of Adam or AdamW without amsgrad"])
    names, _ = members_by_name(members_of(optimizer), ddp.module)
    groups = list(zip(names, optimizer.param_groups, strict=True))
    return _HeldSnapshot(_snapshot(found, groups, kind, others), int(found.step))


def _snapshot(found: DpZeroState, groups: Groups | None, kind: str, others: Mapping[str, torch.Tensor]) -> Snapshot:
    """Return the state by name, for the most part views of it.

    Args:
        groups: None: weights only.
        kind: the class of the optimizer.
        others: weights that are neither in the state nor among ``found.weights``.

    Raises:
        CheckpointMismatchError: state, layout and groups do not fit.
    """
    given = {canonical_name(name): weight for name, weight in found.weights.items()}
    rest = {**others, **given}
    _refuse([*found.problems(), *([] if groups is None else _group_problems(found.params, groups, rest))])
    tensors = {f"{MODEL_PREFIX}{name}": weight for name, weight in rest.items()}
    problems: list[str] = []
    for name, dtype, values in found.values():
        weight = values[PARAM].to(dtype)
        problems += _weight_problems(name, given.get(name), weight)
        tensors[f"{MODEL_PREFIX}{name}"] = weight
        if groups is not None:
            tensors |= {state_name(name, key): values[key] for key in MOMENTS}
            tensors |= {f"{MAIN_PREFIX}{name}": values[PARAM]} if dtype != torch.float32 else {}
    _refuse(problems)
    optimizer = None
    if groups is not None:
        described = dict.fromkeys(found.params, _description(found.step))
        optimizer = optimizer_values(kind, groups, described, dict.fromkeys(found.params, "float32"), tensors.__setitem__)
    pieces = [whole_piece(name, tensor) for name, tensor in sorted(tensors.items())]
    return Snapshot(pieces, values_of_state(optimizer))


def _description(step: float) -> Description:
    count = describe_number("step", torch.tensor(float(step), dtype=torch.float32), torch.device("cpu"))
    return (count, *(StateEntry(key, "elements", "float32") for key in MOMENTS))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointMismatchError(path=_SOURCE, problems=problems)


def _group_problems(params: Sequence[str], groups: Groups, rest: Mapping[str, torch.Tensor]) -> list[str]:
    counts = Counter(name for names, _ in groups for name in names)
    missing = [name for name in params if not counts[name]]
    unknown = sorted(counts.keys() - set(params) - rest.keys())
    twice = [name for name, count in counts.items() if count > 1]
    return [
        *([f"the layout has {name_list(missing)}, and no group of the optimizer has"] if missing else []),
        *([f"the groups of the optimizer have {name_list(unknown)}, and the layout has not"] if unknown else []),
        *([f"the groups of the optimizer have {name_list(twice)} more than once"] if twice else []),
    ]


def _weight_problems(name: str, given: torch.Tensor | None, weight: torch.Tensor) -> list[str]:
    """Return how a weight that was given differs from what the state says it is."""
    if given is None:
        return []
    if (given.dtype, given.shape) != (weight.dtype, weight.shape):
        form, own = (f"{dtype_name(one.dtype)} {tuple(one.shape)}" for one in (given, weight))
        return [f"the weight {name!r} is {form}, and {own} in the layout"]
    if torch.equal(given.detach().cpu(), weight):
        return []
    reasons = "one of the two is of another step, or the layout is another"
    remedy = "If you are sure of the layout, leave the weight out: what the main parameter rounds to is taken"
    return [f"the weight {name!r} is not what its main parameter rounds to: {reasons}. {remedy}"]
