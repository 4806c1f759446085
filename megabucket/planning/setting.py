"""``Setting``: one config on one group of ranks, ready to simulate; ``Outlook``: all its figures. No torch.

With a ``model`` section buckets are those of its layout, padding included, and the small collectives of a step count. Without
one the workload's tensors are all there is: buckets hold plain numbers of elements, as in a textbook.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import DEFAULT_BUCKET_NUMEL, DEFAULT_BUCKET_NUMEL_PER_RANK
from megabucket.errors import ConfigError
from megabucket.layout import ModelLayout, ParamSpec, build_layout, launch_order, newton_schulz_flop, plan_owners
from megabucket.planning.advice import (
    DEFAULT_BUCKETS,
    NO_LINK,
    NO_TIMES,
    ONE_RANK,
    THIS_CONFIG,
    TOLERANCE,
    Advice,
    Choice,
    advise,
    unknown_advice,
)
from megabucket.planning.architecture import param_specs
from megabucket.planning.cuts import BucketPlan, cuts_by_buffer, per_tensor_plan, plan_of_layout, uniform_plan
from megabucket.planning.links import FileLink, FlatLink, Link, MeasuredLink, ReplicatedLink, read_link
from megabucket.planning.owners import busiest_exchange, owned_flop
from megabucket.planning.partition import fewest_buckets_plan, lower_bound_s, optimal_plan
from megabucket.planning.run_config import RunConfig, group_sizes_of, shard_counts
from megabucket.planning.simulate import (
    FENCE,
    GRAD_NORM,
    HostCosts,
    Mode,
    StepCollective,
    SyncOptions,
    simulate_step_s,
    simulate_steps,
)
from megabucket.planning.workload import Workload, WorkloadConfig, check_workload_matches, read_workload, workload_of_specs
from megabucket.trace import StepTrace

SIZE_FIELDS: Final = ("bucket_size", "bucket_cap_mb", "num_buckets", "bucket_cuts")
"""The fields of ``ddp`` that say where buckets end."""

RANKS: Final = tuple(2**exponent for exponent in range(13))
"""1 to 4096."""

MANY_TENSORS: Final = 10_000
"""From here on fewer sizes and numbers of ranks are looked at: each of them is a layout of all tensors."""

_SLACK: Final = 0.95 * TOLERANCE
"""Fraction of the best step that a plan of few buckets may take longer before padding, which adds a little."""

_FEW_SIZES: Final = 8
_SOME_SIZES: Final = 20
_FEW_RANKS: Final = RANKS[::3]


@dataclass(frozen=True)
class Setting:
    """A workload on a link, and how a config sends its gradients.

    Args:
        specs: trainable parameters of the model in registration order; ``None`` without a model.
        dp_size: ranks of the data-parallel group.
        group_sizes: ranks of the reduction groups that have another number of them, by name.
        num_instances: replicas among the ranks of each group; gradients are reduced inside them, then over them.
        has_grad_norm: whether a distributed optimizer computes the gradient norm, as it does by default.
        host: the costs of the host in a step; nothing when not given.
        whole_params: parameters that are updated whole; with shards each at an owner.
        owner_flops_per_s: operations per second in such an update.
    """

    workload: Workload
    link: Link
    ddp: DistributedDataParallelConfig
    dp_size: int
    specs: tuple[ParamSpec, ...] | None = None
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    num_instances: int = 1
    has_grad_norm: bool = True
    host: HostCosts | None = None
    whole_params: frozenset[str] = frozenset()
    owner_flops_per_s: float = 4e14

    @property
    def mode(self) -> Mode:
        """How gradients travel."""
        return Mode.of(self.ddp)

    @property
    def overlap_grad_reduce(self) -> bool:
        """Whether a bucket goes out before backward ends."""
        return self.ddp.overlap_grad_reduce and self.ddp.bucket_groups == "per_bucket"

    @property
    def overlap_param_gather(self) -> bool:
        """Whether parameters are gathered during the next forward."""
        return self.ddp.overlap_param_gather

    @property
    def step_collectives(self) -> tuple[StepCollective, ...]:
        """The collectives of the wrapper and the optimizer after the buckets; none without a model."""
        if self.specs is None or self.dp_size == 1:
            return ()
        sends_norm = self.ddp.use_distributed_optimizer and self.has_grad_norm
        return ((FENCE,) if self.ddp.fence else ()) + ((GRAD_NORM,) if sends_norm else ())

    @property
    def expert_dp_size(self) -> int | None:
        """Ranks that expert parameters are reduced over; ``None``: those of all others."""
        return self.group_sizes.get("expert")

    @property
    def shards(self) -> dict[str, int]:
        """Into how many shards the buckets of each reduction group are cut.

        Raises:
            ConfigError: the ranks of a group are no multiple of the instances.
        """
        return shard_counts(self.dp_size, self.group_sizes, self.num_instances)

    def on(self, dp_size: int) -> Setting:
        """Return the same on another number of ranks, of which each reduction group keeps its share.

        There are as many instances as before, or fewer where so many do not divide every group.
        """
        sizes = {name: max(1, dp_size * size // self.dp_size) for name, size in self.group_sizes.items()}
        num_instances = math.gcd(self.num_instances, dp_size, *sizes.values())
        return replace(self, dp_size=dp_size, group_sizes=sizes, num_instances=num_instances)

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """The model's parameters; without a model one vector for each tensor of the workload."""
        workload = self.workload
        return self.specs or tuple(ParamSpec(each.name, (each.numel,), workload.param_dtype) for each in workload.tensors)

    # Plans #

    def plan_of_size(self, bucket_numel: int | None) -> BucketPlan:
        """Return the plan of one bucket size in elements; ``None``: the default one.

        Raises:
            ConfigError: the workload is of another model.
        """
        if self.specs is not None:
            return self._plan_of_layout(bucket_size=bucket_numel)
        return uniform_plan(self.workload, bucket_numel if bucket_numel is not None else self.default_numel)

    @cached_property
    def configured_plan(self) -> BucketPlan | None:
        """The plan of the config's own ``ddp`` section, or ``None`` when that says nothing about sizes."""
        return self._plan_of(self.layout) if self.size_fields else None

    @cached_property
    def default_plan(self) -> BucketPlan:
        """The plan of the config without its sizes."""
        return self._plan_of_layout()

    @property
    def size_fields(self) -> tuple[str, ...]:
        """The fields of ``ddp`` that say where buckets end, as far as they are set."""
        return tuple(name for name in SIZE_FIELDS if getattr(self.ddp, name) is not None)

    @property
    def current_plan(self) -> BucketPlan:
        """The plan of the config as it is: its own sizes, or the default one."""
        return self.configured_plan or self.default_plan

    @property
    def default_numel(self) -> int:
        """Elements that close a bucket when nothing is said."""
        return max(DEFAULT_BUCKET_NUMEL, DEFAULT_BUCKET_NUMEL_PER_RANK * self.shards["dense"])

    @cached_property
    def optimal_plan(self) -> BucketPlan:
        """The plan of the optimal cuts; with a model they are padded like any other."""
        return self._unpadded_plan if self.specs is None else self._plan_of_layout(bucket_cuts=self.optimal_cuts)

    @property
    def optimal_cuts(self) -> tuple[str, ...]:
        """The ``bucket_cuts`` of the optimal plan, found for the tensors' own sizes.

        Where parameters lie in several buffers (dtypes, experts), each buffer is cut wherever the optimal plan cuts.
        """
        return self._cuts_of(self._unpadded_plan)

    @cached_property
    def fewest_plan(self) -> BucketPlan:
        """A plan with the fewest buckets of those within 1 % of the shortest step; with a model padded like any other."""
        return self._few_plan if self.specs is None else self._plan_of_layout(bucket_cuts=self.fewest_cuts)

    @property
    def fewest_cuts(self) -> tuple[str, ...]:
        """The ``bucket_cuts`` of that plan, like ``optimal_cuts``."""
        return self._cuts_of(self._few_plan)

    @cached_property
    def _few_plan(self) -> BucketPlan:
        slack_s = _SLACK * self.step_s(self.optimal_plan)
        return fewest_buckets_plan(self.as_launched, self._grid, slack_s, host=self.host, **self._sync)

    def _cuts_of(self, plan: BucketPlan) -> tuple[str, ...]:
        return plan.cut_names(self.workload) if self.specs is None else cuts_by_buffer(plan, self.specs)

    @cached_property
    def _unpadded_plan(self) -> BucketPlan:
        return optimal_plan(self.as_launched, self._grid, host=self.host, **self._sync)

    @cached_property
    def as_launched(self) -> Workload:
        """The workload as the buckets of a layout see it: launched in layout order, whatever order gradients come in."""
        if self.specs is None:
            return self.workload
        index_of = {spec.name: index for index, spec in enumerate(self.specs)}
        return self.workload.in_order([index_of[name] for name in self.ddp.bucket_order or reversed(index_of)])

    def _plan_of_layout(self, **sizes: object) -> BucketPlan:
        ddp = self.ddp.model_copy(update={**dict.fromkeys(SIZE_FIELDS), **sizes})
        return self._plan_of(replace(self, ddp=ddp).layout)

    def _plan_of(self, layout: ModelLayout) -> BucketPlan:
        workload = self.workload
        plan = plan_of_layout(workload, layout, self.whole_params if self.mode is Mode.REDUCE_SCATTER else ())
        if self.specs is not None:
            return plan
        # Without a model the workload gives the bytes of an element on the wire; the layout could only guess a dtype.
        numels = [layout.buffers[id_.buffer].buckets[id_.bucket].numel for id_ in launch_order(layout)]
        grad_bytes = tuple(numel * workload.bytes_per_element for numel in numels)
        return replace(
            plan, grad_bytes=grad_bytes, param_bytes=tuple(numel * workload.param_bytes_per_element for numel in numels)
        )

    @property
    def layout(self) -> ModelLayout:
        """The layout that the config gives the parameters; built anew each time."""
        return build_layout(self.params, self.ddp, dp_size=self.shards["dense"], group_sizes=self.shards)

    # Times #

    @cached_property
    def owner_update_s(self) -> float:
        """Seconds in which the busiest owner updates its whole tensors; without shards a rank updates all of them."""
        if not self.whole_params:
            return 0.0
        if self.mode is Mode.ALL_REDUCE:
            shapes = [spec.shape for spec in self.specs or () if spec.name in self.whole_params]
            return sum(map(newton_schulz_flop, shapes)) / self.owner_flops_per_s
        return owned_flop(plan_owners(self.layout, self.whole_params)) / self.owner_flops_per_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step that sends nothing."""
        return self.workload.compute_s + self.owner_update_s

    def step_s(self, plan: BucketPlan) -> float:
        """Return the simulated seconds of a step.

        Raises:
            ConfigError: the link does not know the cost of a collective.
        """
        return simulate_step_s(
            self.workload,
            plan,
            self._grid,
            **self._sync,
            step_collectives=self.step_collectives,
            owner_update_s=self.owner_update_s,
            host=self.host,
        )

    @property
    def no_overlap_s(self) -> float:
        """Seconds of a step with one collective for each tensor, all of them after backward."""
        ddp = self.ddp.model_copy(update={"overlap_grad_reduce": False, "overlap_param_gather": False})
        plan, ranks = per_tensor_plan(self.workload), self._ranks_of
        num_ranks = None if ranks is None else tuple(ranks[index] for (index,) in plan.buckets)
        if self.mode is Mode.REDUCE_SCATTER and self.whole_params:
            plan = self._with_exchanges(plan)
        return replace(self, ddp=ddp).step_s(replace(plan, num_ranks=num_ranks))

    def _with_exchanges(self, plan: BucketPlan) -> BucketPlan:
        """Add the exchange of each tensor, in equal shards, as the rank with most bytes sees it."""
        layout = self.layout
        owners = plan_owners(layout, self.whole_params)
        rank, owner_of = busiest_exchange(layout, owners), {tensor.param: tensor for tensor in owners.tensors}
        numels = []
        for (index,) in plan.buckets:
            tensor, owned = self.workload.tensors[index], owner_of.get(self.workload.tensors[index].name)
            num_ranks = 1 if owned is None else owners.num_ranks[owned.group]
            held_numel = tensor.numel // num_ranks
            is_owner = owned is not None and rank % num_ranks == owned.owner
            numels.append(tensor.numel - held_numel if is_owner or num_ranks == 1 else held_numel)
        return replace(
            plan,
            to_owner_bytes=tuple(numel * self.workload.bytes_per_element for numel in numels),
            from_owner_bytes=tuple(numel * self.workload.param_bytes_per_element for numel in numels),
        )

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no plan with buckets in ready order can beat; small collectives and padding are not in it."""
        is_one_buffer = len({(spec.dtype, spec.group) for spec in self.specs or ()}) <= 1
        workload = self.as_launched if is_one_buffer else self.workload
        of_rest_s = lower_bound_s(workload, self._grid, ranks_of=self._ranks_of, is_one_buffer=is_one_buffer, **self._sync)
        return of_rest_s + self.owner_update_s

    def traces(self, plan: BucketPlan, *, num_steps: int = 2) -> tuple[StepTrace, ...]:
        """Return simulated steps; all but the first are alike.

        Raises:
            ConfigError: the link does not know the cost of a collective.
        """
        return simulate_steps(
            self.workload,
            plan,
            self._grid,
            **self._sync,
            step_collectives=self.step_collectives,
            owner_update_s=self.owner_update_s,
            num_steps=num_steps,
        )

    @property
    def _ranks_of(self) -> tuple[int, ...] | None:
        """The shards of the reduction group of each tensor; ``None`` where all have as many."""
        if not self.group_sizes:
            return None
        return tuple(self.shards.get(spec.group, self.shards["dense"]) for spec in self.specs or ()) or None

    @property
    def _grid(self) -> Link:
        return self.link if self.num_instances == 1 else ReplicatedLink(link=self.link, num_instances=self.num_instances)

    @property
    def _sync(self) -> SyncOptions:
        return {
            "num_ranks": self.shards["dense"],
            "mode": self.mode,
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.overlap_param_gather,
        }


def setting_of(run: RunConfig, *, dp_size: int | None = None, expert_dp_size: int | None = None) -> Setting:
    """Return the setting of a config.

    Args:
        dp_size: ranks. ``None``: those that measured a table; any for a flat link, which costs the same on all of them.
        expert_dp_size: ranks of the reduction group ``expert``, in place of the config's ``group_sizes``.

    Raises:
        ConfigError: no link, no workload, no number of ranks where it matters, a group without parameters, or files that
            cannot be read.
        LayoutError: parameters that no buffer can hold.
    """
    if run.link is None:
        raise ConfigError(
            "link is required: what does a collective cost? Name a shipped link (link=h100-cluster-400g), or the file that "
            "`megabucket calibrate` wrote (link=link.yaml), or give a link section"
        )
    link = read_link(run.link.path) if isinstance(run.link, FileLink) else run.link
    specs = tuple(param_specs(run.model)) if run.model is not None else None
    group_sizes = group_sizes_of(run, specs or (), expert_dp_size=expert_dp_size)
    if dp_size is None:
        if not isinstance(link, MeasuredLink | FlatLink):
            raise ConfigError("the cost of a collective on this link depends on the number of ranks; give --dp-size")
        dp_size = link.num_ranks if isinstance(link, MeasuredLink) else 1
    if specs is None and run.optimizer.name == "muon":
        raise ConfigError("optimizer.name=muon needs a model section: what an update of a matrix takes depends on its shape")
    return Setting(
        workload_of(run, specs),
        link,
        run.ddp,
        dp_size,
        specs,
        group_sizes,
        run.num_distributed_optimizer_instances,
        whole_params=run.optimizer.whole_params(specs or ()),
        owner_flops_per_s=run.optimizer.flops_per_s,
    )


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
        workload = config.listed()
        if specs is not None:
            check_workload_matches(workload, specs)
        return workload
    if config.path is not None:
        return replace(read_workload(Path(config.path), specs), **config.given)
    if config.tokens_per_microbatch is None or config.flops_per_s is None or specs is None or run.model is None:
        raise ConfigError(
            "there is nothing to simulate: give workload.tensors, or workload.path, or a model section with "
            "workload.tokens_per_microbatch and workload.flops_per_s"
        )
    second = config.tokens_per_microbatch / config.flops_per_s
    return replace(workload_of_specs(specs, run.ddp, flop_s=second, model=run.model), **config.given)


# Figures #


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One plan in numbers."""

    plan: BucketPlan
    bucket_numel: int | None
    """The size that closes its buckets, in elements; ``None`` when they are cut in another way."""
    buckets: int
    """Buckets that send anything."""
    step_s: float
    exposed_s: float
    """Seconds that communication adds to the compute of the step."""

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {name: getattr(self, name) for name in ("bucket_numel", "buckets", "step_s", "exposed_s")}


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One number of ranks in numbers."""

    num_ranks: int
    step_s: float
    efficiency: float
    """Throughput per rank, as a fraction of that of one rank alone."""


@dataclass(frozen=True)
class Outlook:
    """All figures of a setting."""

    setting: Setting
    no_overlap_s: float
    """One collective for each tensor, all of them after backward."""
    lower_bound_s: float
    """Seconds that no plan with buckets in ready order can beat."""
    rows: tuple[SweepRow, ...]
    """One for each bucket size."""
    default: SweepRow
    """The default bucket size."""
    configured: SweepRow | None
    """The plan of the config's own ``ddp`` section."""
    optimal: SweepRow
    fewest: SweepRow
    """Cuts with the fewest buckets of those within 1 % of the shortest step, before padding."""
    scaling: tuple[ScalingRow, ...]
    """The optimal cuts of each number of ranks; empty where the link does not depend on it."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """The tensors that close the optimal buckets, in the order in which gradients become ready."""
        return self.optimal.plan.cut_names(self.setting.workload)

    @property
    def current(self) -> SweepRow:
        """The config as it is: its own sizes, or the default one."""
        return self.configured or self.default

    @cached_property
    def advice(self) -> Advice:
        """What to do about the buckets of the config."""
        setting, unset = self.setting, dict.fromkeys(self.setting.size_fields)
        name = DEFAULT_BUCKETS if self.configured is None else THIS_CONFIG
        if setting.dp_size == 1 and not isinstance(setting.link, FlatLink):
            return unknown_advice(name, ONE_RANK)
        if all(tensor.backward_s == 0 for tensor in setting.workload.tensors):
            return unknown_advice(name, NO_TIMES)

        def choice(name: str, row: SweepRow, **ddp: Any) -> Choice:
            fields = {**unset, **ddp} if row is not self.current else {}
            # Without a model plans of the sweep and cuts are not padded; neither are those that they are compared with.
            step_s = row.step_s if setting.specs is not None else setting.step_s(BucketPlan(row.plan.buckets))
            return Choice(name, row.buckets, step_s, fields)

        others = [choice(f"ddp.bucket_size={row.bucket_numel}", row, bucket_size=row.bucket_numel) for row in self.rows]
        for row in (self.optimal, self.fewest):
            names = row.plan.cut_names(setting.workload)
            others.append(choice(f"these {len(names):,} bucket_cuts", row, bucket_cuts=names))
        if self.configured is not None:
            others.append(choice(DEFAULT_BUCKETS, self.default))
        rows = (*self.rows, self.optimal, self.fewest, self.default, self.current)
        return advise(choice(name, self.current), others, num_plans=len({row.plan.buckets for row in rows}))

    @property
    def best(self) -> SweepRow:
        """The best size; of several that tie the largest, which has the fewest buckets."""
        shortest_s = min(row.step_s for row in self.rows)
        ties = (row for row in self.rows if row.step_s <= shortest_s * (1 + 1e-9))
        return max(ties, key=lambda row: row.bucket_numel or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON: seconds, and elements where a name says ``numel``."""
        setting, workload = self.setting, self.setting.workload
        of_setting = ("dp_size", "expert_dp_size", "group_sizes", "num_instances", "mode")
        overlaps = ("overlap_grad_reduce", "overlap_param_gather")
        of_workload = ("numel", "num_microbatches", "forward_s", "backward_s", "optimizer_s")
        optimal, fewest = (
            {name: value for name, value in row.to_dict().items() if name != "bucket_numel"}
            for row in (self.optimal, self.fewest)
        )
        return {
            **{name: getattr(setting, name) for name in (*of_setting, *overlaps)},
            "num_tensors": len(workload.tensors),
            **{name: getattr(workload, name) for name in of_workload},
            "compute_s": setting.compute_s,
            "owner_update_s": setting.owner_update_s,
            "no_overlap_s": self.no_overlap_s,
            "lower_bound_s": self.lower_bound_s,
            "rows": [row.to_dict() for row in self.rows],
            "advice": self.advice.to_dict(),
            "default": self.default.to_dict(),
            "configured": self.configured and self.configured.to_dict(),
            "optimal": {**optimal, "cuts": list(self.cuts)},
            "fewest": {**fewest, "cuts": list(self.fewest.plan.cut_names(workload))},
            "scaling": [asdict(row) for row in self.scaling],
        }


def outlook_of(setting: Setting, sizes: Sequence[int] | None = None, *, has_scaling: bool = True) -> Outlook:
    """Return all figures of a setting.

    Args:
        sizes: bucket sizes in elements to compare; ``None``: some between the smallest tensor and everything, with the default.
        has_scaling: whether to look at other numbers of ranks as well.

    Raises:
        ConfigError: the link does not know the cost of a collective, or the workload is of another model.
    """
    workload = setting.workload
    is_large = len(workload.tensors) >= MANY_TENSORS
    has_model = setting.specs is not None
    if sizes is None:
        some = sizes_to_sweep(workload, count=_FEW_SIZES if is_large else _SOME_SIZES)
        sizes = sorted({*some, setting.default_numel} if has_model else some)
    scales = has_scaling and not isinstance(setting.link, FlatLink | MeasuredLink)
    return Outlook(
        setting=setting,
        no_overlap_s=setting.no_overlap_s,
        lower_bound_s=setting.lower_bound_s,
        rows=tuple(sweep_row(setting, setting.plan_of_size(size), size) for size in sizes),
        default=sweep_row(setting, setting.default_plan, setting.default_numel),
        configured=None if setting.configured_plan is None else sweep_row(setting, setting.configured_plan),
        optimal=sweep_row(setting, setting.optimal_plan),
        fewest=sweep_row(setting, setting.fewest_plan),
        scaling=scaling(setting, _FEW_RANKS if is_large else RANKS) if scales else (),
    )


def advice_of(run: RunConfig, *, dp_size: int, expert_dp_size: int | None = None) -> Advice:
    """Return what to do about the buckets of a config, also where it says too little to simulate a step."""
    is_sized = any(getattr(run.ddp, name) is not None for name in SIZE_FIELDS)
    name = THIS_CONFIG if is_sized else DEFAULT_BUCKETS
    if dp_size == 1:
        return unknown_advice(name, ONE_RANK)
    if run.link is None:
        return unknown_advice(name, NO_LINK)
    try:
        return outlook_of(
            setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size), run.sweep.bucket_numel, has_scaling=False
        ).advice
    except ConfigError as error:  # no times, or a link that says nothing about so many ranks
        return unknown_advice(name, f"others cannot be compared: {error}")


def sizes_to_sweep(workload: Workload, *, count: int = _SOME_SIZES) -> tuple[int, ...]:
    """Return ``count`` bucket sizes, from the smallest tensor to everything in one bucket.

    >>> from megabucket.planning.workload import TensorWork
    >>> sizes_to_sweep(Workload((TensorWork("a", 10), TensorWork("b", 70))), count=4)
    (10, 20, 40, 80)
    """
    smallest = min((tensor.numel for tensor in workload.tensors if tensor.numel), default=1)
    largest = max(workload.numel, smallest)
    ratio = (largest / smallest) ** (1 / (count - 1))
    return tuple(sorted({min(round(smallest * ratio**step), largest) for step in range(count)}))


def sweep_row(setting: Setting, plan: BucketPlan, bucket_numel: int | None = None) -> SweepRow:
    """Return one plan in numbers.

    Raises:
        ConfigError: the link does not know the cost of a collective.
    """
    step_s = setting.step_s(plan)
    # Sums in another order may miss zero by a rounding error.
    exposed_s = max(step_s - setting.compute_s, 0.0)
    return SweepRow(plan, bucket_numel, plan.num_collectives(setting.workload), step_s, exposed_s)


def scaling(setting: Setting, ranks: Iterable[int] = RANKS) -> tuple[ScalingRow, ...]:
    """Return the efficiency of the optimal cuts over numbers of ranks, each rank keeping its own batch (weak scaling).

    ``efficiency = throughput(n) / (n * throughput(1)) = step(1) / step(n)``: a rank alone sends nothing. It is taken to update
    as many whole tensors as the busiest of the owners, which share them. Numbers of ranks that the link knows nothing about
    (parts of nodes) are left out; a table knows one number only.
    """
    rows = []
    for count in ranks:
        with contextlib.suppress(ConfigError):
            rows.append(scaling_row(setting.on(count), lambda at: at.optimal_plan))
    return tuple(rows)


def scaling_row(setting: Setting, plan_of: Callable[[Setting], BucketPlan]) -> ScalingRow:
    """Return the step on the ranks of the setting in numbers.

    Args:
        plan_of: returns the plan. Not called for one rank, which sends nothing whatever a link would charge for it.

    Raises:
        ConfigError: the link does not know the cost of a collective on so many ranks.
    """
    alone_s = setting.compute_s
    step_s = alone_s if setting.dp_size == 1 else setting.step_s(plan_of(setting))
    return ScalingRow(setting.dp_size, step_s, alone_s / step_s if step_s > 0 else 1.0)
