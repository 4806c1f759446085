"""The plans by name that the report compares, each simulated. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megabucket.layout import ModelLayout
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.outlook import Outlook
from megabucket.planning.setting import Setting
from megabucket.planning.sweep import SweepRow, sweep_row
from megabucket.report.layouts import layout_of, layout_plan, sizes_buckets


@dataclass(frozen=True)
class NamedPlan:
    """A plan with its simulated step."""

    key: str
    """``default``, ``config``, ``uniform`` or ``optimal``."""
    name: str
    """What a reader calls it."""
    plan: BucketPlan
    num_buckets: int
    """Buckets that send anything."""
    step_s: float
    exposed_s: float
    """Seconds that communication adds to the step."""
    bucket_numel: int | None = None
    """The size that closes its buckets; ``None`` when they are cut in another way."""


def named_plans(outlook: Outlook) -> tuple[NamedPlan, ...]:
    """Return the default, what the config sizes otherwise, the best size of the sweep, and the optimal cuts.

    Raises:
        ConfigError: the link cannot say what a collective costs, or the workload is of another model.
    """
    setting, best = outlook.setting, outlook.best
    plans = [_of_layout(setting, "default", "default", is_default=True)]
    if sizes_buckets(setting):
        plans.append(_of_layout(setting, "config", "this config", is_default=False))
    plans.append(_named("uniform", "best size", setting.plan_of_size(best.bucket_numel), best))
    plans.append(_named("optimal", "optimal cuts", setting.optimal_plan, outlook.optimal))
    return tuple(plans)


def _of_layout(setting: Setting, key: str, name: str, *, is_default: bool) -> NamedPlan:
    layout = layout_of(setting, is_default=is_default)
    is_cut_by_name = not is_default and setting.ddp.bucket_cuts is not None
    numel = None if is_cut_by_name else _bucket_numel(setting, layout)
    plan = layout_plan(setting, layout)
    return _named(key, name, plan, sweep_row(setting, plan, numel))


def _bucket_numel(setting: Setting, layout: ModelLayout) -> int | None:
    """Return the size that closes the buckets of the largest buffer; everything it holds when nothing does."""
    buffer = max(layout.buffers, key=lambda each: each.numel)
    return buffer.bucket_size if buffer.bucket_size is not None else setting.workload.numel or None


def _named(key: str, name: str, plan: BucketPlan, row: SweepRow) -> NamedPlan:
    return NamedPlan(key, name, plan, row.buckets, row.step_s, row.exposed_s, row.bucket_numel)
