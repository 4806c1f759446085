"""The contents of a checkpoint's files: tensors by name, headers of data files, and the sealed manifest. Pure, no torch.

The manifest is one JSON object, ``Manifest``, with its seal::

    {"format":"megabucket-checkpoint","version":1,"step":..,"world_size":..,"files":[..],"tensors":{..},"values":{..},"seal":"<hex>"}

A tensor is stored in blocks: one block with all of it, or the blocks that model-parallel ranks hold.

The seal is the SHA-256 of every byte before ``,"seal":``, and is checked before the rest is parsed. The manifest holds the
SHA-256 of every data file. A file with the right hash is the file that was written; its contents are not checked further.

A data file is a safetensors file: 8 bytes of header length (little-endian), the header (JSON), and the values of all tensors
one after another without gaps. The safetensors library opens it, but cannot write one as a stream, and cannot read one from
verified memory without a copy; ``encode_header`` and ``first_bytes`` do these two things.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

if TYPE_CHECKING:
    import torch

MANIFEST_NAME: Final = "manifest.json"
_ALIGNMENT: Final = 8
_LENGTH_BYTES: Final = 8
_METADATA_KEY: Final = "__metadata__"
_TAIL: Final = re.compile(rb',"seal":"([0-9a-f]{64})"}\n\Z')
_FORMAT: Final = "megabucket-checkpoint"
VERSION: Final = 1
"""The version of the format that is written, and the only one that is read."""

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

Dims: TypeAlias = tuple[int, ...]
"""One number per dimension of a tensor."""

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: start and stop in each dimension."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One canonical tensor of a checkpoint, or a rectangular block of it, as model-parallel ranks hold them.

    Neither rank nor bucket nor padding is part of it.

    Args:
        name: of the whole tensor.
        dtype: torch's name without ``torch.``: "float32", "bfloat16", "uint8", "bool", ...
        shape: of the block.
        order: the dimensions from slowest to fastest as the flat values are stored; ``(0, 1, ...)`` is row-major.
        offset: where the block begins in the whole tensor, one index per dimension.
        global_shape: of the whole tensor. Left out, this block is the whole.
        group: name of the reduction group of the parameter.
    """

    name: str
    dtype: str
    shape: Dims
    order: Dims
    offset: Dims = ()
    global_shape: Dims = ()
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
        """The whole tensor; row-major, unless the block is all of it."""
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
        """The name of the block in data files: the tensor's name, with the offset unless the block is the whole tensor.

        >>> TensorInfo("w", "float32", (4, 3), (0, 1), (0, 3), (4, 6)).key
        'w@0,3'
        """
        return self.name if self.shape == self.global_shape else f"{self.name}@{','.join(map(str, self.offset))}"

    def is_whole(self, start: int, stop: int) -> bool:
        """Return whether a range is all of a row-major block, which has its own name and shape in a data file."""
        return stop - start == self.numel and self.order == tuple(range(len(self.shape)))

    def key_of(self, start: int, stop: int) -> str:
        """Return the name of a range of elements in a data file."""
        return self.key if self.is_whole(start, stop) else f"{self.key}[{start}:{stop}]"


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
        return self.info.key_of(self.start, self.stop)

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return (self.stop - self.start) * ITEM_BYTES[self.info.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The part of a checkpoint that one rank writes.

    Args:
        pieces: over all ranks they cover each tensor exactly once; a tensor without elements has one piece ``0:0``.
        values: everything that is not a tensor, as JSON; the same on every rank.
    """

    pieces: Sequence[Piece]
    values: Mapping[str, Json]


# The manifest. Its JSON is read into these classes, and written from them.


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One data file. The pattern of its name keeps it inside the directory."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    num_bytes: Annotated[int, Field(alias="bytes")]
    sha256: str


class StoredRange(NamedTuple):
    """Elements ``start:stop`` of a flat block lie in file ``file`` (a position in the manifest's list)."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a tensor and the files with its values. See ``TensorInfo`` for the other fields.

    Args:
        pieces: in order; they cover the block exactly once.
    """

    offset: Dims
    shape: Dims
    order: Dims
    pieces: tuple[StoredRange, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its dtype and shape as a whole, and blocks that cover it exactly once."""

    dtype: str
    shape: Dims
    blocks: tuple[StoredBlock, ...]
    group: str

    def infos(self, name: str) -> list[TensorInfo]:
        """Return the description of each block."""
        return [
            TensorInfo(name, self.dtype, block.shape, block.order, block.offset, self.shape, self.group)
            for block in self.blocks
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        world_size: the number of ranks that wrote it.
        seal: SHA-256 of the text that the manifest was read from.
    """

    format: Literal["megabucket-checkpoint"] = _FORMAT
    version: Literal[1] = VERSION
    step: int
    world_size: int
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    seal: Annotated[str, Field(exclude=True)] = ""


_MANIFEST: Final = TypeAdapter(Manifest)


class OtherVersionError(ValueError):
    """A whole manifest is of a version that this library does not read."""


def manifest_fields(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as the values of its JSON, without the seal."""
    fields: dict[str, Any] = _MANIFEST.dump_python(manifest, by_alias=True)
    return fields


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``, sealed.

    Raises:
        ValueError: a number is not finite.
        TypeError: a value is of a kind that JSON does not have.
    """
    return seal_body(json_text(manifest_fields(manifest))[:-1].encode("ascii"))


def json_text(value: object, *, sort_keys: bool = False) -> str:
    """Return compact JSON.

    Raises:
        ValueError: a number is not finite.
        TypeError: a value is of a kind that JSON does not have.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys)


def seal_body(body: bytes) -> bytes:
    """Return a manifest from its text without the closing brace."""
    return body + f',"seal":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode("ascii")


def seal_of(raw: bytes) -> str:
    """Return the seal at the end of a manifest, unchecked.

    Raises:
        ValueError: there is none.
    """
    return _tail(raw)[1].decode()


def _tail(raw: bytes) -> re.Match[bytes]:
    tail = _TAIL.search(raw)
    if tail is None:
        raise ValueError("it does not end with a seal: it was cut off or changed")
    return tail


def decode_manifest(raw: bytes) -> Manifest:
    """Return the manifest, when its seal is right.

    Raises:
        OtherVersionError: its seal is right, and it is of another version of the format.
        ValueError: its seal is broken, or it is no manifest.
    """
    body, seal = raw[: _tail(raw).start()], seal_of(raw)
    if hashlib.sha256(body).hexdigest() != seal:
        raise ValueError("its seal is not the SHA-256 of its text")
    fields = json.loads(body + b"}")
    if (version := fields.get("version")) != VERSION and fields.get("format") == _FORMAT:
        raise OtherVersionError(f"it is of version {version!r:.100} of the format")
    try:
        manifest = _MANIFEST.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place, found = ".".join(map(str, first["loc"])), f"{first['input']!r:.100}"
        raise ValueError(f"it is no manifest that this version reads: {place}: {first['msg']}, got {found}") from None
    for name, tensor in manifest.tensors.items():
        if problem := _tensor_problem(tensor, len(manifest.files)):
            raise ValueError(f"it is no manifest that this version reads: tensor {name!r:.100}: {problem}")
    return replace(manifest, seal=seal)


def _tensor_problem(tensor: StoredTensor, num_files: int) -> str | None:
    """Return why a tensor could not be read, or None."""
    if tensor.dtype not in CODE_OF:
        return f"its dtype is {tensor.dtype!r:.100}"
    dims = range(len(tensor.shape))
    for block in tensor.blocks:
        if not len(block.offset) == len(block.shape) == len(dims) or sorted(block.order) != list(dims):
            return f"a block has offset {block.offset}, shape {block.shape} and order {block.order} in shape {tensor.shape}"
        spans = zip(block.offset, block.shape, tensor.shape, strict=True)
        if any(start < 0 or size < 0 or start + size > whole for start, size, whole in spans):
            return f"a block has offset {block.offset} and shape {block.shape} in shape {tensor.shape}"
        edges = [0, *(piece.stop for piece in block.pieces)]
        starts = [piece.start for piece in block.pieces]
        if starts != edges[:-1] or edges != sorted(edges) or edges[-1] != math.prod(block.shape):
            return f"the pieces of a block do not cover its {math.prod(block.shape)} elements in order"
        if not all(0 <= piece.file < num_files for piece in block.pieces):
            return f"a piece is in none of the {num_files} files"
    boxes = [info.box for info in tensor.infos("")]
    problem = block_problem(boxes, tensor.shape) if boxes else "are none"
    return f"its blocks {problem}" if problem else None


def encode_header(pieces: Sequence[Piece]) -> bytes:
    """Return length and header of a data file that holds pieces in this order.

    Padded with spaces to a multiple of 8 bytes, so that values of any dtype can start aligned.
    """
    # transformers loads a file only if it names the framework.
    entries: dict[str, object] = {_METADATA_KEY: {"format": "pt"}}
    offset = 0
    for piece in pieces:
        info, end = piece.info, offset + piece.num_bytes
        shape = info.shape if info.is_whole(piece.start, piece.stop) else (piece.stop - piece.start,)
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


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None if it has no element.

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
