"""A checkpoint into a training run: checked as a whole, read beside it, and only then put into it, on all ranks or on none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megabucket.buffer import ParamAndGradBuffer
from megabucket.checkpoint.canonical import canonical_name, named_buffers, named_params
from megabucket.checkpoint.capture import LOCAL_PREFIX, VALUES_VERSION, TrainingParts, settle, with_extra_state
from megabucket.checkpoint.optim_state import MODEL_PREFIX
from megabucket.checkpoint.ranks import GroupRanks, together
from megabucket.checkpoint.restore_optim import check_optimizer, stage_optimizer
from megabucket.checkpoint.staging import Staging, Stored, find_difference, source_of
from megabucket.checkpoint.values import RNG_PREFIX, check_rng, decode, restore_rng
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointMismatchError
from megabucket.layout.shards import shard_slices


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What a load has found beside what it has put into the run."""

    path: str
    step: int
    world_size: int
    """How many ranks wrote it."""
    data_position: Any
    extras: dict[str, Any]
    rng_restored: bool
    """Whether each rank goes on with its own random numbers: with another number of ranks there is no way to."""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Everything that was read, and what to do with it."""

    staging: Staging
    found: LoadedCheckpoint
    rng: dict[str, torch.Tensor]
    undo: list[Callable[[], Any]] = field(default_factory=list)


def restore(stored: Stored, parts: TrainingParts, *, cast: bool = False, with_rng: bool = True) -> LoadedCheckpoint:
    """Put a checkpoint into a run and return what else it holds. A collective call, between two steps.

    Raises:
        CheckpointMismatchError: it does not fit; the text names everything that does not. As with all other errors, model,
            optimizer, schedulers and random numbers are as they were, on every rank.
        CheckpointInvalidError: a file is not what was written.
        PhaseError: a step is open on some rank.
        CheckpointError: what else failed on some rank.
    """
    ranks = GroupRanks.of(parts.ddp, "loading a checkpoint")
    together(ranks, lambda: settle(parts, "loading a checkpoint"))
    together(ranks, lambda: _refuse(stored, mismatches(stored, parts, cast=cast)))
    read = together(ranks, lambda: _read(stored, parts, ranks, with_rng=with_rng))
    try:
        together(ranks, lambda: _load_stateful(stored, parts, read))
    except BaseException:
        for undo in reversed(read.undo):
            with suppress(Exception):  # what cannot take its own state back has failed before
                undo()
        raise
    _commit(parts, read)
    return read.found


def mismatches(stored: Stored, parts: TrainingParts, *, cast: bool) -> list[str]:
    """Return everything in which a checkpoint and a run differ; nothing, if it can be restored. Local, and changes nothing.

    Raises:
        OptimizerParametersError: the optimizer has parameters that are not the module's.
    """
    if stored.values.get("version") != VALUES_VERSION:
        return [f"its values are of version {stored.values.get('version')!r}, and this one reads version {VALUES_VERSION}"]
    problems = check_model(stored, parts.ddp.module, cast=cast)
    if parts.optimizer is not None:
        problems += check_optimizer(stored, parts.optimizer, parts.ddp.module, cast=cast)
        problems += _name_problems(set(_dict(stored, "stateful")), set(parts.stateful), "of the training run")
    modules, extra_state = set(with_extra_state(parts.ddp.module)), set(_dict(stored, "module_extra_state"))
    return problems + _name_problems(extra_state, modules, "that module.get_extra_state() gives")


def _refuse(stored: Stored, problems: list[str]) -> None:
    if problems:
        raise CheckpointMismatchError(path=str(stored.path), problems=problems)


def _dict(stored: Stored, key: str) -> dict[str, Any]:
    found: Any = stored.values[key]
    return dict(found)


def _name_problems(there: set[str], here: set[str], what: str) -> list[str]:
    return [
        *(f"the checkpoint has the state {what} called {name!r}, and nothing here takes it" for name in sorted(there - here)),
        *(f"the checkpoint has no state {what} called {name!r}" for name in sorted(here - there)),
    ]


def _read(stored: Stored, parts: TrainingParts, ranks: GroupRanks, *, with_rng: bool) -> _Read:
    staging = Staging(stored)
    stage_model(staging, parts.ddp)
    if parts.optimizer is not None:
        stage_optimizer(staging, parts.optimizer, parts.ddp.module)
    values = stored.values
    kept = [values["data_position"], values["extras"]]
    plain = [decode(value, staging.want_stored) for value in kept]
    rng: dict[str, torch.Tensor] = {}
    if with_rng and parts.optimizer is not None and values["rng_ranks"] == ranks.size:
        prefix = f"{RNG_PREFIX}{ranks.rank}."
        rng = {name.removeprefix(prefix): staging.want_stored(name) for name in stored.tensors if name.startswith(prefix)}
    staging.read()
    _refuse(stored, check_rng(rng, parts.ddp.param_and_grad_buffers[0].param_data.device))
    found = LoadedCheckpoint(str(stored.path), stored.step, stored.world_size, plain[0], plain[1], bool(rng))
    return _Read(staging, found, rng)


def _load_stateful(stored: Stored, parts: TrainingParts, read: _Read) -> None:
    """Load scheduler, scaler and modules' extra state, which can be taken back."""
    staging = Staging(stored)
    todo: list[tuple[Callable[[Any], Any], Any, Any]] = []
    if parts.optimizer is not None:
        for name, value in _dict(stored, "stateful").items():
            item = parts.stateful[name]
            todo.append((item.load_state_dict, item.state_dict(), decode(value, staging.want_stored)))
    modules = with_extra_state(parts.ddp.module)
    for name, value in _dict(stored, "module_extra_state").items():
        module = modules[name]
        todo.append((module.set_extra_state, module.get_extra_state(), decode(value, staging.want_stored)))
    staging.read()
    for take, before, state in todo:
        read.undo.append(partial(take, copy.deepcopy(before)))
        take(state)


@torch.no_grad()
def _commit(parts: TrainingParts, read: _Read) -> None:
    for target, values in read.staging.copies:
        target.copy_(values)
    parts.ddp.num_value_changes += 1
    for act in read.staging.finish:
        act()
    restore_rng(read.rng, parts.ddp.param_and_grad_buffers[0].param_data.device)


# Weights and module buffers


def check_model(stored: Stored, module: torch.nn.Module, *, cast: bool) -> list[str]:
    """Return everything in which the stored model and the module differ."""
    own = {**named_params(module), **named_buffers(module)}
    differences = [
        find_difference(stored.tensors.get(f"{MODEL_PREFIX}{name}"), f"{MODEL_PREFIX}{name}", tensor, tensor.dtype, cast=cast)
        for name, tensor in own.items()
    ]
    unknown = [
        f"{name!r} is in the checkpoint and not in the model"
        for name in stored.tensors
        if name.startswith(MODEL_PREFIX) and name.removeprefix(MODEL_PREFIX) not in own
    ]
    return [difference for difference in differences if difference is not None] + unknown


def stage_model(staging: Staging, ddp: DistributedDataParallel) -> None:
    """Want all weights and module buffers."""
    tensors, is_sharded = staging.stored.tensors, ddp.ddp_config.use_distributed_optimizer
    for buffer in ddp.param_and_grad_buffers:
        if is_sharded:
            _stage_shards(staging, ddp, buffer)
            continue
        for name, param in buffer.params.items():
            values = staging.want_like(source_of(tensors, canonical_name(name), param.dtype), param)
            staging.copies.append((param.detach(), values))
    buffered = set(ddp.param_names)
    rest: dict[str, torch.Tensor] = {name: param for name, param in named_params(ddp.module).items() if param not in buffered}
    sources = {name: source_of(tensors, name, param.dtype) for name, param in rest.items()}
    for name, running in named_buffers(ddp.module).items():
        rest[name], local = running, f"{LOCAL_PREFIX}{ddp.communicator.rank}.{name}"
        is_own = local in tensors and staging.stored.world_size == ddp.communicator.size
        sources[name] = local if is_own else f"{MODEL_PREFIX}{name}"
    for name, tensor in rest.items():
        staging.copies.append((tensor.detach(), staging.want_like(sources[name], tensor)))
    if is_sharded:
        staging.finish.append(lambda: _gather(ddp))


def _stage_shards(staging: Staging, ddp: DistributedDataParallel, buffer: ParamAndGradBuffer) -> None:
    rank, layout = ddp.communicator.rank, buffer.layout
    for bucket in layout.buckets:
        span = layout.shard_span(bucket=bucket.index, rank=rank)
        target = buffer.param_data[span.start : span.stop]
        values = target.clone()  # with the padding, which stays
        for piece in shard_slices(layout, bucket=bucket.index, rank=rank):
            source = source_of(staging.stored.tensors, canonical_name(piece.param), values.dtype)
            own = values[piece.in_shard.start : piece.in_shard.stop]
            staging.want(source, buffer.params[piece.param], piece.in_param.start, own)
        staging.copies.append((target, values))


def _gather(ddp: DistributedDataParallel) -> None:
    for group in ddp.bucket_groups:
        group.mark_params_stale()
    ddp.start_param_sync(force_sync=True)
