"""Optimal cuts: the bucket plan with the shortest step. Pure arithmetic, no torch.

Buckets go out in order on one lane, so cutting the gradients (in ready order) at ``j`` gives the recurrence of MG-WFBP (Shi,
Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019)::

    f(j) = min over i < j of max(f(i), ready(j)) + cost(bytes of i..j)

In reduce-scatter mode the same cuts serve the gather of the parameters in the next forward, as in DeAR (Zhang et al., "DeAR:
Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023). Gathers go in reverse bucket
order, and a tensor waits for its bucket; the forward then ends with the last of ``gathered(b) + forward of all tensors up to
the end of b``, which obeys the same recurrence with that forward time in the place of ``ready``. What is minimised is the sum
of both finishing times.

For an affine cost, ``latency + slope * bytes``, the search is exact, in linear time for one side. Of all plans with the
shortest step (to 1e-12 of it) it returns one with the fewest buckets. Under any other cost, a measured table above all, it
takes the best of uniform sizes and improves on it by the recurrence, with cuts at a limited number of places:
docs/plan-and-simulate.md says how good that is.

The search works on items: ``elements[k]`` counts the elements of the first ``k`` of them, cuts are the numbers of items at
which buckets end, the last of them all. Tensors without elements are no items: they never cost a bucket of their own.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from typing_extensions import Unpack

from megabucket.errors import InvariantError
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import Affine, Link, MeasuredLink
from megabucket.planning.simulate import HostCosts, Mode, SyncOptions, simulate_step_s
from megabucket.planning.workload import Workload
from megabucket.trace import CollectiveKind

Cuts: TypeAlias = tuple[int, ...]

TOLERANCE: Final = 1e-12
"""Times that differ by less than this fraction count as equal: sums of floats in another order differ by as much."""

_LOOSEST: Final = 1e-6
_HOST_FACTORS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_UNIFORM_SIZES: Final = 40
_PLACES: Final = 300
_FRONT: Final = 2


def optimal_plan(
    workload: Workload, link: Link, *, host: HostCosts | None = None, **options: Unpack[SyncOptions]
) -> BucketPlan:
    """Return the plan with the shortest step of all plans whose buckets are contiguous in ready order.

    Sizes are those of the tensors: padding and alignment, which a layout adds, are not in it.

    Args:
        host: what the host adds. The search has one lane, in which a bucket's cost to the host is a longer collective. What it
            costs the thread that computes is not felt there as long as collectives are hidden, so the search alone would cut
            too finely: it is made for hosts from one that costs nothing to a very slow one, and the plan with the shortest
            step on this one is returned; of equally short steps the one with fewer buckets.

    Raises:
        ConfigError: the link cannot say what a collective costs.

    >>> from megabucket.planning.links import FlatLink
    >>> from megabucket.planning.workload import TensorWork
    >>> workload = Workload((TensorWork("first", 1, 1.0), TensorWork("big", 9, 3.0), TensorWork("head", 5, 2.0)))
    >>> link = FlatLink(latency_s=1.1, seconds_per_byte=0.1)  # a bucket more for "big" would save less than its latency
    >>> optimal_plan(workload, link, num_ranks=2, mode=Mode.ALL_REDUCE).cut_names(workload)
    ('head', 'first')
    """
    problem = _Problem(workload, link, **options)
    if host is None:
        return problem.solve(HostCosts())
    plans = []
    for factor in _HOST_FACTORS:
        plans.append(problem.solve(host.times(factor)))
        if len(plans[-1].buckets) == 1:
            break
    return min(plans, key=lambda plan: (simulate_step_s(workload, plan, link, host=host, **options), len(plan.buckets)))


def lower_bound_s(
    workload: Workload,
    link: Link,
    *,
    ranks_of: Sequence[int] | None = None,
    is_one_buffer: bool = True,
    **options: Unpack[SyncOptions],
) -> float:
    """Return seconds that no plan with buckets in ready order can beat, found without a search.

    Gradient ``j`` and all that become ready after it are sent after ``ready(j)``, in at least one collective. So a backward
    with its communication takes at least ``ready(j) + cost of that many bytes`` for every ``j``; the forward likewise, counted
    from its end. A step without a collective at its end (``step_collectives``) is meant.

    Args:
        ranks_of: the ranks that each tensor is reduced over, where these are not the same for all.
        is_one_buffer: whether each bucket waits for all tensors before its own. Buckets of another buffer may close, and be
            sent, earlier; then each tensor is bounded by its own times only.

    Raises:
        ConfigError: the link cannot say what a collective costs.
    """
    problem = _Problem(workload, link, is_one_buffer=is_one_buffer, **options)
    ranks = [options["num_ranks"] if ranks_of is None else ranks_of[index] for index in problem.items]
    numels = [workload.tensors[index].numel for index in problem.items]
    total_s = workload.compute_s - workload.backward_s  # backward is a side; forward is one as well where there are gathers
    for index, (side, cost) in enumerate(zip(problem.sides, problem.costs, strict=True)):
        lines = {count: replace(cost, num_ranks=count).least(sum(numels)) for count in set(ranks)}
        latency_s = min((line.latency_s for line in lines.values()), default=0.0)
        remaining = Counter[int]()
        for count, numel in zip(ranks, numels, strict=True):
            remaining[count] += numel
        bound_s = side.floor_s
        for due_s, count, numel in sorted(zip(side.due_s, ranks, numels, strict=True)):
            sent_s = sum(line.seconds_per_byte * remaining[each] for each, line in lines.items())
            bound_s = max(bound_s, due_s + latency_s + sent_s)
            remaining[count] -= numel
        total_s += bound_s - (side.floor_s if index else 0.0)
    return total_s


@dataclass(frozen=True, slots=True)
class Side:
    """One pass with its communication: the reductions of backward, or the gathers of forward seen from its end.

    Args:
        due_s: when the lane may begin with each item, in seconds; never decreasing.
        floor_s: what the pass takes without communication.
    """

    due_s: tuple[float, ...]
    floor_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one collective of so many elements, on one link."""

    link: Link
    kind: CollectiveKind
    num_ranks: int
    dtype: str = "float32"
    bytes_per_element: int = 1
    extra_s: float = 0.0
    """Added to each: what a bucket costs the host."""

    def __call__(self, numel: float) -> float:
        """Return the seconds.

        Raises:
            ConfigError: the link cannot say.
        """
        return self.link.collective_s(self.kind, numel * self.bytes_per_element, self.num_ranks, self.dtype) + self.extra_s

    @property
    def line(self) -> Affine | None:
        """Latency, and seconds per element, where that is exactly what it costs."""
        line = self.link.affine(self.kind, self.num_ranks, self.dtype)
        return line and Affine(line.latency_s + self.extra_s, line.seconds_per_byte * self.bytes_per_element)

    def least(self, most: int) -> Affine:
        """Return a line that the cost of any set of collectives with ``most`` elements in all is never below."""
        if self.line is not None or not isinstance(self.link, MeasuredLink) or not most:
            return self.line or Affine(0.0, 0.0)
        # Between two points time per byte is largest or smallest at one of them, so the best rate is at a point.
        sizes = (size / self.bytes_per_element for size, _ in self.link.points(self.kind, self.dtype))
        return Affine(0.0, min(self(size) / size for size in (*sizes, most) if 0 < size <= most))


class _Problem:
    """Where to cut one workload on one link: a side and its cost for backward and, with shards, for forward."""

    def __init__(
        self,
        workload: Workload,
        link: Link,
        *,
        num_ranks: int,
        mode: Mode,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        is_one_buffer: bool = True,
    ) -> None:
        tensors, self._order = workload.tensors, workload.order
        self._positions = [position for position, index in enumerate(self._order) if tensors[index].numel > 0]
        self.items = items = [self._order[position] for position in self._positions]
        self.elements = tuple(accumulate((tensors[index].numel for index in items), initial=0))
        total_s = workload.backward_s
        due_s = tuple(workload.ready_s[index] if overlap_grad_reduce else total_s for index in items)
        self.sides = [Side(due_s, total_s)]
        self.costs = [Cost(link, Mode(mode).reduce_kind, num_ranks, workload.grad_dtype, workload.bytes_per_element)]
        if Mode(mode) is Mode.REDUCE_SCATTER:
            # What is left of forward from the first need of any item so far; nothing hides a gather that runs alone. The
            # running maximum is right also when the recorded order is not the reverse of forward: an earlier bucket is
            # gathered later, so where it is needed sooner as well, its own term is the larger one.
            total_s = workload.forward_s if overlap_param_gather else 0.0
            left_s = (total_s - workload.needed_s[index] if overlap_param_gather else 0.0 for index in items)
            self.sides.append(Side(tuple(accumulate(left_s, max) if is_one_buffer else left_s), total_s))
            width, dtype = workload.param_bytes_per_element, workload.param_dtype
            self.costs.append(Cost(link, CollectiveKind.ALL_GATHER, num_ranks, dtype, width))

    def solve(self, host: HostCosts) -> BucketPlan:
        """Return the best plan when a bucket also takes the lane for as long as it takes the host."""
        extra_s = (host.launch_s + host.finish_s, host.update_s + host.gather_finish_s)
        costs = [replace(cost, extra_s=extra) for cost, extra in zip(self.costs, extra_s, strict=False)]
        buckets: list[tuple[int, ...]] = []
        start = 0
        for cut in shortest_cuts(self.elements, self.sides, costs) if self._positions else ():
            stop = self._positions[cut - 1] + 1
            buckets.append(self._order[start:stop])
            start = stop
        if start < len(self._order):  # what comes after the last item sends nothing
            buckets.append(self._order[start:])
        return BucketPlan(tuple(buckets))


def shortest_cuts(elements: Sequence[int], sides: Sequence[Side], costs: Sequence[Cost]) -> Cuts:
    """Return the cuts with the smallest sum of finishes: the exact ones for affine costs, good ones for others."""
    lines = [line for cost in costs if (line := cost.line) is not None]
    if len(lines) == len(costs):
        return _shortest_by_lines(elements, sides, lines)
    best = min(_uniform_cuts(elements), key=lambda cuts: (_total_s(elements, sides, costs, cuts), len(cuts)))
    return _shorter_on_grid(elements, sides, costs, best) or best


def _shorter_on_grid(elements: Sequence[int], sides: Sequence[Side], costs: Sequence[Cost], known: Cuts) -> Cuts | None:
    """Return the best cuts at some places, among them the known ones, or ``None`` when none are shorter than these.

    By the recurrence, with the finishes of all sides that no others beat on every side, a few at each place. One is dropped
    when it cannot lead to less than what is known: what is left to send takes no less than its elements at the best rate.
    """
    stride = -(-len(elements) // _PLACES)
    places = sorted({*range(stride, len(elements), stride), *(known if len(known) < _PLACES else known[-1:])})
    least = [cost.least(elements[-1]).seconds_per_byte for cost in costs]
    known_s = _total_s(elements, sides, costs, known) * (1 - TOLERANCE)
    price = functools.cache(lambda numel: [cost(numel) for cost in costs])
    fronts: dict[int, list[tuple[list[float], Cuts]]] = {0: [([0.0] * len(sides), ())]}
    for place in places:
        found = []
        left_s = [rate * (elements[-1] - elements[place]) for rate in least]
        dues_s, floors_s = [side.due_s[place - 1] for side in sides], [side.floor_s for side in sides]
        for start, front in fronts.items():
            sends_s = price(elements[place] - elements[start])
            for before_s, cuts in front:
                ends_s = list(map(operator.add, map(max, before_s, dues_s), sends_s))
                total_s = sum(map(max, map(operator.add, ends_s, left_s), floors_s))
                if total_s < known_s:
                    found.append((total_s, ends_s, cuts))
        kept: list[tuple[list[float], Cuts]] = []
        for _, ends_s, cuts in sorted(found):
            if len(kept) < _FRONT and not any(all(map(operator.le, other, ends_s)) for other, _ in kept):
                kept.append((ends_s, (*cuts, place)))
        if kept:
            fronts[place] = kept
    shortest = fronts.get(len(elements) - 1)
    return shortest[0][1] if shortest else None


def _shortest_by_lines(elements: Sequence[int], sides: Sequence[Side], lines: Sequence[Affine]) -> Cuts:
    if len(sides) == 1:
        return shortest_one_sided(elements, sides[0], lines[0])
    return shortest_two_sided(elements, (sides[0], sides[1]), (lines[0], lines[1]))


def _total_s(elements: Sequence[int], sides: Sequence[Side], costs: Sequence[Cost], cuts: Cuts) -> float:
    return sum(finish_s(elements, side, cost, cuts) for side, cost in zip(sides, costs, strict=True))


def _uniform_cuts(elements: Sequence[int]) -> Iterator[Cuts]:
    size = elements[-1]
    for _ in range(_UNIFORM_SIZES):
        cuts = [0]
        while cuts[-1] < len(elements) - 1:
            cuts.append(min(bisect_left(elements, elements[cuts[-1]] + size), len(elements) - 1))
        yield tuple(cuts[1:])
        size = max(size * 3 // 4, 1)


def finish_s(elements: Sequence[int], side: Side, cost: Cost | Affine, cuts: Cuts) -> float:
    """Return when a side is done with these cuts: the recurrence."""
    finish, start = 0.0, 0
    for cut in cuts:
        finish = max(finish, side.due_s[cut - 1]) + cost(elements[cut] - elements[start])
        start = cut
    return max(finish, side.floor_s)


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
        pairs = zip(self._sides, self._costs, strict=True)
        return _Point(*(finish_s(self._elements, side, cost, cuts) for side, cost in pairs))
