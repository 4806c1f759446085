"""Makes replicas equal by broadcasts, and compares checksums of their bits on demand."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, cast

import torch

from megabucket.buffer import dtype_name
from megabucket.comm import AllReduce, Broadcast, Communicator, Exchange, ReduceOp
from megabucket.ddp.groups import DENSE, RankGroups, buffer_groups
from megabucket.ddp.report import Entry
from megabucket.errors import ConfigError, PhaseError, ReplicasDivergedError, log_once, name_list
from megabucket.layout.identity import ParamIdentity, by_place, canonical_name


def broadcast_replica(tensor: torch.Tensor, communicator: Communicator) -> None:
    """Copy a tensor of the group's first rank to all ranks."""
    if communicator.size > 1:
        # An expanded dimension has one element in memory; torch refuses to write through the expanded view.
        single = tensor.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        dense = single.contiguous()
        communicator.launch([Broadcast(dense)], label="initial broadcast").wait()
        if dense is not single:
            single.copy_(dense)
        torch.autograd.graph.increment_version(tensor)  # a collective does not


def params_of(module: torch.nn.Module, identities: Mapping[str, ParamIdentity]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a wrapped module by name, frozen ones included.

    Raises:
        PhaseError: some were added after wrapping.
    """
    params = dict(module.named_parameters())
    if added := [name for name in params if name not in identities]:
        raise PhaseError(
            f"{name_list(added)} came into the module after wrapping, so the wrapper does not know which ranks hold the same "
            "parameter. Call ddp.rebuild() on every rank after changing the module."
        )
    return params


def entries_by_group(tensors: Iterable[tuple[str, str, torch.Tensor]]) -> dict[str, Sequence[Entry]]:
    """Return, by reduction group, the entries that must be equal on its ranks before the tensors are exchanged.

    Args:
        tensors: each with its name and group.
    """
    entries: dict[str, list[Entry]] = {}
    for name, group, tensor in tensors:
        facts = ("meta",) * tensor.is_meta
        entries.setdefault(group, []).append((name, tuple(tensor.shape), dtype_name(tensor.dtype), *facts))
    return dict(entries)


def unbuffered_state(
    module: torch.nn.Module, buffered: Container[torch.nn.Parameter], identities: Mapping[str, ParamIdentity]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Return frozen parameters and module buffers that have values, each with its name and reduction group.

    Args:
        buffered: the parameters in buffers, which are sent as a whole.

    Raises:
        ConfigError: one of them is sparse.
        PhaseError: as ``params_of``.
    """
    params = params_of(module, identities)
    group_of = {**buffer_groups(module, identities), **{name: identity.group for name, identity in identities.items()}}
    frozen = [(name, param) for name, param in params.items() if param not in buffered]
    for name, tensor in [*frozen, *module.named_buffers()]:
        piece, group = _own_piece(tensor, group_of[name])
        if piece.layout is not torch.strided:
            raise ConfigError(
                f"init_sync=True cannot make {name!r} equal on all ranks, because it is sparse ({piece.layout}). Make it "
                "equal yourself and pass init_sync=False, or use a dense tensor."
            )
        if not piece.is_meta:
            yield name, group, piece


def _own_piece(tensor: Any, group: str) -> tuple[torch.Tensor, str]:
    """Return what this rank holds of a DTensor, which has equals in the dense group alone; else the tensor and its group."""
    return (tensor.to_local(), DENSE) if type(tensor).__name__ == "DTensor" else (tensor, group)


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that have values, by canonical name; one that is registered twice once.

    Raises:
        ConfigError: a buffer is a DTensor that is cut over ranks: it has no identity that says where its piece belongs.
    """
    found = {}
    for name, buffer in module.named_buffers():
        owner, _, key = name.rpartition(".")
        if not buffer.is_meta and key not in module.get_submodule(owner)._non_persistent_buffers_set:
            found[canonical_name(name)] = whole_values(f"the module buffer {name!r}", buffer)
    return found


def whole_values(what: str, tensor: Any) -> torch.Tensor:
    """Return the values on this rank of a tensor without identity, which are whole.

    Args:
        what: names it in the error.

    Raises:
        ConfigError: it is a DTensor that is cut over ranks.
    """
    if type(tensor).__name__ != "DTensor":
        return cast("torch.Tensor", tensor)
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise ConfigError(
            f"{what} is a DTensor with the placements {tensor.placements}, and no identity says where this rank's piece "
            "belongs. Replicate it; a module buffer may be registered with persistent=False instead."
        )
    return cast("torch.Tensor", tensor.to_local())


@contextmanager
def naming_replaced(params: Mapping[torch.nn.Parameter, str], communicator: Communicator) -> Iterator[None]:
    """Log which parameters a broadcast inside has replaced by other values, if it has left others as they were.

    If all parameters are replaced, the ranks had different seeds, and the broadcast is intended. If only some are, these may be
    parts that each rank has of its own, such as experts.
    """
    if communicator.size == 1:
        yield
        return
    before = _norms_of(params)
    yield
    is_close = torch.isclose(before, _norms_of(params), rtol=0.0, atol=0.0, equal_nan=True)
    was_equal = communicator.read(is_close, label="initial broadcast").tolist()
    replaced = [name for name, is_equal in zip(params.values(), was_equal, strict=True) if not is_equal]
    if len(replaced) < len(was_equal) and replaced:
        log_once(
            f"[rank {communicator.rank}] {name_list(replaced)} differed from those of the first rank and were replaced by "
            "them, while all others were equal. If each rank is to have its own (experts), pass groups=, each with the ranks "
            "that hold the same ones; otherwise give all ranks the same seed."
        )


@torch.no_grad()
def _norms_of(params: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    dtypes = [torch.promote_types(param.dtype, torch.float32) for param in params]
    norms = [torch.linalg.vector_norm(param, dtype=dtype) for param, dtype in zip(params, dtypes, strict=True)]
    return torch.stack([norm.double() for norm in norms])  # 1D


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's values in index order: equal bits, equal number."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(values.data)


def find_divergence(
    params: Mapping[str, torch.Tensor], identities: Mapping[str, ParamIdentity], ranks: RankGroups, *, step: int
) -> ReplicasDivergedError | None:
    """Compare parameters over all ranks that hold the same ones, and return the first difference on this rank.

    Args:
        params: of the module, by name, frozen ones included.
    """
    device = next((param.device for param in params.values() if not param.is_meta), torch.device("cpu"))
    ranks.step.wait_for(device, label="replica checksums")  # checksums are then read without watching other ranks
    sums = {name: 0 if param.is_meta or not param.numel() else checksum(param) for name, param in params.items()}
    compare = partial(_compare, step=step, device=device)
    found = []
    for group, reduction in ranks.by_name.items():
        of_group = {f"{name!r}": number for name, number in sums.items() if identities[name].group == group}
        found += [compare(of_group, communicator) for communicator in reduction.communicators]
    names = by_place(params, identities)
    for along, communicator in ranks.copies.items():
        copies = [name for name in names if along in identities[name].copies]
        where = f"copies along {along!r}"
        # Ranks of other pipeline stages have other parameters, so the lists are compared before the values.
        listed = compare({f"the list of {where},": _crc(identities[name].global_name for name in copies)}, communicator)
        found.append(listed or compare({f"{name!r}, {where},": sums[name] for name in copies}, communicator))
        cut = [name for name in names if identities[name].global_shape != tuple(params[name].shape) and name not in copies]
        offsets = [_crc(identities[name].offset) for name in cut]
        if not _differing([_crc(identities[name].global_name for name in cut)], communicator, device=device):
            equal = set(range(len(cut))) - set(_differing([sums[name] for name in cut], communicator, device=device))
            equal &= set(_differing(offsets, communicator, device=device))
            _warn_of_equal_parts([cut[index] for index in sorted(equal) if _varies(params[cut[index]])], along, ranks)
    return next(filter(None, found), None)


def _crc(values: Iterable[object]) -> int:
    return zlib.crc32(repr(tuple(values)).encode())


def _varies(param: torch.Tensor) -> bool:
    """Whether values differ: biases and norms begin as zeros or ones everywhere."""
    return not param.is_meta and bool((param != param.flatten()[:1]).any())


def _warn_of_equal_parts(names: Sequence[str], along: str, ranks: RankGroups) -> None:
    holders = [ranks.copies[along], *chain.from_iterable(reduction.communicators for reduction in ranks.by_name.values())]
    if names and not any(communicator.rank for communicator in holders):
        numbers = [ranks.copies[along].number_of(rank) for rank in range(ranks.copies[along].size)]
        log_once(
            f"{name_list(names)} should be cut over the ranks {numbers} ({along}), and all of them hold the same values. Parts "
            "of one parameter need different seeds; copies must not be marked as cut, or the norm counts each of them."
        )


def _differing(numbers: Sequence[int], communicator: Communicator, *, device: torch.device) -> list[int]:
    """Return the indices of numbers that differ between ranks: one all-reduce of 16 bytes per number."""
    extremes = torch.tensor([numbers, [-number for number in numbers]], dtype=torch.int64, device=device).flatten()  # 1D
    handle = communicator.control.launch([AllReduce(extremes, ReduceOp.MAX)], label="replica checksums")
    largest, negated = handle.read(extremes).view(2, -1).tolist()
    return [index for index, (high, low) in enumerate(zip(largest, negated, strict=True)) if high != -low]


def _compare(
    sums: Mapping[str, int], communicator: Communicator, *, step: int, device: torch.device
) -> ReplicasDivergedError | None:
    """Return an error if ranks have different checksums.

    Args:
        sums: by name of the parameter or list.
    """
    differing = _differing(list(sums.values()), communicator, device=device)
    if not differing:
        return None
    name = list(sums)[differing[0]]
    own = sums[name].to_bytes(4, "little")
    answers = Exchange(communicator, own, capacity_bytes=4, device=device, label="checksums that differ").wait()
    others = f" and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
    by_rank = [int.from_bytes(answer, "little") for answer in answers]
    ranks = [communicator.number_of(rank) for rank in range(communicator.size)]
    what = f"the bits of {name}{others} (CRC-32)"
    return ReplicasDivergedError(step=step, what=what, by_rank=by_rank, usual_cause="values", ranks=ranks)
