"""``DistributedOptimizer``: the arithmetic of the torch optimizer it is given, on this rank's flat float32 shards."""

import copy
import math

import pytest
import torch
from optim_ranks import odd_loss, odd_model

from megabucket import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup
from megabucket.errors import (
    ConfigError,
    LateGradientError,
    NonFiniteGradientError,
    OptimizerParametersError,
    PhaseError,
    UnreducedGradientsError,
    UnusedParameterError,
)
from megabucket.optim import kernels
from megabucket.optim.norm import l2_norm
from megabucket.testing import LoopbackWorld

ALL_REDUCE = {}
SHARDED = {"use_distributed_optimizer": True}
MODES = pytest.mark.parametrize("switches", [ALL_REDUCE, SHARDED], ids=["all_reduce", "reduce_scatter"])


class Weights(torch.nn.Module):
    """Named vectors; the gradient of each is the factor (a number or one per element) it is used with."""

    def __init__(self, names="ab", numel=100, dtype=torch.float32):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(numel, dtype=dtype)))

    def forward(self, **factors):
        return sum((getattr(self, name) * factor).sum() for name, factor in factors.items())


def wrap(model, **switches):
    return DistributedDataParallel(model, DistributedDataParallelConfig(**switches))


def sgd(ddp, lr=1.0, **kwargs):
    return DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=lr), ddp, **kwargs)


def run_ranks(size, model, program, **switches):
    """Wrap a copy of ``model`` on each rank of a loopback world, call ``program(rank, ddp)``; returns world and results."""
    world, models = LoopbackWorld(size), [copy.deepcopy(model) for _ in range(size)]
    config = DistributedDataParallelConfig(**switches)

    def play(rank):
        return program(rank, DistributedDataParallel(models[rank], config, communicator=world.communicator(rank)))

    return world, world.run(play)


class TestAgainstTorch:
    @MODES
    def test_one_rank_with_a_fused_kernel_is_the_same_up_to_how_the_kernel_vectorizes(self, switches):
        # The kernel takes eight elements at a time and rounds the rest in another way; flat shards have other rests.
        plain, wrapped = odd_model(), odd_model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
        ddp = wrap(wrapped, bucket_size=20, **switches)
        distributed = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True), ddp)

        for step in range(5):
            for model, stepper in ((plain, optimizer), (wrapped, distributed)):
                odd_loss(model, step).backward()
                stepper.step()
                stepper.zero_grad()

        for (name, expected), found in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)

    @MODES
    @pytest.mark.parametrize("size", [2, 3])
    def test_several_ranks_are_one_process_on_the_mean_gradient(self, size, switches):
        plain = odd_model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(5):
            sum(odd_loss(plain, 10 * step + rank) / size for rank in range(size)).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        def train(rank, ddp):
            distributed = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp, clip_grad=0.5)
            for step in range(5):
                odd_loss(ddp.module, 10 * step + rank).backward()
                assert distributed.step().updated
                distributed.zero_grad()
            return ddp.module

        _, models = run_ranks(size, odd_model(), train, bucket_size=20, **switches)

        for model in models:
            for (name, expected), found, first in zip(
                plain.named_parameters(), model.parameters(), models[0].parameters(), strict=True
            ):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
                assert torch.equal(found, first), name

    def test_reduce_scatter_all_reduce_and_overlap_are_bitwise_the_same(self):
        def train(rank, ddp):
            distributed = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp, clip_grad=0.5)
            norms = []
            for step in range(4):
                odd_loss(ddp.module, 10 * step + rank).backward()
                norms.append(distributed.step().grad_norm)
                distributed.zero_grad()
            ddp.finish_param_sync()
            return norms, [param.detach().clone() for param in ddp.module.parameters()]

        ways = [
            {},
            {"overlap_grad_reduce": False},
            SHARDED,
            {**SHARDED, "overlap_param_gather": True},
            {**SHARDED, "overlap_grad_reduce": False},
        ]
        results = [run_ranks(3, odd_model(), train, bucket_size=20, **switches)[1] for switches in ways]

        norms, params = results[0][0]
        for ranks in results:
            for other_norms, other_params in ranks:
                assert other_norms == norms
                assert all(torch.equal(a, b) for a, b in zip(params, other_params, strict=True))


class Counting(torch.optim.Optimizer):
    """Counts in its groups, and skips empty ones, as FusedAdam of apex and Transformer Engine do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / group["step"])


class FromItsConstructor(torch.optim.Optimizer):
    """Makes all state in its constructor, as Adagrad of torch 2.11 does."""

    def __init__(self, params):
        super().__init__(params, {})
        for param in [param for group in self.param_groups for param in group["params"]]:
            self.state[param] = {"sum": torch.zeros_like(param)}

    def step(self, closure=None):
        for param in [param for group in self.param_groups for param in group["params"]]:
            if param.grad is not None:
                total = self.state[param]["sum"]
                total += param.grad.abs()
                param.sub_(param.grad / total)


class TestGroups:
    @MODES
    def test_every_group_keeps_its_own_hyperparameters(self, switches):
        def train(rank, ddp):
            module = ddp.module
            groups = [{"params": [module.a, module.c]}, {"params": [module.b], "lr": 0.25, "weight_decay": 0.0}]
            optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=1.0), ddp)
            ddp(a=2, b=2, c=4).backward()
            optimizer.step()
            return [vector.unique().tolist() for vector in (module.a, module.b, module.c)]

        _, results = run_ranks(2, Weights("abc"), train, **switches)

        assert results == [[[-1.0], [0.5], [-3.0]]] * 2  # 1 - 2, 1 - 0.25 * 2, 1 - 4

    def test_the_groups_hold_the_parameters_of_the_module_and_stay_the_objects_they_were(self):
        ddp = wrap(Weights("ab", dtype=torch.bfloat16), **SHARDED)
        torch_optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        (group,) = torch_optimizer.param_groups
        params = group["params"]

        optimizer = DistributedOptimizer(torch_optimizer, ddp)

        assert optimizer.param_groups is torch_optimizer.param_groups
        assert optimizer.param_groups[0] is group
        assert group["params"] is params
        assert list(map(id, params)) == list(map(id, ddp.module.parameters()))
        (twin_group,) = optimizer.sharding.updates[0].twin.param_groups
        assert [(shard.ndim, shard.dtype, shard.numel()) for shard in twin_group["params"]] == [(1, torch.float32, 228)]

    def test_a_group_of_which_a_rank_owns_nothing_steps_on_a_tensor_without_elements_there(self):
        def program(rank, ddp):
            groups = [{"params": [ddp.module.a]}, {"params": [ddp.module.b]}]
            optimizer = DistributedOptimizer(torch.optim.AdamW(groups, lr=1.0, weight_decay=0.5), ddp)
            ddp(a=2.0, b=2.0).backward()
            optimizer.step()
            mains = [main for group in optimizer.sharding.updates[0].twin.param_groups for main in group["params"]]
            return [main.numel() for main in mains], [main in optimizer.sharding.updates[0].twin.state for main in mains]

        # b at [0, 100) belongs to rank 0, a at [128, 228) to rank 1
        assert run_ranks(2, Weights("ab"), program, **SHARDED)[1] == [([0, 100], [True, True]), ([100, 0], [True, True])]

    def test_state_that_only_the_constructor_makes_is_there_too(self):
        def program(rank, ddp):
            groups = [{"params": [ddp.module.a]}, {"params": [ddp.module.b]}]
            optimizer = DistributedOptimizer(FromItsConstructor(groups), ddp)
            for _ in range(2):
                ddp(a=2.0, b=4.0).backward()
                optimizer.step()
                optimizer.zero_grad()
            return ddp.module.a.unique().tolist(), ddp.module.b.unique().tolist()

        # 1 - 2 / 2 - 2 / 4, and alike with 4
        assert run_ranks(4, Weights("ab"), program, **SHARDED)[1] == [([-0.5], [-0.5])] * 4

    @pytest.mark.parametrize("path", ["straight on", "state_dict", "checkpoint", "rebuild"])
    def test_an_optimizer_that_counts_in_its_groups_and_skips_empty_ones_counts_alike_on_all_ranks(self, path, tmp_path):
        def program(rank, ddp):
            def train(steps):
                for _ in range(steps):
                    ddp(a=3.0, b=6.0).backward()
                    optimizer.step()
                    optimizer.zero_grad()

            groups = [{"params": [ddp.module.a]}, {"params": [ddp.module.b]}]
            optimizer = DistributedOptimizer(Counting(groups), ddp)
            train(2)
            if path == "state_dict":
                state = optimizer.state_dict()
                for group in optimizer.param_groups:
                    group["step"] = 7
                optimizer.load_state_dict(state)
            elif path == "checkpoint":
                save_checkpoint(tmp_path, ddp, optimizer, step=2)
                train(3)
                load_checkpoint(tmp_path, ddp, optimizer)
            elif path == "rebuild":
                ddp.rebuild()
            train(1)
            counts = [group["step"] for group in optimizer.state_dict()["param_groups"]]
            return counts, ddp.module.a.unique().tolist(), ddp.module.b.unique().tolist()

        # 1 - 3 * (1 + 1/2 + 1/3) = -4.5 and 1 - 6 * (1 + 1/2 + 1/3) = -10
        assert run_ranks(4, Weights("ab"), program, **SHARDED)[1] == [([3, 3], [-4.5], [-10.0])] * 4

    def test_a_rank_that_owns_nothing_but_padding_steps_with_the_others(self):
        def train(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.5), ddp, clip_grad=1.0)
            ddp(a=2.0).backward()
            result = optimizer.step()
            return len(optimizer.sharding.shards), result.updated, result.grad_norm, ddp.module.a[0].item()

        results = run_ranks(8, Weights("a"), train, **SHARDED)[1]

        # 128 elements, shards of 16, 100 of them used: rank 7 owns none. Norm: sqrt(100 * 2 * 2) = 20.
        assert [num_shards for num_shards, *_ in results] == [1] * 7 + [0]
        assert {(updated, norm) for _, updated, norm, _ in results} == {(True, 20.0)}
        assert len({value for *_, value in results}) == 1


class TestMainParameters:
    @MODES
    def test_updates_too_small_for_16_bits_add_up_in_float32(self, switches):
        ddp = wrap(Weights("a", dtype=torch.bfloat16), **switches)
        optimizer = sgd(ddp, lr=2.0**-10)

        for _ in range(8):  # bfloat16 next to 1 has steps of 2**-8 (below: 2**-9): a single update would be rounded away
            ddp(a=1).backward()
            optimizer.step()
            optimizer.zero_grad()

        assert ddp.module.a[0].item() == 1 - 8 * 2.0**-10

    def test_a_float64_model_steps_in_float64(self):
        ddp = wrap(Weights("a", dtype=torch.float64))
        optimizer = sgd(ddp, lr=2.0**-40)
        ddp(a=1).backward()

        optimizer.step()

        assert ddp.module.a[0].item() == 1 - 2.0**-40

    def test_a_16_bit_gradient_buffer_is_widened_for_the_step(self):
        ddp = wrap(Weights("a", dtype=torch.bfloat16), grad_reduce_in_fp32=False)
        optimizer = sgd(ddp, lr=0.5)
        ddp(a=3).backward()

        result = optimizer.step()

        assert result.grad_norm == 30.0  # sqrt(100 * 9)
        assert ddp.module.a[0].item() == -0.5

    def test_values_written_past_the_optimizer_are_taken_over_on_request(self):
        ddp = wrap(Weights("a", dtype=torch.bfloat16))
        optimizer = sgd(ddp)
        ddp.module.a.detach().fill_(8)

        optimizer.reload_main_params()
        ddp(a=1).backward()
        optimizer.step()

        assert ddp.module.a[0].item() == 7.0

    def test_padding_between_parameters_stays_zero(self):
        ddp = wrap(Weights("ab"))
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.1), ddp)
        for _ in range(3):
            ddp(a=1, b=2).backward()
            optimizer.step()
            optimizer.zero_grad()

        data = ddp.param_and_grad_buffers[0].param_data  # b at [0, 100), a at [128, 228)

        assert data[100:128].count_nonzero() == data[228:].count_nonzero() == 0


class TestStepResult:
    @MODES
    def test_a_step_says_that_it_updated_and_the_norm_before_clipping(self, switches):
        def step(rank, ddp):
            optimizer = sgd(ddp, clip_grad=1.0)
            ddp(a=2 * 4 * rank).backward()  # mean 4
            return optimizer.step(), ddp.module.a.unique().tolist()

        _, results = run_ranks(2, Weights("a", numel=4), step, **switches)

        for result, values in results:
            assert (result.updated, result.grad_norm, result.reason) == (True, 8.0, "")  # sqrt(4 * 16)
            assert values == pytest.approx([0.5])  # 1 - 4 / 8

    @MODES
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_an_allowed_gradient_that_is_not_finite_updates_nothing_on_any_rank_and_is_named(self, value, switches):
        def step(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.5), ddp, clip_grad=1.0)
            ddp(a=value if rank == 0 else 1.0, b=1).backward()
            result = optimizer.step()
            module = ddp.module
            return result.updated, math.isfinite(result.grad_norm), result.reason, module.a[0].item(), len(optimizer.state)

        _, results = run_ranks(2, Weights("ab"), step, nonfinite_gradients="allow", **switches)

        # Reduce-scatter: b at [0, 100) belongs to rank 0, a at [128, 228) to rank 1.
        norm = "nan" if math.isnan(value) or switches is SHARDED else "inf"
        named = "not finite in this rank's shard of 'a'"
        culprits = ["not finite on another rank", named] if switches is SHARDED else [named, named]
        for (updated, finite, reason, weight, num_states), culprit in zip(results, culprits, strict=True):
            assert (updated, finite, weight, num_states) == (False, False, 1.0, 0)
            assert reason in (f"the gradient norm is {norm}: {culprit}", f"the gradient norm is {value}: {culprit}")

    @MODES
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_step_that_is_to_be_skipped_updates_nothing_on_any_rank_and_says_why(self, value, switches):
        def step(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.5), ddp, clip_grad=1.0)
            ddp(a=value if rank == 1 else 1.0, b=1).backward()
            result = optimizer.step()
            module = ddp.module
            assert (result.updated, math.isnan(result.grad_norm), len(optimizer.state)) == (False, True, 0)
            assert (module.a.unique().tolist(), module.b.unique().tolist()) == ([1.0], [1.0])
            return result.reason

        _, (first, second) = run_ranks(2, Weights("ab"), step, nonfinite_gradients="skip_step", **switches)

        assert first == second
        kind = "nan" if math.isnan(value) else "inf"
        assert f"the gradient of 'a' on rank 1 (bucket 0 of 1, counted from 0) has {kind} in 100 of 100 elements" in first

    @MODES
    @pytest.mark.parametrize("policy", ["allow", "skip_step"])
    def test_the_step_after_a_skipped_one_is_right(self, policy, switches):
        def steps(rank, ddp):
            optimizer = sgd(ddp, clip_grad=1000.0)
            ddp(a=math.nan, b=1).backward()
            optimizer.step()
            optimizer.zero_grad()
            ddp(a=2 * rank, b=3).backward()
            result = optimizer.step()
            return result.updated, ddp.module.a[0].item(), ddp.module.b[0].item()

        results = run_ranks(2, Weights("ab"), steps, nonfinite_gradients=policy, **switches)[1]
        assert results == [(True, 0.0, -2.0)] * 2

    @MODES
    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    @pytest.mark.parametrize("clears", [True, False])
    def test_by_default_it_is_an_error_on_all_ranks_and_the_next_step_is_right(self, value, clears, switches):
        def steps(rank, ddp):
            optimizer = sgd(ddp)

            def step(factor):
                ddp(a=1, b=factor).backward()
                return optimizer.step()

            with pytest.raises(NonFiniteGradientError) as caught:
                step(value if rank == 1 else 1.0)
            assert ddp.module.a.unique().tolist() == [1.0]
            if clears:
                optimizer.zero_grad()
            assert step(2 * rank).updated
            return str(caught.value), caught.value.to_dict(), ddp.module.b.unique().tolist()

        _, (first, second) = run_ranks(2, Weights("ab"), steps, bucket_size=1, **switches)

        assert first == second
        _, fields, values = first
        assert values == [0.0]  # 1 - mean(0, 2)
        assert (fields["rank"], fields["param"], fields["step"], fields["num_others"]) == (1, "b", 0, 0)
        assert (fields["bucket"], fields["num_buckets"]) == (0, 2)
        assert fields["finding"] == f"{'nan' if math.isnan(value) else 'inf'} in 100 of 100 elements, first at [0]"

    def test_a_plain_optimizer_does_nothing_in_a_step_that_is_to_be_skipped(self):
        def steps(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.5, weight_decay=0.5)
            found = []
            for factor in (math.inf if rank == 0 else 1.0, 2 * rank):
                ddp(a=factor, b=1).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append((ddp.module.a.unique().tolist(), ddp.module.b.unique().tolist()))
            return found

        results = run_ranks(2, Weights("ab"), steps, nonfinite_gradients="skip_step")[1]

        # then 1 - (mean(0, 2) + 0.5 * 1), and the same of b
        assert results == [[([1.0], [1.0]), ([-0.5], [-0.5])]] * 2

    def test_the_largest_finite_gradients_are_no_false_alarm(self):
        def step(rank, ddp):
            optimizer = DistributedOptimizer(torch.optim.Adagrad(ddp.parameters(), lr=1.0), ddp)
            ddp(a=torch.finfo(torch.float32).max / 2).backward()
            return optimizer.step().updated

        # float32: the sum of 100 such gradients is infinite, and so is the float64 sum of their squares only from 1e154 on
        assert run_ranks(2, Weights("a"), step)[1] == [True, True]

    def test_finite_gradients_with_an_infinite_norm_are_not_blamed_on_another_rank(self):
        ddp = wrap(Weights("a", dtype=torch.float64))
        optimizer = sgd(ddp)
        ddp(a=1e200).backward()

        result = optimizer.step()

        assert not result.updated
        assert result.reason == "the gradient norm is inf: every gradient is finite, but the sum over them is not"

    def test_many_culprits_are_cut_at_five_names(self):
        ddp = wrap(Weights("abcdefg"), nonfinite_gradients="allow")
        optimizer = sgd(ddp)
        ddp(**dict.fromkeys("abcdefg", math.nan)).backward()

        assert optimizer.step().reason == (
            "the gradient norm is nan: not finite in this rank's shard of 'g', 'f', 'e', 'd', 'c' and 2 more"
        )


class TestOneStep:
    def test_collectives_of_a_step_are_one_per_bucket_and_direction_and_the_fence_and_the_norm(self):
        def train(rank, ddp):
            optimizer = sgd(ddp)
            for _ in range(2):
                ddp(a=1, b=1).backward()
                optimizer.step()
                optimizer.zero_grad()

        world, _ = run_ranks(2, Weights("ab"), train, bucket_size=1, init_sync=False, **SHARDED)

        labels = [text.split(" [")[0] for text in world.schedule(0)]
        step = ["bucket 0", "bucket 1", "fence", "grad norm", "param gather 1", "param gather 0"]
        assert labels == ["wrap", "wrap: buffers", "DistributedOptimizer()", *step, *step]

    def test_with_all_reduce_there_is_nothing_but_the_buckets_and_the_fence(self):
        def train(rank, ddp):
            optimizer = sgd(ddp, clip_grad=1.0)
            ddp(a=1, b=1).backward()
            optimizer.step()

        world, _ = run_ranks(2, Weights("ab"), train, bucket_size=1, init_sync=False)

        labels = [text.split(" [")[0] for text in world.schedule(1)]
        assert labels == ["wrap", "wrap: buffers", "DistributedOptimizer()", "bucket 0", "bucket 1", "fence"]

    @staticmethod
    def acts_of_a_step(monkeypatch, *, finishes_before):
        """The waits for buckets and the norms of shards, by the value in them, in their order; and the norm of all."""
        ddp = wrap(Weights("ab"), bucket_size=1, **SHARDED)
        acts = []
        wait = _ParamAndGradBucketGroup.finish_grad_sync

        def finish(group, *, waits=True):
            if waits and group.grad_phase is not GradPhase.REDUCED:
                acts.append(f"wait {group.index}")
            wait(group, waits=waits)

        def take_norm(grad):
            acts.append(f"norm {grad[0]:g}")
            return l2_norm(grad)

        monkeypatch.setattr(_ParamAndGradBucketGroup, "finish_grad_sync", finish)
        monkeypatch.setattr(kernels, "TORCH", kernels.TORCH._replace(l2_norm=take_norm))
        optimizer = sgd(ddp)
        ddp(a=1, b=2).backward()
        if finishes_before:
            ddp.finish_grad_sync()
            ddp.scale_gradients(10.0)
        return acts, optimizer.step().grad_norm

    def test_the_norm_of_a_bucket_is_taken_while_the_next_one_is_on_its_way(self, monkeypatch):
        acts, grad_norm = self.acts_of_a_step(monkeypatch, finishes_before=False)

        assert acts == ["wait 0", "norm 2", "wait 1", "norm 1"]
        assert grad_norm == pytest.approx((100 * (2**2 + 1**2)) ** 0.5)

    def test_the_norm_of_buckets_that_were_finished_before_is_that_at_the_step(self, monkeypatch):
        acts, grad_norm = self.acts_of_a_step(monkeypatch, finishes_before=True)

        assert acts == ["wait 0", "wait 1", "norm 20", "norm 10"]
        assert grad_norm == pytest.approx(10 * (100 * (2**2 + 1**2)) ** 0.5)

    @MODES
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_zero_grad_starts_anew(self, switches, set_to_none):
        ddp = wrap(Weights("a"), **switches)
        optimizer = sgd(ddp)
        for _ in range(2):
            ddp(a=1).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        assert ddp.module.a[0].item() == -1.0

    def test_scaled_gradients_are_what_is_stepped_on(self):
        ddp = wrap(Weights("a"), finish="explicit", grad_reduction="sum", **SHARDED)
        optimizer = sgd(ddp)
        ddp(a=6).backward()
        ddp.finish_grad_sync()
        ddp.scale_gradients(0.5)  # per-token loss: one over the number of tokens

        assert optimizer.step().grad_norm == 30.0  # sqrt(100 * 9)
        assert ddp.module.a[0].item() == -2.0


class TestRefusedSteps:
    @MODES
    def test_without_any_backward(self, switches):
        optimizer = sgd(wrap(Weights("a"), **switches))

        with pytest.raises(UnreducedGradientsError) as caught:
            optimizer.step()

        assert str(caught.value) == (
            "step() was called, but the gradients are not reduced: since the last step or zero_grad(), no backward has run "
            "outside no_sync(), or finish_grad_sync() was not called where the config leaves that to the caller "
            "(finish='explicit'). Run the last backward of the step outside no_sync(), or call finish_grad_sync() yourself; "
            "clear gradients after step(), not before. To step on the gradients of one rank alone (local SGD), use the "
            "module without a wrapper."
        )

    @MODES
    def test_with_backwards_in_no_sync_only(self, switches):
        ddp = wrap(Weights("a"), **switches)
        optimizer = sgd(ddp)
        with ddp.no_sync():
            ddp(a=1).backward()

        with pytest.raises(UnreducedGradientsError):
            optimizer.step()

        assert ddp.module.a[0].item() == 1.0

    @MODES
    def test_before_an_explicit_finish(self, switches):
        ddp = wrap(Weights("a"), finish="explicit", **switches)
        optimizer = sgd(ddp)
        ddp(a=1).backward()

        with pytest.raises(UnreducedGradientsError):
            optimizer.step()
        ddp.finish_grad_sync()

        assert optimizer.step().updated

    def test_after_a_launch_the_step_itself_finishes(self):
        ddp = wrap(Weights("a"), **SHARDED)
        optimizer = sgd(ddp)
        with ddp.no_sync():
            ddp(a=1).backward()
        ddp.start_grad_sync()

        assert optimizer.step().updated

    def test_on_reduce_scattered_gradients_that_were_not_cleared(self):
        ddp = wrap(Weights("a"), **SHARDED)
        optimizer = sgd(ddp)
        ddp(a=1).backward()
        optimizer.step()
        ddp(a=1).backward()

        with pytest.raises(LateGradientError, match="is already reduced"):
            optimizer.step()
        assert ddp.module.a[0].item() == 0.0  # the first step only


class TestScheduler:
    """Warnings are errors here, so a scheduler that believes that no step was taken fails."""

    @staticmethod
    def train(ddp, optimizer, scheduler):
        rates = []
        for _ in range(3):
            ddp(a=1).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, ddp.module.a[0].item()

    @pytest.mark.parametrize("when", ["before", "on the torch optimizer", "on the distributed optimizer"])
    def test_a_scheduler_works_wherever_it_was_built(self, when):
        ddp = wrap(Weights("a"))
        torch_optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        schedulers = [torch.optim.lr_scheduler.StepLR(torch_optimizer, 1, gamma=0.5)] if when == "before" else []
        optimizer = DistributedOptimizer(torch_optimizer, ddp)
        target = optimizer if when == "on the distributed optimizer" else torch_optimizer
        schedulers = schedulers or [torch.optim.lr_scheduler.StepLR(target, 1, gamma=0.5)]

        assert self.train(ddp, optimizer, schedulers[0]) == ([0.5, 0.25, 0.125], -0.75)  # 1 - (1 + 0.5 + 0.25)

    def test_the_learning_rate_may_be_written_by_hand(self):
        ddp = wrap(Weights("a"))
        optimizer = sgd(ddp)
        optimizer.param_groups[0]["lr"] = 0.25
        ddp(a=1).backward()

        optimizer.step()

        assert ddp.module.a[0].item() == 0.75


class TestAsATorchOptimizer:
    def test_it_is_one(self):
        optimizer = sgd(wrap(Weights("a")))

        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.defaults["lr"] == 1.0

    def test_state_is_that_of_the_torch_optimizer(self):
        ddp = wrap(Weights("a"))
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp)
        ddp(a=1).backward()
        optimizer.step()

        (shard,) = optimizer.param_groups[0]["params"]

        assert set(optimizer.state[shard]) == {"step", "exp_avg", "exp_avg_sq"}

    def test_step_hooks_run(self):
        ddp, seen = wrap(Weights("a")), []
        optimizer = sgd(ddp)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        ddp(a=1).backward()

        optimizer.step()

        assert seen == ["before", "after"]

    @pytest.mark.parametrize(
        ("switches", "text"),
        [
            (SHARDED, "DistributedOptimizer on shards (1 flat tensors on this rank) of\nSGD"),
            (ALL_REDUCE, "on whole buffers (1"),
        ],
        ids=["reduce_scatter", "all_reduce"],
    )
    def test_its_text_says_what_it_steps_on(self, switches, text):
        assert text in repr(sgd(wrap(Weights("ab"), **switches)))

    def test_an_unknown_attribute_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="nonsense"):
            sgd(wrap(Weights("a"))).nonsense  # noqa: B018


class TestRefusedOptimizers:
    @staticmethod
    def refusal(kind, build, model=None, **switches):
        ddp = wrap(Weights("ab") if model is None else model, **switches)
        torch_optimizer = build(ddp)
        params = [list(group["params"]) for group in torch_optimizer.param_groups]
        with pytest.raises(kind) as caught:
            DistributedOptimizer(torch_optimizer, ddp)
        after = [group["params"] for group in torch_optimizer.param_groups]
        assert all(a is b for before, now in zip(params, after, strict=True) for a, b in zip(before, now, strict=True))
        return str(caught.value)

    def test_one_over_parameters_that_the_wrapper_does_not_hold(self):
        def build(ddp):
            stray = torch.nn.Parameter(torch.ones(2, 3))
            return torch.optim.SGD([{"params": ddp.parameters()}, {"params": [torch.zeros(3), stray]}], lr=1.0)

        assert self.refusal(OptimizerParametersError, build) == (
            "the optimizer has parameters that the wrapper does not hold, so their gradients are never reduced: 'group 1, "
            "parameter 1, shape (2, 3)'. Build the optimizer over the wrapped parameters; before ddp.rebuild(), put "
            "new ones into the module or out of the group."
        )

    def test_one_that_leaves_a_trainable_parameter_out(self):
        assert self.refusal(OptimizerParametersError, lambda ddp: torch.optim.SGD([ddp.module.a], lr=1.0)) == (
            "trainable parameters of the wrapper are in no group of the optimizer and would never be updated: 'b'. Add them "
            "with optimizer.add_param_group(), also those of another optimizer, or freeze them with requires_grad_(False) "
            "before wrapping or ddp.rebuild()."
        )

    def test_one_with_the_same_parameter_twice(self):
        def build(ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            optimizer.param_groups[0]["params"].append(ddp.module.a)  # torch itself only warns about this
            return optimizer

        assert self.refusal(OptimizerParametersError, build) == (
            "the optimizer has the same parameter twice: 'a'. Put each parameter into one group."
        )

    def test_one_that_is_wrapped_already(self):
        ddp = wrap(Weights("a"))
        optimizer = sgd(ddp)

        with pytest.raises(ConfigError, match="a DistributedOptimizer cannot be inside another one"):
            DistributedOptimizer(optimizer, ddp)

    @pytest.mark.parametrize("clip_grad", [-1.0, math.nan, math.inf, True, None, "1"])
    def test_a_limit_that_is_no_limit(self, clip_grad):
        ddp = wrap(Weights("a"))

        with pytest.raises(ConfigError) as caught:
            sgd(ddp, clip_grad=clip_grad)

        assert str(caught.value) == (f"clip_grad must be a finite number >= 0 (0 switches clipping off), got {clip_grad!r}")


class TestGradientsChangedAfterTheSync:
    """With all-reduce, what the caller does to ``param.grad`` between backward and step counts."""

    def stepped(self, change):
        model = wrap(Weights("ab"))
        optimizer = sgd(model)
        model(a=2, b=3).backward()
        change(model.module)
        optimizer.step()
        return {name: param.unique().item() for name, param in model.module.named_parameters()}

    def test_a_replaced_gradient_is_the_one_that_is_stepped_on(self):
        def halve_a(module):
            module.a.grad = module.a.grad * 0.5

        untouched, halved = self.stepped(lambda _: None), self.stepped(halve_a)

        assert 1 - halved["a"] == (1 - untouched["a"]) / 2
        assert halved["b"] == untouched["b"]

    def test_a_cleared_gradient_is_refused_by_name(self):
        def clear_a(module):
            module.a.grad = None

        with pytest.raises(PhaseError, match="the gradient of 'a' was cleared between the gradient sync and step"):
            self.stepped(clear_a)


def test_loading_keeps_the_precision_of_main_parameters_that_were_not_written():
    module = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 1, dtype=torch.bfloat16), "y": torch.nn.Linear(2, 1)})
    optimizer = sgd(wrap(module))
    main = next(shard.main for shard in optimizer.sharding.shards if shard.has_own_values)
    with torch.no_grad():
        main.mul_(1 + 2**-12)  # a sixteenth of a step of bfloat16: the model's values stay as they are
    before = main.clone()

    module["y"].load_state_dict(module["y"].state_dict())
    optimizer.reload_main_params()

    assert torch.equal(main, before)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_after_a_caught_error_about_the_gradients_nothing_steps_until_they_are_cleared(is_sharded):
    model = wrap(Weights("ab"), use_distributed_optimizer=is_sharded)
    optimizer = sgd(model)

    def step_without_b():
        model(a=2).backward()
        optimizer.step()

    with pytest.raises(UnusedParameterError):
        step_without_b()
    with pytest.raises(PhaseError, match="an error about them was raised before"):
        optimizer.step()
    optimizer.zero_grad()
    model(a=2, b=3).backward()

    assert optimizer.step().updated
