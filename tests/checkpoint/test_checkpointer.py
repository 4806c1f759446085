"""``save_checkpoint``, ``load_checkpoint`` and ``Checkpointer`` on the loopback world, with real files."""

import copy
import random
import re
import shutil
import threading
from collections import defaultdict
from concurrent.futures import wait

import pytest
import torch

import megabucket as mb
from megabucket.errors import (
    CallMismatchError,
    CheckpointError,
    CheckpointInvalidError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointNotSavedError,
    WrapperBrokenError,
)
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])


class Net(torch.nn.Module):
    """Small, with a convolution, normalization and dropout."""

    def __init__(self, seed, dtype):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = torch.nn.Conv2d(1, 4, 3)
            self.norm = torch.nn.BatchNorm1d(16)
            self.first = torch.nn.Linear(16, 30)
            self.last = torch.nn.Linear(30, 5)
        self.drop = 0.2
        self.to(dtype)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.conv(x.unsqueeze(1)).flatten(1)
        return self.last(torch.nn.functional.dropout(self.first(self.norm(x)).tanh(), self.drop))


class Run:
    """One rank's run: a model, an optimizer with two groups, a scheduler, a data loader of sorts."""

    def __init__(self, communicator, *, sharded, seed=1, dtype=torch.float32, bucket_size=100, overlaps=True, plain=False):
        model = Net(seed, dtype)
        weights = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=0.01)
        config = mb.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=sharded and overlaps,
            bucket_size=bucket_size,
        )
        self.config = config
        self.ddp = mb.DistributedDataParallel(model, config, communicator=communicator)
        self.optimizer = optimizer if plain else mb.DistributedOptimizer(optimizer, self.ddp, clip_grad=1.0)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        self.rank, self.dtype, self.sample = communicator.rank, dtype, 0
        self.losses = []

    def train(self, steps):
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.sample + self.rank)
            x = torch.randn(6, 4, 4, generator=generator).to(self.dtype)
            self.sample += 1
            loss = self.ddp(x).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def save(self, root, step, **more):
        return mb.save_checkpoint(
            root, self.ddp, self.optimizer, step=step, schedulers=self.scheduler, data_position={"sample": self.sample}, **more
        )

    def load(self, root, **more):
        loaded = mb.load_checkpoint(root, self.ddp, self.optimizer, schedulers=self.scheduler, **more)
        self.sample = loaded.data_position["sample"]
        return loaded

    def checkpointer(self, root, **more):
        return mb.Checkpointer(root, self.ddp, self.optimizer, schedulers=self.scheduler, **more)

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.ddp.state_dict().items()}


def run_ranks(size, program, **settings):
    """Call ``program(run)`` on every rank of a loopback world, one thread each; return the results."""
    world = LoopbackWorld(size, timeout_s=20)
    return world.run(lambda rank: program(Run(world.communicator(rank), **settings)))


class InterruptedOnce(torch.optim.lr_scheduler.ExponentialLR):
    """Is interrupted when its state is asked for the first time."""

    def state_dict(self):
        if vars(self).pop("is_armed", False):
            raise KeyboardInterrupt
        return super().state_dict()


class Interrupting(defaultdict):
    """State that is interrupted when it is replaced."""

    def __init__(self, state):
        super().__init__(dict, state)

    def update(self, *_):
        raise KeyboardInterrupt


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])] == []


class TestResume:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("overlaps", [False, True], ids=["in_turn", "overlapped"])
    @MODES
    def test_is_the_uninterrupted_run(self, tmp_path, sharded, overlaps, dtype):
        # One rank: all random numbers of a process are those of its one thread. Two ranks on gloo: tests/ranks.
        settings = {"sharded": sharded, "overlaps": overlaps, "dtype": dtype}

        def first(run):
            torch.manual_seed(5)
            run.train(3).save(tmp_path, 3)
            run.train(3)
            return run.weights(), run.losses[3:], torch.rand(1)

        def again(run):
            loaded = run.load(tmp_path)
            assert (loaded.step, loaded.world_size, loaded.rng_restored) == (3, 1, True)
            run.train(3)
            return run.weights(), run.losses, torch.rand(1)

        ((expected, losses, drawn),) = run_ranks(1, first, **settings)
        ((found, found_losses, found_drawn),) = run_ranks(1, again, seed=2, **settings)

        assert same(found, expected)
        assert found_losses == losses
        assert torch.equal(found_drawn, drawn)

    def test_a_checkpoint_of_two_ranks_goes_through_three_one_and_four_unchanged(self, tmp_path):
        def save_first(run):
            run.train(2).save(tmp_path / "0", 2)

        run_ranks(2, save_first, sharded=True, bucket_size=100)
        digests = [contents(tmp_path / "0")]
        for index, (size, sharded, bucket_size) in enumerate([(3, False, 7), (1, True, None), (4, True, 1_000), (2, True, 64)]):

            def pass_on(run, index=index):
                run.load(tmp_path / str(index))
                run.save(tmp_path / str(index + 1), 2)

            run_ranks(size, pass_on, sharded=sharded, bucket_size=bucket_size, seed=9)
            digests.append(contents(tmp_path / str(index + 1)))

        for bits, values in digests[1:]:
            assert values == digests[0][1]
            assert bits == digests[0][0]

    def test_on_other_ranks_the_next_gradients_are_means_within_the_bound(self, tmp_path):
        run_ranks(2, lambda run: run.train(2).save(tmp_path, 2), sharded=True)

        def step(run):
            run.load(tmp_path)
            run.ddp.module.drop = 0.0
            module = copy.deepcopy(run.ddp.module)
            x = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(run.rank))
            for model in (module, run.ddp):
                model(x).square().mean().backward()
            grads = dict(run.ddp.module.named_parameters())
            return {name: (param.grad, grads[name].grad) for name, param in module.named_parameters()}

        results = run_ranks(3, step, sharded=False)

        roundings, unit = 3, 2.0**-24  # two additions and a division
        gamma = roundings * unit / (1 - roundings * unit)
        for name in results[0]:
            terms = torch.stack([result[name][0].double() for result in results])
            error = (results[0][name][1].double() - terms.sum(0) / 3).abs()
            assert bool((error <= gamma * terms.abs().sum(0) / 3).all()), name

    def test_a_plain_optimizer_saves_and_loads_too(self, tmp_path):
        def first(run):
            run.train(2).save(tmp_path, 2)
            return run.train(2).weights()

        def again(run):
            run.load(tmp_path)
            return run.train(2).weights()

        settings = {"sharded": False, "plain": True}
        expected = run_ranks(1, first, **settings)
        found = run_ranks(1, again, seed=2, **settings)

        assert same(found[0], expected[0])


def contents(root):
    """Everything a checkpoint holds but random numbers and running statistics of single ranks."""
    stored = mb.open_checkpoint(root)
    names = sorted(name for name in stored.tensors if not name.startswith(("rng.", "local.")))
    from megabucket.checkpoint.format import Piece

    pieces = []
    for name in names:
        info = stored.tensors[name]
        pieces.append(Piece(info, 0, info.numel, torch.empty(info.numel, dtype=getattr(torch, info.dtype))))
    stored.read(pieces)
    values = {key: value for key, value in stored.values.items() if key != "rng_ranks"}
    bits = [(piece.info, piece.values.view(torch.uint8).tolist() if piece.values.numel() else []) for piece in pieces]
    return bits, values


class TestFaults:
    def test_a_flipped_bit_is_found_before_anything_changes(self, tmp_path):
        run_ranks(2, lambda run: run.train(1).save(tmp_path, 1), sharded=True)
        victim = random.Random(1).choice(sorted((tmp_path / "step-00000001").glob("*.safetensors")))
        raw = bytearray(victim.read_bytes())
        raw[-5] ^= 4
        victim.write_bytes(raw)

        def load(run):
            run.train(1)
            before = run.weights()
            with pytest.raises(CheckpointInvalidError) as caught:
                run.load(tmp_path)
            return str(caught.value), same(run.weights(), before), run.scheduler.last_epoch

        results = run_ranks(2, load, sharded=True, seed=2)

        assert results[0] == results[1]
        assert results[0][1:] == (True, 1)
        assert victim.name in results[0][0]
        assert "SHA-256" in results[0][0]

    def test_with_leave_an_older_one_is_taken_instead(self, tmp_path, caplog):
        def save(run):
            run.train(1).save(tmp_path, 1)
            weights = run.weights()
            run.train(1).save(tmp_path, 2)
            return weights

        weights = run_ranks(2, save, sharded=True)
        victim = next((tmp_path / "step-00000002").glob("*.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1])

        def load(run):
            with pytest.raises(CheckpointInvalidError, match="step 1 can be tried"):
                run.load(tmp_path)
            loaded = run.load(tmp_path, allow_fallback=True)
            return loaded.step, same(run.weights(), weights[run.rank])

        assert run_ranks(2, load, sharded=True, seed=2) == [(1, True)] * 2
        assert "falling back to the checkpoint of step 1" in caplog.text

    def test_a_step_that_is_not_there_is_named_on_all_ranks(self, tmp_path):
        def load(run):
            with pytest.raises(CheckpointMissingError) as caught:
                run.load(tmp_path, step=7)
            run.save(tmp_path, 3)
            with pytest.raises(CheckpointMissingError, match="It holds step 3: name one"):
                run.load(tmp_path, step=7)
            return str(caught.value)

        texts = run_ranks(2, load, sharded=True)

        assert texts[0] == texts[1]

    def test_ranks_that_see_different_checkpoints_load_none(self, tmp_path):
        for name in ("one", "other"):
            run_ranks(1, lambda run, name=name: run.train(1).save(tmp_path / name, 1), sharded=True, seed=len(name))

        def load(run):
            before = run.weights()
            with pytest.raises(CheckpointInvalidError) as caught:
                run.load(tmp_path / ("other" if run.rank == 1 else "one"))
            return str(caught.value), same(run.weights(), before)

        results = run_ranks(3, load, sharded=True)

        assert len(set(results)) == 1
        assert "rank 1 sees another checkpoint of step 1 than the first rank" in results[0][0]
        assert results[0][1]

    def test_whether_a_checkpoint_can_be_loaded_is_said_without_loading_it(self, tmp_path):
        run_ranks(1, lambda run: run.save(tmp_path, 1), sharded=True, dtype=torch.float64)

        def ask(run):
            before = run.weights()
            strict = mb.can_load(tmp_path, run.ddp, run.optimizer, schedulers=run.scheduler)
            loose = mb.can_load(tmp_path, run.ddp, run.optimizer, schedulers=run.scheduler, cast=True)
            without = mb.can_load(tmp_path, run.ddp, run.optimizer, cast=True)
            assert same(run.weights(), before)
            return len(strict), strict[0], loose, without

        # Eight parameters and two running statistics; no optimizer has stepped yet.
        assert run_ranks(1, ask, sharded=True) == [
            (
                10,
                "'model.conv.weight' is float64 in the checkpoint and float32 here; cast=True converts",
                [],
                ["the checkpoint has the state of the training run called 'scheduler 0', and nothing here takes it"],
            )
        ]

    def test_a_model_that_differs_is_named_with_the_directory(self, tmp_path):
        run_ranks(1, lambda run: run.save(tmp_path, 1), sharded=True, dtype=torch.float64)

        def load(run):
            with pytest.raises(CheckpointMismatchError, match="step-00000001 does not fit") as caught:
                run.load(tmp_path)
            return caught.value.problems[0]

        assert run_ranks(1, load, sharded=True) == [
            "'model.conv.weight' is float64 in the checkpoint and float32 here; cast=True converts"
        ]

    def test_ranks_that_would_save_different_things_save_nothing(self, tmp_path):
        def save(run):
            run.sample = run.rank
            with pytest.raises(CheckpointNotSavedError, match=r"its values .* and that of rank 0 .* differ"):
                run.save(tmp_path, 1)
            return True

        assert run_ranks(2, save, sharded=True) == [True, True]
        assert [path for path in tmp_path.iterdir() if path.name.startswith("step")] == []

    @pytest.mark.parametrize(
        "other",
        [
            lambda run, root: run.load(root),
            lambda run, _: run.optimizer.state_dict(),
            lambda run, _: run.ddp.check_replicas(),
            lambda run, _: run.ddp.broadcast_params(),
            lambda run, _: run.ddp.rebuild(),
            lambda run, _: run.train(1),
        ],
        ids=["load", "state_dict", "check_replicas", "broadcast_params", "rebuild", "a step"],
    )
    @MODES
    def test_a_save_on_one_rank_only_is_one_error_on_all_of_them(self, tmp_path, sharded, other):
        """``if rank == 0: save(...)`` is the commonest mistake there is."""

        def program(run):
            run.train(1).save(tmp_path, 1)
            with pytest.raises(CallMismatchError, match="saving a checkpoint: model on rank 0") as caught:
                run.save(tmp_path, 2) if run.rank == 0 else other(run, tmp_path)
            run.optimizer.zero_grad()
            run.sample = 1
            run.train(1).save(tmp_path, 3)
            run.ddp.check_replicas()
            return str(caught.value)

        texts = run_ranks(2, program, sharded=sharded)

        assert texts[0] == texts[1]
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]

    @pytest.mark.parametrize("operation", ["save", "load"])
    @MODES
    def test_a_rank_that_is_interrupted_between_two_exchanges_and_tries_again_meets_no_later_one_of_the_others(
        self, tmp_path, sharded, operation
    ):
        def program(run):
            run.train(1).save(tmp_path, 1)
            call = (lambda: run.save(tmp_path, 2)) if operation == "save" else (lambda: run.load(tmp_path))
            if run.rank == 1:
                run.scheduler.__class__, run.scheduler.is_armed = InterruptedOnce, True
                with pytest.raises(KeyboardInterrupt):
                    call()
            with pytest.raises(CallMismatchError) as caught:
                call()
            call()
            run.train(1).ddp.check_replicas()
            return str(caught.value)

        texts = run_ranks(2, program, sharded=sharded)

        assert texts[0] == texts[1]
        first = {"save": "model", "load": "choice"}[operation]
        assert re.search(rf"a checkpoint: values on rank 0; \w+ a checkpoint: {first} on rank 1", texts[0])

    def test_a_rank_that_is_interrupted_while_loaded_values_are_written_breaks_all_ranks(self, tmp_path):
        def program(run):
            run.train(1).save(tmp_path, 1)
            if run.rank == 1:
                run.optimizer.state = Interrupting(run.optimizer.state)
                with pytest.raises(KeyboardInterrupt):
                    run.load(tmp_path)
            else:
                run.load(tmp_path)
            with pytest.raises(WrapperBrokenError) as caught:
                run.ddp.check_replicas()
            return str(caught.value), caught.value.rank, caught.value.phase

        found = run_ranks(2, program, sharded=False, plain=True)

        assert found[0] == found[1]
        assert found[0][1:] == (1, "loading a checkpoint: writing")

    def test_a_root_that_cannot_be_made_is_one_error_on_all_ranks(self, tmp_path):
        (tmp_path / "file").write_text("")

        def save(run):
            with pytest.raises(CheckpointNotSavedError) as caught:
                run.save(tmp_path / "file" / "below", 1)
            run.train(1)
            return str(caught.value)

        texts = run_ranks(2, save, sharded=True)

        assert texts[0] == texts[1]


class TestCheckpointer:
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_saves_again_and_again_and_keeps_the_last(self, tmp_path, asynchronous):
        def program(run):
            seen = []
            with run.checkpointer(tmp_path, asynchronous=asynchronous, keep_last=2) as checkpointer:
                for step in range(1, 5):
                    run.train(1)
                    seen.append(run.weights())
                    assert checkpointer.save(step, data_position={"sample": run.sample})
                    checkpointer.poll()
            return seen

        seen = run_ranks(2, program, sharded=True)[0]

        def load(run):
            checkpointer = run.checkpointer(tmp_path)
            return [(checkpointer.load(step).step, run.weights()) for step in (3, "latest")]

        for (step, weights), expected in zip(run_ranks(3, load, sharded=False, seed=2)[0], seen[2:], strict=True):
            assert same(weights, expected), step
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_after_going_back_the_steps_of_the_abandoned_run_are_saved_anew(self, tmp_path, asynchronous):
        def program(run):
            with run.checkpointer(tmp_path, asynchronous=asynchronous, keep_last=None) as checkpointer:
                for step in (1, 2, 3):
                    run.train(1)
                    checkpointer.save(step)
            with run.checkpointer(tmp_path, asynchronous=asynchronous, keep_last=None) as checkpointer:
                checkpointer.load(1)
                run.train(2)
                checkpointer.save(2)
                checkpointer.close()
                weights = run.weights()
                run.train(1)
                with pytest.raises(CheckpointNotSavedError, match="step 1 is saved already"):
                    checkpointer.save(1)  # that is no step of the abandoned run
                loaded = checkpointer.load()
            return loaded.step, same(run.weights(), weights)

        assert run_ranks(2, program, sharded=True) == [(2, True)] * 2

    def test_training_goes_on_while_a_save_is_written_and_changes_nothing_in_it(self, tmp_path):
        def program(run):
            run.train(2)
            expected = run.weights()
            with run.checkpointer(tmp_path, asynchronous=True) as checkpointer:
                checkpointer.save(2, data_position={"sample": run.sample})
                run.train(3)
            return expected

        expected = run_ranks(2, program, sharded=True, dtype=torch.bfloat16)[0]

        def load(run):
            run.load(tmp_path)
            return run.weights()

        assert same(run_ranks(2, load, sharded=True, dtype=torch.bfloat16, seed=2)[0], expected)

    def test_a_load_finds_what_was_being_saved(self, tmp_path):
        def program(run):
            checkpointer = run.checkpointer(tmp_path, asynchronous=True)
            checkpointer.save(1)
            run.train(1)
            checkpointer.save(2)
            return checkpointer.load().step

        assert run_ranks(2, program, sharded=True) == [2, 2]

    def test_memory_of_a_copy_is_used_for_the_next_one(self, tmp_path):
        def program(run):
            places = []
            with run.checkpointer(tmp_path, asynchronous=True) as checkpointer:
                for step in range(3):
                    run.train(1)
                    checkpointer.save(step)
                    copied = [piece.values for piece in checkpointer._on_host.pieces if piece.values.numel()]
                    places.append([values.data_ptr() for values in copied])
            return places

        for first, second, third in run_ranks(2, program, sharded=True):
            assert first
            assert len(set(second) & set(third)) >= len(first) - 4  # random numbers and text may have another length

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("asynchronous", [False, True])
    @MODES
    def test_what_a_save_remembers_never_outlives_a_change_of_what_is_saved(self, tmp_path, sharded, asynchronous, dtype):
        """Each save is compared with one that remembers nothing."""

        def bucket_size(run, size):
            run.ddp.rebuild(run.config.model_copy(update={"bucket_size": size}))

        def frozen(run, *, is_frozen):
            run.ddp.module.first.weight.requires_grad_(not is_frozen)
            run.ddp.rebuild()

        def other_state(run):
            for held in run.optimizer.state.values():
                if "exp_avg" in held:
                    held["exp_avg"] = held["exp_avg"].double()
                    held["more"] = torch.ones_like(held["exp_avg_sq"])

        def new_parameter(run):
            run.ddp.module.extra = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
            run.optimizer.add_param_group({"params": [run.ddp.module.extra], "lr": 0.5})
            run.ddp.rebuild()

        changes = [
            lambda _: None,
            lambda run: run.train(1),
            lambda run: run.train(1),
            lambda run: bucket_size(run, 17),
            lambda run: frozen(run, is_frozen=True),
            lambda run: run.train(1),
            lambda run: frozen(run, is_frozen=False),
            lambda run: run.train(1),
            other_state,
            new_parameter,
        ]

        def program(run):
            with run.checkpointer(tmp_path / "kept", asynchronous=asynchronous, keep_last=None) as checkpointer:
                for step, change in enumerate(changes):
                    change(run)
                    checkpointer.save(step, data_position={"sample": run.sample})
                    run.save(tmp_path / "fresh", step, keep_last=None)

        run_ranks(2, program, sharded=sharded, dtype=dtype)

        for step in range(len(changes)):
            kept, fresh = (mb.open_checkpoint(tmp_path / name, step) for name in ("kept", "fresh"))
            assert (kept.tensors, kept.values, kept.files) == (fresh.tensors, fresh.values, fresh.files), step
        assert len({tuple(mb.open_checkpoint(tmp_path / "kept", step).tensors) for step in (0, 1, 8, 9)}) == 4

    def test_a_save_in_the_background_begins_with_two_exchanges(self, tmp_path):
        def program(run):
            communicator = run.ddp.communicator
            with run.train(1).checkpointer(tmp_path, asynchronous=True) as checkpointer:
                run.ddp.finish_param_sync()
                before = communicator.launches.last
                checkpointer.save(1)
                return communicator.launches.last - before

        # What the optimizer holds, and whether all can save: is everybody here, how long is it, what is it?
        assert run_ranks(2, program, sharded=True) == [6, 6]

    def test_what_failed_in_the_background_is_told_at_the_next_call_on_all_ranks(self, tmp_path):
        barrier = threading.Barrier(2)

        def program(run):
            checkpointer = run.checkpointer(tmp_path, asynchronous=True)
            checkpointer.save(1)
            checkpointer.close()
            checkpointer.save(2)
            wait([checkpointer._writer._result])
            barrier.wait()
            if run.rank == 0:
                for staged in tmp_path.glob(".tmp-*"):
                    shutil.rmtree(staged)
            with pytest.raises(CheckpointNotSavedError) as caught:
                checkpointer.close()
            run.train(1)
            return str(caught.value)

        texts = run_ranks(2, program, sharded=True)

        assert texts[0] == texts[1]
        assert "step 2: the checkpoint was not saved: rank 0" in texts[0]
        assert "the last good checkpoint is that of step 1" in texts[0]

    def test_leaving_the_block_with_an_error_waits_for_nobody(self, tmp_path):
        def save_and_fail(checkpointer):
            with checkpointer:
                checkpointer.save(1)
                raise KeyError

        def program(run):
            checkpointer = run.checkpointer(tmp_path, asynchronous=True)
            with pytest.raises(KeyError):
                save_and_fail(checkpointer)
            assert not list(tmp_path.glob("step-*"))
            checkpointer.close()

        run_ranks(1, program, sharded=True)

        assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_errors_have_one_base():
    assert issubclass(CheckpointMismatchError, CheckpointError)
