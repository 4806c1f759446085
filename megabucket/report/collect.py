"""``collect``: every figure of a report, computed once. Pure arithmetic, no torch, no files but those that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from megabucket.planning import RunConfig
from megabucket.planning.links import FlatLink, Link, MeasuredLink, RingLink, TwoLevelLink
from megabucket.planning.outlook import Outlook, outlook_of
from megabucket.planning.setting import Setting, setting_of
from megabucket.planning.simulate import Mode
from megabucket.planning.sweep import SweepRow
from megabucket.report.buckets import BucketEntry, bucket_entries
from megabucket.report.curves import Curves, curves_of
from megabucket.report.layouts import layout_of
from megabucket.report.measured import Measured, MeasuredPlan
from megabucket.report.plans import NamedPlan, named_plans
from megabucket.trace import StepTrace
from megabucket.units import format_seconds

SCHEMA: Final = "megabucket.report"
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True)
class Report:
    """The figures. ``to_dict`` is the JSON beside the page; the page shows the same."""

    title: str
    outlook: Outlook
    """What ``megabucket simulate`` prints."""
    plans: tuple[NamedPlan, ...]
    buckets: tuple[BucketEntry, ...]
    """Of the layout that the config gives."""
    curves: Curves
    measured: Measured | None = None

    @property
    def setting(self) -> Setting:
        """What is simulated."""
        return self.outlook.setting

    @property
    def sweep(self) -> tuple[SweepRow, ...]:
        """One row for each bucket size."""
        return self.outlook.rows

    @property
    def configured(self) -> NamedPlan:
        """The plan that the config gives, which is the default when it does not size buckets."""
        return self.plan("config") or self.plans[0]

    def plan(self, key: str) -> NamedPlan | None:
        """Return a plan by its key."""
        return next((plan for plan in self.plans if plan.key == key), None)

    def traces(self) -> tuple[StepTrace, ...]:
        """Return simulated steps of the plan that the config gives."""
        return self.setting.traces(self.configured.plan, num_steps=3)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, ready for JSON. Names are as given; times are seconds, sizes bytes or elements."""
        setting, workload = self.setting, self.setting.workload
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "title": self.title,
            "dp_size": setting.dp_size,
            "expert_dp_size": setting.expert_dp_size,
            "mode": setting.mode.value,
            "overlap_grad_reduce": setting.overlap_grad_reduce,
            "overlap_param_gather": setting.overlap_param_gather,
            "link": describe_link(setting.link),
            "workload": {
                "num_tensors": len(workload.tensors),
                "numel": workload.numel,
                "bytes_per_element": workload.bytes_per_element,
                "param_bytes_per_element": workload.param_bytes_per_element,
                "num_microbatches": workload.num_microbatches,
                "forward_s": workload.forward_s,
                "backward_s": workload.backward_s,
                "optimizer_s": workload.optimizer_s,
                "compute_s": workload.compute_s,
            },
            "no_overlap_s": self.outlook.no_overlap_s,
            "lower_bound_s": self.outlook.lower_bound_s,
            "plans": [self._plan_dict(plan) for plan in self.plans],
            "sweep": [asdict(row) for row in self.sweep],
            "buckets": [{**asdict(entry), "padding_numel": entry.padding_numel} for entry in self.buckets],
            "memory": [asdict(row) for row in self.curves.memory],
            "scaling": [asdict(row) for row in self.curves.scaling],
            "scaling_gaps": list(self.curves.scaling_gaps),
            "measured": None if self.measured is None else self._measured_dict(self.measured),
        }

    def predicted_s(self, measured: MeasuredPlan) -> float:
        """Return the prediction of a measured plan: the file's, else that of its bucket size or of the config's plan."""
        if measured.predicted_s is not None:
            return measured.predicted_s
        if measured.bucket_numel is not None:
            return self.setting.step_s(self.setting.plan_of_size(measured.bucket_numel))
        return self.configured.step_s

    def _plan_dict(self, plan: NamedPlan) -> dict[str, Any]:
        return {
            "key": plan.key,
            "name": plan.name,
            "bucket_numel": plan.bucket_numel,
            "buckets": plan.num_buckets,
            "step_s": plan.step_s,
            "exposed_s": plan.exposed_s,
            "cuts": list(plan.plan.cut_names(self.setting.workload)),
        }

    def _measured_dict(self, measured: Measured) -> dict[str, Any]:
        plans = [{**asdict(plan), "predicted_s": self.predicted_s(plan)} for plan in measured.plans]
        return {"source": measured.source, "plans": plans}


def collect(
    run: RunConfig,
    *,
    dp_size: int | None = None,
    expert_dp_size: int | None = None,
    measured: Measured | None = None,
    title: str = "report",
) -> Report:
    """Return the figures of a config.

    Args:
        dp_size: ranks. ``None``: those that measured a table; any for a flat link, which costs the same on all of them.

    Raises:
        ConfigError: no link, no workload, a workload of another model, a link that says nothing about so many ranks.
        LayoutError: parameters that no buffer can hold.
    """
    setting = setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    outlook = outlook_of(setting, run.sweep.bucket_numel, has_scaling=False)
    return Report(
        title=title,
        outlook=outlook,
        plans=named_plans(outlook),
        buckets=bucket_entries(layout_of(setting), is_sharded=setting.mode is Mode.REDUCE_SCATTER),
        curves=curves_of(setting, moments_per_element=run.optimizer.moments_per_element),
        measured=measured,
    )


def describe_link(link: Link) -> dict[str, Any]:
    """Return a link as plain data with a sentence about it."""
    if isinstance(link, FlatLink):
        text = f"{format_seconds(link.latency_s)} + {link.seconds_per_byte * 1e9:.4g} ns per byte, for any operation"
        return {"kind": "flat", "text": text, **asdict(link)}
    if isinstance(link, RingLink):
        return {"kind": "ring", "text": f"ring, {_ring(link)}", **asdict(link)}
    if isinstance(link, TwoLevelLink):
        text = (
            f"two levels: {_ring(link.inside)} among {link.ranks_per_node} ranks of a node, {_ring(link.between)} between nodes"
        )
        return {"kind": "two_level", "text": text, **asdict(link)}
    if isinstance(link, MeasuredLink):
        tables = [_table(kind.value, dtype, points) for (kind, dtype), points in link.tables.items()]
        text = f"measured on {link.num_ranks} ranks, {len(tables)} table{'' if len(tables) == 1 else 's'}"
        return {"kind": "table", "text": text, "num_ranks": link.num_ranks, "tables": tables}
    return {"kind": type(link).__name__, "text": type(link).__name__}


def _ring(link: RingLink) -> str:
    return f"{format_seconds(link.latency_s)} a step, {link.bytes_per_s / 1e9:.4g} GB/s"


def _table(operation: str, dtype: str, points: tuple[tuple[float, float], ...]) -> Mapping[str, Any]:
    return {"operation": operation, "dtype": dtype, "points": [list(point) for point in points]}
