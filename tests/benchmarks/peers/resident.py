"""Peak memory of one system in processes of its own: how far the resident peak rose from before the model was made."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megabucket.training.host import PeakMemory
from peers.interleave import Course, Interleaving
from peers.models import MODELS
from peers.registry import SYSTEMS
from peers.system import Setup


def peak_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of this rank's steps above what was resident before, and what formulas say."""
    name, case = job["system"], MODELS[job["model"]]
    build = SYSTEMS[name].builder()  # imports the peer
    setup = Setup(bucket_bytes=job["bucket_bytes"], blocks_per_group=case.blocks_per_group)
    _warm_back_end()
    _take_tiny_steps(name)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak = PeakMemory.from_now(torch.device("cpu"))
    module = case.module()
    numel = sum(param.numel() for param in module.parameters())
    system = build(module, setup)
    del module
    if job["keeps_grads"]:
        system.optimizer.zero_grad = partial(system.optimizer.zero_grad, set_to_none=False)
    run = Interleaving({name: system}, case, Course(0, 0, 0))
    run.take(name, [case.batch(step, dist.get_rank()) for step in range(job["steps"])])
    return {
        "system": name,
        "numel": numel,
        "peak_bytes": peak.growth_bytes(),
        "formula_bytes": system.memory_bytes(),
        "expected_bytes": numel * SYSTEMS[name].expected(dist.get_world_size()),
    }


def _take_tiny_steps(name: str) -> None:
    """Let the system run: pages of libraries that it is the first to use are resident, too, and no model holds them."""
    case = MODELS["tiny"]
    system = SYSTEMS[name].builder()(case.module(), Setup(bucket_bytes=2**20, blocks_per_group=case.blocks_per_group))
    run = Interleaving({name: system}, case, Course(0, 0, 0))
    run.take(name, [case.batch(step, dist.get_rank()) for step in range(2)])


def _warm_back_end() -> None:
    """Let torch and gloo make what they make once, for any system: kernels' scratch, threads, connections."""
    linear = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    linear(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1024))
    dist.barrier()
