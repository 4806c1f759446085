"""State by name: what a run of some ranks has captured, a run of others continues bit by bit."""

import copy
import random
import re

import numpy as np
import pytest
import torch
from kept_in_memory import KeptInMemory

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.checkpoint.capture import TrainingParts, capture, to_host
from megabucket.checkpoint.restore import mismatches, restore
from megabucket.errors import CheckpointError, CheckpointMismatchError, ConfigError, OptimizerParametersError, PhaseError
from megabucket.testing import LoopbackWorld

pytestmark = pytest.mark.long_file

SHAPES = {"a": (100,), "b": (7, 9), "c": (), "d": (0, 3), "e": (2, 3, 2, 2), "f": (5,)}

BUILDS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


class Tensors(torch.nn.Module):
    """Named tensors; the gradient of each is the factor it is multiplied by. ``f`` is frozen, ``tied`` is ``a``."""

    def __init__(self, dtype=torch.float32, *, seed=1, channels_last=True, shapes=SHAPES):
        super().__init__()
        self.shapes = shapes
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            if values.dim() == 4 and channels_last:
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=name != "f"))
        self.tied = self.a
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("forgotten", torch.tensor(seed), persistent=False)

    def forward(self, factors):
        self.count += 1
        return sum((param * factors[name].to(param.dtype)).sum() for name, param in self.named_parameters() if name != "f")


def groups_of(model):
    """Two groups; in the buffer, which begins with ``e``, ``b`` and ``c`` are neighbours of one group."""
    decayed = [param for name, param in model.named_parameters() if name in "bc"]
    others = [param for name, param in model.named_parameters() if name not in "bc"]
    return [{"params": decayed, "lr": 0.02}, {"params": others}]


def factors_of(step):
    """The same on every rank, so that any number of ranks takes the same steps. Few bits, so that sums are exact."""
    generator = torch.Generator().manual_seed(step)
    return {name: 12.0 * torch.randint(-5, 6, shape, generator=generator) for name, shape in SHAPES.items()}


class Run:
    """One rank's run."""

    def __init__(self, communicator, *, mode, dtype=torch.float32, build=BUILDS["AdamW"], bucket_size=64, **model):
        module = Tensors(dtype, **model)
        optimizer = build(groups_of(module))
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=mode == "reduce_scatter",
            overlap_param_gather=mode == "reduce_scatter",
            bucket_size=bucket_size,
            grad_reduce_in_fp32=mode != "plain",
        )
        self.ddp = DistributedDataParallel(module, config, communicator=communicator)
        self.optimizer = optimizer if mode == "plain" else DistributedOptimizer(optimizer, self.ddp)
        self.parts = TrainingParts(self.ddp, self.optimizer)

    def train(self, steps):
        for step in steps:
            self.ddp(factors_of(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def capture(self, **more):
        return to_host(capture(self.parts, **more))


def run_ranks(size, program, **settings):
    """Call ``program(rank, run)`` on every rank of a loopback world; return the results."""
    world = LoopbackWorld(size, timeout_s=10)
    return world.run(lambda rank: program(rank, Run(world.communicator(rank), **settings)))


def captured(size, steps, **settings):
    """A checkpoint of a run of some ranks after some steps."""
    return KeptInMemory(run_ranks(size, lambda _, run: run.train(steps).capture(), **settings))


def restored(kept, size, steps, **settings):
    """A checkpoint of a run that was restored and has taken some steps."""

    def program(_, run):
        restore(kept, run.parts)
        return run.train(steps).capture()

    return KeptInMemory(run_ranks(size, program, seed=7, **settings))


MODES = ["reduce_scatter", "all_reduce", "plain"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class TestGoesOn:
    @DTYPES
    @pytest.mark.parametrize("kind", BUILDS)
    @pytest.mark.parametrize("mode", MODES)
    def test_as_if_nothing_had_happened(self, mode, kind, dtype):
        settings = {"mode": mode, "build": BUILDS[kind], "dtype": dtype}
        expected = captured(2, range(5), **settings)

        kept = captured(2, range(3), **settings)
        found = restored(kept, 2, range(3, 5), **settings)

        assert found.bits() == expected.bits()
        assert found.values == expected.values

    @DTYPES
    def test_in_any_mode_on_any_number_of_ranks_with_any_buckets(self, dtype):
        kept = captured(2, range(2), mode="reduce_scatter", dtype=dtype)
        steps = 2

        for size, mode, bucket_size in [
            (3, "all_reduce", 100),
            (1, "reduce_scatter", 10_000),
            (4, "reduce_scatter", 1),
            (2, "all_reduce", None),
            (5, "reduce_scatter", 64),
        ]:
            settings = {"mode": mode, "bucket_size": bucket_size, "dtype": dtype}
            unchanged = restored(kept, size, (), **settings)
            assert unchanged.bits() == kept.bits()
            assert unchanged.values["optimizer"] == kept.values["optimizer"]

            expected = captured(2, range(steps + 2), mode="reduce_scatter", dtype=dtype)
            kept, steps = restored(kept, size, range(steps, steps + 2), **settings), steps + 2
            assert kept.bits() == expected.bits()

    def test_plain_and_distributed_optimizers_take_over_from_each_other(self):
        kept = captured(2, range(3), mode="plain")

        there = restored(kept, 3, range(3, 4), mode="reduce_scatter")
        back = restored(there, 2, range(4, 5), mode="plain")

        assert back.bits() == captured(2, range(5), mode="plain").bits()

    def test_the_order_in_memory_may_be_another(self):
        kept = captured(2, range(3), mode="reduce_scatter")
        expected = captured(2, range(5), mode="reduce_scatter")

        found = restored(kept, 3, range(3, 5), mode="reduce_scatter", channels_last=False)

        assert kept.tensors["optim.state.e.exp_avg"].order == (0, 2, 3, 1)
        assert found.tensors["optim.state.e.exp_avg"].order == (0, 1, 2, 3)
        assert found.bits() == expected.bits()

    def test_state_of_frozen_parameters_is_kept_for_when_they_are_unfrozen(self):
        def program(_, run):
            run.train(range(2))
            run.ddp.module.b.requires_grad_(False)
            run.ddp.rebuild()
            return run.train(range(2, 3))

        def unfreeze(run):
            run.ddp.module.b.requires_grad_(True)
            run.ddp.rebuild()
            return run.train(range(3, 5)).capture()

        settings = {"mode": "reduce_scatter", "dtype": torch.bfloat16}
        kept = KeptInMemory(run_ranks(2, lambda rank, run: program(rank, run).capture(), **settings))
        expected = KeptInMemory(run_ranks(2, lambda rank, run: unfreeze(program(rank, run)), **settings))

        def again(_, run):
            run.ddp.module.b.requires_grad_(False)
            run.ddp.rebuild()
            restore(kept, run.parts)
            return unfreeze(run)

        found = KeptInMemory(run_ranks(3, again, **settings))

        assert "optim.main.b" in kept.tensors
        assert found.bits() == expected.bits()

    def test_parameters_that_have_taken_fewer_steps_than_their_neighbours_keep_their_count(self):
        def program(_, run):
            run.ddp.module.b.requires_grad_(False)
            run.ddp.rebuild()
            run.train(range(2))
            run.ddp.module.b.requires_grad_(True)
            run.ddp.rebuild()
            return run.train(range(2, 3))

        settings = {"mode": "reduce_scatter", "bucket_size": 10_000}
        kept = KeptInMemory(run_ranks(2, lambda rank, run: program(rank, run).capture(), **settings))
        expected = KeptInMemory(run_ranks(2, lambda rank, run: program(rank, run).train(range(3, 4)).capture(), **settings))

        found = restored(kept, 1, range(3, 4), **settings)

        assert found.bits() == expected.bits()
        steps = {tuple(one["params"]): one["entries"][0][5] for one in found.values["optimizer"]["state"]}
        assert steps == {("a", "c", "e"): ["float", "4.0"], ("b",): ["float", "2.0"]}


class TestDtypes:
    def test_a_wider_model_takes_the_main_parameters(self):
        kept = captured(2, range(3), mode="reduce_scatter", dtype=torch.bfloat16)

        def program(_, run):
            with pytest.raises(CheckpointMismatchError) as caught:
                restore(kept, run.parts)
            restore(kept, run.parts, cast=True)
            return caught.value.problems, run.capture()

        results = run_ranks(3, program, mode="reduce_scatter")
        found = KeptInMemory([snapshot for _, snapshot in results])

        assert results[0][0][0] == "'model.a' is bfloat16 in the checkpoint and float32 here; cast=True converts"
        assert torch.equal(found.whole("model.a"), kept.whole("optim.main.a"))
        assert not torch.equal(found.whole("model.a"), kept.whole("model.a").float())
        assert torch.equal(found.whole("model.f"), kept.whole("model.f").float())
        assert torch.equal(found.whole("optim.state.a.exp_avg"), kept.whole("optim.state.a.exp_avg"))

    def test_a_narrower_model_keeps_all_bits_in_main_parameters(self):
        kept = captured(2, range(3), mode="reduce_scatter")

        def program(_, run):
            restore(kept, run.parts, cast=True)
            return run.capture()

        found = KeptInMemory(run_ranks(3, program, mode="reduce_scatter", dtype=torch.bfloat16))

        assert torch.equal(found.whole("optim.main.a"), kept.whole("model.a"))
        assert torch.equal(found.whole("model.a"), kept.whole("model.a").bfloat16())
        assert torch.equal(found.whole("optim.state.a.exp_avg"), kept.whole("optim.state.a.exp_avg"))

    def test_main_parameters_begin_as_the_weights_where_there_were_none(self):
        kept = captured(2, range(3), mode="plain", dtype=torch.bfloat16)

        def program(_, run):
            restore(kept, run.parts, cast=True)
            return run.capture()

        found = KeptInMemory(run_ranks(2, program, mode="reduce_scatter", dtype=torch.bfloat16))

        assert torch.equal(found.whole("optim.main.a"), kept.whole("model.a").float())
        assert found.whole("optim.state.a.exp_avg").dtype == torch.float32
        assert torch.equal(found.whole("optim.state.a.exp_avg"), kept.whole("optim.state.a.exp_avg").float())

    def test_integers_are_never_converted(self):
        kept = captured(1, (), mode="all_reduce")

        def program(_, run):
            run.ddp.module.count = run.ddp.module.count.double()
            with pytest.raises(CheckpointMismatchError) as caught:
                restore(kept, run.parts, cast=True)
            return caught.value.problems

        assert run_ranks(1, program, mode="all_reduce") == [
            ("'model.count' is int64 in the checkpoint and float64 here, and is never converted",)
        ]


class Counter:
    """Something with a state."""

    def __init__(self, refuses=False):
        self.state, self.refuses = {"n": 0}, refuses

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if self.refuses and state["n"] != 0:
            raise ValueError("no")
        self.state = state


class TestTheRestOfTheRun:
    def test_schedulers_scalers_data_position_and_extras_come_back(self):
        extras = {"best": (0.5, float("inf")), "mean": torch.arange(6.0).reshape(2, 3).t(), 3: None, "deep": [[[[[[1]]]]]]}

        def parts_of(run, counter):
            scheduler = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, milestones=[1, 3, 3], gamma=0.5)
            return TrainingParts(run.ddp, run.optimizer, counter, {"lr": scheduler})

        def program(_, run):
            counter = Counter()
            parts = parts_of(run, counter)
            run.train(range(1))
            parts.schedulers["lr"].step()
            counter.state = {"n": 12, "scale": torch.tensor(65536.0), "history": [1.5, None]}
            return to_host(capture(parts, data_position={"epoch": 2, "sample": 1 << 60}, extras=extras))

        kept = KeptInMemory(run_ranks(2, program, mode="reduce_scatter"), step=9)

        def again(_, run):
            counter = Counter()
            parts = parts_of(run, counter)
            loaded = restore(kept, parts)
            rates = [[group["lr"] for group in run.optimizer.param_groups]]
            for _ in range(2):
                run.train(range(1))
                parts.schedulers["lr"].step()
                rates.append([group["lr"] for group in run.optimizer.param_groups])
            return loaded, counter.state, rates

        for loaded, counter, rates in run_ranks(3, again, mode="all_reduce"):
            assert (loaded.step, loaded.world_size, loaded.rng_restored) == (9, 2, False)
            assert loaded.data_position == {"epoch": 2, "sample": 1 << 60}
            assert loaded.extras["best"] == extras["best"]
            assert torch.equal(loaded.extras["mean"], extras["mean"])
            assert loaded.extras["deep"] == extras["deep"]
            assert loaded.extras["3"] is None
            assert counter == {"n": 12, "scale": torch.tensor(65536.0), "history": [1.5, None]}
            assert rates == [[0.01, 0.005], [0.01, 0.005], [0.0025, 0.00125]]

    def test_a_scaler_of_torch_goes_on_with_its_scale(self):
        def program(_, run):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            scaler.scale(torch.ones(1))
            scaler.update(512.0)
            return to_host(capture(TrainingParts(run.ddp, run.optimizer, scaler)))

        kept = KeptInMemory(run_ranks(1, program, mode="plain"))

        def again(_, run):
            scaler = torch.amp.GradScaler("cpu")
            restore(kept, TrainingParts(run.ddp, run.optimizer, scaler))
            return scaler.state_dict()

        (state,) = run_ranks(1, again, mode="plain")

        assert state == {
            "scale": 512.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 0,
        }

    def test_random_numbers_go_on_where_they_were(self):
        def draw():
            return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()

        def program(_, run):
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            draw()
            torch.randn(3)
            np.random.randn()
            random.gauss(0, 1)
            snapshot = run.capture()
            return snapshot, draw(), random.gauss(0, 1), np.random.randn()

        ((snapshot, *expected),) = run_ranks(1, program, mode="all_reduce")

        def again(_, run):
            draw()
            assert restore(KeptInMemory([snapshot]), run.parts).rng_restored
            return [draw(), random.gauss(0, 1), np.random.randn()]

        assert run_ranks(1, again, mode="all_reduce") == [expected]

    def test_weights_alone_need_no_optimizer(self):
        kept = captured(2, range(3), mode="reduce_scatter")

        def program(_, run):
            before = run.capture()
            torch.manual_seed(1)
            loaded = restore(kept, TrainingParts(run.ddp))
            assert not loaded.rng_restored
            return before, run.capture()

        results = run_ranks(3, program, mode="reduce_scatter")
        before, after = (KeptInMemory(list(snapshots)).bits() for snapshots in zip(*results, strict=True))

        for name, value in after.items():
            assert value == (kept.bits() if name.startswith("model.") else before)[name]

    def test_what_modules_add_to_their_state_comes_back(self):
        class Scaled(Tensors):
            scale = 1.0

            def get_extra_state(self):
                return {"scale": self.scale, "amax": torch.full((3,), self.scale)}

            def set_extra_state(self, state):
                self.scale = state["scale"] + float(state["amax"].sum())

        def program(kept):
            world = LoopbackWorld(1)
            module = Scaled()
            ddp = DistributedDataParallel(module, communicator=world.communicator(0))
            parts = TrainingParts(ddp)
            if kept is not None:
                restore(kept, parts)
                return module.scale
            module.scale = 2.0
            return KeptInMemory([to_host(capture(parts))])

        assert program(program(None)) == 2.0 + 3 * 2.0


def state_of(run):
    """Everything of a run that a load could change, as values."""
    random_numbers = torch.get_rng_state().tolist(), random.getstate()
    snapshot = copy.deepcopy(run.capture(with_rng=False))
    return [(piece.info, piece.start, piece.values.tolist()) for piece in snapshot.pieces], snapshot.values, random_numbers


class Compiled(torch.nn.Module):
    """What ``torch.compile`` makes of a module, as far as names go."""

    def __init__(self):
        super().__init__()
        self._orig_mod = Tensors()


def test_names_do_not_tell_of_compilers():
    def program(rank):
        module = Compiled()
        optimizer = torch.optim.AdamW(module.parameters())
        ddp = DistributedDataParallel(module, communicator=LoopbackWorld(1).communicator(rank))
        return KeptInMemory([capture(TrainingParts(ddp, DistributedOptimizer(optimizer, ddp)))])

    compiled = program(0)

    assert {name for name in compiled.tensors if name.startswith("model.")} == {f"model.{name}" for name in (*SHAPES, "count")}
    assert [group["params"] for group in compiled.values["optimizer"]["groups"]] == [list(SHAPES)]
    restored(
        compiled, 2, (), mode="all_reduce", build=lambda groups: torch.optim.AdamW([p for g in groups for p in g["params"]])
    )


class TestRefused:
    def test_everything_that_does_not_fit_is_named_at_once_and_nothing_changes(self):
        kept = captured(2, range(2), mode="reduce_scatter")
        shapes = {**SHAPES, "a": (99,), "g": (3,)}
        del shapes["c"]

        def program(_, run):
            before = state_of(run)
            with pytest.raises(CheckpointMismatchError) as caught:
                restore(kept, run.parts)
            return caught.value.problems, state_of(run) == before

        build = BUILDS["SGD"]
        results = run_ranks(2, program, mode="reduce_scatter", build=build, shapes=shapes)

        assert results[0] == results[1]
        assert results[0][1]
        assert results[0][0] == (
            "'model.a' has shape (100,) in the checkpoint and (99,) here",
            "'model.g' is not in the checkpoint",
            "'model.c' is in the checkpoint and not in the model",
            "the optimizer was AdamW and is SGD",
            "group 0 of the checkpoint has 'c', that of the optimizer has not",
            "group 1 of the optimizer has 'g', that of the checkpoint has not",
            "'optim.state.a.exp_avg' has shape (100,) in the checkpoint and (99,) here",
            "'optim.state.a.exp_avg_sq' has shape (100,) in the checkpoint and (99,) here",
        )

    def test_a_scaler_or_scheduler_that_nobody_takes_or_brings_is_named(self):
        def program(_, run):
            with pytest.raises(CheckpointMismatchError) as caught:
                restore(kept, TrainingParts(run.ddp, run.optimizer, None, {"lr": Counter()}))
            return caught.value.problems

        settings = {"mode": "all_reduce"}
        kept = KeptInMemory(run_ranks(1, lambda _, run: capture(TrainingParts(run.ddp, run.optimizer, Counter())), **settings))

        assert run_ranks(1, program, **settings) == [
            (
                "the checkpoint has the state of the training run called 'scaler', and nothing here takes it",
                "the checkpoint has no state of the training run called 'scheduler lr'",
            )
        ]

    @pytest.mark.parametrize("where", ["reading", "scheduler"])
    def test_what_fails_on_one_rank_fails_alike_on_all_and_changes_nothing(self, where):
        def parts_of(run, counter):
            return TrainingParts(run.ddp, run.optimizer, None, {"first": Counter(), "lr": counter})

        def program(_, run):
            counter = Counter()
            counter.state = {"n": 1}
            run.train(range(3))
            return to_host(capture(parts_of(run, counter)))

        kept = KeptInMemory(run_ranks(2, program, mode="reduce_scatter"))

        class Unreadable(KeptInMemory):
            def __init__(self):
                self.__dict__.update(vars(kept))

            def read(self, wanted, *, cast=False):
                super().read(wanted, cast=cast)
                raise OSError(5, "Input/output error")

        def again(rank, run):
            run.train(range(1))
            before = state_of(run)
            counter = Counter(refuses=where == "scheduler" and rank == 1)
            parts = parts_of(run, counter)
            stored = Unreadable() if where == "reading" and rank == 1 else kept
            with pytest.raises(CheckpointError) as caught:
                restore(stored, parts)
            same = state_of(run) == before
            return str(caught.value), same, [item.state["n"] for item in parts.schedulers.values()]

        first, second = run_ranks(2, again, mode="reduce_scatter", dtype=torch.float32)

        cause = "ValueError: no" if where == "scheduler" else "OSError: [Errno 5] Input/output error"
        assert first == (f"rank 1: {cause}. Nothing was changed on any rank.", True, [0, 0])
        assert second == first

    def test_in_the_middle_of_a_step_nothing_is_saved_or_loaded(self):
        kept = captured(2, (), mode="reduce_scatter")

        def program(rank, run):
            if rank == 1:
                with run.ddp.no_sync():
                    run.ddp(factors_of(0)).backward()
            with pytest.raises(PhaseError, match="saving a checkpoint in the middle of a step"):
                run.capture()
            with pytest.raises(PhaseError, match="loading a checkpoint in the middle of a step"):
                restore(kept, run.parts)
            return True

        assert run_ranks(2, program, mode="reduce_scatter") == [True, True]

    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_that_nobody_has_stepped_on_are_not_left_behind(self, mode):
        def program(_, run):
            run.ddp(factors_of(0)).backward()
            with pytest.raises(PhaseError, match="saving a checkpoint in the middle of a step"):
                run.capture()
            run.optimizer.step()
            run.capture()
            run.optimizer.zero_grad()
            run.ddp(factors_of(0)).backward()
            run.optimizer.zero_grad()
            return len(run.capture().pieces) > 0

        assert run_ranks(2, program, mode=mode) == [True, True]

    def test_after_a_refusal_only_what_was_set_is_set_back(self):
        class Watched(Counter):
            def __init__(self, **options):
                super().__init__(**options)
                self.taken = []

            def load_state_dict(self, state):
                self.taken.append(state["n"])
                super().load_state_dict(state)

        def saved(_, run):
            counters = {name: Counter() for name in "abc"}
            for counter in counters.values():
                counter.state = {"n": 7}
            return to_host(capture(TrainingParts(run.ddp, run.optimizer, schedulers=counters)))

        kept = KeptInMemory(run_ranks(1, saved, mode="all_reduce"))

        def program(_, run):
            counters = {"a": Watched(), "b": Watched(refuses=True), "c": Watched()}
            with pytest.raises(CheckpointError, match="ValueError: no"):
                restore(kept, TrainingParts(run.ddp, run.optimizer, schedulers=counters))
            return [counter.taken for counter in counters.values()]

        assert run_ranks(1, program, mode="all_reduce") == [[[7, 0], [7, 0], []]]

    def test_state_that_belongs_to_no_parameter_is_refused_on_all_ranks(self):
        def program(rank, run):
            run.train(range(1))
            if rank == 1:
                run.optimizer.sharding.updates[0].twin.state[run.optimizer.sharding.shards[0].main]["odd"] = torch.zeros(3)
            with pytest.raises(OptimizerParametersError) as caught:
                run.capture()
            return str(caught.value)

        first, second = run_ranks(2, program, mode="reduce_scatter", bucket_size=10_000)

        assert first == second
        assert first.startswith("rank 1: the optimizer holds, for a flat shard, state that is neither one value per element")

    def test_what_a_group_has_beside_what_was_saved_stays(self):
        def program(_, run):
            run.optimizer.param_groups[1]["later"] = 5
            run.optimizer.param_groups[1]["lr"] = 7.0
            restore(kept, run.parts)
            return run.optimizer.param_groups[1]["later"], run.optimizer.param_groups[1]["lr"]

        for mode in MODES:
            kept = captured(1, range(1), mode=mode)
            assert run_ranks(1, program, mode=mode) == [(5, 0.01)]

    def test_what_would_need_code_to_be_read_is_refused(self):
        def program(_, run):
            with pytest.raises(ConfigError) as caught:
                run.capture(extras={"model": {"config": [object()]}})
            return str(caught.value)

        (text,) = run_ranks(1, program, mode="all_reduce")

        assert text.startswith(
            "extra.model.config.0 cannot be saved in a checkpoint: it is a builtins.object. A checkpoint holds"
        )


def test_running_statistics_of_each_rank_come_back_to_it():
    def count(size, kept=None, grow=0):
        def program(rank, run):
            run.ddp.module.count += grow * rank
            if kept is not None:
                restore(kept, run.parts)
            return run.ddp.module.count.item(), run.capture()

        counts, snapshots = zip(*run_ranks(size, program, mode="all_reduce"), strict=True)
        return counts, KeptInMemory(snapshots)

    (saved, kept), (_, alike) = count(3, grow=10), count(3)

    assert saved == (1, 11, 21)
    assert sorted(name for name in kept.tensors if "count" in name) == ["local.1.count", "local.2.count", "model.count"]
    assert count(3, kept)[0] == (1, 11, 21)
    assert count(2, kept)[0] == (1, 1)
    assert [name for name in alike.tensors if "count" in name] == ["model.count"]


def changed(*path, to):
    def change(optimizer):
        *outer, last = path
        for key in outer:
            optimizer = optimizer[key]
        optimizer[last] = to

    return change


NO_STATE_OF_AN_OPTIMIZER = {
    "no groups": (changed("groups", to=None), "its values cannot be read: TypeError"),
    "no class": (lambda optimizer: optimizer.pop("class"), "its values cannot be read: KeyError: 'class'"),
    "no entry": (changed("state", 0, "entries", 0, to=[1]), "its values cannot be read: ValueError"),
    "a number in words": (changed("state", 0, "entries", 0, 5, to=["float", "many"]), "its values cannot be read: ValueError"),
    "a dtype of no kind": (changed("state", 0, "entries", 1, 2, to="float33"), "its values cannot be read: AttributeError"),
    "no state": (
        changed("state", to=[]),
        "'optim.state.bias.exp_avg' is in the checkpoint, and its optimizer does not know it",
    ),
    "no moment": (
        lambda optimizer: optimizer["state"][0]["entries"].pop(1),
        "'optim.state.weight.exp_avg' is in the checkpoint, and its optimizer does not know it",
    ),
    "no step count": (
        lambda optimizer: optimizer["state"][0]["entries"].pop(0),
        "'step' of 'weight', 'bias' is not in the checkpoint",
    ),
    "a number of a terabyte": (
        changed("state", 0, "entries", 0, 4, to=[1 << 40]),
        r"its values cannot be read: RuntimeError: shape '\[1099511627776\]' is invalid for input of size 1",
    ),
    "no learning rate": (
        changed("groups", 0, "hyperparameters", "lr", to=None),
        "'lr' of group 0 is None in the checkpoint and 0.1 here",
    ),
    "a learning rate in words": (changed("groups", 0, "hyperparameters", "lr", to="0.1"), "'lr' of group 0 is '0.1' in the"),
    "one beta": (changed("groups", 0, "hyperparameters", "betas", to={"!tuple": [0.9]}), r"'betas' of group 0 is \(0.9,\)"),
}


@pytest.mark.parametrize(("change", "text"), NO_STATE_OF_AN_OPTIMIZER.values(), ids=NO_STATE_OF_AN_OPTIMIZER)
def test_an_optimizer_that_somebody_else_has_written_is_named_and_nothing_is_loaded(change, text):
    """A seal says that nothing was changed since it was made, not that it was made of sense."""

    def run(seed):
        torch.manual_seed(seed)
        ddp = DistributedDataParallel(torch.nn.Linear(4, 3), DistributedDataParallelConfig(use_distributed_optimizer=True))
        return ddp, DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1), ddp)

    ddp, optimizer = run(0)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stored = KeptInMemory([to_host(capture(TrainingParts(ddp, optimizer)))])
    stored.values = copy.deepcopy(stored.values)
    change(stored.values["optimizer"])
    other, other_optimizer = run(1)
    before = [param.detach().clone() for param in other.parameters()]

    with pytest.raises(CheckpointError, match=text):
        restore(stored, TrainingParts(other, other_optimizer))

    assert all(torch.equal(param, value) for param, value in zip(other.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("saved", "here"), [({}, {"fused": True}), ({"foreach": True}, {}), ({"fused": True}, {"fused": False})]
)
def test_switches_that_were_set_otherwise_or_not_at_all_are_taken_over_as_torch_does(saved, here):
    def run(**switches):
        ddp = DistributedDataParallel(torch.nn.Linear(4, 3), DistributedDataParallelConfig(use_distributed_optimizer=True))
        return TrainingParts(ddp, DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1, **switches), ddp))

    kept, parts = run(**saved), run(**here)
    restore(KeptInMemory([to_host(capture(kept))]), parts)

    for switch in ("fused", "foreach"):
        assert parts.optimizer.param_groups[0][switch] == kept.optimizer.param_groups[0][switch]
    assert all(map(torch.equal, parts.ddp.parameters(), kept.ddp.parameters()))


MALFORMED_VALUES = {
    "no state of others": (lambda values: values.pop("stateful"), "KeyError: 'stateful'"),
    "no optimizer's": (changed("optimizer", to=[1]), "TypeError"),
    "a tensor that is not there": (changed("data_position", to={"!tensor": "gone"}), "KeyError: 'gone'"),
    "bytes that are none": (changed("data_position", to={"!bytes": "zz"}), "ValueError: non-hexadecimal number"),
    "an unknown tag": (changed("data_position", to={"!nope": 1}), "KeyError: '!nope'"),
    "a number of no shape": (changed("extras", to={"a": {"!number": ["float32", "x", 1]}}), "TypeError"),
    "a number of a terabyte": (
        changed("extras", to={"a": {"!number": ["float32", [1 << 20, 1 << 20], 1]}}),
        "RuntimeError: shape '[1048576, 1048576]' is invalid for input of size 1",
    ),
    "a number of no dtype": (changed("extras", to={"a": {"!number": ["nn", [], 1]}}), "AssertionError"),
    "no state of a scheduler": (changed("stateful", "scheduler 0", to={"!float": "x"}), "ValueError: could not convert"),
}


@pytest.mark.parametrize(("change", "text"), MALFORMED_VALUES.values(), ids=MALFORMED_VALUES)
def test_values_that_somebody_else_has_written_are_one_error(change, text):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 3), DistributedDataParallelConfig(use_distributed_optimizer=True))
    optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1), ddp)
    parts = TrainingParts(ddp, optimizer, schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    stored = KeptInMemory([to_host(capture(parts))])
    assert mismatches(stored, parts, cast=False) == []
    stored.values = copy.deepcopy(stored.values)
    change(stored.values)

    with pytest.raises(CheckpointError, match=re.escape(text)):
        restore(stored, parts)
    (problem,) = mismatches(stored, parts, cast=False)
    assert f"its values cannot be read: {text}" in problem


class Interrupted:
    """The state of a scheduler; the first load is interrupted."""

    def __init__(self):
        self.value, self.is_due = 0, False

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        self.value = state["value"]


def test_a_load_that_was_interrupted_on_one_rank_is_one_on_none_also_if_that_rank_loads_again():
    world = LoopbackWorld(2, timeout_s=20)

    def make(rank):
        ddp = DistributedDataParallel(torch.nn.Linear(4, 3), communicator=world.communicator(rank))
        return TrainingParts(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), schedulers=Interrupted())

    parts = world.run(make)
    stored = KeptInMemory(world.run(lambda rank: to_host(capture(parts[rank]))))

    def program(rank):
        (scheduler,), weight = parts[rank].stateful.values(), parts[rank].ddp.module.weight
        weight.data.fill_(7.0)
        scheduler.value, scheduler.is_due = 1, rank == 1
        found = []
        for _ in range(3 if rank else 2):
            try:
                restore(stored, parts[rank])
            except BaseException as error:  # noqa: PERF203 - a load each
                found.append((type(error).__name__, scheduler.value, bool((weight == 7.0).all())))
        return found, scheduler.value, bool((weight == 7.0).any())

    (first, *after), (second, *also_after) = world.run(program)

    assert first == [("CallMismatchError", 1, True)]
    assert second == [("KeyboardInterrupt", 1, True), *first]
    assert after == also_after == [0, False]  # the last load
