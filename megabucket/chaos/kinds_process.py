"""Kinds of fault of whole processes: they die, freeze, are slow, are interrupted, fork, or lose their group."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.distributed as dist

from megabucket.chaos.cell import Cell
from megabucket.chaos.expectation import Expectation, Outcome, Recovery, named
from megabucket.chaos.fault import Fault, Here
from megabucket.chaos.kind import FEW, PAIRS, SHARDED, Kind, not_in_torch
from megabucket.chaos.model import loss_of, make_batch
from megabucket.chaos.trip import (
    COLLECTIVE_PLACES,
    Action,
    abort,
    die_by,
    freeze,
    freeze_for,
    hold_lock_for,
    install,
    leave,
    sleep_for,
)

_DEAD_AFTER_S: Final = 2.0
_HEARTBEAT_S: Final = 0.25
_NOTICE_DEAD_S: Final = 1.0
_NOTICE_FROZEN_S: Final = _DEAD_AFTER_S + 1.0
_SIGNAL_S: Final = 0.3
_CHILD_LIMIT_S: Final = 3.0

_ENDS: Final[Mapping[str, Action]] = {
    "SIGKILL": die_by(signal.SIGKILL),
    "SIGSEGV": die_by(signal.SIGSEGV),
    "abort": abort,
    "exit": leave,
}


class Dies(Fault):
    """The process at fault ends at a place, in the way that is the kind's name."""

    def expect(self) -> Expectation:
        """Return the loss, named on the others in this step or, where they had finished it, in the next."""
        return _lost(self.cell, _NOTICE_DEAD_S, at_wrap=self.cell.place == "wrap")

    def before_wrap(self, rank: int, send: Callable[..., None]) -> None:
        """End the process here if this is the place."""
        if self.cell.place == "wrap" and self.is_at_fault(rank):
            send("fault", at_s=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self, here: Here) -> None:
        """Install the wire; with place ``waiting``, let a peer be slow and the process be killed while it waits."""
        if self.cell.place == "waiting":
            _let_wait(here, signal.SIGKILL)
        elif here.is_culprit and self.cell.place != "wrap":
            install(here, self.cell.place, _ENDS[self.cell.kind])


class Freezes(Fault):
    """The process at fault is stopped for good, or holds Python's lock for longer than a peer may be silent."""

    def expect(self) -> Expectation:
        """Return the loss, named on the others."""
        return _lost(self.cell, _NOTICE_FROZEN_S)

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Notice it soon."""
        return {"heartbeat_s": _HEARTBEAT_S, "dead_after_s": _DEAD_AFTER_S}

    def arm(self, here: Here) -> None:
        """Install the wire."""
        if here.is_culprit:
            install(here, self.cell.place, freeze if self.cell.kind == "SIGSTOP" else hold_lock_for(60.0))


class Late(Fault):
    """The rank at fault comes late but is alive: sleeping, stopped and continued, or with Python's lock held for a moment."""

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Allow little more than the rank is late."""
        return {"heartbeat_s": _HEARTBEAT_S, "dead_after_s": _DEAD_AFTER_S}

    def arm(self, here: Here) -> None:
        """Install the wire."""
        delays = {"slow": sleep_for(0.7), "SIGSTOP-SIGCONT": freeze_for(0.7), "lock-briefly": hold_lock_for(0.7)}
        if here.is_culprit:
            install(here, self.cell.place, delays[self.cell.kind])


class SlowWithWarning(Fault):
    """The rank at fault is slow for longer than ``straggler_warning_s``."""

    def expect(self) -> Expectation:
        """Return a right step, and a warning that names the rank."""
        return Expectation(Outcome.RIGHT, warning=f"rank {self.cell.culprit}")

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Warn early."""
        return {"straggler_warning_s": 0.4}

    def arm(self, here: Here) -> None:
        """Install the wire."""
        if here.is_culprit:
            install(here, "forward", sleep_for(1.5))


class TooSlow(Fault):
    """The rank at fault is alive but slower than the time limit of its group."""

    group_timeout_s = 4.0

    def expect(self) -> Expectation:
        """Return the loss, named on the others when the group times out."""
        return _lost(self.cell, self.group_timeout_s + 1.0)

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Keep the settings in order with the group."""
        return {"heartbeat_s": _HEARTBEAT_S, "dead_after_s": _DEAD_AFTER_S}

    def arm(self, here: Here) -> None:
        """Install the wire."""
        if here.is_culprit:
            install(here, "forward", sleep_for(60.0))


class Interrupted(Fault):
    """A rank that waits for a slow peer gets a signal. The place says which one and what handles it."""

    def expect(self) -> Expectation:
        """Return a right step where the handler returns; else the interrupt on this rank and an error on the others."""
        if self.cell.place != "SIGINT-default":
            return Expectation(Outcome.RIGHT, signal_within_s=_SIGNAL_S)
        return named(
            ("PeerLostError", "PeerFailedError"),
            own_error=("KeyboardInterrupt",),
            signal_within_s=_SIGNAL_S,
            recovery=Recovery.OVER,
            same_text=False,
        )

    def arm(self, here: Here) -> None:
        """Set the handler on the rank at fault and have the signal sent."""
        number = signal.SIGTERM if self.cell.place.startswith("SIGTERM") else signal.SIGINT
        _let_wait(here, number)
        if not here.is_culprit:
            return

        def on_signal(*_: object) -> None:
            here.send("handled", at_s=time.monotonic())
            if self.cell.place == "SIGINT-default":
                raise KeyboardInterrupt

        before = signal.signal(number, on_signal)
        here.step_stack.callback(signal.signal, number, before)


class Forks(Fault):
    """The rank at fault forks, and the child trains with the wrapper of its parent."""

    def expect(self) -> Expectation:
        """Return a right step on all ranks and an error in the child."""
        return Expectation(Outcome.RIGHT, child_error="ForkedProcessError")

    def arm(self, here: Here) -> None:
        """Fork where the step begins."""
        if here.is_culprit:
            here.points["start"] = lambda: _fork_and_train(here)


class GroupDestroyed(Fault):
    """The process group is destroyed before a step, on every rank or on one."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.is_armed_on_all = cell.place == "all"

    def expect(self) -> Expectation:
        """Return the refusal; where one rank has done it, the others lose that rank."""
        if self.is_armed_on_all:
            return named("GroupDestroyedError", same_text=False, recovery=Recovery.OVER)
        return named(
            ("PeerLostError", "PeerFailedError"),
            own_error=("GroupDestroyedError",),
            same_text=False,
            recovery=Recovery.OVER,
        )

    def arm(self, here: Here) -> None:
        """Destroy the default group."""
        if self.is_at_fault(here.rank):
            here.announce()
            dist.destroy_process_group()


class StoreGone(Fault):
    """The process that hosts the group's store is killed; the ranks live."""

    def arm(self, here: Here) -> None:
        """Have it killed and give heartbeats time to notice."""
        if here.is_culprit:
            here.send("ask", signal=int(signal.SIGKILL), rank=-1, after_s=0.0)
            install(here, "forward", sleep_for(1.0))


def _lost(cell: Cell, within_s: float, *, at_wrap: bool = False) -> Expectation:
    """Return what must be seen when the rank at fault is gone."""
    fields = {"ranks": (cell.culprit,)}
    return named(
        "PeerLostError",
        fields=fields,
        lost=(cell.culprit,),
        within_s=within_s,
        later_by=1,
        at_wrap=at_wrap,
        recovery=Recovery.OVER,
    )


def _let_wait(here: Here, number: signal.Signals) -> None:
    """Let the rank after the one at fault be slow, and have the latter sent a signal while it waits."""
    if here.rank == (here.cell.culprit + 1) % here.num_ranks:

        def be_slow() -> None:
            here.send("ask", signal=int(number), rank=here.cell.culprit, after_s=0.2)
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


_DEATH_PLACES = ("forward", "backward-0", "backward-2", "between", "optimizer", "waiting")
_NO_LABELS = "torch DDP has no fence and its collectives have no labels"


def _without_labels(cell: Cell) -> str:
    return _NO_LABELS if cell.place in COLLECTIVE_PLACES else ""


_HEARTBEAT_ONLY = not_in_torch("torch DDP does not warn of stragglers")

PROCESS_KINDS = (
    Kind(
        "SIGKILL",
        "The others raise an error that names the rank within 1 s.",
        Dies,
        places=("wrap", *_DEATH_PLACES, "fence"),
        torch_skip=_without_labels,
    ),
    Kind("SIGSEGV", "As SIGKILL.", Dies, places=("backward-1", "optimizer"), combos=PAIRS),
    Kind("abort", "As SIGKILL.", Dies, places=("backward-1", "between"), combos=FEW),
    Kind("exit", "As SIGKILL.", Dies, places=("forward", "backward-3", "fence"), combos=FEW, torch_skip=_without_labels),
    Kind(
        "SIGSTOP",
        f"The others raise an error that names the rank within dead_after_s + 1 s ({_NOTICE_FROZEN_S:g} s here).",
        Freezes,
        places=("backward-1", "between", "fence"),
        combos=PAIRS,
        torch_skip=_without_labels,
    ),
    Kind(
        "lock-held", "A rank whose Python stands still counts as frozen.", Freezes, places=("backward-1", "between"), combos=FEW
    ),
    Kind(
        "SIGSTOP-SIGCONT",
        "Right: the rank was silent for less than dead_after_s.",
        Late,
        places=("backward-1", "between"),
        combos=PAIRS,
    ),
    Kind("lock-briefly", "Right: the rank was silent for less than dead_after_s.", Late, places=("backward-1",), combos=FEW),
    Kind("slow", "Right: a slow rank is waited for.", Late, places=("forward", "backward-1", "between"), combos=FEW),
    Kind(
        "slow-warning",
        "Right, with a warning that names the slow rank.",
        SlowWithWarning,
        combos=FEW,
        torch_skip=_HEARTBEAT_ONLY,
    ),
    Kind("too-slow", "The others raise an error that names the rank when the group times out.", TooSlow, combos=FEW),
    Kind(
        "interrupt",
        "The handler runs within 0.3 s although the rank waits for a slow peer.",
        Interrupted,
        places=("SIGINT-flag", "SIGTERM-flag", "SIGINT-default"),
        combos=PAIRS,
    ),
    Kind("fork", "The child gets an error instead of waiting for ever; the parent goes on.", Forks, combos=PAIRS),
    Kind(
        "group-destroyed",
        "Refused on every rank that destroyed its group.",
        GroupDestroyed,
        places=("all", "one"),
        combos=PAIRS,
    ),
    Kind("store-gone", "Right: gradients do not need the store.", StoreGone, combos=FEW),
    Kind(
        "SIGKILL-in-gather",
        "A rank that dies before it sends its updated shard is named within 1 s.",
        lambda cell: Dies(Cell("SIGKILL", cell.place, cell.combo, cell.seed, cell.system)),
        places=("gather",),
        combos=SHARDED,
        torch_skip=_without_labels,
    ),
)
