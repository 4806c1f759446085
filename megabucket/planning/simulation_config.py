"""``LinkConfig``, ``WorkloadConfig``, ``SweepConfig``, ``FabricConfig``: what the timing model and its emulation are told.

``megabucket.planning.inputs`` turns them into links and workloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import annotated_types as at
from pydantic import BeforeValidator, Field, model_validator

from megabucket.config.ddp import Count, NonNegative, Positive, PositiveCount, Section, read_tuple

Path: TypeAlias = Annotated[str, at.Len(1, 4_096)]
Fact: TypeAlias = bool | int | float | str | None


def _imply_kind(value: Any) -> Any:
    """Say the kind of a link that does not say it itself: one with a ``path`` is a ``file``, any other is ``flat``.

    Text alone is the path.
    """
    if isinstance(value, str):
        return {"kind": "file", "path": value}
    if not isinstance(value, Mapping) or "kind" in value:
        return value
    return {"kind": "file" if "path" in value else "flat", **value}


class FlatLinkConfig(Section):
    """Latency and slope, the same for every operation and any number of ranks. The default: ``kind`` may be left out."""

    kind: Literal["flat"] = "flat"
    """Chooses this form of the section."""

    latency_s: NonNegative
    """Seconds of a collective before its first byte."""

    seconds_per_byte: NonNegative
    """Seconds that each byte of the full buffer adds."""


class LinkLevelConfig(Section):
    """One level of a ``two_level`` link: a ring."""

    latency_s: NonNegative
    """Seconds from one rank to the next, before the first byte."""

    bytes_per_s: Positive
    """Bytes per second from one rank to the next."""


class RingLinkConfig(LinkLevelConfig):
    """A ring of ranks: ``2 (n-1) latency + 2 S (n-1)/n / bandwidth`` for an all-reduce of ``S`` bytes, half for the others."""

    kind: Literal["ring"]
    """Chooses this form of the section."""


class TwoLevelLinkConfig(Section):
    """Equal nodes: a ring inside each, and rings between them, used by hierarchical algorithms."""

    kind: Literal["two_level"]
    """Chooses this form of the section."""

    inside: LinkLevelConfig
    """The ring of the ranks of one node."""

    between: LinkLevelConfig
    """The ring of one rank of each node. Bandwidth is that of one rank: the share it has of its node's network."""

    ranks_per_node: PositiveCount
    """Ranks in a node."""


class FitConfig(Section):
    """A straight line through a table."""

    latency_s: NonNegative
    """Seconds at no bytes."""

    seconds_per_byte: NonNegative
    """Seconds that each byte of the full buffer adds."""

    residual: NonNegative
    """Median distance of the points from the line, as a fraction of the measured time."""


class LinkTableConfig(Section):
    """Measured times of one operation and dtype."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    """The collective."""

    dtype: Annotated[str, at.Len(1, 40)] = "float32"
    """Dtype of the buffers."""

    points: Annotated[
        tuple[Annotated[tuple[NonNegative, NonNegative], BeforeValidator(read_tuple)], ...],
        BeforeValidator(read_tuple),
        at.MaxLen(10_000),
    ]
    """At least two pairs of bytes (of the full buffer) and seconds, by increasing bytes."""

    fit: FitConfig | None = None
    """What ``megabucket calibrate`` fitted to the points; the simulator reads the points."""

    spread_s: Annotated[
        tuple[Annotated[tuple[NonNegative, NonNegative], BeforeValidator(read_tuple)], ...],
        BeforeValidator(read_tuple),
        at.MaxLen(10_000),
    ] = ()
    """Lower and upper quartile of the repetitions behind each point. Shown, never used."""


class TableLinkConfig(Section):
    """Measured times: linear between points. ``megabucket calibrate`` writes such a section as ``link.yaml``."""

    kind: Literal["table"]
    """Chooses this form of the section."""

    num_ranks: PositiveCount
    """Ranks that measured; nothing is said about other numbers."""

    tables: Annotated[tuple[LinkTableConfig, ...], BeforeValidator(read_tuple), at.Len(1, 100)]
    """One table for each operation and dtype."""

    facts: Annotated[dict[str, Fact], at.MaxLen(100)] = Field(default_factory=dict)
    """Where it was measured: device, backend, versions. Shown, never used."""


class FileLinkConfig(Section):
    """A link described in another file: a ``link`` section of any kind, at the top or under the key ``link``.

    ``link: infiniband-400g`` is short for this section with that path.
    """

    kind: Literal["file"] = "file"
    """Chooses this form of the section; may be left out."""

    path: Path
    """The YAML file, relative to the working directory, or the name of a shipped link, such as ``infiniband-400g``."""


LinkConfig: TypeAlias = Annotated[
    Annotated[
        FlatLinkConfig | RingLinkConfig | TwoLevelLinkConfig | TableLinkConfig | FileLinkConfig, Field(discriminator="kind")
    ],
    BeforeValidator(_imply_kind),
]


class TensorConfig(Section):
    """One tensor of a workload."""

    name: Annotated[str, at.Len(1, 1_000)]
    """Unique in the list."""

    numel: Count
    """Elements."""

    backward_s: NonNegative = 0.0
    """Seconds of backward between the gradient before it and its own."""

    forward_s: NonNegative = 0.0
    """Seconds of forward from the moment this tensor is first needed to the moment the next one is."""


class WorkloadConfig(Section):
    """What a step computes: tensors, or a file, or a rate at which the ``model`` is computed."""

    tensors: Annotated[tuple[TensorConfig, ...], BeforeValidator(read_tuple)] | None = None
    """The tensors in forward order."""

    path: Path | None = None
    """A ``workload.json`` of ``megabucket profile``, relative to the working directory."""

    tokens_per_microbatch: PositiveCount | None = None
    """Tokens that one rank computes in one forward and backward. With ``flops_per_s`` and a ``model``: a parameter takes 2
    operations per token in forward and 4 in backward."""

    flops_per_s: Positive | None = None
    """Floating-point operations per second that one rank really reaches."""

    bytes_per_element: Annotated[PositiveCount, at.Le(8)] | None = None
    """Bytes of a gradient element on the wire. ``None``: what the file or the model says, else 4."""

    param_bytes_per_element: Annotated[PositiveCount, at.Le(8)] | None = None
    """Bytes of a parameter element on the wire. ``None``: what the file or the model says, else 4."""

    optimizer_s: NonNegative | None = None
    """Seconds of the optimizer in a step. ``None``: what the file says, else 0."""

    num_microbatches: PositiveCount | None = None
    """Forward and backward passes in a step; the last one sends. ``None``: what the file says, else 1."""

    ready_order: Annotated[tuple[Count, ...], BeforeValidator(read_tuple)] | None = None
    """Positions in ``tensors`` in the order in which gradients become ready. ``None``: last tensor first."""

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadConfig:
        rate = (self.tokens_per_microbatch, self.flops_per_s)
        if (rate[0] is None) != (rate[1] is None):
            raise ValueError("tokens_per_microbatch and flops_per_s belong together; give both, or neither")
        sources = {"tensors": self.tensors, "path": self.path, "flops_per_s": self.flops_per_s}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} all say what is computed; keep one of them")
        if self.tensors == ():
            raise ValueError("tensors is empty: there is nothing to compute or to send; list at least one")
        if self.ready_order is not None and self.tensors is None:
            raise ValueError("ready_order gives positions in tensors; with a model, give ddp.bucket_order instead")
        return self


class SweepConfig(Section):
    """Which plans ``megabucket simulate`` compares."""

    bucket_numel: Annotated[tuple[PositiveCount, ...], BeforeValidator(read_tuple), at.Len(1, 1_000)] | None = None
    """Bucket sizes in elements. ``None``: some 20 sizes from the smallest tensor to everything in one bucket."""


class FabricConfig(Section):
    """An emulated alpha-beta link between the ranks of one machine, in place of gloo or NCCL.

    See docs/emulated-fabric.md.
    """

    latency_s: NonNegative
    """Seconds of each step of a ring: ``2 (n-1)`` steps in an all-reduce of ``n`` ranks, half of that in other collectives."""

    bytes_per_s: Positive
    """Bytes per second from each rank to the next."""

    moves_data: bool = True
    """``False``: only the time passes, and gradients and parameters stay where they are (docs/emulated-fabric.md). The numbers
    are wrong then, but communication takes no time of the CPU that computes."""
