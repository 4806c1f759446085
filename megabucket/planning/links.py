"""Links: what one collective costs in seconds, as a formula or as a measured table. Pure arithmetic, no torch.

``n`` ranks and a full buffer of ``S`` bytes. The formulas are those of bandwidth-optimal ring algorithms (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009): ``n - 1`` steps for a reduce-scatter, an
all-gather or a pipelined broadcast, twice as many for an all-reduce, ``S / n`` bytes in each.

A collective without bytes is not the business of a link: the simulator sends none.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, Protocol, TypeAlias

from megabucket.errors import ConfigError
from megabucket.trace import CollectiveKind

Point: TypeAlias = tuple[float, float]
"""Bytes of the full buffer and seconds of one collective."""

TableKey: TypeAlias = tuple[CollectiveKind, str]
"""Operation and dtype that a table was measured for."""

MIN_POINTS: Final = 2
"""Points a table needs: one point says nothing about how time grows with size."""


class Affine(NamedTuple):
    """A cost that is exactly ``latency_s + seconds_per_byte * payload_bytes``."""

    latency_s: float
    seconds_per_byte: float

    def __call__(self, payload_bytes: float) -> float:
        """Return the seconds of so many bytes."""
        return self.latency_s + self.seconds_per_byte * payload_bytes


class Link(Protocol):
    """What the simulator and the partitioner ask."""

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective; ``payload_bytes`` is the full buffer, as in ``CollectiveRecord``.

        Raises:
            ConfigError: the link cannot say: an operation or a number of ranks that it knows nothing about.
        """
        ...

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine | None:
        """Return latency and slope when the cost is exactly affine in the bytes, else ``None``."""
        ...


class _AffineLink:
    """A link that is a formula: ``affine`` says all."""

    __slots__ = ()

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective.

        Raises:
            ConfigError: the link cannot say.
        """
        return self.affine(kind, num_ranks, dtype)(payload_bytes)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:
        """Return latency and slope."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FlatLink(_AffineLink):
    """``T = latency_s + seconds_per_byte * payload_bytes`` for any operation and any number of ranks.

    >>> FlatLink(latency_s=1.4e-3, seconds_per_byte=0.95e-9 / 4).collective_s(CollectiveKind.ALL_REDUCE, 4_000_000, 8)
    0.00235
    """

    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        _check_not_negative("FlatLink", latency_s=self.latency_s, seconds_per_byte=self.seconds_per_byte)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:  # noqa: ARG002 - the protocol's
        """Return the two constants."""
        check_question(kind, num_ranks)
        return Affine(self.latency_s, self.seconds_per_byte)


@dataclass(frozen=True, slots=True)
class RingLink(_AffineLink):
    """``n`` ranks on a ring: ``latency_s`` for each step, ``bytes_per_s`` from each rank to the next.

    All-reduce ``2 (n-1) latency + 2 S (n-1)/n / bandwidth``; reduce-scatter, all-gather and broadcast half of it. One rank has
    nobody to talk to: 0.

    >>> ring = RingLink(latency_s=0.0, bytes_per_s=150e9)
    >>> round(ring.collective_s(CollectiveKind.ALL_REDUCE, 7e9 * 2, 1024), 3)  # 7B parameters in bfloat16: 28 GB on the wire
    0.186
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_not_negative("RingLink", latency_s=self.latency_s)
        _check_positive("RingLink", bytes_per_s=self.bytes_per_s)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:  # noqa: ARG002 - the protocol's
        """Return the latency of all steps and the seconds per byte of the full buffer."""
        check_question(kind, num_ranks)
        steps = (num_ranks - 1) * (2 if kind is CollectiveKind.ALL_REDUCE else 1)
        return Affine(steps * self.latency_s, steps / num_ranks / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class TwoLevelLink(_AffineLink):
    """Ranks in equal nodes: one ring inside each node, and one ring between nodes for each position in a node.

    The hierarchical algorithms: an all-reduce is a reduce-scatter inside, an all-reduce of ``S / ranks_per_node`` between and
    an all-gather inside; a reduce-scatter or an all-gather leaves one half of that out.
    """

    inside: RingLink
    between: RingLink
    ranks_per_node: int

    def __post_init__(self) -> None:
        if isinstance(self.ranks_per_node, bool) or not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ConfigError(f"TwoLevelLink: ranks_per_node must be an integer >= 1, got {self.ranks_per_node!r}")

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:
        """Return latency and slope of both levels together.

        Raises:
            ConfigError: the ranks do not fill their nodes.
        """
        check_question(kind, num_ranks)
        per_node = min(num_ranks, self.ranks_per_node)
        if num_ranks % per_node:
            raise ConfigError(
                f"num_ranks={num_ranks} is more than one node and not a multiple of ranks_per_node={self.ranks_per_node}, so "
                "the hierarchical algorithm does not apply; use whole nodes, or a ring link"
            )
        inside = self.inside.affine(kind, per_node, dtype)  # both halves of an all-reduce, or the one half of the others
        between = self.between.affine(kind, num_ranks // per_node, dtype)
        return Affine(inside.latency_s + between.latency_s, inside.seconds_per_byte + between.seconds_per_byte / per_node)


@dataclass(frozen=True, slots=True)
class ReplicatedLink:
    """A grid of replicas, each of ``num_ranks`` shards: a reduce-scatter inside, then an all-reduce of the shard over replicas.

    An all-gather stays inside; an all-reduce and a broadcast go over all ranks. Ranks of one replica are neighbours, so two
    levels have fewer replicas of a shard in a node, or one.
    """

    link: Link
    num_instances: int

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective, with the reduction over replicas behind it.

        Raises:
            ConfigError: the link cannot say.
        """
        if kind is CollectiveKind.ALL_GATHER:
            return self.link.collective_s(kind, payload_bytes, num_ranks, dtype)
        if kind is not CollectiveKind.REDUCE_SCATTER:
            return self.link.collective_s(kind, payload_bytes, num_ranks * self.num_instances, dtype)
        inside_s = self.link.collective_s(kind, payload_bytes, num_ranks, dtype)
        return inside_s + self.over_replicas_s(payload_bytes / num_ranks, num_ranks, dtype)

    def over_replicas_s(self, shard_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of the all-reduce of one shard.

        Raises:
            ConfigError: the link cannot say.
        """
        return self._over(num_ranks).collective_s(CollectiveKind.ALL_REDUCE, shard_bytes, self.num_instances, dtype)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine | None:
        """Return latency and slope when the cost is exactly affine in the bytes, else ``None``."""
        if kind is not CollectiveKind.REDUCE_SCATTER:
            return self.link.affine(kind, num_ranks * (1 if kind is CollectiveKind.ALL_GATHER else self.num_instances), dtype)
        inside = self.link.affine(kind, num_ranks, dtype)
        over = self._over(num_ranks).affine(CollectiveKind.ALL_REDUCE, self.num_instances, dtype)
        if inside is None or over is None:
            return None
        return Affine(inside.latency_s + over.latency_s, inside.seconds_per_byte + over.seconds_per_byte / num_ranks)

    def _over(self, num_ranks: int) -> Link:
        """Return the link between ranks that are ``num_ranks`` apart."""
        if not isinstance(self.link, TwoLevelLink):
            return self.link
        return replace(self.link, ranks_per_node=max(1, self.link.ranks_per_node // num_ranks))


@dataclass(frozen=True)
class MeasuredLink:
    """Measured times: linear between the points of a table, the first point's time below it, the last slope beyond it.

    Args:
        tables: points of each operation and dtype, by increasing bytes. A dtype that was not measured takes the times of one
            that was: bytes are bytes.
        num_ranks: how many ranks measured; the link says nothing about other numbers.

    >>> link = MeasuredLink({(CollectiveKind.ALL_REDUCE, "float32"): ((1000, 1e-3), (3000, 2e-3))}, num_ranks=2)
    >>> [link.collective_s(CollectiveKind.ALL_REDUCE, size, 2) for size in (8, 2000, 5000)]
    [0.001, 0.0015, 0.003]
    """

    tables: Mapping[TableKey, tuple[Point, ...]]
    num_ranks: int

    def __post_init__(self) -> None:
        if not self.tables:
            raise ConfigError("a measured link needs at least one table of points, got none")
        check_question(next(iter(self.tables))[0], self.num_ranks)
        for (kind, dtype), points in self.tables.items():
            check_question(kind, self.num_ranks)
            check_points(points, what=f"the table of {kind.value}, {dtype}")

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective.

        Raises:
            ConfigError: the operation, or this number of ranks, was not measured.
        """
        check_question(kind, num_ranks)
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"this link was measured on {self.num_ranks} ranks and says nothing about {num_ranks}; calibrate there, or "
                "give a ring or two_level link, which are formulas"
            )
        return _interpolate(self.points(kind, dtype), payload_bytes)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> None:
        """Return ``None``: a table is flat below its first point."""

    def points(self, kind: CollectiveKind, dtype: str = "float32") -> tuple[Point, ...]:
        """Return the measured points of an operation, in the dtype or one that stands in for it.

        Raises:
            ConfigError: the operation was not measured.
        """
        table = self.tables.get((kind, dtype)) or self._by_kind.get(kind)
        if table is None:
            measured = ", ".join(sorted({known.value for known, _ in self.tables}))
            raise ConfigError(f"this link has no table for {kind.value}; it was measured for {measured}. Calibrate that too")
        return table

    @cached_property
    def _by_kind(self) -> dict[CollectiveKind, tuple[Point, ...]]:
        """Return the table that stands in for dtypes without one: float32's, else the first."""
        ordered = sorted(self.tables, key=lambda key: key[1] != "float32")
        return {kind: self.tables[kind, dtype] for kind, dtype in reversed(ordered)}


def check_question(kind: object, num_ranks: object) -> None:
    """Refuse what no link can answer.

    Raises:
        ConfigError: not an operation of the communicator port, or not a number of ranks.
    """
    if not isinstance(kind, CollectiveKind):
        known = ", ".join(each.value for each in CollectiveKind)
        raise ConfigError(f"unknown operation {kind!r}; a link knows {known} (as CollectiveKind)")
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ConfigError(f"num_ranks={num_ranks!r} is not a number of ranks; give an integer >= 1")


def check_points(points: tuple[Point, ...], *, what: str) -> None:
    """Refuse a table that no time can be read from.

    Raises:
        ConfigError: fewer than two points, sizes or times that are negative or not finite, sizes that do not increase.
    """
    if len(points) < MIN_POINTS:
        raise ConfigError(
            f"{what} has {len(points)} point{'' if len(points) == 1 else 's'}; at least {MIN_POINTS} sizes are needed to tell "
            "latency from bandwidth"
        )
    for size, seconds in points:
        if not (math.isfinite(size) and size >= 0 and math.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"{what}: ({size!r} bytes, {seconds!r} s) is not a size and a time, finite and not negative")
    for (size, _), (following, _) in itertools.pairwise(points):
        if following <= size:
            problem = "twice" if following == size else "not in increasing order"
            raise ConfigError(f"{what}: {following!r} bytes after {size!r}: sizes are given {problem}; sort them, each once")


def _interpolate(points: tuple[Point, ...], payload_bytes: float) -> float:
    if payload_bytes <= points[0][0]:
        return points[0][1]
    # The segment that holds the size; beyond the last point the last segment, whose slope noise must not turn negative.
    right = min(bisect.bisect_left(points, (payload_bytes, -math.inf)), len(points) - 1)
    (size, seconds), (next_size, next_seconds) = points[right - 1], points[right]
    slope = (next_seconds - seconds) / (next_size - size)
    if payload_bytes > next_size:
        return next_seconds + max(slope, 0.0) * (payload_bytes - next_size)
    return seconds + slope * (payload_bytes - size)


def _check_not_negative(what: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{what}: {name} must be a finite number >= 0, got {value!r}")


def _check_positive(what: str, **values: float) -> None:
    _check_not_negative(what, **values)
    for name, value in values.items():
        if value == 0:
            raise ConfigError(f"{what}: {name} must be more than 0, got {value!r}")


# A straight line through measured collectives #


@dataclass(frozen=True, slots=True)
class AffineFit:
    """``seconds = latency_s + seconds_per_byte * payload_bytes``, and how far the points are from it."""

    latency_s: float
    seconds_per_byte: float
    residual: float
    """Median of ``|fitted - measured| / measured`` over the points."""

    @property
    def line(self) -> Affine:
        """The line alone."""
        return Affine(self.latency_s, self.seconds_per_byte)


def fit_affine(points: Sequence[Point]) -> AffineFit:
    """Return the line with the least squared relative error, its latency and its slope not negative.

    Relative, because the points span orders of magnitude: with absolute errors the largest size alone would decide, and the
    latency would be noise.

    Raises:
        ConfigError: no table of at least two points with increasing sizes.

    >>> fit_affine([(0, 1e-3), (1000, 2e-3), (3000, 4e-3)])
    AffineFit(latency_s=0.001, seconds_per_byte=1e-06, residual=0.0)
    """
    points = tuple((float(size), float(seconds)) for size, seconds in points)
    check_points(points, what="a table to fit")
    timed = [(size, seconds) for size, seconds in points if seconds > 0]
    if not timed:
        return AffineFit(0.0, 0.0, 0.0)
    candidates = [(0.0, _ratio(timed)), (_constant(timed), 0.0)]
    line = _line(timed)
    if line is not None and min(line) >= 0:
        candidates.append(line)
    # The sum of squares is convex, so with a bound that binds the optimum lies on that bound.
    latency_s, slope = min(candidates, key=lambda pair: _squared_error(timed, *pair))
    errors = [abs(latency_s + slope * size - seconds) / seconds for size, seconds in timed]
    return AffineFit(latency_s, slope, statistics.median(errors))


def _squared_error(timed: Sequence[Point], latency_s: float, slope: float) -> float:
    return sum(((latency_s + slope * size) / seconds - 1) ** 2 for size, seconds in timed)


def _line(timed: Sequence[Point]) -> Point | None:
    """Return the unconstrained optimum: the normal equations of ``a / t + b * s / t = 1``."""
    aa = sum(1 / t**2 for _, t in timed)
    ab = sum(s / t**2 for s, t in timed)
    bb = sum((s / t) ** 2 for s, t in timed)
    a1, b1 = sum(1 / t for _, t in timed), sum(s / t for s, t in timed)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return None
    return (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant


def _ratio(timed: Sequence[Point]) -> float:
    """Return the best slope without latency."""
    squares = sum((s / t) ** 2 for s, t in timed)
    return sum(s / t for s, t in timed) / squares if squares else 0.0


def _constant(timed: Sequence[Point]) -> float:
    """Return the best latency without slope."""
    return sum(1 / t for _, t in timed) / sum(1 / t**2 for _, t in timed)
