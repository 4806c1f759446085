"""``ddp.export_weights``: what this rank holds, as views of its parameter buffers, or the whole model, gathered in parts.

Ranks first say what they hold. From that each of them finds, for each tensor, the smallest group in which the ranks hold all of
it together. Then one gather over that group serves many tensors: each rank broadcasts what it is the first to hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from megabucket.buffer import ParamAndGradBuffer, dtype_name, dtype_named, view_like
from megabucket.buffer.param_and_grad_buffer import dense_strides
from megabucket.checkpoint.format import Box, block_problem
from megabucket.comm import Broadcast, Communicator, exchange
from megabucket.ddp.groups import RankGroups, copies_key
from megabucket.ddp.replicas import params_of, persistent_buffers, whole_values
from megabucket.ddp.step import GradSync
from megabucket.errors import ConfigError, LayoutError, PhaseError
from megabucket.layout.identity import ParamIdentity, canonical_name, global_names, plain_identity
from megabucket.weights.chunk import WeightChunk, WeightEntry, entry_of

_CALL: Final = "export_weights()"
_EXCHANGE: Final = "exported weights"
_LEAST_BYTES: Final = 1024
_SHOWN: Final = 5
_ALONE: Final = ""
"""In place of a group: each rank holds the tensor whole."""

Part: TypeAlias = list[tuple[WeightEntry, Box]]
"""What one rank sends: blocks of whole tensors."""

Key: TypeAlias = tuple[str, str]
"""A group and a dtype."""


class Exported(Protocol):
    """A wrapper, as far as its weights leave and come back."""

    num_value_changes: int
    module: torch.nn.Module

    @property
    def sync(self) -> GradSync:
        """The state of the gradient sync; another one after a rebuild."""

    @property
    def identities(self) -> dict[str, ParamIdentity]:
        """The identity of each parameter, by local name."""

    @property
    def param_and_grad_buffers(self) -> list[ParamAndGradBuffer]:
        """The buffers."""

    def finish_param_sync(self) -> None:
        """Return when every parameter may be read."""

    def reading_params(self) -> AbstractContextManager[None]:
        """Allow calls that only read parameters while other memory is given back."""

    def note_written(self) -> None:
        """Note that values were written into the buffers."""


class Held(NamedTuple):
    """A tensor of this rank, or its piece of one."""

    entry: WeightEntry
    values: torch.Tensor
    identity: ParamIdentity | None
    """``None``: it is a module buffer."""


def held_weights(ddp: Exported) -> dict[str, Held]:
    """Return what this rank holds, by local name: parameters, frozen ones included, and persistent module buffers.

    Raises:
        ConfigError: one of them is sparse, of a subclass (quantized), or a DTensor cut over ranks that the wrapper does not
            know.
        PhaseError: parameters were added after wrapping.
    """
    module, names = ddp.module, dict[int, list[str]]()
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(canonical_name(name))
    aliases = {name: others for name, *others in names.values()}
    identities = {canonical_name(name): identity for name, identity in ddp.identities.items()}
    global_name = global_names(identities)
    params = {canonical_name(name): param for name, param in params_of(module, ddp.identities).items() if not param.is_meta}
    found = {}
    for name, tensor in [*params.items(), *persistent_buffers(module).items()]:
        values = whole_values(f"the parameter {name!r}", tensor).detach()
        if values.layout is not torch.strided or type(values) is not torch.Tensor:
            kind = f"a {type(values).__name__} with layout {values.layout}"
            raise ConfigError(
                f"{name!r} is {kind}, and chunks hold plain dense tensors. Convert it, or take it from state_dict()."
            )
        shape, strides = tuple(values.shape), dense_strides(values)
        own = identities.get(name) or plain_identity(global_name(name), shape)
        others = tuple(map(global_name, aliases[name]))
        place = (shape, strides, own.offset, own.global_shape, others)
        entry = WeightEntry(canonical_name(own.global_name), *place, stop=values.numel())
        found[name] = Held(entry, values, identities.get(name))
    return found


def device_of(ddp: Exported) -> torch.device:
    """Return the device of the parameters."""
    return ddp.param_and_grad_buffers[0].param_data.device


def first_problems(problems: Sequence[str]) -> str:
    """Return the first problems as text."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def export_weights(ddp: Exported, dtype: torch.dtype | None, *, max_bytes: int, whole: bool) -> Iterator[WeightChunk]:
    """Return the chunks. See ``DistributedDataParallel.export_weights``."""
    export = _Export(ddp, dtype, max_bytes)
    if not whole:
        with ddp.reading_params():
            export.begin()
        return export.local()
    with ddp.reading_params(), ddp.sync.call(_CALL) as call:
        export.begin()
        call.entries = [("dtype", str(dtype)), ("max_bytes", max_bytes)]
        call.open()
        by_rank = export.exchange()
    model = WholeWeights(by_rank)
    return export.whole(model) if any(over for over, _ in model.key_of.values()) else export.local()


class _Export:
    """One export on this rank."""

    def __init__(self, ddp: Exported, dtype: torch.dtype | None, max_bytes: int) -> None:
        self._ddp, self._dtype, self._max_bytes = ddp, dtype, max_bytes
        self._version: object = None
        self._held: Mapping[str, Held] = {}

    def begin(self) -> None:
        """Check arguments and phase, and complete the parameters."""
        dtype, max_bytes = self._dtype, self._max_bytes
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"{_CALL}: dtype must be a floating dtype of torch or None, got {dtype!r}")
        if type(max_bytes) is not int or max_bytes < _LEAST_BYTES:
            raise ConfigError(f"{_CALL}: max_bytes must be an integer of at least {_LEAST_BYTES}, got {max_bytes!r}")
        self._ddp.sync.check_between_steps(_CALL)
        self._ddp.finish_param_sync()
        self._version, self._held = self._version_now(), held_weights(self._ddp)

    def _version_now(self) -> object:
        return self._ddp.sync, self._ddp.sync.step, self._ddp.num_value_changes

    def _check_version(self) -> None:
        if self._version_now() != self._version:
            raise PhaseError(
                f"the weights have changed while {_CALL} was under way: a step, a load or a rebuild came between two of its "
                "chunks, and the receiver would mix old weights with new ones. Take all chunks before the next step, or begin "
                "a new export."
            )

    def _out(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    # What this rank holds #

    def local(self) -> Iterator[WeightChunk]:
        """Yield what this rank holds: its parameter buffers, then frozen parameters and module buffers."""
        for flat, entries in self._flats():
            for chunk in _chunks(flat, entries, self._out(flat.dtype), self._max_bytes):
                self._check_version()
                yield chunk

    def _flats(self) -> Iterator[tuple[torch.Tensor, Sequence[WeightEntry]]]:
        others = dict(self._held)
        for buffer in self._ddp.param_and_grad_buffers:
            # An empty parameter may begin where the next one does.
            slots = sorted((slot.start, slot.stop, canonical_name(name)) for name, slot in buffer.layout.params.items())
            yield buffer.param_data, [replace(others.pop(name).entry, position=start) for start, _, name in slots]
        rest = sorted(others.values(), key=lambda one: dtype_name(one.values.dtype))
        values_of = {(one.entry.name, one.entry.offset): one.values for one in rest}
        for _, pack in _packs((((_ALONE, dtype_name(one.values.dtype)), one.entry) for one in rest), self._max_bytes):
            flats = [_flat(entry, values_of[entry.name, entry.offset]) for entry in pack]
            yield flats[0] if len(flats) == 1 else torch.cat(flats), pack

    # The whole model #

    def exchange(self) -> list[dict[str, Any]]:
        """Return what each rank holds, and its groups by name. That of this rank alone, if all hold the same."""
        ranks = self._ddp.sync.ranks
        held = [
            {
                "entry": dataclasses.asdict(one.entry),
                "dtype": dtype_name(self._out(one.values.dtype)),
                # Not of module buffers, which may differ between ranks.
                "is_first": one.identity is not None and (ranks.has_same_params or ranks.is_first(one.identity)),
            }
            for one in self._held.values()
        ]
        if ranks.has_same_params:
            return [{"held": held, "groups": {}}]
        members = {name: list(map(ranks.step.members.index, of.members)) for name, of in _groups_by_name(ranks).items()}
        payload = zlib.compress(json.dumps({"held": held, "groups": members}).encode())
        rows = exchange(ranks.step, payload, device=device_of(self._ddp), label=_EXCHANGE)
        return [json.loads(zlib.decompress(row)) for row in rows]

    def whole(self, model: WholeWeights) -> Iterator[WeightChunk]:
        """Yield the whole model in one order on all ranks: a collective call and a gather for each ``max_bytes``."""
        entries = sorted(((model.key_of[name], entry) for name, entry in model.entries.items()), key=operator.itemgetter(0))
        for number, ((over, dtype), pack) in enumerate(_packs(entries, self._max_bytes)):
            with self._ddp.reading_params(), self._ddp.sync.call(f"{_CALL}: part") as call:
                self._check_version()
                call.entries = [("part", number, dtype, self._max_bytes)]
                call.open()
                flat = self._gather(model, pack, over, dtype_named(dtype))
            yield from _chunks(flat, pack, flat.dtype, self._max_bytes)

    @torch.no_grad()
    def _gather(self, model: WholeWeights, pack: Sequence[WeightEntry], over: str, dtype: torch.dtype) -> torch.Tensor:
        ranks, device = self._ddp.sync.ranks, device_of(self._ddp)
        own = {(one.entry.name, one.entry.box): one.values for one in self._held.values()}
        members = model.by_rank[ranks.step.rank]["groups"][over] if over else [ranks.step.rank]
        parts = model.parts(pack, members)
        flats = [torch.empty(sum(map(_numel, part)), dtype=dtype, device=device) for part in parts]
        mine = members.index(ranks.step.rank)
        for entry, box, values in _blocks_in(flats[mine], parts[mine]):
            values.copy_(own[entry.name, box])
        if over:
            calls = [Broadcast(flat, root) for root, flat in enumerate(flats)]
            _groups_by_name(ranks)[over].launch(calls, label=_EXCHANGE).wait()
        whole = torch.empty(pack[-1].position + pack[-1].numel, dtype=dtype, device=device)
        for flat, part in zip(flats, parts, strict=True):
            for entry, box, values in _blocks_in(flat, part):
                place = tuple(slice(start, stop) for start, stop in box)
                view_like(whole, entry.position, entry.shape, entry.stride)[place] = values
        return whole


def _groups_by_name(ranks: RankGroups) -> dict[str, Communicator]:
    """Return the groups in which a rank may find the pieces that it lacks."""
    copies = {copies_key(name): group for name, group in ranks.all_copies.items()}
    return {**copies, **{name: group.communicator for name, group in ranks.by_name.items()}, "all ranks": ranks.step}


class WholeWeights:
    """The whole model, from what each rank holds. The same on all ranks.

    Args:
        by_rank: the results of ``_Export.exchange``.

    Raises:
        LayoutError: some part is on no rank, or on several that do not know of each other.
    """

    def __init__(self, by_rank: Sequence[Mapping[str, Any]]) -> None:
        self.by_rank = by_rank
        self.entries: dict[str, WeightEntry] = {}
        """The whole tensors, by name."""
        self.key_of: dict[str, Key] = {}
        """By name: the smallest group whose ranks hold all of a tensor together, and its dtype."""
        self._boxes: list[dict[str, set[Box]]] = [{} for _ in by_rank]
        """By rank and name."""
        claims: dict[str, list[Box]] = {}
        dtypes: dict[str, str] = {}
        for row, boxes in zip(by_rank, self._boxes, strict=True):
            for one in row["held"]:
                entry = entry_of(one["entry"])
                self.entries.setdefault(entry.name, _as_whole(entry))
                dtypes.setdefault(entry.name, one["dtype"])
                boxes.setdefault(entry.name, set()).add(entry.box)
                claims.setdefault(entry.name, []).extend([entry.box] * (one["is_first"] and entry.numel > 0))
        problems = [
            f"the blocks of {name!r} {problem}"
            for name, of_name in claims.items()
            if of_name and (problem := block_problem(of_name, self.entries[name].shape)) is not None
        ]
        groups = {_ALONE: {(rank,) for rank in range(len(by_rank))}}
        for group in set(by_rank[0]["groups"]).intersection(*(row["groups"] for row in by_rank)):
            groups[group] = {tuple(row["groups"][group]) for row in by_rank}
        order = sorted(groups, key=lambda group: (max(map(len, groups[group])), group))
        for name, whole in self.entries.items():
            over = [group for group in order if all(self._is_in(whole, members) for members in groups[group])]
            problems += [] if over else [f"no group of ranks holds all of {name!r}"]
            self.key_of[name] = (*over, _ALONE)[0], dtypes[name]
        if problems:
            raise LayoutError(
                f"{_CALL}: {first_problems(problems)}. Let identity= give each part its own global_name or place, copies= the "
                "ranks that hold the same, and step_group= contain all that hold parts; or export with whole=False."
            )

    def _is_in(self, whole: WeightEntry, members: Iterable[int]) -> bool:
        boxes = set[Box]().union(*(self._boxes[rank].get(whole.name, ()) for rank in members))
        return sum(_numel((whole, box)) for box in boxes) == whole.numel

    def parts(self, pack: Sequence[WeightEntry], members: Sequence[int]) -> list[Part]:
        """Return what each rank of a group sends: the blocks that it is the first to hold."""
        parts: list[Part] = [[] for _ in members]
        for entry in pack:
            of_name = [self._boxes[rank].get(entry.name, set()) for rank in members]
            for box in sorted(set[Box]().union(*of_name)):
                parts[next(place for place, boxes in enumerate(of_name) if box in boxes)].append((entry, box))
        return parts


def _as_whole(entry: WeightEntry) -> WeightEntry:
    """Return the entry of the whole tensor, row-major."""
    shape = entry.global_shape
    stride = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    return replace(entry, shape=shape, stride=stride, offset=(0,) * len(shape), stop=math.prod(shape))


def _numel(block: tuple[WeightEntry, Box]) -> int:
    return math.prod(stop - start for start, stop in block[1])


def _blocks_in(flat: torch.Tensor, part: Part) -> Iterator[tuple[WeightEntry, Box, torch.Tensor]]:
    """Yield what one rank sends, each with its place in ``flat``."""
    for (entry, box), values in zip(part, flat.split(list(map(_numel, part))), strict=True):
        yield entry, box, values.view([stop - start for start, stop in box])


# From entries to chunks #


def _flat(entry: WeightEntry, values: torch.Tensor) -> torch.Tensor:
    """Return values in one dimension, in the order of the entry's strides: a view where they lie so in memory."""
    order = sorted(range(values.dim()), key=lambda dim: -entry.stride[dim])
    return values.permute(order).reshape(-1)


def _packs(entries: Iterable[tuple[Key, WeightEntry]], max_bytes: int) -> Iterator[tuple[Key, list[WeightEntry]]]:
    """Place entries one behind the other, up to ``max_bytes``; a larger one is alone.

    Args:
        entries: those of one key are neighbours.
    """
    for key, of_key in itertools.groupby(entries, key=operator.itemgetter(0)):
        pack, numel, most = list[WeightEntry](), 0, max_bytes // dtype_named(key[1]).itemsize
        for _, entry in of_key:
            if pack and numel + entry.numel > most:
                yield key, pack
                pack, numel = [], 0
            pack.append(replace(entry, position=numel))
            numel += entry.numel
        yield key, pack


def _chunks(flat: torch.Tensor, entries: Iterable[WeightEntry], dtype: torch.dtype, max_bytes: int) -> Iterator[WeightChunk]:
    """Cut a flat tensor into chunks, between its entries where possible, and convert them.

    Args:
        entries: in the order of their positions in ``flat``.
    """
    most = max_bytes // dtype.itemsize

    def chunk(parts: Sequence[WeightEntry]) -> WeightChunk:
        first, last = parts[0].position, parts[-1].position + parts[-1].stop - parts[-1].start
        return WeightChunk(flat[first:last].to(dtype), tuple(replace(part, position=part.position - first) for part in parts))

    taken: list[WeightEntry] = []
    for entry in entries:
        for start in range(0, max(entry.numel, 1), most):
            stop = min(start + most, entry.numel)
            part = replace(entry, start=start, stop=stop, position=entry.position + start)
            if taken and part.position + stop - start - taken[0].position > most:
                yield chunk(taken)
                taken = []
            taken.append(part)
    if taken:
        yield chunk(taken)
