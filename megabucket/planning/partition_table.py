"""Search for the best cuts under any cost, in quadratic time. Needs numpy, no torch. Called by ``partition``.

One side is the recurrence itself, and exact. With two sides each prefix keeps a Pareto front of (finish of one side, finish of
the other), and a bucket is looked at only if with it the total can still beat the best plan known: what follows the bucket is
bounded from below by the cheapest way to send it, on each side and on both together. That is exact too, but fronts grow with
the number of items: beyond ``EXACT_ITEMS`` only the most promising states of each are kept. The plan found is never worse than
the best of 40 uniform ones, of the best plan of either side alone, and of the exact optimum for straight lines fitted to the
tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from megabucket.planning.fit import fit_affine
from megabucket.planning.links import Affine, Link, MeasuredLink
from megabucket.planning.partition_affine import TOLERANCE, Cuts, Side, shortest_two_sided
from megabucket.trace import CollectiveKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EXACT_ITEMS: Final = 128
"""Items up to which two sides are searched exactly."""

FRONT_STATES: Final = 16
"""States kept of each front beyond that."""

_UNIFORM_GUESSES: Final = 40
_FIT_SIZES: Final = 32


class Curve:
    """Seconds of a collective over elements, for whole arrays at once."""

    def __init__(self, link: Link, kind: CollectiveKind, num_ranks: int, dtype: str, bytes_per_element: int) -> None:
        self._link, self._kind, self._num_ranks, self._dtype = link, kind, num_ranks, dtype
        self._bytes_per_element = bytes_per_element
        self._affine = link.affine(kind, num_ranks, dtype)

    def __call__(self, elements: Ints) -> Floats:
        """Return the seconds of each size; shapes are equal.

        Raises:
            ConfigError: the link cannot say what a collective costs.
        """
        payload_bytes: Floats = elements.astype(np.float64) * self._bytes_per_element
        if self._affine is not None:
            return self._affine.latency_s + self._affine.seconds_per_byte * payload_bytes
        if isinstance(self._link, MeasuredLink):
            return self._interpolate(self._link, payload_bytes)
        sizes, inverse = np.unique(payload_bytes, return_inverse=True)
        seconds = [self._link.collective_s(self._kind, size, self._num_ranks, self._dtype) for size in sizes.tolist()]
        return np.asarray(seconds, dtype=np.float64)[inverse]

    def _interpolate(self, link: MeasuredLink, payload_bytes: Floats) -> Floats:
        # One call checks the question and knows the time at the end, from which the last slope goes on.
        points = np.asarray(link.points(self._kind, self._dtype), dtype=np.float64)
        last_size = float(points[-1, 0])
        beyond = link.collective_s(self._kind, last_size + 1.0, self._num_ranks, self._dtype) - float(points[-1, 1])
        inside: Floats = np.interp(payload_bytes, points[:, 0], points[:, 1])
        return inside + max(beyond, 0.0) * np.maximum(payload_bytes - last_size, 0.0)


def shortest_by_table(elements: Sequence[int], sides: Sequence[Side], curves: Sequence[Curve]) -> Cuts:
    """Return the cuts with the smallest sum of finishes.

    Args:
        elements: of the first ``k`` items, for every ``k``; strictly increasing from 0.
        sides: one or two.
        curves: the cost of each side.

    Raises:
        ConfigError: a link cannot say what a collective costs.
    """
    search = _TableSearch(elements, sides, curves)
    return search.run()


class _TableSearch:
    def __init__(self, elements: Sequence[int], sides: Sequence[Side], curves: Sequence[Curve]) -> None:
        self._sides = sides
        self._elements: Ints = np.asarray(elements, dtype=np.int64)  # 1D, items + 1
        self._count = len(elements) - 1
        self._due = [np.concatenate([[0.0], np.asarray(side.due_s, dtype=np.float64)]) for side in sides]  # 1D, items + 1
        self._floors = [side.floor_s for side in sides]
        self._curves = curves
        self._cheapest = [self._cheapest_rest(curve) for curve in curves]
        self._cheapest_both = self._cheapest[0] if len(curves) == 1 else self._cheapest_rest(self._cost_of_all)
        self._alone = [self._shortest_alone(side) for side in range(len(sides))]

    def run(self) -> Cuts:
        """Search with the best plan known as the bound; without a better one, that plan is the answer."""
        known = min(self._guesses(), key=self._total_s)
        if len(self._curves) == 1:
            return known  # the exact optimum of the only side is among the guesses
        return self._shortest_together(self._total_s(known) * (1 - TOLERANCE)) or known

    def _cost_of_all(self, sizes: Ints) -> Floats:
        return sum_of(curve(sizes) for curve in self._curves)

    def _cheapest_rest(self, curve: Callable[[Ints], Floats]) -> Floats:
        """Return the least seconds on the lane that send the items from ``k`` on, for every ``k``."""
        rest = np.zeros(self._count + 1)
        for start in range(self._count - 1, -1, -1):
            rest[start] = np.min(curve(self._elements[start + 1 :] - self._elements[start]) + rest[start + 1 :])
        return rest

    def _shortest_alone(self, side: int) -> Cuts:
        """Return the cuts with the earliest finish of one side: the recurrence, with all ``i`` at once."""
        finish = np.zeros(self._count + 1)
        parent = np.zeros(self._count + 1, dtype=np.int64)
        for stop in range(1, self._count + 1):
            cost = self._curves[side](self._elements[stop] - self._elements[:stop])
            ends = np.maximum(finish[:stop], self._due[side][stop]) + cost
            parent[stop] = np.argmin(ends)
            finish[stop] = ends[parent[stop]]
        return _trace_back(parent.tolist(), self._count)

    def _guesses(self) -> list[Cuts]:
        """Return plans worth beating."""
        guesses = list(self._alone)
        size = int(self._elements[-1])
        while size >= 1 and len(guesses) < _UNIFORM_GUESSES:
            guesses.append(self._uniform(size))
            size = size * 3 // 4
        sizes = np.unique(np.geomspace(1, self._elements[-1], _FIT_SIZES).astype(np.int64))
        if len(self._curves) > 1 and len(sizes) > 1:
            fits = [fit_affine(list(zip(sizes.tolist(), curve(sizes).tolist(), strict=True))) for curve in self._curves]
            lines = [Affine(fit.latency_s, fit.seconds_per_byte) for fit in fits]
            both = (self._sides[0], self._sides[1])
            guesses.append(shortest_two_sided(self._elements.tolist(), both, (lines[0], lines[1])))
        return guesses

    def _uniform(self, size: int) -> Cuts:
        cuts: list[int] = []
        start = 0
        while start < self._count:
            stop = int(np.searchsorted(self._elements, self._elements[start] + size))
            start = min(max(stop, start + 1), self._count)
            cuts.append(start)
        return tuple(cuts)

    def _finishes(self, cuts: Cuts) -> list[float]:
        stops = np.asarray(cuts)
        sizes = np.diff(self._elements[stops], prepend=0)
        finishes = []
        for due, curve, floor in zip(self._due, self._curves, self._floors, strict=True):
            finish = 0.0
            for ready, cost in zip(due[stops].tolist(), curve(sizes).tolist(), strict=True):
                finish = max(finish, ready) + cost
            finishes.append(max(finish, floor))
        return finishes

    def _total_s(self, cuts: Cuts) -> float:
        return sum(self._finishes(cuts))

    def _shortest_together(self, limit_s: float) -> Cuts | None:
        """Return the cuts with the smallest sum of both finishes, or ``None`` when none is below ``limit_s``.

        A state is a prefix with the finish of both sides and the state it came from. States of a prefix that finish before the
        next item is due are as good as if they finished then, which is what keeps fronts short.
        """
        width = FRONT_STATES if self._count > EXACT_ITEMS else None
        least = [self._finishes(cuts)[side] for side, cuts in enumerate(self._alone)]
        last_use = self._last_use(limit_s, least)
        states = _States()
        for stop in range(1, self._count + 1):
            states.drop(last_use < stop)
            sizes = self._elements[stop] - self._elements[states.prefix]
            ends = [
                np.maximum(finish, due[stop]) + curve(sizes)
                for finish, due, curve in zip(states.finishes, self._due, self._curves, strict=True)
            ]
            bound = self._bound(ends, np.int64(stop), least)
            if stop == self._count:
                return states.best(bound, limit_s, self._count)
            keep = np.flatnonzero(bound < limit_s)
            clamped = [np.maximum(end[keep], due[stop + 1]) for end, due in zip(ends, self._due, strict=True)]
            front = _pareto(clamped[0], clamped[1])
            if width is not None and len(front) > width:
                front = front[np.argpartition(bound[keep[front]], width)[:width]]
            states.add(stop, keep[front], [finish[front] for finish in clamped])
        return None

    def _bound(self, ends: Sequence[Floats], stops: Ints | np.int64, least: Sequence[float]) -> Floats:
        """Return seconds that no plan with these finishes of a prefix can beat; at the end, what the plans take."""
        rests = [rest[stops] for rest in self._cheapest]
        floors = [low if np.any(stops < self._count) else floor for low, floor in zip(least, self._floors, strict=True)]
        apart = sum_of(np.maximum(end + rest, low) for end, rest, low in zip(ends, rests, floors, strict=True))
        return np.maximum(apart, sum_of(ends) + self._cheapest_both[stops])

    def _last_use(self, limit_s: float, least: Sequence[float]) -> Ints:
        """Return the last item at which a bucket that begins at each prefix can end and the total still beat ``limit_s``."""
        last = np.zeros(self._count + 1, dtype=np.int64)
        for start in range(self._count):
            stops = np.arange(start + 1, self._count + 1)
            sizes = self._elements[stops] - self._elements[start]
            ends = [due[stops] + curve(sizes) for due, curve in zip(self._due, self._curves, strict=True)]
            possible = np.flatnonzero(self._bound(ends, stops, least) < limit_s)
            last[start] = stops[possible[-1]] if len(possible) else 0
        return last


class _States:
    """All states of a search, and which of them may still be continued."""

    def __init__(self) -> None:
        self._all_prefixes: Ints = np.zeros(1, dtype=np.int64)
        self._parents: Ints = np.full(1, -1, dtype=np.int64)
        self._live: Ints = np.zeros(1, dtype=np.int64)
        self.prefix: Ints = np.zeros(1, dtype=np.int64)
        """Items before each live state."""
        self.finishes: list[Floats] = [np.zeros(1), np.zeros(1)]
        """Finish of each side in each live state."""

    def drop(self, is_over: npt.NDArray[np.bool_]) -> None:
        """Forget the live states of prefixes that are over; 1D, by number of items."""
        keep = ~is_over[self.prefix]
        self._live, self.prefix = self._live[keep], self.prefix[keep]
        self.finishes = [finish[keep] for finish in self.finishes]

    def add(self, prefix: int, parents: Ints, finishes: Sequence[Floats]) -> None:
        """Add live states of one prefix; ``parents`` are positions among the live states."""
        first = len(self._all_prefixes)
        prefixes = np.full(len(parents), prefix, dtype=np.int64)
        self._all_prefixes = np.concatenate([self._all_prefixes, prefixes])
        self._parents = np.concatenate([self._parents, self._live[parents]])
        self._live = np.concatenate([self._live, np.arange(first, first + len(parents))])
        self.prefix = np.concatenate([self.prefix, prefixes])
        self.finishes = [np.concatenate([old, new]) for old, new in zip(self.finishes, finishes, strict=True)]

    def best(self, totals: Floats, limit_s: float, count: int) -> Cuts | None:
        """Return the cuts of the live state with the smallest total below ``limit_s``, once a last bucket ends at ``count``."""
        if not len(totals) or float(totals.min()) >= limit_s:
            return None
        state = int(self._live[np.argmin(totals)])
        cuts = [count]
        while self._all_prefixes[state] > 0:
            cuts.append(int(self._all_prefixes[state]))
            state = int(self._parents[state])
        return tuple(reversed(cuts))


def sum_of(parts: Iterable[Floats]) -> Floats:
    """Return the elementwise sum of at least one array."""
    return functools.reduce(np.add, parts)


def _pareto(first: Floats, second: Floats) -> Ints:
    """Return the positions of pairs that no other pair is at least as good as in both, by increasing first value."""
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((second, first))
    ranked = second[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = ranked[1:] < np.minimum.accumulate(ranked)[:-1]
    return order[keep]


def _trace_back(parent: Sequence[int], count: int) -> Cuts:
    cuts = []
    while count > 0:
        cuts.append(count)
        count = parent[count]
    return tuple(reversed(cuts))
