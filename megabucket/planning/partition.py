"""Optimal cuts: the bucket plan with the shortest step. Pure arithmetic, no torch.

Buckets go out in order on one lane, so cutting the gradients (in ready order) at ``j`` gives the recurrence of MG-WFBP (Shi,
Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019)::

    f(j) = min over i < j of max(f(i), ready(j)) + cost(bytes of i..j)

In reduce-scatter mode the same cuts serve the gather of the parameters in the next forward, as in DeAR (Zhang et al., "DeAR:
Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023). Gathers go in reverse bucket
order, and a tensor waits for its bucket; the forward then ends with the last of ``gathered(b) + forward of all tensors up to
the end of b``, which obeys the same recurrence with that forward time in the place of ``ready``. The search minimises the sum
of both finishing times.

For an affine cost, ``latency + slope * bytes``, the search is exact, in linear time for one side. Of all plans with the
shortest step (to 1e-12 of it) it returns one with the fewest buckets. A measured table is cut by the line that fits it best
and by uniform sizes, and the shortest step on the table itself wins: docs/plan-and-simulate.md says how good that is.

The search works on items: ``elements[k]`` counts the elements of the first ``k`` of them, cuts are the numbers of items at
which buckets end, the last of them all. Tensors without elements are no items: they never cost a bucket of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, TypeAlias

from typing_extensions import Unpack

from megabucket.errors import InvariantError
from megabucket.planning.cuts import BucketPlan, uniform_plan
from megabucket.planning.links import Affine, Link
from megabucket.planning.simulate import HostCosts, Mode, SyncOptions, simulate_step_s
from megabucket.planning.workload import Workload
from megabucket.trace import CollectiveKind

Cuts: TypeAlias = tuple[int, ...]
Finishes: TypeAlias = tuple[float, ...]

TOLERANCE: Final = 1e-12
"""Times that differ by less than this fraction count as equal: sums of floats in another order differ by as much."""

_LOOSEST: Final = 1e-6
_HOST_FACTORS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_UNIFORM_SIZES: Final = 100
_MANY_TENSORS: Final = 2_000
_PARTS_OF_SLACK: Final = 64


def optimal_plan(
    workload: Workload, link: Link, *, host: HostCosts | None = None, **options: Unpack[SyncOptions]
) -> BucketPlan:
    """Return the plan with the shortest step of all plans whose buckets are contiguous in ready order.

    Sizes are those of the tensors: padding and alignment, which a layout adds, are not in it.

    Args:
        host: the costs of the host. The search has one lane, in which a bucket's cost to the host is a longer collective. Its
            cost to the thread that computes is not felt there as long as collectives are hidden, so the search alone would cut
            too finely. It is made for hosts from one that costs nothing to a very slow one, and the plan with the shortest
            step on this one is returned; of equally short steps the one with fewer buckets.

    Raises:
        ConfigError: the link does not know the cost of a collective.

    >>> from megabucket.planning.links import FlatLink
    >>> from megabucket.planning.workload import TensorWork
    >>> workload = Workload((TensorWork("first", 1, 1.0), TensorWork("big", 9, 3.0), TensorWork("head", 5, 2.0)))
    >>> link = FlatLink(latency_s=1.1, seconds_per_byte=0.1)  # a bucket more for "big" would save less than its latency
    >>> optimal_plan(workload, link, num_ranks=2, mode=Mode.ALL_REDUCE).cut_names(workload)
    ('head', 'first')
    """
    problem = _Problem(workload, link, **options)
    plans = []
    for factor in _HOST_FACTORS if host is not None else (0.0,):
        plans.append(problem.solve((host or HostCosts()).times(factor)))
        if len(plans[-1].buckets) == 1:
            break
    if not link.is_affine:
        steps = range(0, _UNIFORM_SIZES, 1 + len(workload.tensors) // _MANY_TENSORS)
        plans += [uniform_plan(workload, size) for size in {1, *(int(workload.numel * 0.9**step) or 1 for step in steps)}]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: (simulate_step_s(workload, plan, link, host=host, **options), len(plan.buckets)))


def fewest_buckets_plan(
    workload: Workload, link: Link, slack_s: float, *, host: HostCosts | None = None, **options: Unpack[SyncOptions]
) -> BucketPlan:
    """Return a plan with the fewest buckets of all whose step is at most ``slack_s`` longer than the shortest.

    Exact like the search of ``optimal_plan`` on its line, where there are two sides to 1/64 of the slack. Costs of the host
    and the points of a table shift the step that comes out: simulate it before relying on the slack.

    Raises:
        ConfigError: the link does not know the cost of a collective.
    """
    return _Problem(workload, link, **options).solve(host or HostCosts(), slack_s=slack_s)


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
        ConfigError: the link does not know the cost of a collective.
    """
    problem = _Problem(workload, link, is_one_buffer=is_one_buffer, **options)
    ranks = [options["num_ranks"] if ranks_of is None else ranks_of[index] for index in problem.items]
    numels = [workload.tensors[index].numel for index in problem.items]
    total_s = workload.compute_s - workload.backward_s  # backward is a side; forward is one as well where there are gathers
    for index, side in enumerate(problem.sides):
        width = side.bytes_per_element
        lines = {count: link.least(side.kind, count, side.dtype, sum(numels) * width) for count in set(ranks)}
        latency_s = min((line.latency_s for line in lines.values()), default=0.0)
        sent_s = [lines[count].seconds_per_byte * width * numel for count, numel in zip(ranks, numels, strict=True)]
        bound_s, left_s = side.floor_s, 0.0
        for due_s, own_s in sorted(zip(side.due_s, sent_s, strict=True), reverse=True):
            left_s += own_s
            bound_s = max(bound_s, due_s + latency_s + left_s)
        total_s += bound_s - (side.floor_s if index else 0.0)
    return total_s


@dataclass(frozen=True, slots=True)
class Side:
    """One pass with its communication: the reductions of backward, or the gathers of forward seen from its end.

    Args:
        due_s: when the lane may begin with each item, in seconds; never decreasing.
        floor_s: the seconds of the pass without communication.
        kind, dtype, bytes_per_element: of its collectives.
    """

    due_s: tuple[float, ...]
    floor_s: float
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE
    dtype: str = "float32"
    bytes_per_element: int = 1


class _Problem:
    """Where to cut one workload on one link: a side for backward and, with shards, one for forward."""

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
        self._link, self._num_ranks, self._order = link, num_ranks, workload.order
        self._positions = [place for place, index in enumerate(workload.order) if workload.tensors[index].numel > 0]
        self.items = items = [self._order[place] for place in self._positions]
        self.elements = tuple(accumulate((workload.tensors[index].numel for index in items), initial=0))
        total_s = workload.backward_s
        due_s = tuple(workload.ready_s[index] if overlap_grad_reduce else total_s for index in items)
        self.sides = [Side(due_s, total_s, Mode(mode).reduce_kind, workload.grad_dtype, workload.bytes_per_element)]
        if Mode(mode) is Mode.REDUCE_SCATTER:
            # The rest of forward from the first need of any item so far; nothing hides a gather that runs alone. The
            # running maximum is right also when the recorded order is not the reverse of forward: an earlier bucket is
            # gathered later, so where it is needed sooner as well, its own term is the larger one.
            total_s = workload.forward_s if overlap_param_gather else 0.0
            left_s = (total_s - workload.needed_s[index] if overlap_param_gather else 0.0 for index in items)
            width, dtype = workload.param_bytes_per_element, workload.param_dtype
            due_s = tuple(accumulate(left_s, max) if is_one_buffer else left_s)
            self.sides.append(Side(due_s, total_s, CollectiveKind.ALL_GATHER, dtype, width))

    def solve(self, host: HostCosts, *, slack_s: float = 0.0) -> BucketPlan:
        """Return the best plan when a bucket also takes the lane for as long as it takes the host.

        Args:
            slack_s: how much longer than the shortest step it may take, to save buckets.
        """
        extra_s = (host.launch_s + host.finish_s, host.update_s + host.gather_finish_s)
        costs = []
        for side, extra in zip(self.sides, extra_s, strict=False):
            line = self._link.affine(side.kind, self._num_ranks, side.dtype)
            costs.append(Affine(line.latency_s + extra, line.seconds_per_byte * side.bytes_per_element))
        buckets: list[tuple[int, ...]] = []
        start = 0
        for cut in shortest_cuts(self.elements, self.sides, costs, slack_s=slack_s) if self._positions else ():
            stop = self._positions[cut - 1] + 1
            buckets.append(self._order[start:stop])
            start = stop
        if start < len(self._order):  # tensors after the last item send nothing
            buckets.append(self._order[start:])
        return BucketPlan(tuple(buckets))


# The search, for one side or two #


def shortest_cuts(elements: Sequence[int], sides: Sequence[Side], costs: Sequence[Affine], *, slack_s: float = 0.0) -> Cuts:
    """Return the cuts with the smallest sum of finishes, and of those the fewest.

    Whether any cuts finish by ``x`` on one side and by ``y`` on the other is decided in one pass (``fewest``). So the
    smallest ``y`` for an ``x`` is found by bisection. It never decreases when ``x`` decreases, so ``x_low + y(x_high)`` is a
    lower bound of all sums between ``x_low`` and ``x_high``: branch and bound over intervals of ``x``.

    Args:
        costs: of a collective on each side, in elements.
        slack_s: how much larger than the smallest the sum may be; of all such cuts the fewest are returned.
    """
    search = _Search(elements, sides, costs)
    lowest = [max(finish_times(elements, side.due_s, cost)[-1], side.floor_s) for side, cost in zip(sides, costs, strict=True)]
    if len(sides) == 1:
        return search.fewest_near([lowest[0] + slack_s])
    # The two ends of the front: each side as short as it can be, the other as short as that allows.
    first, second = search.smallest(1, lowest[0], lowest[1]), search.smallest(0, lowest[1], lowest[0])
    if first is None or second is None:
        raise InvariantError("no cuts reach a time that the recurrence has found; please report the workload")
    best = min(first, second, key=sum)
    intervals = [(lowest[0], second[0], second[1])]
    while intervals:
        low_s, high_s, second_s = intervals.pop()
        # No cuts with a first time in this interval have a smaller sum than its lower end and the second time of its upper end.
        if low_s + second_s >= sum(best) * (1 - TOLERANCE) or high_s - low_s <= TOLERANCE * sum(best):
            continue
        middle_s = (low_s + high_s) / 2
        point = search.smallest(1, middle_s, second_s, at_most_s=sum(best) - low_s)
        if point is not None:
            best = min(best, point, key=sum)
            intervals.append((low_s, min(point[0], middle_s), point[1]))
        intervals.append((middle_s, high_s, second_s))
    cuts = search.fewest_near(best)
    return search.fewest_within(sum(best), slack_s, lowest, cuts) if slack_s else cuts


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

    def fewest_within(self, shortest_s: float, slack_s: float, lowest_s: Sequence[float], known: Cuts) -> Cuts:
        """Return the fewest cuts of two sides whose finishes sum to ``shortest_s + slack_s`` at most.

        While the first time lies in an interval, the second one has at most what the interval's lower end leaves: the fewest
        cuts for that bound all of them from below, and those for what its upper end leaves are short enough. Branch and bound
        over intervals, down to 1/64 of the slack: no cuts that keep that distance from the sum are fewer.

        Args:
            lowest_s: the earliest finish of each side.
            known: cuts that are short enough.
        """
        most_s = shortest_s + slack_s
        best, intervals = known, [(lowest_s[0], most_s - lowest_s[1])]
        while intervals:
            low_s, high_s = intervals.pop()
            bound, found = (self.fewest([high_s, most_s - other_s]) for other_s in (low_s, high_s))
            if found is not None and len(found) < len(best):
                best = found
            if bound is not None and len(bound) < len(best) and high_s - low_s > slack_s / _PARTS_OF_SLACK:
                middle_s = (low_s + high_s) / 2
                intervals += [(low_s, middle_s), (middle_s, high_s)]
        return best

    def smallest(self, side: int, other_s: float, known_s: float, *, at_most_s: float = inf) -> Finishes | None:
        """Return the finishes of the cuts that finish one of two sides earliest, of those that finish the other in time.

        Args:
            side: the side to finish early, 0 or 1.
            other_s: the limit of the other one.
            known_s: a lower bound of the side's finish.
            at_most_s: ``None`` is returned when the side would finish later than this.
        """

        def reached(limit_s: float) -> Finishes | None:
            limits_s = [other_s * (1 + TOLERANCE)] * 2
            limits_s[side] = limit_s
            cuts = self.fewest(limits_s)
            return None if cuts is None else self.finishes(cuts)

        best = reached(known_s * (1 + TOLERANCE))
        if best is not None:
            return best
        best = reached(at_most_s)
        if best is None:
            return None
        low_s, high_s = known_s, best[side]
        while high_s - low_s > TOLERANCE * high_s:
            middle_s = (low_s + high_s) / 2
            found = reached(middle_s)
            if found is None:
                low_s = middle_s
            else:
                best = found
                high_s = min(middle_s, best[side])
        return best

    def finishes(self, cuts: Cuts) -> Finishes:
        """Return when each side is done with these cuts: the recurrence."""
        return tuple(self._finish_s(cuts, side, cost) for side, cost in zip(self._sides, self._costs, strict=True))

    def _finish_s(self, cuts: Cuts, side: Side, cost: Affine) -> float:
        finish, start = 0.0, 0
        for cut in cuts:
            finish = max(finish, side.due_s[cut - 1]) + cost(self._elements[cut] - self._elements[start])
            start = cut
        return max(finish, side.floor_s)
