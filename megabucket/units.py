"""Sizes of dtypes, and reading and printing of elements, bytes and seconds. No torch."""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Final

from megabucket.errors import LayoutError

MIB: Final = 1024 * 1024

DTYPE_BYTES: Final = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes per element of the dtypes a buffer can hold."""

FENCE_BYTES: Final = 6 * 8
"""The message at the end of each step: six integers of 8 bytes (``comm/exchange.py``)."""

_DECIMAL: Final = MappingProxyType({"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9})
_COUNT: Final = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+]?\d+)?)\s*([KMGBkmgb]?)\s*")


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        LayoutError: ``dtype`` is not a dtype that a buffer can hold.
    """
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise LayoutError(f"dtype {dtype!r} cannot be held by a buffer; use one of {', '.join(DTYPE_BYTES)}") from None


def parse_count(text: str) -> int:
    """Read a number of elements: plain, with an exponent, or with a decimal suffix K, M, G (or B).

    Raises:
        ValueError: the text is not such a number, or not a whole one.

    >>> parse_count("40M"), parse_count("5e8"), parse_count("1.5K")
    (40000000, 500000000, 1500)
    """
    match = _COUNT.fullmatch(text)
    if match is None or len(text) > 40:
        raise ValueError(f"{text[:40]!r} is not a count; write 40000000, 4e7 or 40M")
    value = float(match[1]) * _DECIMAL[match[2].upper()]
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{text!r} is not a whole number of elements")
    # Plain digits go through int: a float would round beyond 2**53.
    return int(match[1]) * _DECIMAL[match[2].upper()] if match[1].isdigit() else int(value)


def format_count(count: int) -> str:
    """Return a short decimal form of a number of elements.

    >>> format_count(40_000_000), format_count(9088), format_count(12)
    ('40.00 M', '9.09 K', '12')
    """
    for suffix, unit in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= unit:
            return f"{count / unit:.2f} {suffix}"
    return str(count)


def format_bytes(num_bytes: float) -> str:
    """Return a short binary form of a number of bytes.

    >>> format_bytes(26_214_400), format_bytes(12)
    ('25.00 MiB', '12 B')
    """
    for suffix, exponent in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        unit = 1024**exponent
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {suffix}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a short form of a duration.

    >>> format_seconds(0.0123), format_seconds(75)
    ('12.30 ms', '1 min 15 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
