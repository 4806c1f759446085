"""Optimizer state: of whole parameters, of flat shards, and in the format of ``torch.optim``.

``WholeState`` is the state of plain torch plus the main values of 16-bit parameters. ``StateCutter`` cuts it into the shards of
one layout, ``unshard`` reassembles it from the shards of all ranks, ``pack`` and ``unpack`` convert it to a ``state_dict`` and
back. Between shards and whole parameters state moves as pieces (``state_pieces``, ``MainShard.pieces``). All work for any
optimizer: an entry holds either a value per element, which is cut like its parameter, or one number per parameter (a step
count). Parameters with different numbers or keys do not share a shard.
"""

from __future__ import annotations

import copy
import io
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from megabucket.buffer import ParamAndGradBuffer, dtype_name, dtype_named, view_like
from megabucket.buffer.param_and_grad_buffer import dense_strides
from megabucket.comm import AllGather, Broadcast, Communicator, exchange
from megabucket.errors import CheckpointMismatchError, OptimizerParametersError
from megabucket.optim.param_state import KNOWN_NUMBERS, MAIN_PARAM, is_per_element
from megabucket.optim.shards import MAIN, MainShard, StatePiece, WholeShard, main_dtype
from megabucket.optim.updates import shell_of

if TYPE_CHECKING:
    from megabucket.ddp.step import GradSync

_SENDABLE: Final = frozenset({torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, type(None)})
"""Types in the state of a whole parameter that other ranks can make again."""

_fields: Final = attrgetter("values", "main_values", "dtypes")

AS_PLAIN: Final = (
    "{0} without a DistributedOptimizer around it, under DistributedDataParallelConfig(use_distributed_optimizer=False); given "
    "this config, the adapters for Lightning and Hugging Face make none."
)
"""How to use an optimizer that cannot step on flat tensors, whatever the config is now."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeState:
    """The state of an optimizer over whole parameters."""

    values: Mapping[torch.Tensor, Mapping[str, Any]]
    """By parameter and key, as in ``torch.optim.Optimizer.state``; tensors of one value per element have its shape."""
    main_values: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Full-precision values of 16-bit parameters before rounding, in their shape."""
    dtypes: Mapping[torch.Tensor, torch.dtype] = field(default_factory=dict)
    """The dtype of computation if it is not the parameter's. State of this dtype has the dtype of the main parameter."""

    @classmethod
    def of_all(cls, parts: Sequence[WholeState]) -> WholeState:
        """Return the state of several optimizers together."""
        return cls(*(dict(chain.from_iterable(one.items() for one in kind)) for kind in zip(*map(_fields, parts), strict=True)))

    def of(self, param: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of one parameter; empty before its first step."""
        return self.values.get(param) or {}

    def follows_param(self, param: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether a value per element has the dtype of computation, and not a dtype of the optimizer's choice."""
        return value.dtype == self.dtypes.get(param, param.dtype)


def state_pieces(shards: Iterable[MainShard], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> Iterator[StatePiece]:
    """Yield the values per element of shards: those of their state, and their own main values, by parameter and key.

    Args:
        state: by main parameter.
    """
    for shard in shards:
        of_shard = state.get(shard.main) or {}
        elements = {key: value.detach() for key, value in of_shard.items() if is_per_element(key, value, shard.main)}
        yield from shard.pieces({**elements, **shard.own_values})


# From whole parameters to shards #

ShardState = dict[str, Any]
"""The state of one shard, by key."""


class StateCutter:
    """Cuts the state of whole parameters into shards.

    Args:
        whole: the state; empty for parameters before their first step.
        params: the parameters in the buffers, by name.
        held_numels: elements of each parameter on this rank, where values in ``whole`` may be of that part alone, 1D.
        uncut: names of parameters that are updated whole. Their state may be anything.

    Raises:
        OptimizerParametersError: an entry is neither one value per element nor one number: a table, or moments from before
            the parameter was resized.
    """

    def __init__(
        self,
        whole: WholeState,
        params: Mapping[str, torch.nn.Parameter],
        held_numels: Mapping[torch.Tensor, int] = MappingProxyType({}),
        *,
        uncut: Collection[str] = (),
    ) -> None:
        self._whole = whole
        self._params = params
        self._held_numels = held_numels
        misfits = [
            f"{key} of {name}: shape {tuple(value.shape)} for {tuple(param.shape)}"
            for name, param in params.items()
            if name not in uncut
            for key, value in whole.of(param).items()
            if isinstance(value, torch.Tensor) and value.numel() != 1 and not self._is_per_element(key, value, param)
        ]
        if misfits:
            raise OptimizerParametersError(
                problem="the optimizer holds state that is neither one value per element nor one number per parameter, and "
                "cannot be cut into flat shards",
                params=misfits,
                remedy="Where the parameter was resized, drop its state (optimizer.state.pop(param)) to start anew. Else use "
                + AS_PLAIN.format("such an optimizer"),
            )

    def _is_per_element(self, key: str, value: Any, param: torch.nn.Parameter) -> bool:
        return is_per_element(key, value, param) or (
            isinstance(value, torch.Tensor) and value.shape == (self._held_numels.get(param, -1),) and key not in KNOWN_NUMBERS
        )

    def signature(self, name: str) -> tuple[str, ...]:
        """Return a text for each key, equal for parameters that may share a shard; empty without state.

        It has the values of numbers, and the dtype of values per element if the optimizer has chosen it.
        """
        param = self._params[name]
        return tuple(sorted(self._describe(param, key, value) for key, value in self._whole.of(param).items()))

    def _describe(self, param: torch.nn.Parameter, key: str, value: Any) -> str:
        if self._is_per_element(key, value, param):
            return f"{key} per element" if self._whole.follows_param(param, value) else f"{key} in {dtype_name(value.dtype)}"
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return f"{key}={value.item()!r} ({dtype_name(value.dtype)}, {tuple(value.shape)}, {value.device.type})"
        if type(value).__name__ in NUMBER_TYPES:
            return f"{key}={value!r}"
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        return f"{key}: {type(value).__name__}{shape}"

    @torch.no_grad()
    def state_of(self, shard: MainShard) -> ShardState:
        """Return the state of one shard, whose parameters have the same signature."""
        if isinstance(shard, WholeShard):
            return self._uncut_state_of(shard)
        param = self._params[shard.segment.params[0]]
        flats: dict[str, torch.Tensor] = {}
        for key, value in self._whole.of(param).items():
            if self._is_per_element(key, value, param):
                dtype = shard.main.dtype if self._whole.follows_param(param, value) else value.dtype
                flats[key] = torch.zeros_like(shard.main, dtype=dtype)
        for piece in shard.pieces(flats):  # the gaps between them stay zero
            of_piece = self._params[piece.param]
            _fill(piece, self._whole.of(of_piece)[piece.key], of_piece)
        return {key: flats[key] if key in flats else copy.deepcopy(value) for key, value in self._whole.of(param).items()}

    def _uncut_state_of(self, shard: WholeShard) -> ShardState:
        param = self._params[shard.name]
        found: ShardState = copy.deepcopy(dict(self._whole.of(param)))
        for key, value in found.items():
            # In the dtype and memory order of the main parameter.
            if is_per_element(key, value, param) and self._whole.follows_param(param, value):
                found[key] = torch.empty_like(shard.main, requires_grad=False).copy_(value)
            elif key not in KNOWN_NUMBERS:
                found[key] = _map_tensors(
                    lambda of: of.to(shard.main.dtype) if self._whole.follows_param(param, of) else of, value
                )
        return found

    @torch.no_grad()
    def restore_main_values(self, shard: MainShard, held: Mapping[str, torch.Tensor] | None = None) -> None:
        """Restore main values in a new shard where they still round to the parameters.

        Args:
            held: by parameter, the values of this rank's range that stay where there are no others. Given, all values are
                taken without comparing them to the parameters.
        """
        if not shard.has_own_values or not (self._whole.main_values or held):
            return
        for piece in shard.pieces(shard.own_values):
            param = self._params[piece.param]
            whole = self._whole.main_values.get(param)
            if whole is not None and whole.shape == param.shape:
                _fill(piece, whole, param)
            elif held is not None and piece.param in held:
                _fill(piece, held[piece.param], param)
        if held is None:
            shard.follow_buffer()


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return state of a whole parameter with changed tensors, also those in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _map_tensors(change, one) for key, one in value.items()}
    return type(value)(_map_tensors(change, one) for one in value) if type(value) in (list, tuple) else value


def _fill(piece: StatePiece, whole: torch.Tensor, param: torch.nn.Parameter) -> None:
    """Copy the piece's range of whole values, or values of that range alone, in the dtype of the piece.

    A range counts in memory order, as in the buffer; for channels-last that is not the order of indices.
    """
    if whole.shape != param.shape:
        piece.values.copy_(whole)
        return
    ordered = torch.empty_strided(param.shape, dense_strides(param), dtype=piece.values.dtype, device=piece.values.device)
    piece.values.copy_(ordered.copy_(whole).as_strided((param.numel(),), (1,))[slice(*piece.in_param)])


# Descriptions of state, which ranks compare and checkpoints store #

_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "NoneType": lambda _: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,  # reads back every bit that repr wrote
    "str": str,
}

NUMBER_TYPES: Final = frozenset(_READERS)
"""Types of numbers that are not tensors."""


class StateEntry(NamedTuple):
    """The description of one key of a shard's state."""

    key: str
    kind: str
    """``elements`` (one value per element), ``number``, or ``tensor`` (of one number). A checkpoint also has, for parameters
    without a shard, ``other`` (any other tensor) and ``plain`` (data as JSON)."""
    dtype: str = ""
    device: str = ""
    shape: tuple[int, ...] = ()
    number: tuple[str, str] = ("", "")  # type and text


Description = tuple[StateEntry, ...]
"""The state of one parameter, in the order of its keys."""


def describe_entry(key: str, value: Any, like: torch.Tensor) -> StateEntry | None:
    """Describe a value per element or a number; return None for anything else.

    Args:
        like: the shard or parameter that the state belongs to.
    """
    if is_per_element(key, value, like):
        return StateEntry(key, "elements", dtype_name(value.dtype))
    if type(value).__name__ in NUMBER_TYPES or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return describe_number(key, value, like.device)
    return None


def _describe_in_shard(key: str, value: Any, shard: MainShard) -> StateEntry:
    if (entry := describe_entry(key, value, shard.main)) is not None:
        return entry
    found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise OptimizerParametersError(
        problem="the optimizer holds, for a flat shard, state that is neither one value per element nor one number, so it "
        "cannot be split by parameter",
        params=[f"{key}: {found}"],
        remedy=f"Use {AS_PLAIN.format('such an optimizer')}",
    )


def describe_number(key: str, value: Any, device: torch.device) -> StateEntry:
    """Describe a number, or a tensor of one.

    Args:
        device: of the parameters. A number on this device is loaded to the device of the parameters, one on the CPU to the CPU.
    """
    if not isinstance(value, torch.Tensor):
        return StateEntry(key, "number", number=_written(value))
    where = "" if value.device == device else value.device.type
    return StateEntry(key, "tensor", dtype_name(value.dtype), where, tuple(value.shape), _written(value.item()))


def entry_from_json(fields: Any) -> StateEntry:
    """Return an entry from its JSON, a list."""
    key, kind, dtype, device, shape, (number_type, text) = fields
    return StateEntry(key, kind, dtype, device, tuple(shape), (number_type, text))


def _written(number: Any) -> tuple[str, str]:
    return type(number).__name__, str(number)


def number_in(entry: StateEntry, device: torch.device) -> Any:
    """Return the number of an entry as the optimizer held it.

    Args:
        device: of the parameters.
    """
    kind, text = entry.number
    number = _READERS[kind](text)
    if entry.kind == "number":
        return number
    own_device = torch.device(entry.device) if entry.device else device
    # First the number, then its shape, which may be wrong in a file: there is never memory for more than one element.
    return torch.full((), number, dtype=dtype_named(entry.dtype), device=own_device).reshape(entry.shape)


# From the shards of all ranks to whole parameters #


class ShardHolder(NamedTuple):
    """The buffers of the shards, and the ranks that hold the other shards."""

    buffers: Sequence[ParamAndGradBuffer]
    sync: GradSync
    is_sharded: bool
    """Whether each rank owns its shard of each bucket, or everything."""
    owner_of: Mapping[str, int] = MappingProxyType({})
    """The rank in its reduction group that updates a parameter whole, for parameters that one rank updates."""
    label: str = "rebuild"
    """The purpose, for collectives and errors."""

    def communicator(self, buffer: ParamAndGradBuffer) -> Communicator:
        """Return the communicator that a buffer is reduced over."""
        return self.sync.ranks.by_name[buffer.layout.key.group].communicator


@torch.no_grad()
def unshard(shards: Sequence[MainShard], state: Mapping[torch.Tensor, Mapping[str, Any]], holder: ShardHolder) -> WholeState:
    """Return the whole state of the parameters in the buffers, on every rank. A collective call.

    It has main values for parameters that are 16-bit now, even if they were not when they moved into the buffers. Empty
    parameters are in no shard and have no state.

    Args:
        shards: all shards of this rank.
        state: by main parameter.

    Raises:
        OptimizerParametersError: an entry is neither one value per element nor one number, or ranks hold different numbers
            for pieces of one parameter; or an entry of a parameter that is updated whole cannot be sent.
        PeerFailedError: another rank has failed.
    """
    values: dict[torch.Tensor, Mapping[str, Any]] = {}
    main_values: dict[torch.Tensor, torch.Tensor] = {}
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    label = f"{holder.label}: descriptions of optimizer state"
    with holder.sync.call(label) as call:
        own = describe_shards(shards, state)
        _check_can_be_sent(shards, state)
        call.open()
        answers = _of_all_ranks(shards, own, holder, label)
    with holder.sync.call(f"{holder.label}: optimizer state") as call:
        described = merge_descriptions(answers)
        call.open()
        uncut = {*holder.owner_of, *(shard.name for shard in shards if isinstance(shard, WholeShard))}
        for buffer in holder.buffers:
            flat = (shard for shard in shards if shard.buffer is buffer and not isinstance(shard, WholeShard))
            pieces = list(state_pieces(flat, state))
            values |= _put_together(buffer, pieces, described, holder)
            main_values |= _main_values(buffer, pieces, holder, uncut)
            dtypes |= dict.fromkeys(buffer.params.values(), main_dtype(buffer.param_data.dtype))
            for param, (of_param, main) in _of_owners(buffer, shards, state, holder):
                values |= {param: of_param} if of_param else {}
                main_values |= {} if main is None else {param: main}
    return WholeState(values, main_values, dtypes)


def _check_can_be_sent(shards: Iterable[MainShard], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Refuse state of parameters that are updated whole from which no other rank could make the same.

    Raises:
        OptimizerParametersError: an entry holds objects that cannot be pickled, or that ``torch.load`` takes for code.
    """
    wrong = [
        f"{shard.name}: {key!r} has a {type(found).__name__} ({str(error).splitlines()[0]})"
        for shard in shards
        if isinstance(shard, WholeShard)
        for key, value in (state.get(shard.main) or {}).items()
        for found, error in _find_unsendable(value)
    ]
    if wrong:
        raise OptimizerParametersError(
            problem="state of parameters that are updated whole cannot be sent to other ranks",
            params=wrong,
            remedy="Keep tensors, numbers, texts, and lists, tuples or dicts of them in the state; the rest in attributes.",
        )


def _find_unsendable(value: Any) -> Iterator[tuple[Any, Exception]]:
    """Yield what cannot be sent in an entry, and why. Tensors are not copied."""
    if type(value) in _SENDABLE:
        return
    if type(value) in (dict, list, tuple):
        for one in chain(value, value.values()) if type(value) is dict else value:
            yield from _find_unsendable(one)
        return
    payload = io.BytesIO()
    try:
        torch.save(value, payload)
        payload.seek(0)
        torch.load(payload)
    except Exception as error:  # whatever the class of the object raises
        yield value, error


def _of_owners(
    buffer: ParamAndGradBuffer,
    shards: Sequence[MainShard],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    holder: ShardHolder,
) -> Iterator[tuple[torch.Tensor, tuple[dict[str, Any], torch.Tensor | None]]]:
    """Yield the parameters of one buffer that are updated whole, with their state and main values, which owners send."""
    whole = {shard.name: shard for shard in shards if isinstance(shard, WholeShard) and shard.buffer is buffer}
    communicator = holder.communicator(buffer)
    for name in [name for name in buffer.params if name in whole or name in holder.owner_of]:
        shard, payload = whole.get(name), io.BytesIO()
        if shard is not None:
            main = shard.main.detach() if shard.has_own_values else None
            torch.save((dict(state.get(shard.main) or {}), main), payload)
        if name in holder.owner_of:
            sent = payload.getvalue()
            payload = io.BytesIO(_from_owner(communicator, sent, holder.owner_of[name], buffer.param_data.device))
        payload.seek(0)
        yield buffer.params[name], torch.load(payload, map_location=partial(_place, device=buffer.param_data.device))


def _from_owner(communicator: Communicator, payload: bytes, owner: int, device: torch.device) -> bytes:
    """Return the payload of one rank, of any length, on all ranks."""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    handle = communicator.launch([Broadcast(size, owner)], label="size of optimizer state")
    whole = torch.empty(int(handle.read(size)), dtype=torch.uint8, device=device)
    if communicator.rank == owner:
        whole.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    return communicator.launch([Broadcast(whole, owner)], label="optimizer state of an owner").read(whole).numpy().tobytes()


def _place(storage: Any, location: str, *, device: torch.device) -> Any:
    """Return what an owner had on its device on the device of this rank; the rest stays on the host."""
    return storage if location == "cpu" or device.type == "cpu" else storage.to(device=device)


def _of_all_ranks(shards: Sequence[MainShard], own: Sequence[Any], holder: ShardHolder, label: str) -> list[Any]:
    """Return the results of ``describe_shards`` of all ranks that hold parts of the same parameters."""
    if not holder.is_sharded:
        return [own]
    found: list[bytes] = []
    for name, group in holder.sync.ranks.by_name.items():
        flat = [shard for shard in shards if not isinstance(shard, WholeShard)]
        of_group = [one for shard, one in zip(flat, own, strict=True) if shard.buffer.layout.key.group == name]
        payload = json.dumps(of_group).encode()
        found += exchange(group.communicator, payload, device=holder.buffers[0].param_data.device, label=label)
    return list(map(json.loads, found))


# Descriptions of all shards #


def describe_shards(shards: Iterable[MainShard], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Any]:
    """Return descriptions of the state of this rank's flat shards, for ``merge_descriptions``; plain data for JSON.

    Raises:
        OptimizerParametersError: an entry is neither one value per element nor one number.
    """
    return [
        (shard.segment.params, [_describe_in_shard(key, value, shard) for key, value in (state.get(shard.main) or {}).items()])
        for shard in shards
        if not isinstance(shard, WholeShard)
    ]


def merge_descriptions(answers: Iterable[Any]) -> dict[str, Description]:
    """Return the descriptions of all ranks by parameter, without parameters that are in no shard.

    Args:
        answers: the results of ``describe_shards`` on each rank.

    Raises:
        OptimizerParametersError: ranks hold different numbers for pieces of one parameter.
    """
    found: dict[str, Description] = {}
    differing: list[str] = []
    for names, entries in chain.from_iterable(answers):
        description = tuple(map(entry_from_json, entries))
        differing += [name for name in names if found.setdefault(name, description) != description]
    if differing:
        raise OptimizerParametersError(
            problem="ranks hold different numbers (step counts, say) or kinds of optimizer state for pieces of one parameter: "
            "one of them has missed an update, or its state was changed there alone",
            params=list(dict.fromkeys(differing)),
            remedy="Load the last checkpoint on every rank.",
        )
    return found


# Values per element #

ByParam = dict[torch.Tensor, torch.Tensor]
"""Values per element of whole parameters."""


def _put_together(
    buffer: ParamAndGradBuffer,
    pieces: Sequence[StatePiece],
    described: Mapping[str, Description],
    holder: ShardHolder,
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state of the parameters of one buffer."""
    device = buffer.param_data.device
    whole: dict[torch.Tensor, dict[str, Any]] = {}
    holders: dict[StateEntry, list[str]] = {}
    for name, description in ((name, described[name]) for name in described if name in buffer.params):
        if description:
            # All keys at once, to keep the optimizer's order.
            whole[buffer.params[name]] = {e.key: None if e.kind == "elements" else number_in(e, device) for e in description}
        for entry in description:
            if entry.kind == "elements":
                holders.setdefault(entry, []).append(name)
    for entry in sorted(holders):  # the same order on every rank
        dtype = dtype_named(entry.dtype)
        own = [piece for piece in pieces if piece.key == entry.key and piece.values.dtype == dtype]
        for param, values in _gather(buffer, holders[entry], own, dtype, holder).items():
            whole[param][entry.key] = values
    return whole


def _main_values(
    buffer: ParamAndGradBuffer, pieces: Sequence[StatePiece], holder: ShardHolder, uncut: Collection[str]
) -> ByParam:
    dtype = main_dtype(buffer.param_data.dtype)
    if dtype == buffer.param_data.dtype:
        # The buffer itself holds the main values, complete on every rank, for parameters that were made 16-bit since.
        narrowed = [name for name, param in buffer.params.items() if main_dtype(param.dtype) != param.dtype]
        return _cut_out(buffer, narrowed, buffer.param_data)
    names = [name for name in buffer.params if name not in uncut]
    return _gather(buffer, names, [piece for piece in pieces if piece.key is MAIN], dtype, holder)


def _gather(
    buffer: ParamAndGradBuffer,
    names: Sequence[str],
    own: Iterable[StatePiece],
    dtype: torch.dtype,
    holder: ShardHolder,
) -> ByParam:
    """Return the values of some parameters, each in its shape and memory order.

    Args:
        own: this rank's values, also of parameters that are not named.
    """
    flat = torch.zeros(buffer.layout.numel, dtype=dtype, device=buffer.param_data.device)  # 1D
    for piece in own:
        start = buffer.layout.params[piece.param].start
        flat[start + piece.in_param.start : start + piece.in_param.stop] = piece.values
    if holder.is_sharded:
        communicator = holder.communicator(buffer)
        wanted = sorted({buffer.layout.params[name].bucket for name in names})
        calls = []
        for bucket in (buffer.layout.buckets[index] for index in wanted):
            shard = buffer.layout.shard_span(bucket=bucket.index, rank=communicator.rank)
            # As bytes: not every backend can move every dtype that an optimizer may choose.
            whole, own_part = (flat[one.start : one.stop].view(torch.uint8) for one in (bucket, shard))
            calls.append(AllGather(whole, own_part))
        communicator.launch(calls, label="optimizer state values").wait()
    return _cut_out(buffer, names, flat)


def _cut_out(buffer: ParamAndGradBuffer, names: Iterable[str], flat: torch.Tensor) -> ByParam:
    # Shape and memory order are those at wrapping: the caller may have changed them since.
    views = {name: buffer.slots[name].view for name in names}
    return {
        buffer.params[name]: view_like(flat, buffer.layout.params[name].start, view.shape, view.stride()).clone()
        for name, view in views.items()
    }


# In the format of torch.optim #

OWN_KEY: Final = "megabucket"
_COMPUTED_IN: Final = "computed_in"
_SOURCE: Final = "the dict given to load_state_dict()"


def pack(optimizer: torch.optim.Optimizer, whole: WholeState) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` as if it held whole parameters."""
    groups = []
    for group in optimizer.param_groups:
        # Learning rates can be tensors, which change later.
        own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        groups.append({**own, "params": list(group["params"])})
    index_of = {param: index for index, param in enumerate(chain.from_iterable(group["params"] for group in groups))}
    held = ((key, of) for key, of in whole.values.items() if key in index_of or not isinstance(key, torch.Tensor))
    state = defaultdict(dict, {key: of for key, of in held if of or not isinstance(key, torch.Tensor)})
    for param, main in whole.main_values.items():
        # Torch takes every entry for the state of a step, before which main values are the weights.
        if param in index_of and (param in state or not main.equal(param.to(main.dtype))):
            state[param] = {**state[param], MAIN_PARAM: main}
    if any(of.keys() == {MAIN_PARAM} for key, of in state.items() if isinstance(key, torch.Tensor)):
        for param in index_of:  # the optimizer has no state of its own; torch's loading misses parameters without an entry
            state.setdefault(param, {})
    packed: dict[str, Any] = shell_of(optimizer, groups, state).state_dict()
    packed[OWN_KEY] = {
        _COMPUTED_IN: {index: dtype_name(whole.dtypes.get(param, param.dtype)) for param, index in index_of.items()}
    }
    return packed


def join(packed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dicts of several optimizers as that of one with all of their groups; of one, its own."""
    joined: dict[str, Any] = {**packed[0]}
    for one in packed[1:]:
        first = sum(len(group["params"]) for group in joined["param_groups"])
        groups = [{**group, "params": [index + first for index in group["params"]]} for group in one["param_groups"]]
        state = {index + first if isinstance(index, int) else index: of for index, of in one["state"].items()}
        computed_in = {index + first: name for index, name in one[OWN_KEY][_COMPUTED_IN].items()}
        joined["param_groups"] = [*joined["param_groups"], *groups]
        joined["state"] = {**joined["state"], **state}
        joined[OWN_KEY] = {_COMPUTED_IN: {**joined[OWN_KEY][_COMPUTED_IN], **computed_in}}
    return joined


def split(state_dict: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> list[Mapping[str, Any]]:
    """Return the parts of a state dict, of ``join`` or of one torch optimizer with all groups, for each of several optimizers.

    Raises:
        CheckpointMismatchError: it is of an optimizer over other parameters; the text names all differences.
    """
    _refuse(_group_problems([group for optimizer in optimizers for group in optimizer.param_groups], state_dict))
    if len(optimizers) == 1:
        return [state_dict]
    found: list[Mapping[str, Any]] = []
    groups, first = list(state_dict["param_groups"]), 0
    every = set(chain.from_iterable(group["params"] for group in groups))
    for optimizer in optimizers:
        own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
        keys = set(chain.from_iterable(group["params"] for group in own))  # indices, or names
        state = {key: of for key, of in state_dict["state"].items() if key in keys or key not in every}
        part = {**state_dict, "param_groups": own, "state": state}
        computed_in = (state_dict.get(OWN_KEY) or {}).get(_COMPUTED_IN, {})
        if OWN_KEY in state_dict:
            part[OWN_KEY] = {
                _COMPUTED_IN: {at - first: name for at, name in computed_in.items() if 0 <= at - first < len(keys)}
            }
        found.append(part)
        first += len(keys)
    return found


def unpack(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    names: Mapping[torch.Tensor, str],
    *,
    uncut: Collection[torch.Tensor] = (),
) -> tuple[WholeState, list[dict[str, Any]]]:
    """Return the state in a ``state_dict`` of this library or of plain torch, and the hyperparameters by group.

    Args:
        names: of the parameters, for error texts.
        uncut: parameters that are updated whole, whose state may have any shape.

    Raises:
        CheckpointMismatchError: it is of an optimizer over other parameters; the text names all differences.
    """
    _refuse(_group_problems(optimizer.param_groups, state_dict))
    # Torch converts floating state to the dtype of the parameter, which for 16-bit ones is not the dtype of computation. It
    # does not convert the state of integer "parameters"; these stand-ins have no memory.
    byte = torch.zeros(1, dtype=torch.int8, device="cpu")
    stand_ins = [[byte.to(p.device).expand(p.shape or (1,)) for p in group["params"]] for group in optimizer.param_groups]
    groups = [{**group, "params": of_group} for group, of_group in zip(optimizer.param_groups, stand_ins, strict=True)]
    shell = shell_of(optimizer, groups, defaultdict(dict))
    saved = {key: dict(of) if isinstance(of, Mapping) else of for key, of in state_dict["state"].items()}
    main_at = {key: of.pop(MAIN_PARAM) for key, of in saved.items() if isinstance(of, dict) and MAIN_PARAM in of}
    shell.load_state_dict({**state_dict, "state": {key: of for key, of in saved.items() if of != {}}})
    param_at = dict(enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)))
    param_of = dict(zip(chain.from_iterable(stand_ins), param_at.values(), strict=True))
    values = {param_of.get(key, key): value for key, value in shell.state.items()}
    own = state_dict.get(OWN_KEY) or {}
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])  # indices, or names
    mains = {param: main_at[key].to(param.device) for key, param in zip(keys, param_at.values(), strict=True) if key in main_at}
    _refuse(_shape_problems({key: of for key, of in values.items() if key not in uncut}, mains, names))
    computed_in = {param_at[index]: dtype_named(name) for index, name in own.get(_COMPUTED_IN, {}).items() if index in param_at}
    dtypes = {param: main_dtype(param.dtype) for param in param_at.values()}
    for param, dtype in dtypes.items():
        if param in computed_in and dtype != param.dtype:
            mains.setdefault(param, param.detach().to(dtype))
        if param in values:
            shape = None if param in uncut else param.shape
            follow = partial(_follow, shape=shape, computed_in=computed_in.get(param), dtype=dtype)
            values[param] = {
                key: value if key in KNOWN_NUMBERS else _map_tensors(follow, value) for key, value in values[param].items()
            }
    hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in shell.param_groups]
    return WholeState(values, mains, dtypes), hyperparameters


def set_groups(param_groups: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyperparameters of the groups in place: a scheduler may hold the groups."""
    for group, values in zip(param_groups, groups, strict=True):
        params = group["params"]
        group.clear()
        group.update(values)
        group["params"] = params


def _follow(
    value: torch.Tensor, *, shape: torch.Size | None, computed_in: torch.dtype | None, dtype: torch.dtype
) -> torch.Tensor:
    """Convert values from the dtype of their optimizer's computation to that of this one.

    A ``state_dict`` of plain torch does not have that dtype; there all floating state follows the parameter, as in torch.

    Args:
        shape: of values per element, where all other state is numbers.
    """
    if not value.is_floating_point():
        return value
    follows = value.dtype == computed_in if computed_in is not None else shape is None or value.shape == shape
    return value.to(dtype) if follows else value


def _group_problems(own_groups: Sequence[Mapping[str, Any]], state_dict: Any) -> list[str]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        return [f"it is not a state_dict of an optimizer ({type(state_dict).__name__} without 'state' and 'param_groups')"]
    groups = state_dict["param_groups"]
    if len(groups) != len(own_groups):
        return [f"it has {len(groups)} parameter groups, the optimizer has {len(own_groups)}"]
    return [
        f"group {index} has {len(saved['params'])} parameters there and {len(own['params'])} here"
        for index, (saved, own) in enumerate(zip(groups, own_groups, strict=True))
        if len(saved["params"]) != len(own["params"])
    ]


def _shape_problems(
    values: Mapping[Any, Any], mains: Mapping[torch.Tensor, torch.Tensor], names: Mapping[torch.Tensor, str]
) -> list[str]:
    held = [
        (param, key, value)
        for param, of_param in values.items()
        if isinstance(param, torch.Tensor) and isinstance(of_param, Mapping)
        for key, value in of_param.items()
        if isinstance(value, torch.Tensor) and value.numel() != 1
    ]
    held += [(param, "main parameter", value) for param, value in mains.items()]
    return [
        f"{key} of {names.get(param, '?')!r} has shape {tuple(value.shape)} there and {tuple(param.shape)} here"
        for param, key, value in held
        if value.shape != param.shape
    ]


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointMismatchError(path=_SOURCE, problems=problems)
