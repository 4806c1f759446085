"""``collect``: every figure of a report, computed once. Pure arithmetic, no torch, no files but those that the config names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from megabucket.errors import ConfigError
from megabucket.layout import BufferLayout, ModelLayout, ParamSpec, build_layout, launch_order, shard_owners
from megabucket.planning import RunConfig
from megabucket.planning.cuts import BucketPlan, plan_of_layout
from megabucket.planning.describe import BucketRow, describe_rows
from megabucket.planning.links import FlatLink, Link, MeasuredLink, RingLink, TwoLevelLink
from megabucket.planning.memory import RankMemory, memory_by_mode
from megabucket.planning.setting import (
    MANY_TENSORS,
    RANKS,
    SIZE_FIELDS,
    Outlook,
    Setting,
    SweepRow,
    outlook_of,
    scaling_row,
    setting_of,
    sweep_row,
)
from megabucket.planning.simulate import Mode
from megabucket.report.measured import Measured, MeasuredPlan
from megabucket.trace import StepTrace
from megabucket.units import format_seconds

SCHEMA: Final = "megabucket.report"
SCHEMA_VERSION: Final = 2

OWNERS_SHOWN: Final = 4
"""Groups of ranks listed for each bucket, counted from rank 0; the last rank is added when it is not among them."""

_WORTH_SAYING: Final = 5e-4
"""Of a step: what saves less saves nothing."""


@dataclass(frozen=True)
class NamedPlan:
    """A plan with its simulated step."""

    key: str
    """``default``, ``config``, ``uniform`` or ``optimal``; ``size`` for one of the sweep."""
    name: str
    """What a reader calls it."""
    plan: BucketPlan
    row: SweepRow

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return self.row.step_s

    @property
    def exposed_s(self) -> float:
        """Seconds that communication adds to the step."""
        return self.row.exposed_s


@dataclass(frozen=True, slots=True)
class Owner:
    """Ranks ``first_rank`` to ``last_rank``, inclusive, own pieces of the same parameters."""

    first_rank: int
    last_rank: int
    first_param: str
    """Empty when the ranks own padding only."""
    last_param: str
    num_params: int


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One bucket of the layout and who owns it."""

    row: BucketRow
    owners: tuple[Owner, ...]
    """The first groups of ranks and the last one; empty when the bucket is not sharded."""

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        row = self.row
        sizes = {"padding_numel": row.numel - row.params_numel, "shard_numel": row.numel // row.num_shards}
        return {**asdict(row), **sizes, "owners": [asdict(owner) for owner in self.owners]}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of rank 0, which never owns less than another rank, by category in both modes."""

    dp_size: int
    all_reduce: dict[str, int]
    reduce_scatter: dict[str, int]


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A step on so many ranks. Efficiency is the step without communication divided by the step with it."""

    num_ranks: int
    config_s: float
    config_efficiency: float
    optimal_s: float
    optimal_efficiency: float


@dataclass(frozen=True)
class Report:
    """The figures. ``to_dict`` is the JSON beside the page; the page shows the same."""

    title: str
    outlook: Outlook
    """What ``megabucket simulate`` prints."""
    plans: tuple[NamedPlan, ...]
    buckets: tuple[BucketEntry, ...]
    """Of the layout that the config gives, in launch order."""
    memory: tuple[MemoryRow, ...]
    scaling: tuple[ScalingRow, ...]
    scaling_gaps: tuple[str, ...]
    """Why points are missing."""
    measured: Measured | None = None

    @property
    def setting(self) -> Setting:
        """What is simulated."""
        return self.outlook.setting

    @property
    def configured(self) -> NamedPlan:
        """The plan that the config gives, which is the default when it does not size buckets."""
        return self.plan("config") or self.plans[0]

    @property
    def summary(self) -> tuple[str, ...]:
        """Sentences that say what the figures come to, the difference that another plan makes first."""
        step_s, compute_s = self.configured.step_s, self.setting.workload.compute_s
        mine = "this config" if self.configured.key == "config" else "the default buckets"
        saved = {plan.key: 1 - plan.step_s / step_s if step_s > 0 else 0.0 for plan in self.plans}
        if saved["optimal"] < _WORTH_SAYING:
            sentences = [f"No cuts save more than {_WORTH_SAYING:.2%} of a step, which takes {_exactly(step_s)} with {mine}."]
        else:
            saved_s = saved["optimal"] * step_s
            percent = _percent(saved["optimal"])
            sentences = [f"Optimal cuts save {percent} of a step: {format_seconds(saved_s)} of {_exactly(step_s)} with {mine}."]
        best = self.outlook.best.bucket_numel
        if best is not None and saved["uniform"] >= _WORTH_SAYING:
            sentences.append(f"The best size for all buckets, {best:,} elements, saves {_percent(saved['uniform'])}.")
        exposed, naive = format_seconds(self.configured.exposed_s), _exactly(self.outlook.no_overlap_s)
        sentences += [
            f"Communication adds {exposed} to {_exactly(compute_s)} of compute.",
            f"With one collective per tensor after backward a step would take {naive}.",
            f"No plan in this order takes less than {_exactly(self.outlook.lower_bound_s)}. All of this is simulated.",
        ]
        return tuple(sentences)

    def plan(self, key: str) -> NamedPlan | None:
        """Return a plan by its key."""
        return next((plan for plan in self.plans if plan.key == key), None)

    def sized(self) -> Iterator[NamedPlan]:
        """Yield the plans of the sweep by increasing size, up to the one that holds everything."""
        total = self.setting.workload.numel
        rows = {row.bucket_numel or 0: row for row in self.outlook.rows}
        for numel in sorted(rows):
            if numel <= total or total not in rows:
                yield NamedPlan("size", f"{numel:,} elements", self.setting.plan_of_size(numel), rows[numel])

    def traces(self) -> tuple[StepTrace, ...]:
        """Return simulated steps of the plan that the config gives."""
        return self.setting.traces(self.configured.plan, num_steps=3)

    def predicted_s(self, measured: MeasuredPlan) -> float:
        """Return the prediction of a measured plan: the file's, else that of its bucket size or of the config's plan."""
        if measured.predicted_s is not None:
            return measured.predicted_s
        if measured.bucket_numel is not None:
            return self.setting.step_s(self.setting.plan_of_size(measured.bucket_numel))
        return self.configured.step_s

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, ready for JSON. Names are as given; times are seconds, sizes bytes or elements."""
        setting, workload, outlook = self.setting, self.setting.workload, self.outlook
        measured = self.measured
        of_workload = ("numel", "bytes_per_element", "param_bytes_per_element", "num_microbatches")
        passes = ("forward_s", "backward_s", "optimizer_s", "compute_s")
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "title": self.title,
            "summary": list(self.summary),
            "dp_size": setting.dp_size,
            "expert_dp_size": setting.expert_dp_size,
            "num_instances": setting.num_instances,
            "mode": setting.mode.value,
            "overlap_grad_reduce": setting.overlap_grad_reduce,
            "overlap_param_gather": setting.overlap_param_gather,
            "link": describe_link(setting.link),
            "workload": {
                "num_tensors": len(workload.tensors),
                **{name: getattr(workload, name) for name in (*of_workload, *passes)},
            },
            "no_overlap_s": outlook.no_overlap_s,
            "lower_bound_s": outlook.lower_bound_s,
            "plans": [
                {"key": plan.key, "name": plan.name, **asdict(plan.row), "cuts": list(plan.plan.cut_names(workload))}
                for plan in self.plans
            ],
            "sweep": [asdict(row) for row in outlook.rows],
            "buckets": [entry.to_dict() for entry in self.buckets],
            "memory": [asdict(row) for row in self.memory],
            "scaling": [asdict(row) for row in self.scaling],
            "scaling_gaps": list(self.scaling_gaps),
            "measured": measured
            and {
                "source": measured.source,
                "plans": [{**asdict(plan), "predicted_s": self.predicted_s(plan)} for plan in measured.plans],
            },
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
        note: called with what is computed next.

    Raises:
        ConfigError: no link, no workload, a workload of another model, a link that says nothing about so many ranks.
        LayoutError: parameters that no buffer can hold.
    """
    setting = setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    note("comparing bucket sizes")
    outlook = outlook_of(setting, run.sweep.bucket_numel, has_scaling=False)
    memory, scaling, gaps = [], [], dict[str, None]()
    # Each number of ranks lays the model out anew.
    ranks = RANKS if len(setting.workload.tensors) < MANY_TENSORS else RANKS[::6]
    for num_ranks in sorted({*ranks, setting.dp_size}):
        note(f"memory and scaling on {num_ranks} ranks")
        there = setting.on(num_ranks)
        memory.append(_memory_row(there, run.optimizer.moments_per_element))
        try:
            scaling.append(_scaling_row(there))
        except ConfigError as error:  # a measured link knows its own number of ranks only; two levels want whole nodes
            gaps[str(error)] = None
    note("the layout")
    return Report(
        title,
        outlook,
        plans=_named_plans(outlook),
        buckets=bucket_entries(_layout_of(setting), is_sharded=setting.mode is Mode.REDUCE_SCATTER),
        memory=tuple(memory),
        scaling=tuple(scaling),
        scaling_gaps=tuple(gaps),
        measured=measured,
    )


def describe_link(link: Link) -> str:
    """Return a sentence about a link."""

    def ring(link: RingLink) -> str:
        return f"{format_seconds(link.latency_s)} a step, {link.bytes_per_s / 1e9:.4g} GB/s"

    if isinstance(link, FlatLink):
        return f"{format_seconds(link.latency_s)} + {link.seconds_per_byte * 1e9:.4g} ns per byte, for any operation"
    if isinstance(link, RingLink):
        return f"ring, {ring(link)}"
    if isinstance(link, TwoLevelLink):
        inside, between = ring(link.inside), ring(link.between)
        return f"two levels: {inside} among {link.ranks_per_node} ranks of a node, {between} between nodes"
    if isinstance(link, MeasuredLink):
        return f"measured on {link.num_ranks} ranks, {len(link.tables)} table{'' if len(link.tables) == 1 else 's'}"
    return type(link).__name__


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}" if fraction >= 0.01 else f"{fraction:.2%}"


def _exactly(seconds: float) -> str:
    """Return a duration with four digits, so that plans that differ look different.

    >>> _exactly(5.4512), _exactly(0.012)
    ('5.451 s', '12 ms')
    """
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.4g} {unit}"


# Plans and the layout behind them #


def _named_plans(outlook: Outlook) -> tuple[NamedPlan, ...]:
    """Return the default, what the config sizes otherwise, the best size of the sweep, and the optimal cuts."""
    setting, best = outlook.setting, outlook.best
    plans = [_plan_of_layout(setting, is_default=True)]
    if any(getattr(setting.ddp, name) is not None for name in SIZE_FIELDS):
        plans.append(_plan_of_layout(setting, is_default=False))
    plans.append(NamedPlan("uniform", "best size", setting.plan_of_size(best.bucket_numel), best))
    plans.append(NamedPlan("optimal", "optimal cuts", setting.optimal_plan, outlook.optimal))
    return tuple(plans)


def _plan_of_layout(setting: Setting, *, is_default: bool) -> NamedPlan:
    layout = _layout_of(setting, is_default=is_default)
    buffer = max(layout.buffers, key=lambda each: each.numel)
    numel = buffer.bucket_size if buffer.bucket_size is not None else setting.workload.numel or None
    if not is_default and setting.ddp.bucket_cuts is not None:
        numel = None
    plan = _layout_plan(setting, layout)
    key, name = ("default", "default") if is_default else ("config", "this config")
    return NamedPlan(key, name, plan, sweep_row(setting, plan, numel))


def _specs_of(setting: Setting) -> tuple[ParamSpec, ...]:
    """Return the model's parameters; without a model one vector for each tensor of the workload."""
    workload = setting.workload
    return setting.specs or tuple(ParamSpec(each.name, (each.numel,), workload.param_dtype) for each in workload.tensors)


def _layout_of(setting: Setting, *, is_default: bool = False) -> ModelLayout:
    """Return the layout that the config gives, or the one it gives without the fields that size buckets."""
    ddp = setting.ddp.model_copy(update=dict.fromkeys(SIZE_FIELDS)) if is_default else setting.ddp
    return build_layout(_specs_of(setting), ddp, dp_size=setting.shards["dense"], group_sizes=setting.shards)


def _layout_plan(setting: Setting, layout: ModelLayout) -> BucketPlan:
    workload, plan = setting.workload, plan_of_layout(setting.workload, layout)
    if setting.specs is not None:
        return plan
    # Without a model the workload says what an element takes on the wire; the layout could only guess a dtype.
    numels = [layout.buffers[id_.buffer].buckets[id_.bucket].numel for id_ in launch_order(layout)]
    grad_bytes = tuple(numel * workload.bytes_per_element for numel in numels)
    return replace(plan, grad_bytes=grad_bytes, param_bytes=tuple(numel * workload.param_bytes_per_element for numel in numels))


def bucket_entries(layout: ModelLayout, *, is_sharded: bool) -> tuple[BucketEntry, ...]:
    """Return all buckets in launch order.

    Args:
        is_sharded: whether ranks own shards, or all of them everything.
    """
    rows = {(row.buffer, row.bucket): row for row in describe_rows(layout)}
    entries = []
    for id_ in launch_order(layout):
        buffer = layout.buffers[id_.buffer]
        row = rows[str(buffer.key), id_.bucket]
        has_owners = is_sharded and buffer.num_shards > 1 and row.numel
        entries.append(BucketEntry(row, tuple(_shown_owners(buffer, id_.bucket)) if has_owners else ()))
    return tuple(entries)


def _shown_owners(buffer: BufferLayout, bucket: int) -> Iterator[Owner]:
    everybody = list(shard_owners(buffer, bucket=bucket))
    for owners in everybody[:OWNERS_SHOWN] + everybody[OWNERS_SHOWN:][-1:]:
        params = owners.params or ("",)
        yield Owner(owners.first_rank, owners.last_rank, params[0], params[-1], len(owners.params))


# Over the number of ranks #


def _memory_row(setting: Setting, moments_per_element: int) -> MemoryRow:
    modes = memory_by_mode(
        _specs_of(setting),
        setting.ddp,
        dp_size=setting.dp_size,
        group_sizes=setting.group_sizes,
        num_instances=setting.num_instances,
        moments_per_element=moments_per_element,
    )
    sizes = {
        mode: {field.name.removesuffix("_bytes"): getattr(memory, field.name) for field in fields(RankMemory)}
        for mode, memory in modes.items()
    }
    return MemoryRow(setting.dp_size, sizes["all_reduce"], sizes["reduce_scatter"])


def _scaling_row(setting: Setting) -> ScalingRow:
    config = scaling_row(setting, lambda there: _layout_plan(there, _layout_of(there)))
    optimal = scaling_row(setting, lambda there: there.optimal_plan)
    return ScalingRow(setting.dp_size, config.step_s, config.efficiency, optimal.step_s, optimal.efficiency)
