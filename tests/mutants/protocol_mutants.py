"""The core with one rule of the protocol deleted or altered. Every mutant is a patch that a test applies and takes back."""

from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from scenarios import SCENARIOS, Scenario, Verdict

from megabucket.buffer import GradPhase, ParamPhase, WithheldGrad, _ParamAndGradBucketGroup, bucket_group, phases
from megabucket.buffer.bucket_group import Readiness
from megabucket.buffer.finite import FiniteTest, NonFiniteParam
from megabucket.buffer.grad_slot import GradSlot, GradState
from megabucket.comm.exchange import Gate, GateResult
from megabucket.ddp import backward, report, step
from megabucket.ddp.fence import Fence
from megabucket.ddp.module_watch import ModelWatch
from megabucket.ddp.optimizer_guard import PlainOptimizerGuard
from megabucket.ddp.param_gather import ParamGather
from megabucket.ddp.report import RankReport, StepCounters
from megabucket.ddp.schedule import Schedule
from megabucket.ddp.step import GradSync, StepState
from megabucket.errors import MegabucketError
from megabucket.optim import distributed_optimizer
from megabucket.optim.norm import GlobalNorm
from megabucket.testing.loopback import _LoopbackCommunicator


def nothing(*_, **__):
    return None


def without(owner, method):
    """A method that does nothing."""

    def apply(patch):
        patch.setattr(owner, method, nothing)

    return apply


def call_not_announced(patch):
    """A call that makes its exchange without asking whether the others are in it."""
    patch.setattr(GradSync, "enter_call", lambda self, *_: self.state)


def blind_to(**values):
    """A rank that reports the same numbers whatever has happened, and compares nothing else in their place."""
    original = StepCounters.report

    def report(self, **facts):
        known = {name: getattr(self, name) for name in values if name not in facts}
        for name in known:
            setattr(self, name, values[name])
        try:
            return original(self, **{name: values.get(name, fact) for name, fact in facts.items()})
        finally:
            for name, value in known.items():
                setattr(self, name, value)

    return lambda patch: patch.setattr(StepCounters, "report", report)


# Launches #


def readiness_order_launch(patch):
    original = GradSync.receive

    def receive(self, index, position):
        group = self.groups[index]
        overlaps, self.policy = self.policy.overlaps_grads, replace(self.policy, overlaps_grads=False)
        original(self, index, position)
        self.policy = replace(self.policy, overlaps_grads=overlaps)
        if group.is_complete and group.grad_phase is GradPhase.ACCUMULATING:
            group.start_grad_sync()

    def launch_rest(self):
        for group in self._groups:
            if group.grad_phase is GradPhase.ACCUMULATING:
                group.start_grad_sync()
        self._num_launched = len(self._groups)

    patch.setattr(GradSync, "receive", receive)
    patch.setattr(Schedule, "launch_rest", launch_rest)


def a_group_is_skipped(patch):
    original = Schedule.launch_rest

    def launch_rest(self):
        self._num_launched += 1
        original(self)

    patch.setattr(Schedule, "launch_rest", launch_rest)


def dropped_schedule_not_finished(patch):
    def start_dropped_sync(self):
        if not self.is_launched:
            self.drop_staged()

    patch.setattr(_ParamAndGradBucketGroup, "start_dropped_sync", start_dropped_sync)


def call_outside_takes_no_part(patch):
    original = GradSync._drop
    patch.setattr(GradSync, "_drop", lambda self, error, **kwargs: original(self, error, **{**kwargs, "takes_part": False}))


def broken_rank_goes_on(patch):
    original = GradSync.break_off

    def break_off(self, phase, cause):
        original(self, phase, cause)
        self.broken, self.state = None, StepState.COMMITTED if self.updates_jointly else StepState.PUBLISHED

    patch.setattr(GradSync, "break_off", break_off)


# Gradients in the buffer #


def write_in_flight(patch):
    def note_late(self, group, position):
        slot = group.slots[position]
        slot.view.add_(slot.param.grad)

    patch.setattr(GradSync, "_note_late", note_late)


def late_gradient_dropped(patch):
    def note_late(self, group, position):
        group.slots[position].param.grad = None

    patch.setattr(GradSync, "_note_late", note_late)


def late_gradient_teaches_nothing(patch):
    original = Readiness.end_step
    patch.setattr(Readiness, "end_step", lambda self, *, learns=False, unlearns=False: original(self, learns=learns))  # noqa: ARG005


def no_zeroing(patch):
    original = GradSlot.hand_over

    def hand_over(self):
        if self.state is GradState.STALE:
            self.state = GradState.CLEAN
        return original(self)

    patch.setattr(GradSlot, "hand_over", hand_over)


def first_gradient_added_to_stale_values(patch):
    original = GradSlot.forget

    def forget(self, *, is_zeroed=False):
        original(self, is_zeroed=is_zeroed)
        self.state = GradState.CLEAN

    patch.setattr(GradSlot, "forget", forget)


def one_shard_published(patch):
    def publish(self):
        for slot in self.slots:
            slot.publish()

    patch.setattr(_ParamAndGradBucketGroup, "publish", publish)


def withheld_gradient_gives_way(patch):
    def dispatch(cls, func, types, args=(), kwargs=None):
        return func(*(one._like if isinstance(one, WithheldGrad) else one for one in args), **(kwargs or {}))

    patch.setattr(WithheldGrad, "__torch_dispatch__", classmethod(dispatch))


def staged_gradients_outlive_a_failure(patch):
    def drop_staged(self):
        self._backward, self.staging.room = None, 0

    patch.setattr(_ParamAndGradBucketGroup, "drop_staged", drop_staged)


def last_staged_gradients_forgotten(patch):
    def hand_over(self):
        self.drop_staged()
        original(self)

    original = _ParamAndGradBucketGroup._hand_over
    patch.setattr(_ParamAndGradBucketGroup, "_hand_over", hand_over)


def no_division(patch):
    patch.setattr(bucket_group, "grad_scale", lambda *_: (1.0, 1.0))


def divided_twice(patch):
    patch.setattr(bucket_group, "grad_scale", lambda num_ranks, _: (1 / num_ranks, float(num_ranks)))


def reduction_not_awaited(patch):
    def finish_grad_sync(self, *, waits=True):
        self.grad_phase, self._grad_handle = GradPhase.REDUCED, None

    patch.setattr(_ParamAndGradBucketGroup, "finish_grad_sync", finish_grad_sync)


def gradients_not_forgotten(patch):
    def reset(self):
        self._num_launched = 0
        for group in self._groups:
            group.reopen()

    patch.setattr(Schedule, "reset", reset)


# What is looked at before a bucket is sent, and after #


def finite_test_that_overflows(patch):
    def run(self):
        self.found = ()
        if not all(bool(torch.isfinite(flat.float().square().sum())) for flat, _ in self.flats):
            self.found = (NonFiniteParam(self._slots[0].name, "inf in its norm"),)

    patch.setattr(FiniteTest, "run", run)


def sum_not_tested(patch):
    patch.setattr(Schedule, "find_nonfinite_sums", lambda _: {})


def skip_not_heard(patch):
    original = GradSync._resolve_fence

    def resolve_fence(self):
        original(self)
        self.skip_reason = ""

    patch.setattr(GradSync, "_resolve_fence", resolve_fence)


def no_unused_report(patch):
    original = GradSync._send_fence

    def send_fence(self, *, is_committing=False, unused_counts=False):
        original(self, is_committing=is_committing)

    patch.setattr(GradSync, "_send_fence", send_fence)


# The fence #


def fence_compares_nothing(patch):
    original = Gate.take

    def take(self):
        answer = original(self)
        return GateResult(True, answer.flag, answer.is_nonfinite)

    patch.setattr(Gate, "take", take)


def largest_not_compared_with_smallest(patch):
    """The fingerprint goes in with one sign only, so only ranks with the smaller one find out."""
    original = Gate.send

    def send(self, kind, fingerprint, **kwargs):
        self.own = fingerprint
        original(self, kind, fingerprint, **kwargs)

    def take(self):
        self._handle.wait()
        numbers = self._vector.tolist()
        self._handle = None
        return GateResult(numbers[0] == -numbers[1] and numbers[2] == self.own, numbers[4], bool(numbers[5]))

    patch.setattr(Gate, "send", send)
    patch.setattr(Gate, "take", take)


def problems_not_flagged(patch):
    original = Gate.send
    patch.setattr(Gate, "send", lambda self, *args, **facts: original(self, *args, **{**facts, "flag": 0}))


def fence_not_awaited(patch):
    def take(self, _):
        self._gate._handle = self._report = None
        return []

    patch.setattr(Fence, "take", take)


def reports_guessed(patch):
    original = Fence.exchange_reports

    def exchange_reports(self, report):
        own = RankReport.from_bytes(report.to_bytes())
        return [replace(own, rank=rank) for rank in range(len(original(self, report)))]

    patch.setattr(Fence, "exchange_reports", exchange_reports)


def error_on_one_rank_only(patch):
    original = Fence.take

    def take(self, name_culprits):
        reports = original(self, name_culprits)
        own = self.communicator.rank
        return reports if reports and reports[own].problems else []

    patch.setattr(Fence, "take", take)


def error_about_the_wrong_rank(patch):
    original = report._problems

    def problems(step, reports, kinds):
        for error in original(step, reports, kinds):
            rank = (error.rank + 1) % len(reports)
            yield type(error)(step=step, rank=rank, phase=error.phase, cause=error.cause)

    patch.setattr(report, "_problems", problems)


def second_vote_left_out(patch):
    original = GradSync._vote

    def vote(self, *, is_committing):
        return None if is_committing else original(self, is_committing=is_committing)

    patch.setattr(GradSync, "_vote", vote)


# The tables, and the state of a step #


def way_back_is_missing(patch):
    table = dict(phases.TRANSITIONS)
    table[GradPhase.REDUCED] = frozenset()
    patch.setattr(phases, "TRANSITIONS", table)


def every_phase_may_follow(patch):
    patch.setattr(bucket_group, "enter", lambda _, following, **__: following)


def way_to_the_fence_is_missing(patch):
    table = dict(step._TRANSITIONS)
    table[StepState.LAUNCHING] = frozenset({StepState.GIVING_UP})
    patch.setattr(step, "_TRANSITIONS", table)


def every_state_may_follow(patch):
    patch.setattr(GradSync, "enter", lambda self, state: setattr(self, "state", state))


def caught_exception_forgotten(patch):
    original = GradSync.settle

    def settle(self, **kwargs):
        if self.state is StepState.GIVING_UP and not self._fence.is_sent:
            self.counters.start_step(is_over=True)
            self.state = StepState.OPEN
        original(self, **kwargs)

    patch.setattr(GradSync, "settle", settle)


def block_keeps_the_error_of_its_rank(patch):
    original = GradSync.__exit__

    def leave(self, kind, error, trace):
        with suppress(MegabucketError):
            original(self, kind, error, trace)

    patch.setattr(GradSync, "__exit__", leave)


def caught_error_can_be_stepped_on(patch):
    patch.setattr(GradSync, "check_not_dropped", lambda self: self.settle())


def end_of_backward_unnoticed(patch):
    patch.setattr(backward, "_EndOfBackward", lambda *_: nothing)


def no_sync_is_a_switch(patch):
    @contextmanager
    def no_sync(self):
        self._no_sync_depth = 1
        try:
            yield
        finally:
            self._no_sync_depth = 0

    patch.setattr(GradSync, "no_sync", no_sync)


# Parameters #


def gather_not_awaited(patch):
    def finish_param_sync(self):
        self.show_params()
        self.param_phase, self._param_handle = ParamPhase.GATHERED, None

    patch.setattr(_ParamAndGradBucketGroup, "finish_param_sync", finish_param_sync)


def forward_does_not_wait(patch):
    patch.setattr(ParamGather, "_make_forward_hook", lambda _: nothing)


def norm_of_one_shard(patch):
    original = GlobalNorm.of

    def of(self, squares):
        self._calls = []
        return original(self, squares)

    patch.setattr(GlobalNorm, "of", of)


@dataclass(frozen=True)
class Mutant:
    """A mistake, the steps that show it, and how it must be found."""

    name: str
    apply: Callable
    scenario: Scenario
    verdict: Verdict
    error: str  # a regular expression for the class of the error that was seen, empty if there was none
    text: str  # a regular expression that is somewhere in the text


SILENT, WRONG, HUNG = Verdict.SILENT, Verdict.WRONG, Verdict.HUNG
HANGS = "CollectiveDeadlockError|MismatchedCollectiveError"  # whichever of two ranks is the first
WRONG_NUMBER = r"the output of a forward is -?[\d.]+ and should be -?[\d.]+"

MUTANTS = [
    Mutant(
        "readiness-order launch",
        readiness_order_launch,
        SCENARIOS["healthy"],
        HUNG,
        "MismatchedCollectiveError",
        r"rank \d launched bucket \d \[.*\], rank \d launched bucket \d \[",
    ),
    Mutant(
        "group skipped",
        a_group_is_skipped,
        SCENARIOS["healthy"],
        WRONG,
        "PhaseError",
        "of bucket group 0 is 'accumulating' and cannot become 'already reduced'",
    ),
    Mutant(
        "schedule of a failed rank not finished",
        dropped_schedule_not_finished,
        SCENARIOS["abort and step"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \(bucket 0 \[",
    ),
    Mutant(
        "dropped step takes no part outside of it",
        call_outside_takes_no_part,
        SCENARIOS["call on one rank"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \(bucket 0 \[",
    ),
    Mutant(
        "call not announced",
        call_not_announced,
        SCENARIOS["call on one rank"],
        HUNG,
        "MismatchedCollectiveError",
        r"rank \d launched (replica checksums|fence) \[",
    ),
    Mutant(
        "broken rank goes on",
        broken_rank_goes_on,
        SCENARIOS["interrupt behind the fence"],
        WRONG,
        "PhaseError",
        "is 'in flight' and cannot become 'accumulating'",
    ),
    Mutant(
        "broken rank tells nobody",
        without(_LoopbackCommunicator, "break_off"),
        SCENARIOS["interrupt behind the fence"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \(fence \[",
    ),
    Mutant(
        "write in flight",
        write_in_flight,
        SCENARIOS["start early"],
        SILENT,
        "InFlightWriteError",
        r"the input of collective \d+ \(bucket 0 \[.*\]\) changed while it was in flight",
    ),
    Mutant(
        "late gradient dropped",
        late_gradient_dropped,
        SCENARIOS["start early"],
        SILENT,
        "",
        "raised nothing, expected LateGradientError",
    ),
    Mutant(
        "late gradient teaches nothing",
        late_gradient_teaches_nothing,
        SCENARIOS["two last backwards"],
        WRONG,
        "LateGradientError",
        "step 3: on rank 0 'p3', 'p2', 'p1', 'p0' received a gradient although bucket 0",
    ),
    Mutant("no zeroing", no_zeroing, SCENARIOS["unused on all ranks"], SILENT, "", WRONG_NUMBER),
    Mutant(
        "first gradient added to stale values",
        first_gradient_added_to_stale_values,
        SCENARIOS["healthy"],
        SILENT,
        "",
        WRONG_NUMBER,
    ),
    Mutant(
        "gradients not withheld",
        without(_ParamAndGradBucketGroup, "withhold_grads"),
        SCENARIOS["clip too early"],
        SILENT,
        "",
        "raised nothing, expected PhaseError",
    ),
    Mutant(
        "withheld gradient gives way",
        withheld_gradient_gives_way,
        SCENARIOS["clip too early"],
        SILENT,
        "",
        "raised nothing, expected PhaseError",
    ),
    Mutant(
        "one shard published",
        one_shard_published,
        SCENARIOS["clip one shard"],
        SILENT,
        "",
        "shows a gradient of which this rank has one shard",
    ),
    Mutant(
        "staged gradients outlive a failure",
        staged_gradients_outlive_a_failure,
        SCENARIOS["exception without a block"],
        SILENT,
        "",
        WRONG_NUMBER,
    ),
    Mutant(
        "last staged gradients forgotten",
        last_staged_gradients_forgotten,
        SCENARIOS["healthy"],
        WRONG,
        "UnusedParameterError",
        "step 0: 'p3', 'p2', 'p1', 'p0' got no gradient on any rank",
    ),
    Mutant("no division", no_division, SCENARIOS["healthy"], SILENT, "", WRONG_NUMBER),
    Mutant("divided twice", divided_twice, SCENARIOS["healthy, sharded"], SILENT, "", WRONG_NUMBER),
    Mutant(
        "reduction not awaited",
        reduction_not_awaited,
        SCENARIOS["healthy, nothing is there before it is waited for"],
        SILENT,
        "",
        WRONG_NUMBER,
    ),
    Mutant("gradients not forgotten", gradients_not_forgotten, SCENARIOS["healthy"], SILENT, "", WRONG_NUMBER),
    Mutant(
        "no finite test",
        without(FiniteTest, "run"),
        SCENARIOS["nan or inf"],
        SILENT,
        "",
        "raised nothing, expected NonFiniteGradientError",
    ),
    Mutant(
        "finite test that overflows",
        finite_test_that_overflows,
        SCENARIOS["huge but finite"],
        WRONG,
        "NonFiniteGradientError",
        "has inf in its norm. Reduced, it would reach every rank",
    ),
    Mutant(
        "sum not tested",
        sum_not_tested,
        SCENARIOS["sum that overflows"],
        SILENT,
        "",
        "raised nothing, expected NonFiniteGradientError",
    ),
    Mutant(
        "skip not heard",
        skip_not_heard,
        SCENARIOS["nan is skipped"],
        SILENT,
        "",
        "the output of a forward is nan and should be",
    ),
    Mutant(
        "no unused report", no_unused_report, SCENARIOS["unused"], SILENT, "", "raised nothing, expected UnusedParameterError"
    ),
    Mutant(
        "model check off",
        without(ModelWatch, "find_change"),
        SCENARIOS["parameter moved"],
        SILENT,
        "",
        "raised nothing, expected StorageMovedError",
    ),
    Mutant(
        "fence compares nothing",
        fence_compares_nothing,
        SCENARIOS["microbatch more"],
        SILENT,
        "",
        "raised nothing, expected MicrobatchMismatchError",
    ),
    Mutant(
        "largest not compared with smallest",
        largest_not_compared_with_smallest,
        SCENARIOS["microbatch more"],
        HUNG,
        HANGS,
        r"step report \[",
    ),
    Mutant(
        "problems not flagged",
        problems_not_flagged,
        SCENARIOS["unused"],
        SILENT,
        "",
        "raised nothing, expected UnusedParameterError",
    ),
    Mutant(
        "fence not awaited",
        fence_not_awaited,
        SCENARIOS["microbatch more"],
        SILENT,
        "|InFlightWriteError",  # whether the next fence comes before the other rank's
        "raised nothing, expected MicrobatchMismatchError|changed while it was in flight",
    ),
    Mutant(
        "reports guessed, not exchanged",
        reports_guessed,
        SCENARIOS["unused"],
        WRONG,
        "InvariantError",
        "the fence of step 2 failed, but no report has a reason",
    ),
    Mutant("error on one rank only", error_on_one_rank_only, SCENARIOS["unused"], HUNG, HANGS, r"grad norm \["),
    Mutant(
        "error about the wrong rank",
        error_about_the_wrong_rank,
        SCENARIOS["abort"],
        WRONG,
        "PeerFailedError",
        "{'rank': 0} in place of {'rank': 1}: step 2: rank 0 failed in abort_step()",
    ),
    Mutant(
        "second vote left out",
        second_vote_left_out,
        SCENARIOS["abort before the step"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \((grad norm|fence) \[",
    ),
    Mutant(
        "microbatches not counted",
        blind_to(num_microbatches=0),
        SCENARIOS["microbatch more"],
        SILENT,
        "",
        "raised nothing, expected MicrobatchMismatchError",
    ),
    Mutant(
        "skipped forward not counted",
        blind_to(num_open_forwards=0),
        SCENARIOS["forward more"],
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "dropped step not counted",
        blind_to(_num_dropped_steps=0),
        SCENARIOS["zero instead of step"],
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "updates not counted",
        blind_to(num_updates=0, _updates=[]),
        SCENARIOS["update left out"],
        SILENT,
        "",
        "raised nothing, expected ReplicasDivergedError",
    ),
    Mutant(
        "step number not compared",
        blind_to(step_number=-1),
        SCENARIOS["other step number"],
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "way of finishing not compared",
        blind_to(is_committing=False),
        SCENARIOS["finish first"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \((grad norm|fence) \[",
    ),
    Mutant(
        "forced all-reduce not compared",
        blind_to(force_all_reduce=False),
        SCENARIOS["force on one rank"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \((gradient gather 0|fence) \[",
    ),
    Mutant(
        "kept gradients not compared",
        blind_to(kept=()),
        SCENARIOS["zero left out"],
        SILENT,
        "",
        "raised nothing, expected StepMismatchError",
    ),
    Mutant(
        "loads not compared",
        blind_to(_num_loads=0),
        SCENARIOS["weights loaded"],
        SILENT,
        "",
        "raised nothing, expected ReplicasDivergedError",
    ),
    Mutant(
        "hyperparameters not compared",
        blind_to(hyperparameters=()),
        SCENARIOS["other learning rate"],
        SILENT,
        "",
        "raised nothing, expected HyperparameterMismatchError",
    ),
    Mutant(
        "scale of gradients not compared",
        without(StepCounters, "note_grad_scale"),
        SCENARIOS["scaled on one rank"],
        SILENT,
        "",
        "raised nothing, expected ReplicasDivergedError",
    ),
    Mutant(
        "state of a dropped step not reset",
        without(StepCounters, "start_step"),
        SCENARIOS["abort"],
        WRONG,
        "PeerFailedError",
        r"step 3: rank 1 failed in abort_step\(\)",
    ),
    Mutant(
        "way back to accumulating is missing",
        way_back_is_missing,
        SCENARIOS["healthy"],
        WRONG,
        "PhaseError",
        "is 'already reduced' and cannot become 'accumulating'",
    ),
    Mutant(
        "every phase may follow",
        every_phase_may_follow,
        SCENARIOS["bucket sent again"],
        SILENT,
        "",
        "raised nothing, expected PhaseError",
    ),
    Mutant(
        "way to the fence is missing",
        way_to_the_fence_is_missing,
        SCENARIOS["healthy"],
        WRONG,
        "InvariantError",
        "a step that is 'launching' cannot become 'fenced'",
    ),
    Mutant(
        "every state may follow",
        every_state_may_follow,
        SCENARIOS["no way from here"],
        SILENT,
        "",
        "raised nothing, expected InvariantError",
    ),
    Mutant(
        "learning rate not looked at",
        without(distributed_optimizer, "check_learning_rates"),
        SCENARIOS["learning rate of nan"],
        WRONG,
        "HyperparameterMismatchError",
        "lr of group 0 is 0.5 on rank 0; nan on rank 1",
    ),
    Mutant(
        "exception swallowed",
        without(GradSync, "fail"),
        SCENARIOS["exception in forward"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \(fence \[",
    ),
    Mutant(
        "exception in backward unnoticed",
        without(backward._EndOfBackward, "__del__"),
        SCENARIOS["exception without a block"],
        HUNG,
        "CollectiveDeadlockError",
        r"waits for collective \d+ \(fence \[",
    ),
    Mutant(
        "block keeps the error of its rank",
        block_keeps_the_error_of_its_rank,
        SCENARIOS["exception in backward"],
        WRONG,
        "KeyError",
        "boom",
    ),
    Mutant(
        "caught exception forgotten",
        caught_exception_forgotten,
        SCENARIOS["exception that is caught"],
        WRONG,
        "ReplicasDivergedError",
        "optimizer updates since the last agreement differ between ranks",
    ),
    Mutant(
        "caught error can be stepped on",
        caught_error_can_be_stepped_on,
        SCENARIOS["abort and step"],
        SILENT,
        "",
        "raised nothing, expected PhaseError",
    ),
    Mutant(
        "unfinished sync can be stepped on",
        without(PlainOptimizerGuard, "_check_is_reduced"),
        SCENARIOS["step without a sync"],
        WRONG,
        "PhaseError",
        "which is not reduced yet",
    ),
    Mutant(
        "save in the middle of a step",
        without(GradSync, "check_between_steps"),
        SCENARIOS["save in the middle"],
        SILENT,
        "",
        "raised nothing, expected PhaseError",
    ),
    Mutant(
        "end of backward unnoticed",
        end_of_backward_unnoticed,
        SCENARIOS["healthy"],
        WRONG,
        "PhaseError",  # the next call takes the backward for one that has failed
        "the gradients of this step are not usable",
    ),
    Mutant(
        "no_sync is a switch",
        no_sync_is_a_switch,
        SCENARIOS["nested no_sync"],
        WRONG,
        "LateGradientError",
        "step 2: on rank 0 'p3', 'p2', 'p1', 'p0' received a gradient although bucket 0",
    ),
    Mutant(
        "gather not awaited",
        gather_not_awaited,
        SCENARIOS["healthy, nothing is there before it is waited for"],
        SILENT,
        "",
        WRONG_NUMBER,
    ),
    Mutant(
        "forward does not wait for the gather",
        forward_does_not_wait,
        SCENARIOS["healthy, sharded"],
        SILENT,
        "",
        "the output of a forward is nan and should be",
    ),
    Mutant("norm of one shard", norm_of_one_shard, SCENARIOS["clipped"], SILENT, "", WRONG_NUMBER),
    Mutant("nothing clipped", without(distributed_optimizer, "clip_by_norm"), SCENARIOS["clipped"], SILENT, "", WRONG_NUMBER),
]
