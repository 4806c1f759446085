"""Peak memory of one system in processes of its own: how far the resident peak rose from before the model was made."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from peers.host import PeakMemory
from peers.interleave import Course, Interleaving
from peers.models import MODELS
from peers.registry import SYSTEMS
from peers.system import Setup

_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which ``mmap`` does not name


def peak_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of this rank's steps above what was resident before, and what formulas say."""
    name, case = job["system"], MODELS[job["model"]]
    build = SYSTEMS[name].builder()  # imports the peer
    setup = Setup(bucket_bytes=job["bucket_bytes"], blocks_per_group=case.blocks_per_group)
    _warm_back_end()
    _make_libraries_resident()
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


def _make_libraries_resident() -> None:
    """Take all pages of libraries into memory: otherwise who is the first to use a kernel is charged for its pages.

    A kernel older than Linux 5.14 does nothing, and 2 to 4 MB of code count as held.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, permissions, _, _, inode = line.split()[:5]
        if inode != "0" and permissions.startswith("r-"):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _POPULATE_READ)


def _warm_back_end() -> None:
    """Let torch and gloo make what they make once, for any system: kernels' scratch, threads, connections."""
    linear = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    linear(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1024))
    dist.barrier()
