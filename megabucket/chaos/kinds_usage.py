"""Kinds of unusual use: orders, repeats, threads, checkpointing. Most of it must simply be right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from megabucket.chaos.cell import Mode
from megabucket.chaos.expectation import RIGHT, AnyOf, Expectation, Outcome, Recovery, named
from megabucket.chaos.fault import Fault, Here
from megabucket.chaos.kind import PAIRS, Kind
from megabucket.chaos.model import loss_of, make_batch
from megabucket.chaos.recipe import Recipe
from megabucket.chaos.trip import install

_SHARED_LAYER = 2


class HookOrder(Fault):
    """The rank at fault runs its layers in another order, so its gradients come in another order."""

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Swap the inner layers."""
        return Recipe(batch, layers=(0, 2, 1, 3) if self.is_at_fault(rank) else (0, 1, 2, 3))


class TwoBackwards(Fault):
    """Two backwards of a step run outside ``no_sync()``: of two microbatches, or of one graph that was kept."""

    def __init__(self, cell: Any) -> None:
        super().__init__(cell)
        self.is_armed_on_all = cell.place.startswith("all")

    def expect(self) -> Expectation:
        """Return a right step where gradients can be reduced again, which is on all ranks after an all-reduce."""
        combo = self.cell.combo
        if combo.mode is Mode.REDUCE_SCATTER:
            if not self.is_armed_on_all:
                return named("MicrobatchMismatchError")
            # Without overlap nothing was sent when the second backward comes, so it is just accumulated.
            return named("LateGradientError", texts=("no_sync()",)) if combo.overlaps else RIGHT
        if self.is_armed_on_all:
            return RIGHT
        # The rank at fault starts a second sync while the others step; all meet in the next one.
        return named("ReplicasDivergedError", later_by=1, culprit_later_by=0, recovery=Recovery.RELOAD)

    def num_agreements(self) -> int:
        """Return two where each backward is reduced."""
        return 2 if self.cell.combo.mode is Mode.ALL_REDUCE else 1

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Run the second backward."""
        if not self.is_at_fault(rank):
            return Recipe(batch)
        if self.cell.place.endswith("retain-graph"):
            return Recipe(batch, num_repeats=1)
        return Recipe(batch, num_microbatches=2, num_synced=2)


class CheckpointedTwice(Fault):
    """A layer in reentrant activation checkpointing is used twice, which it was not in the steps before."""

    def __init__(self, cell: Any) -> None:
        super().__init__(cell)
        self.is_armed_on_all = cell.place == "all"

    def expect(self) -> Expectation:
        """Return the late gradient and its hint; nothing is late where buckets wait for the end of backward."""
        if not self.cell.combo.overlaps:
            return RIGHT
        params = tuple(f"layers.{_SHARED_LAYER}.{part}" for part in ("weight", "bias"))
        return named(
            "LateGradientError",
            fields={"params": AnyOf((params, params[::-1], params[:1], params[1:]))},
            texts=("use_reentrant=False",),
        )

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Use the layer twice."""
        if not self.is_at_fault(rank):
            return Recipe(batch)
        return Recipe(batch, layers=(0, 1, 2, 2, 3), checkpointed=(_SHARED_LAYER,))


class OddButRight(Fault):
    """What users do and may do; on all ranks."""

    is_armed_on_all = True

    def faulty(self, rank: int, batch: int) -> Recipe:  # noqa: ARG002
        """Do what the place says."""
        return _ODD[self.cell.place](batch)


_ODD: Final[Mapping[str, Callable[[int], Recipe]]] = {
    "inner-module": lambda batch: Recipe(batch, calls_inner_module=True),
    "forward-in-no-sync": lambda batch: Recipe(batch, forwards_in_no_sync=True),
    "nested-no-sync": lambda batch: Recipe(batch, num_microbatches=3, no_sync_depth=2),
    "more-microbatches": lambda batch: Recipe(batch, num_microbatches=3),
    "zero-in-place": lambda batch: Recipe(batch, zeroes_in_place=True),
    "layers-twice": lambda batch: Recipe(batch, layers=(0, 1, 1, 2, 2, 3)),
}


class TwoThreads(Fault):
    """A second thread runs a backward while one is running; on all ranks."""

    is_armed_on_all = True

    def expect(self) -> Expectation:
        """Return a right step and a refusal in the second thread."""
        return Expectation(Outcome.RIGHT, child_error="ConcurrentBackwardError")

    def arm(self, here: Here) -> None:
        """Build a second loss before the step, and run its backward from within the first one."""
        inputs, targets = make_batch(seed=0, batch=0, rank=0, microbatch=0)
        here.points["start"] = lambda: _run_second_backward(here, loss_of(here.ddp(inputs), targets))


def _run_second_backward(here: Here, loss: torch.Tensor) -> None:
    def backward() -> None:
        said = "no error"
        try:
            loss.backward()
        except Exception as error:
            said = type(error).__name__
        here.send("child", said=said)

    def in_first_backward(_: Here) -> None:
        here.announce()
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    install(here, "backward-1", in_first_backward)


USAGE_KINDS = (
    Kind(
        "odd-but-right",
        "Right: the inner module is called, no_sync() is nested or around forward, the number of microbatches changes.",
        OddButRight,
        places=tuple(_ODD),
        combos=PAIRS,
        soak_places=tuple(_ODD),
    ),
    Kind(
        "two-threads",
        "The second thread is refused, and the step of the first one is right.",
        TwoThreads,
        combos=PAIRS,
        soak_places=("step",),
    ),
    Kind("hook-order", "Right: buckets are launched by index, whatever the hooks do.", HookOrder, soak_places=("step",)),
    Kind(
        "two-backwards",
        "Reduced again where that gives the sum; named where it cannot.",
        TwoBackwards,
        places=("all-microbatches", "all-retain-graph", "one-microbatches", "one-retain-graph"),
        combos=PAIRS,
        soak_places=("all-microbatches", "all-retain-graph"),
    ),
    Kind(
        "checkpoint-twice",
        "A gradient for a bucket that was sent is named, with the hint use_reentrant=False.",
        CheckpointedTwice,
        places=("one", "all"),
        combos=PAIRS,
    ),
)
