"""``DistributedOptimizer.state_dict()`` and ``load_state_dict()``: torch's format, whole on every rank, both ways."""

import copy
import io

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import (
    CheckpointMismatchError,
    CheckpointUnavailableError,
    LayoutMismatchError,
    PeerFailedError,
    PhaseError,
)
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])

SHAPES = {"a": (100,), "b": (7, 9), "c": (), "d": (1, 3), "e": (2, 3, 2, 2), "f": (5,)}
DECAYED = "bc"

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}


class Tensors(torch.nn.Module):
    """Named tensors; the gradient of each is the factor it is multiplied by. ``f`` is frozen."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            if values.dim() == 4:
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=name != "f"))

    def forward(self, factors):
        return sum((param * factors[name].to(param.dtype)).sum() for name, param in self.named_parameters() if name != "f")


def groups_of(model):
    """Two groups, the frozen parameter in the second."""
    decayed = [param for name, param in model.named_parameters() if name in DECAYED]
    others = [param for name, param in model.named_parameters() if name not in DECAYED]
    return [{"params": decayed, "lr": 0.02}, {"params": others}]


def factors_of(step, rank):
    """Multiples of 12: sums over up to four ranks and their means are exact, also in bfloat16."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: 12.0 * torch.randint(-5, 6, shape, generator=generator) for name, shape in SHAPES.items()}


def mean_factors(step, size):
    factors = [factors_of(step, rank) for rank in range(size)]
    return {name: sum(one[name] for one in factors) / size for name in SHAPES}


def train(ddp, optimizer, steps, rank):
    for step in steps:
        ddp(factors_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(model, optimizer, steps, size):
    for step in steps:
        model(mean_factors(step, size)).backward()
        optimizer.step()
        optimizer.zero_grad()


def config_of(*, sharded, bucket_size=64, **switches):
    return DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=bucket_size, **switches)


def run_ranks(size, program, *, sharded, build=OPTIMIZERS["AdamW"], dtype=torch.float32, **switches):
    """Call ``program(rank, ddp, optimizer)`` on every rank of a loopback world; return the results."""
    world = LoopbackWorld(size, timeout_s=10)
    models = [Tensors(dtype) for _ in range(size)]
    optimizers = [build(groups_of(model)) for model in models]

    def play(rank):
        config = config_of(sharded=sharded, **switches)
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        return program(rank, ddp, DistributedOptimizer(optimizers[rank], ddp))

    return world.run(play)


def bits(value):
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    if not isinstance(value, torch.Tensor):
        return value
    return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def of_torch(state_dict):
    """A state_dict without our own key."""
    return {key: state_dict[key] for key in ("state", "param_groups")}


class TestFormat:
    @MODES
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_it_is_what_plain_torch_gives_for_the_same_training(self, kind, sharded):
        plain = Tensors()
        plain_optimizer = OPTIMIZERS[kind](groups_of(plain))
        train_alone(plain, plain_optimizer, range(3), size=3)

        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(3), rank)
            return optimizer.state_dict()

        found = run_ranks(3, program, sharded=sharded, build=OPTIMIZERS[kind])

        for state_dict in found:
            assert bits(of_torch(state_dict)) == bits(of_torch(plain_optimizer.state_dict()))

    def test_it_is_the_same_on_every_rank_and_a_value_of_its_own(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            state_dict = optimizer.state_dict()
            before = bits(state_dict)
            train(ddp, optimizer, range(2, 4), rank)
            assert bits(state_dict) == before
            return before

        first, second = run_ranks(2, program, sharded=True)

        assert first == second

    def test_main_parameters_are_in_the_state_of_their_parameter(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(3), rank)
            return optimizer.state_dict(), {name: param.detach().clone() for name, param in ddp.module.named_parameters()}

        (state_dict, weights), _ = run_ranks(2, program, sharded=True, dtype=torch.bfloat16)

        own = state_dict["megabucket"]
        # Group 0 holds b and c, group 1 a, d, e and f; f is frozen: 0 b, 1 c, 2 a, 3 d, 4 e, 5 f.
        mains = dict(zip("bcade", (state_dict["state"][index]["main_param"] for index in range(5)), strict=True))
        assert own["computed_in"] == {**dict.fromkeys(range(5), "float32"), 5: "bfloat16"}
        assert all(main.dtype == torch.float32 for main in mains.values())
        assert all(torch.equal(main.bfloat16(), weights[name]) for name, main in mains.items())
        assert not torch.equal(mains["a"], weights["a"].float())

    def test_torch_writes_and_reads_it_without_running_code(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            return optimizer.state_dict()

        (state_dict,) = run_ranks(1, program, sharded=True, dtype=torch.bfloat16)
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)

        assert bits(torch.load(file, weights_only=True)) == bits(state_dict)

    def test_hooks_of_the_torch_optimizer_run(self):
        seen = []

        def program(_, __, optimizer):
            optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "mine": 1})
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(state_dict["mine"]))
            state_dict = optimizer.state_dict()
            optimizer.load_state_dict(state_dict)
            return state_dict

        (state_dict,) = run_ranks(1, program, sharded=True)

        assert state_dict["mine"] == 1
        assert seen == [1]


class TestBothWays:
    @MODES
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_plain_torch_goes_on_from_it_bit_by_bit(self, kind, sharded):
        plain = Tensors()
        plain_optimizer = OPTIMIZERS[kind](groups_of(plain))
        train_alone(plain, plain_optimizer, range(5), size=3)

        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(3), rank)
            return ddp.state_dict(), optimizer.state_dict()

        weights, state_dict = copy.deepcopy(run_ranks(3, program, sharded=sharded, build=OPTIMIZERS[kind])[1])
        again = Tensors()
        again.load_state_dict(weights)
        again_optimizer = OPTIMIZERS[kind](groups_of(again))
        again_optimizer.load_state_dict(state_dict)
        train_alone(again, again_optimizer, range(3, 5), size=3)

        assert bits(again.state_dict()) == bits(plain.state_dict())
        assert bits(of_torch(again_optimizer.state_dict())) == bits(of_torch(plain_optimizer.state_dict()))

    @MODES
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_it_goes_on_from_plain_torch_bit_by_bit(self, kind, sharded):
        plain = Tensors()
        plain_optimizer = OPTIMIZERS[kind](groups_of(plain))
        train_alone(plain, plain_optimizer, range(3), size=2)
        weights, state_dict = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
        train_alone(plain, plain_optimizer, range(3, 5), size=2)

        def program(rank, ddp, optimizer):
            ddp.load_state_dict(weights)
            optimizer.load_state_dict(state_dict)
            train(ddp, optimizer, range(3, 5), rank)
            return ddp.state_dict(), optimizer.state_dict()

        for found, found_state in run_ranks(2, program, sharded=sharded, build=OPTIMIZERS[kind]):
            assert bits(found) == bits(plain.state_dict())
            assert bits(of_torch(found_state)) == bits(of_torch(plain_optimizer.state_dict()))

    @pytest.mark.parametrize("order", ["weights first", "optimizer first"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_from_mode_to_mode_and_size_to_size_nothing_changes(self, dtype, order):
        def first(rank, ddp, optimizer):
            train(ddp, optimizer, range(3), rank)
            saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
            train(ddp, optimizer, range(3, 6), rank)
            return *saved, bits((ddp.state_dict(), optimizer.state_dict()))

        weights, state_dict, expected = run_ranks(4, first, sharded=True, dtype=dtype)[0]
        expected_now = bits((weights, state_dict))

        # Gradients are the same with any number of ranks, when each brings the mean of four.
        def other(size):
            def program(_, ddp, optimizer):
                if order == "weights first":
                    ddp.load_state_dict(weights)
                optimizer.load_state_dict(state_dict)
                if order == "optimizer first":
                    ddp.load_state_dict(weights)
                now = bits((ddp.state_dict(), optimizer.state_dict()))
                for step in range(3, 6):
                    ddp(mean_factors(step, 4)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return now, bits((ddp.state_dict(), optimizer.state_dict()))

            return run_ranks(size, program, dtype=dtype, sharded=size != 1, bucket_size=40 * size)

        for size in (3, 1, 2):
            for now, later in other(size):
                assert now == expected_now
                assert later == expected

    def test_sixteen_bit_state_of_plain_torch_is_widened_to_what_shards_compute_in(self):
        plain = Tensors(torch.bfloat16)
        plain_optimizer = OPTIMIZERS["AdamW"](groups_of(plain))
        train_alone(plain, plain_optimizer, range(2), size=1)

        def program(_, __, optimizer):
            optimizer.load_state_dict(plain_optimizer.state_dict())
            return optimizer.state_dict()

        (state_dict,) = run_ranks(1, program, sharded=True, dtype=torch.bfloat16)

        for index, values in plain_optimizer.state_dict()["state"].items():
            if index != 3:
                assert bits(state_dict["state"][index]["exp_avg"]) == bits(values["exp_avg"].float())
                assert torch.equal(state_dict["state"][index]["step"], values["step"])

    @MODES
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_float32_values_come_back_without_other_state(self, kind, sharded):
        """Before the first step there is none, and torch takes any entry for one with a step count."""

        def program(_, __, optimizer):
            state_dict = copy.deepcopy(optimizer.state_dict())
            trained = [param for group in optimizer.param_groups for param in group["params"]][:5]
            for index, param in enumerate(trained):
                values = state_dict["state"].setdefault(index, {})  # Adagrad has state before its first step
                values["main_param"] = param.detach().float().mul_(1.0 + 2.0**-20)
            optimizer.load_state_dict(state_dict)
            return [bits([one["state"][index] for index in range(5)]) for one in (state_dict, optimizer.state_dict())]

        for given, found in run_ranks(2, program, sharded=sharded, dtype=torch.bfloat16, build=OPTIMIZERS[kind]):
            assert given == found

    def test_state_of_parameters_that_are_frozen_now_stays(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            before = bits(optimizer.state_dict()["state"])
            ddp.module.b.requires_grad_(False)
            ddp.rebuild()
            frozen = optimizer.state_dict()
            optimizer.load_state_dict(frozen)
            return before, bits(frozen["state"]), bits(optimizer.state_dict()["state"])

        for before, frozen, loaded in run_ranks(2, program, sharded=True):
            assert before == frozen == loaded

    def test_state_of_frozen_parameters_is_loaded_too(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            ddp.module.b.requires_grad_(False)
            ddp.rebuild()
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["state"][0]["exp_avg"] += 1
            given = bits(state_dict)
            optimizer.load_state_dict(state_dict)
            state_dict["state"][0]["exp_avg"] += 1  # the caller's own; torch would go on with it
            return given, bits(optimizer.state_dict())

        for given, found in run_ranks(2, program, sharded=True, dtype=torch.bfloat16):
            assert given == found

    def test_main_parameters_that_do_not_round_to_the_weights_are_not_kept(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            state_dict = optimizer.state_dict()
            for index in range(5):
                state_dict["state"][index]["main_param"].add_(1000.0)
            before = {name: param.clone() for name, param in ddp.module.named_parameters()}
            optimizer.load_state_dict(state_dict)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            train(ddp, optimizer, range(2, 3), rank)
            return [name for name, param in ddp.module.named_parameters() if not torch.equal(param, before[name])]

        assert run_ranks(2, program, sharded=True, dtype=torch.bfloat16) == [[], []]

    def test_parameters_with_different_step_counts_keep_them(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(1), rank)
            state_dict = optimizer.state_dict()
            state_dict["state"][0]["step"] += 5.0
            optimizer.load_state_dict(state_dict)
            return bits(state_dict), bits(optimizer.state_dict())

        for given, found in run_ranks(2, program, sharded=True):
            assert given == found

    def test_a_scheduler_goes_on_with_the_learning_rates_that_were_loaded(self):
        def program(rank, ddp, optimizer):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            train(ddp, optimizer, range(1), rank)
            saved = optimizer.state_dict(), scheduler.state_dict()
            scheduler.step()
            optimizer.load_state_dict(saved[0])
            loaded = [group["lr"] for group in optimizer.param_groups]
            scheduler.load_state_dict(saved[1])
            train(ddp, optimizer, range(1, 2), rank)
            scheduler.step()
            return loaded, [group["lr"] for group in optimizer.param_groups]

        assert run_ranks(1, program, sharded=True) == [([0.02, 0.01], [0.01, 0.005])]


class TestRefused:
    @MODES
    def test_shards_do_not_pass_for_the_whole(self, sharded):
        def program(rank, _, optimizer):
            with pytest.raises(CheckpointUnavailableError) as caught:
                optimizer.torch_optimizer.state_dict()
            with pytest.raises(CheckpointUnavailableError, match=r"^\[rank \d\] load_state_dict\(\) of the AdamW inside"):
                optimizer.torch_optimizer.load_state_dict({})
            return caught.value.rank == rank, caught.value.num_shards

        # Rank 3 of 4 may hold no shard at all; its empty state is not the whole either.
        assert run_ranks(4, program, sharded=sharded) == [(True, 4 if sharded else 1)] * 4

    def test_in_the_middle_of_a_step_there_is_nothing_to_save(self):
        def program(rank, ddp, optimizer):
            with ddp.no_sync():
                ddp(factors_of(0, rank)).backward()
            with pytest.raises(PhaseError, match=r"state_dict\(\) in the middle of a step"):
                optimizer.state_dict()
            ddp(factors_of(1, rank)).backward()
            with pytest.raises(PhaseError, match=r"load_state_dict\(\) in the middle of a step"):
                optimizer.load_state_dict({})
            optimizer.step()
            return optimizer.state_dict()["state"][0]["step"].item()

        assert run_ranks(2, program, sharded=True) == [1.0, 1.0]

    @pytest.mark.parametrize(
        ("spoil", "problem"),
        [
            (
                lambda d: {"state": d["state"]},
                "it is not a state_dict of an optimizer (dict without 'state' and 'param_groups')",
            ),
            (
                lambda d: {**d, "param_groups": d["param_groups"][:1]},
                "it has 1 parameter groups, the optimizer has 2",
            ),
            (
                lambda d: {**d, "param_groups": [{**d["param_groups"][0], "params": [0]}, d["param_groups"][1]]},
                "group 0 has 1 parameters there and 2 here",
            ),
            (
                lambda d: {**d, "state": {**d["state"], 2: {**d["state"][2], "exp_avg": torch.zeros(99)}}},
                "exp_avg of 'a' has shape (99,) there and (100,) here",
            ),
        ],
        ids=["no state_dict", "groups", "members", "shape"],
    )
    def test_what_does_not_fit_is_named_and_changes_nothing(self, spoil, problem):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            good = optimizer.state_dict()
            before = bits((ddp.state_dict(), good))
            with pytest.raises(CheckpointMismatchError) as caught:
                optimizer.load_state_dict(spoil(good))
            return caught.value.problems, bits((ddp.state_dict(), optimizer.state_dict())) == before

        assert run_ranks(2, program, sharded=True) == [((problem,), True)] * 2

    def test_a_rank_that_cannot_load_keeps_the_others_from_it(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            good = optimizer.state_dict()
            before = bits(good)
            bad = copy.deepcopy(good)
            bad["state"][2]["exp_avg"] = torch.zeros(99)
            with pytest.raises(PeerFailedError) as caught:
                optimizer.load_state_dict(bad if rank == 1 else good)
            return str(caught.value), bits(optimizer.state_dict()) == before

        (text, is_same), other = run_ranks(2, program, sharded=True)

        assert (text, is_same) == other
        assert is_same
        assert text.startswith("rank 1 failed in load_state_dict(): CheckpointMismatchError: the dict given to")
        assert "exp_avg of 'a' has shape (99,) there and (100,) here" in text

    def test_ranks_that_load_different_moments_are_found(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2), rank)
            state_dict = optimizer.state_dict()
            if rank == 1:
                state_dict["state"][2]["exp_avg"][3] += 1
            with pytest.raises(LayoutMismatchError, match="checksum of the state of 'a'"):
                optimizer.load_state_dict(state_dict)

        run_ranks(2, program, sharded=True)
