"""From Megatron-Core: the state of its ``DistributedOptimizer`` in bucket space (``dp_zero_gather_scatter``), by name.

No file is read here. The caller reads it; only tensors and numbers of the result are used.

Per buffer and kind of value there is one flat float32 tensor: the buckets of the buffer one after the other, without their
padded tails. Gaps between parameters are there, and are zero::

    layout  |  head  gap  norm  | tail |  block  | tail |    a buffer of two buckets
    state   |  head  gap  norm  |  block  |

The state does not say which parameter lies where. The layout does, and is checked as far as the state allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import GlobalNames, canonical_name, flat, in_shape, whole_piece
from megabucket.checkpoint.capture import (
    Prefix,
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
from megabucket.optim.state_dict import StateEntry, describe_number

_SOURCE: Final = "the state of Megatron's DistributedOptimizer"
_PARAM: Final = "param"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")

Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]
"""The names of the parameters of each group, and its hyperparameters."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DpZeroState:
    """The optimizer state that one rank of Megatron's model-parallel group saved, and the layout that explains it.

    Args:
        param_state: the result of ``get_parameter_state_dp_zero()``, or the list of those of dense parameters and of experts.
        layout: of Megatron's buffers: ``layout="megatron"``, its bucket settings, its data-parallel size. The buffers of
            several model chunks follow each other.
        step: how often the optimizer has stepped: ``"step"`` of the groups in Megatron's ``optimizer.state_dict()``.
        weights: tensors that an optimizer's state does not hold: frozen parameters and module buffers. Trained weights may be
            left out; given ones are compared with their main parameters, which also proves the layout.
    """

    param_state: Any
    layout: ModelLayout
    step: float
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def params(self) -> list[str]:
        """The parameters in the order of their registration."""
        slots = [(slot.registration_index, name) for buffer in self.layout.buffers for name, slot in buffer.params.items()]
        return [canonical_name(name) for _, name in sorted(slots)]

    def values(self) -> Iterator[tuple[str, torch.dtype, dict[str, torch.Tensor]]]:
        """Return each parameter with its dtype, its main parameter and its moments, in its shape: views of the state.

        Raises:
            CheckpointMismatchError: state and layout differ.
        """
        states = list(self.param_state) if isinstance(self.param_state, list | tuple) else [self.param_state]
        if not all(isinstance(state, Mapping) and state.get("buckets_coalesced") is True for state in states):
            _refuse(
                "it is not the result of get_parameter_state_dp_zero(): a dict with 'buckets_coalesced', as it is since 2024, "
                "or a list of such dicts"
            )
        held = [state[index] for state in states for index in sorted(key for key in state if type(key) is int)]
        # Experts have an optimizer of their own, after that of the dense parameters.
        buffers = sorted(self.layout.buffers, key=lambda buffer: buffer.key.group != "dense")
        if len(held) != len(buffers):
            keys = ", ".join(str(buffer.key) for buffer in buffers)
            _refuse(f"it has {len(held)} buffers, and the layout has {len(buffers)}: {keys}")
        for of_buffer, buffer in zip(held, buffers, strict=True):
            flats = _checked(of_buffer, buffer)
            for name, start in _places(buffer):
                slot = buffer.params[name]
                of_param = {key: flat[start : start + slot.numel].view(slot.shape) for key, flat in flats.items()}
                yield canonical_name(name), dtype_named(buffer.key.param_dtype), of_param


def _checked(held: Any, buffer: BufferLayout) -> dict[str, torch.Tensor]:
    """Return the flat tensors of a buffer."""
    wanted = (dtype_named(buffer.key.param_dtype), dtype_named(buffer.key.grad_dtype))
    if not isinstance(held, Mapping) or list(held) != [wanted]:
        found = ", ".join(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
        _refuse(f"{buffer.key}: the state has {found} instead of {wanted}, the dtypes of parameters and gradients")
    if not isinstance(held[wanted], Mapping):
        _refuse(f"{buffer.key}: the values of {wanted} are {type(held[wanted]).__name__} instead of a dict")
    numels = [bucket.numel_unpadded for bucket in buffer.buckets]
    flats = {key: held[wanted].get(key) for key in (_PARAM, *_MOMENTS)}
    for key, values in flats.items():
        if not isinstance(values, torch.Tensor) or (values.dtype, values.shape) != (torch.float32, (sum(numels),)):
            found = (
                f"{dtype_name(values.dtype)} {tuple(values.shape)}"
                if isinstance(values, torch.Tensor)
                else type(values).__name__
            )
            _refuse(
                f"{buffer.key}: {key!r} is {found}, and the layout has a flat float32 tensor of {sum(numels)} elements, in "
                f"buckets of {', '.join(map(str, numels[:5]))}{', ...' if len(numels) > 5 else ''}"
            )
        stop = 0
        for name, start in _places(buffer):
            if values[stop:start].any():
                _refuse(f"{buffer.key}: {key!r} is not zero in {stop}:{start}, where the layout has no parameter")
            stop = start + buffer.params[name].numel
    return flats


def _places(buffer: BufferLayout) -> Iterator[tuple[str, int]]:
    """Return the parameters of a buffer and where in the state they begin, in this order."""
    offset = 0
    for bucket in buffer.buckets:
        for name in bucket.params:
            yield name, offset + buffer.params[name].start - bucket.start
        offset += bucket.numel_unpadded


def load_dp_zero(
    found: DpZeroState, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None, *, cast: bool = False
) -> LoadedCheckpoint:
    """Load the state into a run of any number of ranks and any buckets. A collective call, between two steps.

    Every rank passes the same state and takes its shards of it. The run keeps its hyperparameters, and frozen
    parameters and module buffers that are not among ``found.weights``.

    Args:
        optimizer: torch's Adam or AdamW, plain or in a ``DistributedOptimizer``; None to load weights only.
        cast: convert floating-point tensors to the dtypes of this run.

    Raises:
        CheckpointMismatchError: state, layout and run do not fit.
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
        groups: as a torch optimizer takes them, with names under ``"params"``; the run that loads the checkpoint keeps its
            hyperparameters that they do not give. Left out: one group of all parameters.

    Raises:
        CheckpointMismatchError: state, layout and groups do not fit.
        CheckpointNotSavedError: the checkpoint cannot be written.
    """
    given = [{"params": found.params}] if groups is None else groups
    named = [([canonical_name(name) for name in group["params"]], group) for group in given]
    snapshot = _snapshot(found, named, "AdamW", {})
    return save_snapshot(root, int(found.step), snapshot, AloneRanks(), settings)


class _HeldSnapshot(Stored):
    """A snapshot that is whole on this rank, read like a checkpoint."""

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
        _refuse(f"the optimizer here is {kind}, and the state is that of Adam or AdamW without amsgrad")
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
    if type(found.step) not in (int, float) or not 0 <= found.step == found.step // 1:
        _refuse(f"the step is {found.step!r}, and must be a whole number of 0 or more")
    if twice := [name for name, count in Counter(found.params).items() if count > 1]:
        _refuse(f"the layout has several parameters of one name: {name_list(twice)}")
    if no_tensors := [name for name, weight in found.weights.items() if not isinstance(weight, torch.Tensor)]:
        _refuse(f"of the weights, {name_list(no_tensors)} are no tensors; leave them out")
    given = {canonical_name(name): weight for name, weight in found.weights.items()}
    rest = {**others, **given}
    if groups is not None:
        _check_groups(groups, found.params, rest)
    tensors = {f"{Prefix.MODEL}{name}": weight for name, weight in rest.items()}
    for name, dtype, values in found.values():
        weight = values[_PARAM].to(dtype)
        if name in given:
            _check_weight(name, given[name], weight)
        tensors[f"{Prefix.MODEL}{name}"] = weight
        if groups is not None:
            tensors |= {state_name(name, key): values[key] for key in _MOMENTS}
            tensors |= {f"{Prefix.MAIN}{name}": values[_PARAM]} if dtype != torch.float32 else {}
    optimizer = None
    if groups is not None:
        count = describe_number("step", torch.tensor(float(found.step)), torch.device("cpu"))
        description = (count, *(StateEntry(key, "elements", "float32") for key in _MOMENTS))
        described, computed_in = dict.fromkeys(found.params, description), dict.fromkeys(found.params, "float32")
        optimizer = optimizer_values(kind, groups, described, computed_in, tensors.__setitem__)
    pieces = [whole_piece(name, tensor) for name, tensor in sorted(tensors.items())]
    return Snapshot(pieces, values_of_state(optimizer))


def _refuse(problem: str) -> NoReturn:
    raise CheckpointMismatchError(path=_SOURCE, problems=[problem])


def _check_groups(groups: Groups, params: Sequence[str], rest: Mapping[str, torch.Tensor]) -> None:
    here = Counter(name for names, _ in groups for name in names if name in params or name not in rest)
    missing, surplus = list(Counter(params) - here), list(here - Counter(params))
    if missing:
        _refuse(f"the layout has {name_list(missing)}, and no group of the optimizer has")
    if surplus:
        _refuse(f"the groups of the optimizer have {name_list(surplus)} twice, or the layout has not")


def _check_weight(name: str, given: torch.Tensor, weight: torch.Tensor) -> None:
    if (given.dtype, given.shape) != (weight.dtype, weight.shape):
        form, own = (f"{dtype_name(one.dtype)} {tuple(one.shape)}" for one in (given, weight))
        _refuse(f"the weight {name!r} is {form}, and {own} in the layout")
    if not torch.equal(given.detach().cpu(), weight):
        _refuse(
            f"the weight {name!r} is not the rounded main parameter: one of the two is of another step, or the layout is "
            "another. If you are sure of the layout, leave the weight out; the rounded main parameter takes its place"
        )
