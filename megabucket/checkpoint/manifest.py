"""The manifest: what a checkpoint consists of, sealed. Written, and read as if an enemy had written it. Pure, no torch.

::

    {"format":"megabucket-checkpoint","version":1,"step":..,"world_size":..,"files":[..],"tensors":{..},"values":{..},"seal":"<hex>"[,"hmac":"<hex>"]}

The seal is the SHA-256 of every byte before ``,"seal":``. It is checked on the raw bytes, before they are parsed: a
flipped bit anywhere is found, also one that JSON would not notice. A seal proves that nothing was damaged; who wrote it
is proved by the HMAC only, with a key that both sides have.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megabucket.checkpoint.dtypes import ITEM_BYTES
from megabucket.checkpoint.header import MAX_DIM, MAX_DIMS, METADATA_KEY
from megabucket.checkpoint.pieces import Json, TensorInfo
from megabucket.checkpoint.plan import StoredRange, coverage_problem
from megabucket.checkpoint.strict_json import check_json, parse_strict

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_ENTRIES = 1_000_000
MAX_NAME_CHARS = 4096
MIN_KEY_BYTES = 16
FORMAT = "megabucket-checkpoint"
VERSION = 1

_MAX_BYTES = 2**62
_DIGEST = re.compile("[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TAIL = re.compile(rb',"seal":"(?P<seal>[0-9a-f]{64})"(?:,"hmac":"(?P<hmac>[0-9a-f]{64})")?}\n')
_TAIL_MAX_BYTES = 200
_FIELDS = {"format", "version", "step", "world_size", "files", "tensors", "values"}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One data file, as it must be."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor and where it lies: ranges in order that cover it exactly once."""

    info: TensorInfo
    ranges: tuple[StoredRange, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a checkpoint holds; ``world_size`` is the number of ranks that wrote it."""

    step: int
    world_size: int
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class SealedManifest:
    """A manifest and what proves it.

    Args:
        signed: an HMAC is there; it was checked if a key was given.
    """

    manifest: Manifest
    seal: str
    signed: bool


def encode_manifest(manifest: Manifest, *, key: bytes | None = None) -> bytes:
    """Return the bytes of ``manifest.json``, sealed, and signed if there is a key.

    Raises:
        ValueError: what the reader would refuse: tensors not covered once, values that JSON cannot hold, too much of it.
    """
    check_json(manifest.values, what="values")
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in manifest.files],
        "tensors": {name: _tensor_fields(tensor) for name, tensor in manifest.tensors.items()},
        "values": manifest.values,
    }
    body = json.dumps(fields, separators=(",", ":"), allow_nan=False, default=_plain)[:-1].encode("ascii")
    raw = seal_body(body, key=key)
    decode_manifest(raw, key=key)
    return raw


def seal_body(body: bytes, *, key: bytes | None = None) -> bytes:
    """Return a manifest from its text without the closing brace."""
    tail = f',"seal":"{hashlib.sha256(body).hexdigest()}"'
    if key is not None:
        tail += f',"hmac":"{_signature(body, key)}"'
    return body + tail.encode("ascii") + b"}\n"


def seal_of(raw: bytes) -> str:
    """Return the seal at the end of a manifest, unchecked.

    Raises:
        ValueError: there is none.
    """
    return _tail(raw)["seal"].decode()


def _tail(raw: bytes) -> re.Match[bytes]:
    cut = raw.rfind(b',"seal":', max(0, len(raw) - _TAIL_MAX_BYTES))
    tail = _TAIL.fullmatch(raw, cut) if cut >= 0 else None
    if tail is None:
        raise ValueError("it does not end with a seal: it was cut off or changed")
    return tail


def decode_manifest(raw: bytes, *, key: bytes | None = None) -> SealedManifest:
    """Return the manifest, when all of it is as it must be.

    Args:
        key: demand an HMAC made with it.

    Raises:
        ValueError: a broken seal, a missing or wrong signature, or contents that contradict each other.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ValueError(f"more than {MAX_MANIFEST_BYTES} bytes")
    tail = _tail(raw)
    body = raw[: tail.start()]
    if hashlib.sha256(body).hexdigest() != tail["seal"].decode():
        raise ValueError("its seal is not the SHA-256 of its text")
    _check_signature(body, tail["hmac"], key)
    return SealedManifest(_parse(body), tail["seal"].decode(), tail["hmac"] is not None)


def _check_signature(body: bytes, found: bytes | None, key: bytes | None) -> None:
    if key is None:
        return
    if found is None:
        raise ValueError("it is not signed, and a key was given to check its signature")
    if not hmac.compare_digest(found.decode(), _signature(body, key)):
        raise ValueError("its signature was not made with the key that was given")


def _signature(body: bytes, key: bytes) -> str:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; it takes {MIN_KEY_BYTES} or more")
    return hmac.new(key, body, "sha256").hexdigest()


def _plain(value: object) -> Any:
    """Give ``json`` the mappings and sequences that are not dict and list."""
    return dict(value) if isinstance(value, Mapping) else list(value)  # type: ignore[call-overload]


def _tensor_fields(tensor: StoredTensor) -> dict[str, object]:
    info = tensor.info
    pieces = [[part.file, part.start, part.stop] for part in tensor.ranges]
    return {"dtype": info.dtype, "shape": list(info.shape), "order": list(info.order), "pieces": pieces}


def _parse(body: bytes) -> Manifest:
    fields = parse_strict(body + b"}", allow_negative=True)
    _expect(isinstance(fields, dict) and fields.keys() == _FIELDS, f"it does not have the fields {', '.join(sorted(_FIELDS))}")
    _expect(fields["format"] == FORMAT, f"its format is {fields['format']!r:.60}, not {FORMAT!r}")
    _expect(
        type(fields["version"]) is int and fields["version"] == VERSION,
        f"its version is {fields['version']!r:.60}; this library reads version {VERSION}",
    )
    step = _natural(fields["step"], "step")
    world_size = _natural(fields["world_size"], "world_size")
    _expect(world_size >= 1, "world_size is 0")
    files = _files(fields["files"])
    tensors = _tensors(fields["tensors"], files)
    _expect(isinstance(fields["values"], dict), "values is not an object")
    return Manifest(step, world_size, files, tensors, fields["values"])


def _files(found: object) -> tuple[StoredFile, ...]:
    if not isinstance(found, list) or len(found) > MAX_ENTRIES:
        raise ValueError(f"files is no list of at most {MAX_ENTRIES}")
    files = tuple(_file(fields) for fields in found)
    # Names that differ in case only would be one file on some file systems.
    _expect(len({file.name.lower() for file in files}) == len(files), "a file is listed twice")
    return files


def _file(fields: object) -> StoredFile:
    if not isinstance(fields, dict) or fields.keys() != {"name", "bytes", "sha256"}:
        raise ValueError("a file does not have name, bytes and sha256, and nothing else")
    name, digest = fields["name"], fields["sha256"]
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name.lower() == MANIFEST_NAME:
        raise ValueError(f"{name!r:.200} is no name for a data file: letters, digits, '.', '_' and '-', at most 200")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{name}: sha256 is not 64 hexadecimal digits")
    return StoredFile(name, _natural(fields["bytes"], f"bytes of {name}"), digest)


def _tensors(found: object, files: Sequence[StoredFile]) -> dict[str, StoredTensor]:
    if not isinstance(found, dict) or len(found) > MAX_ENTRIES:
        raise ValueError(f"tensors is no object of at most {MAX_ENTRIES}")
    tensors = {name: _tensor(name, fields, len(files)) for name, fields in found.items()}
    _expect(sum(len(tensor.ranges) for tensor in tensors.values()) <= MAX_ENTRIES, f"more than {MAX_ENTRIES} pieces")
    value_bytes = [0] * len(files)
    held = [0] * len(files)
    for tensor in tensors.values():
        for part in tensor.ranges:
            value_bytes[part.file] += (part.stop - part.start) * ITEM_BYTES[tensor.info.dtype]
            held[part.file] += 1
    for file, expected, num_pieces in zip(files, value_bytes, held, strict=True):
        _expect(num_pieces > 0, f"{file.name} holds nothing")
        _expect(expected < file.num_bytes, f"{file.name} has {file.num_bytes} bytes, and its pieces take {expected}")
    return tensors


def _tensor(name: str, fields: object, num_files: int) -> StoredTensor:
    what = f"{name!r:.200}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "order", "pieces"}:
        raise ValueError(f"{what} does not have dtype, shape, order and pieces, and nothing else")
    if not 0 < len(name) <= MAX_NAME_CHARS or name == METADATA_KEY:
        raise ValueError(f"{what} is no name for a tensor")
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{what} has the dtype {fields['dtype']!r:.40}, which is none of {', '.join(ITEM_BYTES)}")
    shape = _naturals(fields["shape"], f"the shape of {what}", MAX_DIM)
    order = _naturals(fields["order"], f"the order of {what}", MAX_DIMS)
    if len(shape) > MAX_DIMS or sorted(order) != list(range(len(shape))):
        raise ValueError(f"the order of {what} is not one of its {len(shape)} dimensions")
    numel = math.prod(shape)
    _expect(math.prod(dim for dim in shape if dim) * ITEM_BYTES[fields["dtype"]] < _MAX_BYTES, f"{what} is too large")
    _expect(isinstance(fields["pieces"], list), f"the pieces of {what} are no list")
    ranges = tuple(_range(part, what, num_files) for part in fields["pieces"])
    problem = coverage_problem(ranges, numel)
    if problem is not None or any(a.start > b.start for a, b in pairwise(ranges)):
        raise ValueError(f"the pieces of {what}: {problem or 'they are not in order'}")
    return StoredTensor(TensorInfo(name, fields["dtype"], shape, order), ranges)


def _range(part: object, what: str, num_files: int) -> StoredRange:
    numbers = _naturals(part, f"a piece of {what}", _MAX_BYTES)
    if len(numbers) != 3 or numbers[0] >= num_files:
        raise ValueError(f"a piece of {what} is not [file, start, stop] with one of {num_files} files")
    return StoredRange(*numbers)


def _natural(value: object, what: str) -> int:
    return _naturals([value], what, _MAX_BYTES)[0]


def _naturals(value: object, what: str, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= limit for item in value):
        raise ValueError(f"{what} is not of whole numbers from 0 to {limit}")
    return tuple(value)


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
