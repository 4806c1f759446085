"""The place of a local parameter in the whole model. No torch, no communication.

Local names repeat across pipeline stages and expert ranks, and a local tensor may be a piece of a larger one. The norm, zeros,
replica checks, tied weights and checkpoints know about parallelism only from the identity of a parameter.

::

    global "head.weight"  (4, 6)      offset (0, 3), local shape (4, 3): tensor-parallel rank 1 of 2
    +---------+---------+
    | rank 0  | rank 1  |
    +---------+---------+
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megabucket.errors import LayoutError, name_list

_WRAPPED_IN: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, activation checkpointing


@dataclass(frozen=True, slots=True)
class ParamIdentity:
    """Name, place and copies of a local parameter in the whole model.

    Args:
        global_name: unique over all ranks; equal for all pieces of one tensor.
        global_shape: sizes of the whole tensor.
        offset: start of the local piece in the whole tensor, one index per dimension.
        group: name of the reduction group.
        copies: names of the rank dimensions along which other ranks hold the same values, for example ``("tp",)``.
        partial: the ``copies`` along which backward gives each rank only a part of the gradient, which ``finalize_grads``
            sums: tied embeddings, and norms under sequence parallelism.

    Raises:
        LayoutError: a field is of the wrong type, shape and offset have different lengths, or ``partial`` names no copies.
    """

    global_name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    group: str = "dense"
    copies: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (
            not all(isinstance(part, tuple) for part in (self.global_shape, self.offset, self.copies, self.partial))
            or len(self.global_shape) != len(self.offset)
            or any(type(value) is not int or value < 0 for value in (*self.global_shape, *self.offset))
            or not all(isinstance(name, str) and name for name in (self.global_name, self.group, *self.copies))
            or not set(self.partial) <= set(self.copies)
        ):
            raise LayoutError(
                f"identity of {self.global_name!r}: names must be non-empty strings, global_shape and offset tuples of one "
                f"integer >= 0 per dimension, copies a tuple of names, and partial some of them, got {self!r}"
            )


IdentityOf = Callable[[str, Any], ParamIdentity | None]
"""Returns the identity for a local name and a parameter; ``None`` for the plain one."""


def by_place(names: Iterable[str], identities: Mapping[str, ParamIdentity]) -> list[str]:
    """Return local names in the order of their places in the whole model, which is the same on all ranks with copies."""
    return sorted(names, key=lambda name: (identities[name].global_name, identities[name].offset))


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers of single modules add.

    >>> canonical_name("_orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    for part in _WRAPPED_IN:
        name = name.replace(part, "")
    return name


def global_names(identities: Mapping[str, ParamIdentity]) -> Callable[[str], str]:
    """Return a function that gives the global name of a module buffer, or of a module with its dot, by the local one.

    It lies where the parameters beside or around it lie. A module keeps its local name where that is ambiguous.

    Args:
        identities: of the parameters, by local name.
    """
    found: dict[str, str] = {}
    for name, identity in identities.items():
        for local, rest in ((name[:end], name[end:]) for end in _module_ends(name)):
            there = identity.global_name.removesuffix(rest) if identity.global_name.endswith(rest) else local
            found[local] = there if found.get(local, there) == there else local
    num_with = Counter(found.values())
    prefixes = {local: there if num_with[there] == 1 else local for local, there in found.items()}

    def global_name(name: str) -> str:
        end = max(end for end in _module_ends(name) if name[:end] in prefixes or not end)
        return prefixes.get(name[:end], "") + name[end:]

    return global_name


def _module_ends(name: str) -> list[int]:
    """Return where the names of the modules in a name end, each with its dot."""
    return [0, *(index + 1 for index, letter in enumerate(name) if letter == ".")]


def plain_identity(name: str, shape: tuple[int, ...]) -> ParamIdentity:
    """Return the identity of a parameter that this rank holds whole, under its local name."""
    return ParamIdentity(name, tuple(shape), (0,) * len(shape))


def megatron_identity(
    *,
    tp_rank: int,
    tp_size: int,
    expert_tp: tuple[int, int] | None = None,
    name_of: Callable[[str], str] = str,
) -> IdentityOf:
    """Return a function that reads Megatron's attributes of a parameter.

    ``allreduce=False`` puts it into the group ``expert``. With ``tensor_model_parallel=True`` it is one of ``tp_size`` equal
    blocks along ``partition_dim``; otherwise all ranks of ``tp`` hold copies, with partial gradients if
    ``sequence_parallel=True``. ``shared=True`` makes it a copy along ``embd`` with partial gradients.

    Args:
        tp_rank: position in the tensor-parallel group.
        tp_size: ranks of the tensor-parallel group; with one rank there are no copies.
        expert_tp: position in and size of the tensor-parallel group of experts, whose copies lie along ``expert_tp``. By
            default experts are cut over the same ranks as all others.
        name_of: converts a local name to the global one, with the number of the layer or expert in the whole model.

    Raises (the returned function):
        LayoutError: the local values are not a contiguous block of the whole tensor.
    """

    def identity(name: str, param: Any) -> ParamIdentity:
        group = "dense" if getattr(param, "allreduce", True) else "expert"
        dimension, (rank, size) = "tp", (tp_rank, tp_size)
        if group == "expert" and expert_tp is not None:
            dimension, (rank, size) = "expert_tp", expert_tp
        shape = list(map(int, param.shape))
        offset = [0] * len(shape)
        is_cut = getattr(param, "tensor_model_parallel", False)
        if is_cut:
            dim, stride = getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1)
            if (stride != 1 and size > 1) or not 0 <= dim < len(shape):
                raise LayoutError(
                    f"parameter {name!r} of shape {tuple(shape)} is no contiguous block of a larger one: partition_dim={dim}, "
                    f"partition_stride={stride}. Give identity= a function that knows where its parts belong"
                )
            offset[dim], shape[dim] = shape[dim] * rank, shape[dim] * size
        copies = () if is_cut or size == 1 else (dimension,)
        partial = copies if getattr(param, "sequence_parallel", False) else ()
        if getattr(param, "shared", False):
            copies, partial = (*copies, "embd"), (*partial, "embd")
        return ParamIdentity(name_of(name), tuple(shape), tuple(offset), group, copies, partial)

    return identity


def check_identities(identities: Mapping[str, ParamIdentity], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse pieces that lie outside their tensor, and elements of the whole model that two local parameters claim.

    Args:
        identities: by local name.
        shapes: shapes of the local parameters, by local name.

    Raises:
        LayoutError: a parameter without identity or the other way round, a piece out of bounds, two shapes of one tensor, or
            a double claim.
    """
    if identities.keys() != shapes.keys():
        raise LayoutError(f"parameters and identities do not match: {name_list(sorted(identities.keys() ^ shapes.keys()))}")
    claims: dict[str, list[str]] = {}
    for name, own in identities.items():
        shape, whole = shapes[name], own.global_shape
        stops = [start + size for start, size in zip(own.offset, shape, strict=False)]
        if len(shape) != len(whole) or any(stop > size for stop, size in zip(stops, whole, strict=True)):
            raise LayoutError(
                f"parameter {name!r} of shape {tuple(shape)} at offset {own.offset} lies outside {own.global_name!r} of shape "
                f"{whole}. Checkpoints would store it at a wrong place; correct what identity= gives for it"
            )
        for other in claims.setdefault(own.global_name, []):
            first = identities[other]
            places = zip(own.offset, shape, first.offset, shapes[other], strict=False)
            if first.global_shape != whole or all(max(a, b) < min(a + m, b + n) for a, m, b, n in places):
                raise LayoutError(
                    f"parameters {other!r} and {name!r} claim the same part of {own.global_name!r}: shape "
                    f"{tuple(shapes[other])} at {first.offset} of {first.global_shape}, and {tuple(shape)} at {own.offset} of "
                    f"{whole}. Norms would count it twice and checkpoints keep one of them. Give each its own global_name or "
                    "place; or, if they are copies on two ranks, pass a group (in groups=, or copies=) that joins these ranks"
                )
        claims[own.global_name].append(name)
