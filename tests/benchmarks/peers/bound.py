"""What the planner says about a link: its lower bound of a step, and the cuts it would make. From the bare model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import megabucket as mb
from megabucket.layout import ParamSpec
from megabucket.measure.profile import WorkloadProfiler, choose_rank
from megabucket.measure.profile_steps import WorkloadProfile
from megabucket.planning.cuts import cuts_by_buffer
from megabucket.planning.links import RingLink
from megabucket.planning.setting import Setting
from megabucket.planning.workload import Workload
from peers.links import LinkCase
from peers.system import System

MODES = ("all_reduce", "reduce_scatter")


def profile_bare(system: System, take: Callable[[int], Any], *, steps: int) -> Workload:
    """Return what the bare model computes, tensor by tensor: the slower rank's figures, the same on every rank.

    Args:
        take: takes so many steps of the system.
    """
    with WorkloadProfiler(system.module, optimizer=system.optimizer, warmup_steps=1) as profiler:
        for _ in range(1 + steps):
            take(1)
            profiler.end_step()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, profiler.profile().to_dict())
    return choose_rank([WorkloadProfile.from_dict(data) for data in everybody], "slowest").workload


def settings(workload: Workload, module: torch.nn.Module, link: LinkCase) -> dict[str, Setting]:
    """Return the planner's view of both modes, everything overlapped. A sharded optimizer takes its share of the time."""
    specs = tuple(ParamSpec(name, tuple(param.shape)) for name, param in module.named_parameters())
    ring, ranks = RingLink(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s), dist.get_world_size()
    sharded = replace(workload, optimizer_s=workload.optimizer_s / ranks)
    both = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    return {
        "all_reduce": Setting(workload, ring, mb.DistributedDataParallelConfig(), ranks, specs),
        "reduce_scatter": Setting(sharded, ring, both, ranks, specs, has_grad_norm=False),
    }


def planned_cuts(of_modes: dict[str, Setting]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((mode, cuts_by_buffer(setting.optimal_plan, setting.specs or ())) for mode, setting in of_modes.items())


def bounds_s(
    workload: Workload, module: torch.nn.Module, link: LinkCase, bare_steps_s: Sequence[float]
) -> dict[str, list[float]]:
    """Return the planner's lower bound of both modes for each of these steps of the bare model: computing takes as long.

    The bound lets all buckets but one go without latency, and knows no padding and none of the small collectives of a step.
    """
    found = [settings(_scaled(workload, step_s), module, link) for step_s in bare_steps_s]
    return {mode: [of_modes[mode].lower_bound_s for of_modes in found] for mode in MODES}


def optima_s(workload: Workload, module: torch.nn.Module, link: LinkCase, bare_step_s: float) -> dict[str, float]:
    """Return what the best of all plans takes, latencies, padding and fence included."""
    found = settings(_scaled(workload, bare_step_s), module, link)
    return {mode: setting.step_s(setting.optimal_plan) for mode, setting in found.items()}


def _scaled(workload: Workload, compute_s: float) -> Workload:
    scale = compute_s / workload.compute_s
    tensors = tuple(
        tensor._replace(forward_s=tensor.forward_s * scale, backward_s=tensor.backward_s * scale) for tensor in workload.tensors
    )
    return replace(workload, tensors=tensors, optimizer_s=workload.optimizer_s * scale)
