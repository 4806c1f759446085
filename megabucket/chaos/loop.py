"""The training loop of one rank: what a torch user writes, with a check of every gradient and every weight.

try:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
except Exception as error:
    ...  # note it, and go on with the next step
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megabucket.chaos.cell import Mode, SystemName
from megabucket.chaos.expectation import Outcome, Recovery
from megabucket.chaos.fault import Fault, Here
from megabucket.chaos.model import loss_of, make_batch
from megabucket.chaos.oracle import edited, first_difference
from megabucket.chaos.recipe import HEALTHY_STEPS, NUM_LAYERS, NUM_STEPS, Ending, Recipe
from megabucket.chaos.systems import System
from megabucket.errors import MegabucketError


@dataclass(slots=True)
class _Attempt:
    """One step while it runs."""

    index: int
    recipe: Recipe
    means: dict[str, torch.Tensor | None]
    checks_grads: bool
    wrong_grads: str = ""


class Loop:
    """Trains, checks and reports on one rank.

    Args:
        keeps_going: whether training goes on after two errors in a row.
    """

    def __init__(self, here: Here, system: System, *, keeps_going: bool = False) -> None:
        self._here = here
        self._system = system
        self._keeps_going = keeps_going
        combo = here.cell.combo
        self._is_ours = here.cell.system is SystemName.MEGABUCKET
        self._sees_whole_grads = combo.mode is Mode.ALL_REDUCE or not self._is_ours
        self._defers_weights = self._is_ours and combo.mode is Mode.REDUCE_SCATTER and combo.overlaps
        self._unchecked: int | None = None
        self._num_errors_in_a_row = 0
        self.has_given_up = False
        """Whether the program would have ended here, by an interrupt or because training cannot go on."""

    def run(self, fault: Fault) -> None:
        """Run the steps of a cell."""
        index: int | None = 0
        while index is not None and index < NUM_STEPS:
            index = self.attempt(index, fault, is_faulty=index == HEALTHY_STEPS, fault_index=HEALTHY_STEPS)
        if index is not None:
            self.flush_weights()

    def attempt(self, index: int, fault: Fault, *, is_faulty: bool, fault_index: int) -> int | None:
        """Run one step, check it, report it; return the index of the next one, if there is one."""
        here = self._here
        plan = fault.faulty if is_faulty else fault.healthy
        recipes = [plan(rank, index) for rank in range(here.num_ranks)]
        expected = fault.expect()
        skips = is_faulty and self._is_ours and expected.outcome is Outcome.SKIPPED
        if is_faulty:
            self.flush_weights()
            here.snapshot = here.oracle.snapshot()
            fault.arm(here)
            if recipes[here.rank] != fault.healthy(here.rank, index):
                here.announce()
        # Whoever left a batch out is one batch ahead of the others; right is what all ranks do with this one.
        oracle_recipes = [
            recipe if recipe.batch == index else fault.healthy(rank, index) for rank, recipe in enumerate(recipes)
        ]
        attempt = _Attempt(
            index=index,
            recipe=recipes[here.rank],
            means=here.oracle.compute(oracle_recipes),
            checks_grads=self._sees_whole_grads and not skips,
        )
        error = self._try_step(attempt, uses_block=fault.uses_step_block)
        at_s = time.monotonic()
        here.forget()
        if isinstance(error, KeyboardInterrupt):  # the program ends; it does not talk to the others any more
            here.send(
                "step", attempt=index, error=describe(error), cleanup_error=None, last_error=None, at_s=at_s, wrong_grads=""
            )
            self.has_given_up = True
            return None
        cleanup_error = self._clean_up() if error is not None else None
        if error is None and attempt.recipe.ending is Ending.STEP and not skips:
            here.oracle.update()
        self._report(attempt, error, cleanup_error, at_s)
        return self._next_index(attempt, error, fault, fault_index)

    def _try_step(self, attempt: _Attempt, *, uses_block: bool) -> BaseException | None:
        here = self._here
        try:
            with self._system.step_block(here.ddp) if uses_block else nullcontext():
                self._step(attempt)
        except BaseException as error:
            return error
        return None

    def _step(self, attempt: _Attempt) -> None:
        """Do what the recipe says."""
        here, recipe = self._here, attempt.recipe
        here.reach("start")
        if recipe.step_number is not None and self._is_ours:
            here.ddp.step_number = recipe.step_number
        for _ in range(recipe.num_idle_forwards):
            self._forward(recipe, microbatch=0)
        for microbatch in range(recipe.num_microbatches):
            is_synced = microbatch >= recipe.num_microbatches - recipe.num_synced
            is_last = microbatch == recipe.num_microbatches - 1
            early_loss = self._forward_in_no_sync(recipe, microbatch) if recipe.forwards_in_no_sync else None
            with self._no_sync(0 if is_synced else recipe.no_sync_depth):
                loss = self._forward(recipe, microbatch) if early_loss is None else early_loss
                self._check_deferred_weights(recipe)
                here.reach("before backward")
                for repeat in reversed(range(1 + (recipe.num_repeats if is_last else 0))):
                    self._backward(loss, recipe, keeps_graph=repeat > 0)
        here.reach("between")
        self._check_grads(attempt)
        if recipe.ending is Ending.ABORT:
            here.ddp.abort_step("the batch is empty")
        elif recipe.ending is Ending.STEP:
            here.optimizer.step()
        if recipe.ending is not Ending.ABORT:
            here.optimizer.zero_grad(set_to_none=not recipe.zeroes_in_place)

    def _forward(self, recipe: Recipe, microbatch: int) -> torch.Tensor:
        here = self._here
        inputs, targets = make_batch(seed=here.cell.seed, batch=recipe.batch, rank=here.rank, microbatch=microbatch)
        dtype = next(here.model.parameters()).dtype
        module = here.model if recipe.calls_inner_module else here.ddp
        return loss_of(module(inputs.to(dtype), recipe.layers, recipe.checkpointed), targets)

    def _forward_in_no_sync(self, recipe: Recipe, microbatch: int) -> torch.Tensor:
        with self._no_sync(1):
            return self._forward(recipe, microbatch)

    @contextmanager
    def _no_sync(self, depth: int) -> Iterator[None]:
        with ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(self._here.ddp.no_sync())
            yield

    def _backward(self, loss: torch.Tensor, recipe: Recipe, *, keeps_graph: bool) -> None:
        with ExitStack() as stack:
            for edit in recipe.edits:
                param = self._here.model.get_parameter(edit.param)
                handle = param.register_hook(lambda grad, edit=edit: edited(grad, edit.edit))
                stack.callback(handle.remove)
            loss.backward(retain_graph=keeps_graph)

    def _check_grads(self, attempt: _Attempt) -> None:
        if attempt.checks_grads and attempt.recipe.num_synced:
            grads = {name: param.grad for name, param in self._here.model.named_parameters() if param.requires_grad}
            attempt.wrong_grads = first_difference(grads, attempt.means)

    # After the step #

    def _clean_up(self) -> BaseException | None:
        """Clear gradients after an error where the rank does that, which half of the cells do: it is allowed, not needed."""
        here = self._here
        if here.cell.combo.mode is Mode.ALL_REDUCE and not here.cell.combo.overlaps:
            return None
        try:
            here.optimizer.zero_grad()
        except Exception as error:
            return error
        return None

    def _report(self, attempt: _Attempt, error: BaseException | None, cleanup: BaseException | None, at_s: float) -> None:
        here = self._here
        agreed: BaseException | None = None
        try:
            agreed = self._system.last_error(here.ddp)
        except Exception as lost:
            agreed = lost
        here.send(
            "step",
            attempt=attempt.index,
            error=describe(error),
            cleanup_error=describe(cleanup),
            last_error=describe(agreed),
            at_s=at_s,
            wrong_grads=attempt.wrong_grads,
        )
        self._unchecked = attempt.index
        if not self._defers_weights or error is not None:
            self.flush_weights()

    def _next_index(self, attempt: _Attempt, error: BaseException | None, fault: Fault, fault_index: int) -> int | None:
        """Decide, after an error, whether and where training goes on."""
        index = attempt.index
        if error is None:
            self._num_errors_in_a_row = 0
            return index + 1
        self._num_errors_in_a_row += 1
        if not self._is_ours:
            self.has_given_up = self._num_errors_in_a_row > 1
            return None if self.has_given_up else index + 1
        expected = fault.expect()
        if expected.recovery is Recovery.OVER:
            return None
        if index == fault_index + expected.steps_late(is_culprit=self._here.is_culprit):
            fault.recover(self._here)
            if expected.recovery is Recovery.RELOAD:
                return fault_index + expected.later_by + 1  # a checkpoint says which step is next, on every rank
        return index + 1 if self._keeps_going or self._num_errors_in_a_row < 3 else None

    # Weights #

    def _check_deferred_weights(self, recipe: Recipe) -> None:
        """Check the weights of the step before, now that forward has gathered them: the oracle has not stepped since."""
        if self._unchecked is not None and set(recipe.layers) == set(range(NUM_LAYERS)):
            self._check_weights(self._unchecked)

    def flush_weights(self) -> None:
        """Check weights that were not checked yet, gathering them if need be."""
        if self._unchecked is None:
            return
        try:
            self._system.gather_weights(self._here.ddp)
        except Exception as error:  # the group is gone: the values are, too
            self._here.send("no weights", attempt=self._unchecked, error=describe(error))
            self._unchecked = None
            return
        self._check_weights(self._unchecked)

    def _check_weights(self, index: int) -> None:
        self._unchecked = None
        weights = {name: param.detach() for name, param in self._here.model.named_parameters()}
        digest = hashlib.sha256()
        for value in weights.values():
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self._here.send(
            "weights",
            attempt=index,
            wrong=first_difference(weights, self._here.oracle.weights()),
            is_finite=all(bool(value.isfinite().all()) for value in weights.values()),
            digest=digest.hexdigest(),
        )


def describe(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error as plain data: its class, its text, and where it is ours its fields."""
    if error is None:
        return None
    fields = dict(vars(error)) if isinstance(error, MegabucketError) else {}
    return {"class": type(error).__name__, "text": str(error), "fields": fields}
