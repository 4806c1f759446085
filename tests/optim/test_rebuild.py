"""``ddp.rebuild()``: the module changes, training goes on as if nothing had been sharded."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_ranks import odd_loss, odd_model

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import (
    LayoutMismatchError,
    NoTrainableParametersError,
    OptimizerParametersError,
    PeerFailedError,
    PhaseError,
    StorageMovedError,
    TrainabilityChangedError,
)
from megabucket.testing import LoopbackWorld

pytestmark = pytest.mark.long_file

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])

SHAPES = {"a": (100,), "b": (7, 9), "c": (), "d": (0, 3), "e": (2, 3, 2, 2)}

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


class Tensors(torch.nn.Module):
    """Named tensors; the gradient of each is the factor (one per element) it is multiplied by, whatever its value."""

    def __init__(self, names="abcde", dtype=torch.float32):
        super().__init__()
        for name in names:
            self.register_parameter(name, new_param(name, 0, dtype))

    def forward(self, factors):
        trained = {name: param for name, param in self.named_parameters() if param.requires_grad}
        return sum((param * factors[name].to(param.dtype)).sum() for name, param in trained.items())


def new_param(name, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * seed + ord(name[0]))
    values = torch.randn(SHAPES[name[0]], generator=generator).to(dtype)
    if values.dim() == 4:
        values = values.to(memory_format=torch.channels_last)
    return torch.nn.Parameter(values)


def factors_of(step, rank, names="abcdefgh"):
    """Small multiples of 12: sums over up to four ranks and their means are exact, also in bfloat16."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: 12.0 * torch.randint(-5, 6, SHAPES.get(name, (100,)), generator=generator) for name in names}


class Oracle:
    """Plain torch in one process, on float32 copies of the parameters, that gets the mean gradient of all ranks."""

    def __init__(self, build, size, dtype, names="abcde"):
        self.size, self.dtype = size, dtype
        self.mains = {name: self._main(name, 0) for name in names}
        self.optimizer = build(list(self.mains.values()))
        self.frozen = set()

    def _main(self, name, seed):
        return torch.nn.Parameter(new_param(name, seed, self.dtype).detach().float())

    def step(self, step):
        factors = [factors_of(step, rank) for rank in range(self.size)]
        for name, main in self.mains.items():
            main.grad = None if name in self.frozen else sum(one[name] for one in factors) / self.size
        self.optimizer.step()

    def replace(self, name, seed):
        self.mains[name] = self._main(name, seed)
        self.optimizer.add_param_group({"params": [self.mains[name]]})

    def values(self):
        return {name: main.detach().to(self.dtype) for name, main in self.mains.items()}

    def state(self):
        return {name: self.optimizer.state.get(main, {}) for name, main in self.mains.items() if main.numel()}


def bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def train(ddp, optimizer, steps, rank=0):
    for step in steps:
        ddp(factors_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def config_of(*, sharded, bucket_size=64, **switches):
    return DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=bucket_size, **switches)


def alone(*, sharded, build=OPTIMIZERS["AdamW"], dtype=torch.float32, names="abcde", **switches):
    """One rank: a wrapped model and its optimizer."""
    model = Tensors(names, dtype)
    torch_optimizer = build(model.parameters())
    ddp = DistributedDataParallel(model, config_of(sharded=sharded, **switches))
    return model, ddp, DistributedOptimizer(torch_optimizer, ddp)


def run_ranks(size, program, *, sharded, build=OPTIMIZERS["AdamW"], dtype=torch.float32, names="abcde", **switches):
    """Call ``program(rank, ddp, optimizer)`` on every rank of a loopback world; return the results."""
    world = LoopbackWorld(size)
    models = [Tensors(names, dtype) for _ in range(size)]
    optimizers = [build(model.parameters()) for model in models]
    config = config_of(sharded=sharded, **switches)

    def play(rank):
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        return program(rank, ddp, DistributedOptimizer(optimizers[rank], ddp))

    return world.run(play)


def whole_state(optimizer, ddp):
    """The state by name, as plain torch would hold it; a collective call. The optimizer is as it was afterwards."""
    optimizer.before_rebuild()
    state = {name: dict(optimizer.state.get(param, {})) for name, param in ddp.module.named_parameters() if param.numel()}
    optimizer.after_rebuild()
    return state


def assert_like(oracle, model, state=None):
    for name, expected in oracle.values().items():
        assert torch.equal(getattr(model, name), expected), name
    if state is not None:
        for name, expected in oracle.state().items():
            assert {k: bits(v) for k, v in state[name].items()} == {k: bits(v) for k, v in expected.items()}, name


EVENTS = st.dictionaries(st.sampled_from("abce"), st.sampled_from(["freeze", "unfreeze", "replace"]), max_size=3)
"""What is done to which parameters between two stretches of training; ``d``, which is empty, is always there."""


@given(
    batches=st.lists(EVENTS, min_size=1, max_size=4),
    build=st.sampled_from(list(OPTIMIZERS.values())),
    size=st.integers(1, 4),
    sharded=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bucket_size=st.sampled_from([1, 64, 200, None]),
)
@settings(max_examples=settings.default.max_examples * 3 // 10)  # each trains and rebuilds up to four times
def test_any_history_of_changes_trains_as_plain_torch_bit_by_bit(batches, build, size, sharded, dtype, bucket_size):
    oracle = Oracle(build, size, dtype)
    for index, events in enumerate(batches):
        for name, kind in events.items():
            if kind == "replace":
                oracle.replace(name, seed=index + 1)
            (oracle.frozen.add if kind == "freeze" else oracle.frozen.discard)(name)
        oracle.step(2 * index)
        oracle.step(2 * index + 1)

    def play(rank, ddp, optimizer):
        for index, events in enumerate(batches):
            for name, kind in events.items():
                if kind == "replace":
                    replacement = new_param(name, index + 1, dtype)
                    setattr(ddp.module, name, replacement)
                    optimizer.add_param_group({"params": [replacement]})
                else:
                    getattr(ddp.module, name).requires_grad_(kind == "unfreeze")
            ddp.rebuild()
            train(ddp, optimizer, [2 * index, 2 * index + 1], rank)
        return ddp.module, whole_state(optimizer, ddp)

    for model, state in run_ranks(size, play, sharded=sharded, build=build, dtype=dtype, bucket_size=bucket_size):
        assert_like(oracle, model, state)


@MODES
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_rank_of_a_real_model_is_bitwise_plain_torch_through_freezing_unfreezing_and_replacing(build, sharded):
    plain, wrapped = odd_model(), odd_model()
    plain_optimizer, torch_optimizer = build(plain.parameters()), build(wrapped.parameters())
    ddp = DistributedDataParallel(wrapped, config_of(sharded=sharded, bucket_size=20, overlap_param_gather=sharded))
    distributed = DistributedOptimizer(torch_optimizer, ddp)

    def change(model, optimizer, phase):
        if phase == 1:
            model.body.requires_grad_(False)
        elif phase == 2:
            model.frozen.requires_grad_(True)
            model.scale.requires_grad_(False)
        elif phase == 3:
            model.body.requires_grad_(True)
            torch.manual_seed(5)
            model.frozen = torch.nn.Linear(5, 5)
            optimizer.add_param_group({"params": model.frozen.parameters(), "lr": 0.02})
        elif phase == 4:
            model.scale.requires_grad_(True)

    for phase in range(5):
        change(plain, plain_optimizer, phase)
        ddp.finish_param_sync()
        change(wrapped, distributed, phase)
        ddp.rebuild()
        for seed in range(10 * phase, 10 * phase + 3):
            for model, optimizer in ((plain, plain_optimizer), (wrapped, distributed)):
                odd_loss(model, seed).backward()
                optimizer.step()
                optimizer.zero_grad()

    ddp.finish_param_sync()
    for (name, expected), found in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(expected, found), name


class TestGroups:
    @MODES
    def test_hyperparameters_and_schedulers_go_on(self, sharded):
        plain, (model, ddp, optimizer) = Tensors(), alone(sharded=sharded)
        plain_optimizer = OPTIMIZERS["AdamW"](plain.parameters())
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (plain_optimizer, optimizer)]

        for step in range(6):
            if step in (2, 4):
                for one in (plain, model):
                    one.a.requires_grad_(step == 4)
                ddp.rebuild()
            for one, stepper, scheduler in zip((plain, ddp), (plain_optimizer, optimizer), schedulers, strict=True):
                one(factors_of(step, 0)).backward()
                stepper.step()
                stepper.zero_grad()
                scheduler.step()

        assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"] == 0.01 * 0.5**6
        for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, found), name

    def test_a_parameter_that_was_appended_to_a_group_is_trained_in_it(self):
        model, ddp, optimizer = alone(sharded=True, names="a", build=lambda params: torch.optim.SGD(params, lr=1.0))
        model.b = new_param("b", 1)
        before = model.b.detach().clone()

        optimizer.param_groups[0]["params"].append(model.b)
        ddp.rebuild()
        train(ddp, optimizer, [0])

        assert torch.equal(model.b, before - factors_of(0, 0)["b"])

    def test_a_removed_parameter_leaves_the_group_and_the_state(self):
        model, ddp, optimizer = alone(sharded=True, names="ab")
        train(ddp, optimizer, [0])
        gone = weakref.ref(model.b)

        del model.b
        ddp.rebuild()
        optimizer.before_rebuild()

        assert optimizer.param_groups[0]["params"] == [model.a]
        assert set(optimizer.state) == {model.a}
        gc.collect()
        assert gone() is None

    def test_while_it_is_frozen_a_parameter_keeps_its_state_under_its_name(self):
        model, ddp, optimizer = alone(sharded=True, names="ab")
        train(ddp, optimizer, [0, 1])

        model.b.requires_grad_(False)
        ddp.rebuild()

        assert optimizer.state[model.b]["step"] == 2
        assert optimizer.state[model.b]["exp_avg"].shape == model.b.shape

    @MODES
    def test_an_added_parameter_that_differs_between_ranks_is_made_equal(self, sharded):
        def play(rank, ddp, optimizer):
            ddp.module.b = new_param("b", seed=rank + 1)
            optimizer.add_param_group({"params": [ddp.module.b]})
            ddp.rebuild()
            return ddp.module.b

        for param in run_ranks(2, play, sharded=sharded, names="a"):
            assert torch.equal(param, new_param("b", seed=1))

    def test_what_a_frozen_parameter_keeps_is_no_larger_than_it(self):
        model, ddp, optimizer = alone(sharded=True, names="ab", dtype=torch.bfloat16)
        train(ddp, optimizer, [0])

        model.b.requires_grad_(False)
        ddp.rebuild()

        kept = [*optimizer.state[model.b].values(), *optimizer.sharding._main_values.values()]
        assert sorted(value.untyped_storage().nbytes() // 4 for value in kept) == [1, 63, 63, 63]  # step, moments, main value

    def test_runs_are_cut_where_step_counts_differ_and_only_there(self):
        model, ddp, optimizer = alone(sharded=False, bucket_size=None)
        assert len(optimizer.sharding.shards) == 1

        train(ddp, optimizer, [0])
        ddp.rebuild()
        assert len(optimizer.sharding.shards) == 1

        model.c.requires_grad_(False)
        ddp.rebuild()
        train(ddp, optimizer, [1])
        model.c.requires_grad_(True)
        ddp.rebuild()
        twin = optimizer.sharding.updates[0].twin
        steps = [twin.state[main]["step"].item() for main in twin.param_groups[0]["params"]]
        assert steps == [2, 1, 2]  # e, d | c | b, a

    def test_adding_what_is_in_a_group_already_is_refused(self):
        model, ddp, optimizer = alone(sharded=True, names="ab")
        model.b.requires_grad_(False)
        ddp.rebuild()

        for param in (model.a, model.b):
            with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
                optimizer.add_param_group({"params": [param]})
        assert len(optimizer.param_groups) == 1

    @MODES
    def test_a_step_with_added_parameters_and_no_rebuild_is_refused(self, sharded):
        def play(rank, ddp, optimizer):
            train(ddp, optimizer, [0], rank)
            extra = torch.nn.Parameter(torch.ones(3))
            optimizer.add_param_group({"params": [extra]})
            ddp(factors_of(1, rank)).backward()
            with pytest.raises(PhaseError) as caught:
                optimizer.step()
            optimizer.zero_grad()
            del optimizer.param_groups[-1]
            train(ddp, optimizer, [2], rank)
            return str(caught.value), ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], 2, torch.float32)
        for step in (0, 2):
            oracle.step(step)
        for text, model in run_ranks(2, play, sharded=sharded):
            assert text == (
                "trainable parameters were added to the optimizer and have no shard yet: 'one of shape (3,), not in the "
                "module'. Their gradients are not reduced, so they would be updated differently on every rank. Call "
                "ddp.rebuild() on every rank."
            )
            assert_like(oracle, model)

    def test_frozen_ones_may_wait_in_a_group_until_they_are_unfrozen(self):
        model = Tensors("ab")
        model.b.requires_grad_(False)
        ddp = DistributedDataParallel(model, config_of(sharded=True))
        optimizer = DistributedOptimizer(torch.optim.SGD([model.a], lr=1.0), ddp)
        optimizer.add_param_group({"params": [model.b], "lr": 2.0})
        before = model.b.detach().clone()

        train(ddp, optimizer, [0])
        assert torch.equal(model.b, before)
        model.b.requires_grad_(True)
        ddp.rebuild()
        train(ddp, optimizer, [1])

        assert torch.equal(model.b, before - 2 * factors_of(1, 0)["b"])


class TestMainValues:
    @MODES
    def test_a_frozen_16_bit_parameter_goes_on_from_its_main_value(self, sharded):
        model, ddp, optimizer = alone(
            sharded=sharded, names="a", dtype=torch.bfloat16, build=lambda params: torch.optim.SGD(params, lr=1.0)
        )
        model.b = new_param("b", 1, torch.bfloat16)
        optimizer.add_param_group({"params": [model.b]})
        ddp.rebuild()
        optimizer.param_groups[0]["lr"] = 2.0**-12
        with torch.no_grad():
            model.a.fill_(1.0)
        optimizer.reload_main_params()

        def step(factor):
            factors = {"a": torch.full((100,), factor), "b": torch.ones(7, 9)}
            ddp(factors).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(-4.0)  # 1 + 2**-10 is 1 in bfloat16
        assert model.a.unique().tolist() == [1.0]
        model.a.requires_grad_(False)
        ddp.rebuild()
        step(0.0)
        model.a.requires_grad_(True)
        ddp.rebuild()
        step(-12.0)  # 1 + 2**-10 + 3 * 2**-10 = 1 + 2**-8, halfway; one more makes it round up
        step(-4.0)

        assert model.a.unique().tolist() == [1.0 + 2.0**-7]

    @MODES
    def test_values_that_were_written_meanwhile_count(self, sharded):
        model, ddp, optimizer = alone(
            sharded=sharded, names="ab", dtype=torch.bfloat16, build=lambda params: torch.optim.SGD(params, lr=0.0)
        )
        model.a.requires_grad_(False)
        ddp.rebuild()
        with torch.no_grad():
            model.a.fill_(3.0)
            model.b.fill_(5.0)
        model.a.requires_grad_(True)
        ddp.rebuild()
        train(ddp, optimizer, [0])

        assert (model.a.unique().tolist(), model.b.unique().tolist()) == ([3.0], [5.0])

    def test_loaded_weights_are_taken_over(self):
        model, ddp, optimizer = alone(sharded=True, names="ab", dtype=torch.bfloat16)
        train(ddp, optimizer, [0])
        loaded = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}

        ddp.load_state_dict(loaded)
        ddp.rebuild()

        assert all(main[:7].unique().tolist() == [2.0] for main in optimizer.param_groups[0]["params"])


class TestMovedModules:
    """After ``StorageMovedError`` the module is taken as it is."""

    @MODES
    @pytest.mark.parametrize("size", [1, 2])
    def test_a_model_made_16_bit_keeps_its_values_as_main_values(self, size, sharded):
        def play(rank, ddp, optimizer):
            train(ddp, optimizer, [0], rank)
            ddp.module.bfloat16()
            with pytest.raises(StorageMovedError):
                train(ddp, optimizer, [1], rank)
            ddp.rebuild()
            assert {buffer.param_data.dtype for buffer in ddp.param_and_grad_buffers} == {torch.bfloat16}
            train(ddp, optimizer, [2], rank)
            return ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], size, torch.float32)
        for step in (0, 2):
            oracle.step(step)
        oracle.dtype = torch.bfloat16
        for model in run_ranks(size, play, sharded=sharded):
            assert_like(oracle, model)

    def test_a_model_made_float64_computes_and_keeps_moments_in_float64(self):
        model, ddp, optimizer = alone(sharded=True)
        train(ddp, optimizer, [0])

        model.double()
        ddp.rebuild()
        train(ddp, optimizer, [1])

        state = [values for main, values in optimizer.state.items() if main.numel()]
        assert {values["exp_avg"].dtype for values in state} == {torch.float64}
        assert {values["step"].item() for values in state} == {2}

    def test_another_memory_order_carries_the_moments_along(self):
        model, ddp, optimizer = alone(sharded=True, names="ae")
        oracle = Oracle(OPTIMIZERS["AdamW"], 1, torch.float32, names="ae")
        train(ddp, optimizer, [0])

        model.e.data = model.e.data.contiguous()
        ddp.rebuild()
        train(ddp, optimizer, [1])

        for step in (0, 1):
            oracle.step(step)
        assert model.e.is_contiguous()
        assert_like(oracle, model)

    def test_a_resized_parameter_must_drop_its_moments(self):
        model, ddp, optimizer = alone(sharded=True, names="ab")
        train(ddp, optimizer, [0])
        model.a.data = torch.ones(150)

        with pytest.raises(OptimizerParametersError) as caught:
            ddp.rebuild()
        assert str(caught.value) == (
            "the optimizer holds state that is neither one value per element nor one number per parameter, and cannot be cut "
            "into flat shards: 'exp_avg of a: shape (100,) for (150,)', 'exp_avg_sq of a: shape (100,) for (150,)'. Where "
            "the parameter was resized, drop its state (optimizer.state.pop(param)) to start anew. Else use such an "
            "optimizer without a DistributedOptimizer around it, under DistributedDataParallelConfig("
            "use_distributed_optimizer=False); given this config, the adapters for Lightning and Hugging Face make none."
        )
        optimizer.state.pop(model.a)
        ddp.rebuild()

        assert model.a.shape == (150,)

    def test_values_that_were_still_on_their_way_are_not_taken_for_the_models(self):
        model, ddp, optimizer = alone(sharded=True, names="ab", overlap_param_gather=True)
        train(ddp, optimizer, [0])
        model.bfloat16()

        with pytest.raises(PhaseError) as caught:
            ddp.rebuild()
        model.bfloat16()
        ddp.rebuild()

        assert str(caught.value) == (
            "rebuild() cannot take 'b', 'a': moved or written while the values were on their way (overlap_param_gather=True), "
            "so what was moved is NaN. The values are back now: change the module again, then call ddp.rebuild(); and call "
            "ddp.finish_param_sync() before you touch parameters outside forward."
        )
        assert not any(param.isnan().any() for param in model.parameters())
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


class TestFailures:
    """Nothing is lost, nobody hangs, and whatever is used in between says why it cannot be."""

    @MODES
    def test_a_rank_that_froze_something_else_is_named_and_after_a_repair_training_goes_on(self, sharded):
        def play(rank, ddp, optimizer):
            train(ddp, optimizer, [0, 1], rank)
            for name in "ab"[: rank + 1]:
                getattr(ddp.module, name).requires_grad_(False)
            with pytest.raises(LayoutMismatchError) as caught:
                ddp.rebuild()
            in_between = [text_of(PhaseError, use) for use in uses_of(ddp, optimizer)]
            ddp.module.b.requires_grad_(True)
            ddp.rebuild()
            train(ddp, optimizer, [2, 3], rank)
            return str(caught.value), in_between, ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], 2, torch.bfloat16)
        oracle.step(0)
        oracle.step(1)
        oracle.frozen.add("a")
        oracle.step(2)
        oracle.step(3)
        results = run_ranks(2, play, sharded=sharded, dtype=torch.bfloat16)
        assert len({text for text, _, _ in results}) == 1
        assert "rank 0 has b (7, 9) bfloat16, rank 1 has b (7, 9) bfloat16 frozen" in results[0][0]
        for text, in_between, model in results:
            (refusal,) = set(in_between)
            assert refusal == (
                "the module is not wrapped, because rebuild() has failed; gradients would not be reduced. Repair what the "
                "error has named and call ddp.rebuild() again on every rank; parameters, moments and main parameters are kept. "
                f"The error was LayoutMismatchError: {text}"
            )
            assert_like(oracle, model)

    @MODES
    def test_a_trainable_parameter_without_a_group_is_named_and_can_be_added(self, sharded):
        def play(rank, ddp, optimizer):
            train(ddp, optimizer, [0], rank)
            ddp.module.e = new_param("e", 0)
            with pytest.raises(OptimizerParametersError) as caught:
                ddp.rebuild()
            in_between = [text_of(PhaseError, use) for use in uses_of(ddp, optimizer)]
            optimizer.add_param_group({"params": [ddp.module.e]})
            ddp.rebuild()
            train(ddp, optimizer, [1], rank)
            return str(caught.value), in_between, ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], 2, torch.float32, names="abcd")
        oracle.step(0)
        oracle.replace("e", 0)
        oracle.step(1)
        for text, in_between, model in run_ranks(2, play, sharded=sharded, names="abcd"):
            assert text == (
                "trainable parameters of the wrapper are in no group of the optimizer and would never be updated: 'e'. Add "
                "them with optimizer.add_param_group(), also those of another optimizer, or freeze them with "
                "requires_grad_(False) before wrapping or ddp.rebuild()."
            )
            assert {words.partition(" The error was ")[2] for words in in_between} == {f"OptimizerParametersError: {text}"}
            assert_like(oracle, model)

    @MODES
    def test_a_group_that_is_missing_on_one_rank_only_keeps_nobody_waiting(self, sharded):
        def play(rank, ddp, optimizer):
            ddp.module.e = new_param("e", 0)
            if rank == 0:
                optimizer.add_param_group({"params": [ddp.module.e]})
            with pytest.raises(PeerFailedError) as caught:
                ddp.rebuild()
            if rank == 1:
                optimizer.add_param_group({"params": [ddp.module.e]})
            ddp.rebuild()
            train(ddp, optimizer, [0], rank)
            return str(caught.value)

        texts = run_ranks(2, play, sharded=sharded, names="abcd")

        assert len(set(texts)) == 1
        assert (
            "rank 1 failed in rebuild: OptimizerParametersError: trainable parameters of the wrapper are in no group"
            in texts[0]
        )
        assert texts[0].endswith(
            ". Repair it and call ddp.rebuild() again on every rank; parameters, moments and main parameters are kept."
        )

    def test_another_group_on_another_rank_is_named(self):
        def play(rank, ddp, optimizer):
            ddp.module.e = new_param("e", 0)
            if rank == 0:
                optimizer.add_param_group({"params": [ddp.module.e]})
            else:
                optimizer.param_groups[0]["params"].append(ddp.module.e)
            with pytest.raises(LayoutMismatchError) as caught:
                ddp.rebuild()
            return str(caught.value)

        texts = run_ranks(2, play, sharded=True, names="ab")

        assert "entry 2: rank 0 has e in group 1, rank 1 has e in group 0" in texts[0]

    def test_parameters_that_never_were_in_the_module_are_named(self):
        _, ddp, optimizer = alone(sharded=True, names="ab")
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

        assert text_of(OptimizerParametersError, ddp.rebuild) == (
            "the optimizer has parameters that the wrapper does not hold, so their gradients are never reduced: 'group 1, "
            "parameter 0, shape (3,)'. Build the optimizer over the wrapped parameters; before ddp.rebuild(), put "
            "new ones into the module or out of the group."
        )

    def test_when_everything_is_frozen_nothing_is_lost_either(self):
        model, ddp, optimizer = alone(sharded=True)
        oracle = Oracle(OPTIMIZERS["AdamW"], 1, torch.float32)
        train(ddp, optimizer, [0])

        model.requires_grad_(False)
        for _ in range(2):
            with pytest.raises(NoTrainableParametersError):
                ddp.rebuild()
        model.requires_grad_(True)
        ddp.rebuild()
        train(ddp, optimizer, [1])

        oracle.step(0)
        oracle.step(1)
        assert_like(oracle, model)

    def test_a_rebuild_with_an_optimizer_on_one_rank_only_is_named(self):
        world, models = LoopbackWorld(2), [Tensors(), Tensors()]

        def play(rank):
            ddp = DistributedDataParallel(models[rank], config_of(sharded=True), communicator=world.communicator(rank))
            optimizer = DistributedOptimizer(torch.optim.SGD(models[rank].parameters(), lr=1.0), ddp)
            if rank == 1:
                optimizer = None
                gc.collect()
            text = text_of(LayoutMismatchError, ddp.rebuild)
            assert optimizer is None or optimizer.ddp is ddp
            return text

        texts = world.run(play)

        assert "rank 0 has optimizers to take along: 1, rank 1 has optimizers to take along: 0" in texts[0]
        assert texts[0] == texts[1]

    @MODES
    def test_state_that_cannot_be_told_apart_by_parameter_leaves_everything_as_it_was(self, sharded):
        class Blockwise(torch.optim.SGD):
            """Keeps a table of one value per block of 16 elements."""

            def step(self, closure=None):
                for param in (param for group in self.param_groups for param in group["params"]):
                    self.state[param]["absmax"] = torch.zeros(-(-param.numel() // 16))
                return super().step(closure)

        def play(rank, ddp, optimizer):
            train(ddp, optimizer, [0], rank)
            text = text_of((OptimizerParametersError, PeerFailedError), ddp.rebuild)
            train(ddp, optimizer, [1], rank)
            return text

        texts = run_ranks(2, play, sharded=sharded, names="a", build=lambda params: Blockwise(params, lr=1.0))

        assert (
            "the optimizer holds, for a flat shard, state that is neither one value per element nor one number, so it cannot "
            "be split by parameter: 'absmax: shape (" in texts[0]
        )
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("leave", [lambda ddp: ddp.detach(), lambda ddp: copy.deepcopy(ddp.module)], ids=["detach", "copy"])
    def test_what_is_detached_or_copied_after_a_failure_is_a_plain_module(self, leave):
        model, ddp, _ = alone(sharded=True, names="a")
        model.requires_grad_(False)
        with pytest.raises(NoTrainableParametersError):
            ddp.rebuild()

        module = leave(ddp)

        module.requires_grad_(True)
        module(factors_of(0, 0)).backward()
        assert torch.equal(module.a.grad, factors_of(0, 0)["a"])


def uses_of(ddp, optimizer):
    return [
        lambda: ddp(factors_of(0, 0)),
        lambda: ddp.module(factors_of(0, 0)),
        optimizer.step,
        optimizer.zero_grad,
        optimizer.reload_main_params,
        ddp.zero_grad,
        ddp.finish_grad_sync,
        ddp.finish_param_sync,
        ddp.state_dict,
        lambda: ddp.layout,
        lambda: ddp.abort_step("no batch"),
        ddp.broadcast_params,
    ]


def text_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def two_microbatches(rank, ddp, _):
    with ddp.no_sync():
        ddp(factors_of(7, rank)).backward()
    ddp(factors_of(8, rank)).backward()


def a_microbatch_too_late_to_be_reduced(rank, ddp, _):
    ddp(factors_of(7, rank)).backward()
    with ddp.no_sync():
        ddp(factors_of(8, rank)).backward()


def different_places_of_the_schedule(rank, ddp, sharded):
    names = "e" if rank == 0 else "abcde"  # rank 0 has launched the first bucket when rank 1 has launched all
    with contextlib.nullcontext() if sharded else ddp.no_sync():
        sum(getattr(ddp.module, name).sum() for name in names).backward()


class TestSteps:
    @MODES
    @pytest.mark.parametrize("begin", [two_microbatches, a_microbatch_too_late_to_be_reduced, different_places_of_the_schedule])
    @pytest.mark.parametrize("unused", ["error", "zero"])
    def test_an_open_step_is_dropped_on_all_ranks_whatever_is_wrong_with_its_gradients(self, unused, begin, sharded):
        def play(rank, ddp, optimizer):
            train(ddp, optimizer, [0, 1], rank)
            begin(rank, ddp, sharded)
            ddp.rebuild()
            assert all(param.grad is None for param in ddp.parameters())
            train(ddp, optimizer, [2], rank)
            return ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], 2, torch.float32)
        for step in range(3):
            oracle.step(step)
        for model in run_ranks(2, play, sharded=sharded, unused_parameters=unused):
            assert_like(oracle, model)

    @MODES
    def test_a_change_in_the_middle_of_a_step_is_no_error_of_the_rebuild(self, sharded):
        def play(rank, ddp, optimizer):
            with ddp.no_sync():
                ddp(factors_of(7, rank)).backward()
            if sharded:
                ddp(factors_of(7, rank)).backward()
            ddp.module.a.requires_grad_(False)
            ddp.rebuild()
            train(ddp, optimizer, [0], rank)
            return ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], 2, torch.float32)
        oracle.frozen.add("a")
        oracle.step(0)
        for model in run_ranks(2, play, sharded=sharded):
            assert_like(oracle, model)

    def test_after_the_error_that_names_a_change_a_rebuild_goes_on(self):
        def play(rank, ddp, optimizer):
            ddp.module.a.requires_grad_(False)
            with pytest.raises(TrainabilityChangedError):
                train(ddp, optimizer, [7], rank)
            ddp.rebuild()
            train(ddp, optimizer, [0], rank)
            return ddp.module

        oracle = Oracle(OPTIMIZERS["AdamW"], 2, torch.float32)
        oracle.frozen.add("a")
        oracle.step(0)
        for model in run_ranks(2, play, sharded=True):
            assert_like(oracle, model)

    def test_the_count_of_steps_and_the_callers_number_go_on(self):
        model, ddp, optimizer = alone(sharded=True)
        train(ddp, optimizer, range(3))
        ddp.step_number = 30
        steps = ddp.sync.step

        model.a.requires_grad_(False)
        with pytest.raises(PhaseError), ddp.no_sync():
            raise PhaseError("nothing is left of this")
        ddp.rebuild()

        assert (ddp.sync.step, ddp.step_number) == (steps, 30)

    def test_clipping_counts_the_rebuilt_parameters(self):
        model, ddp, optimizer = alone(sharded=True, names="ab", build=lambda params: torch.optim.SGD(params, lr=1.0))
        optimizer.clip_grad = 1.0
        model.b.requires_grad_(False)
        ddp.rebuild()

        ddp({"a": torch.full((100,), 3.0)}).backward()

        assert optimizer.step().grad_norm == math.sqrt(100 * 9)


class TestWithoutDistributedOptimizer:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_a_plain_optimizer_goes_on_with_the_same_parameters(self, size):
        build = OPTIMIZERS["AdamW"]
        world = LoopbackWorld(size)
        models = [Tensors() for _ in range(size)]

        def play(rank):
            model = models[rank]
            ddp = DistributedDataParallel(model, config_of(sharded=False), communicator=world.communicator(rank))
            optimizer = build(model.parameters())
            train(ddp, optimizer, [0], rank)
            model.a.requires_grad_(False)
            ddp.rebuild()
            train(ddp, optimizer, [1], rank)
            model.a.requires_grad_(True)
            model.b = new_param("b", 1)
            optimizer.add_param_group({"params": [model.b]})
            ddp.rebuild()
            train(ddp, optimizer, [2], rank)

        oracle = Oracle(build, size, torch.float32)
        oracle.step(0)
        oracle.frozen.add("a")
        oracle.step(1)
        oracle.frozen.clear()
        oracle.replace("b", 1)
        oracle.step(2)
        world.run(play)

        for model in models:
            assert_like(oracle, model)

    def test_an_optimizer_whose_place_another_has_taken_says_so(self):
        model, ddp, first = alone(sharded=True, names="a")
        second = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
        ddp.rebuild()

        ddp(factors_of(0, 0)).backward()

        assert text_of(PhaseError, first.step) == (
            "the wrapper was rebuilt, but this optimizer was not: a later DistributedOptimizer has replaced it, and its "
            "shards are no longer part of the module. Use the later one. If there is none, before_rebuild() has put whole "
            "parameters back: call ddp.rebuild() on every rank, or use the torch optimizer and the module after ddp.detach()."
        )
        assert second.step().updated

    def test_an_optimizer_that_was_dropped_is_not_taken_along(self):
        model, ddp, optimizer = alone(sharded=True, names="a")
        del optimizer
        gc.collect()

        ddp.rebuild()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
        before = model.a.detach().clone()
        train(ddp, optimizer, [0])

        assert torch.equal(model.a, before - factors_of(0, 0)["a"])
