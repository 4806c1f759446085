"""Flat shards of all ranks, put together again by parameter: what a plain torch optimizer over whole parameters would hold.

The inverse of ``adopt``. Ranks first tell one another what their shards hold (keys, dtypes, numbers), because one that owns
nothing but padding holds nothing and takes part all the same. Then values per element are gathered buffer by buffer and key by
key: the memory peak is the result and one flat buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megabucket.buffer import ParamAndGradBuffer
from megabucket.buffer.views import dtype_name, dtype_named, view_like
from megabucket.comm import AllGather, Communicator, exchange_bytes
from megabucket.ddp.agreement import agree
from megabucket.errors import OptimizerParametersError
from megabucket.layout import Span
from megabucket.optim.described import Description, StateEntry, describe_state, entry_from_json, number_in
from megabucket.optim.shards import MainShard, main_dtype
from megabucket.optim.whole_state import KNOWN_NUMBERS, WholeState


class ShardHolder(NamedTuple):
    """Where shards lie, and who has the others."""

    buffers: Sequence[ParamAndGradBuffer]
    communicator: Communicator
    is_sharded: bool
    """Whether each rank owns its shard of each bucket, or everything."""
    label: str = "rebuild"
    """What the state is wanted for; of collectives and errors."""


@torch.no_grad()
def unshard(shards: Sequence[MainShard], state: Mapping[torch.Tensor, Mapping[str, Any]], holder: ShardHolder) -> WholeState:
    """Return what all ranks hold for the parameters of the buffers, whole, on every rank. A collective call.

    Main values come along where the parameters are 16-bit now, also those that were not when they moved into the buffers.
    Empty parameters are in no shard and have no state.

    Args:
        shards: of this rank; they cover what it owns.
        state: by main parameter.

    Raises:
        OptimizerParametersError: some state is neither one value per element nor one number, or ranks hold different numbers
            for pieces of one parameter.
        PeerFailedError: some other rank's state is so.
    """
    names = [list(buffer.layout.params) for buffer in holder.buffers]
    values: dict[torch.Tensor, Mapping[str, Any]] = {}
    main_values: dict[torch.Tensor, torch.Tensor] = {}
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    numbers = set(KNOWN_NUMBERS)
    for buffer, described in zip(holder.buffers, exchange_descriptions(shards, state, holder, names), strict=True):
        own = [shard for shard in shards if shard.buffer is buffer]
        numbers |= {entry.key for description in described.values() for entry in description if entry.kind != "elements"}
        for name, whole in _put_together(buffer, own, state, described, holder).items():
            values[buffer.params[name]] = whole
        for name, main in _main_values(buffer, own, holder).items():
            main_values[buffer.params[name]] = main
        dtypes |= dict.fromkeys(buffer.params.values(), main_dtype(buffer.param_data.dtype))
    return WholeState(values, main_values, dtypes, frozenset(numbers))


# What shards hold #


def exchange_descriptions(
    shards: Sequence[MainShard],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    holder: ShardHolder,
    names: Sequence[Sequence[str]],
) -> list[dict[str, Description]]:
    """Return, by buffer and parameter, what the shards of all ranks hold. Parameters that are in no shard are left out."""
    own, failure = [], None
    try:
        own = describe_runs(shards, state, holder, names)
    except OptimizerParametersError as error:
        failure = error
    device = holder.buffers[0].param_data.device
    agree(holder.communicator, [], failure=failure, device=device, label=f"{holder.label}: optimizer state")
    texts = [json.dumps(own).encode()]
    if holder.is_sharded:
        texts = exchange_bytes(holder.communicator, texts[0], device=device, label=f"{holder.label}: optimizer state")
    return merge_descriptions([json.loads(text) for text in texts], names)


def describe_runs(
    shards: Sequence[MainShard],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    holder: ShardHolder,
    names: Sequence[Sequence[str]],
) -> list[Any]:
    """Return what this rank's shards hold, for ``merge_descriptions``; it may travel as JSON.

    Args:
        names: of the parameters of each buffer.

    Raises:
        OptimizerParametersError: some state is neither one value per element nor one number.
    """
    own = []
    for index, buffer in enumerate(holder.buffers):
        positions = {name: position for position, name in enumerate(names[index])}
        for shard in (shard for shard in shards if shard.buffer is buffer):
            members = [positions[name] for name in shard.run.params]
            own.append((index, members, describe_state(state.get(shard.main) or {}, shard)))
    return own


def merge_descriptions(answers: Iterable[Any], names: Sequence[Sequence[str]]) -> list[dict[str, Description]]:
    """Return, by buffer and parameter, what the shards of all ranks hold.

    Args:
        answers: what ``describe_runs`` has returned on each rank.

    Raises:
        OptimizerParametersError: ranks hold different numbers for pieces of one parameter.
    """
    found: list[dict[str, Description]] = [{} for _ in names]
    differing: list[str] = []
    for index, members, entries in (run for answer in answers for run in answer):
        description = tuple(entry_from_json(fields) for fields in entries)
        of_run = [names[index][member] for member in members]
        differing += [name for name in of_run if found[index].setdefault(name, description) != description]
    if differing:
        raise OptimizerParametersError(
            problem="ranks hold different numbers (step counts, say) or kinds of optimizer state for pieces of one parameter: "
            "one of them has missed an update",
            params=list(dict.fromkeys(differing)),
            remedy="Load the last checkpoint on every rank.",
        )
    return found


# Values per element #


def _put_together(
    buffer: ParamAndGradBuffer,
    shards: Sequence[MainShard],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    described: Mapping[str, Description],
    holder: ShardHolder,
) -> dict[str, dict[str, Any]]:
    """Return the state of the parameters of one buffer, by name."""
    device = buffer.param_data.device
    whole: dict[str, dict[str, Any]] = {}
    holders: dict[StateEntry, list[str]] = {}
    for name, description in described.items():
        if description:
            # All keys at once, so that they stay in the order in which the optimizer made them.
            whole[name] = {e.key: None if e.kind == "elements" else number_in(e, device) for e in description}
        for entry in description:
            if entry.kind == "elements":
                holders.setdefault(entry, []).append(name)
    for entry in sorted(holders):  # the same order on every rank
        own = [(shard.run.span, state[shard.main][entry.key]) for shard in shards if entry.key in state.get(shard.main, {})]
        own = [(span, values) for span, values in own if dtype_name(values.dtype) == entry.dtype]
        for name, values in _gather(buffer, holders[entry], own, dtype_named(entry.dtype), holder).items():
            whole[name][entry.key] = values
    return whole


def _main_values(buffer: ParamAndGradBuffer, shards: Sequence[MainShard], holder: ShardHolder) -> dict[str, torch.Tensor]:
    dtype = main_dtype(buffer.param_data.dtype)
    if dtype == buffer.param_data.dtype:
        # The buffer itself holds the main values, complete on every rank. They are wanted where the parameter left for 16 bits.
        narrowed = [name for name, param in buffer.params.items() if main_dtype(param.dtype) != param.dtype]
        return _cut_out(buffer, narrowed, buffer.param_data)
    return _gather(buffer, list(buffer.params), [(shard.run.span, shard.main) for shard in shards], dtype, holder)


def _gather(
    buffer: ParamAndGradBuffer,
    names: Sequence[str],
    own: Iterable[tuple[Span, torch.Tensor]],
    dtype: torch.dtype,
    holder: ShardHolder,
) -> dict[str, torch.Tensor]:
    """Return the values of some parameters, each in its shape and memory order.

    Args:
        own: this rank's flat pieces, with where they lie in the buffer.
    """
    flat = torch.zeros(buffer.layout.numel, dtype=dtype, device=buffer.param_data.device)  # 1D
    for span, values in own:
        flat[span.start : span.stop] = values
    if holder.is_sharded:
        wanted = sorted({buffer.layout.params[name].bucket for name in names})
        calls = []
        for bucket in (buffer.layout.buckets[index] for index in wanted):
            shard = buffer.layout.shard_span(bucket=bucket.index, rank=holder.communicator.rank)
            # As bytes: whatever dtype an optimizer chose for its state, every backend can move it.
            calls.append(
                AllGather(flat[bucket.start : bucket.stop].view(torch.uint8), flat[shard.start : shard.stop].view(torch.uint8))
            )
        holder.communicator.launch(calls, label="optimizer state values").wait()
    return _cut_out(buffer, names, flat)


def _cut_out(buffer: ParamAndGradBuffer, names: Iterable[str], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    # The shape and the memory order are those the parameters had when they moved in: the caller may have changed them since.
    views = {name: buffer.slots[name].view for name in names}
    return {
        name: view_like(flat, buffer.layout.params[name].start, view.shape, view.stride()).clone()
        for name, view in views.items()
    }
