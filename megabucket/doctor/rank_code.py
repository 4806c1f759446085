"""Values that say which ranks are in a sum: rank ``r`` contributes ``2^r``, so the sum's bits are the ranks. No torch.

Bits alone do not tell "rank 0 twice, rank 1 not at all" from "rank 1 once, rank 0 not at all": both are 2. So every other
element holds 1 per rank and counts. Where there are more ranks than the dtype has digits, the ranks are cut into blocks, and
neighbouring elements speak of one block each.

::

    element      0          1         2          3         4 ...
    says     which of    how many  which of   how many  which of
             block 0     of 0      block 1    of 1      block 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from megabucket.errors import rank_list

WIDTHS: Final = MappingProxyType({"float64": 22, "float32": 22, "int64": 22, "float16": 9, "bfloat16": 6})
"""Ranks told apart in one element: two less than the dtype has binary digits, so that ranks counted up to three times, and the
quotient by the number of ranks, can still be told apart."""

_TIMES: Final = MappingProxyType({1: "once", 2: "twice"})
_TOLERANCE: Final = 0.25  # of whole numbers: less than half of what one rank makes


class Reading(NamedTuple):
    """What a wrong sum says."""

    text: str
    ranks: tuple[int, ...] = ()
    """Those that are missing or counted too often, where that can be told."""


@dataclass(frozen=True, slots=True)
class RankCode:
    """The code of a group.

    Args:
        num_ranks: of the group.
        width: ranks told apart in one element.

    >>> code = RankCode(num_ranks=2, width=22)
    >>> code.values(rank=1, stop=4), code.sums(stop=4)
    ([2, 1, 2, 1], [3, 2, 3, 2])
    >>> code.read([2, 1, 2, 1])
    Reading(text='rank 0 is missing', ranks=(0,))
    >>> code.read([2, 2, 2, 2])
    Reading(text='rank 0 is counted twice; rank 1 is missing', ranks=(0, 1))
    """

    num_ranks: int
    width: int

    @property
    def period(self) -> int:
        """Elements after which the code repeats; a tensor with fewer does not speak of every rank."""
        return 2 * -(-self.num_ranks // self.width)

    def values(self, rank: int, *, start: int = 0, stop: int) -> list[int]:
        """Return what ``rank`` contributes to the elements ``[start, stop)``."""
        mine, bit = divmod(rank, self.width)
        pattern = [0] * self.period
        pattern[2 * mine], pattern[2 * mine + 1] = 1 << bit, 1
        return [pattern[index % self.period] for index in range(start, stop)]

    def sums(self, *, start: int = 0, stop: int, times: int = 1) -> list[int]:
        """Return the sum over all ranks of the elements ``[start, stop)``, every rank counted ``times`` times."""
        pattern = []
        for block in range(self.period // 2):
            num_ranks = self._ranks_in(block)
            pattern += [times * ((1 << num_ranks) - 1), times * num_ranks]
        return [pattern[index % self.period] for index in range(start, stop)]

    def read(self, sums: Sequence[float], *, start: int = 0, times: int = 1) -> Reading | None:
        """Return what is wrong with sums, or ``None`` when each is nearest to the right one.

        Args:
            sums: of the elements ``[start, start + len(sums))``.
            times: how often every rank should be counted.
        """
        expected = self.sums(start=start, stop=start + len(sums), times=times)
        pairs = enumerate(zip(sums, expected, strict=True), start=start)
        wrong = {index: got for index, (got, right) in pairs if not abs(got - right) <= _TOLERANCE}
        if not wrong:
            return None
        if not all(math.isfinite(value) for value in sums):
            return Reading("values are not finite")
        factor = _common_factor(sums, expected)
        if factor is not None:
            return Reading(_describe_factor(factor))
        found = self._count(wrong, dict(enumerate(sums, start=start)), times=times)
        if found is not None:
            return found
        first = min(wrong)
        return Reading(f"not a sum of ranks: element {first} is {wrong[first]:g} instead of {expected[first - start]}")

    def _ranks_in(self, block: int) -> int:
        return min(self.width, self.num_ranks - block * self.width)

    def _count(self, wrong: Mapping[int, float], values: Mapping[int, float], *, times: int) -> Reading | None:
        """Return how often ranks were counted, or ``None`` when no combination of them gives the wrong values.

        Args:
            wrong: the wrong values by element.
            values: all values by element.
        """
        counts: dict[int, int] = {}
        texts: list[str] = []
        for block in sorted({index % self.period // 2 for index in wrong}):
            places = (2 * block, 2 * block + 1)
            bits, count = (_pick(wrong, self.period, place) or _pick(values, self.period, place) for place in places)
            num_ranks = self._ranks_in(block)
            if bits is None and count is not None:
                texts.append(f"{count.value} instead of {times * num_ranks} contributions arrived")
                continue
            decoded = None if bits is None else _decode(bits.value, num_ranks, count=count, usual=times)
            if decoded is None or all(counted == times for counted in decoded):
                return None
            counts |= {block * self.width + bit: counted for bit, counted in enumerate(decoded) if counted != times}
        return Reading("; ".join([*_describe_counts(counts, times=times), *texts]), tuple(sorted(counts)))


@dataclass(frozen=True, slots=True)
class _Whole:
    """A whole number; an object, so that 0 is something."""

    value: int


def _pick(values: Mapping[int, float], period: int, place: int) -> _Whole | None:
    """Return the most frequent value at one place of the code, if it is a whole number."""
    there = [value for index, value in values.items() if index % period == place]
    usual = max(dict.fromkeys(there), key=there.count, default=0.5)
    return _Whole(round(usual)) if abs(usual - round(usual)) <= _TOLERANCE else None


def _common_factor(sums: Sequence[float], expected: Sequence[int]) -> float | None:
    """Return the one factor, not 1, between all sums and the right ones; factors that ranks explain as well do not count."""
    factors = {round(got / right, 4) for got, right in zip(sums, expected, strict=True) if right}
    are_zeros_kept = all(got == 0 for got, right in zip(sums, expected, strict=True) if not right)
    if len(factors) != 1 or factors == {1} or not are_zeros_kept or len(sums) < 2:
        return None
    return factors.pop()


def _describe_factor(factor: float) -> str:
    if factor == 0:
        return "every rank is missing: all values are 0"
    if factor > 0 and (factor.is_integer() or round(1 / factor, 2).is_integer()):
        size = f"{factor:g} times" if factor > 1 else f"1/{round(1 / factor):g} of"
        cause = "not divided, or every rank counted as often" if factor > 1 else "divided once too often"
        return f"every value is {size} the right one: {cause}"
    return f"every value is {factor:g} times the right one"


def _decode(total: int, num_ranks: int, *, count: _Whole | None, usual: int) -> tuple[int, ...] | None:
    """Return how often each rank is in ``total``: of all possible answers the one that deviates least from ``usual``.

    Args:
        count: contributions in all, if known; ignored when no answer has as many.
    """

    @cache
    def best(rank: int, rest: int, left: int | None) -> tuple[int, tuple[int, ...]] | None:
        if rank == num_ranks:
            return (0, ()) if rest == 0 and not left else None
        answers = []
        for times in range(rest % 2, min(usual + 4, rest + 1), 2):
            if left is not None and times > left:
                break
            tail = best(rank + 1, (rest - times) // 2, None if left is None else left - times)
            if tail is not None:
                answers.append((tail[0] + abs(times - usual), (times, *tail[1])))
        return min(answers) if answers else None

    if total < 0:
        return None
    found = (best(0, total, count.value) if count is not None else None) or best(0, total, None)
    return None if found is None else found[1]


def _describe_counts(counts: Mapping[int, int], *, times: int) -> list[str]:
    ranks_by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        ranks_by_count.setdefault(count, []).append(rank)
    texts = []
    for count, ranks in ranks_by_count.items():
        verb = "is" if len(ranks) == 1 else "are"
        if count == 0:
            texts.append(f"{rank_list(ranks)} {verb} missing")
            continue
        often = _TIMES.get(count, f"{count} times")
        instead = "" if times == 1 else f" instead of {_TIMES.get(times, f'{times} times')}"
        texts.append(f"{rank_list(ranks)} {verb} counted {often}{instead}")
    return texts
