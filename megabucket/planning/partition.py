"""Optimal cuts: the bucket plan with the shortest step, exactly. Pure arithmetic, no torch.

Buckets go out in order on one lane, so cutting the gradients (in ready order) at ``j`` gives the recurrence of MG-WFBP (Shi,
Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019)::

    f(j) = min over i < j of max(f(i), ready(j)) + cost(bytes of i..j)

In reduce-scatter mode the same cuts serve the gather of the parameters in the next forward, as in DeAR (Zhang et al., "DeAR:
Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023). Gathers go in reverse bucket
order, and a tensor waits for its bucket; the forward then ends with the last of ``gathered(b) + forward of all tensors up to
the end of b``, which obeys the same recurrence with that forward time in the place of ``ready``. What is minimised is the sum
of both finishing times.

``partition_affine`` does this for an affine cost, in linear time for one side; ``partition_table`` for any cost, in quadratic
time. Of all plans with the shortest step (to 1e-12 of it) the affine search returns one with the fewest buckets.

Tensors without elements send nothing: they never cost a bucket of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megabucket.planning.cuts import BucketPlan
from megabucket.planning.links import Affine, Link, MeasuredLink
from megabucket.planning.partition_affine import Cuts, Side, shortest_one_sided, shortest_two_sided
from megabucket.planning.simulate import Mode
from megabucket.planning.workload import Workload
from megabucket.trace import CollectiveKind


def optimal_plan(
    workload: Workload,
    link: Link,
    *,
    num_ranks: int,
    mode: Mode,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
) -> BucketPlan:
    """Return the plan with the shortest step of all plans whose buckets are contiguous in ready order.

    Sizes are those of the tensors: padding and alignment, which a layout adds, are not in it.

    Raises:
        ConfigError: the link cannot say what a collective costs.

    >>> from megabucket.planning.links import FlatLink
    >>> from megabucket.planning.workload import TensorWork
    >>> workload = Workload((TensorWork("first", 1, 1.0), TensorWork("big", 9, 3.0), TensorWork("head", 5, 2.0)))
    >>> link = FlatLink(latency_s=1.1, seconds_per_byte=0.1)  # a bucket more for "big" would save less than its latency
    >>> optimal_plan(workload, link, num_ranks=2, mode=Mode.ALL_REDUCE).cut_names(workload)
    ('head', 'first')
    """
    items = _Items.of(workload)
    if not items.numels:
        return BucketPlan((workload.order,))
    reduce_kind = CollectiveKind.ALL_REDUCE if Mode(mode) is Mode.ALL_REDUCE else CollectiveKind.REDUCE_SCATTER
    sides = [_reduce_side(workload, items, overlaps=overlap_grad_reduce)]
    kinds = [(reduce_kind, workload.grad_dtype, workload.bytes_per_element)]
    if Mode(mode) is Mode.REDUCE_SCATTER:
        sides.append(_gather_side(workload, items, overlaps=overlap_param_gather))
        kinds.append((CollectiveKind.ALL_GATHER, workload.param_dtype, workload.param_bytes_per_element))
    costs = [link.affine(kind, num_ranks, dtype) for kind, dtype, _ in kinds]
    elements = tuple(accumulate(items.numels, initial=0))
    affine = [Affine(cost[0], cost[1] * kind[2]) for cost, kind in zip(costs, kinds, strict=True) if cost is not None]
    if len(affine) == len(sides):
        if len(sides) == 1:
            return items.plan(shortest_one_sided(elements, sides[0], affine[0]))
        return items.plan(shortest_two_sided(elements, (sides[0], sides[1]), (affine[0], affine[1])))
    from megabucket.planning.partition_table import Curve, shortest_by_table

    curves = [Curve(link, kind, num_ranks, dtype, bytes_per_element) for kind, dtype, bytes_per_element in kinds]
    return items.plan(shortest_by_table(elements, sides, curves))


def lower_bound_s(
    workload: Workload,
    link: Link,
    *,
    num_ranks: int,
    mode: Mode,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
) -> float:
    """Return seconds that no plan with buckets in ready order can beat, found without a search.

    Gradient ``j`` and all that become ready after it are sent after ``ready(j)``, in at least one collective. So a backward
    with its communication takes at least ``ready(j) + cost of that many bytes`` for every ``j``; the forward likewise, counted
    from its end. A step without a collective at its end (``step_collectives``) is meant.

    Raises:
        ConfigError: the link cannot say what a collective costs.
    """
    items = _Items.of(workload)
    steps_s = workload.compute_s - workload.backward_s
    reduce_side = _reduce_side(workload, items, overlaps=overlap_grad_reduce)
    is_sharded = Mode(mode) is Mode.REDUCE_SCATTER
    kind = CollectiveKind.REDUCE_SCATTER if is_sharded else CollectiveKind.ALL_REDUCE
    floor = _Floor(link, kind, num_ranks, workload.grad_dtype, workload.bytes_per_element)
    total_s = steps_s + floor.finish_s(items, reduce_side)
    if is_sharded:
        gather_side = _gather_side(workload, items, overlaps=overlap_param_gather)
        floor = _Floor(link, CollectiveKind.ALL_GATHER, num_ranks, workload.param_dtype, workload.param_bytes_per_element)
        total_s += floor.finish_s(items, gather_side) - gather_side.floor_s
    return total_s


@dataclass(frozen=True, slots=True)
class _Items:
    """The tensors that have elements, in ready order; those without ride along with the next one."""

    order: tuple[int, ...]
    positions: tuple[int, ...]
    """Where in ``order`` each item lies."""
    numels: tuple[int, ...]

    @staticmethod
    def of(workload: Workload) -> _Items:
        tensors, order = workload.tensors, workload.order
        positions = tuple(position for position, index in enumerate(order) if tensors[index].numel > 0)
        return _Items(order, positions, tuple(tensors[order[position]].numel for position in positions))

    def plan(self, cuts: Cuts) -> BucketPlan:
        """Return the plan whose buckets end after ``cuts`` items each; what rides after the last item sends nothing."""
        buckets: list[tuple[int, ...]] = []
        start = 0
        for cut in cuts:
            stop = self.positions[cut - 1] + 1
            buckets.append(self.order[start:stop])
            start = stop
        if start < len(self.order):
            buckets.append(self.order[start:])
        return BucketPlan(tuple(buckets))


def _reduce_side(workload: Workload, items: _Items, *, overlaps: bool) -> Side:
    """Return when each item may be reduced; backward ends no earlier than it computes."""
    if not overlaps:
        return Side((workload.backward_s,) * len(items.positions), workload.backward_s)
    ready_s = workload.ready_s
    return Side(tuple(ready_s[items.order[position]] for position in items.positions), workload.backward_s)


def _gather_side(workload: Workload, items: _Items, *, overlaps: bool) -> Side:
    """Return the forward that is left from the first need of any item so far; nothing hides a gather that runs alone.

    The running maximum is right also when the recorded order is not the reverse of forward: an earlier bucket is gathered
    later, so where it is needed sooner as well, its own term is the larger one.
    """
    if not overlaps:
        return Side((0.0,) * len(items.positions), 0.0)
    total_s, needed_s = workload.forward_s, workload.needed_s
    left_s = (total_s - needed_s[items.order[position]] for position in items.positions)
    return Side(tuple(accumulate(left_s, max)), total_s)


@dataclass(frozen=True, slots=True)
class _Floor:
    """Seconds that no set of collectives can beat."""

    link: Link
    kind: CollectiveKind
    num_ranks: int
    dtype: str
    bytes_per_element: int

    def finish_s(self, items: _Items, side: Side) -> float:
        """Return the bound for one side: the largest of ``due + cost of everything from there on``."""
        remaining = sum(items.numels)
        bound_s = side.floor_s
        cost = self._cost(remaining)
        for numel, due_s in zip(items.numels, side.due_s, strict=True):
            bound_s = max(bound_s, due_s + cost.latency_s + cost.seconds_per_byte * remaining * self.bytes_per_element)
            remaining -= numel
        return bound_s

    def _cost(self, total_numel: int) -> Affine:
        """Return an affine cost that the sum over any set of collectives with these many elements at most never undercuts."""
        affine = self.link.affine(self.kind, self.num_ranks, self.dtype)
        if affine is not None:
            return affine
        if not isinstance(self.link, MeasuredLink) or total_numel == 0:
            return Affine(0.0, 0.0)
        # Between two points time per byte is largest or smallest at one of them, so the best rate is at a point.
        total_bytes = total_numel * self.bytes_per_element
        sizes = [size for size, _ in self.link.points(self.kind, self.dtype) if 0 < size < total_bytes]
        times = [self.link.collective_s(self.kind, size, self.num_ranks, self.dtype) for size in (*sizes, total_bytes)]
        return Affine(0.0, min(time / size for size, time in zip((*sizes, total_bytes), times, strict=True)))
