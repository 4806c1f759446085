"""Kinds of fault of whole processes: they die, freeze, are slow, are interrupted, fork, or lose their group."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .cells import EVERY, FEW, GRIDS, PAIRS, RIGHT, SHARDED, TWO, Cell, Expectation, Fault, Here, Kind, Outcome, Recovery, named
from .model import loss_of, make_batch
from .trip import Action, abort, die_by, freeze, freeze_for, hold_lock_for, install, leave, sleep_for

_DEAD_AFTER_S = 2.0
QUICK = {"heartbeat_s": 0.25, "dead_after_s": _DEAD_AFTER_S}
NOTICE_DEAD_S = 1.0
NOTICE_FROZEN_S = _DEAD_AFTER_S + 1.0
_STALL_S = 5.0
_SIGNAL_S = 0.3
_TIMEOUT_S = 4.0
"""Of the group, where that is what ends a wait."""
_CHILD_LIMIT_S = 3.0
_ENDS: Mapping[str, Action] = {
    "SIGKILL": die_by(signal.SIGKILL),
    "SIGKILL-in-gather": die_by(signal.SIGKILL),
    "SIGKILL-in-rank-order": die_by(signal.SIGKILL),
    "SIGSEGV": die_by(signal.SIGSEGV),
    "abort": abort,
    "exit": leave,
}


def lost(cell: Cell, within_s: float, *, at_wrap: bool = False) -> Expectation:
    """Return the loss, named on the others in this step or, where they had finished it, in the next."""
    fields = {"ranks": (cell.culprit,)}
    lost = (cell.culprit,)
    return named(
        "PeerLostError", fields=fields, lost=lost, within_s=within_s, later_by=1, at_wrap=at_wrap, recovery=Recovery.OVER
    )


def _at_place(cell: Cell, action: Action) -> Callable[[Here], None]:
    return lambda here: install(here, cell.place, action) if here.is_culprit else None


def _dies(cell: Cell) -> Fault:
    """End the process at fault at a place, in the way that is the kind's name."""

    def kill_at_wrap(rank: int, send: Callable[..., None]) -> None:
        send("fault", at_s=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    at_wrap = cell.place == "wrap"
    expect = lost(cell, NOTICE_DEAD_S, at_wrap=at_wrap)
    if at_wrap:
        # A rank that dies before it has wrapped anything has told nobody that it lives, so only the group's time limit tells.
        return Fault(
            replace(expect, within_s=_TIMEOUT_S + 1.0), before_wrap=kill_at_wrap, config=QUICK, group_timeout_s=_TIMEOUT_S
        )
    waits = cell.place == "waiting"
    arm = (lambda here: _let_wait(here, signal.SIGKILL)) if waits else _at_place(cell, _ENDS[cell.kind])
    return Fault(expect, arm=arm, config={"reduction_order": "rank"} if cell.kind == "SIGKILL-in-rank-order" else {})


def _freezes(cell: Cell) -> Fault:
    """Stop the process at fault for good, or hold Python's lock for longer than a peer may be silent."""
    action = freeze if cell.kind == "SIGSTOP" else hold_lock_for(60.0)
    return Fault(lost(cell, NOTICE_FROZEN_S), arm=_at_place(cell, action), config=QUICK)


def _late(cell: Cell) -> Fault:
    """Let a rank come late but alive: sleeping, stopped and continued, or with Python's lock held for a moment."""
    delays = {"slow": sleep_for(0.7), "SIGSTOP-SIGCONT": freeze_for(0.7), "lock-briefly": hold_lock_for(0.7)}
    return Fault(RIGHT, arm=_at_place(cell, delays[cell.kind]), config=QUICK)


def _slow_with_warning(cell: Cell) -> Fault:
    """Be slower than ``straggler_warning_s``."""

    def arm(here: Here) -> None:
        if here.is_culprit:
            install(here, "forward", sleep_for(1.5))

    return Fault(Expectation(Outcome.RIGHT, warning=f"rank {cell.culprit}"), arm=arm, config={"straggler_warning_s": 0.4})


def _too_slow(cell: Cell) -> Fault:
    """Be alive but slower than the time limit of the group."""
    arm = lambda here: install(here, "forward", sleep_for(60.0)) if here.is_culprit else None  # noqa: E731
    return Fault(lost(cell, _TIMEOUT_S + 1.0), arm=arm, config=QUICK, group_timeout_s=_TIMEOUT_S)


def _interrupted(cell: Cell) -> Fault:
    """Send a signal to a rank that waits for a slow peer. The place says which one and what handles it."""
    raises = cell.place == "SIGINT-default"
    number = signal.SIGTERM if cell.place.startswith("SIGTERM") else signal.SIGINT
    expect = Expectation(Outcome.RIGHT, signal_within_s=_SIGNAL_S)
    if raises:
        errors = ("PeerLostError", "PeerFailedError", "WrapperBrokenError")
        expect = named(
            errors, own_error=("KeyboardInterrupt",), signal_within_s=_SIGNAL_S, recovery=Recovery.OVER, same_text=False
        )

    def arm(here: Here) -> None:
        _let_wait(here, number)
        if here.is_culprit:

            def on_signal(*_: object) -> None:
                here.send("handled", at_s=time.monotonic())
                if raises:
                    raise KeyboardInterrupt

            here.step_stack.callback(signal.signal, number, signal.signal(number, on_signal))

    return Fault(expect, arm=arm)


def _forks(cell: Cell) -> Fault:
    """Fork where the step begins; the child trains with the wrapper of its parent."""

    def arm(here: Here) -> None:
        if here.is_culprit:
            here.points["start"] = lambda: _fork_and_train(here)

    return Fault(Expectation(Outcome.RIGHT, child_error="ForkedProcessError"), arm=arm)


def _group_destroyed(cell: Cell) -> Fault:
    """Destroy the process group before a step, on every rank or on one, whom the others lose."""
    on_all = cell.place == "all"

    def arm(here: Here) -> None:
        if on_all or here.is_culprit:
            here.announce()
            dist.destroy_process_group()

    expect = named("GroupDestroyedError", same_text=False, is_agreed=False, recovery=Recovery.OVER)
    if not on_all:
        errors = ("PeerLostError", "PeerFailedError", "WrapperBrokenError")
        own = ("GroupDestroyedError",)
        expect = named(errors, own_error=own, within_s=NOTICE_FROZEN_S, same_text=False, recovery=Recovery.OVER)
    return Fault(expect, arm=arm, on_all=on_all, config=QUICK)


def _store_gone(cell: Cell) -> Fault:
    """Kill the process that hosts the group's store, and give heartbeats time to notice."""

    def arm(here: Here) -> None:
        if here.is_culprit:
            here.send("ask", signal=int(signal.SIGKILL), to=-1, after_s=0.0)
            install(here, "forward", sleep_for(1.0))

    return Fault(RIGHT, arm=arm)


def _store_stalls(cell: Cell) -> Fault:
    """Stop the process that hosts the group's store, and continue it after longer than a rank may be silent."""

    def stall(send: Callable[..., None]) -> None:
        send("ask", signal=int(signal.SIGSTOP), to=-1, after_s=0.0)
        send("ask", signal=int(signal.SIGCONT), to=-1, after_s=_STALL_S)
        time.sleep(0.3)
        send("fault", at_s=time.monotonic())

    # Whoever needs the store waits for it, or says so: an error of ours, on every rank.
    within_s = _STALL_S + NOTICE_FROZEN_S
    if cell.place == "wrap":
        refused = named("MegabucketError", at_wrap=True, same_text=False, within_s=within_s)
        expect = replace(RIGHT, otherwise=(refused,))
        return Fault(expect, before_wrap=lambda _, send: stall(send), config=QUICK)
    over = named("MegabucketError", same_text=False, is_agreed=False, within_s=within_s, recovery=Recovery.OVER)
    expect = replace(RIGHT, otherwise=(over,))
    return Fault(expect, arm=lambda here: stall(here.send) if here.is_culprit else None, config=QUICK)


def _no_descriptors(cell: Cell) -> Fault:
    """Leave a process a few descriptors, or none, before it wraps."""
    num_left = int(cell.place)

    def limit(_: int, send: Callable[..., None]) -> None:
        taken = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + num_left, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        send("fault", at_s=time.monotonic())

    refused = named("MegabucketError", at_wrap=True, same_text=False, within_s=NOTICE_FROZEN_S)
    return Fault(replace(RIGHT, otherwise=(refused,)), before_wrap=limit, config=QUICK)


def _let_wait(here: Here, number: signal.Signals) -> None:
    """Let the rank after the one at fault be slow, and have the latter sent a signal while it waits."""
    if here.rank == (here.cell.culprit + 1) % here.num_ranks:

        def be_slow() -> None:
            here.send("ask", signal=int(number), to=here.cell.culprit, after_s=0.2)
            time.sleep(0.9)

        here.points["before backward"] = be_slow


def _fork_and_train(here: Here) -> None:
    """Fork; the child tells the class of its error through a pipe, or is killed when it says nothing."""
    reader, writer = os.pipe()
    here.announce()
    child = os.fork()
    if child == 0:
        said = "no error"
        try:
            inputs, targets = make_batch(seed=0, batch=0, rank=0, microbatch=0)
            loss_of(here.ddp(inputs), targets).backward()
            here.optimizer.step()
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    ready, _, _ = select.select([reader], [], [], _CHILD_LIMIT_S)
    said = os.read(reader, 200).decode() if ready else "hung"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    here.send("child", said=said)


_NO_LABELS = dict.fromkeys(("fence", "gather"), "torch DDP has no fence and its collectives have no labels")


def _kind(name: str, says: str, fault: Callable[[Cell], Fault], **details: Any) -> Kind:
    settings = {"combos": PAIRS, "not_in_torch": _NO_LABELS, **details}
    return Kind(name, says, fault, needs_processes=True, soaks=False, **settings)


_DEATHS = ("wrap", "forward", "backward-0", "backward-2", "between", "optimizer", "waiting", "fence")
_FROZEN = f"The others raise an error that names the rank within dead_after_s + 1 s ({NOTICE_FROZEN_S:g} s here)."
_IN_TIME = "Right: the rank was silent for less than dead_after_s."

PROCESS_KINDS = (
    _kind(
        "SIGKILL", "The others raise an error that names the rank within 1 s.", _dies, places=_DEATHS, combos=(*EVERY, *GRIDS)
    ),
    _kind("SIGKILL-in-gather", "As SIGKILL.", _dies, places=("gather",), combos=SHARDED),
    _kind(
        "SIGKILL-in-rank-order",
        "As SIGKILL.",
        _dies,
        places=("backward-2", "gradient-gather"),
        combos=tuple(combo for combo in PAIRS if not combo.is_sharded),
        not_in_torch="torch DDP has no reduction_order",
    ),
    _kind("SIGSEGV", "As SIGKILL.", _dies, places=("backward-1", "optimizer")),
    _kind("abort", "As SIGKILL.", _dies, places=("backward-1", "between"), combos=FEW),
    _kind("exit", "As SIGKILL.", _dies, places=("forward", "backward-3", "fence"), combos=FEW),
    _kind("SIGSTOP", _FROZEN, _freezes, places=("backward-1", "between", "fence"), combos=(*PAIRS, *GRIDS)),
    _kind(
        "lock-held",
        "A rank whose Python stands still counts as frozen.",
        _freezes,
        places=("backward-1", "between"),
        combos=FEW,
    ),
    _kind("SIGSTOP-SIGCONT", _IN_TIME, _late, places=("backward-1", "between")),
    _kind("lock-briefly", _IN_TIME, _late, places=("backward-1",), combos=FEW),
    _kind("slow", "Right: a slow rank is waited for.", _late, places=("forward", "backward-1", "between"), combos=FEW),
    _kind(
        "slow-warning",
        "Right, with a warning in the log that names the slow rank.",
        _slow_with_warning,
        combos=FEW,
        not_in_torch="torch DDP does not warn of stragglers",
    ),
    _kind("too-slow", "The others raise an error that names the rank when the group times out.", _too_slow, combos=FEW),
    _kind(
        "interrupt-in-wait",
        "The handler runs within 0.3 s although the rank waits for a slow peer.",
        _interrupted,
        places=("SIGINT-flag", "SIGTERM-flag", "SIGINT-default"),
    ),
    _kind("fork", "The child gets an error instead of waiting for ever; the parent goes on.", _forks),
    _kind("group-destroyed", "Refused on every rank that destroyed its group.", _group_destroyed, places=("all", "one")),
    _kind(
        "store-stalls",
        "Waited for, or an error of ours on every rank.",
        _store_stalls,
        places=("wrap", "step"),
        combos=(*FEW, *GRIDS),
        not_in_torch="wrapping with torch DDP needs the store",
    ),
    _kind(
        "no-descriptors",
        "A process that runs out of descriptors while wrapping is named on all ranks; if they suffice all is right.",
        _no_descriptors,
        places=("0", "6", "40"),
        combos=(*TWO, *GRIDS),
        not_in_torch="wrapping with torch DDP opens none",
    ),
    _kind("store-gone", "Right: gradients do not need the store.", _store_gone, combos=FEW),
)
