"""Exact search for the best cuts when a collective costs ``latency + slope * elements``. Pure arithmetic, no torch.

Works on items: ``elements[k]`` counts the elements of the first ``k`` items, cuts are the numbers of items at which buckets
end, the last of them all. Called by ``partition``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from megabucket.errors import InvariantError
from megabucket.planning.links import Affine

Cuts: TypeAlias = tuple[int, ...]

TOLERANCE: Final = 1e-12
"""Times that differ by less than this fraction count as equal: sums of floats in another order differ by as much."""

_LOOSEST: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Side:
    """One pass with its communication: the reductions of backward, or the gathers of forward seen from its end.

    Args:
        due_s: when the lane may begin with each item, in seconds; never decreasing.
        floor_s: what the pass takes without communication.
    """

    due_s: tuple[float, ...]
    floor_s: float


def finish_times(elements: Sequence[int], due_s: Sequence[float], cost: Affine) -> list[float]:
    """Return the earliest finish of the first ``k`` items for every ``k``, in linear time.

    ``f`` never decreases, so the ``i`` with ``f(i) <= due(j)`` are the first ones, and as ``due`` never decreases, ever more of
    them. Among these the lane waits for the gradient, and the largest ``i`` sends least. Among the others the lane is busy,
    and ``f(i) - slope * elements(i)`` decides alone: a minimum over a window whose both ends only move right, kept by a
    monotone queue.
    """
    latency_s, slope = cost
    finish = [0.0]
    window: deque[tuple[float, int]] = deque()  # (f(i) - slope * elements(i), i), both increasing
    slack = 0  # the largest i with f(i) <= due(j), of those that come before j
    for j, due in enumerate(due_s, start=1):
        before = j - 1
        key = finish[before] - slope * elements[before]
        while window and window[-1][0] >= key:
            window.pop()
        window.append((key, before))
        while slack < before and finish[slack + 1] <= due:
            slack += 1
        while window and window[0][1] <= slack:
            window.popleft()
        send_s = latency_s + slope * elements[j]
        best_s = max(finish[slack], due) - slope * elements[slack] + send_s
        if window:
            best_s = min(best_s, window[0][0] + send_s)
        finish.append(best_s)
    return finish


def shortest_one_sided(elements: Sequence[int], side: Side, cost: Affine) -> Cuts:
    """Return the cuts with the earliest finish, and of those the fewest."""
    finish_s = max(finish_times(elements, side.due_s, cost)[-1], side.floor_s)
    search = _Search(elements, (side,), (cost,))
    return search.fewest_near((finish_s,))


def shortest_two_sided(elements: Sequence[int], sides: tuple[Side, Side], costs: tuple[Affine, Affine]) -> Cuts:
    """Return the cuts with the smallest sum of both finishes.

    Whether any cuts finish by ``x`` on one side and by ``y`` on the other is decided in one pass (``_Search.fewest``). So the
    smallest ``y`` for an ``x`` is found by bisection. It never decreases when ``x`` decreases, so ``x_low + y(x_high)`` is a
    lower bound of all sums between ``x_low`` and ``x_high``: branch and bound over intervals of ``x``.
    """
    search = _Search(elements, sides, costs)
    lowest = [max(finish_times(elements, side.due_s, cost)[-1], side.floor_s) for side, cost in zip(sides, costs, strict=True)]
    # The two ends of the front: each side as short as it can be, the other as short as that allows.
    first, second = search.smallest_second(lowest[0], lowest[1]), search.smallest_first(lowest[1], lowest[0])
    if first is None or second is None:
        raise InvariantError("no cuts reach a time that the recurrence has found; please report the workload")
    best = min(first, second, key=lambda point: point.total_s)
    intervals = [(lowest[0], second.first_s, second.second_s)]
    while intervals:
        low_s, high_s, second_s = intervals.pop()
        # No cuts with a first time in this interval have a smaller sum than its lower end and the second time of its upper end.
        if low_s + second_s >= best.total_s * (1 - TOLERANCE) or high_s - low_s <= TOLERANCE * best.total_s:
            continue
        middle_s = (low_s + high_s) / 2
        point = search.smallest_second(middle_s, second_s, at_most_s=best.total_s - low_s)
        if point is not None:
            best = min(best, point, key=lambda each: each.total_s)
            intervals.append((low_s, min(point.first_s, middle_s), point.second_s))
        intervals.append((middle_s, high_s, second_s))
    return search.fewest_near((best.first_s, best.second_s))


class _Point(NamedTuple):
    """What some cuts give: the finish of each side."""

    first_s: float
    second_s: float

    @property
    def total_s(self) -> float:
        """The seconds that are minimised."""
        return self.first_s + self.second_s


class _Search:
    """Questions about cuts that finish by given times."""

    def __init__(self, elements: Sequence[int], sides: Sequence[Side], costs: Sequence[Affine]) -> None:
        self._elements = elements
        self._sides = sides
        self._costs = costs

    def fewest(self, limits_s: Sequence[float]) -> Cuts | None:
        """Return the fewest cuts that finish each side by its limit, or ``None`` when there are none.

        Counted from the last bucket, the ``k``-th is in time exactly when ``due + k * latency + slope * (elements from its
        beginning on) <= limit``. Going backwards and taking each bucket as long as it may be is best: a bucket that ends
        earlier is due earlier, so it may begin earlier, whatever comes before it.
        """
        elements, total = self._elements, self._elements[-1]
        terms = [(side.due_s, cost, limit) for side, cost, limit in zip(self._sides, self._costs, limits_s, strict=True)]
        cuts: list[int] = []
        end = len(elements) - 1
        while end > 0:
            cuts.append(end)
            room = float(total)
            for due_s, (latency_s, slope), limit_s in terms:
                left_s = limit_s - due_s[end - 1] - len(cuts) * latency_s
                if left_s < 0:
                    return None
                if left_s < slope * room:
                    room = left_s / slope
            start = bisect_left(elements, total - room)
            if start >= end:
                return None
            end = start
        return tuple(reversed(cuts))

    def fewest_near(self, limits_s: Sequence[float]) -> Cuts:
        """Return the fewest cuts for limits that are known to be possible, up to rounding."""
        tolerance = TOLERANCE
        while tolerance < _LOOSEST:
            cuts = self.fewest([limit * (1 + tolerance) for limit in limits_s])
            if cuts is not None:
                return cuts
            tolerance *= 10
        raise InvariantError(f"no cuts reach {limits_s} s, which a search has found possible; please report the workload")

    def smallest_second(self, first_s: float, known_s: float, at_most_s: float = float("inf")) -> _Point | None:
        """Return the point with the smallest second time among cuts whose first side finishes by ``first_s``.

        Args:
            first_s: limit of the first side.
            known_s: a lower bound of the second time.
            at_most_s: ``None`` is returned when the second time would be more than this.
        """
        return self._smallest(lambda limit: (first_s * (1 + TOLERANCE), limit), 1, known_s, at_most_s)

    def smallest_first(self, second_s: float, known_s: float) -> _Point | None:
        """Return the point with the smallest first time among cuts whose second side finishes by ``second_s``."""
        return self._smallest(lambda limit: (limit, second_s * (1 + TOLERANCE)), 0, known_s, float("inf"))

    def _smallest(
        self, limits: Callable[[float], tuple[float, float]], side: int, known_s: float, at_most_s: float
    ) -> _Point | None:
        cuts = self.fewest(limits(known_s * (1 + TOLERANCE)))
        if cuts is not None:
            return self._point(cuts)
        cuts = self.fewest(limits(at_most_s))
        if cuts is None:
            return None
        best = self._point(cuts)
        low_s, high_s = known_s, best[side]
        while high_s - low_s > TOLERANCE * high_s:
            middle_s = (low_s + high_s) / 2
            cuts = self.fewest(limits(middle_s))
            if cuts is None:
                low_s = middle_s
            else:
                best = self._point(cuts)
                high_s = min(middle_s, best[side])
        return best

    def _point(self, cuts: Cuts) -> _Point:
        elements = self._elements
        times = []
        for side, (latency_s, slope) in zip(self._sides, self._costs, strict=True):
            finish_s, start = 0.0, 0
            for cut in cuts:
                finish_s = max(finish_s, side.due_s[cut - 1]) + latency_s + slope * (elements[cut] - elements[start])
                start = cut
            times.append(max(finish_s, side.floor_s))
        return _Point(*times)
