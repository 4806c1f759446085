"""What one forked process does: join the group, wrap the model, train, report, wait to be released."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megabucket.chaos.cell import Cell
from megabucket.chaos.fault import Fault, Here
from megabucket.chaos.kinds import kind_named
from megabucket.chaos.kinds_wrap import Unwrappable
from megabucket.chaos.loop import Loop, describe
from megabucket.chaos.model import ChaosModel
from megabucket.chaos.oracle import Oracle
from megabucket.chaos.soak_plan import SoakPlan
from megabucket.chaos.systems import System, make_system

_MOMENTUM: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_STORE_TIMEOUT: Final = timedelta(seconds=20)


@dataclass(frozen=True, slots=True)
class Channels:
    """File descriptors of a rank."""

    reports: int
    """To the supervisor, one JSON object per line."""
    release: int
    """Reads as ended when the process may end."""
    log: int
    """Takes stdout and stderr."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a forked process is to do."""

    cell: Cell
    rank: int
    store_port: int
    soak: SoakPlan | None = None


def main(task: RankTask, channels: Channels) -> NoReturn:
    """Run the rank and end the process; never returns, and never runs the interpreter's own end.

    A gloo thread that still lets go of a tensor while the interpreter goes down would abort the process, and what it would
    clean up goes with the process anyway.
    """
    _prepare_process(channels)

    def send(kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "rank": task.rank, **values}, default=list)
        os.write(channels.reports, line.encode() + b"\n")

    try:
        is_interrupted = _run(task, send)
        send("done")
    except BaseException:
        send("broken", text=traceback.format_exc())
        is_interrupted = True
    if not is_interrupted:
        os.read(channels.release, 1)
    os._exit(0)


def _prepare_process(channels: Channels) -> None:
    os.dup2(channels.log, 1)
    os.dup2(channels.log, 2)
    # Whatever happens to the supervisor, no rank outlives it: not even one that is stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    torch.set_num_threads(1)


def _run(task: RankTask, send: Any) -> bool:
    """Train; return whether the process ends at once, as a program does that was interrupted or gave up."""
    cell, rank = task.cell, task.rank
    _forward_warnings(send)
    on_collective: dict[str, Any] = {}

    def trip(label: str) -> None:
        for prefix in [prefix for prefix in on_collective if label.startswith(prefix)]:
            on_collective.pop(prefix)()

    fault = kind_named(cell.kind).fault(cell)
    system = make_system(cell.system, cell.combo, trip)
    store = TCPStore("127.0.0.1", task.store_port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=cell.combo.num_ranks,
        timeout=timedelta(seconds=system.group_timeout_s(fault)),
    )
    send("joined")
    model = fault.build(rank)
    fault.before_wrap(rank, send)
    ddp = _wrap(system, model, fault, rank, send)
    if ddp is None:
        return False
    momentum = 0.0 if task.soak is not None else _MOMENTUM
    usual = next((r for r in range(cell.combo.num_ranks) if not fault.is_at_fault(r)), 0)
    here = Here(
        cell=cell,
        rank=rank,
        send=send,
        model=model,
        ddp=ddp,
        optimizer=system.make_optimizer(model, ddp, momentum),
        oracle=Oracle(
            fault.build(usual).float(),
            seed=cell.seed,
            num_ranks=cell.combo.num_ranks,
            momentum=momentum,
            zeros_for_unused=system.zeros_for_unused,
        ),
        remake_optimizer=lambda: system.make_optimizer(model, ddp, momentum),
        on_collective=on_collective,
    )
    send("ready", at_s=time.monotonic())
    if task.soak is not None:
        _soak(here, Loop(here, system, keeps_going=True), task.soak)
        return False
    loop = Loop(here, system)
    loop.run(fault)
    return loop.has_given_up


def _wrap(system: System, model: ChaosModel, fault: Fault, rank: int, send: Any) -> Any:
    """Return the wrapped model, or ``None`` when it was refused."""
    first = None  # lives as long as the second wrapper is made
    if isinstance(fault, Unwrappable) and fault.wraps_twice and fault.is_at_fault(rank):
        first = system.wrap_alone(model)
    send("fault", at_s=time.monotonic(), phase="wrap")
    fields: Mapping[str, Any] = fault.config(rank)
    try:
        ddp = system.wrap(model, fields)
    except Exception as error:
        send("wrap", error=describe(error), at_s=time.monotonic())
        return None
    finally:
        del first
    send("wrap", error=None, at_s=time.monotonic())
    return ddp


def _soak(here: Here, loop: Loop, plan: SoakPlan) -> None:
    for index, cell in enumerate(plan.cells()):
        here.cell = cell
        loop.attempt(index, kind_named(cell.kind).fault(cell), is_faulty=True, fault_index=index)
    loop.flush_weights()


def _forward_warnings(send: Any) -> None:
    warnings.simplefilter("always")

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        send("warning", text=f"{category.__name__}: {message}")

    warnings.showwarning = show
