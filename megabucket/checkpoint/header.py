"""The header of a safetensors file: written, and read as if an enemy had written it. Pure, no torch.

A file is 8 bytes of header length (little-endian), the header (JSON), and the values of all tensors one after another
without gaps. What this reader accepts, the safetensors library accepts, too; not the other way round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megabucket.checkpoint.dtypes import CODE_OF, DTYPE_OF, ITEM_BYTES
from megabucket.checkpoint.strict_json import parse_strict

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_ENTRIES = 100_000
MAX_DIMS = 64
MAX_DIM = 2**48
METADATA_KEY = "__metadata__"
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; its values are the bytes ``start_byte:stop_byte`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start_byte: int
    stop_byte: int


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return length and header for tensors ``(key, dtype, shape)`` in the order of their values.

    Padded with spaces to a multiple of 8 bytes, so that values of any dtype can start aligned.
    """
    # transformers loads a file only if it names the framework.
    entries: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[key] = {"dtype": CODE_OF[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def entry_bytes_bound(key: str, dtype: str, shape: Sequence[int]) -> int:
    """Return no less than what one more tensor adds to a header."""
    return len(json.dumps([key, CODE_OF[dtype], list(shape)])) + 2 * 20 + len('"dtype":"shape":"data_offsets":[,]{,,},')


def header_bytes(data: bytes | memoryview, file_bytes: int) -> int:
    """Return where the values begin, from the first bytes of a file of ``file_bytes``.

    Raises:
        ValueError: no header of a size that is allowed fits.
    """
    if len(data) < LENGTH_BYTES:
        raise ValueError(f"{file_bytes} bytes, too few for a header")
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_bytes:
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    return LENGTH_BYTES + length


def decode_header(data: bytes | memoryview, file_bytes: int) -> dict[str, Entry]:
    """Return the tensors of a file by key, in the order of their values.

    Args:
        data: the file, or at least its first ``header_bytes``.

    Raises:
        ValueError: anything but a header whose tensors fill the rest of the file exactly, without gap or overlap.
    """
    begin = header_bytes(data, file_bytes)
    raw = bytes(data[LENGTH_BYTES:begin])
    if not raw.startswith(b"{"):
        raise ValueError("the header is not a JSON object")
    found = parse_strict(raw, allow_negative=False)
    _check_metadata(found.pop(METADATA_KEY, {}))
    if len(found) > MAX_ENTRIES:
        raise ValueError(f"{len(found)} tensors; the limit is {MAX_ENTRIES}")
    entries = {key: _entry(key, fields, begin) for key, fields in found.items()}
    in_order = dict(sorted(entries.items(), key=lambda item: (item[1].start_byte, item[1].stop_byte)))
    position = begin
    for key, entry in in_order.items():
        if entry.start_byte != position:
            raise ValueError(f"{key!r:.200} starts at byte {entry.start_byte}, where {position} would follow")
        position = entry.stop_byte
    if position != file_bytes:
        raise ValueError(f"its tensors end at byte {position}, the file at {file_bytes}")
    return in_order


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA_KEY} is not an object of strings")


def _entry(key: str, fields: object, begin: int) -> Entry:
    what = f"{key!r:.200}"
    if not isinstance(fields, Mapping) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} does not have dtype, shape and data_offsets, and nothing else")
    dtype = DTYPE_OF.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{what} has the dtype {fields['dtype']!r:.40}, which is none of {', '.join(DTYPE_OF)}")
    shape = _naturals(fields["shape"], what=f"the shape of {what}", limit=MAX_DIM)
    offsets = _naturals(fields["data_offsets"], what=f"data_offsets of {what}", limit=2**62)
    if len(offsets) != 2 or len(shape) > MAX_DIMS:
        raise ValueError(f"{what} has {len(offsets)} data_offsets and {len(shape)} dimensions")
    value_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != value_bytes:
        raise ValueError(f"{what} takes {value_bytes} bytes and has {offsets[1] - offsets[0]}")
    # The product above is exact; another reader multiplies dimension by dimension in 64 bits, zeros or not.
    if math.prod(dim for dim in shape if dim) * ITEM_BYTES[dtype] >= 2**62:
        raise ValueError(f"the shape of {what} overflows")
    return Entry(dtype, shape, begin + offsets[0], begin + offsets[1])


def _naturals(value: object, *, what: str, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= limit for item in value):
        raise ValueError(f"{what} is no list of whole numbers from 0 to {limit}")
    return tuple(value)
