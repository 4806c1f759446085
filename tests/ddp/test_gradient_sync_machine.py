"""Any order of calls, on two or three ranks: the gradients are exact, or all ranks raise the same error that names the fault.

The machine holds a model of each rank in plain integers (``sync_ranks.Expected``) and drives ``GradSync`` and its groups, with
real backwards, over a loopback world whose collectives complete when hypothesis says so. One thread plays all ranks as long as
nobody waits; where ranks wait for one another (fence, vote) each has a thread. All gradients are multiples of a pattern of
small integers, chosen so that every sum is exact in the buffers, and every mean a whole number; the model adds ``Fraction`` and
rounds nothing. Three ranks multiply by a third before the sum, which rounds: whoever is wrong there is off by more than that.
"""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sync_ranks import Expected, Rank, pattern

from megabucket.buffer import GradPhase, WithheldGrad, dtype_name
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import (
    LateGradientError,
    MegabucketError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    ScheduleMismatchError,
    StepMismatchError,
    UnusedParameterError,
)
from megabucket.layout import ParamSpec
from megabucket.testing import LoopbackWorld

# (14 + 6) * 3 ranks * 4 = 240: a single gradient is exact in bfloat16 (8 bits), sums are exact in float32.
AMOUNTS = st.integers(-14, 14)
INDEX = st.integers(0, 63)
ORDER = st.permutations(range(5))
# What ranks do with reduce-scattered gradients: usually all the same.
ANY_WAY = st.tuples(*[st.sampled_from(["step", "drop", "backward", "failing backward"])] * 3)
WAYS = st.sampled_from([["step"] * 3, ["step"] * 3, ["drop"] * 3]) | ANY_WAY
UNKNOWN_CAUSE = "an exception that autograd keeps to itself"


class GradientSyncMachine(RuleBasedStateMachine):
    @initialize(
        size=st.integers(2, 3),
        numels=st.lists(st.sampled_from([1, 3, 64, 70, 0]), min_size=1, max_size=5),
        has_two_dtypes=st.booleans(),
        config=st.builds(
            DistributedDataParallelConfig,
            bucket_size=st.sampled_from([1, 100, 10_000]),
            bucket_groups=st.sampled_from(["per_bucket", "single"]),
            use_distributed_optimizer=st.booleans(),
            overlap_grad_reduce=st.booleans(),
            unused_parameters=st.sampled_from(["zero", "error", "skip"]),
            nonfinite_gradients=st.sampled_from(["error", "skip_step"]),
            finish=st.just("explicit"),
        ),
        reduction=st.sampled_from(
            [{}, {"average_in_collective": True}, {"grad_reduction": "sum"}],
        ),
    )
    def wrap(self, size, numels, has_two_dtypes, config, reduction):
        self.config = config.model_copy(update=reduction)
        self.averages = self.config.grad_reduction == "mean"
        dtypes = [torch.bfloat16 if has_two_dtypes and i % 2 else torch.float32 for i in range(len(numels))]
        specs = [
            ParamSpec(f"p{i}", (numel,), dtype_name(dtype)) for i, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
        ]
        self.numels = {spec.name: spec.shape[0] for spec in specs}
        self.world = LoopbackWorld(size, completion="manual", timeout_s=10)
        self.ranks = [Rank(rank, self.world, specs, self.config) for rank in range(size)]
        groups = [[slot.name for slot in group.slots] for group in self.ranks[0].groups]
        self.expected = [Expected(groups, self.config, self.numels) for _ in range(size)]
        self.names = self.expected[0].names
        self.num_steps = 0
        self.awaits_vote = False
        """Reduce-scattered gradients are there, and all ranks step on them or all drop them."""
        self.is_skipped = False

    def pair(self, index):
        return self.ranks[index % len(self.ranks)], self.expected[index % len(self.ranks)]

    def amount_of(self, amount):
        return amount if math.isinf(amount) else Fraction(amount * (len(self.ranks) if self.averages else 1))  # whole means

    # What happens on one rank, in an order of its own #

    def run_backward(self, at, gradients, *, fails_after=None):
        """One backward of one rank; nothing on a rank that has given up the step, or where ranks would vote in the middle."""
        rank, expected = self.pair(at)
        arriving = gradients if fails_after is None else gradients[:fails_after]
        if expected.failure is not None or (self.awaits_vote and arriving):
            return
        for name, amount in arriving:
            expected.receive(name, amount, counts=not rank.open_no_syncs)
        if fails_after is None:
            expected.num_microbatches += 1
            rank.backward(gradients)
        else:
            expected.give_up("backward", UNKNOWN_CAUSE, awaits_vote=self.awaits_vote)
            with pytest.raises(KeyError, match="boom"):
                rank.backward(gradients, fails_after=fails_after)

    @rule(at=INDEX, which=INDEX, amount=AMOUNTS)
    def a_gradient_arrives(self, at, which, amount):
        self.run_backward(at, [(self.names[which % len(self.names)], self.amount_of(amount))])

    @rule(at=INDEX, which=INDEX)
    def an_infinite_gradient_arrives(self, at, which):
        self.run_backward(at, [(self.names[which % len(self.names)], math.inf)])

    def gradients(self, order, amount, *, leaves_out=None):
        named = [self.names[which] for which in order if which < len(self.names) and which != leaves_out]
        return [(name, self.amount_of(amount - position)) for position, name in enumerate(named)]

    @rule(at=INDEX, order=ORDER, amount=AMOUNTS)
    def one_rank_runs_a_backward(self, at, order, amount):
        self.run_backward(at, self.gradients(order, amount))

    @rule(at=INDEX, order=ORDER, twice=INDEX, missing=INDEX, amount=AMOUNTS)
    def one_rank_meets_a_parameter_in_two_backwards_and_another_never(self, at, order, twice, missing, amount):
        gradients = self.gradients(order, amount, leaves_out=missing % len(self.names))
        if gradients:
            self.run_backward(at, gradients)
        self.a_gradient_arrives(at, twice, amount)

    @rule(at=INDEX, order=ORDER, amount=AMOUNTS, fails_after=st.integers(0, 5))
    def a_backward_of_one_rank_fails(self, at, order, amount, fails_after):
        gradients = self.gradients(order, amount)
        self.run_backward(at, gradients, fails_after=min(fails_after, len(gradients)))

    @rule(at=INDEX, phase=st.sampled_from(["forward", "abort_step()"]))
    def one_rank_gives_up(self, at, phase):
        rank, expected = self.pair(at)
        if expected.failure is not None:
            return
        expected.give_up(phase, "ValueError: no good", awaits_vote=self.awaits_vote)

        rank.sync.fail(phase, ValueError("no good"))

    @rule(orders=st.tuples(*[ORDER] * 3), amount=AMOUNTS)
    def all_ranks_run_a_backward_each_in_its_own_order(self, orders, amount, infinite_at=None):
        for at in range(len(self.ranks)):
            (name, finite), *others = self.gradients(orders[at], amount + at)
            self.run_backward(at, [(name, math.inf if at == infinite_at else finite), *others])

    @rule(at=INDEX, which=INDEX, amount=AMOUNTS)
    def the_caller_puts_a_gradient_of_its_own_in_place(self, at, which, amount):
        rank, expected = self.pair(at)
        name = self.names[which % len(self.names)]
        if expected.is_finished or expected.is_in_flight(name):
            return
        value = (expected.grads[name] or 0) + amount * len(self.ranks)
        expected.grads[name] = value if math.isinf(value) else Fraction(value)
        expected.own.add(name)

        param = rank.params[name]
        param.grad = pattern(param.numel()) * float(value)

    @rule(at=INDEX)
    def no_sync_is_entered(self, at):
        rank, _ = self.pair(at)
        context = rank.sync.no_sync()
        context.__enter__()
        rank.open_no_syncs.append(context)

    @precondition(lambda self: any(rank.open_no_syncs for rank in self.ranks))
    @rule(at=INDEX, fails=st.booleans())
    def no_sync_is_left(self, at, fails):
        inside = [rank for rank in self.ranks if rank.open_no_syncs]
        context = inside[at % len(inside)].open_no_syncs.pop()
        error = KeyError("boom") if fails else None
        swallowed = context.__exit__(type(error) if fails else None, error, None)

        assert not swallowed

    @rule(at=INDEX)
    def one_rank_launches_the_rest(self, at):
        rank, expected = self.pair(at)
        if expected.failure is not None:
            return  # all is sent, and its next call waits for the others
        if not expected.is_finished:
            expected.launch_all()

        rank.sync.start()

    @rule(at=INDEX)
    def one_rank_finishes_again(self, at):
        rank, expected = self.pair(at)
        if expected.is_finished and expected.failure is None:
            rank.sync.finish()
            rank.sync.start()

    # What happens on all ranks #

    @precondition(lambda self: self.world.pending)
    @rule(which=INDEX)
    def a_collective_completes(self, which):
        self.world.complete(self.world.pending[which % len(self.world.pending)])  # raises if its buffer was written

    @rule()
    def all_ranks_clear_gradients_as_plain_torch_does(self):
        if any(expected.num_launched for expected in self.expected):
            return  # in the middle of a step ranks would lose different parts of it, and means would not be whole numbers
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            expected.clear()
            for param in rank.params.values():
                param.grad = None

    @rule(
        completions=st.lists(INDEX, max_size=8),
        which=INDEX,
        amount=AMOUNTS,
        levels=st.sampled_from([True, True, False]),
        ways=st.sampled_from([["finish"] * 3] * 2 + [["step"] * 3, ["step", "finish", "finish"], ["finish", "drop", "step"]]),
    )
    def all_ranks_finish(self, completions, which, amount, levels, ways):
        if self.awaits_vote or all(expected.is_finished for expected in self.expected):
            return
        self.bring_all_ranks_into_the_step(which, amount, levels=levels)
        for at in range(len(self.ranks)):
            self.one_rank_launches_the_rest(at)
        for pending in completions:
            if self.world.pending:
                self.a_collective_completes(pending)
        ways = ways[: len(self.ranks)]
        self.meet(ways, self.finding(ways, checks_unused=self.config.unused_parameters == "error"))

    @precondition(lambda self: self.awaits_vote)
    @rule(ways=WAYS)
    def all_ranks_go_on_after_a_reduce_scatter(self, ways):
        """Each steps on the gradients, drops them, or forgets that there are any."""
        ways = list(ways[: len(self.ranks)])
        for at, way in enumerate(ways):
            if "backward" in way and self.expected[at].failure is None:
                self.expected[at].note_late(self.names[0], "already reduced")
        self.meet(ways, self.finding(ways, checks_unused=False))

    @rule(which=INDEX, amount=AMOUNTS)
    def all_ranks_reset(self, which, amount):
        if self.awaits_vote:
            self.all_ranks_go_on_after_a_reduce_scatter(["drop"] * 3)
            return
        if any(expected.is_dropped_by_reset or expected.failure for expected in self.expected):
            # A rank that had launched nothing would drop the step without a trace, and meet the others in its next one.
            self.bring_all_ranks_into_the_step(which, amount, levels=True)
            for at in range(len(self.ranks)):
                self.one_rank_launches_the_rest(at)
            ways = ["drop"] * len(self.ranks)
            self.meet(ways, self.finding(ways, checks_unused=False))
        else:
            for rank, expected in zip(self.ranks, self.expected, strict=True):
                expected.forget()
                rank.sync.reset()

    @rule(
        start=st.sampled_from([["zero_grad"] * 3, ["keep"] * 3, ["plain"] * 3, ["plain", "keep", "plain"]]),
        orders=st.tuples(*[ORDER] * 3),
        microbatches=st.integers(1, 2),
        completions=st.lists(INDEX, max_size=8),
        amount=AMOUNTS,
        infinite_at=st.sampled_from([None, None, None, 0, 1]),
        ways=WAYS,
    )
    def all_ranks_run_a_whole_step(self, start, orders, microbatches, completions, amount, infinite_at, ways):
        self.clear_all(start, amount)
        for _ in range(microbatches - 1):
            for at in range(len(self.ranks)):
                self.no_sync_is_entered(at)
            self.all_ranks_run_a_backward_each_in_its_own_order(orders, amount)
            for rank in self.ranks:
                rank.open_no_syncs.pop().__exit__(None, None, None)
        self.all_ranks_run_a_backward_each_in_its_own_order(orders, amount, infinite_at)
        self.all_ranks_finish(completions, 0, amount, True, ["finish"] * 3)
        if self.awaits_vote:
            self.all_ranks_go_on_after_a_reduce_scatter(ways)

    def clear_all(self, start, amount):
        """Let each rank clear gradients in its way, where plain torch code has the choice."""
        is_free = not self.config.use_distributed_optimizer and all(expected.is_finished for expected in self.expected)
        if start[0] == "zero_grad" or not is_free:
            self.all_ranks_reset(0, amount)
            return
        for at, (rank, expected) in enumerate(zip(self.ranks, self.expected, strict=True)):
            if start[at] == "plain":
                expected.clear()
                for param in rank.params.values():
                    param.grad = None

    def bring_all_ranks_into_the_step(self, which, amount, *, levels):
        """Give those that have not begun it a first gradient, as a backward would; ``levels``: and all as many backwards."""
        for at, (rank, expected) in enumerate(zip(self.ranks, self.expected, strict=True)):
            if expected.is_finished and expected.failure is None:
                if self.config.use_distributed_optimizer:
                    expected.forget()
                    rank.sync.reset()
                elif not self.averages:
                    expected.grads = dict.fromkeys(self.names)
                    for param in rank.params.values():
                        param.grad = None
                self.a_gradient_arrives(at, which, amount)
        most = max(expected.num_microbatches for expected in self.expected)
        for at, expected in enumerate(self.expected):
            waiting = [index for index, name in enumerate(self.names) if not expected.is_in_flight(name)]
            while levels and waiting and expected.failure is None and expected.num_microbatches < most:
                self.a_gradient_arrives(at, waiting[which % len(waiting)], amount)
                waiting = [index for index in waiting if not expected.is_in_flight(self.names[index])]

    # The fence #

    def finding(self, ways, *, checks_unused):
        """Return class and fields of the error that all ranks must raise: the first that explains the others; or ``None``."""
        for rank, expected in enumerate(self.expected):
            if expected.failure is not None:
                return PeerFailedError, {"rank": rank, "phase": expected.failure[0]}, expected.failure[1]
        is_sharded = self.config.use_distributed_optimizer
        numbers = [
            (StepMismatchError, "dropped steps", ["drop" in way or "backward" in way for way in ways]),
            (MicrobatchMismatchError, "microbatch counts", [expected.num_microbatches for expected in self.expected]),
            (StepMismatchError, "without clearing", [expected.kept for expected in self.expected]),
            (ScheduleMismatchError, "finish_grad_sync() before", [is_sharded and way == "step" for way in ways]),
        ]
        for kind, text, by_rank in numbers:
            if len(set(by_rank)) > 1:
                return kind, {"by_rank": tuple(by_rank)} if text != "without clearing" else {}, text
        for rank, expected in enumerate(self.expected):
            if expected.late:
                _, bucket, phase = expected.late[0]
                params = tuple(name for name, _, _ in expected.late)
                return LateGradientError, {"rank": rank, "params": params, "bucket": bucket, "phase": phase}, "no reduction"
        unused = [expected.unused() if checks_unused else [] for expected in self.expected]
        if any(unused):
            first = next(names[0] for names in unused if names)
            ranks = tuple(rank for rank, names in enumerate(unused) if first in names)
            missed_by = {name: [rank for rank, names in enumerate(unused) if name in names] for name in self.names}
            params = tuple(name for names in unused if first in names for name in names if missed_by[name] == list(ranks))
            params = tuple(dict.fromkeys(params))
            bucket = self.expected[0].group_of(params[0])
            return UnusedParameterError, {"ranks": ranks, "params": params, "bucket": bucket}, "got no gradient"
        return self.nonfinite_finding()

    def nonfinite_finding(self):
        for rank, expected in enumerate(self.expected):
            names = expected.nonfinite()
            if names:
                fields = {"rank": rank, "param": names[0], "bucket": expected.group_of(names[0]), "num_others": len(names) - 1}
                return NonFiniteGradientError, fields, "has inf in"
        return None

    def meet(self, ways, finding):
        """Let each rank come to the fence in its way, one thread per rank, and check what all of them find there."""
        is_vote = self.awaits_vote
        skips = finding is not None and finding[0] is NonFiniteGradientError and self.config.nonfinite_gradients == "skip_step"
        errors = self.world.run(lambda at: self.go(at, ways[at]))

        self.num_steps += not is_vote  # a second fence in a step is none of its own
        if finding is None or skips:
            assert errors == [None] * len(self.ranks), errors
            self.check_whole_step(ways, is_skipped=skips, is_vote=is_vote)
            return
        kind, fields, text = finding
        assert [str(error) for error in errors] == [str(errors[0])] * len(self.ranks)
        for error in errors:
            assert type(error) is kind, error
            assert {name: getattr(error, name) for name in fields} == fields
            assert text in str(error)
            assert is_vote or error.step == self.num_steps - 1
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            expected.forget()
            assert rank.sync.last_error is not None
            assert str(rank.sync.last_error) == str(errors[0])
        self.awaits_vote = self.is_skipped = False

    def go(self, at, way):
        rank, expected = self.pair(at)
        if expected.failure is not None:
            rank.sync.settle()  # what its next call does
            return rank.sync.last_error
        calls = {
            "finish": rank.sync.finish,
            "step": rank.step,
            "drop": rank.sync.reset,
            "backward": lambda: rank.backward([(name, 1) for name in self.names]),
            "failing backward": lambda: rank.backward([(name, 1) for name in self.names], fails_after=1),
        }
        try:
            calls[way]()
        except MegabucketError as error:
            return error
        except KeyError:  # its own exception is what this rank sees
            return rank.sync.last_error
        return None

    def check_whole_step(self, ways, *, is_skipped, is_vote):
        if ways[0] == "drop":
            for expected in self.expected:
                expected.forget()
            self.awaits_vote = self.is_skipped = False
            return
        if is_vote:
            self.awaits_vote = False
            return
        reduced = dict.fromkeys(self.names) if is_skipped else self.check_reduced_gradients()
        is_shown = not self.config.use_distributed_optimizer
        skipped = self.skipped()
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            assert rank.sync.skipped == (set() if ways[0] == "step" and self.config.use_distributed_optimizer else skipped)
            reduced |= dict.fromkeys(skipped)
            expected.learn()
            expected.start_count()
            expected.is_finished, expected.num_launched = True, 0
            expected.grads = dict(reduced) if is_shown else dict.fromkeys(self.names)
        self.awaits_vote = self.config.use_distributed_optimizer and ways[0] == "finish"
        self.is_skipped = is_skipped

    def skipped(self):
        """Return the names of the parameters of which no rank has a gradient, old or new."""
        if self.config.unused_parameters != "skip":
            return set()
        untouched = [{name for name in expected.unused() if expected.sent[name] is None} for expected in self.expected]
        return set.intersection(*untouched)

    def check_reduced_gradients(self):
        divisor = len(self.ranks) if self.averages else 1
        reduced = {name: sum(expected.sent[name] or Fraction(0) for expected in self.expected) / divisor for name in self.names}
        # Infinite means are those of parameters without elements.
        assert all(not self.numels[name] or value.denominator == 1 for name, value in reduced.items())
        for at, rank in enumerate(self.ranks):
            for group in rank.groups:
                for bucket in group.buckets:
                    values = torch.zeros(bucket.grad_data.numel())  # padding stays zero
                    for name in bucket.layout.params:
                        slot = bucket.buffer.layout.params[name]
                        start, stop = slot.start - bucket.layout.start, slot.stop - bucket.layout.start
                        values[start:stop] = pattern(stop - start) * float(reduced[name])
                    if self.config.use_distributed_optimizer:
                        assert self.are_means(bucket.shard(bucket.grad_data, at), bucket.shard(values, at))
                    else:
                        assert self.are_means(bucket.grad_data, values)
        return reduced

    def are_means(self, reduced, values):
        is_rounded = self.averages and len(self.ranks) == 3
        return torch.equal(reduced.round(decimals=3) if is_rounded else reduced, values)

    # What is true after every call #

    @invariant()
    def launched_groups_are_the_expected_prefix_and_phases_agree(self):
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            assert [group.is_launched for group in rank.groups].count(True) == expected.num_launched
            assert rank.sync.is_reduced == expected.is_finished
            assert rank.sync.counters.num_microbatches == expected.num_microbatches
            if expected.is_finished:
                phases = [GradPhase.REDUCED] * len(rank.groups)
            else:
                num_waiting = len(rank.groups) - expected.num_launched
                phases = [GradPhase.IN_FLIGHT] * expected.num_launched + [GradPhase.ACCUMULATING] * num_waiting
            assert [group.grad_phase for group in rank.groups] == phases

    @invariant()
    def all_ranks_have_taken_as_many_steps(self):
        assert [rank.sync.step for rank in self.ranks] == [self.num_steps] * len(self.ranks)
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            assert not expected.is_finished or bool(rank.sync.skip_reason) == self.is_skipped

    @invariant()
    def every_step_of_every_rank_has_the_same_schedule(self):
        schedules = sorted((self.world.schedule(rank) for rank in range(len(self.ranks))), key=len)
        assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(schedules))
        # Groups of nothing but empty parameters have nothing to send.
        buckets = [f"bucket {g.index}" for g in self.ranks[0].groups if any(b.grad_data.numel() for b in g.buckets)]
        sent = [*buckets, *["unused parameters of dense"] * (self.config.unused_parameters == "skip"), "fence"]
        first = sent[0]
        following = {one: {other} for one, other in pairwise(sent)}
        following |= {"fence": {first, "fence", "step report"}, "step report": {first, "fence"}}  # a fence alone is a vote
        launched = [text.split(" [")[0] for text in schedules[-1]]
        assert all(label == first for label in launched[:1])
        assert all(label in following[before] for before, label in pairwise(launched))

    @invariant()
    def no_sync_contexts_are_counted(self):
        for rank in self.ranks:
            assert rank.sync._no_sync_depth == len(rank.open_no_syncs)

    @invariant()
    def grad_is_shown_exactly_where_there_is_one(self):
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            for name, param in rank.params.items():
                if expected.grads[name] is None:
                    assert param.grad is None or isinstance(param.grad, WithheldGrad), name
                else:
                    assert param.grad is not None, name

    def teardown(self):
        if hasattr(self, "world"):
            for sequence in self.world.pending:
                self.world.complete(sequence)  # raises if a buffer was written in flight


TestGradientSync = GradientSyncMachine.TestCase
TestGradientSync.settings = settings(stateful_step_count=40)


# What the machine has found, once and for all #


def machine(numels, *, sharded, unused_parameters):
    state = GradientSyncMachine()
    config = DistributedDataParallelConfig(
        bucket_size=1,
        bucket_groups="per_bucket",
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=False,
        finish="explicit",
        unused_parameters=unused_parameters,
    )
    state.wrap(size=2, numels=numels, has_two_dtypes=False, config=config, reduction={})
    return state


ORDERS = ([0, 1, 2, 3, 4],) * 3
WHOLE_STEP = {
    "completions": [],
    "amount": 0,
    "microbatches": 1,
    "orders": ORDERS,
    "ways": ["step"] * 3,
    "start": ["zero_grad"] * 3,
}


def test_start_and_finish_without_a_backward_count_nothing_as_unused():
    state = machine([1], sharded=False, unused_parameters="error")

    state.all_ranks_finish(completions=[], which=0, amount=0, levels=True, ways=["finish"] * 3)


def test_a_nonfinite_gradient_of_a_dropped_step_is_not_counted_in_the_next_one():
    state = machine([1, 1], sharded=False, unused_parameters="zero")
    state.one_rank_runs_a_backward(at=0, order=ORDERS[0], amount=0)
    state.an_infinite_gradient_arrives(at=0, which=1)
    state.a_gradient_arrives(at=0, which=0, amount=0)

    state.all_ranks_run_a_whole_step(infinite_at=0, **WHOLE_STEP)


@pytest.mark.parametrize("is_forward", [True, False])
def test_failures_that_begin_a_step_send_the_same_on_all_ranks_after_a_sharded_step(is_forward):
    state = machine([1], sharded=True, unused_parameters="zero")
    state.all_ranks_run_a_whole_step(infinite_at=None, **WHOLE_STEP)
    if is_forward:
        state.one_rank_gives_up(at=0, phase="forward")

    state.a_backward_of_one_rank_fails(at=1, order=ORDERS[0], amount=0, fails_after=0)

    state.launched_groups_are_the_expected_prefix_and_phases_agree()
    state.every_step_of_every_rank_has_the_same_schedule()
