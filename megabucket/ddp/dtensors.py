"""DTensor parameters. A buffer holds the local piece, as a plain parameter; the module computes with the DTensor around it.

::

    module._parameters["weight"]   the piece, in the buffer: what hooks, optimizers and named_parameters() have
    module.weight                  the DTensor around it, made anew at each read
    module.state_dict()            DTensors, under the names of before

A gradient comes back to the piece without communication: along a dimension of the mesh that does not cut the parameter it is a
part, and the sum of the parts is the gradient. So a parameter that several ranks hold whole is reduced over their data-parallel
ranks and theirs, in a reduction group of its own, in the same pass as all others. What this costs and the alternatives are in
docs/decisions/dtensor.md. Imported only for a module with DTensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megabucket.comm.torch import default_group_of, flattened_group, members_of
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.groups import DENSE, ParallelGroups, ReductionGroup, as_group
from megabucket.ddp.owners import is_in_fsdp
from megabucket.ddp.wrap import PLACES
from megabucket.errors import ConfigError, UnsupportedParameterError
from megabucket.layout.identity import ParamIdentity, plain_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HAS_GRAD_PLACEMENTS: Final = "grad_placements" in inspect.signature(DTensor.from_local).parameters


@dataclass(frozen=True, slots=True)
class Place:
    """The DTensor around a local piece, without its values.

    Args:
        shape: of the whole tensor.
        stride: of the whole tensor.
        offset: start of the piece, one index per dimension.
        reduced: the dimensions of the mesh that the wrapper reduces over.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: tuple[int, ...]
    reduced: tuple[int, ...]

    def __deepcopy__(self, _: dict[int, Any]) -> Place:
        """Return the same place: a copy of the module lies on the same mesh."""
        return self

    @classmethod
    def of(cls, whole: DTensor, reduced: tuple[int, ...] = ()) -> Place:
        """Return the place of this rank's piece."""
        offset, mesh = [0] * whole.ndim, whole.device_mesh
        sizes = list(whole.shape)
        for dim, placement in enumerate(whole.placements):
            if isinstance(placement, Shard):  # in chunks of equal size but for the last ones, as torch.chunk cuts
                step = -(-sizes[placement.dim] // mesh.size(dim))
                start = min(step * mesh.get_local_rank(dim), sizes[placement.dim])
                offset[placement.dim] += start
                sizes[placement.dim] = min(step, sizes[placement.dim] - start)
        return cls(mesh, tuple(whole.placements), whole.shape, whole.stride(), tuple(offset), reduced)

    def around(self, piece: torch.Tensor) -> DTensor:
        """Return the DTensor whose local piece is ``piece``: the same memory, and this rank's part of its gradient goes there.

        Raises:
            ConfigError: a compiler traces it, and this torch cannot say in a graph where gradients are parts.
        """
        make = functools.partial(DTensor.from_local, piece, self.mesh, self.placements, shape=self.shape, stride=self.stride)
        if torch.compiler.is_compiling():  # a compiled graph takes no hooks
            if not _HAS_GRAD_PLACEMENTS:
                raise ConfigError("a module with DTensor parameters can be compiled in torch 2.13 and later only")
            return make(grad_placements=[Partial() if placement.is_replicate() else placement for placement in self.placements])
        whole: DTensor = make()
        if whole.requires_grad:
            whole.register_hook(functools.partial(_as_parts, placements=self.placements, reduced=self.reduced))
        return whole

    def state_around(self, value: Any, *, shape: Sequence[int]) -> Any:
        """Return the DTensor around ``value``, if that is state of a piece element by element; else ``value`` itself.

        Args:
            shape: of the piece.

        Raises:
            ConfigError: it is state of another shape, and the parameter is cut.
        """
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if value.shape == torch.Size(shape):
            return self.around(value)
        if torch.Size(shape) == self.shape:
            return value
        raise ConfigError(
            f"a parameter of shape {tuple(self.shape)}, of which this rank holds {tuple(shape)}, has optimizer state of shape "
            f"{tuple(value.shape)}: no DTensor describes it, and torch would save it as if all ranks had the same. Save with "
            "megabucket.save_checkpoint()."
        )

    def piece_of(self, value: Any, *, shape: Sequence[int]) -> Any:
        """Return this rank's piece of ``value``: a DTensor, or a plain tensor with all values; else ``value`` itself.

        Args:
            shape: of the piece.

        Raises:
            ConfigError: the DTensor is on another mesh, or of another shape.
        """
        if isinstance(value, DTensor):
            if value.device_mesh != self.mesh or value.shape != self.shape:
                raise ConfigError(
                    f"a DTensor of shape {tuple(value.shape)} on {value.device_mesh} cannot be loaded into a parameter of "
                    f"shape {tuple(self.shape)} on {self.mesh}. Load through torch.distributed.checkpoint, which cuts "
                    "tensors anew for another mesh, or give the whole tensor (.full_tensor())."
                )
            return value.redistribute(placements=self.placements).to_local()
        if isinstance(value, torch.Tensor) and tuple(shape) != value.shape == self.shape:
            for dim, (start, size) in enumerate(zip(self.offset, shape, strict=True)):
                value = value.narrow(dim, start, size)
        return value


class DTensorParams:
    """The DTensor parameters of one wrapped module, as long as it is wrapped.

    Args:
        given: the groups of the wrapper, as far as the caller has named them.
    """

    def __init__(self, module: torch.nn.Module, given: ParallelGroups) -> None:
        self._module, self._given = module, given
        self._place_of: dict[Any, Place] = {}  # by piece
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        dense = as_group(given.reduction[DENSE])
        self._own = [set(members_of(ranks)) for ranks in (dense.ranks, dense.replicate) if ranks is not None]
        self._dims = self._other_dims()

    def _other_dims(self) -> dict[str, ProcessGroup]:
        """Return the groups along the dimensions of meshes that the wrapper does not reduce over, by name."""
        found: dict[str, ProcessGroup] = {}
        for param in filter(is_dtensor, self._params()):
            mesh = param.device_mesh
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1 and not self._is_own(mesh, dim):
                    found.setdefault(_dim_name(mesh, dim), mesh.get_group(dim))
        return found

    def _is_own(self, mesh: DeviceMesh, dim: int) -> bool:
        ranks = set(members_of(mesh.get_group(dim)))
        return any(len(ranks & own) > 1 for own in self._own)

    def _place(self, param: Any) -> Place:
        mesh = param.device_mesh
        return Place.of(param, tuple(dim for dim in range(mesh.ndim) if self._is_own(mesh, dim)))

    def _copied_along(self, place: Place) -> tuple[str, ...]:
        """Return the dimensions of its mesh along which other ranks hold the same piece, and have parts of its gradient."""
        names = (_dim_name(place.mesh, dim) for dim, placement in enumerate(place.placements) if placement.is_replicate())
        return tuple(name for name in names if name in self._dims)

    def _outside_mesh(self, place: Place | None) -> tuple[str, ...]:
        """Return the dimensions along which all ranks hold the same values and gradients, because its mesh lacks them."""
        mesh = None if place is None else place.mesh
        inside = () if mesh is None else [_dim_name(mesh, dim) for dim in range(mesh.ndim)]
        return tuple(name for name in self._dims if name not in inside)

    # The module #

    def _parts(self) -> Iterator[torch.nn.Module]:
        """Yield the module and its submodules, without those of FSDP, which may hold frozen DTensors."""
        return (part for part in self._module.modules() if not is_in_fsdp(part))

    def _params(self) -> list[Any]:
        """Return the parameters of these modules, each once."""
        held = (param for part in self._parts() for param in part._parameters.values() if param is not None)
        return list(dict.fromkeys(held))

    def _find_obstacle(self, param: Any) -> tuple[str, str] | None:
        """Return why a DTensor cannot live in a buffer, with a remedy; ``None`` if it can."""
        for dim, placement in enumerate(param.placements):
            what = f"it is a DTensor with {placement} along {_dim_name(param.device_mesh, dim)!r} of its mesh"
            if type(placement) not in (Shard, Replicate):
                return f"{what}, which is no block of its values", "Redistribute it to Shard() or Replicate() before wrapping."
            if placement.is_shard() and self._is_own(param.device_mesh, dim):
                return f"{what}, over ranks that the wrapper reduces over", (
                    "Leave out fully_shard(): use_distributed_optimizer=True takes its place. After parallelize_module() pass "
                    'process_group=mesh["dp"], the ranks that hold the same piece.'
                )
        if param._backward_hooks or param._post_accumulate_grad_hooks or param.grad is not None:
            reason = "it is a DTensor with hooks or a gradient"
            return reason, "Wrap before the first backward, and register hooks afterwards, on ddp.module.parameters()."
        return None

    def localize(self) -> None:
        """Put the local pieces into the module, in place of DTensors.

        Raises:
            UnsupportedParameterError: a DTensor cannot live in a buffer; nothing was changed.
        """
        here: set[Any] = set(self._params())
        for name, param in self._module.named_parameters():
            if param in here and is_dtensor(param) and (obstacle := self._find_obstacle(param)) is not None:
                raise UnsupportedParameterError(param=name, reason=obstacle[0], remedy=obstacle[1])
        own = set(map(id, self._place_of.values()))
        if copied := [
            name for part in self._module.modules() for name, place in _places_of(part).items() if id(place) not in own
        ]:
            raise UnsupportedParameterError(
                param=copied[0],
                reason="it is a piece of a DTensor, in a copy of a wrapped module, which does not say where the piece belongs",
                remedy="Copy the module before wrapping it, or after ddp.detach().",
            )
        pieces: dict[Any, torch.nn.Parameter] = {}
        for part in self._parts():
            places = dict(_places_of(part))
            for name, held in part._parameters.items():
                if is_dtensor(held):
                    if held not in pieces:
                        pieces[held] = self._piece_of(held)
                    part._parameters[name] = pieces[held]
                    places[name] = self._place_of[pieces[held]]
                elif held not in self._place_of:
                    places.pop(name, None)  # replaced by a plain parameter
            if places:
                vars(part)[PLACES] = places
                base: Any = _class_without_pieces(type(part))
                part.__class__ = _class_with_pieces(base, tuple(sorted(places)))

    def _piece_of(self, param: Any) -> torch.nn.Parameter:
        piece = torch.nn.Parameter(param.detach().to_local(), requires_grad=param.requires_grad)
        vars(piece).update({name: value for name, value in vars(param).items() if not name.startswith("_")})
        self._place_of[piece] = self._place(param)
        return piece

    def restore(self) -> None:
        """Put DTensors with the values of the pieces into the module again. A second call does nothing."""
        whole: dict[Any, torch.nn.Parameter] = {}
        for part in self._module.modules():
            pieces: dict[str, Any] = {name: part._parameters.get(name) for name in _places_of(part)}
            own = {name: piece for name, piece in pieces.items() if piece in self._place_of}
            for name, piece in own.items():
                if piece not in whole:
                    around = self._place_of[piece].around(piece.detach())
                    whole[piece] = torch.nn.Parameter(around, requires_grad=piece.requires_grad)
                part._parameters[name] = whole[piece]
            if own:
                del vars(part)[PLACES]
                part.__class__ = _class_without_pieces(type(part))

    # The wrapper #

    def groups(self, config: DistributedDataParallelConfig) -> ParallelGroups:
        """Return the groups of the wrapper: the given ones, and what meshes and placements say.

        Raises:
            ConfigError: no group has the data-parallel ranks together with those of the meshes.
        """
        given = self._given
        if not self._dims:
            return replace(given, identity=self._identity)
        reduction, copies = dict(given.reduction), dict(given.copies)
        places = [self._place(param) if is_dtensor(param) else None for param in self._params()]
        # In the same order on all ranks, which make groups together.
        for along in sorted({self._copied_along(place) for place in places if place is not None} - {()}):
            ranks = ReductionGroup(self._ranks_with(along), unused_parameters=config.unused_parameters)
            reduction.setdefault(_group_name(along), ranks)
        copies |= {name: self._dims[name] for place in places for name in self._outside_mesh(place) if name not in copies}
        norm_group = self._ranks_with(tuple(self._dims)) if given.norm_group is None else given.norm_group
        return replace(given, reduction=reduction, identity=self._identity, copies=copies, norm_group=norm_group)

    def _ranks_with(self, dims: Sequence[str]) -> Any:
        """Return a group of the ranks of the wrapper and those along some dimensions of the meshes."""
        num_ranks = math.prod([*map(len, self._own), *(self._dims[name].size() for name in dims)])
        dense = self._given.reduction[DENSE]
        if (group := default_group_of(num_ranks)) is not None:
            return group
        own = dense.ranks if isinstance(dense, ReductionGroup) else dense
        if isinstance(own, DeviceMesh) and (group := flattened_group(own, dims)) is not None:
            return group
        raise ConfigError(
            f"parameters are copied or cut along {', '.join(dims)}, and no group is known of the {num_ranks} ranks that hold "
            "them. Pass process_group= as a slice of the mesh with all dimensions, such as "
            'init_device_mesh(..., mesh_dim_names=("pp", "dp", "tp"))["dp"], and norm_group= if the model has more ranks.'
        )

    def _identity(self, name: str, param: torch.Tensor) -> ParamIdentity:
        given = None if self._given.identity is None else self._given.identity(name, param)
        place = self._place_of.get(param)
        base = given or plain_identity(name, tuple(param.shape))
        if given is None:
            base = replace(base, copies=self._outside_mesh(place))
        if place is None:
            return base
        along = self._copied_along(place)
        group = _group_name(along) if along else base.group
        return replace(base, global_shape=tuple(place.shape), offset=place.offset, group=group)

    # Optimizers #

    def watch_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a torch optimizer over pieces save its state as DTensors, and load them."""
        if optimizer not in self._watched:
            self._watched.add(optimizer)
            optimizer.register_state_dict_post_hook(self.show_state)
            optimizer.register_load_state_dict_pre_hook(self.hide_state)
            for piece, values in optimizer.state.items():  # that was loaded before
                if (place := self._place_of.get(piece)) is not None:
                    values.update({name: place.piece_of(value, shape=piece.shape) for name, value in values.items()})

    def show_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` with DTensors in place of the state of pieces.

        Raises:
            ConfigError: there is state of a piece that is not one value per element.
        """
        return self._convert(optimizer, state_dict, Place.state_around)

    def hide_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` with the state of pieces in place of DTensors and of whole tensors.

        Raises:
            ConfigError: a DTensor does not fit the parameter.
        """
        return self._convert(optimizer, state_dict, Place.piece_of)

    def _convert(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], convert: Callable[..., Any]
    ) -> dict[str, Any]:
        pieces = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        piece_of = {key: piece for key, piece in zip(keys, pieces, strict=False) if piece in self._place_of}
        state = dict(state_dict["state"])  # the values are the optimizer's own
        for key in state.keys() & piece_of.keys():
            piece = piece_of[key]
            place = self._place_of[piece]
            state[key] = {name: convert(place, value, shape=piece.shape) for name, value in state[key].items()}
        return {**state_dict, "state": state}


def _as_parts(grad: DTensor, *, placements: tuple[Placement, ...], reduced: tuple[int, ...]) -> DTensor:
    """Return a gradient of which each rank has a part where the parameter is not cut, as if it were placed as the parameter.

    Torch would sum the parts in each backward, one parameter at a time. Along the dimensions that the wrapper reduces over the
    local values are this rank's part, even if ``to_local()`` has called them whole: so does ``fully_shard``.
    """
    mesh, wanted, num_equal = grad.device_mesh, [], 1
    for dim, (placement, own) in enumerate(zip(placements, grad.placements, strict=True)):
        is_part = placement.is_replicate() and (own.is_partial("sum") or (dim in reduced and own.is_replicate()))
        wanted.append(own if is_part else placement)
        if placement.is_replicate() and not is_part:
            num_equal *= mesh.size(dim)  # each rank has, or gets, the whole
    if tuple(wanted) != grad.placements:
        grad = grad.redistribute(placements=wanted)
    part = grad.to_local() if num_equal == 1 else grad.to_local() / num_equal
    return DTensor.from_local(part, mesh, placements, shape=grad.shape, stride=grad.stride())


def is_dtensor(param: torch.Tensor | None) -> bool:
    """Return whether a parameter is a DTensor."""
    return isinstance(param, DTensor)


def _places_of(part: torch.nn.Module) -> dict[str, Place]:
    """Return the places of the pieces in a module, without its submodules, by name."""
    places: dict[str, Place] = vars(part).get(PLACES, {})
    return places


def _dim_name(mesh: DeviceMesh, dim: int) -> str:
    return f"dimension {dim}" if mesh.mesh_dim_names is None else mesh.mesh_dim_names[dim]


def _group_name(along: Iterable[str]) -> str:
    return f"copied along {', '.join(along)}"


@functools.cache
def _class_with_pieces(base: Any, names: tuple[str, ...]) -> type[torch.nn.Module]:
    """Return a class of modules whose parameters of these names are pieces. One for all modules alike, for the compiler."""
    own = {name: _property(name) for name in names}
    return type(base.__name__, (_WithPieces, base), {"__module__": base.__module__, "__qualname__": base.__qualname__, **own})


def _class_without_pieces(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return kind.__bases__[1] if kind.__bases__[0] is _WithPieces else kind


def _property(name: str) -> property:
    def get(self: torch.nn.Module) -> Any:
        if name not in self._parameters:
            raise AttributeError(name)  # Python asks the module's __getattr__ then
        piece, place = self._parameters[name], _places_of(self).get(name)
        return piece if piece is None or place is None else place.around(piece)

    return property(get)


class _WithPieces(torch.nn.Module):
    """A module whose DTensor parameters lie in buffers. It saves and loads DTensors."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, place in _places_of(self).items():
            if (piece := destination.get(prefix + name)) is not None:
                destination[prefix + name] = place.around(piece)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, place in _places_of(self).items():
            if prefix + name in state_dict and (piece := self._parameters.get(name)) is not None:
                state_dict[prefix + name] = place.piece_of(state_dict[prefix + name], shape=piece.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
