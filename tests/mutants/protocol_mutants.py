"""Library code with one mistake each. Every mutant is a patch that a test applies and takes back."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from scenarios import ALL_REDUCE, EXPLICIT, OVERLAPS, SHARDED, SHARDED_EXPLICIT, Scenario

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.buffer.finite import FiniteTest, NonFiniteParam
from megabucket.buffer.grad_slot import GradSlot
from megabucket.buffer.scaling import GradScale
from megabucket.chaos.loopback_soak.judge import Verdict
from megabucket.ddp import backward_watch, step_sync, verdict
from megabucket.ddp.hooks import BackwardWatch
from megabucket.ddp.fence import PendingFence
from megabucket.ddp.step import GradSync
from megabucket.ddp.launcher import InOrderLauncher
from megabucket.ddp.guards import ModelWatch
from megabucket.ddp.step_agreement import StepAgreement
from megabucket.ddp.fence import StepTally


def readiness_order_launch(patch):
    def mark_complete(self, index):
        self._is_complete[index] = True
        self._launch(self._groups[index])

    def flush(self, launch=None):
        for index, group in enumerate(self._groups):
            if not self._is_complete[index]:
                (launch or self._launch)(group)
        self._next = len(self._groups)

    patch.setattr(InOrderLauncher, "mark_complete", mark_complete)
    patch.setattr(InOrderLauncher, "flush", flush)


def write_in_flight(patch):
    def note_late(self, group, position):
        slot = group.slots[position]
        slot.view.add_(slot.param.grad)

    patch.setattr(GradSync, "_note_late", note_late)


def swallowed_exception(patch):
    patch.setattr(GradSync, "fail", lambda *_: None)


def caught_exception_forgotten(patch):
    patch.setattr(GradSync, "tell_swallowed", lambda _: None)


def report_with(**values):
    """A rank that reports the same numbers whatever has happened."""
    original = StepTally.report

    def apply(patch):
        patch.setattr(StepTally, "report", lambda self, **known: replace(original(self, **known), **values))

    return apply


def error_on_one_rank_only(patch):
    original = StepAgreement.conclude

    def conclude(self):
        error = original(self)
        return error if error is None or error.rank == self._rank else None

    patch.setattr(StepAgreement, "conclude", conclude)


def no_zeroing(patch):
    original = GradSlot.hand_over

    def hand_over(self):
        self.is_clean = True
        return original(self)

    patch.setattr(GradSlot, "hand_over", hand_over)


def gradients_not_withheld(patch):
    patch.setattr(_ParamAndGradBucketGroup, "withhold_grads", lambda _: None)


def no_division(patch):
    patch.setattr(GradScale, "divisions", lambda *_: iter(()))


def no_unused_report(patch):
    patch.setattr(step_sync, "unused_params", lambda *_, **__: None)


def no_finite_test(patch):
    patch.setattr(FiniteTest, "run", lambda _: None)


def finite_test_that_overflows(patch):
    def run(self):
        self.found = ()
        if not all(bool(torch.isfinite(flat.float().square().sum())) for flat, _ in self._flats):
            self.found = (NonFiniteParam(self._slots[0].name, "inf in its norm"),)

    patch.setattr(FiniteTest, "run", run)


def fence_not_awaited(patch):
    patch.setattr(PendingFence, "is_whole", lambda _: True)


def reports_guessed(patch):
    def reports(self, report=None):
        own = report or self._report
        return [replace(own, rank=rank) for rank in range(self._fence.communicator.size)]

    patch.setattr(PendingFence, "reports", reports)


def model_check_off(patch):
    patch.setattr(ModelWatch, "find_change", lambda _: None)


def state_not_reset(patch):
    patch.setattr(StepTally, "start_over", lambda _: None)


def gradients_not_forgotten(patch):
    def forget(self):
        self._launcher.start_step()
        self._is_finished = self.has_local_grads = self.awaits_finish = self._awaits_vote = False
        for group in self._groups:
            if group.grad_phase is not GradPhase.ACCUMULATING:
                group.reopen()

    patch.setattr(GradSync, "_forget", forget)


def end_of_backward_unnoticed(patch):
    def open_without_callback(self, _):
        self.is_open = True

    patch.setattr(BackwardWatch, "open", open_without_callback)


def sentinel_never_fires(patch):
    patch.setattr(backward_watch._EndOfBackward, "__del__", lambda _: None)


def gather_before_the_vote(patch):
    original = GradSync.commit

    def commit(self, note_reduced=None):
        if not self._is_finished:
            return original(self, note_reduced)
        self._awaits_vote = False
        self._set_phase("optimizer")
        return None

    patch.setattr(GradSync, "commit", commit)


def launcher_skips_a_group(patch):
    def flush(self, launch=None):
        self._next += 1
        while self._next < len(self._groups):
            self._launch_next(launch or self._launch)

    patch.setattr(InOrderLauncher, "flush", flush)


def text_with_the_wrong_rank(patch):
    original = verdict._failures

    def failures(facts, reports):
        for error in original(facts, reports):
            rank = (error.rank + 1) % len(reports)
            yield type(error)(step=error.step, rank=rank, phase=error.phase, cause=error.cause)

    order = tuple(failures if find is original else find for find in verdict._IN_ORDER)
    patch.setattr(verdict, "_IN_ORDER", order)


def no_sync_is_a_switch(patch):
    @contextmanager
    def no_sync(self):
        self._no_sync_depth = 1
        try:
            yield
        finally:
            self._no_sync_depth = 0

    patch.setattr(GradSync, "no_sync", no_sync)


def caught_error_can_be_stepped_on(patch):
    patch.setattr(GradSync, "check_not_failed", lambda self: self.settle() and None)


def failed_rank_does_not_finish_its_schedule(patch):
    original = InOrderLauncher.flush

    def flush(self, launch=None):
        if sys._getframe(1).f_code.co_name != "_give_up":
            original(self, launch)

    patch.setattr(InOrderLauncher, "flush", flush)


@dataclass(frozen=True)
class Mutant:
    """A mistake, the steps that show it, and how it must be found."""

    name: str
    apply: Callable
    scenario: Scenario
    verdict: Verdict
    error: str  # class of the error that was seen, empty if there was none
    text: str  # a regular expression that is somewhere in the reason or the text of the error


SILENT, WRONG, HUNG = Verdict.SILENT, Verdict.WRONG, Verdict.HUNG
MISMATCH = "MismatchedCollectiveError"

MUTANTS = [
    Mutant(
        "readiness-order launch",
        readiness_order_launch,
        Scenario("healthy", {**ALL_REDUCE, **OVERLAPS}),
        HUNG,
        MISMATCH,
        r"collective \d+ differs between ranks: rank \d launched bucket \d \[.*\], rank \d launched bucket \d \[",
    ),
    Mutant(
        "write in flight",
        write_in_flight,
        Scenario("start early", EXPLICIT),
        SILENT,
        "InFlightWriteError",
        r"the input of collective \d+ \(bucket 0 \[.*\]\) changed while it was in flight",
    ),
    Mutant(
        "exception swallowed",
        swallowed_exception,
        Scenario("exception", ALL_REDUCE, "forward"),
        WRONG,
        "StepMismatchError",
        "StepMismatchError instead of PeerFailedError: step 2: training forwards that no backward has reached differ",
    ),
    Mutant(
        "caught exception forgotten",
        caught_exception_forgotten,
        Scenario("exception that is caught", ALL_REDUCE),
        SILENT,
        "ReplicasDivergedError",
        "raised nothing, expected PeerFailedError",
    ),
    Mutant(
        "no microbatch count",
        report_with(num_microbatches=0),
        Scenario("microbatch more", ALL_REDUCE),
        SILENT,
        "",
        "raised nothing, expected MicrobatchMismatchError",
    ),
    Mutant(
        "error on one rank only",
        error_on_one_rank_only,
        Scenario("exception", SHARDED),
        HUNG,
        "CollectiveDeadlockError",
        r"\[rank \d\] waits for collective \d+ \(param gather 0 \[all_gather of .*\]\), which rank\(s\) \d have not launched",
    ),
    Mutant(
        "no zeroing",
        no_zeroing,
        Scenario("unused on all ranks", {**ALL_REDUCE, "unused_parameters": "zero"}),
        SILENT,
        "",
        r"gradient layers\.\d\.p0\[0\] is -?\d+ and should be 0",
    ),
    Mutant(
        "gradients not withheld",
        gradients_not_withheld,
        Scenario("harmless", SHARDED, "clip too early"),
        WRONG,
        "AssertionError",
        "clipped gradients that are not whole",
    ),
    Mutant(
        "no division",
        no_division,
        Scenario("healthy", {**ALL_REDUCE, "average_in_collective": False}),
        SILENT,
        "",
        r"gradient layers\.0\.p0\[0\] is 12 and should be 3 ",
    ),
    Mutant(
        "no unused report",
        no_unused_report,
        Scenario("unused", SHARDED),
        SILENT,
        "",
        "raised nothing, expected UnusedParameterError",
    ),
    Mutant(
        "no finite test",
        no_finite_test,
        Scenario("nan or inf", ALL_REDUCE),
        SILENT,
        "",
        "raised nothing, expected NonFiniteGradientError",
    ),
    Mutant(
        "finite test that overflows",
        finite_test_that_overflows,
        Scenario("huge but finite", SHARDED),
        WRONG,
        "NonFiniteGradientError",
        "has inf in its norm. Reduced, it would reach every rank",
    ),
    Mutant(
        "fence not awaited",
        fence_not_awaited,
        Scenario("unused", SHARDED),
        SILENT,
        "",
        "raised nothing, expected UnusedParameterError",
    ),
    Mutant(
        "reports guessed, not exchanged",
        reports_guessed,
        Scenario("unused", ALL_REDUCE),
        WRONG,
        "InvariantError",
        "the fence of step 2 does not hold, but no rank says why",
    ),
    Mutant(
        "model check off",
        model_check_off,
        Scenario("model change", SHARDED, "moved"),
        SILENT,
        "",
        "raised nothing, expected StorageMovedError",
    ),
    Mutant(
        "dropped step not counted",
        report_with(num_dropped_steps=0),
        Scenario("zero instead of step", EXPLICIT),
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "update count not compared",
        report_with(num_updates=0, checksum=0),  # nor by which numbers each has updated
        Scenario("update left out", ALL_REDUCE),
        SILENT,
        "",
        "raised nothing, expected ReplicasDivergedError",
    ),
    Mutant(
        "skipped forward not counted",
        report_with(num_skipped_forwards=0),
        Scenario("forward more", ALL_REDUCE),
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "step number not compared",
        report_with(step_number=-1),
        Scenario("other step number", SHARDED),
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "way of finishing not compared",
        report_with(is_committing=False, checksum=0),  # nor by which numbers those who go on would update
        Scenario("finish first", SHARDED),
        HUNG,
        MISMATCH,
        r"rank \d launched (fence|param gather 0) \[.*\], rank \d launched (fence|param gather 0) \[",
    ),
    Mutant(
        "kept gradients not compared",
        report_with(checksum=0),
        Scenario("zero left out", ALL_REDUCE),
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "clearing between backwards not compared",
        report_with(checksum=0),
        Scenario("cleared between microbatches", SHARDED),
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "loads not compared",
        report_with(num_loads=0, checksum=0),
        Scenario("weights loaded", ALL_REDUCE),
        SILENT,
        "",
        "raised nothing, expected ReplicasDivergedError",
    ),
    Mutant(
        "hyperparameters not compared",
        report_with(checksum=0),
        Scenario("other learning rate", SHARDED_EXPLICIT),
        SILENT,
        "",
        "raised nothing, expected HyperparameterMismatchError",
    ),
    Mutant(
        "state of a dropped step not reset",
        state_not_reset,
        Scenario("abort", SHARDED),
        WRONG,
        "PeerFailedError",
        r"PeerFailedError at Update: step 3: rank 3 failed in abort_step\(\)",
    ),
    Mutant(
        "gradients not forgotten",
        gradients_not_forgotten,
        Scenario("healthy", ALL_REDUCE),
        SILENT,
        "",
        r"gradient layers\.0\.p0\[0\] is 0 and should be -3 ",
    ),
    Mutant(
        "end of backward unnoticed",
        end_of_backward_unnoticed,
        Scenario("healthy", ALL_REDUCE),
        WRONG,
        "ConcurrentBackwardError",
        "ConcurrentBackwardError at Backward",
    ),
    Mutant(
        "sentinel never fires",
        sentinel_never_fires,
        Scenario("exception", ALL_REDUCE, "backward"),
        WRONG,
        "StepMismatchError",
        "StepMismatchError instead of PeerFailedError: step 2: the caller's step numbers differ between ranks",
    ),
    Mutant(
        "gather before the vote",
        gather_before_the_vote,
        Scenario("abort before the step", SHARDED_EXPLICIT),
        HUNG,
        MISMATCH,
        r"launched param gather 0 \[all_gather of \d+ x float32\], rank \d launched fence \[",
    ),
    Mutant(
        "launcher skips a group",
        launcher_skips_a_group,
        Scenario("healthy", ALL_REDUCE),
        WRONG,
        "PhaseError",
        "the gradients of bucket group 0 is 'accumulating' and cannot become 'already reduced'",
    ),
    Mutant(
        "text with the wrong rank",
        text_with_the_wrong_rank,
        Scenario("abort", SHARDED),
        WRONG,
        "PeerFailedError",
        "PeerFailedError.rank is 0 instead of 3",
    ),
    Mutant(
        "no_sync is a switch",
        no_sync_is_a_switch,
        Scenario("healthy", {**ALL_REDUCE, **OVERLAPS}),
        WRONG,
        "MicrobatchMismatchError",
        "MicrobatchMismatchError at Backward: step 0: microbatch counts differ between ranks: 2 on",
    ),
    Mutant(
        "caught error can be stepped on",
        caught_error_can_be_stepped_on,
        Scenario("abort", ALL_REDUCE),
        SILENT,
        "PeerFailedError",
        "no error, expected PhaseError",
    ),
    Mutant(
        "schedule of a failed rank not finished",
        failed_rank_does_not_finish_its_schedule,
        Scenario("abort", ALL_REDUCE),
        HUNG,
        MISMATCH,
        r"launched bucket 0 \[all_reduce sum of .*\], rank \d launched fence \[",
    ),
]
