"""Links: the ``link`` section of a config, which says what one collective costs in seconds. Pure arithmetic, no torch.

``n`` ranks and a full buffer of ``S`` bytes. The formulas are those of bandwidth-optimal ring algorithms (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009): ``n - 1`` steps for a reduce-scatter, an
all-gather or a pipelined broadcast, twice as many for an all-reduce, ``S / n`` bytes in each. An all-to-all is ``n - 1``
messages, one after the other; its ``S`` is the most bytes that a rank sends to others.

The simulator sends no collective without bytes, so a link is not asked for one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import annotated_types as at
import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from typing_extensions import Self

from megabucket.config.ddp import NonNegative, Positive, PositiveCount, Section, read_tuple
from megabucket.errors import ConfigError, printable
from megabucket.planning.documents import find_file, read_yaml, write_text
from megabucket.planning.load import explain_validation_error
from megabucket.trace import CollectiveKind

Point: TypeAlias = tuple[float, float]
"""Bytes of the full buffer and seconds of one collective."""

TableKey: TypeAlias = tuple[CollectiveKind, str]
"""Operation and dtype that a table was measured for."""

Fact: TypeAlias = bool | int | float | str | None

_LEAST_SECONDS_PER_BYTE: Final = 1e-15
"""Of a fitted ring, whose times may not grow with the bytes."""

_Pairs: TypeAlias = Annotated[
    tuple[Annotated[tuple[NonNegative, NonNegative], BeforeValidator(read_tuple)], ...],
    BeforeValidator(read_tuple),
    at.MaxLen(10_000),
]


class Affine(NamedTuple):
    """A cost of ``latency_s + seconds_per_byte * payload_bytes``."""

    latency_s: float
    seconds_per_byte: float

    def __call__(self, payload_bytes: float) -> float:
        """Return the seconds of so many bytes."""
        return self.latency_s + self.seconds_per_byte * payload_bytes


class Link(Section):
    """The cost of a collective, for the simulator and the partitioner."""

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:
        """Return the cost as a straight line: exact where ``is_affine``, else fitted.

        Raises:
            ConfigError: the link cannot say: an operation or a number of ranks that it knows nothing about.
        """
        raise NotImplementedError

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective; ``payload_bytes`` is the full buffer, as in ``CollectiveRecord``.

        For an all-to-all it is the largest number of bytes that a rank sends to others.

        Raises:
            ConfigError: the link cannot say.
        """
        return self.affine(kind, num_ranks, dtype)(payload_bytes)

    def least(self, kind: CollectiveKind, num_ranks: int, dtype: str, most_bytes: float) -> Affine:  # noqa: ARG002 - of tables
        """Return a line that the cost of any set of collectives of ``most_bytes`` in all is never below."""
        return self.affine(kind, num_ranks, dtype)

    @property
    def is_affine(self) -> bool:
        """Whether every cost is exactly affine in the bytes."""
        return True

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of a host, where ranks of one host have a link of their own; ``None``: all ranks are alike."""
        return None

    def within(self, num_ranks: int) -> Link:  # noqa: ARG002 - of other links
        """Return the link of ``num_ranks`` neighbours, as those of a replica."""
        return self

    def across(self, num_ranks: int) -> Link:  # noqa: ARG002 - of other links
        """Return the link between ranks that are ``num_ranks`` apart, as those that hold the same shard in each replica."""
        return self


class FlatLink(Link):
    """Latency and slope, the same for every operation and any number of ranks. The default: ``kind`` may be left out."""

    kind: Literal["flat"] = "flat"
    """Chooses this form of the section."""

    latency_s: NonNegative
    """Seconds of a collective before its first byte."""

    seconds_per_byte: NonNegative
    """Seconds that each byte of the full buffer adds."""

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:  # noqa: ARG002 - of other links
        """Return the two constants.

        >>> FlatLink(latency_s=1.4e-3, seconds_per_byte=0.95e-9 / 4).collective_s(CollectiveKind.ALL_REDUCE, 4_000_000, 8)
        0.00235
        """
        return Affine(self.latency_s, self.seconds_per_byte)


class RingLink(Link):
    """A ring of ranks: ``2 (n-1) latency + 2 S (n-1)/n / bandwidth`` for an all-reduce of ``S`` bytes, half for the others.

    An all-to-all takes ``(n-1) latency + S / bandwidth``, with ``S`` the most bytes that a rank sends to others.
    """

    kind: Literal["ring"] = "ring"
    """Chooses this form of the section."""

    latency_s: NonNegative
    """Seconds from one rank to the next, before the first byte."""

    bytes_per_s: Positive
    """Bytes per second from one rank to the next."""

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:  # noqa: ARG002 - of other links
        """Return the latency of all steps and the seconds per byte of the full buffer; nothing for one rank.

        >>> ring = RingLink(latency_s=0.0, bytes_per_s=150e9)
        >>> round(ring.collective_s(CollectiveKind.ALL_REDUCE, 7e9 * 2, 1024), 3)  # 7B parameters in bfloat16
        0.186
        """
        steps = (num_ranks - 1) * kind.ring_passes
        if kind is CollectiveKind.ALL_TO_ALL:
            return Affine(steps * self.latency_s, 1 / self.bytes_per_s)
        return Affine(steps * self.latency_s, steps / num_ranks / self.bytes_per_s)


class TwoLevelLink(Link):
    """Equal nodes: a ring inside each, and rings between them, used by hierarchical algorithms.

    An all-reduce is a reduce-scatter inside, an all-reduce of ``S / ranks_per_node`` between and an all-gather inside; a
    reduce-scatter or an all-gather leaves one half of that out. An all-to-all sends each other rank a message of the same size,
    inside or between.
    """

    kind: Literal["two_level"] = "two_level"
    """Chooses this form of the section."""

    inside: RingLink
    """The ring of the ranks of one node."""

    between: RingLink
    """The ring of one rank of each node. Bandwidth is that of one rank: the share it has of its node's network."""

    ranks_per_node: PositiveCount
    """Ranks in a node."""

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:
        """Return latency and slope of both levels together.

        Raises:
            ConfigError: the ranks do not fill their nodes.
        """
        per_node = min(num_ranks, self.ranks_per_node)
        if num_ranks % per_node:
            raise ConfigError(
                f"num_ranks={num_ranks} is more than one node and not a multiple of ranks_per_node={self.ranks_per_node}, so "
                "the hierarchical algorithm does not apply; use whole nodes, or a ring link"
            )
        if kind is CollectiveKind.ALL_TO_ALL:
            num_inside, num_between = per_node - 1, num_ranks - per_node  # other ranks
            latency_s = num_inside * self.inside.latency_s + num_between * self.between.latency_s
            seconds = num_inside / self.inside.bytes_per_s + num_between / self.between.bytes_per_s
            return Affine(latency_s, seconds / max(num_ranks - 1, 1))
        inside = self.inside.affine(kind, per_node, dtype)  # both halves of an all-reduce, or the one half of the others
        between = self.between.affine(kind, num_ranks // per_node, dtype)
        return Affine(inside.latency_s + between.latency_s, inside.seconds_per_byte + between.seconds_per_byte / per_node)

    @property
    def ranks_per_host(self) -> int:
        """Ranks of a node."""
        return self.ranks_per_node

    def across(self, num_ranks: int) -> TwoLevelLink:
        """Return the link in which a node has fewer ranks that are so far apart, or one."""
        return self.model_copy(update={"ranks_per_node": max(1, self.ranks_per_node // num_ranks)})


class ReplicatedLink(Link):
    """A grid of replicas, each of ``num_ranks`` shards: a reduce-scatter inside, then an all-reduce of the shard over replicas.

    An all-gather and an all-to-all stay inside; an all-reduce and a broadcast go over all ranks. Ranks of one replica are
    neighbours, so two levels have fewer replicas of a shard in a node, or one.
    """

    link: Link
    num_instances: int

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective, with the reduction over replicas behind it.

        Raises:
            ConfigError: the link cannot say.
        """
        inside_s = self._inside(kind, num_ranks).collective_s(kind, payload_bytes, self._num_inside(kind, num_ranks), dtype)
        if kind is not CollectiveKind.REDUCE_SCATTER:
            return inside_s
        return inside_s + self.over_replicas_s(payload_bytes / num_ranks, num_ranks, dtype)

    def over_replicas_s(self, shard_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of the all-reduce of one shard.

        Raises:
            ConfigError: the link cannot say.
        """
        over = self.link.across(num_ranks)
        return over.collective_s(CollectiveKind.ALL_REDUCE, shard_bytes, self.num_instances, dtype)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:
        """Return latency and slope of both collectives together."""
        inside = self._inside(kind, num_ranks).affine(kind, self._num_inside(kind, num_ranks), dtype)
        if kind is not CollectiveKind.REDUCE_SCATTER:
            return inside
        over = self.link.across(num_ranks).affine(CollectiveKind.ALL_REDUCE, self.num_instances, dtype)
        return _both(inside, over, num_ranks)

    def least(self, kind: CollectiveKind, num_ranks: int, dtype: str, most_bytes: float) -> Affine:
        """Return the least of both collectives together."""
        inside = self._inside(kind, num_ranks).least(kind, self._num_inside(kind, num_ranks), dtype, most_bytes)
        if kind is not CollectiveKind.REDUCE_SCATTER:
            return inside
        over = self.link.across(num_ranks).least(CollectiveKind.ALL_REDUCE, self.num_instances, dtype, most_bytes / num_ranks)
        return _both(inside, over, num_ranks)

    @property
    def is_affine(self) -> bool:
        """As the link between the ranks is."""
        return self.link.is_affine

    def _num_inside(self, kind: CollectiveKind, num_ranks: int) -> int:
        """Return the ranks that take part in the first collective."""
        return num_ranks if _stays_in_replica(kind) else num_ranks * self.num_instances

    def _inside(self, kind: CollectiveKind, num_ranks: int) -> Link:
        """Return the link of the first collective."""
        return self.link.within(num_ranks) if _stays_in_replica(kind) else self.link


def _stays_in_replica(kind: CollectiveKind) -> bool:
    return kind in {CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL}


def _both(inside: Affine, over: Affine, num_shards: int) -> Affine:
    """Return the line of a collective and of one of its shard behind it."""
    return Affine(inside.latency_s + over.latency_s, inside.seconds_per_byte + over.seconds_per_byte / num_shards)


# Measured tables #


class LinkTable(Section):
    """Measured times of one operation and dtype."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    """The collective."""

    dtype: Annotated[str, at.Len(1, 40)] = "float32"
    """Dtype of the buffers."""

    points: Annotated[_Pairs, at.MinLen(2)]
    """At least two pairs of bytes (of the full buffer) and seconds, by increasing bytes.

    Bytes of an ``all_to_all`` are those that a rank sends to others.
    """

    spread_s: _Pairs = ()
    """Lower and upper quartile of the repetitions behind each point. Shown, never used."""

    @model_validator(mode="after")
    def _sizes_increase(self) -> Self:
        for (size, _), (following, _) in itertools.pairwise(self.points):
            if following <= size:
                raise ValueError(f"points: {following!r} bytes after {size!r}; sort them by bytes, each size once")
        return self


class MeasuredLink(Link):
    """Measured times: linear between the points of a table, the first point's time below it, the last slope beyond it.

    ``megabucket calibrate`` writes such a section as ``link.yaml``.
    """

    kind: Literal["table"] = "table"
    """Chooses this form of the section."""

    num_ranks: PositiveCount
    """Ranks that measured; nothing is said about other numbers."""

    tables: Annotated[tuple[LinkTable, ...], BeforeValidator(read_tuple), at.Len(1, 100)]
    """One table for each operation and dtype. A dtype that was not measured takes the times of one that was.

    An ``all_to_all`` that was not measured takes the times of the ``all_gather`` in which a rank sends as many bytes.
    """

    hosts: TwoLevelLink | None = None
    """The lines through the times inside a host and across hosts, where the ranks were on several of them.

    Used for replicas of shards, such as shards inside a host: the tables are those of all ranks together.
    """

    facts: Annotated[dict[str, Fact], at.MaxLen(100)] = Field(default_factory=dict)
    """Where it was measured: device, backend, versions. Shown, never used."""

    @classmethod
    def of(cls, points: Mapping[TableKey, Sequence[Point]], num_ranks: int) -> Self:
        """Return the link of tables that have nothing but points.

        >>> link = MeasuredLink.of({(CollectiveKind.ALL_REDUCE, "float32"): ((1000, 1e-3), (3000, 2e-3))}, num_ranks=2)
        >>> [link.collective_s(CollectiveKind.ALL_REDUCE, size, 2) for size in (8, 2000, 5000)]
        [0.001, 0.0015, 0.003]
        """
        tables = [LinkTable(operation=kind.value, dtype=dtype, points=tuple(each)) for (kind, dtype), each in points.items()]
        return cls(num_ranks=num_ranks, tables=tuple(tables))

    @model_validator(mode="after")
    def _one_table_each(self) -> Self:
        names = [f"{table.operation}, {printable(table.dtype)}" for table in self.tables]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"tables has {twice[0]} twice; keep one of them")
        return self

    @property
    def is_affine(self) -> bool:
        """A table is flat below its first point."""
        return False

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of a host, if the ranks that measured were on several."""
        return None if self.hosts is None else self.hosts.ranks_per_node

    def within(self, num_ranks: int) -> Link:
        """Return the lines by host for fewer ranks than measured the tables."""
        return self if self.hosts is None or num_ranks == self.num_ranks else self.hosts

    def across(self, num_ranks: int) -> Link:
        """Return the lines by host for ranks that are ``num_ranks`` apart."""
        return self if self.hosts is None else self.hosts.across(num_ranks)

    def points(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> tuple[Point, ...]:
        """Return the measured points of an operation, in the dtype or one that stands in for it: float32, else the first.

        An all-to-all without a table has the points of the all-gather, with the bytes ``S (n-1)/n`` that a rank sends in it:
        in both each rank sends to all others and receives from all others.

        Raises:
            ConfigError: the operation, or this number of ranks, was not measured.
        """
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"this link was measured on {self.num_ranks} ranks and says nothing about {num_ranks}; calibrate there, or "
                "give a ring or two_level link, which are formulas"
            )
        tables = [table for table in self.tables if table.operation == kind.value]
        if not tables and kind is CollectiveKind.ALL_TO_ALL:
            sent_fraction = max(num_ranks - 1, 1) / num_ranks
            tables = [
                table.model_copy(update={"points": tuple((size * sent_fraction, seconds) for size, seconds in table.points)})
                for table in self.tables
                if table.operation == CollectiveKind.ALL_GATHER.value
            ]
        if not tables:
            measured = ", ".join(sorted({table.operation for table in self.tables}))
            raise ConfigError(f"this link has no table for {kind.value}; it was measured for {measured}. Calibrate that too")
        return min(tables, key=lambda table: (table.dtype != dtype, table.dtype != "float32")).points

    def collective_s(self, kind: CollectiveKind, payload_bytes: float, num_ranks: int, dtype: str = "float32") -> float:
        """Return the seconds of one collective.

        Raises:
            ConfigError: the operation, or this number of ranks, was not measured.
        """
        points = self.points(kind, num_ranks, dtype)
        if payload_bytes <= points[0][0]:
            return points[0][1]
        # The segment that holds the size; beyond the last point the last segment, whose slope noise must not turn negative.
        right = min(bisect.bisect_left(points, (payload_bytes, -math.inf)), len(points) - 1)
        (size, seconds), (next_size, next_seconds) = points[right - 1], points[right]
        slope = (next_seconds - seconds) / (next_size - size)
        if payload_bytes > next_size:
            return next_seconds + max(slope, 0.0) * (payload_bytes - next_size)
        return seconds + slope * (payload_bytes - size)

    def affine(self, kind: CollectiveKind, num_ranks: int, dtype: str = "float32") -> Affine:
        """Return the fitted line."""
        return fit_affine(self.points(kind, num_ranks, dtype))

    def least(self, kind: CollectiveKind, num_ranks: int, dtype: str, most_bytes: float) -> Affine:
        """Return the best rate at which so many bytes can be sent.

        Between two points time per byte is largest or smallest at one of them, so the best rate is at a point.
        """
        sizes = [size for size, _ in self.points(kind, num_ranks, dtype) if 0 < size <= most_bytes]
        rates = [self.collective_s(kind, size, num_ranks, dtype) / size for size in (*sizes, most_bytes) if size]
        return Affine(0.0, min(rates, default=0.0))


def fit_affine(points: Sequence[Point]) -> Affine:
    """Return the line with the least squared relative error, its latency and its slope not negative.

    Relative, because the points span orders of magnitude: with absolute errors the largest size alone would decide, and the
    latency would be noise.

    >>> fit_affine([(0, 1e-3), (1000, 2e-3), (3000, 4e-3)])
    Affine(latency_s=0.001, seconds_per_byte=1e-06)
    """
    timed = [(float(size), float(seconds)) for size, seconds in points if seconds > 0]
    if not timed:
        return Affine(0.0, 0.0)
    # The normal equations of ``latency / t + slope * s / t = 1``, and of each term alone.
    aa, a1 = sum(1 / t**2 for _, t in timed), sum(1 / t for _, t in timed)
    bb, b1 = sum((s / t) ** 2 for s, t in timed), sum(s / t for s, t in timed)
    ab = sum(s / t**2 for s, t in timed)
    candidates = [Affine(0.0, b1 / bb if bb else 0.0), Affine(a1 / aa, 0.0)]
    if (determinant := aa * bb - ab * ab) > 0:
        candidates.append(Affine((a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant))
    # The sum of squares is convex, so with a bound that binds the optimum lies on that bound.
    lines = (line for line in candidates if min(line) >= 0)
    return min(lines, key=lambda line: sum((line(s) / t - 1) ** 2 for s, t in timed))


def fit_ring(points: Mapping[TableKey, Sequence[Point]], num_ranks: int) -> RingLink:
    """Return the ring that fits the times of several operations best, as ``fit_affine`` fits one.

    Args:
        points: of all-reduce, reduce-scatter, all-gather or broadcast; at least two sizes.
        num_ranks: ranks of the ring that was measured, 2 or more.

    >>> ring = RingLink(latency_s=1e-5, bytes_per_s=1e9)
    >>> keys = [(kind, "float32") for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)]
    >>> measured = {key: [(size, ring.collective_s(key[0], size, 4)) for size in (1024, 4096)] for key in keys}
    >>> round(fit_ring(measured, 4).latency_s, 9), round(fit_ring(measured, 4).bytes_per_s)
    (1e-05, 1000000000)
    """
    steps = []  # bytes and seconds of one step of the ring
    for (kind, _), of_kind in points.items():
        num_steps = (num_ranks - 1) * kind.ring_passes
        steps += [(size / num_ranks, seconds / num_steps) for size, seconds in of_kind]
    line = fit_affine(steps)
    return RingLink(latency_s=line.latency_s, bytes_per_s=1 / max(line.seconds_per_byte, _LEAST_SECONDS_PER_BYTE))


# The section, and files #


class FileLink(Section):
    """A link described in another file: a ``link`` section of any kind, at the top or under the key ``link``.

    ``link: infiniband-400g`` is short for this section with that path.
    """

    kind: Literal["file"] = "file"
    """Chooses this form of the section; may be left out."""

    path: Annotated[str, at.Len(1, 4_096)]
    """The YAML file, relative to the working directory, or the name of a shipped link, such as ``infiniband-400g``."""


def _imply_kind(value: Any) -> Any:
    """Infer ``kind`` when omitted: text or a ``path`` means ``file``, else ``flat``."""
    if isinstance(value, str):
        return {"kind": "file", "path": value}
    if not isinstance(value, Mapping) or "kind" in value:
        return value
    return {"kind": "file" if "path" in value else "flat", **value}


LinkConfig: TypeAlias = Annotated[
    Annotated[FlatLink | RingLink | TwoLevelLink | MeasuredLink | FileLink, Field(discriminator="kind")],
    BeforeValidator(_imply_kind),
]


class _LinkFile(Section):
    link: LinkConfig


def read_link(name: Path | str) -> Link:
    """Read a link from a YAML file: a ``link`` section at the top of the file or under the key ``link``.

    Args:
        name: the file, or the name of a shipped link.

    Raises:
        ConfigError: the file cannot be read, or is no link.
    """
    path = find_file(name, kind="links")
    document = read_yaml(path)
    data = document.data
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a link is a mapping such as {{kind: ring, latency_s: 1e-5, bytes_per_s: 2e10}}")
    data = {"link": data.get("link", data)}
    try:
        link = _LinkFile.model_validate(data).link
    except ValidationError as error:
        raise explain_validation_error(error, data=data, document=document) from None
    if isinstance(link, FileLink):
        raise ConfigError(f"{path}: names another file ({printable(link.path)}); name that one instead")
    return link


def write_link(path: Path, link: MeasuredLink) -> None:
    """Write a measured link so that ``read_link`` gives it back unchanged.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = link.model_dump(mode="json", exclude_none=True)
    write_text(path, yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None))
