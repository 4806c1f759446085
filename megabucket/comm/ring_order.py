"""In which order gloo's ring adds the ranks' values up, so that another way of adding gives the same bits. No torch.

Floating-point addition does not associate, so from three ranks on the order decides the last bits. Gloo cuts a tensor into as
many chunks as there are ranks, each made of whole segments. The values of chunk ``c`` start at the rank before ``c`` and travel
down the ranks, each of which adds its own, until rank ``c`` has the sum (gloo/allreduce.cc, ``ring``). It makes no difference
which of two addends comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_SEGMENT_BYTES: Final = 1 << 20
"""The largest segment, as gloo has it by default."""


class Stretch(NamedTuple):
    """Neighbouring elements that are added in one order."""

    start: int
    """First element, counted from where the caller starts."""
    stop: int
    ranks: tuple[int, ...]
    """In the order in which their values are added."""


def stretches(*, start: int, stop: int, numel: int, itemsize_bytes: int, num_ranks: int) -> Iterator[Stretch]:
    """Yield how the elements from ``start`` to ``stop`` of an all-reduced tensor are added, counted from ``start``.

    Args:
        numel: of the tensor that gloo would all-reduce, of which these elements are a part.
        itemsize_bytes: of one element.

    >>> list(stretches(start=0, stop=6, numel=12, itemsize_bytes=4, num_ranks=3))
    [Stretch(start=0, stop=4, ranks=(2, 1, 0)), Stretch(start=4, stop=6, ranks=(0, 2, 1))]
    """
    if num_ranks == 2:
        yield Stretch(0, stop - start, (0, 1))  # one addition has one order
        return
    chunk_numel = _chunk_bytes(numel * itemsize_bytes, itemsize_bytes, num_ranks) // itemsize_bytes
    first = start
    while first < stop:
        chunk = first // chunk_numel
        last = min((chunk + 1) * chunk_numel, stop)
        yield Stretch(first - start, last - start, tuple((chunk - hops) % num_ranks for hops in range(1, num_ranks + 1)))
        first = last


def blocks(*, start: int, stop: int, numel: int, itemsize_bytes: int, num_ranks: int, block_numel: int) -> Iterator[Stretch]:
    """Yield what ``stretches`` does, cut into blocks of at most ``block_numel`` elements."""
    for stretch in stretches(start=start, stop=stop, numel=numel, itemsize_bytes=itemsize_bytes, num_ranks=num_ranks):
        for first in range(stretch.start, stretch.stop, block_numel):
            yield Stretch(first, min(first + block_numel, stretch.stop), stretch.ranks)


def _chunk_bytes(total_bytes: int, itemsize_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one rank's chunk: at least two segments of at most a MiB, all equal, rounded up to whole elements."""
    longest = itemsize_bytes * max(1, _SEGMENT_BYTES // itemsize_bytes)
    num_segments = max(_divided_up(total_bytes, longest), 2 * num_ranks)
    segments_per_rank = _divided_up(num_segments, num_ranks)
    segment_bytes = _divided_up(_divided_up(total_bytes, segments_per_rank * num_ranks), itemsize_bytes) * itemsize_bytes
    return segments_per_rank * segment_bytes


def _divided_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
