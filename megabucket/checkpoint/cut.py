"""How one rank's pieces are cut into files of bounded size. Pure, no torch.

A file is the unit of verification: who needs one element of it reads and hashes all of it. So files are bounded, pieces
that fit into one stay whole, and larger ones are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from megabucket.checkpoint.dtypes import ITEM_BYTES
from megabucket.checkpoint.header import entry_bytes_bound
from megabucket.checkpoint.pieces import TensorInfo
from megabucket.units import MIB

DEFAULT_FILE_BYTES = 64 * MIB
MAX_FILE_BYTES = 4096 * MIB
_EMPTY_HEADER_BYTES = 64
MAX_PARTS = 50_000

Range: TypeAlias = tuple[TensorInfo, int, int]
"""The elements from a start to a stop of a tensor."""


@dataclass(frozen=True)  # without slots: what a save asks for again and again is kept
class Part:
    """Elements ``start:stop`` of a tensor, as they lie in a file.

    Args:
        piece: position in this rank's pieces that holds them.
    """

    info: TensorInfo
    start: int
    stop: int
    piece: int

    @cached_property
    def is_whole(self) -> bool:
        """Whether this is all of a tensor, row-major, so that it can have its name and shape in the file."""
        return self.stop - self.start == self.info.numel and self.info.order == tuple(range(len(self.info.shape)))

    @cached_property
    def key(self) -> str:
        """The name of this part in the file."""
        return self.info.name if self.is_whole else f"{self.info.name}[{self.start}:{self.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this part in the file."""
        return self.info.shape if self.is_whole else (self.stop - self.start,)

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return (self.stop - self.start) * ITEM_BYTES[self.info.dtype]

    @cached_property
    def header_bound(self) -> int:
        """No less than what it takes in the header."""
        return entry_bytes_bound(self.key, self.info.dtype, self.shape)


class FileCutter:
    """Cuts a rank's pieces into files again and again, and remembers the last cut: a run mostly saves the same pieces."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max_file_bytes = max_file_bytes
        self._ranges: list[Range] = []
        self._files: list[tuple[Part, ...]] = []
        self.bytes_bound = 0
        """No less than what the files of the last cut take."""

    def cut(self, ranges: Sequence[Range]) -> list[tuple[Part, ...]]:
        """Return the parts of each file; see ``cut_into_files``.

        Raises:
            ValueError: a range that is none, or that no file can hold.
        """
        if not self._ranges or self._ranges != list(ranges):
            for info, start, stop in ranges:
                _check_range(info, start, stop)
            self._files = cut_into_files(ranges, self._max_file_bytes)
            self.bytes_bound = bytes_bound(self._files)
            self._ranges = list(ranges)
        return self._files


def _check_range(info: TensorInfo, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= info.numel:
        raise ValueError(f"{info.name!r} {start}:{stop} is not within its {info.numel} elements")
    if sorted(info.order) != list(range(len(info.shape))):
        raise ValueError(f"{info.name!r} {start}:{stop} has order {info.order} for {len(info.shape)} dimensions")


def cut_into_files(ranges: Sequence[Range], max_file_bytes: int) -> list[tuple[Part, ...]]:
    """Return the parts of each file, with the widest dtypes first so that all values are aligned.

    Raises:
        ValueError: ``max_file_bytes`` is too small for one element with its entry in the header, or too large.

    >>> info = TensorInfo("w", "float32", (100,), (0,))
    >>> [[part.key for part in file] for file in cut_into_files([(info, 0, 100)], 400)]
    [['w[0:57]'], ['w[57:100]']]
    """
    if max_file_bytes > MAX_FILE_BYTES:
        raise ValueError(f"max_file_bytes={max_file_bytes}; the limit is {MAX_FILE_BYTES}")
    wide_first = sorted(range(len(ranges)), key=lambda index: -ITEM_BYTES[ranges[index][0].dtype])
    files: list[tuple[Part, ...]] = []
    parts: list[Part] = []
    keys: set[str] = set()
    room = max_file_bytes - _EMPTY_HEADER_BYTES
    for index in wide_first:
        for part in _parts_that_fit(index, *ranges[index], max_file_bytes - _EMPTY_HEADER_BYTES):
            needed = part.num_bytes + part.header_bound
            if parts and (needed > room or part.key in keys or len(parts) == MAX_PARTS):
                files.append(tuple(parts))
                parts, keys, room = [], set(), max_file_bytes - _EMPTY_HEADER_BYTES
            parts.append(part)
            keys.add(part.key)
            room -= needed
    return [*files, tuple(parts)] if parts else files


def bytes_bound(files: Iterable[Sequence[Part]]) -> int:
    """Return no less than what files take."""
    return sum(part.num_bytes + part.header_bound for parts in files for part in parts)


def _parts_that_fit(index: int, info: TensorInfo, start: int, stop: int, room: int) -> Iterator[Part]:
    """Cut one piece into parts that each fit into an empty file, as few as possible."""
    whole = Part(info, start, stop, index)
    if whole.num_bytes + whole.header_bound <= room:
        yield whole
        return
    # A key with the largest numbers that can occur bounds the keys of all parts.
    header_bound = entry_bytes_bound(f"{info.name}[{stop}:{stop}]", info.dtype, (stop,))
    step = (room - header_bound) // ITEM_BYTES[info.dtype]
    if step < 1:
        raise ValueError(f"max_file_bytes is {room + _EMPTY_HEADER_BYTES}, too few for one element of {info.name!r:.200}")
    for begin in range(start, stop, step):
        yield Part(info, begin, min(begin + step, stop), index)
