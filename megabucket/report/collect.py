"""``collect``: every figure of a report, computed once. Pure arithmetic, no torch, no files but those that the config names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from megabucket.errors import ConfigError
from megabucket.layout import ModelLayout, launch_order, shard_owners
from megabucket.planning import RunConfig
from megabucket.planning.by_host import HostAdvice, advise_by_host
from megabucket.planning.cuts import BucketPlan
from megabucket.planning.describe import describe_rows
from megabucket.planning.links import FileLink
from megabucket.planning.memory import memory_by_mode
from megabucket.planning.setting import (
    MANY_TENSORS,
    RANKS,
    Outlook,
    Setting,
    SweepRow,
    outlook_of,
    scaling_row,
    setting_of,
)
from megabucket.report.measured import Measured, MeasuredPlan
from megabucket.units import format_seconds

SCHEMA: Final = "megabucket.report"
SCHEMA_VERSION: Final = 1

OWNERS_SHOWN: Final = 4
"""Groups of ranks listed for each bucket, counted from rank 0; the last group is added."""


class NamedPlan(NamedTuple):
    """A plan with its simulated step."""

    key: str
    """``default``, ``config``, ``uniform``, ``optimal`` or ``fewest``; ``size`` for one of the sweep."""
    name: str
    """For readers."""
    row: SweepRow

    @property
    def plan(self) -> BucketPlan:
        """Its buckets."""
        return self.row.plan

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return self.row.step_s


@dataclass(frozen=True)
class Report:
    """The figures. ``to_dict`` is the JSON beside the page; the page shows the same."""

    title: str
    outlook: Outlook
    """The figures of ``megabucket simulate``."""
    plans: tuple[NamedPlan, ...]
    buckets: tuple[dict[str, Any], ...]
    """Rows of the config's layout and the owners of each, in launch order."""
    memory: tuple[dict[str, Any], ...]
    """Bytes of rank 0, which never owns less than another rank, by category in both modes, over the number of ranks."""
    scaling: tuple[dict[str, Any], ...]
    """A step with the config's plan and with optimal cuts, over the number of ranks."""
    scaling_gaps: tuple[str, ...]
    """Why points are missing."""
    measured: Measured | None = None
    link_name: str | None = None
    """The name of a shipped link, or the file of the link; ``None`` for one that the config describes itself."""
    by_host: HostAdvice | None = None
    """Shards inside each host against shards over all ranks; ``None`` where the link knows no hosts."""

    @property
    def setting(self) -> Setting:
        """The config that is simulated, on its ranks."""
        return self.outlook.setting

    @property
    def configured(self) -> NamedPlan:
        """The config's plan, which is the default when the config does not size buckets."""
        return self.plan("config") or self.plans[0]

    @property
    def summary(self) -> tuple[str, ...]:
        """Sentences about the figures; the first one says what to do."""
        compute_s, advice = self.setting.compute_s, self.outlook.advice
        exposed = format_seconds(self.configured.row.exposed_s)
        sentences = [advice.sentence, f"Communication adds {exposed} to {format_seconds(compute_s)} of compute."]
        sentences += [
            f"With one collective per tensor after backward a step would take {format_seconds(self.outlook.no_overlap_s)}.",
            f"No plan in this order takes less than {format_seconds(self.outlook.lower_bound_s)}.",
            *advice.remarks,
        ]
        return (*sentences, *(() if self.by_host is None else self.by_host.sentences))

    def plan(self, key: str) -> NamedPlan | None:
        """Return a plan by its key."""
        return next((plan for plan in self.plans if plan.key == key), None)

    def sized(self) -> Iterator[NamedPlan]:
        """Yield the plans of the sweep by increasing size, up to the one that holds everything."""
        total = self.setting.workload.numel
        rows = {row.bucket_numel or 0: row for row in self.outlook.rows}
        for numel in sorted(rows):
            if numel <= total or total not in rows:
                yield NamedPlan("size", f"{numel:,} elements", rows[numel])

    def measured_plans(self) -> Iterator[MeasuredPlan]:
        """Yield the measured plans, each with a prediction; steps without a size are those of the config's plan."""
        for plan in self.measured.plans if self.measured is not None else ():
            if plan.predicted_s is not None:
                yield plan
            elif plan.bucket_numel is not None:
                yield replace(plan, predicted_s=self.setting.step_s(self.setting.plan_of_size(plan.bucket_numel)))
            else:
                yield replace(plan, predicted_s=self.configured.step_s, bucket_numel=self.configured.row.bucket_numel)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, ready for JSON. Names are as given; times are seconds, sizes bytes or elements."""
        workload = self.setting.workload
        plans = [
            {"key": plan.key, "name": plan.name, **plan.row.to_dict(), "cuts": plan.plan.cut_names(workload)}
            for plan in self.plans
        ]
        measured = self.measured and {"source": self.measured.source, "plans": [asdict(plan) for plan in self.measured_plans()]}
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "title": self.title,
            "summary": self.summary,
            **self.outlook.to_dict(),
            "link": self.setting.link.model_dump(mode="json", exclude_none=True),
            "plans": plans,
            "buckets": self.buckets,
            "memory": self.memory,
            "scaling": self.scaling,
            "scaling_gaps": self.scaling_gaps,
            "measured": measured,
            "by_host": None if self.by_host is None else self.by_host.to_dict(),
        }


def collect(
    run: RunConfig,
    *,
    dp_size: int | None = None,
    expert_dp_size: int | None = None,
    measured: Measured | None = None,
    title: str = "report",
    note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Return the figures of a config.

    Args:
        dp_size: ranks. ``None``: those that measured a table; any for a flat link, which costs the same on all of them.
        note: called with each part before it is computed.

    Raises:
        ConfigError: no link, no workload, a workload of another model, a link that says nothing about so many ranks.
        LayoutError: parameters that no buffer can hold.
    """
    setting = setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    note("comparing bucket sizes")
    outlook = outlook_of(setting, run.sweep.bucket_numel, has_scaling=False)
    memory, scaling, gaps = [], [], dict[str, None]()
    # Each number of ranks needs a layout of its own.
    ranks = RANKS if len(setting.workload.tensors) < MANY_TENSORS else RANKS[::6]
    for num_ranks in sorted({*ranks, setting.dp_size}):
        note(f"memory and scaling on {num_ranks} ranks")
        there = setting.on(num_ranks)
        modes = memory_by_mode(
            there.params,
            there.ddp,
            dp_size=there.dp_size,
            group_sizes=there.group_sizes,
            num_instances=there.num_instances,
            moments_per_element=run.optimizer.moments_per_element,
            whole_params=there.whole_params,
        )
        memory.append({"dp_size": num_ranks, **{mode: asdict(each) for mode, each in modes.items()}})
        try:
            config = scaling_row(there, lambda at: at.current_plan)
            optimal = scaling_row(there, lambda at: at.optimal_plan)
            scaling.append({"num_ranks": num_ranks, "config": asdict(config), "optimal": asdict(optimal)})
        except ConfigError as error:  # a measured link knows its own number of ranks only; two levels want whole nodes
            gaps[str(error)] = None
    note("the layout")
    buckets = bucket_rows(setting.layout, is_sharded=setting.ddp.use_distributed_optimizer)
    by_host = advise_by_host(setting, moments_per_element=run.optimizer.moments_per_element)
    named = _named_plans(outlook)
    return Report(
        title,
        outlook,
        named,
        tuple(buckets),
        tuple(memory),
        tuple(scaling),
        tuple(gaps),
        measured=measured,
        link_name=run.link.path if isinstance(run.link, FileLink) else None,
        by_host=by_host,
    )


def _named_plans(outlook: Outlook) -> tuple[NamedPlan, ...]:
    """Return the default, the config's own plan if it sizes buckets, the best size of the sweep, and both kinds of cuts."""
    plans = [NamedPlan("default", "default", outlook.default)]
    if outlook.configured is not None:
        setting = outlook.setting
        largest = max(setting.layout.buffers, key=lambda buffer: buffer.numel)
        numel = None if setting.ddp.bucket_cuts is not None else largest.bucket_size or setting.workload.numel or None
        plans.append(NamedPlan("config", "this config", replace(outlook.configured, bucket_numel=numel)))
    return (
        *plans,
        NamedPlan("uniform", "best size", outlook.best),
        NamedPlan("optimal", "optimal cuts", outlook.optimal),
        NamedPlan("fewest", "fewest cuts within 1 %", outlook.fewest),
    )


def bucket_rows(layout: ModelLayout, *, is_sharded: bool) -> Iterator[dict[str, Any]]:
    """Yield all buckets in launch order with their first owners and the last one; no owners where ranks do not own shards."""
    rows = {(row.buffer, row.bucket): row for row in describe_rows(layout)}
    for index, id_ in enumerate(launch_order(layout)):
        buffer = layout.buffers[id_.buffer]
        row = rows[str(buffer.key), id_.bucket]
        owners = list(shard_owners(buffer, bucket=id_.bucket)) if is_sharded and buffer.num_shards > 1 and row.numel else []
        yield {
            "index": index,
            **asdict(row),
            "padding_numel": row.numel - row.params_numel,
            "shard_numel": row.numel // row.num_shards,
            "owners": [
                {
                    "first_rank": owner.first_rank,
                    "last_rank": owner.last_rank,
                    "first_param": owner.params[0] if owner.params else "",
                    "last_param": owner.params[-1] if owner.params else "",
                    "num_params": len(owner.params),
                }
                for owner in owners[:OWNERS_SHOWN] + owners[OWNERS_SHOWN:][-1:]
            ],
        }
