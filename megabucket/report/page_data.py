"""What the page carries: the figures it shows and the workload it simulates, small enough for one file. No torch.

The figures are exact. The workload is exact as well up to some thousand tensors; beyond that neighbours in ready order are
merged, and the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from megabucket.errors import ConfigError, printable
from megabucket.planning.cuts import uniform_plan
from megabucket.planning.links import MeasuredLink
from megabucket.planning.setting import Setting
from megabucket.planning.simulate import Mode, bucket_times
from megabucket.planning.workload import TensorWork, Workload
from megabucket.report.buckets import BucketEntry
from megabucket.report.collect import Report, describe_link
from megabucket.report.plans import NamedPlan
from megabucket.trace import CollectiveKind
from megabucket.units import format_bytes, format_count

NAME_CHARS: Final = 100
_BUCKETS_DRAWN: Final = 250
_BUCKET_ROWS: Final = (40, 10)
_MEASURED_ROWS: Final = 60
_POINTS: Final = 400


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the page may carry of what grows with the model."""

    tensors: int
    buckets_drawn: int = _BUCKETS_DRAWN
    name_chars: int = NAME_CHARS

    def tighter(self) -> Limits:
        """Return limits for a page that came out too large."""
        return Limits(max(1, self.tensors * 7 // 10), max(1, self.buckets_drawn * 7 // 10), max(16, self.name_chars * 8 // 10))


def page_data(report: Report, limits: Limits) -> dict[str, Any]:
    """Return what the page needs, ready for JSON.

    Raises:
        ConfigError: a link that is neither a formula nor a table.
    """
    setting = report.setting
    workload = merged(setting.as_launched, limits.tensors)
    entries, plans = report.buckets, report.plans
    return {
        "title": printable(report.title, limits.name_chars),
        "facts": _facts(setting),
        "notes": _notes(report, workload),
        "mode": setting.mode.value,
        "ranks": setting.dp_size,
        "overlap": {"grads": setting.overlap_grad_reduce, "params": setting.overlap_param_gather},
        "work": page_workload(workload, limits.name_chars),
        "costs": page_costs(setting),
        "totals": {
            "numel": setting.workload.numel,
            "compute_s": setting.workload.compute_s,
            "no_overlap_s": report.outlook.no_overlap_s,
            "lower_bound_s": report.outlook.lower_bound_s,
        },
        "plans": [_plan(setting, plan, limits) for plan in plans],
        "sweep": _sweep(report),
        "bucket_count": len(entries),
        "buckets": [[index, _entry(entry, limits)] for index, entry in _ends(entries)],
        "memory": [asdict(row) for row in report.curves.memory],
        "scaling": [asdict(row) for row in report.curves.scaling],
        "scaling_gaps": [printable(gap, 300) for gap in report.curves.scaling_gaps],
        "measured": _measured(report, limits),
    }


def merged(workload: Workload, max_tensors: int) -> Workload:
    """Return the workload itself, or one with neighbours in ready order merged to some ``max_tensors`` tensors.

    A merged tensor is named after the one that closes it, becomes ready with the last and is needed with the first of its
    tensors. All sums stay; a size below the smallest merged tensor can no longer be told from it.
    """
    if len(workload.tensors) <= max_tensors:
        return workload
    groups = uniform_plan(workload, max(1, -(-workload.numel // max_tensors))).buckets
    tensors = workload.tensors
    forward_order = sorted(range(len(groups)), key=lambda group: min(groups[group]))
    position_of = {group: position for position, group in enumerate(forward_order)}
    return Workload(
        tensors=tuple(_merged_tensor([tensors[index] for index in groups[group]]) for group in forward_order),
        bytes_per_element=workload.bytes_per_element,
        param_bytes_per_element=workload.param_bytes_per_element,
        optimizer_s=workload.optimizer_s,
        num_microbatches=workload.num_microbatches,
        ready_order=tuple(position_of[group] for group in range(len(groups))),
    )


def page_workload(workload: Workload, name_chars: int = NAME_CHARS) -> dict[str, Any]:
    """Return a workload as the page's simulator takes it: columns by tensor, in forward order.

    Names share beginnings with their neighbours and times repeat from layer to layer, so names are stored as the characters
    kept of the name before and the rest, and times, when that is shorter, as distinct values and their indices.
    """
    tensors = workload.tensors
    return {
        "names": _front_coded([printable(tensor.name, name_chars) for tensor in tensors]),
        "numel": _column([tensor.numel for tensor in tensors]),
        "backward_s": _column([tensor.backward_s for tensor in tensors]),
        "forward_s": _column([tensor.forward_s for tensor in tensors]),
        "order": None if workload.ready_order is None else list(workload.ready_order),
        "bytes_per_element": workload.bytes_per_element,
        "param_bytes_per_element": workload.param_bytes_per_element,
        "optimizer_s": workload.optimizer_s,
        "num_microbatches": workload.num_microbatches,
    }


def page_costs(setting: Setting) -> dict[str, Any]:
    """Return what collectives cost on the group: lines, or points to interpolate between.

    Raises:
        ConfigError: a link that is neither a formula nor a table.
    """
    workload = setting.workload
    is_sharded = setting.mode is Mode.REDUCE_SCATTER
    kind = CollectiveKind.REDUCE_SCATTER if is_sharded else CollectiveKind.ALL_REDUCE
    return {
        "reduce": _cost(setting, kind, workload.grad_dtype),
        "gather": _cost(setting, CollectiveKind.ALL_GATHER, workload.param_dtype) if is_sharded else None,
        "extra_s": [setting.link.collective_s(kind, size, setting.dp_size) for kind, size in setting.step_collectives],
    }


def _cost(setting: Setting, kind: CollectiveKind, dtype: str) -> dict[str, Any]:
    affine = setting.link.affine(kind, setting.dp_size, dtype)
    if affine is not None:
        return {"latency_s": affine[0], "seconds_per_byte": affine[1]}
    if not isinstance(setting.link, MeasuredLink):
        raise ConfigError(f"a report cannot show a link of the type {type(setting.link).__name__}; give a formula or a table")
    points = setting.link.points(kind, dtype)
    stride = -(-(len(points) - 2) // (_POINTS - 2)) if len(points) > _POINTS else 1
    kept = [*points[:-2:stride], *points[-2:]]  # the last two give the slope beyond the table
    return {"points": [list(point) for point in kept]}


def _merged_tensor(tensors: Sequence[TensorWork]) -> TensorWork:
    return TensorWork(
        tensors[-1].name,
        sum(tensor.numel for tensor in tensors),
        sum((tensor.backward_s for tensor in tensors), 0.0),
        sum((tensor.forward_s for tensor in tensors), 0.0),
    )


def _front_coded(names: Sequence[str]) -> list[int | str]:
    coded: list[int | str] = []
    before = ""
    for name in names:
        kept = next((i for i, (a, b) in enumerate(zip(before, name, strict=False)) if a != b), min(len(before), len(name)))
        coded += [kept, name[kept:]]
        before = name
    return coded


def _column(values: Sequence[float]) -> dict[str, Any]:
    distinct = {value: index for index, value in enumerate(dict.fromkeys(values))}
    if len(distinct) * 2 > len(values):
        return {"values": list(values)}
    return {"values": list(distinct), "index": [distinct[value] for value in values]}


def _sweep(report: Report) -> list[list[Any]]:
    """Return the rows as a curve: by increasing size, up to the one that holds everything."""
    rows = {row.bucket_numel or 0: row for row in report.sweep}
    total = report.setting.workload.numel
    return [list(asdict(rows[numel]).values()) for numel in sorted(rows) if numel <= total or total not in rows]


def _plan(setting: Setting, plan: NamedPlan, limits: Limits) -> dict[str, Any]:
    data = {
        "key": plan.key,
        "name": plan.name,
        "bucket_numel": plan.bucket_numel,
        "buckets": plan.num_buckets,
        "step_s": plan.step_s,
        "exposed_s": plan.exposed_s,
    }
    return {**data, "drawn": _drawn(setting, plan, limits) if len(plan.plan.buckets) <= limits.buckets_drawn else None}


def _drawn(setting: Setting, plan: NamedPlan, limits: Limits) -> list[list[Any]]:
    """Return one row per bucket with what the simulator needs to know about it; names it cannot derive are in it too."""
    workload = setting.workload
    times = bucket_times(workload, plan.plan, setting.link, num_ranks=setting.dp_size, mode=setting.mode)
    rows = []
    for bucket, known in zip(plan.plan.buckets, times, strict=True):
        names = [printable(workload.tensors[index].name, limits.name_chars) for index in (bucket[0], bucket[-1])]
        numel = sum(workload.tensors[index].numel for index in bucket)
        rows.append([numel, *asdict(known).values(), len(bucket), *names])
    return rows


def _ends(entries: Sequence[BucketEntry]) -> list[tuple[int, BucketEntry]]:
    first, last = _BUCKET_ROWS
    numbered = list(enumerate(entries))
    return numbered if len(numbered) <= first + last else numbered[:first] + numbered[-last:]


def _entry(entry: BucketEntry, limits: Limits) -> dict[str, Any]:
    def short(name: str) -> str:
        return printable(name, limits.name_chars)

    return {
        "buffer": entry.buffer,
        "params": entry.num_params,
        "first": short(entry.first_param),
        "last": short(entry.last_param),
        "numel": entry.numel,
        "padding": entry.padding_numel,
        "grad_bytes": entry.grad_bytes,
        "shards": entry.num_shards,
        "shard_numel": entry.shard_numel,
        "closed_by": entry.closed_by,
        "owners": [
            [owner.first_rank, owner.last_rank, short(owner.first_param), short(owner.last_param), owner.num_params]
            for owner in entry.owners
        ],
    }


def _measured(report: Report, limits: Limits) -> dict[str, Any] | None:
    if report.measured is None:
        return None
    rows = []
    for plan in report.measured.plans[:_MEASURED_ROWS]:
        x_numel = plan.bucket_numel
        if x_numel is None and plan.predicted_s is None:  # steps of the config's plan: they belong where it lies on the curve
            x_numel = report.configured.bucket_numel
        data = {**asdict(plan), "name": printable(plan.name, limits.name_chars)}
        rows.append({**data, "predicted_s": report.predicted_s(plan), "x_numel": x_numel})
    source = printable(report.measured.source, limits.name_chars)
    return {"source": source, "count": len(report.measured.plans), "plans": rows}


def _facts(setting: Setting) -> list[list[str]]:
    workload = setting.workload
    mode = "reduce-scatter and all-gather" if setting.mode is Mode.REDUCE_SCATTER else "all-reduce"
    overlaps = [
        "gradients overlap backward" if setting.overlap_grad_reduce else "gradients go out after backward",
        *(["parameters are gathered in the next forward"] if setting.overlap_param_gather else []),
    ]
    experts = "" if setting.expert_dp_size is None else f", experts on {setting.expert_dp_size:,}"
    size = format_bytes(workload.numel * workload.bytes_per_element)
    return [
        ["Ranks", f"{setting.dp_size:,}{experts}"],
        ["Mode", f"{mode}; {', '.join(overlaps)}"],
        ["Link", describe_link(setting.link)["text"]],
        ["Tensors", f"{len(workload.tensors):,}; elements: {format_count(workload.numel)}, {size} of gradients"],
        ["Microbatches", f"{workload.num_microbatches:,}"],
    ]


def _notes(report: Report, workload: Workload) -> list[str]:
    notes = []
    tensors = len(report.setting.workload.tensors)
    if len(workload.tensors) < tensors:
        notes.append(
            f"The slider simulates {len(workload.tensors):,} tensors: the {tensors:,} of the model, with neighbours merged, so "
            "that this page stays small. Small bucket sizes come out coarser than they are. The named plans, the sweep, the "
            "memory and the scaling were computed from all tensors."
        )
    if report.setting.specs is not None:
        notes.append(
            "The slider leaves padding out and takes everything for one buffer; sweep and named plans are those of layouts."
        )
    link = report.setting.link
    if isinstance(link, MeasuredLink) and any(len(points) > _POINTS for points in link.tables.values()):
        notes.append("The slider uses some of the measured points of the link; the other figures use all of them.")
    if all(tensor.backward_s == 0 for tensor in report.setting.workload.tensors):
        notes.append("The workload says nothing about when gradients become ready, so nothing can be hidden behind backward.")
    return notes
