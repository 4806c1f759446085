"""Kinds of fault inside one step of living ranks: batches, microbatches, gradients, exceptions. Training goes on after each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megabucket.chaos.cell import Mode
from megabucket.chaos.expectation import RIGHT, SKIPPED, AnyOf, Expectation, Recovery, named
from megabucket.chaos.fault import BOOM, Fault, Here
from megabucket.chaos.kind import FEW, PAIRS, Kind, not_in_torch
from megabucket.chaos.model import layer_of_bucket
from megabucket.chaos.recipe import Edit, Ending, GradEdit, Recipe
from megabucket.chaos.trip import boom, install

_UNUSED_LAYER = 1


class Unused(Fault):
    """A layer is in no forward of the step. The place says on how many ranks and under which policy: ``one-error``."""

    def __init__(self, cell: Any) -> None:
        super().__init__(cell)
        self.is_armed_on_all = cell.place.startswith("all")
        self._policy = cell.place.partition("-")[2]

    def expect(self) -> Expectation:
        """Return an error that names both parameters, or a right step with zeros in their place."""
        if self._policy == "zero":
            return RIGHT
        ranks = tuple(rank for rank in range(self.cell.combo.num_ranks) if self.is_at_fault(rank))
        names = (f"layers.{_UNUSED_LAYER}.bias", f"layers.{_UNUSED_LAYER}.weight")
        return named("UnusedParameterError", fields={"ranks": ranks, "params": AnyOf((names, names[::-1]))})

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Set the policy, on every rank."""
        return {"unused_parameters": self._policy}

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Leave the layer out."""
        return Recipe(
            batch, layers=tuple(i for i in range(4) if i != _UNUSED_LAYER) if self.is_at_fault(rank) else (0, 1, 2, 3)
        )


class SkippedStep(Fault):
    """The rank at fault leaves its batch out and goes on with the next one, while the others train on theirs."""

    def expect(self) -> Expectation:
        """Return the mismatch, in the very step in which the ranks meet."""
        return named("StepMismatchError")

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Take the next batch; with place ``forward-only``, after a forward that no backward follows."""
        recipe = self.healthy(rank, batch)
        if not self.is_at_fault(rank):
            return recipe
        if self.cell.place == "numbered":
            return replace(recipe, batch=batch + 1, step_number=batch + 1)
        return replace(recipe, batch=batch + 1, num_idle_forwards=1)

    def healthy(self, rank: int, batch: int) -> Recipe:  # noqa: ARG002
        """Tell the wrapper the step's number where the place says so."""
        return Recipe(batch, step_number=batch if self.cell.place == "numbered" else None)


class DroppedStep(Fault):
    """The rank at fault calls ``zero_grad()`` after its backward instead of ``optimizer.step()``."""

    def expect(self) -> Expectation:
        """Return divergence found by the next step (all-reduce), or the mismatch in this one (reduce-scatter)."""
        if self.cell.combo.mode is Mode.ALL_REDUCE:
            return named("ReplicasDivergedError", later_by=1, recovery=Recovery.RELOAD)
        return named("StepMismatchError", own_error=("",))

    def faulty(self, rank: int, batch: int) -> Recipe:
        """End without a step."""
        return Recipe(batch, ending=Ending.DROP if self.is_at_fault(rank) else Ending.STEP)


class Microbatches(Fault):
    """The numbers of backwards in a step, or of those outside ``no_sync()``, differ."""

    def expect(self) -> Expectation:
        """Return the mismatch with the counts of all ranks; or a right step where nothing is wrong."""
        if self.cell.place == "no-sync":
            return named(
                ("MicrobatchMismatchError", "StepMismatchError", "PeerFailedError"), own_error=("UnreducedGradientsError",)
            )
        counts = tuple(2 if self.is_at_fault(rank) else 1 for rank in range(self.cell.combo.num_ranks))
        return named("MicrobatchMismatchError", fields={"by_rank": counts})

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Run one backward more, or none of them outside ``no_sync()``."""
        if not self.is_at_fault(rank):
            return Recipe(batch)
        return Recipe(batch, num_synced=0) if self.cell.place == "no-sync" else Recipe(batch, num_microbatches=2)


class Raised(Fault):
    """An exception on one rank. A place that ends in ``+block`` is inside ``with ddp.step():``."""

    def __init__(self, cell: Any) -> None:
        super().__init__(cell)
        self._place, _, block = cell.place.partition("+")
        self.uses_step_block = bool(block)

    def expect(self) -> Expectation:
        """Return the same error on all ranks; the rank at fault has its own exception unless a step block knows better."""
        is_sharded = self.cell.combo.mode is Mode.REDUCE_SCATTER
        own = () if self.uses_step_block else ("ChaosError",)
        fields: dict[str, Any] = {"rank": self.cell.culprit}
        if self._place == "optimizer" and is_sharded:
            # The others gather what the failed rank has not updated, and are told in the next step.
            fields["phase"] = "optimizer"
            return named("PeerFailedError", fields=fields, own_error=own, later_by=1, recovery=Recovery.RELOAD)
        if self._place == "optimizer" or (self._place == "between" and not is_sharded):
            # The others have their reduced gradients and step; all find out in the next step. The step block cannot help: all
            # have agreed on the step before the exception, so it lets it pass.
            own = ("ChaosError",)
            return named("ReplicasDivergedError", own_error=own, later_by=1, recovery=Recovery.RELOAD)
        if self._place == "between" and not self.uses_step_block:
            return named(("StepMismatchError", "PeerFailedError"), own_error=own)
        # Autograd does not tell which exception ended a backward; forward and the step block know it.
        texts = (BOOM,) if self.uses_step_block or self._place == "forward" else ()
        return named("PeerFailedError", fields=fields, texts=texts, own_error=own)

    def arm(self, here: Here) -> None:
        """Install the wire on the rank at fault."""
        if here.is_culprit:
            install(here, self._place, boom)


class Aborted(Fault):
    """The rank at fault cannot use its batch and says so with ``ddp.abort_step()``."""

    def expect(self) -> Expectation:
        """Return the caller's reason on all other ranks."""
        fields = {"rank": self.cell.culprit, "phase": "abort_step()"}
        return named("PeerFailedError", fields=fields, texts=("the batch is empty",), own_error=("",))

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Give up before the forward, after it, or after a microbatch."""
        if not self.is_at_fault(rank):
            return Recipe(batch)
        place = self.cell.place
        return Recipe(
            batch,
            num_idle_forwards=1 if place == "after-forward" else 0,
            num_microbatches=1 if place == "after-microbatch" else 0,
            num_synced=0,
            ending=Ending.ABORT,
        )


class NonFinite(Fault):
    """NaN or Inf in a gradient of one rank. The place says where and under which policy: ``bucket-1-error``."""

    def __init__(self, cell: Any) -> None:
        super().__init__(cell)
        _, bucket, self._policy = cell.place.split("-")
        self._bucket = int(bucket)
        self._param = f"layers.{layer_of_bucket(self._bucket)}.weight"

    def expect(self) -> Expectation:
        """Return the error with rank, bucket and parameter; or a step that no rank takes."""
        if self._policy == "skip_step":
            return SKIPPED
        fields = {"rank": self.cell.culprit, "param": self._param, "bucket": self._bucket}
        return named("NonFiniteGradientError", fields=fields, texts=(self.cell.kind,))

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Set the policy, on every rank."""
        return {"nonfinite_gradients": self._policy}

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Change the gradient."""
        edits = (GradEdit(self._param, Edit(self.cell.kind)),) if self.is_at_fault(rank) else ()
        return Recipe(batch, edits=edits)


class Huge(NonFinite):
    """A gradient of one rank is huge but finite: its square overflows float32, it does not."""

    def expect(self) -> Expectation:
        """Return a right step: nothing is wrong."""
        return RIGHT


_RAISE_PLACES = ("forward", "backward-0", "backward-1", "backward-3", "hook-1", "between", "optimizer")
_NO_POLICY = not_in_torch("torch DDP has no policy for gradients that are not finite")

STEP_KINDS = (
    Kind("none", "Every step is right: the control.", Fault, soak_places=("step",)),
    Kind(
        "unused",
        "The error names parameters and ranks in the same step; under the policy zero the step is right.",
        Unused,
        places=("one-error", "all-error", "one-zero", "all-zero"),
        soak_places=("one-error", "all-error"),
    ),
    Kind(
        "skipped-step",
        "The step mismatch is named in the very step in which the ranks meet.",
        SkippedStep,
        places=("forward-only", "numbered"),
        soak_places=("forward-only",),
    ),
    Kind(
        "dropped-step",
        "A rank that does not step is named before anything else is updated.",
        DroppedStep,
    ),
    Kind(
        "microbatches",
        "Different numbers of backwards are named with the counts of all ranks.",
        Microbatches,
        places=("one-more", "no-sync"),
        soak_places=("one-more",),
    ),
    Kind(
        "exception",
        "All ranks raise one error about the rank that failed; the next step is right.",
        Raised,
        places=(*_RAISE_PLACES, "forward+block", "backward-1+block", "between+block"),
        torch_skip=lambda cell: "torch DDP has no step block" if cell.place.endswith("+block") else "",
        soak_places=("forward", "backward-0", "backward-1", "backward-3", "hook-1"),
    ),
    Kind(
        "abort-step",
        "The other ranks raise an error with the caller's reason; the next step is right.",
        Aborted,
        places=("first", "after-forward", "after-microbatch"),
        combos=PAIRS,
        torch_skip=not_in_torch("torch DDP has no abort_step()"),
        soak_places=("first", "after-forward", "after-microbatch"),
    ),
    Kind(
        "nan",
        "The error names rank, bucket and parameter; under skip_step no rank takes the step.",
        NonFinite,
        places=("bucket-0-error", "bucket-3-error", "bucket-1-skip_step"),
        torch_skip=lambda cell: _NO_POLICY(cell) if cell.place.endswith("skip_step") else "",
        soak_places=("bucket-0-error", "bucket-3-error"),
    ),
    Kind(
        "inf",
        "The error names rank, bucket and parameter; under skip_step no rank takes the step.",
        NonFinite,
        places=("bucket-1-error", "bucket-2-skip_step"),
        combos=PAIRS,
        torch_skip=lambda cell: _NO_POLICY(cell) if cell.place.endswith("skip_step") else "",
        soak_places=("bucket-1-error",),
    ),
    Kind("huge", "Right, without a false alarm.", Huge, places=("bucket-1-error", "bucket-1-skip_step"), combos=FEW),
)
