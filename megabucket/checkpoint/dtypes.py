"""The dtypes a checkpoint can hold, by torch's name and by the code in safetensors files. No torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_TABLE: Final = (
    ("bool", "BOOL", 1),
    ("uint8", "U8", 1),
    ("int8", "I8", 1),
    ("uint16", "U16", 2),
    ("int16", "I16", 2),
    ("uint32", "U32", 4),
    ("int32", "I32", 4),
    ("uint64", "U64", 8),
    ("int64", "I64", 8),
    ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e5m2", "F8_E5M2", 1),
    ("float16", "F16", 2),
    ("bfloat16", "BF16", 2),
    ("float32", "F32", 4),
    ("float64", "F64", 8),
    ("complex64", "C64", 8),
)

CODE_OF: Final = MappingProxyType({name: code for name, code, _ in _TABLE})
"""Code in a safetensors header of each dtype."""

DTYPE_OF: Final = MappingProxyType({code: name for name, code, _ in _TABLE})

ITEM_BYTES: Final = MappingProxyType({name: item_bytes for name, _, item_bytes in _TABLE})
"""Bytes per element of each dtype."""
