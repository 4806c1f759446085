"""From config sections and files to links and workloads. No torch, no arithmetic.

Reads what ``megabucket calibrate`` and ``megabucket profile`` write, and writes it for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from megabucket.config import Section
from megabucket.errors import ConfigError, printable
from megabucket.layout import ParamSpec
from megabucket.planning import RunConfig
from megabucket.planning.derive import workload_of_specs
from megabucket.planning.fit import AffineFit
from megabucket.planning.json_file import read_json
from megabucket.planning.links import FlatLink, Link, MeasuredLink, Point, RingLink, TableKey, TwoLevelLink
from megabucket.planning.load import explain_validation_error
from megabucket.planning.simulation_config import (
    FileLinkConfig,
    FlatLinkConfig,
    LinkConfig,
    RingLinkConfig,
    TableLinkConfig,
    TwoLevelLinkConfig,
    WorkloadConfig,
)
from megabucket.planning.workload import TensorWork, Workload
from megabucket.planning.workload_match import check_workload_matches
from megabucket.planning.yaml_loader import YamlDocument, read_yaml
from megabucket.trace import CollectiveKind

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
    if isinstance(config, RingLinkConfig):
        return RingLink(config.latency_s, config.bytes_per_s)
    if isinstance(config, TwoLevelLinkConfig):
        inside, between = config.inside, config.between
        return TwoLevelLink(
            RingLink(inside.latency_s, inside.bytes_per_s),
            RingLink(between.latency_s, between.bytes_per_s),
            config.ranks_per_node,
        )
    if isinstance(config, FileLinkConfig):
        return read_link(Path(config.path))
    if config.path is not None:
        return read_link(Path(config.path))
    return _measured(config)


def read_link(path: Path) -> Link:
    """Read a link from a YAML file: a ``link`` section at the top of the file or under the key ``link``.

    Raises:
        ConfigError: the file cannot be read, or is no link.
    """
    document = read_yaml(path)
    data, lines = document.data, document.lines
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a link is a mapping such as {{kind: ring, latency_s: 1e-5, bytes_per_s: 2e10}}")
    if "link" not in data:
        data, lines = {"link": data}, {("link", *key): line for key, line in lines.items()}
    try:
        config = _LinkFile.model_validate({"link": data["link"]}).link
    except ValidationError as error:
        raise explain_validation_error(error, data=data, document=YamlDocument(data, lines, str(path))) from None
    if isinstance(config, FileLinkConfig) or (isinstance(config, TableLinkConfig) and config.path is not None):
        raise ConfigError(f"{path}: names another file ({printable(config.path or '')}); name that one instead")
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
        OSError: the file cannot be written.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None), encoding="utf-8")


def workload_of(run: RunConfig, specs: Sequence[ParamSpec] | None = None) -> Workload:
    """Return the workload that a config describes: its tensors, its file, or its model at a rate.

    Args:
        run: the config; its ``workload`` section decides.
        specs: the trainable parameters of ``run.model`` in registration order; needed for a rate. A file must be of them.

    Raises:
        ConfigError: no workload, a file that cannot be read or is of another model, or values that make none.
    """
    config = run.workload or WorkloadConfig()
    overrides: dict[str, Any] = {
        name: value
        for name in ("bytes_per_element", "param_bytes_per_element", "optimizer_s", "num_microbatches", "ready_order")
        if (value := getattr(config, name)) is not None
    }
    if config.tensors is not None:
        tensors = (TensorWork(each.name, each.numel, each.backward_s, each.forward_s) for each in config.tensors)
        return Workload(tuple(tensors), **overrides)
    if config.path is not None:
        workload, fingerprint = _read_workload(Path(config.path))
        if specs is not None:
            check_workload_matches(workload, specs, fingerprint=fingerprint)
        return _with(workload, overrides)
    if config.tokens_per_microbatch is None or config.flops_per_s is None or specs is None or run.model is None:
        raise ConfigError(
            "there is nothing to simulate: give workload.tensors, or workload.path, or a model section with "
            "workload.tokens_per_microbatch and workload.flops_per_s"
        )
    derived = workload_of_specs(
        specs, run.ddp, tokens=config.tokens_per_microbatch, flops_per_s=config.flops_per_s, model=run.model
    )
    return _with(derived, overrides)


def read_workload(path: Path) -> Workload:
    """Read a ``workload.json``.

    Raises:
        ConfigError: the file cannot be read, is larger than 64 MiB, or is no workload.
    """
    return _read_workload(path)[0]


def _read_workload(path: Path) -> tuple[Workload, str | None]:
    """Return the workload and the fingerprint of its model, where ``megabucket profile`` has written one."""
    data = read_json(path, max_bytes=MAX_WORKLOAD_BYTES, what="a workload").data
    try:
        workload = Workload.from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    facts = data.get("facts") if isinstance(data, dict) else None
    fingerprint = facts.get("model_fingerprint") if isinstance(facts, dict) else None
    return workload, fingerprint if isinstance(fingerprint, str) else None


def write_workload(path: Path, workload: Workload, *, facts: Mapping[str, Any] | None = None) -> None:
    """Write a workload so that ``read_workload`` gives it back unchanged, with facts about its origin beside it.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {**workload.to_dict(), "facts": dict(facts or {})}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _with(workload: Workload, overrides: Mapping[str, Any]) -> Workload:
    if not overrides:
        return workload
    fields = ("tensors", "bytes_per_element", "param_bytes_per_element", "optimizer_s", "num_microbatches", "ready_order")
    return Workload(**{**{name: getattr(workload, name) for name in fields}, **overrides})


def _measured(config: TableLinkConfig) -> MeasuredLink:
    tables: dict[TableKey, tuple[Point, ...]] = {}
    for table in config.tables or ():
        key = (CollectiveKind(table.operation), table.dtype)
        if key in tables:
            raise ConfigError(f"link.tables has {table.operation}, {printable(table.dtype)} twice; keep one table for each")
        tables[key] = table.points
    return MeasuredLink(tables, config.num_ranks or 0)
