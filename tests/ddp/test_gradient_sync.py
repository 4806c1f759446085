"""Gradients of the wrapped model: reduced once, in the same schedule on every rank, whatever autograd does."""

from functools import partial

import pytest
import torch
from loop_ranks import Ranks, Weights, grads, main_grads
from sync_ranks import Boom
from torch.utils.checkpoint import checkpoint

from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.errors import LateGradientError, PhaseError, StepMismatchError, UnreducedGradientsError, UnusedParameterError

# One bucket per vector: launch order is d, c, b, a, because backward is expected to reach the last registered first.
PER_VECTOR = {"bucket_size": 1}
BUCKETS = ["bucket 0", "bucket 1", "bucket 2", "bucket 3"]


class Checkpointed(Weights):
    """Uses ``b`` once per factor, each time under reentrant activation checkpointing."""

    def forward(self, *, b, **factors):
        total = super().forward(**factors)
        for factor in b:
            total = checkpoint(lambda x, factor=factor: (self.b * factor).sum() + x, total, use_reentrant=True)
        return total


def wrap(model, **switches):
    return DistributedDataParallel(model, DistributedDataParallelConfig(**switches))


class TestMean:
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_after_backward_every_rank_has_the_mean_of_all_ranks(self, size, overlap):
        ranks = Ranks(size, Weights(), overlap_grad_reduce=overlap, **PER_VECTOR)

        def step(rank, ddp):
            ddp(a=6 * rank, b=6, c=12 * rank, d=0).backward()
            return grads(ddp.module)

        for _ in range(3):  # learning, and with what was learned
            results = ranks.run(lambda rank, ddp: (step(rank, ddp), ddp.zero_grad())[0])
            # mean of 6 * rank: 0, 3 or 6
            assert results == [{"a": 3.0 * (size - 1), "b": 6.0, "c": 6.0 * (size - 1), "d": 0.0}] * size

    def test_one_process_needs_no_process_group(self, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        model = Weights("ab")

        wrap(model)(a=3, b=5).backward()

        assert grads(model) == {"a": 3.0, "b": 5.0}


class TestAccumulationAsInTorch:
    """What plain torch gives when gradients are cleared in its own ways, or not at all."""

    def test_gradients_that_were_not_cleared_are_added_to(self):
        ranks = Ranks(2, Weights("ab"), **PER_VECTOR)

        def two_steps(rank, ddp):
            ddp(a=2 * rank, b=1).backward()
            ddp(a=10 * rank, b=1).backward()
            return grads(ddp.module)

        assert ranks.run(two_steps) == [{"a": 6.0, "b": 2.0}] * 2  # means 1 + 5 and 1 + 1

    def test_gradients_zeroed_in_place_start_anew(self):
        ranks = Ranks(2, Weights("a"))

        def two_steps(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            ddp(a=2 * rank).backward()
            optimizer.zero_grad(set_to_none=False)
            ddp(a=10 * rank).backward()
            return grads(ddp.module)

        assert ranks.run(two_steps) == [{"a": 5.0}] * 2

    def test_an_undivided_sum_is_not_added_to_because_the_old_values_would_count_once_per_rank(self):
        ddp = wrap(Weights("a"), grad_reduction="sum")
        ddp(a=1).backward()

        with pytest.raises(LateGradientError, match="is already reduced"):
            ddp(a=1).backward()

    def test_an_undivided_sum_is_not_started_anew_while_any_old_value_is_left(self):
        ddp = wrap(Weights("ab"), grad_reduction="sum", **PER_VECTOR)
        ddp(a=1, b=1).backward()
        ddp.module.b.grad = None  # that of b comes first in backward, but a still shows the old sum

        with pytest.raises(LateGradientError) as caught:
            ddp(a=1, b=1).backward()

        assert (caught.value.params, caught.value.phase) == (("b",), "already reduced")

    def test_a_gradient_from_before_wrapping_is_not_stepped_on_before_it_is_reduced(self):
        model = Weights("a")
        model(a=8).backward()
        ddp = wrap(model)

        with pytest.raises(UnreducedGradientsError):
            torch.optim.SGD(ddp.parameters(), lr=1.0).step()


class TestNoSync:
    def test_inside_nothing_is_launched_and_everything_accumulates(self):
        ranks = Ranks(2, Weights("ab"), **PER_VECTOR)

        def step(rank, ddp):
            launched = []
            for factor in (1, 10):
                with ddp.no_sync():
                    ddp(a=factor, b=factor * rank).backward()
                launched.append(len(ranks.schedule(rank)))
            ddp(a=100, b=100 * rank).backward()
            return launched, grads(ddp.module)

        for num_before in (0, 3):  # two buckets and the fence
            results = ranks.run(lambda rank, ddp: (step(rank, ddp), ddp.zero_grad())[0])
            assert results == [([num_before] * 2, {"a": 111.0, "b": 55.5})] * 2

    def test_leaving_an_inner_context_does_not_leave_the_outer_one(self):
        ranks = Ranks(2, Weights("a"))

        def step(rank, ddp):
            with ddp.no_sync():
                with ddp.no_sync():
                    ddp(a=1).backward()
                ddp(a=10).backward()
                inside = len(ranks.schedule(rank))
            ddp(a=100 * rank).backward()
            return inside, grads(ddp.module)

        assert ranks.run(step) == [(0, {"a": 61.0})] * 2  # 11 + 50

    def test_an_exception_inside_leaves_the_context(self):
        ddp = wrap(Weights("a"))

        with pytest.raises(KeyError), ddp.no_sync(), ddp.no_sync():
            raise KeyError
        ddp(a=3).backward()

        assert ddp.sync.is_reduced

    def test_what_counts_is_where_backward_runs(self):
        ranks = Ranks(2, Weights("a"))

        def step(rank, ddp):
            with ddp.no_sync():
                loss = ddp(a=4 * rank)
            loss.backward()
            return grads(ddp.module)

        assert ranks.run(step) == [{"a": 2.0}] * 2


class TestSchedule:
    def test_buckets_go_out_in_order_although_every_rank_uses_its_layers_in_another(self):
        ranks = Ranks(3, Weights(), **PER_VECTOR)
        orders = ["abcd", "dcba", "cadb"]

        def step(rank, ddp):
            ddp(**dict.fromkeys(orders[rank], 3 * rank + 3)).backward()
            return grads(ddp.module)

        for number in range(1, 4):
            results = ranks.run(lambda rank, ddp: (step(rank, ddp), ddp.zero_grad())[0])
            assert results == [dict.fromkeys("abcd", 6.0)] * 3  # (3 + 6 + 9) / 3
            assert [ranks.schedule(rank) for rank in range(3)] == [[*BUCKETS, "fence"] * number] * 3

    def test_after_learning_complete_buckets_are_launched_while_backward_still_runs(self):
        ranks = Ranks(1, Weights("ab"), finish="explicit", **PER_VECTOR)
        (ddp,) = ranks.ddps
        seen = []

        def step():
            loss = ddp(a=1, b=1)
            ddp.module.a.register_hook(lambda _: seen.append([group.grad_phase.value for group in ddp.bucket_groups]))
            loss.backward()
            ddp.finish_grad_sync()
            ddp.zero_grad()

        step()
        step()

        # The gradient of b comes first, because a was used first; its bucket is in flight when that of a is computed.
        assert seen[0] == ["accumulating", "accumulating"]
        assert seen[-1] == ["in flight", "accumulating"]

    def test_one_group_for_all_buckets_sends_them_as_one_batch(self):
        ranks = Ranks(2, Weights("ab"), bucket_groups="single", **PER_VECTOR)

        ranks.run(lambda _, ddp: ddp(a=1, b=1).backward())

        assert ranks.world.schedule(0)[-2:] == (
            "bucket 0 [all_reduce sum of 128 x float32, all_reduce sum of 128 x float32]",
            "fence [all_reduce max of 6 x int64]",
        )


class TestUnusedParameters:
    TEXT = (
        "step {step}: 'c', 'b' got no gradient on any rank (first in bucket 1 of 4, counted from 0). They require grad but "
        "no backward of the step reached them, or their .grad was set to None (by a hook, or between two backwards). "
        "Freeze them with requires_grad_(False) before wrapping, use them, or set unused_parameters='skip', which is torch "
        "DDP's find_unused_parameters=True, or 'zero' to reduce zeros in their place. The step was dropped on all ranks; its "
        "gradients are forgotten, and the next step may run."
    )

    @pytest.mark.parametrize("num_steps_before", [0, 2])
    def test_they_are_an_error_in_the_same_step_with_their_names(self, num_steps_before):
        ranks = Ranks(2, Weights(), **PER_VECTOR)
        for _ in range(num_steps_before):
            ranks.run(lambda _, ddp: (ddp(a=1, b=1, c=1, d=1).backward(), ddp.zero_grad()))

        def step(rank, ddp):
            with pytest.raises(UnusedParameterError) as caught:
                ddp(a=1, d=1).backward()
            return caught.value

        for error in ranks.run(step):
            assert str(error) == self.TEXT.format(step=num_steps_before)
            assert (error.ranks, error.num_ranks, error.params) == ((0, 1), 2, ("c", "b"))
            assert (error.step, error.bucket, error.num_buckets) == (num_steps_before, 1, 4)

    def test_one_whose_gradient_was_cleared_in_the_middle_of_the_step_is_unused(self):
        ddp = wrap(Weights("ab"), **PER_VECTOR)
        with ddp.no_sync():
            ddp(a=1, b=1).backward()
        torch.optim.SGD(ddp.parameters()).zero_grad()

        with pytest.raises(UnusedParameterError) as caught:
            ddp(a=1).backward()

        assert caught.value.params == ("b",)

    def test_one_whose_old_gradient_was_kept_is_unused_all_the_same(self):
        ddp = wrap(Weights("ab"), **PER_VECTOR)
        ddp(a=1, b=1).backward()

        with pytest.raises(UnusedParameterError) as caught:
            ddp(a=1).backward()

        assert caught.value.params == ("b",)


class TestLateGradients:
    """Reduce-scatter: what arrives after a bucket was sent is refused. (All-reduce finishes with backward.)"""

    def test_a_second_backward_without_no_sync_is_refused_by_name(self):
        ddp = wrap(Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)
        for _ in range(2):
            ddp(a=1, b=1).backward()
            ddp.finish_grad_sync()
            ddp.zero_grad()
        loss = ddp(a=1, b=1)
        loss.backward(retain_graph=True)
        loss.backward()

        with pytest.raises(LateGradientError) as caught:
            ddp.finish_grad_sync()

        error = caught.value
        assert (error.params, error.bucket, error.num_buckets) == (("b", "a"), 0, 2)
        assert (error.rank, error.phase) == (0, "in flight")

    def test_a_forgotten_zero_grad_is_refused_by_name(self):
        ddp = wrap(Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)
        ddp(a=1, b=1).backward()
        ddp.finish_grad_sync()

        with pytest.raises(LateGradientError) as caught:
            ddp(a=1, b=1).backward()

        assert (caught.value.params, caught.value.phase) == (("b",), "already reduced")
        assert ddp.last_error is caught.value

    @pytest.mark.parametrize("clear", [lambda ddp: ddp.zero_grad(), lambda _: None], ids=["zero_grad", "nothing"])
    def test_the_step_after_it_is_right_and_overlaps_again(self, clear):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=1, b=1).backward()
            ddp.finish_grad_sync()
            with pytest.raises(LateGradientError):
                ddp(a=1, b=1).backward()
            clear(ddp)
            ddp(a=2, b=6 * rank).backward()
            phases = [group.grad_phase.value for group in ddp.bucket_groups]
            ddp.finish_grad_sync()
            return phases, [ddp.module.a.main_grad[64 * rank].item(), ddp.module.b.main_grad[64 * rank].item()]

        # Buckets of 128, shards of 64: rank r owns the elements from 64 r on of each vector.
        assert ranks.run(steps) == [(["in flight", "in flight"], [2.0, 3.0])] * 2

    @pytest.mark.parametrize("finish", ["auto", "explicit"])
    def test_reentrant_checkpointing_of_a_layer_used_twice_is_right_because_its_count_is_learned(self, finish):
        ranks = Ranks(2, Checkpointed("abc"), finish=finish, **PER_VECTOR)

        def step(rank, ddp):
            ddp(a=1, b=(2 * rank, 10 * rank), c=1).backward()  # the hook of b fires twice, in backwards inside the backward
            ddp.finish_grad_sync()
            return grads(ddp.module)

        for _ in range(3):
            results = ranks.run(lambda rank, ddp: (step(rank, ddp), ddp.zero_grad())[0])
            assert results == [{"a": 1.0, "b": 6.0, "c": 1.0}] * 2  # (12 * 0 + 12 * 1) / 2

    def test_a_reentrant_layer_used_more_often_than_learned_is_late_by_name_and_then_learned(self):
        ranks = Ranks(2, Checkpointed("ab"), **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=1, b=(5, 5)).backward()
            ddp.zero_grad()
            with pytest.raises(LateGradientError) as caught:
                ddp(a=1, b=(5, 5, 5)).backward()
            ddp.zero_grad()
            ddp(a=1, b=(rank, rank, rank)).backward()
            return caught.value.params, grads(ddp.module)

        assert ranks.run(steps) == [(("b",), {"a": 1.0, "b": 1.5})] * 2


class TestExplicitFinish:
    def test_nothing_is_reduced_before_the_caller_says_so(self):
        ranks = Ranks(2, Weights("a"), finish="explicit")

        def step(rank, ddp):
            ddp(a=4 * rank).backward()
            local = main_grads(ddp.module)
            ddp.finish_grad_sync()
            return local, grads(ddp.module)

        assert ranks.run(step) == [({"a": 0.0}, {"a": 2.0}), ({"a": 4.0}, {"a": 2.0})]

    def test_start_launches_everything_without_waiting(self):
        ranks = Ranks(2, Weights("ab"), finish="explicit", completion="manual", **PER_VECTOR)

        def step(rank, ddp):
            ddp(a=4 * rank, b=2).backward()
            ddp.start_grad_sync()
            ddp.start_grad_sync()
            phases = [group.grad_phase.value for group in ddp.bucket_groups]
            ddp.finish_grad_sync()
            return phases, grads(ddp.module)

        assert ranks.run(step) == [(["in flight"] * 2, {"a": 2.0, "b": 2.0})] * 2

    def test_gradients_written_by_hand_into_zeroed_buffers_are_reduced(self):
        ranks = Ranks(2, Weights("ab"), **PER_VECTOR)

        def steps(rank, ddp):
            found = []
            for _ in range(2):
                ddp.zero_grad_buffer()
                ddp.module.a.main_grad.fill_(4 * rank)
                ddp.module.b.main_grad.fill_(1)
                ddp.finish_grad_sync()
                found.append(grads(ddp.module))
            return found

        assert ranks.run(steps) == [[{"a": 2.0, "b": 1.0}] * 2] * 2

    def test_gradients_written_by_hand_into_stale_buffers_are_refused_and_not_silently_dropped(self):
        ddp = wrap(Weights("ab"), **PER_VECTOR)
        ddp(a=1, b=1).backward()
        ddp.zero_grad()
        ddp.module.a.main_grad.fill_(4)

        with pytest.raises(UnusedParameterError, match="step 1: 'b', 'a' got no gradient on any rank"):
            ddp.finish_grad_sync()

    def test_finishing_a_step_without_any_backward_is_fine_where_unused_parameters_are(self):
        ddp = wrap(Weights("ab"), unused_parameters="zero", **PER_VECTOR)
        ddp(a=1, b=1).backward()
        ddp.zero_grad()

        ddp.finish_grad_sync()

        assert grads(ddp.module) == {"a": 0.0, "b": 0.0}

    def test_force_all_reduce_gives_every_rank_full_gradients_with_the_distributed_optimizer(self):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=4 * rank, b=2).backward()
            ddp.finish_grad_sync(force_all_reduce=True)  # the first step launches here
            first = grads(ddp.module), ddp.force_all_reduce
            ddp.zero_grad()
            ddp.force_all_reduce = True
            ddp(a=8 * rank, b=2).backward()  # and the second in backward
            ddp.finish_grad_sync()
            return *first, grads(ddp.module)

        assert ranks.run(steps) == [({"a": 2.0, "b": 2.0}, False, {"a": 4.0, "b": 2.0})] * 2

    def test_what_is_gathered_does_not_depend_on_when_a_rank_has_launched_a_bucket(self):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, unused_parameters="zero", **PER_VECTOR)

        def steps(rank, ddp):
            for _ in range(2):  # so that the wrapper knows what to expect, and launches in backward
                ddp(a=4, b=2).backward()
                ddp.finish_grad_sync()
                ddp.zero_grad()
            factors = {"a": 4, "b": 2} if rank else {"a": 4}  # rank 0 launches b at the end only
            ddp(**factors).backward()
            ddp.finish_grad_sync(force_all_reduce=True)
            return grads(ddp.module)

        assert ranks.run(steps) == [{"a": 4.0, "b": 1.0}] * 2
        assert ranks.schedule(0) == ranks.schedule(1)


CLEAR = {
    "nothing": lambda *_: None,
    "wrapper": lambda ddp, _: ddp.zero_grad(),
    "plain optimizer": lambda _, optimizer: optimizer.zero_grad(),
}


class TestErrorInBackward:
    def failing_backward(self, ddp, **factors):
        """Gradients of the later factors come first; then that of the first one raises."""
        (first, factor), *rest = factors.items()
        vector = Boom.apply(getattr(ddp.module, first))
        loss = ddp(**dict(rest)) if rest else 0.0
        with pytest.raises(KeyError, match="boom"):
            (loss + (vector * factor).sum()).backward()

    @pytest.mark.parametrize("clear", CLEAR.values(), ids=CLEAR)
    @pytest.mark.parametrize("num_steps_before", [0, 2])
    @pytest.mark.parametrize("microbatches", [1, 2])
    def test_the_next_step_is_right(self, clear, num_steps_before, microbatches):
        ranks = Ranks(2, Weights("abc"), **PER_VECTOR)

        def steps(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            for _ in range(num_steps_before):
                ddp(a=1, b=1, c=1).backward()
                ddp.zero_grad()
            self.failing_backward(ddp, a=100, b=100, c=100)
            clear(ddp, optimizer)
            found = []
            for _ in range(2):
                for _ in range(microbatches - 1):
                    with ddp.no_sync():
                        ddp(a=1, b=1, c=1).backward()
                ddp(b=2 * rank, a=2, c=4 * rank).backward()
                found.append(grads(ddp.module))
                ddp.zero_grad()
            return found

        more = float(microbatches - 1)
        assert ranks.run(steps) == [[{"a": 2.0 + more, "b": 1.0 + more, "c": 2.0 + more}] * 2] * 2

    @pytest.mark.parametrize("clear", CLEAR.values(), ids=CLEAR)
    def test_what_a_failed_backward_had_counted_completes_no_bucket_of_the_next_one(self, clear):
        ddp = wrap(Weights("abc"), **PER_VECTOR)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        ddp(a=1, b=1, c=1).backward()
        ddp.zero_grad()
        # Here the gradient of a, whose bucket is the last to be launched, comes first; that of b fails; nothing was sent.
        loss = ddp(c=100) + (Boom.apply(ddp.module.b) * 100).sum() + ddp(a=100)
        with pytest.raises(KeyError, match="boom"):
            loss.backward()
        clear(ddp, optimizer)

        ddp(a=1, b=2, c=3).backward()  # c, b, a: were a counted already, its bucket would go out with that of b

        assert grads(ddp.module) == {"a": 1.0, "b": 2.0, "c": 3.0}

    def test_a_step_that_was_sent_early_and_then_dropped_teaches_no_wrong_counts(self):
        ddp = wrap(Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)
        ddp(a=1, b=1).backward()
        ddp.start_grad_sync()
        ddp.zero_grad()

        for _ in range(3):  # as in the test before: two backwards in each step
            ddp(a=1, b=1).backward()
            ddp(a=1, b=1).backward()
            ddp.finish_grad_sync()
            assert ddp.module.b.main_grad[0].item() == 2.0
            ddp.zero_grad()

    def test_a_backward_that_failed_in_the_first_step_teaches_no_wrong_counts(self):
        ddp = wrap(Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)
        self.failing_backward(ddp, a=1, b=1)
        ddp.zero_grad()

        for _ in range(3):  # two backwards outside no_sync belong to each step of this loop
            ddp(a=1, b=1).backward()
            ddp(a=1, b=1).backward()
            ddp.finish_grad_sync()
            assert ddp.module.b.main_grad[0].item() == 2.0
            ddp.zero_grad()

    def test_one_that_finds_the_step_before_dropped_ends_there_and_not_a_second_time(self):
        """The vote about the step before is lost at the first gradient; the others hear of no failure of the next step."""
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=1, b=1).backward()
            ddp.finish_grad_sync()
            go_on = ddp(a=100, b=100).backward if rank == 0 else partial(ddp.sync.finish, is_committing=True)  # or step
            with pytest.raises(StepMismatchError, match="dropped steps"):
                go_on()
            assert ddp.module.a.grad is None
            assert ddp.module.b.grad is None
            found = []
            for _ in range(3):
                ddp(a=2, b=6 * rank).backward()
                ddp.finish_grad_sync()
                found.append([ddp.module.a.main_grad[64 * rank].item(), ddp.module.b.main_grad[64 * rank].item()])
                ddp.zero_grad()
            return found, str(ddp.last_error)

        first, second = ranks.run(steps)

        assert first == second
        assert first[0] == [[2.0, 3.0]] * 3

    def test_a_step_of_an_optimizer_is_refused_until_then(self):
        ddp = wrap(Weights("ab"), **PER_VECTOR)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        self.failing_backward(ddp, a=1, b=1)

        with pytest.raises(PhaseError, match="an error about them was raised before"):
            optimizer.step()


class TestOtherUsesOfAutograd:
    def test_a_parameter_among_the_outputs_collects_no_hooks(self):
        class Revealing(Weights):
            def forward(self, **factors):
                return super().forward(**factors), self.a

        model = Revealing("ab")
        ddp = wrap(model)

        for _ in range(3):
            ddp(a=1, b=1)[0].backward()
            ddp.zero_grad()

        assert not model.a._backward_hooks

    def test_outputs_in_containers_are_found(self):
        class Nested(Weights):
            def forward(self, **factors):
                return {"loss": [super().forward(**factors)], "text": "no tensor"}

        ranks = Ranks(2, Nested("a"))

        results = ranks.run(lambda rank, ddp: (ddp(a=4 * rank)["loss"][0].backward(), grads(ddp.module))[1])

        assert results == [{"a": 2.0}] * 2


class TestScaleGradients:
    def test_all_gradients_are_multiplied_in_place(self):
        ddp = wrap(Weights("ab"), **PER_VECTOR)
        ddp(a=2, b=6).backward()

        ddp.scale_gradients(0.5)
        ddp.scale_gradients(torch.tensor(3.0))

        assert grads(ddp.module) == {"a": 3.0, "b": 9.0}

    def test_gradients_in_flight_are_refused(self):
        ranks = Ranks(2, Weights("abcdefg"), finish="explicit", completion="manual", **PER_VECTOR)
        ranks.ddps[0].start_grad_sync()

        with pytest.raises(PhaseError) as caught:
            ranks.ddps[0].scale_gradients(2.0)

        assert str(caught.value) == (
            "scale_gradients() would touch the gradients of bucket groups [0, 1, 2, 3, 4] while a collective owns them; call "
            "finish_grad_sync() first."
        )


class TestClearing:
    def test_zero_grad_writes_nothing_and_shows_nothing(self):
        ddp = wrap(Weights("a"))
        ddp(a=2).backward()
        version = ddp.param_and_grad_buffers[0].grad_data._version

        ddp.zero_grad()

        assert ddp.module.a.grad is None
        assert ddp.param_and_grad_buffers[0].grad_data._version == version

    @pytest.mark.parametrize("clear", [lambda ddp: ddp.zero_grad(set_to_none=False), lambda ddp: ddp.zero_grad_buffer()])
    def test_buffers_are_zeroed_on_request(self, clear):
        ddp = wrap(Weights("a"))
        ddp(a=2).backward()

        clear(ddp)

        assert ddp.param_and_grad_buffers[0].grad_data.count_nonzero() == 0

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_what_went_wrong_with_forgotten_gradients_is_forgotten_too(self, reduction):
        ranks = Ranks(2, Weights("ab"), grad_reduction=reduction, **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=50, b=50).backward()
            if rank == 1:
                with ddp.no_sync():
                    ddp(a=50, b=50).backward()  # on gradients that were not cleared; late, where a sum is reduced
            ddp.zero_grad()
            ddp(a=2, b=4).backward()
            return grads(ddp.module)

        scale = 2 if reduction == "sum" else 1
        assert ranks.run(steps) == [{"a": 2.0 * scale, "b": 4.0 * scale}] * 2

    @pytest.mark.parametrize("kept", ["ab", "a", "b"])
    def test_a_rank_that_does_not_clear_is_told_apart_from_one_that_does(self, kept):
        ranks = Ranks(2, Weights("ab"), **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=1, b=1).backward()
            for name in "ab":
                if rank == 0 or name not in kept:
                    getattr(ddp.module, name).grad = None
            with pytest.raises(StepMismatchError) as caught:
                ddp(a=1, b=1).backward()
            return caught.value.by_rank, "begun without clearing" in str(caught.value)

        assert ranks.run(steps) == [((0, 1), True)] * 2

    def test_gradients_zeroed_in_place_on_one_rank_and_cleared_on_another_are_an_error(self):
        ranks = Ranks(2, Weights("ab"), **PER_VECTOR)

        def steps(rank, ddp):
            ddp(a=1, b=1).backward()
            torch.optim.SGD(ddp.parameters()).zero_grad(set_to_none=rank == 0)
            with pytest.raises(StepMismatchError, match="begun without clearing the last gradients") as caught:
                ddp(a=4 * rank, b=6).backward()
            return caught.value.by_rank

        assert ranks.run(steps) == [(0, 1)] * 2
