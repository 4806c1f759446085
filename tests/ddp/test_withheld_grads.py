"""Between backward and its reduction nobody uses ``param.grad``: what plain torch does there is right, or refused by name."""

import gc
import warnings
import weakref

import pytest
import torch
from loop_ranks import Ranks, Weights, grads

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import PhaseError

SHARDED = {"use_distributed_optimizer": True}
PER_VECTOR = {"bucket_size": 100}
REDUCE_SCATTERED = (
    "which is reduce-scattered (use_distributed_optimizer=True): from backward to the optimizer's step each rank has a "
    "gradient of its own there, or one shard of the reduced one, in memory that a collective may own. Its norm, and what is "
    "clipped by it, would differ between ranks. Clip with DistributedOptimizer(..., clip_grad=1.0), and read the norm over all "
    "ranks from what its step() returns, or call its clip_grad_norm_(1.0); scale with ddp.scale_gradients() after "
    "finish_grad_sync(). With ddp.force_all_reduce = True before backward, finish_grad_sync() leaves whole gradients in "
    "param.grad."
)
NOT_REDUCED = (
    "which is not reduced yet (finish='explicit'), and a collective may own its memory. Call ddp.finish_grad_sync() first; "
    "then read, scale or clip it."
)


def clip(params):
    torch.nn.utils.clip_grad_norm_(list(params), 1.0)


def refusal_of(act, *args):
    with pytest.raises(PhaseError) as caught:
        act(*args)
    return str(caught.value)


class TestReduceScatter:
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("completion", ["immediate", "manual"])
    @pytest.mark.parametrize("cut", [{}, PER_VECTOR], ids=["one bucket", "per vector"])
    def test_clipping_between_backward_and_step_is_refused_in_every_step_and_the_step_is_right(self, overlap, completion, cut):
        ranks = Ranks(
            2, Weights("ab"), completion=completion, overlap_grad_reduce=overlap, overlap_param_gather=overlap, **SHARDED, **cut
        )

        def program(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
            texts, norms = [], []
            for _ in range(3):  # in the first one every bucket waits for the step
                ddp(a=rank, b=4 * rank).backward()
                texts.append(refusal_of(clip, ddp.parameters()))
                texts.append(refusal_of(clip, [ddp.module.b]))
                norms.append(optimizer.step().grad_norm)
                optimizer.zero_grad()
            ddp.finish_param_sync()
            return texts, norms, ddp.module.a.unique().tolist(), ddp.module.b.unique().tolist()

        text = "linalg_vector_norm was called on the gradient of {!r}, " + REDUCE_SCATTERED
        # Means 0.5 and 2: sqrt(100 * (0.25 + 4)). Weights 1 - 3 * 0.5 and 1 - 3 * 2.
        expected = ([text.format("a"), text.format("b")] * 3, [pytest.approx(20.6155, abs=1e-4)] * 3, [-0.5], [-5.0])
        assert ranks.run(program) == [expected] * 2

    def test_a_hook_finds_it_in_the_next_backward_of_the_same_step(self):
        seen = {0: [], 1: []}

        def hook(rank, module):
            module.a.register_post_accumulate_grad_hook(lambda param: seen[rank].append(param.grad.unique().tolist()))

        ranks = Ranks(2, Weights("ab"), prepare=hook, overlap_grad_reduce=False, **SHARDED)

        def program(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
            first, second = ddp(a=1 + rank, b=1), ddp(a=4, b=2)
            first.backward()
            refusal_of(clip, ddp.parameters())
            second.backward()
            optimizer.step()
            ddp.finish_param_sync()
            return ddp.module.a.unique().tolist(), ddp.module.b.unique().tolist()

        assert ranks.run(program) == [([-4.5], [-2.0])] * 2  # 1 - (1.5 + 4) and 1 - (1 + 2)
        assert seen == {0: [[1.0], [5.0]], 1: [[2.0], [6.0]]}

    def test_what_finish_grad_sync_leaves_of_it_is_refused_too(self):
        ranks = Ranks(2, Weights("a"), **SHARDED)

        def program(rank, ddp):
            ddp(a=2 * rank).backward()
            ddp.finish_grad_sync()
            return refusal_of(clip, ddp.parameters())

        assert ranks.run(program) == ["linalg_vector_norm was called on the gradient of 'a', " + REDUCE_SCATTERED] * 2

    def test_a_gradient_that_was_all_reduced_after_all_may_be_clipped(self):
        ranks = Ranks(2, Weights("a"), **SHARDED)

        def program(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
            for _ in range(2):
                ddp.force_all_reduce = True
                ddp(a=6 * rank).backward()
                ddp.finish_grad_sync()
                norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 15.0).item()
                optimizer.step()
                optimizer.zero_grad()
            return norm, ddp.module.a.unique().tolist()

        # The mean is 3, its norm 3 * sqrt(100); clipped to half of that, twice.
        assert ranks.run(program) == [(30.0, [pytest.approx(-2.0)])] * 2

    def test_after_the_step_plain_torch_may_clear_it(self):
        ranks = Ranks(2, Weights("a"), **SHARDED)

        def program(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
            ddp(a=rank).backward()
            optimizer.step()
            ddp.module.zero_grad()
            return ddp.module.a.grad

        assert ranks.run(program) == [None] * 2

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_two_backwards_of_one_step_add_up(self, create_graph):
        ranks = Ranks(2, Weights("ab"), **SHARDED, **PER_VECTOR)

        def program(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
            for _ in range(2):  # counted in the first step: two gradients are to come
                losses = ddp(a=rank, b=4), ddp(a=3, b=4 * rank)
                for loss in losses:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # torch's, about create_graph
                        loss.backward(create_graph=create_graph)
                optimizer.step()
                optimizer.zero_grad()
            return ddp.module.a.unique().tolist(), ddp.module.b.unique().tolist()

        # Per step a: 0.5 + 3, b: 4 + 2.
        assert ranks.run(program) == [([-6.0], [-11.0])] * 2

    def test_inside_no_sync_gradients_are_the_caller_s(self):
        ranks = Ranks(2, Weights("a"), **SHARDED)

        def program(rank, ddp):
            with ddp.no_sync():
                ddp(a=rank + 1).backward()
            return grads(ddp.module)

        assert ranks.run(program) == [{"a": 1.0}, {"a": 2.0}]

    def test_a_gradient_the_caller_puts_in_its_place_counts(self):
        ranks = Ranks(2, Weights("a"), **SHARDED)

        def program(rank, ddp):
            ddp(a=1).backward()
            ddp.module.a.grad = torch.full((100,), 4.0 * rank)
            ddp.finish_grad_sync(force_all_reduce=True)
            return grads(ddp.module)

        assert ranks.run(program) == [{"a": 2.0}] * 2

    def test_a_model_whose_gradients_are_withheld_is_garbage_like_any_other(self):
        ddp = DistributedDataParallel(Weights("a"), DistributedDataParallelConfig(**SHARDED))
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(a=1).backward()
        gone = [weakref.ref(one) for one in (ddp, ddp.module, ddp.module.a, ddp.bucket_groups[0], optimizer)]

        del ddp, optimizer
        gc.collect()

        assert [one() for one in gone] == [None] * 5


class TestAllReduce:
    @pytest.mark.parametrize("completion", ["immediate", "manual"])
    @pytest.mark.parametrize("starts", [False, True])
    def test_before_an_explicit_finish_it_is_refused_and_afterwards_right(self, starts, completion):
        ranks = Ranks(2, Weights("ab"), finish="explicit", completion=completion, **PER_VECTOR)

        def program(rank, ddp):
            seen = []
            for _ in range(2):
                ddp(a=6 * rank, b=0).backward()
                if starts:
                    ddp.start_grad_sync()
                seen.append(refusal_of(clip, ddp.parameters()))
                ddp.finish_grad_sync()
                seen.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 15.0).item())
                ddp.zero_grad()
            return seen

        text = "linalg_vector_norm was called on the gradient of 'a', " + NOT_REDUCED
        assert ranks.run(program) == [[text, 30.0] * 2] * 2

    def test_of_a_step_that_is_left_out_nothing_stays(self):
        ranks = Ranks(2, Weights("a"), finish="explicit", nonfinite_gradients="skip_step")

        def program(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            seen = []
            for amount in (float("inf"), 2.0):
                ddp(a=amount * rank if rank else 0.0).backward()
                ddp.finish_grad_sync()
                seen.append(grads(ddp.module))
                optimizer.step()
                optimizer.zero_grad()
            return seen, ddp.module.a.unique().tolist()

        assert ranks.run(program) == [([{"a": None}, {"a": 1.0}], [0.0])] * 2
