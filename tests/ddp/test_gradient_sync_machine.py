"""Any order of calls, on two or three ranks that one thread plays: the gradients are exact or the call is refused by name.

The machine holds a model of each rank in plain integers (``Expected``) and drives ``GradSync`` and its bucket groups over a
loopback world whose collectives complete when hypothesis says so. All gradients are multiples of a pattern of small integers,
chosen so that every sum and every mean is exact in the buffers; the model adds ``Fraction`` and rounds nothing.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megabucket.buffer import GradPhase, GradSyncPolicy, ParamAndGradBuffer, _ParamAndGradBucketGroup
from megabucket.buffer.views import dtype_name
from megabucket.comm import LoopbackWorld, ReduceOp
from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp.grad_sync import GradSync
from megabucket.errors import LateGradientError, UnusedParameterError
from megabucket.layout import ParamSpec, build_layout, launch_order

# (14 + 6) * 3 ranks * 4 = 240: a single gradient is exact in bfloat16 (8 bits), sums are exact in float32.
AMOUNTS = st.integers(-14, 14)
INDEX = st.integers(0, 63)


def pattern(numel):
    """1, 2, 3, 4, 1, 2, ...: what a gradient of 1 is."""
    return (torch.arange(numel) % 4 + 1).float()


class Rank:
    """The real thing: parameters in buffers, groups and their sync, without a module."""

    def __init__(self, rank, world, specs, config):
        self.params = {
            spec.name: torch.nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in specs
        }
        layout = build_layout(specs, config, dp_size=world.size)
        self.buffers = [ParamAndGradBuffer(buffer, self.params) for buffer in layout.buffers]
        policy = GradSyncPolicy(
            reduce_scatters=config.use_distributed_optimizer,
            op=ReduceOp.AVG if config.average_in_collective else ReduceOp.SUM,
            average=config.grad_reduction == "mean",
        )
        buckets = [self.buffers[i].buckets[j] for i, j in launch_order(layout)]
        batches = [buckets] if config.bucket_groups == "single" else [[bucket] for bucket in buckets]
        self.groups = [
            _ParamAndGradBucketGroup(
                batch, index=index, num_groups=len(batches), communicator=world.communicator(rank), policy=policy
            )
            for index, batch in enumerate(batches)
        ]
        self.sync = GradSync(self.groups, config)
        self.hooks = {
            slot.name: self.sync.hook(group, position) for group in self.groups for position, slot in enumerate(group.slots)
        }
        self.open_no_syncs = []

    def backward(self, name, amount):
        """What autograd does with the gradient of one parameter, and the hook it calls then."""
        param = self.params[name]
        gradient = (pattern(param.numel()) * amount).to(param.dtype)
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.add_(gradient)
        self.hooks[name](param)


@dataclass
class Expected:
    """What one rank must look like, in multiples of the pattern."""

    groups: list[list[str]]
    grads: dict[str, Fraction | None] = field(init=False)  # what param.grad holds, None for None
    counts: dict[str, int] = field(init=False)  # gradients that count, in this step
    learned: dict[str, int] = field(default_factory=dict)
    clean: set[str] = field(init=False)  # never written and never sent: nothing stale to clear
    sent: dict[str, Fraction | None] = field(default_factory=dict)  # as it was handed to the collective
    cleared: set[str] = field(default_factory=set)
    num_launched: int = 0
    is_finished: bool = False
    has_local_grads: bool = False

    def __post_init__(self):
        self.grads = dict.fromkeys(self.names)
        self.counts = dict.fromkeys(self.names, 0)
        self.clean = set(self.names)

    @property
    def names(self):
        return [name for names in self.groups for name in names]

    def group_of(self, name):
        return next(index for index, names in enumerate(self.groups) if name in names)

    def is_in_flight(self, name):
        return self.group_of(name) < self.num_launched

    def launch_up_to(self, num_groups):
        for names in self.groups[self.num_launched : num_groups]:
            for name in names:
                self.sent[name], self.grads[name] = self.grads[name], None
                if self.sent[name] is None and name not in self.clean:
                    self.cleared.add(name)
                self.clean.discard(name)
        self.num_launched = max(self.num_launched, num_groups)

    def launch_complete_ones(self):
        while self.num_launched < len(self.groups) and all(
            name in self.learned and self.counts[name] >= self.learned[name] for name in self.groups[self.num_launched]
        ):
            self.launch_up_to(self.num_launched + 1)

    def open_step(self):
        self.is_finished, self.num_launched = False, 0
        self.sent, self.cleared = {}, set()

    def learn(self):
        for names in self.groups:
            if any(self.counts[name] for name in names) and names[0] not in self.learned:
                self.learned.update({name: max(1, self.counts[name]) for name in names})
        self.counts = dict.fromkeys(self.names, 0)


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
            unused_parameters=st.sampled_from(["zero", "error"]),
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
        self.world = LoopbackWorld(size, completion="manual")
        self.ranks = [Rank(rank, self.world, specs, self.config) for rank in range(size)]
        groups = [[slot.name for slot in group.slots] for group in self.ranks[0].groups]
        self.expected = [Expected(groups) for _ in range(size)]
        self.names = self.expected[0].names

    def pair(self, index):
        return self.ranks[index % len(self.ranks)], self.expected[index % len(self.ranks)]

    # What happens on one rank, in an order of its own #

    @rule(at=INDEX, which=INDEX, amount=AMOUNTS)
    def a_gradient_arrives(self, at, which, amount):
        rank, expected = self.pair(at)
        name = self.names[which % len(self.names)]
        amount = Fraction(amount * (len(self.ranks) if self.averages else 1))  # so that means are whole numbers
        if expected.is_finished and not self.may_start_unasked(expected, name):
            expected.grads[name] = None
            self.is_late(rank, name, amount, "already reduced")
            return
        if expected.is_finished:
            expected.open_step()
        expected.has_local_grads = True
        if expected.is_in_flight(name):
            expected.learned.clear()
            expected.counts = dict.fromkeys(expected.counts, 0)
            self.is_late(rank, name, amount, "in flight")
            return
        expected.grads[name] = (expected.grads[name] or 0) + amount
        expected.clean.discard(name)
        expected.counts[name] += not rank.open_no_syncs
        if self.config.overlap_grad_reduce:
            expected.launch_complete_ones()

        rank.backward(name, int(amount))

    def may_start_unasked(self, expected, name):
        if self.config.use_distributed_optimizer:
            return False
        return self.averages or not any(grad is not None for grad in expected.grads.values())

    def is_late(self, rank, name, amount, phase):
        with pytest.raises(LateGradientError) as caught:
            rank.backward(name, int(amount))
        assert (caught.value.param, caught.value.phase) == (name, phase)

    @rule(at=INDEX, order=st.permutations(range(5)), amount=AMOUNTS)
    def one_rank_runs_a_backward(self, at, order, amount):
        for position, which in enumerate(order):
            if which < len(self.names):
                self.a_gradient_arrives(at, which, amount - position)

    @rule(at=INDEX, twice=INDEX, missing=INDEX, amount=AMOUNTS)
    def one_rank_runs_a_backward_that_meets_a_parameter_twice_and_another_never(self, at, twice, missing, amount):
        order = [which for which in range(len(self.names)) if which != missing % len(self.names)]
        for position, which in enumerate([*order, twice]):
            self.a_gradient_arrives(at, which, amount + position)

    @rule(orders=st.tuples(*[st.permutations(range(5))] * 3), amount=AMOUNTS)
    def all_ranks_run_a_backward_each_in_its_own_order(self, orders, amount):
        for turn in range(5):
            for at in range(len(self.ranks)):
                if orders[at][turn] < len(self.names):
                    self.a_gradient_arrives(at, orders[at][turn], amount + at + turn)

    @rule(at=INDEX, which=INDEX, amount=AMOUNTS)
    def the_caller_puts_a_gradient_of_its_own_in_place(self, at, which, amount):
        rank, expected = self.pair(at)
        name = self.names[which % len(self.names)]
        if expected.is_finished or expected.is_in_flight(name):
            return
        value = (expected.grads[name] or 0) + amount * len(self.ranks)
        expected.grads[name] = Fraction(value)

        param = rank.params[name]
        param.grad = pattern(param.numel()) * int(value)

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
        if not expected.is_finished:
            expected.launch_up_to(len(expected.groups))

        rank.sync.start()

    @rule(at=INDEX)
    def one_rank_finishes_again(self, at):
        rank, expected = self.pair(at)
        if expected.is_finished:
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
            expected.grads = dict.fromkeys(self.names)
            for param in rank.params.values():
                param.grad = None

    @rule(
        orders=st.tuples(*[st.permutations(range(3))] * 2),
        late_completions=st.lists(INDEX, max_size=8),
        which=INDEX,
        amount=AMOUNTS,
    )
    def all_ranks_finish(self, orders, late_completions, which, amount):
        if all(expected.is_finished for expected in self.expected):
            return
        self.bring_all_ranks_into_the_step(which, amount)
        for at in self.only_ranks(orders[0]):
            self.one_rank_launches_the_rest(at)
        for pending in late_completions:
            if self.world.pending:
                self.a_collective_completes(pending)
        for at in self.only_ranks(orders[1]):
            rank, expected = self.pair(at)
            unused = [name for name in self.names if expected.sent[name] is None]
            if not expected.has_local_grads:
                unused = [name for name in unused if name in expected.cleared]
            if unused and self.config.unused_parameters == "error":
                with pytest.raises(UnusedParameterError) as caught:
                    rank.sync.finish()
                assert caught.value.params == tuple(unused)
            else:
                rank.sync.finish()
        self.check_reduced_gradients()

    @rule(
        orders=st.tuples(*[st.permutations(range(5))] * 3),
        microbatches=st.integers(1, 2),
        late_completions=st.lists(INDEX, max_size=8),
        amount=AMOUNTS,
    )
    def all_ranks_run_a_whole_step(self, orders, microbatches, late_completions, amount):
        self.all_ranks_reset([0, 1, 2], 0, amount)
        for _ in range(microbatches - 1):
            for at in range(len(self.ranks)):
                self.no_sync_is_entered(at)
            self.all_ranks_run_a_backward_each_in_its_own_order(orders, amount)
            for rank in self.ranks:
                rank.open_no_syncs.pop().__exit__(None, None, None)
        self.all_ranks_run_a_backward_each_in_its_own_order(orders, amount)
        self.all_ranks_finish(([1, 0, 2], [2, 1, 0]), late_completions, 0, amount)

    @rule(order=st.permutations(range(3)), which=INDEX, amount=AMOUNTS)
    def all_ranks_reset(self, order, which, amount):
        if any(expected.num_launched for expected in self.expected):
            # A rank that had launched nothing would drop the step without a trace, and leave the others alone with theirs.
            self.bring_all_ranks_into_the_step(which, amount)
            for at in self.only_ranks(order):
                self.one_rank_launches_the_rest(at)
        for at in self.only_ranks(order):
            rank, expected = self.pair(at)
            expected.open_step()
            expected.grads = dict.fromkeys(self.names)
            expected.counts = dict.fromkeys(self.names, 0)
            expected.has_local_grads = False

            rank.sync.reset()

            assert all(group._grad_handle is None for group in rank.groups)

    def only_ranks(self, order):
        return [at for at in order if at < len(self.ranks)]

    def bring_all_ranks_into_the_step(self, which, amount):
        """Give those that have not begun it a first gradient, as a backward would."""
        for at, expected in enumerate(self.expected):
            if expected.is_finished:
                if not self.averages:
                    expected.grads = dict.fromkeys(self.names)
                    for param in self.ranks[at].params.values():
                        param.grad = None
                self.a_gradient_arrives(at, which, amount)

    def check_reduced_gradients(self):
        divisor = len(self.ranks) if self.averages else 1
        reduced = {name: sum(expected.sent[name] or Fraction(0) for expected in self.expected) / divisor for name in self.names}
        assert all(value.denominator == 1 for value in reduced.values())
        for at, (rank, expected) in enumerate(zip(self.ranks, self.expected, strict=True)):
            for group in rank.groups:
                for bucket in group.buckets:
                    values = torch.zeros(bucket.grad_data.numel())  # padding stays zero
                    for name in bucket.layout.params:
                        start, stop = bucket.param_range(name)
                        values[start:stop] = pattern(stop - start) * int(reduced[name])
                    if self.config.use_distributed_optimizer:
                        assert torch.equal(bucket.shard(bucket.grad_data, at), bucket.shard(values, at))
                    else:
                        assert torch.equal(bucket.grad_data, values)
            expected.learn()
            expected.is_finished, expected.num_launched, expected.has_local_grads = True, 0, False
            expected.grads = dict.fromkeys(self.names) if self.config.use_distributed_optimizer else dict(reduced)

    # What is true after every call #

    @invariant()
    def launched_groups_are_the_expected_prefix_and_phases_agree(self):
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            assert rank.sync._launcher.num_launched == expected.num_launched
            assert rank.sync.is_finished == expected.is_finished
            assert rank.sync.has_local_grads == expected.has_local_grads
            if expected.is_finished:
                phases = [GradPhase.REDUCED] * len(rank.groups)
            else:
                num_waiting = len(rank.groups) - expected.num_launched
                phases = [GradPhase.IN_FLIGHT] * expected.num_launched + [GradPhase.ACCUMULATING] * num_waiting
            assert [group.grad_phase for group in rank.groups] == phases

    @invariant()
    def every_step_of_every_rank_has_the_same_schedule(self):
        schedules = sorted((self.world.schedule(rank) for rank in range(len(self.ranks))), key=len)
        assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(schedules))
        # Groups of nothing but empty parameters have nothing to send.
        labels = [f"bucket {g.index}" for g in self.ranks[0].groups if any(b.grad_data.numel() for b in g.buckets)]
        if labels:
            launched = [text.split(" [")[0] for text in schedules[-1]]
            assert launched == [labels[i % len(labels)] for i in range(len(launched))]

    @invariant()
    def no_sync_contexts_are_counted(self):
        for rank in self.ranks:
            assert rank.sync._no_sync_depth == len(rank.open_no_syncs)

    @invariant()
    def grad_is_shown_exactly_where_there_is_one(self):
        for rank, expected in zip(self.ranks, self.expected, strict=True):
            for name, param in rank.params.items():
                assert (param.grad is None) == (expected.grads[name] is None), name

    def teardown(self):
        if hasattr(self, "world"):
            for sequence in self.world.pending:
                self.world.complete(sequence)  # raises if a buffer was written in flight


MAX_EXAMPLES = settings.default.max_examples  # 200 at home, 2,000 in CI
TestGradientSync = GradientSyncMachine.TestCase
TestGradientSync.settings = settings(max_examples=max(600, MAX_EXAMPLES), stateful_step_count=50)
