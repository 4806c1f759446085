"""What the files of a checkpoint say: tensors by name, headers of data files, and the sealed manifest. Pure, no torch.

The manifest is one JSON object::

    {"format":"megabucket-checkpoint","version":2,"step":..,"world_size":..,"files":[..],"tensors":{..},"values":{..},"seal":"<hex>"[,"hmac":"<hex>"]}

A tensor is stored in blocks: one that is the whole, or those that model-parallel ranks hold. Version 1 had whole tensors only.

The seal is the SHA-256 of every byte before ``,"seal":``, and is checked before the rest is parsed. The manifest holds the
SHA-256 of every data file, so a file that passes both checks is what was written, and its contents are not questioned again.
The HMAC, with a key that both sides have, proves who wrote it.

A data file is a safetensors file: 8 bytes of header length (little-endian), the header (JSON), and the values of all tensors
one after another without gaps. The safetensors library opens it; it cannot write one as a stream, nor read one from verified
memory without a copy, so the few lines that do both are here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import torch

MANIFEST_NAME: Final = "manifest.json"
MIN_KEY_BYTES: Final = 16
_ALIGNMENT: Final = 8
_FORMAT: Final = "megabucket-checkpoint"
_VERSION: Final = 2
_READS: Final = (1, 2)
_LENGTH_BYTES: Final = 8
_METADATA_KEY: Final = "__metadata__"
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TAIL: Final = re.compile(rb',"seal":"(?P<seal>[0-9a-f]{64})"(?:,"hmac":"(?P<hmac>[0-9a-f]{64})")?}\n')

_CODES: Final = {
    1: {"bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    2: {"uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16"},
    4: {"uint32": "U32", "int32": "I32", "float32": "F32"},
    8: {"uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64"},
}
CODE_OF: Final = MappingProxyType({name: code for codes in _CODES.values() for name, code in codes.items()})
"""The code in a safetensors header of each dtype that a checkpoint can hold, by torch's name."""

ITEM_BYTES: Final = MappingProxyType({name: item_bytes for item_bytes, codes in _CODES.items() for name in codes})
"""Bytes per element of each dtype."""

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""What JSON can hold; nan and the infinities excepted."""


Box: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: start and stop in each dimension."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One canonical tensor of a checkpoint, or a rectangular block of it, as model-parallel ranks hold them.

    The name says what it is, never where it was: no rank, bucket or padding.

    Args:
        name: that of the whole tensor.
        dtype: torch's name without ``torch.``: "float32", "bfloat16", "uint8", "bool", ...
        shape: of the block.
        order: the dimensions from slowest to fastest as the flat values are stored; ``(0, 1, ...)`` is row-major.
        offset: where the block begins in the whole tensor, one index per dimension.
        global_shape: of the whole tensor. Left out, this block is the whole.
        group: name of the reduction group that the parameter is in.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: tuple[int, ...] = ()
    global_shape: tuple[int, ...] = ()
    group: str = "dense"

    def __post_init__(self) -> None:
        if not self.global_shape:
            object.__setattr__(self, "offset", (0,) * len(self.shape))
            object.__setattr__(self, "global_shape", self.shape)

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)

    @property
    def whole(self) -> TensorInfo:
        """The tensor of which this is a block; row-major, unless the block is all of it."""
        if self.shape == self.global_shape:
            return self
        order = tuple(range(len(self.shape)))
        return TensorInfo(self.name, self.dtype, self.global_shape, order, group=self.group)

    @property
    def box(self) -> Box:
        """Where the block lies in the whole tensor."""
        return tuple((start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def key(self) -> str:
        """What the block is called in files: the name, with the offset unless it is the whole tensor.

        >>> TensorInfo("w", "float32", (4, 3), (0, 1), (0, 3), (4, 6)).key
        'w@0,3'
        """
        return self.name if self.shape == self.global_shape else f"{self.name}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The elements ``start:stop`` of a tensor, flat in the order of its ``info``.

    Args:
        values: 1D, contiguous, ``stop - start`` elements, on any device.
    """

    info: TensorInfo
    start: int
    stop: int
    values: torch.Tensor  # 1D, info.dtype

    @property
    def key(self) -> str:
        """The name of these elements in a data file."""
        return key_of(self.info, self.start, self.stop)

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return (self.stop - self.start) * ITEM_BYTES[self.info.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What one rank writes.

    Args:
        pieces: over all ranks they cover each tensor exactly once; a tensor without elements has one piece ``0:0``.
        values: everything that is not a tensor, as JSON; the same on every rank.
    """

    pieces: Sequence[Piece]
    values: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One data file, as it must be."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Elements ``start:stop`` of a tensor lie in file ``file`` (a position in the manifest's list)."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block of a tensor and where it lies: ranges in order that cover it exactly once."""

    info: TensorInfo
    ranges: tuple[StoredRange, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a checkpoint holds.

    Args:
        world_size: the number of ranks that wrote it.
        tensors: the blocks of each tensor; they cover it exactly once.
        seal: once it is encoded.
        signed: an HMAC is there; it was checked if a key was given.
    """

    step: int
    world_size: int
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, tuple[StoredBlock, ...]]
    values: Mapping[str, Json]
    seal: str = ""
    signed: bool = False


def is_whole(info: TensorInfo, start: int, stop: int) -> bool:
    """Return whether a range is all of a row-major block, which has its own name and shape in a data file."""
    return stop - start == info.numel and info.order == tuple(range(len(info.shape)))


def key_of(info: TensorInfo, start: int, stop: int) -> str:
    """Return the name of a range of elements in a data file."""
    return info.key if is_whole(info, start, stop) else f"{info.key}[{start}:{stop}]"


def encode_header(pieces: Sequence[Piece]) -> bytes:
    """Return length and header of a data file that holds pieces in this order.

    Padded with spaces to a multiple of 8 bytes, so that values of any dtype can start aligned.
    """
    # transformers loads a file only if it names the framework.
    entries: dict[str, object] = {_METADATA_KEY: {"format": "pt"}}
    offset = 0
    for piece in pieces:
        info, end = piece.info, offset + piece.num_bytes
        shape = info.shape if is_whole(info, piece.start, piece.stop) else (piece.stop - piece.start,)
        entries[piece.key] = {"dtype": CODE_OF[info.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json_text(entries).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def first_bytes(contents: memoryview) -> dict[str, int]:
    """Return where in a verified data file the values of each tensor begin, by key."""
    begin = _LENGTH_BYTES + int.from_bytes(contents[:_LENGTH_BYTES], "little")
    entries = json.loads(bytes(contents[_LENGTH_BYTES:begin]))
    return {key: begin + entry["data_offsets"][0] for key, entry in entries.items() if key != _METADATA_KEY}


def encode_manifest(manifest: Manifest, *, key: bytes | None = None) -> bytes:
    """Return the bytes of ``manifest.json``, sealed, and signed if there is a key.

    Raises:
        ValueError: values that JSON cannot hold, or a key of less than 16 bytes.
    """
    fields = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in manifest.files],
        "tensors": {name: _tensor_fields(blocks) for name, blocks in manifest.tensors.items()},
        "values": manifest.values,
    }
    return seal_body(json_text(fields)[:-1].encode("ascii"), key=key)


def json_text(value: object, *, sort_keys: bool = False) -> str:
    """Return JSON of values among which are mappings that are not dicts.

    Raises:
        ValueError: a number is not finite.
        TypeError: something is of a kind that JSON does not have.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys, default=_plain)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


def _tensor_fields(blocks: Sequence[StoredBlock]) -> dict[str, object]:
    first = blocks[0].info
    fields = [
        {
            "offset": block.info.offset,
            "shape": block.info.shape,
            "order": block.info.order,
            "pieces": [[part.file, part.start, part.stop] for part in block.ranges],
        }
        for block in blocks
    ]
    return {"dtype": first.dtype, "shape": first.global_shape, "group": first.group, "blocks": fields}


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
    cut = raw.rfind(b',"seal":')
    tail = _TAIL.fullmatch(raw, cut) if cut >= 0 else None
    if tail is None:
        raise ValueError("it does not end with a seal: it was cut off or changed")
    return tail


def decode_manifest(raw: bytes, *, key: bytes | None = None) -> Manifest:
    """Return the manifest, when its seal is right.

    Args:
        key: demand an HMAC made with it.

    Raises:
        ValueError: a broken seal, a missing or wrong signature, or what is no manifest of this version.
    """
    tail = _tail(raw)
    body, seal = raw[: tail.start()], tail["seal"].decode()
    if hashlib.sha256(body).hexdigest() != seal:
        raise ValueError("its seal is not the SHA-256 of its text")
    if key is not None and tail["hmac"] is None:
        raise ValueError("it is not signed, and a key was given to check its signature")
    if key is not None and not hmac.compare_digest(tail["hmac"].decode(), _signature(body, key)):
        raise ValueError("its signature was not made with the key that was given")
    try:
        return _manifest(json.loads(body + b"}"), seal, signed=tail["hmac"] is not None)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"it is no manifest of a checkpoint: {type(error).__name__}: {error}") from None


def _signature(body: bytes, key: bytes) -> str:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; it takes {MIN_KEY_BYTES} or more")
    return hmac.new(key, body, "sha256").hexdigest()


def _manifest(fields: Any, seal: str, *, signed: bool) -> Manifest:
    if fields["format"] != _FORMAT or fields["version"] not in _READS:
        raise ValueError(f"it is {fields['format']!r} {fields['version']!r}; this library reads {_FORMAT!r} up to {_VERSION}")
    files = tuple(StoredFile(file["name"], file["bytes"], file["sha256"]) for file in fields["files"])
    for file in files:
        if not _FILE_NAME.fullmatch(file.name):  # no name leads out of the directory
            raise ValueError(f"{file.name!r} is no name for a data file")
    tensors = {name: _blocks(name, of) for name, of in fields["tensors"].items()}
    return Manifest(fields["step"], fields["world_size"], files, tensors, dict(fields["values"]), seal, signed)


def _blocks(name: str, fields: Any) -> tuple[StoredBlock, ...]:
    whole, group = tuple(fields["shape"]), fields.get("group", "dense")
    given = fields.get("blocks") or [{**fields, "offset": (0,) * len(whole)}]  # version 1 said it of the whole
    return tuple(
        StoredBlock(
            TensorInfo(name, fields["dtype"], tuple(one["shape"]), tuple(one["order"]), tuple(one["offset"]), whole, group),
            tuple(StoredRange(*numbers) for numbers in one["pieces"]),
        )
        for one in given
    )


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes of a tensor have in common, or None without a common element.

    >>> overlap(((0, 4), (0, 3)), ((2, 6), (1, 9)))
    ((2, 4), (1, 3))
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def block_problem(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Return why blocks of a tensor do not cover it exactly once, or None when they do.

    >>> block_problem([((0, 4), (0, 3))], (4, 6))
    'hold 12 of its 24 elements: [0:4, 0:3]'
    """
    held = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    for one, other in combinations(boxes, 2):
        if one == other or overlap(one, other) is not None:
            return f"hold elements twice: {_box_text(one)} and {_box_text(other)}"
    if held != math.prod(shape):
        return f"hold {held} of its {math.prod(shape)} elements: {', '.join(map(_box_text, boxes))}"
    return None


def _box_text(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
