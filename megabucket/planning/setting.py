"""``Setting``: what one config simulates on one group of ranks, and the plans it compares. No torch.

With a ``model`` section buckets are those of its layout, padding included, and the small collectives of a step count. Without
one the workload's tensors are all there is: buckets hold plain numbers of elements, as in a textbook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ModelLayout, ParamSpec, build_layout
from megabucket.planning import RunConfig
from megabucket.planning.architecture import param_specs
from megabucket.planning.cuts import BucketPlan, cuts_by_buffer, per_tensor_plan, plan_of_layout, uniform_plan
from megabucket.planning.derive import wire_bytes
from megabucket.planning.inputs import link_of, workload_of
from megabucket.planning.links import FlatLink, Link, MeasuredLink
from megabucket.planning.partition import lower_bound_s, optimal_plan
from megabucket.planning.simulate import FENCE, GRAD_NORM, Mode, StepCollective, simulate_step_s, simulate_steps
from megabucket.planning.workload import Workload
from megabucket.trace import StepTrace

SIZE_FIELDS: Final = ("bucket_size", "bucket_cap_mb", "num_buckets", "bucket_cuts")
"""The fields of ``ddp`` that say where buckets end."""


@dataclass(frozen=True)
class Setting:
    """A workload on a link, and how a config sends its gradients.

    Args:
        specs: trainable parameters of the model in registration order; ``None`` without a model.
        dp_size: ranks of the data-parallel group.
        expert_dp_size: ranks that expert parameters are reduced over; ``None``: ``dp_size``.
        has_grad_norm: whether a distributed optimizer computes the gradient norm, as it does by default.
    """

    workload: Workload
    link: Link
    ddp: DistributedDataParallelConfig
    dp_size: int
    specs: tuple[ParamSpec, ...] | None = None
    expert_dp_size: int | None = None
    has_grad_norm: bool = True

    @property
    def mode(self) -> Mode:
        """How gradients travel."""
        return Mode.REDUCE_SCATTER if self.ddp.use_distributed_optimizer else Mode.ALL_REDUCE

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
        """What the wrapper and the optimizer send after the buckets; nothing without a model."""
        if self.specs is None or self.dp_size == 1:
            return ()
        sends_norm = self.ddp.use_distributed_optimizer and self.has_grad_norm
        return ((FENCE,) if self.ddp.fence else ()) + ((GRAD_NORM,) if sends_norm else ())

    def on(self, dp_size: int) -> Setting:
        """Return the same on another number of ranks; expert groups keep their share of them."""
        experts = None if self.expert_dp_size is None else max(1, dp_size * self.expert_dp_size // self.dp_size)
        return replace(self, dp_size=dp_size, expert_dp_size=experts)

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
        """The plan of the config's own ``ddp`` section, or ``None`` when that says nothing about sizes or there is no model."""
        if self.specs is None or all(getattr(self.ddp, name) is None for name in SIZE_FIELDS):
            return None
        return plan_of_layout(self.workload, self._layout(self.ddp))

    @property
    def default_numel(self) -> int:
        """Elements that close a bucket when nothing is said."""
        return max(40_000_000, 1_000_000 * self.dp_size)

    @cached_property
    def optimal_plan(self) -> BucketPlan:
        """The plan of the optimal cuts.

        Cuts are found for the tensors' own sizes; with a model they are then padded like any other. Where parameters lie in
        several buffers (dtypes, experts), each buffer is cut wherever the optimal plan cuts.
        """
        plan = optimal_plan(
            self.as_launched,
            self.link,
            num_ranks=self.dp_size,
            mode=self.mode,
            overlap_grad_reduce=self.overlap_grad_reduce,
            overlap_param_gather=self.overlap_param_gather,
        )
        if self.specs is None:
            return plan
        return self._plan_of_layout(bucket_cuts=cuts_by_buffer(plan, self.specs or ()))

    @cached_property
    def as_launched(self) -> Workload:
        """The workload as the buckets of a layout see it: launched in layout order, whatever order gradients come in."""
        if self.specs is None:
            return self.workload
        order = self.ddp.bucket_order
        if order is None:
            return self.workload.in_order(range(len(self.specs) - 1, -1, -1))
        index_of = {spec.name: index for index, spec in enumerate(self.specs)}
        return self.workload.in_order([index_of[name] for name in order])

    def _plan_of_layout(self, **sizes: object) -> BucketPlan:
        ddp = self.ddp.model_copy(update={**dict.fromkeys(SIZE_FIELDS), **sizes})
        return plan_of_layout(self.workload, self._layout(ddp))

    def _layout(self, ddp: DistributedDataParallelConfig) -> ModelLayout:
        return build_layout(self.specs or (), ddp, dp_size=self.dp_size, expert_dp_size=self.expert_dp_size)

    # Times #

    def step_s(self, plan: BucketPlan) -> float:
        """Return the simulated seconds of a step.

        Raises:
            ConfigError: the link cannot say what a collective costs.
        """
        return self._step_s(plan, overlaps=True)

    @property
    def no_overlap_s(self) -> float:
        """Seconds of a step with one collective for each tensor, all of them after backward."""
        return self._step_s(per_tensor_plan(self.workload), overlaps=False)

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no plan with buckets in ready order can beat; small collectives and padding are not in it."""
        return lower_bound_s(
            self.as_launched,
            self.link,
            num_ranks=self.dp_size,
            mode=self.mode,
            overlap_grad_reduce=self.overlap_grad_reduce,
            overlap_param_gather=self.overlap_param_gather,
        )

    def traces(self, plan: BucketPlan, *, num_steps: int = 2) -> tuple[StepTrace, ...]:
        """Return simulated steps; all but the first are alike.

        Raises:
            ConfigError: the link cannot say what a collective costs.
        """
        return simulate_steps(
            self.workload,
            plan,
            self.link,
            num_ranks=self.dp_size,
            mode=self.mode,
            overlap_grad_reduce=self.overlap_grad_reduce,
            overlap_param_gather=self.overlap_param_gather,
            num_steps=num_steps,
            step_collectives=self.step_collectives,
        )

    def _step_s(self, plan: BucketPlan, *, overlaps: bool) -> float:
        return simulate_step_s(
            self.workload,
            plan,
            self.link,
            num_ranks=self.dp_size,
            mode=self.mode,
            overlap_grad_reduce=overlaps and self.overlap_grad_reduce,
            overlap_param_gather=overlaps and self.overlap_param_gather,
            step_collectives=self.step_collectives,
        )


def setting_of(run: RunConfig, *, dp_size: int | None = None, expert_dp_size: int | None = None) -> Setting:
    """Return what a config simulates.

    Args:
        dp_size: ranks. ``None``: those that measured a table; any for a flat link, which costs the same on all of them.

    Raises:
        ConfigError: no link, no workload, no number of ranks where it matters, or files that cannot be read.
        LayoutError: parameters that no buffer can hold.
    """
    if run.link is None:
        raise ConfigError(
            "link is required: what does a collective cost? Give link.latency_s and link.seconds_per_byte, a ring or two_level "
            "link, or link.path with what `megabucket calibrate` wrote"
        )
    link = link_of(run.link)
    specs = tuple(param_specs(run.model)) if run.model is not None else None
    return Setting(
        workload=workload_of(run, specs),
        link=link,
        ddp=run.ddp,
        dp_size=dp_size if dp_size is not None else _ranks_of(link),
        specs=specs,
        expert_dp_size=expert_dp_size,
    )


def _ranks_of(link: Link) -> int:
    if isinstance(link, MeasuredLink):
        return link.num_ranks
    if isinstance(link, FlatLink):
        return 1
    raise ConfigError("the cost of a collective on this link depends on the number of ranks; give --dp-size")


def ladder_input(run: RunConfig) -> tuple[list[int], dict[str, int]]:
    """Return the tensors' elements in registration order, and bytes per element and microbatches for ``planning.ladder``.

    Two microbatches when the config says nothing.

    Raises:
        ConfigError: neither a model nor a workload of tensors, or files that cannot be read.
        LayoutError: parameters that no buffer can hold.
    """
    given = run.workload
    num_microbatches = given.num_microbatches if given is not None and given.num_microbatches is not None else 2
    if run.model is not None:
        specs = param_specs(run.model)
        grad_bytes = given.bytes_per_element if given is not None else None
        grad_bytes = grad_bytes or wire_bytes(specs, run.ddp).gradient
        return [spec.numel for spec in specs], {"bytes_per_element": grad_bytes, "num_microbatches": num_microbatches}
    workload = workload_of(run)
    sizes = {"bytes_per_element": workload.bytes_per_element, "num_microbatches": num_microbatches}
    return [tensor.numel for tensor in workload.tensors], sizes


def sizes_to_sweep(workload: Workload, given: Sequence[int] | None = None, *, count: int = 20) -> tuple[int, ...]:
    """Return the bucket sizes to compare: those given, else ``count`` from the smallest tensor to everything in one bucket.

    >>> from megabucket.planning.workload import TensorWork
    >>> sizes_to_sweep(Workload((TensorWork("a", 10), TensorWork("b", 70))), count=4)
    (10, 20, 40, 80)
    """
    if given is not None:
        return tuple(given)
    smallest = min((tensor.numel for tensor in workload.tensors if tensor.numel), default=1)
    largest = max(workload.numel, smallest)
    ratio = (largest / smallest) ** (1 / (count - 1))
    return tuple(sorted({min(round(smallest * ratio**step), largest) for step in range(count)}))
