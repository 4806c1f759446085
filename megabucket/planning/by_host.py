"""Shards inside each host and replicas across hosts (HSDP), against shards over all ranks: both predictions, and what to do.

No torch. The buckets are those of the config in both cases.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from megabucket.errors import ConfigError
from megabucket.planning.memory import memory_by_mode
from megabucket.planning.run_config import RunConfig
from megabucket.planning.setting import Setting, setting_of
from megabucket.planning.simulate import Mode
from megabucket.units import format_bytes, format_seconds

_LEAST_GAIN: Final = 0.01
"""Fraction of a step below which neither is called faster: predictions are not that exact."""


@dataclass(frozen=True, slots=True)
class HostAdvice:
    """One config in both arrangements of its ranks."""

    num_hosts: int
    ranks_per_host: int
    mode: Mode
    """Of the config. HSDP is always ``reduce_scatter``."""
    is_by_host: bool
    """Whether the config has shards inside each host already."""
    flat_s: float
    """Predicted seconds of a step without replicas: shards over all ranks, or in all-reduce mode no shards."""
    by_host_s: float
    """Predicted seconds of a step with shards inside each host and replicas across."""
    more_bytes: int | None = None
    """Memory that a rank needs more by host than without replicas, negative if less; ``None``: unknown."""

    @property
    def gain(self) -> float:
        """Fraction of the flat step that is saved by host; negative if that takes longer."""
        return 1 - self.by_host_s / self.flat_s if self.flat_s > 0 else 0.0

    @property
    def is_faster_by_host(self) -> bool:
        """Whether the saving is worth a sentence."""
        return self.gain >= _LEAST_GAIN

    @property
    def sentences(self) -> tuple[str, ...]:
        """What to do, then both predictions."""
        config = f"num_distributed_optimizer_instances={self.num_hosts}"
        mesh = (
            f'init_device_mesh(device_type, ({self.num_hosts}, {self.ranks_per_host}), mesh_dim_names=("replicate", "shard"))'
        )
        flat = "all-reduce over all ranks" if self.mode is Mode.ALL_REDUCE else "shards over all ranks"
        if self.is_faster_by_host:
            how = f"keep {config}" if self.is_by_host else f"wrap with process_group={mesh}; in a plan that is {config}"
            verdict = f"HSDP by host would be faster by {self.gain:.1%} of a step: {how}."
        else:
            slower = "takes as long" if abs(self.gain) < _LEAST_GAIN else f"would be slower by {-self.gain:.1%} of a step"
            verdict = f"HSDP by host {slower}: {'drop ' + config if self.is_by_host else 'keep ' + flat}."
        memory = ""
        if self.more_bytes is not None:
            memory = f", and {format_bytes(abs(self.more_bytes))} {'less' if self.more_bytes < 0 else 'more'} memory of a rank"
        predicted = (
            f"Predicted: {format_seconds(self.by_host_s)} a step with shards inside each of {self.num_hosts} hosts of "
            f"{self.ranks_per_host} ranks and replicas across{memory}; {format_seconds(self.flat_s)} with {flat}."
        )
        return verdict, predicted

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {**asdict(self), "mode": self.mode.value, "gain": self.gain, "is_faster_by_host": self.is_faster_by_host}


def advise_by_host(setting: Setting, *, moments_per_element: int | None = None) -> HostAdvice | None:
    """Return both predictions; ``None`` where the link knows no hosts, or the ranks do not fill several of equal size.

    Args:
        setting: its buckets and its link count, its replicas do not.
        moments_per_element: of the optimizer, for memory; ``None``: memory is not compared.

    Raises:
        ConfigError: the link does not know the cost of a collective.
    """
    per_host, num_ranks = setting.link.ranks_per_host, setting.dp_size
    if per_host is None or per_host == 1 or num_ranks <= per_host or num_ranks % per_host:
        return None
    num_hosts = num_ranks // per_host
    if any(size % num_hosts for size in setting.group_sizes.values()):
        return None  # replicas of some experts would be empty
    ddp = setting.ddp
    if setting.mode is Mode.ALL_REDUCE:
        ddp = ddp.model_copy(update={"use_distributed_optimizer": True, "overlap_param_gather": ddp.overlap_grad_reduce})
    flat, by_host = replace(setting, num_instances=1), replace(setting, ddp=ddp, num_instances=num_hosts)
    more_bytes = None
    if setting.specs is not None and moments_per_element is not None:
        flat_bytes, by_host_bytes = (
            memory_by_mode(
                setting.specs,
                each.ddp,
                dp_size=num_ranks,
                group_sizes=setting.group_sizes,
                num_instances=each.num_instances,
                moments_per_element=moments_per_element,
                whole_params=setting.whole_params,
            )[each.mode.value].total_bytes
            for each in (flat, by_host)
        )
        more_bytes = by_host_bytes - flat_bytes
    flat_s, by_host_s = (each.step_s(each.configured_plan or each.plan_of_size(None)) for each in (flat, by_host))
    is_by_host = setting.num_instances == num_hosts
    return HostAdvice(num_hosts, per_host, setting.mode, is_by_host, flat_s, by_host_s, more_bytes)


def advise_run_by_host(run: RunConfig, *, dp_size: int, expert_dp_size: int | None = None) -> HostAdvice | None:
    """Return both predictions for a config; ``None`` also where it has no link or no workload to simulate.

    Raises:
        ConfigError: files of link or workload cannot be read, or are of another model.
    """
    if run.link is None or run.workload is None or dp_size == 1:
        return None
    setting = setting_of(run, dp_size=dp_size, expert_dp_size=expert_dp_size)
    try:
        return advise_by_host(setting, moments_per_element=run.optimizer.moments_per_element)
    except ConfigError:  # the link knows other numbers of ranks only: simulate says so
        return None
