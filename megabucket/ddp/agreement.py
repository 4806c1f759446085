"""Do all ranks wrap the same model with the same config? Asked before anything is moved, and once more before values are sent.

Each rank hashes what must be equal; one exchange of 32 bytes compares the hashes. Only when they differ are texts exchanged,
those of one rank for each hash, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import torch

import megabucket
from megabucket.buffer.views import dtype_name
from megabucket.comm import Communicator, Exchange, exchange_some
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.discovery import DiscoveredParams, discover_params
from megabucket.errors import InvariantError, LayoutMismatchError, MegabucketError, PeerFailedError
from megabucket.layout import ModelLayout, build_layout

_DIGEST_BYTES: Final = 32
_DIFFERENCES_SHOWN: Final = 5
_MOST_SPEAKERS: Final = 8  # a text may be megabytes long, and every rank receives those of all speakers

Entry = tuple[object, ...]
"""One thing that must be equal: a name and values, which are plain (text, numbers, tuples of them)."""


def model_entries(module: torch.nn.Module, config: DistributedDataParallelConfig) -> list[Entry]:
    """Return what must be equal on all ranks: versions, every config field, parameters with aliases, and module buffers.

    Of parameters also what decides how they are laid out, and whether they have a gradient, which counts in the first step.
    """
    entries: list[Entry] = [
        ("megabucket", megabucket.__version__),
        ("torch", str(torch.__version__)),
        # A patch of Python changes nothing here; nodes of one cluster may well differ in it.
        ("python", ".".join(platform.python_version_tuple()[:2])),
    ]
    fields = config.model_dump()
    lists = {name: fields.pop(name) for name in ("bucket_cuts", "bucket_order")}
    entries += [("config", name, value) for name, value in fields.items()]
    entries += [("config", name, None if names is None else f"{len(names)} names") for name, names in lists.items()]
    params: list[torch.nn.Parameter] = []
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for key, param in submodule._parameters.items():
            if param is None:
                continue
            params.append(param)
            if param.requires_grad and param.is_contiguous():  # the usual one: no calls, wrapping should not take long
                entries.append((start + key, tuple(param.shape), dtype_name(param.dtype)))
            else:
                entries.append(_entry_of(start + key, param, "trained" if param.requires_grad else "frozen"))
        for key, buffer in submodule._buffers.items():
            if buffer is not None:
                entries.append(_entry_of(start + key, buffer, "buffer"))
    if len(set(map(id, params))) < len(params):
        entries += _alias_entries(module)
    # Name by name, so that an error shows the ones that differ; last, because lists of two lengths shift what follows.
    entries += [("config", f"{field}[{i}]", name) for field, names in lists.items() for i, name in enumerate(names or ())]
    if [param for param in params if param.grad is not None or getattr(param, "shared_embedding", False)]:
        entries += _mark_entries(module)  # last, so that a mark on one rank does not shift the others
    return entries


def agree_on_model(
    module: torch.nn.Module, config: DistributedDataParallelConfig, communicator: Communicator
) -> tuple[DiscoveredParams, ModelLayout]:
    """Return the parameters and the layout of a module that is the same on all ranks.

    Raises:
        LayoutMismatchError: it is not, or configs or versions differ.
        PeerFailedError: some rank cannot wrap its module.
        MegabucketError: what ``discover_params`` and ``build_layout`` raise, where all ranks raise it alike.
    """
    entries: list[Entry] = []
    found, layout, failure = None, None, None
    try:
        found = discover_params(module)
        layout = build_layout(found.specs, config, dp_size=communicator.size)
        entries = model_entries(module, config)
    except Exception as error:
        failure = error
    agree(communicator, entries, failure=failure, device=exchange_device(module), label="wrap")
    if found is None or layout is None:
        raise InvariantError("agree() has not raised the failure")
    return found, layout


def _mark_entries(module: torch.nn.Module) -> Iterator[Entry]:
    for name, param in module.named_parameters():
        if getattr(param, "shared_embedding", False):
            yield (name, "with shared_embedding")
        if param.grad is not None and param.requires_grad:
            yield (name, "with a gradient from before wrapping")


def _entry_of(name: str, tensor: torch.Tensor, role: str) -> Entry:
    """Return name, shape, dtype, and what else decides how a tensor is laid out in a buffer and sent."""
    place: tuple[object, ...] = ()
    if tensor.is_meta:
        place = ("meta",)
    elif tensor.layout is not torch.strided:
        place = (str(tensor.layout),)
    elif not tensor.is_contiguous():
        place = ("strides", *tensor.stride())
    return (name, tuple(tensor.shape), dtype_name(tensor.dtype), *place, role)


def _alias_entries(module: torch.nn.Module) -> Iterator[Entry]:
    first_name_of: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        first_name = first_name_of.setdefault(id(param), name)
        if first_name is not name:
            yield ("alias", name, "of", first_name)


def agree(
    communicator: Communicator, entries: Sequence[Entry], *, failure: Exception | None, device: torch.device, label: str
) -> None:
    """Return when all ranks hold the same entries and none has failed.

    Args:
        label: of the collectives; its part before a colon is what ranks fail in.
        failure: why this rank cannot go on; the others must not wait for it.

    Raises:
        LayoutMismatchError: entries differ.
        PeerFailedError: some ranks failed, or all but with different errors.
        Exception: ``failure`` itself, where all ranks failed alike.
    """
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    digest = _marked(digest_of(text, entries), has_failed=failure is not None)
    digests = Exchange(communicator, digest, capacity_bytes=_DIGEST_BYTES, device=device, label=label).wait()
    if all(other == digest for other in digests):
        if failure is not None:
            raise failure
        return
    payload = json.dumps([text, [describe_entry(entry) for entry in entries]]).encode()
    speakers = _speakers(digests)
    answers = exchange_some(communicator, payload, speakers=speakers, device=device, label=f"{label} texts")
    raise _difference(dict(zip(speakers, map(json.loads, answers), strict=True)), phase=_phase_of(label)) from failure


def digest_of(failure: str, entries: Sequence[Entry]) -> bytes:
    """Return 32 bytes that are equal where failure and entries are."""
    values: Any = (failure, list(entries))
    # Version 0 of the format writes values only, not whether two of them are the same object.
    return hashlib.sha256(marshal.dumps(values, 0)).digest()


def _marked(digest: bytes, *, has_failed: bool) -> bytes:
    """Return the digest with one bit that says whether its rank has failed; 255 are left to tell contents apart."""
    return digest[:-1] + bytes([digest[-1] & ~1 | has_failed])


def _speakers(digests: Sequence[bytes]) -> list[int]:
    """Return the ranks whose texts are needed: the first that has failed, else the first with each digest."""
    failed = [rank for rank, digest in enumerate(digests) if digest[-1] & 1]
    if failed:
        return failed[:1]
    first_ranks: dict[bytes, int] = {}
    for rank, digest in enumerate(digests):
        first_ranks.setdefault(digest, rank)
    return list(first_ranks.values())[:_MOST_SPEAKERS]


def _difference(answers: Mapping[int, tuple[str, Sequence[str]]], *, phase: str) -> MegabucketError:
    for rank, (failure_text, _) in answers.items():
        if failure_text:
            return PeerFailedError(step=0, rank=rank, phase=phase, cause=failure_text)
    return mismatch({rank: lines for rank, (_, lines) in answers.items()}, phase=phase)


def _phase_of(label: str) -> str:
    return label.partition(":")[0]


def mismatch(lines_of: Mapping[int, Sequence[str]], *, phase: str = "wrap") -> LayoutMismatchError:
    """Return the error about entries that differ, the first ones in full.

    Args:
        lines_of: what ranks have, by rank; the first one is rank 0.
    """
    differences, num_entries = [], 0
    for index, lines in enumerate(zip_longest(*lines_of.values(), fillvalue="nothing")):
        num_entries += 1
        other = next(((rank, line) for rank, line in zip(lines_of, lines, strict=True) if line != lines[0]), None)
        if other is not None:
            differences.append(f"entry {index}: rank 0 has {lines[0]}, rank {other[0]} has {other[1]}")
    return LayoutMismatchError(
        differences=differences[:_DIFFERENCES_SHOWN], num_different=len(differences), num_entries=num_entries, phase=phase
    )


def describe_entry(entry: Entry) -> str:
    """Return an entry as a reader wants it.

    >>> describe_entry(("config", "bucket_size", 40))
    'config bucket_size=40'
    >>> describe_entry(("l2.weight", (4, 4), "float32"))
    'l2.weight (4, 4) float32'
    """
    if entry[0] == "config":
        return f"config {entry[1]}={entry[2]}"
    return " ".join(map(str, entry))


def exchange_device(module: torch.nn.Module) -> torch.device:
    """Return where ranks can talk about a module: the device of its first parameter, if that has memory."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device
