"""``Outlook``: all figures of one setting, as ``megabucket simulate`` prints them. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from megabucket.planning.links import FlatLink, MeasuredLink
from megabucket.planning.setting import Setting, sizes_to_sweep
from megabucket.planning.sweep import RANKS, ScalingRow, SweepRow, scaling, sweep, sweep_row

MANY_TENSORS: Final = 10_000
"""From here on fewer sizes and numbers of ranks are looked at: each of them is a layout of all tensors."""

_FEW_SIZES: Final = 8
_SOME_SIZES: Final = 20
_FEW_RANKS: Final = RANKS[::3]


@dataclass(frozen=True)
class Outlook:
    """What a step would take."""

    setting: Setting
    no_overlap_s: float
    """One collective for each tensor, all of them after backward."""
    lower_bound_s: float
    """What no plan with buckets in ready order can beat."""
    rows: tuple[SweepRow, ...]
    """One for each bucket size."""
    default: SweepRow | None
    """The default bucket size; only with a model, whose wrapper has a default."""
    configured: SweepRow | None
    """What the config's ``ddp`` section says itself."""
    optimal: SweepRow
    cuts: tuple[str, ...]
    """The tensors that close the optimal buckets, in the order in which gradients become ready."""
    scaling: tuple[ScalingRow, ...]
    """The optimal cuts of each number of ranks; empty where the link does not depend on it."""

    @property
    def best(self) -> SweepRow:
        """The best size; of several that tie the largest, which has the fewest buckets."""
        shortest_s = min(row.step_s for row in self.rows)
        ties = (row for row in self.rows if row.step_s <= shortest_s * (1 + 1e-9))
        return max(ties, key=lambda row: row.bucket_numel or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON: seconds, and elements where a name says ``numel``."""
        setting, workload = self.setting, self.setting.workload
        return {
            "dp_size": setting.dp_size,
            "expert_dp_size": setting.expert_dp_size,
            "mode": setting.mode.value,
            "overlap_grad_reduce": setting.overlap_grad_reduce,
            "overlap_param_gather": setting.overlap_param_gather,
            "num_tensors": len(workload.tensors),
            "numel": workload.numel,
            "num_microbatches": workload.num_microbatches,
            "forward_s": workload.forward_s,
            "backward_s": workload.backward_s,
            "optimizer_s": workload.optimizer_s,
            "compute_s": workload.compute_s,
            "no_overlap_s": self.no_overlap_s,
            "lower_bound_s": self.lower_bound_s,
            "rows": [asdict(row) for row in self.rows],
            "default": None if self.default is None else asdict(self.default),
            "configured": None if self.configured is None else asdict(self.configured),
            "optimal": {
                "step_s": self.optimal.step_s,
                "exposed_s": self.optimal.exposed_s,
                "buckets": self.optimal.buckets,
                "cuts": list(self.cuts),
            },
            "scaling": [asdict(row) for row in self.scaling],
        }


def outlook_of(setting: Setting, sizes: Sequence[int] | None = None, *, has_scaling: bool = True) -> Outlook:
    """Return all figures of a setting.

    Args:
        sizes: bucket sizes in elements to compare; ``None``: some between the smallest tensor and everything, with the default.
        has_scaling: whether other numbers of ranks are looked at, too.

    Raises:
        ConfigError: the link cannot say what a collective costs, or the workload is of another model.
    """
    workload = setting.workload
    is_large = len(workload.tensors) >= MANY_TENSORS
    has_model = setting.specs is not None
    swept = set(sizes_to_sweep(workload, sizes, count=_FEW_SIZES if is_large else _SOME_SIZES))
    if sizes is None:
        rows = sweep(setting, sorted(swept | ({setting.default_numel} if has_model else set())))
    else:
        rows = sweep(setting, sizes)
    scales = has_scaling and not isinstance(setting.link, FlatLink | MeasuredLink)
    return Outlook(
        setting=setting,
        no_overlap_s=setting.no_overlap_s,
        lower_bound_s=setting.lower_bound_s,
        rows=rows,
        default=sweep_row(setting, setting.plan_of_size(None), setting.default_numel) if has_model else None,
        configured=None if setting.configured_plan is None else sweep_row(setting, setting.configured_plan),
        optimal=sweep_row(setting, setting.optimal_plan),
        cuts=setting.optimal_plan.cut_names(workload),
        scaling=scaling(setting, bucket_numel=None, ranks=_FEW_RANKS if is_large else RANKS) if scales else (),
    )
