"""What a wrapper adds to backward per parameter: its backward minus the bare one, on one rank, in turn."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from peers.models import MODELS, loss_of
from peers.registry import SYSTEMS
from peers.system import Setup, System, or_reason

BARE = "none"


def backwards(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of backward by system, the bare one among them, for each turn: by the clock, and of CPU time."""
    case = MODELS[job["model"]]
    setup = Setup(bucket_bytes=job["bucket_bytes"], blocks_per_group=case.blocks_per_group)
    built = {
        name: or_reason(lambda name=name: SYSTEMS[name].builder()(case.module(), setup)) for name in (BARE, *job["systems"])
    }
    systems = {name: system for name, system in built.items() if not isinstance(system, str)}
    absent = {name: reason for name, reason in built.items() if isinstance(reason, str)}
    num_params = len(list(case.module().parameters()))
    batch = case.batch(0, 0)
    for system in systems.values():
        backward_s(system, batch)
        backward_s(system, batch)
    gc.collect()
    gc.freeze()
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for turn in range(job["turns"]):
        for name in sorted(systems, reverse=bool(turn % 2)):
            turns[name].append(backward_s(systems[name], batch))
    return {"num_params": num_params, "backward_s": turns, "absent": absent}


def backward_s(system: System, batch: torch.Tensor) -> tuple[float, float]:
    loss = loss_of(system.module(batch), batch)
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    system.backward(loss)
    seconds = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
    system.sync()
    system.step()
    system.settle()
    return seconds
