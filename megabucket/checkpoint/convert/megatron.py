"""From Megatron-Core: the state of its ``DistributedOptimizer`` in bucket space (``dp_zero_gather_scatter``), by name.

No file is read here. The caller reads it, and of what that gives only tensors and numbers are taken.

Per buffer and kind of value there is one flat float32 tensor: the buckets of the buffer one after the other, without their
padded tails. Gaps between parameters are there, and are zero::

    layout  |  head  gap  norm  | tail |  block  | tail |    a buffer of two buckets
    state   |  head  gap  norm  |  block  |

Nothing in it says which parameter lies where. The layout does, and is checked as far as the state allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import (
    GlobalNames,
    canonical_name,
    flat,
    in_shape,
    whole_piece,
)
from megabucket.checkpoint.capture import (
    MAIN_PREFIX,
    MODEL_PREFIX,
    TrainingParts,
    inner_of,
    members_by_name,
    optimizer_values,
    state_name,
    values_of_state,
)
from megabucket.checkpoint.format import Piece, Snapshot
from megabucket.checkpoint.ranks import AloneRanks, GroupRanks, check_one_group, together
from megabucket.checkpoint.restore import LoadedCheckpoint, restore
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import Stored, copy_checked
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointMismatchError, name_list
from megabucket.layout import BufferLayout, ModelLayout
from megabucket.optim.state_dict import Description, StateEntry, describe_number

_SOURCE: Final = "the state of Megatron's DistributedOptimizer"
_PARAM: Final = "param"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")

Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]
"""The names of the parameters of each group, and its hyperparameters."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DpZeroState:
    """What one rank of Megatron's model-parallel group has saved of its optimizer, and what it takes to understand it.

    Args:
        param_state: what ``get_parameter_state_dp_zero()`` gave, or the list of those of dense parameters and of experts.
        layout: of Megatron's buffers: ``layout="megatron"``, its bucket settings, its data-parallel size. The buffers of
            several model chunks follow each other.
        step: how often the optimizer has stepped: ``"step"`` of the groups in Megatron's ``optimizer.state_dict()``.
        weights: what an optimizer's state does not hold: frozen parameters and module buffers. Weights that it does hold may
            be left out; those that are given are compared with their main parameters, which also proves the layout.
    """

    param_state: Any
    layout: ModelLayout
    step: float
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> list[BufferLayout]:
        """The buffers in Megatron's order: experts have an optimizer of their own, after that of the dense parameters."""
        return sorted(self.layout.buffers, key=lambda buffer: buffer.key.group != "dense")

    @property
    def params(self) -> list[str]:
        """The parameters in the order of their registration."""
        slots = [(slot.registration_index, name) for buffer in self.layout.buffers for name, slot in buffer.params.items()]
        return [canonical_name(name) for _, name in sorted(slots)]

    def values(self) -> Iterator[tuple[str, torch.dtype, dict[str, torch.Tensor]]]:
        """Return each parameter with its dtype, its main parameter and its moments, in its shape: views of the state.

        Only where ``problems`` has found none.
        """
        for held, buffer in zip(_held_in(self.param_state), self.buffers, strict=True):
            (flats,) = held.values()
            for name, start in _places(buffer):
                slot = buffer.params[name]
                stop = start + slot.numel
                of_param = {key: flats[key][start:stop].view(slot.shape) for key in (_PARAM, *_MOMENTS)}
                yield canonical_name(name), dtype_named(buffer.key.param_dtype), of_param

    def problems(self) -> list[str]:
        """Return everything in which state and layout differ, and whatever else cannot be used."""
        if type(self.step) not in (int, float) or not 0 <= self.step == self.step // 1:
            return [f"the step is {self.step!r}, and must be a whole number of 0 or more"]
        if twice := [name for name, count in Counter(self.params).items() if count > 1]:
            return [f"the layout has several parameters of one name: {name_list(twice)}"]
        parts = _parts_of(self.param_state)
        if not parts or not all(isinstance(part, Mapping) and part.get("buckets_coalesced") is True for part in parts):
            what = "a dict with 'buckets_coalesced', as it is since 2024, or a list of such dicts"
            return [f"it is not what get_parameter_state_dp_zero() gives: {what}"]
        no_tensors = [name for name, weight in self.weights.items() if not isinstance(weight, torch.Tensor)]
        if no_tensors:
            return [f"of the weights, {name_list(no_tensors)} are no tensors; leave them out"]
        held, buffers = _held_in(self.param_state), self.buffers
        if len(held) != len(buffers):
            keys = ", ".join(str(buffer.key) for buffer in buffers)
            return [f"it has {len(held)} buffers, and the layout has {len(buffers)}: {keys}"]
        return [
            f"buffer {index} ({buffer.key}): {problem}"
            for index, (of_buffer, buffer) in enumerate(zip(held, buffers, strict=True))
            for problem in _buffer_problems(of_buffer, buffer)
        ]


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
    stored = together(GroupRanks(ddp, "loading a checkpoint"), lambda: _for_run(found, ddp, optimizer))
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
    return save_snapshot(root, int(found.step), snapshot, AloneRanks(), settings)


class _HeldSnapshot(Stored):
    """A snapshot that is whole on this rank, as a checkpoint that was opened."""

    def __init__(self, snapshot: Snapshot, step: int) -> None:
        super().__init__(Path(_SOURCE), step, 1, {piece.info.name: piece.info for piece in snapshot.pieces}, snapshot.values)
        self._flats = {piece.info.name: piece.values for piece in snapshot.pieces}

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:  # noqa: ARG002 - dtypes were checked before
        """Fill the values of pieces."""
        for piece in wanted:
            info = self.tensors[piece.info.name]
            values = flat(in_shape(self._flats[info.name], info.shape, info.order), piece.info.order)
            copy_checked(values[piece.start : piece.stop], piece.values, info.name)


def _for_run(found: DpZeroState, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> _HeldSnapshot:
    check_one_group(ddp, "load_dp_zero()")
    trained = {canonical_name(name) for name in ddp.param_names.values()}
    names = GlobalNames(ddp)
    here = {**{name: param for param, name in names.params.items() if not param.is_meta}, **names.buffers}
    others = {name: tensor.detach() for name, tensor in here.items() if name not in trained}
    if optimizer is None:
        return _HeldSnapshot(_snapshot(found, None, "", others), int(found.step))
    inner = inner_of(optimizer)
    kind = type(inner).__name__
    is_adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    if not is_adam or any(group["amsgrad"] for group in inner.param_groups):
        _refuse([f"the optimizer here is {kind}, and the state is that of Adam or AdamW without amsgrad"])
    groups = list(zip(members_by_name(optimizer, names), optimizer.param_groups, strict=True))
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
        weight = values[_PARAM].to(dtype)
        problems += _weight_problems(name, given.get(name), weight)
        tensors[f"{MODEL_PREFIX}{name}"] = weight
        if groups is not None:
            tensors |= {state_name(name, key): values[key] for key in _MOMENTS}
            tensors |= {f"{MAIN_PREFIX}{name}": values[_PARAM]} if dtype != torch.float32 else {}
    _refuse(problems)
    optimizer = None
    if groups is not None:
        described = dict.fromkeys(found.params, _description(found.step))
        optimizer = optimizer_values(kind, groups, described, dict.fromkeys(found.params, "float32"), tensors.__setitem__)
    pieces = [whole_piece(name, tensor) for name, tensor in sorted(tensors.items())]
    return Snapshot(pieces, values_of_state(optimizer))


def _description(step: float) -> Description:
    count = describe_number("step", torch.tensor(float(step), dtype=torch.float32), torch.device("cpu"))
    return (count, *(StateEntry(key, "elements", "float32") for key in _MOMENTS))


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


def _parts_of(param_state: Any) -> list[Any]:
    """Return the states of single optimizers."""
    return list(param_state) if isinstance(param_state, list | tuple) else [param_state]


def _held_in(param_state: Any) -> list[Any]:
    """Return what is held for each buffer."""
    parts = _parts_of(param_state)
    return [part[index] for part in parts for index in sorted(key for key in part if type(key) is int)]


def _places(buffer: BufferLayout) -> Iterator[tuple[str, int]]:
    """Return the parameters of a buffer and where in the state they begin, in this order."""
    offset = 0
    for bucket in buffer.buckets:
        for name in bucket.params:
            yield name, offset + buffer.params[name].start - bucket.start
        offset += bucket.numel_unpadded


def _gaps(buffer: BufferLayout) -> Iterator[tuple[int, int]]:
    """Return the ranges of the state that belong to no parameter. Behind the last one there is none."""
    stop = 0
    for name, start in _places(buffer):
        if stop < start:
            yield stop, start
        stop = start + buffer.params[name].numel


def _buffer_problems(held: Any, buffer: BufferLayout) -> list[str]:
    wanted = (dtype_named(buffer.key.param_dtype), dtype_named(buffer.key.grad_dtype))
    if not isinstance(held, Mapping) or list(held) != [wanted] or not isinstance(held[wanted], Mapping):
        found = ", ".join(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
        return [f"the state has {found or 'nothing'} instead of {wanted}, the dtypes of parameters and gradients"]
    numels = [bucket.numel_unpadded for bucket in buffer.buckets]
    numel, flats, problems = sum(numels), held[wanted], []
    here = f"the layout has {numel}, in buckets of {', '.join(map(str, numels[:5]))}{', ...' if len(numels) > 5 else ''}"
    if flats.get("numel_unpadded", numel) != numel:
        problems.append(f"it has {flats['numel_unpadded']} elements without padding, and {here}")
    for key in (_PARAM, *_MOMENTS):
        flat = flats.get(key)
        if not isinstance(flat, torch.Tensor) or flat.dtype != torch.float32 or flat.dim() != 1:
            found = f"{dtype_name(flat.dtype)} {tuple(flat.shape)}" if isinstance(flat, torch.Tensor) else type(flat).__name__
            problems.append(f"{key!r} is {found}, and must be a flat float32 tensor")
        elif flat.numel() != numel:
            problems.append(f"{key!r} has {flat.numel()} elements, and {here}")
        else:
            full = [f"{start}:{stop}" for start, stop in _gaps(buffer) if flat[start:stop].any()]
            problems += [f"{key!r} is not zero in {name_list(full)}, where the layout has no parameter"] if full else []
    return problems
