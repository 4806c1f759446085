"""One bucket group on the loopback world: reduction, scaling, phases, and what happens when a call comes at a wrong time."""

import math
from types import SimpleNamespace

import pytest
import torch
from fake_device import Device

from megabucket.buffer import (
    GradPhase,
    ParamAndGradBuffer,
    ParamPhase,
    WithheldGrad,
    _ParamAndGradBucketGroup,
    dtype_name,
)
from megabucket.buffer.finite import NonFiniteParam
from megabucket.comm import Accelerator, AllReduce, ReplicaReducer
from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_step
from megabucket.errors import CollectiveError, PhaseError
from megabucket.layout import ParamSpec, build_layout
from megabucket.testing import LoopbackWorld
from megabucket.testing.loopback import MismatchedCollectiveError

ALL_REDUCE_MEAN = {}
SCATTER_MEAN = {"use_distributed_optimizer": True}
LAST = SimpleNamespace(is_last=True, may_stage=True)
INSIDE_NO_SYNC = SimpleNamespace(is_last=False, may_stage=True)


class Rank:
    """Two parameters of 100 elements on one rank; ``b`` lies at [0, 100), ``a`` at [128, 228), the bucket ends at 256."""

    def __init__(self, communicator, switches, *, dtype=torch.float32, delayed="", divisor=0, replicas=None):
        self.params = {name: torch.nn.Parameter(torch.zeros(100, dtype=dtype)) for name in "ab"}
        for name in delayed:
            self.params[name].skip_backward_post_hook = True
        specs = [ParamSpec(name, (100,), dtype_name(dtype)) for name in "ab"]
        config = DistributedDataParallelConfig(**switches)
        (layout,) = build_layout(specs, config, dp_size=communicator.size).buffers
        self.buffer = ParamAndGradBuffer(layout, self.params)
        num_ranks = communicator.size * (1 if replicas is None else replicas.communicator.size)
        self.group = _ParamAndGradBucketGroup(
            self.buffer.buckets,
            index=1,
            communicator=communicator,
            policy=resolve_step(config),
            divisor=divisor or num_ranks,
            replicas=replicas,
        )

    def grad(self, name, value):
        """Do what autograd does with a gradient, and call the hook."""
        param = self.params[name]
        if param.grad is None:
            param.grad = torch.full((100,), float(value), dtype=param.dtype)
        else:
            param.grad.add_(value)
        return self.group.receive("ba".index(name), LAST)

    def delayed(self, name, value):
        """Leave a gradient that was computed outside backward, and report it."""
        self.params[name].grad = torch.full((100,), float(value))
        self.group.receive_delayed("ba".index(name))

    def both(self, value):
        self.grad("b", value)
        return self.grad("a", value)

    @property
    def reduced(self):
        """The gradients of a and b, by their first elements."""
        return [self.params[name].main_grad[0].item() for name in "ab"]


def ranks(switches=ALL_REDUCE_MEAN, *, size=2, completion="manual", **kwargs):
    world = LoopbackWorld(size, completion=completion)
    return world, [Rank(world.communicator(rank), switches, **kwargs) for rank in range(size)]


def sync(all_ranks, **kwargs):
    for rank in all_ranks:
        rank.group.start_grad_sync(**kwargs)
    for rank in all_ranks:
        rank.group.finish_grad_sync()


def whole_step(rank):
    """A step that all ranks found whole."""
    sync([rank])
    rank.group.readiness.end_step(learns=True)
    rank.group.reset()


def test_a_new_group_has_no_gradients():
    _, (only,) = ranks(size=1, delayed="a")

    only.group.publish()

    assert (only.group.is_complete, only.group.missing, only.group.cleared) == (False, (), ())
    assert only.group.delayed == {1: 0}
    assert only.params["a"].grad is None


class TestReduction:
    def test_the_mean_is_on_every_rank_and_is_shown_as_grad_once_it_is_published(self):
        _, (first, second) = ranks()
        first.both(2)
        second.both(6)

        sync([first, second])
        shown_before = first.params["a"].grad
        first.group.publish()

        assert first.reduced == second.reduced == [4.0, 4.0]
        assert shown_before is None  # until all ranks have agreed that the step is whole
        assert first.params["a"].grad is first.params["a"].main_grad

    def test_the_sum_is_left_undivided_on_request(self):
        _, (first, second) = ranks({"grad_reduction": "sum"})
        first.both(2)
        second.both(6)

        sync([first, second])

        assert second.reduced == [8.0, 8.0]

    def test_a_mean_taken_by_the_collective_is_not_divided_again(self):
        _, (first, second) = ranks({"average_in_collective": True})
        first.both(2)
        second.both(6)

        sync([first, second])

        assert second.reduced == [4.0, 4.0]

    @pytest.mark.parametrize("switches", [ALL_REDUCE_MEAN, SCATTER_MEAN], ids=["all_reduce", "reduce_scatter"])
    def test_another_divisor_divides_the_sum(self, switches):
        _, (first, second) = ranks(switches, divisor=4)
        first.both(2)
        second.both(6)

        sync([first, second])

        assert (first.reduced[1], second.reduced[0]) == (2.0, 2.0)  # (2 + 6) / 4

    @pytest.mark.parametrize(("in_fp32", "total"), [(True, 258.0), (False, 256.0)])
    def test_16_bit_gradients_are_added_up_in_float32_on_request(self, in_fp32, total):
        switches = {"grad_reduce_in_fp32": False, "grad_reduction": "sum", "reduce_scatter_with_fp32_accumulation": in_fp32}
        _, group = ranks(SCATTER_MEAN | switches, size=3, dtype=torch.bfloat16)
        for rank, value in zip(group, (1, 1, 256), strict=True):  # a ring adds those of rank 2 first
            rank.grad("b", value)

        sync(group)

        assert group[0].params["b"].main_grad[0].item() == total  # in bfloat16 256 + 1 = 256

    def test_after_a_reduce_scatter_each_rank_has_the_mean_of_its_own_shard_and_publishes_nothing(self):
        _, (first, second) = ranks(SCATTER_MEAN)
        first.both(2)
        second.both(6)

        sync([first, second])
        first.group.publish()

        # 256 elements, shards of 128: rank 0 owns b at [0, 100), rank 1 owns a at [128, 228)
        assert first.params["b"].main_grad.tolist() == [4.0] * 100
        assert second.params["a"].main_grad.tolist() == [4.0] * 100
        assert first.params["a"].grad is None

    def test_force_all_reduce_gives_all_ranks_everything_when_they_have_agreed_although_the_policy_scatters(self):
        world, (first, second) = ranks(SCATTER_MEAN)
        first.both(2)
        second.both(6)

        sync([first, second])
        # What ranks launch before they agree is what a rank launches that was not forced.
        assert world.schedule(0) == ("bucket 1 [reduce_scatter sum of 256 x float32]",)
        for _ in range(2):  # the second time it is here already
            world.run(lambda rank: (first, second)[rank].group.launch_grad_gather())
            world.run(lambda rank: (first, second)[rank].group.finish_grad_gather())
        second.group.publish()

        assert first.reduced == second.reduced == [4.0, 4.0]
        assert world.schedule(0)[1:] == ("gradient gather 1 [all_gather of 256 x float32]",)
        assert second.params["b"].grad is second.params["b"].main_grad

    def test_one_rank_reduces_with_itself(self):
        _, (only,) = ranks(SCATTER_MEAN, size=1)
        only.both(3)

        sync([only])

        assert only.reduced == [3.0, 3.0]

    @pytest.mark.parametrize("switches", [ALL_REDUCE_MEAN, SCATTER_MEAN], ids=["all_reduce", "reduce_scatter"])
    def test_a_float16_mean_neither_overflows_nor_underflows(self, switches):
        _, group = ranks({**switches, "grad_reduce_in_fp32": False}, size=4, dtype=torch.float16)
        for rank in group:  # divided by 2 before and by 2 after
            rank.grad("b", 16384.0)  # the plain sum 4 * 16384 = 65536 is over 65504; 4 * 8192 is not
            rank.grad("a", 2.0**-23)  # a quarter of it would be 2**-25 and round to zero; the half is the smallest float16

        sync(group)

        # 256 elements, shards of 64: b[0] belongs to rank 0, a[0] at 128 to rank 2.
        assert group[0].params["b"].main_grad[0].item() == 16384.0
        assert group[2].params["a"].main_grad[0].item() == 2.0**-23

    def test_the_collective_is_launched_once_for_all_buckets_of_a_group(self):
        world, (first, second) = ranks()

        sync([first, second])

        assert world.schedule(0) == world.schedule(1) == ("bucket 1 [all_reduce sum of 256 x float32]",)


class TestReplicas:
    """Two replicas of two ranks: a reduce-scatter in each, and an all-reduce of the shards over both."""

    @pytest.mark.parametrize(
        ("switches", "result", "op"),
        [({}, 6.0, "sum"), ({"average_in_collective": True}, 6.0, "avg"), ({"grad_reduction": "sum"}, 24.0, "sum")],
        ids=["mean", "in the collective", "sum"],
    )
    def test_shards_hold_the_result_of_all_ranks(self, switches, result, op):
        world = LoopbackWorld(4)
        inside = world.subgroup([0, 1]) | world.subgroup([2, 3])
        over = world.subgroup([0, 2]) | world.subgroup([1, 3])
        group = [Rank(inside[rank], SCATTER_MEAN | switches, replicas=ReplicaReducer(over[rank], None)) for rank in range(4)]
        for rank, value in zip(group, (2, 4, 6, 12), strict=True):
            rank.both(value)

        world.run(lambda rank: sync([group[rank]]))

        # b lies in the shard of the first rank of each replica, a in that of the second.
        assert [rank.reduced[1 - index % 2] for index, rank in enumerate(group)] == [result] * 4
        assert world.schedule(3) == (
            f"bucket 1 [reduce_scatter {op} of 256 x float32]",
            f"bucket 1 over replicas [all_reduce {op} of 128 x float32]",
        )


class TestDelayed:
    """Gradients of a that are computed outside backward."""

    def test_they_are_added_and_reduced(self):
        _, (only,) = ranks(size=1, delayed="a")

        only.grad("b", 1)
        for value in (2, 3):
            only.delayed("a", value)
        sync([only])

        assert only.reduced == [5.0, 1.0]
        assert only.group.missing == ()

    @pytest.mark.parametrize(
        ("names", "num_delayed", "num_backwards", "is_complete"),
        [("b", 1, 1, True), ("b", 2, 2, True), ("b", 0, 1, False), ("b", 1, 2, False), ("", 1, 1, False)],
        ids=["all", "two backwards", "none", "one of two", "the other is missing"],
    )
    def test_a_group_is_complete_with_one_of_each_backward_and_all_others(self, names, num_delayed, num_backwards, is_complete):
        _, (only,) = ranks(size=1, delayed="a")
        only.grad("b", 1)
        only.delayed("a", 1)
        whole_step(only)

        for name in names:
            only.grad(name, 1)
        for _ in range(num_delayed):
            only.delayed("a", 1)
        only.group.update_completeness(num_backwards)

        assert only.group.is_complete is is_complete

    def test_in_the_first_step_nothing_is_known_to_be_complete(self):
        _, (only,) = ranks(size=1, delayed="a")
        only.grad("b", 1)
        only.delayed("a", 1)

        only.group.update_completeness(1)

        assert not only.group.is_complete


class TestMissing:
    def test_a_parameter_without_a_gradient_is_listed_and_reduced_as_zero(self):
        _, (first, second) = ranks()
        first.both(2)
        second.grad("a", 2)

        sync([first, second])

        assert (first.group.missing, second.group.missing) == ((), ("b",))
        assert first.reduced == second.reduced == [2.0, 1.0]

    def test_stale_values_of_the_step_before_are_not_reduced_again(self):
        _, (first, second) = ranks()
        for rank in (first, second):
            rank.both(100)
        sync([first, second])
        for rank in (first, second):
            rank.group.reset()
            rank.grad("a", 3)

        sync([first, second])

        assert first.reduced == [3.0, 0.0]
        assert first.group.missing == first.group.cleared == ("b",)

    def test_a_view_zeroed_on_purpose_is_missing_a_gradient_but_was_not_cleared(self):
        _, (first, second) = ranks()
        for rank in (first, second):
            rank.params["b"].main_grad.fill_(8)  # by hand, into the zeros of a fresh buffer
            rank.grad("a", 2)

        sync([first, second])

        assert first.reduced == [2.0, 8.0]
        assert (first.group.missing, first.group.cleared) == (("b",), ())


class TestReadiness:
    def test_the_first_step_learns_and_the_second_completes(self):
        _, (only,) = ranks(size=1)

        in_first_step = only.both(1)
        whole_step(only)
        in_second_step = only.both(1)

        assert (in_first_step, in_second_step) == (False, True)

    def test_a_complete_group_is_so_until_the_next_step_and_says_so_once(self):
        said = []
        _, (only,) = ranks(size=1)
        only.group.communicator.recorders.active = (SimpleNamespace(note_ready=said.append, record_launch=id),)
        only.both(1)
        whole_step(only)

        facts = [only.group.is_complete]
        only.both(1)
        facts.append(only.group.is_complete)
        only.group.reset()

        assert [*facts, only.group.is_complete] == [False, True, False]
        assert said == ["bucket 1"]

    def test_gradients_that_do_not_count_complete_nothing(self):
        _, (only,) = ranks(size=1)
        only.both(1)
        whole_step(only)

        only.params["a"].grad = torch.ones(100)
        complete = only.group.receive(1, INSIDE_NO_SYNC)

        assert not complete
        assert only.both(1) is True

    def test_a_step_that_was_reset_before_it_was_sent_teaches_nothing(self):
        _, (only,) = ranks(size=1)
        only.grad("a", 1)
        only.group.reset()
        for name in ("a", "b", "a"):  # the real first step: two gradients for a
            only.grad(name, 1)
        whole_step(only)

        assert [only.grad(name, 1) for name in ("a", "b", "a")] == [False, False, True]

    def test_a_step_that_was_sent_but_not_whole_teaches_nothing(self):
        _, (only,) = ranks(size=1)
        only.both(1)
        sync([only])
        only.group.reset()
        for name in ("a", "b", "a"):
            only.grad(name, 1)
        whole_step(only)

        assert [only.grad(name, 1) for name in ("a", "b", "a")] == [False, False, True]


class TestFiniteTest:
    """Looks at the gradients as they are about to be sent."""

    def test_what_is_not_finite_on_this_rank_is_named_before_it_reaches_the_others(self):
        _, (first, second) = ranks()
        first.both(1)
        second.grad("b", 1)
        second.grad("a", math.inf)

        for rank in (first, second):
            rank.group.start_grad_sync()

        assert first.group.finite_test.found == ()
        assert second.group.finite_test.found == (NonFiniteParam("a", "inf in 100 of 100 elements, first at [0]"),)

    def test_stale_values_of_an_unused_parameter_are_not_what_it_looks_at(self):
        _, (only,) = ranks(size=1)
        only.grad("b", 1)
        only.grad("a", math.nan)
        sync([only])
        first_finding = only.group.finite_test.found
        only.group.reset()
        only.grad("b", 1)

        sync([only])

        assert len(first_finding) == 1
        assert only.group.finite_test.found == ()

    def test_the_divisor_does_not_hide_what_would_overflow_before_it(self):
        _, group = ranks({"grad_reduce_in_fp32": False}, size=4, dtype=torch.float16)
        for rank in group:
            rank.both(65504.0)  # the largest float16 is finite

        sync(group)

        assert [rank.group.finite_test.found for rank in group] == [()] * 4

    @pytest.mark.parametrize(
        ("size", "dtype", "reduction", "part", "is_found"),
        [
            (2, torch.float32, "sum", 0.6, True),
            (2, torch.float32, "sum", 0.4, False),
            (16, torch.float32, "sum", 1 / 12, True),
            (16, torch.float32, "sum", 1 / 20, False),
            (4, torch.bfloat16, "sum", 0.3, True),
            (4, torch.bfloat16, "sum", 0.2, False),
            (2, torch.float32, "mean", 1.0, False),  # multiplied by 1/2 before the sum
            (16, torch.float32, "mean", 1.0, False),
            (4, torch.bfloat16, "mean", 1.0, False),
            (1, torch.float32, "sum", 1.0, False),
        ],
        ids=str,
    )
    def test_what_is_too_large_for_the_sum_over_the_ranks_is_named(self, size, dtype, reduction, part, is_found):
        fields = {"grad_reduce_in_fp32": False, "grad_reduction": reduction}
        _, (first, *_) = ranks(fields, size=size, dtype=dtype)
        first.both(part * torch.finfo(dtype).max)

        first.group.start_grad_sync()

        assert [found.param for found in first.group.finite_test.found] == (["b"] if is_found else [])

    @pytest.mark.parametrize(("switches", "found"), [({}, ["b", "a"]), ({"nonfinite_gradients": "allow"}, [])], ids=str)
    def test_in_float16_the_sum_itself_is_tested(self, switches, found):
        _, (first, second) = ranks({"grad_reduce_in_fp32": False, **switches}, dtype=torch.float16)
        for rank in (first, second):
            rank.both(60000)  # 120000 is over 65504

        sync([first, second])

        assert first.group.finite_test.found == ()
        assert [one.param for one in second.group.sum_test.found] == found

    def test_one_rank_has_no_sum_to_test(self):
        _, (only,) = ranks({"grad_reduce_in_fp32": False}, size=1, dtype=torch.float16)
        only.both(math.nan)

        sync([only])

        assert (len(only.group.finite_test.found), only.group.sum_test.found) == (2, ())

    def test_a_policy_may_do_without_it(self):
        _, (only,) = ranks({"nonfinite_gradients": "allow"}, size=1)
        only.both(math.nan)

        sync([only])

        assert only.group.finite_test.found == ()


class TestPhases:
    def test_a_step_goes_through_its_phases(self):
        _, (only,) = ranks(size=1)

        phases = [only.group.grad_phase]
        for call in (only.group.start_grad_sync, only.group.finish_grad_sync, only.group.reset):
            call()
            phases.append(only.group.grad_phase)

        assert phases == [GradPhase.ACCUMULATING, GradPhase.IN_FLIGHT, GradPhase.REDUCED, GradPhase.ACCUMULATING]

    def test_sending_twice_is_refused(self):
        _, (first, _) = ranks()
        first.group.start_grad_sync()

        with pytest.raises(PhaseError, match="the gradients of bucket group 1 is 'in flight' and cannot become 'in flight'"):
            first.group.start_grad_sync()

    def test_finishing_what_was_never_sent_is_refused(self):
        _, (first, _) = ranks()

        first.group.finish_grad_sync(waits=False)  # has nothing to do
        with pytest.raises(PhaseError, match="bucket group 1 is 'accumulating' and cannot become 'already reduced'"):
            first.group.finish_grad_sync()

    def test_finishing_twice_does_nothing_and_divides_once(self):
        _, (first, second) = ranks()
        first.both(2)
        second.both(6)

        sync([first, second])
        first.group.finish_grad_sync()

        assert first.reduced == [4.0, 4.0]

    def test_resetting_what_is_in_flight_is_refused(self):
        _, (first, _) = ranks()
        first.group.start_grad_sync()

        with pytest.raises(PhaseError, match="bucket group 1 is 'in flight' and cannot become 'accumulating'"):
            first.group.reset()

    def test_resetting_twice_is_allowed(self):
        _, (first, _) = ranks()

        first.group.reset()
        first.group.reset()

        assert first.group.grad_phase is GradPhase.ACCUMULATING


class TestWithheld:
    """A gradient that may not be used from backward to its reduction, because only shards of it are reduced."""

    def test_it_says_what_it_is_and_autograd_adds_to_it(self):
        _, (first, _) = ranks(SCATTER_MEAN)
        first.grad("b", 2)

        first.group.withhold_grads()

        b = first.params["b"]
        assert first.params["a"].grad is None  # it has none
        with pytest.raises(PhaseError, match=r"called on the gradient of 'b', which is reduce-scattered \("):
            torch.nn.utils.clip_grad_norm_([b], 1.0)
        b.sum().backward()
        assert b.main_grad[0].item() == 3.0

    def test_in_flight_all_are_withheld_and_what_autograd_adds_is_dropped(self):
        _, (first, _) = ranks(SCATTER_MEAN)
        first.grad("b", 2)
        first.group.start_grad_sync()

        first.group.withhold_grads()

        assert all(isinstance(param.grad, WithheldGrad) for param in first.group.params)
        first.params["b"].sum().backward()
        assert first.params["b"].main_grad[0].item() == 1.0  # half of it is sent

    def test_what_is_reduced_is_not_withheld(self):
        _, (first, second) = ranks(SCATTER_MEAN)
        sync([first, second])

        first.group.withhold_grads()

        assert [param.grad for param in first.group.params] == [None, None]

    def test_where_the_policy_has_no_reason_gradients_stay(self):
        _, (first, _) = ranks()
        first.grad("b", 2)

        first.group.withhold_grads()

        assert first.params["b"].grad is first.params["b"].main_grad


class TestDroppedStep:
    """A rank that has failed takes part in the rest of the schedule, whatever it holds."""

    @pytest.mark.parametrize("done", ["nothing", "gradients", "launch", "reduction"])
    def test_a_dropped_group_is_sent_exactly_once_from_every_phase(self, done):
        world, (first, second) = ranks()
        first.both(2)
        second.both(6)
        if done in ("launch", "reduction"):
            first.group.start_grad_sync()
        second.group.start_grad_sync()
        if done == "reduction":
            first.group.finish_grad_sync()
            second.group.finish_grad_sync()
            second.group.reopen()
            second.group.start_dropped_sync()

        first.group.start_dropped_sync()
        first.group.start_dropped_sync()  # an interrupt has come between
        phase_after_launch = first.group.grad_phase
        first.group.finish_grad_sync()

        num_sent = 2 if done == "reduction" else 1
        assert world.schedule(0) == ("bucket 1 [all_reduce sum of 256 x float32]",) * num_sent
        assert phase_after_launch is GradPhase.IN_FLIGHT
        assert first.group.grad_phase is GradPhase.REDUCED

    def test_what_was_found_and_left_of_the_dropped_step_is_not_of_the_next_one(self):
        _, (only,) = ranks(size=1)
        only.grad("b", math.nan)

        only.group.start_dropped_sync()
        of_the_dropped = only.group.missing, only.group.cleared
        only.group.finish_grad_sync()
        only.group.reset()
        only.both(3)
        sync([only])

        assert only.reduced == [3.0, 3.0]
        assert of_the_dropped == ((), ())
        assert (only.group.missing, only.group.finite_test.found) == ((), ())

    def test_what_an_earlier_step_has_found_is_not_reported_again(self):
        _, (only,) = ranks(size=1)
        only.both(math.nan)
        sync([only])
        found_first = only.group.finite_test.found
        only.group.reset()

        only.group.start_dropped_sync()

        assert len(found_first) == 2
        assert only.group.finite_test.found == ()


class TestParamGather:
    def test_every_rank_receives_the_shards_of_all(self):
        _, (first, second) = ranks(SCATTER_MEAN)
        for rank, value in ((first, 1.0), (second, 2.0)):
            bucket = rank.buffer.buckets[0]
            bucket.shard(bucket.param_data, rank.group.communicator.rank).fill_(value)
            rank.group.mark_params_stale()

        for rank in (first, second):
            rank.group.start_param_sync()
        for rank in (first, second):
            rank.group.finish_param_sync()

        for rank in (first, second):  # b lies in the shard of rank 0, a in that of rank 1
            assert (rank.params["b"][0].item(), rank.params["a"][0].item()) == (1.0, 2.0)
            assert rank.group.param_phase is ParamPhase.GATHERED

    def test_a_second_start_while_in_flight_launches_nothing(self):
        world, (first, _) = ranks(SCATTER_MEAN)

        first.group.start_param_sync()
        first.group.start_param_sync()

        assert world.schedule(0) == ("param gather 1 [all_gather of 256 x float32]",)
        assert first.params["a"].tolist() == [0.0] * 100  # not hidden unless asked for

    def test_parameters_that_are_hidden_read_as_nan_until_they_are_gathered(self):
        world, (first, second) = ranks(SCATTER_MEAN)
        for rank in (first, second):
            rank.group.start_param_sync(hides_params=True)
        hidden = [param.detach().isnan().all().item() for param in first.group.params]
        pointers = [param.data_ptr() for param in first.group.params]
        expected_pointers = [values.data_ptr() for values in first.group.param_values]

        world.run(lambda rank: (first, second)[rank].group.finish_param_sync())

        assert hidden == [True, True]
        assert pointers == expected_pointers
        assert pointers != [param.data_ptr() for param in first.group.params]
        assert [param.data_ptr() for param in first.group.params] == [values.data_ptr() for values in first.group.param_values]
        assert first.params["a"].tolist() == [0.0] * 100  # nothing was written

    def test_finishing_what_is_stale_gathers_first(self):
        _, (only,) = ranks(SCATTER_MEAN, size=1)
        only.group.mark_params_stale()

        only.group.finish_param_sync()

        assert only.group.param_phase is ParamPhase.GATHERED

    def test_finishing_what_is_gathered_launches_nothing(self):
        world, (first, _) = ranks(SCATTER_MEAN)

        first.group.finish_param_sync()

        assert world.schedule(0) == ()

    def test_updating_parameters_that_are_still_being_gathered_is_refused(self):
        _, (first, _) = ranks(SCATTER_MEAN)
        first.group.start_param_sync()

        with pytest.raises(PhaseError, match="the parameters of bucket group 1 is 'in flight' and cannot become 'stale'"):
            first.group.mark_params_stale()


class TestDevice:
    """Streams of a device that is not there: who waits for whom."""

    @pytest.fixture
    def device(self, monkeypatch):
        device = Device()
        monkeypatch.setattr(Accelerator, "of", lambda _: device)
        return device

    def test_a_launch_waits_for_the_streams_of_all_gradients_and_they_for_none(self, device):
        _, (only,) = ranks(size=1)

        for name, device.current_stream_id in (("b", 1), ("a", 2)):
            only.grad(name, 1)
        device.current_stream_id = 0
        only.group.start_grad_sync()

        assert device.waited_for == {0: [1, 2]}

    def test_a_second_gradient_waits_for_the_stream_of_the_first(self, device):
        _, (only,) = ranks(size=1)

        for device.current_stream_id in (1, 2):
            only.grad("b", 1)

        assert device.waited_for == {2: [1]}

    def test_a_delayed_gradient_waits_for_those_of_its_own_parameter_only(self, device):
        _, (only,) = ranks(size=1, delayed="ab")

        for name, device.current_stream_id in (("b", 1), ("a", 2), ("b", 3)):
            only.delayed(name, 1)

        assert device.waited_for == {3: [1]}

    def test_other_streams_wait_once_for_gathered_parameters(self, device):
        _, (only,) = ranks(SCATTER_MEAN, size=1)
        only.group.mark_params_stale()

        for device.current_stream_id in (1, 1, 2, 2):
            only.group.finish_param_sync()

        assert device.waited_for == {2: ["an event of 1"]}


class TestFailedLaunch:
    """Nothing that was never sent may pass for reduced or gathered."""

    @staticmethod
    def ranks_out_of_step(policy):
        _, (first, second) = ranks(policy)
        first.group.communicator.launch([AllReduce(torch.ones(1))], label="something else")
        return second

    def test_gradients_whose_launch_failed_are_never_called_reduced(self):
        rank = self.ranks_out_of_step(ALL_REDUCE_MEAN)
        rank.both(2)
        with pytest.raises(MismatchedCollectiveError):
            rank.group.start_grad_sync()

        for _ in range(2):
            with pytest.raises(CollectiveError, match="bucket 1 was not launched, so there is nothing to wait for"):
                rank.group.finish_grad_sync()

        assert rank.group.grad_phase is GradPhase.IN_FLIGHT

    def test_parameters_whose_launch_failed_are_never_called_gathered(self):
        rank = self.ranks_out_of_step(SCATTER_MEAN)
        with pytest.raises(MismatchedCollectiveError):
            rank.group.start_param_sync()

        with pytest.raises(MismatchedCollectiveError):  # tried again: an interrupt may have kept it from being sent
            rank.group.finish_param_sync()

        assert rank.group.param_phase is ParamPhase.IN_FLIGHT
