"""From config sections and files to links and workloads. No torch.

Reads what ``megabucket calibrate`` and ``megabucket profile`` write, and writes it for them. Without a profile, when gradients
become ready is guessed from a list of parameters and a rate.

The rule of Kaplan et al. ("Scaling Laws for Neural Language Models", 2020, section 2.1): a parameter takes 2 operations per
token in forward and 4 in backward. Attention's own products and all memory-bound work are left out, so ``flops_per_s`` is the
rate a step reaches as a whole. A look-up in an embedding multiplies nothing: embeddings take no time, and a tied one takes its
time where it serves as the output projection, at the end of forward and the beginning of backward. An expert computes its share
of the tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from pydantic import ValidationError

from megabucket.config import DistributedDataParallelConfig, Section
from megabucket.config.resolve import resolve_grad_dtype
from megabucket.errors import ConfigError, printable
from megabucket.layout import ParamSpec
from megabucket.planning import RunConfig
from megabucket.planning.architecture import decoder_of
from megabucket.planning.documents import Document, find_file, read_json, read_yaml, write_text
from megabucket.planning.links import AffineFit, FlatLink, Link, MeasuredLink, Point, RingLink, TableKey, TwoLevelLink
from megabucket.planning.load import explain_validation_error
from megabucket.planning.model_config import ArchitectureConfig, MoeConfig
from megabucket.planning.simulation_config import (
    FlatLinkConfig,
    LinkConfig,
    LinkLevelConfig,
    TableLinkConfig,
    TwoLevelLinkConfig,
    WorkloadConfig,
)
from megabucket.planning.workload import SCHEMA, SCHEMA_VERSION, TensorWork, Workload, check_workload_matches
from megabucket.trace import CollectiveKind
from megabucket.units import dtype_bytes

FORWARD_FLOPS: Final = 2
"""Operations per parameter and token in forward: a multiplication and an addition."""

BACKWARD_FLOPS: Final = 4
"""Operations per parameter and token in backward: the same for the input's gradient and for the weight's."""

_WORKLOAD_FIELDS: Final = (
    "bytes_per_element",
    "param_bytes_per_element",
    "optimizer_s",
    "num_microbatches",
    "ready_order",
)

MAX_WORKLOAD_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a workload file: 100,000 tensors take a sixth of it."""


class _LinkFile(Section):
    link: LinkConfig


def link_of(config: LinkConfig) -> Link:
    """Return the link that a config section describes, reading its file if it names one.

    Raises:
        ConfigError: the file cannot be read, is no link, or a table has too few or unsorted points.
    """
    if isinstance(config, FlatLinkConfig):
        return FlatLink(config.latency_s, config.seconds_per_byte)
    if isinstance(config, TwoLevelLinkConfig):
        return TwoLevelLink(_ring(config.inside), _ring(config.between), config.ranks_per_node)
    if isinstance(config, TableLinkConfig):
        tables: dict[TableKey, tuple[Point, ...]] = {}
        for table in config.tables:
            key = (CollectiveKind(table.operation), table.dtype)
            if key in tables:
                raise ConfigError(f"link.tables has {table.operation}, {printable(table.dtype)} twice; keep one table for each")
            tables[key] = table.points
        return MeasuredLink(tables, config.num_ranks)
    if isinstance(config, LinkLevelConfig):
        return _ring(config)
    return read_link(config.path)


def _ring(level: LinkLevelConfig) -> RingLink:
    return RingLink(level.latency_s, level.bytes_per_s)


def read_link(name: Path | str) -> Link:
    """Read a link from a YAML file: a ``link`` section at the top of the file or under the key ``link``.

    Args:
        name: the file, or the name of a shipped link.

    Raises:
        ConfigError: the file cannot be read, or is no link.
    """
    path = find_file(name, kind="links")
    document = read_yaml(path)
    data, lines = document.data, document.lines
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a link is a mapping such as {{kind: ring, latency_s: 1e-5, bytes_per_s: 2e10}}")
    if "link" not in data:
        data, lines = {"link": data}, {("link", *key): line for key, line in lines.items()}
    try:
        config = _LinkFile.model_validate({"link": data["link"]}).link
    except ValidationError as error:
        raise explain_validation_error(error, data=data, document=Document(data, lines, str(path))) from None
    if another := getattr(config, "path", None):
        raise ConfigError(f"{path}: names another file ({printable(another)}); name that one instead")
    try:
        return link_of(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_link(
    path: Path,
    link: MeasuredLink,
    *,
    fits: Mapping[TableKey, AffineFit] | None = None,
    spreads_s: Mapping[TableKey, Sequence[tuple[float, float]]] | None = None,
    facts: Mapping[str, bool | int | float | str | None] | None = None,
) -> None:
    """Write a measured link so that ``read_link`` gives it back unchanged, with fits, quartiles and facts beside the points.

    Raises:
        ConfigError: the file cannot be written.
    """
    fits, spreads_s = fits or {}, spreads_s or {}
    tables = []
    for key, points in link.tables.items():
        kind, dtype = key
        table: dict[str, Any] = {"operation": kind.value, "dtype": dtype}
        if key in fits:
            table["fit"] = asdict(fits[key])
        table["points"] = [list(point) for point in points]
        if key in spreads_s:
            table["spread_s"] = [list(pair) for pair in spreads_s[key]]
        tables.append(table)
    data = {"kind": "table", "num_ranks": link.num_ranks, "facts": dict(facts or {}), "tables": tables}
    write_text(path, yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None))


def workload_of(run: RunConfig, specs: Sequence[ParamSpec] | None = None) -> Workload:
    """Return the workload that a config describes: its tensors, its file, or its model at a rate.

    Args:
        run: the config; its ``workload`` section decides.
        specs: the trainable parameters of ``run.model`` in registration order; needed for a rate. A file must be of them.

    Raises:
        ConfigError: no workload, a file that cannot be read or is of another model, or values that make none.
    """
    config = run.workload or WorkloadConfig()
    if config.tensors is not None:
        workload = _workload_from(config)
        if specs is not None:
            check_workload_matches(workload, specs)
        return workload
    overrides = _overrides(config)
    if config.path is not None:
        return replace(read_workload(Path(config.path), specs), **overrides)
    if config.tokens_per_microbatch is None or config.flops_per_s is None or specs is None or run.model is None:
        raise ConfigError(
            "there is nothing to simulate: give workload.tensors, or workload.path, or a model section with "
            "workload.tokens_per_microbatch and workload.flops_per_s"
        )
    derived = workload_of_specs(
        specs, run.ddp, tokens=config.tokens_per_microbatch, flops_per_s=config.flops_per_s, model=run.model
    )
    return replace(derived, **overrides)


def read_workload(path: Path, specs: Sequence[ParamSpec] | None = None) -> Workload:
    """Read a ``workload.json``, which must be of a model with these trainable parameters, if they are given.

    Raises:
        ConfigError: the file cannot be read, is larger than 64 MiB, or is no workload of the model.
    """
    data = read_json(path, max_bytes=MAX_WORKLOAD_BYTES, what="a workload").data
    workload = workload_from_dict(data, source=str(path))
    if specs is not None:
        facts = data.get("facts") if isinstance(data, dict) else None
        fingerprint = facts.get("model_fingerprint") if isinstance(facts, dict) else None  # as ``megabucket profile`` writes it
        check_workload_matches(workload, specs, fingerprint=fingerprint if isinstance(fingerprint, str) else None)
    return workload


def workload_from_dict(data: Any, *, source: str = "workload") -> Workload:
    """Return the workload whose ``to_dict`` gave these data. Keys of other tools may stand beside ours, not inside tensors.

    Raises:
        ConfigError: not such data; the text names ``source`` and the field.
    """
    if not isinstance(data, dict) or not isinstance(data.get("tensors"), list):
        raise ConfigError(f"{source}: a workload is a mapping with a list of tensors under the key 'tensors'")
    if (data.get("schema", SCHEMA), data.get("version", SCHEMA_VERSION)) != (SCHEMA, SCHEMA_VERSION):
        raise ConfigError(f"{source}: not {SCHEMA} version {SCHEMA_VERSION}. Profile again with this version of megabucket")
    fields = {name: data[name] for name in ("tensors", *_WORKLOAD_FIELDS) if name in data}
    try:
        return _workload_from(WorkloadConfig.model_validate(fields))
    except ValidationError as error:
        raise explain_validation_error(error, data=fields, document=Document(fields, {}, source)) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _workload_from(config: WorkloadConfig) -> Workload:
    tensors = (TensorWork(each.name, each.numel, each.backward_s, each.forward_s) for each in config.tensors or ())
    return Workload(tuple(tensors), **_overrides(config))


def _overrides(config: WorkloadConfig) -> dict[str, Any]:
    return {name: value for name in _WORKLOAD_FIELDS if (value := getattr(config, name)) is not None}


def write_workload(path: Path, workload: Workload, *, facts: Mapping[str, Any] | None = None) -> None:
    """Write a workload so that ``read_workload`` gives it back unchanged, with facts about its origin beside it.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = {**workload.to_dict(), "facts": dict(facts or {})}
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def is_lookup(name: str) -> bool:
    """Return whether a parameter is an embedding table by its name: a part contains ``embed``, or is ``wte`` or ``wpe``.

    Output projections called ``unembed`` or ``embed_out`` are none.

    >>> [is_lookup(name) for name in ("model.embed_tokens.weight", "wpe.weight", "lm_head.weight", "embed_out.weight")]
    [True, True, False, False]
    """
    parts = name.lower().split(".")
    return any(
        part in {"wte", "wpe"} or ("embed" in part and "unembed" not in part and "out" not in part.split("_")) for part in parts
    )


def workload_of_specs(
    specs: Sequence[ParamSpec],
    ddp: DistributedDataParallelConfig,
    *,
    tokens: int,
    flops_per_s: float,
    model: ArchitectureConfig | None = None,
) -> Workload:
    """Return the workload of a model that computes ``tokens`` per microbatch at ``flops_per_s``.

    Args:
        specs: trainable parameters in registration order, tied ones once.
        ddp: decides the gradients' dtype, and the ready order if it has one.
        model: says whether the token embedding is also the output projection, and how many of the experts a token passes.

    Raises:
        ConfigError: no parameters, ``ddp.bucket_order`` names others, or the model's ``config.json`` cannot be read.
    """
    second = tokens / flops_per_s  # of one operation on each token
    decoder = decoder_of(model) if model is not None else None
    routed = decoder.num_experts_per_token / decoder.num_experts if isinstance(decoder, MoeConfig) else 1.0
    tensors = []
    for spec in specs:
        numel = 0.0 if is_lookup(spec.name) else spec.numel * (routed if spec.group == "expert" else 1.0)
        tensors.append(TensorWork(spec.name, spec.numel, BACKWARD_FLOPS * numel * second, FORWARD_FLOPS * numel * second))
    if decoder is not None and decoder.tied_embeddings:
        # The output projection comes last: the gradient of the last parameter has to wait until it was passed.
        numel, last = max(spec.numel for spec in specs if is_lookup(spec.name)), tensors[-1]
        backward_s = last.backward_s + BACKWARD_FLOPS * numel * second
        tensors[-1] = replace(last, backward_s=backward_s, forward_s=last.forward_s + FORWARD_FLOPS * numel * second)
    wire = wire_bytes(specs, ddp)
    return Workload(
        tuple(tensors),
        bytes_per_element=wire.gradient,
        param_bytes_per_element=wire.parameter,
        ready_order=_ready_order(specs, ddp),
    )


class WireBytes(NamedTuple):
    """Bytes of an element on the wire."""

    parameter: int
    gradient: int


def wire_bytes(specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig) -> WireBytes:
    """Return the bytes of a parameter and of a gradient element, in the dtype most elements have."""
    numel_of: Counter[str] = Counter()
    for spec in specs:
        numel_of[spec.dtype] += spec.numel
    dtype = numel_of.most_common(1)[0][0] if numel_of else "float32"
    return WireBytes(dtype_bytes(dtype), dtype_bytes(resolve_grad_dtype(ddp, dtype)))


def _ready_order(specs: Sequence[ParamSpec], ddp: DistributedDataParallelConfig) -> tuple[int, ...] | None:
    if ddp.bucket_order is None:
        return None
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    if set(ddp.bucket_order) != set(index_of):
        raise ConfigError("ddp.bucket_order does not name exactly the trainable parameters of the model; record it anew")
    return tuple(index_of[name] for name in ddp.bucket_order)
