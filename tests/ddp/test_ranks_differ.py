"""Ranks that do the same steps with different things: one error with the same text on all of them, at the fence.

Nothing fails on any rank here. What differs is what they step with: gradients that one has cleared or kept, weights that one
has loaded, numbers of the optimizer, what was there before the wrap.
"""

import math

import numpy as np
import pytest
import torch
from loop_ranks import Ranks, Weights, grads, main_grads, optimizer_of

import megabucket as mb
from megabucket.errors import (
    ConfigError,
    HyperparameterMismatchError,
    LayoutMismatchError,
    MegabucketError,
    PeerFailedError,
    ReplicasDivergedError,
    StepMismatchError,
    UnusedParameterError,
)

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
SAME = (
    "Set them alike on every rank: look for a scheduler that follows a local loss, for scale_gradients() with a local count, "
    "for a loss scale or max_norm of one rank, for an optimizer's checkpoint that was loaded on one rank only."
)
DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."


def weights(ddp):
    ddp.finish_param_sync()
    return {name: param[0].item() for name, param in ddp.module.named_parameters()}


def caught(function):
    """The error of a call, or None."""
    try:
        function()
    except MegabucketError as error:
        return error
    return None


def the_error(errors):
    """The one error that all ranks raise."""
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return errors[0]


class TestClearedBetweenBackwards:
    """Plain torch's zero_grad() between two microbatches."""

    def program(self, who, *, to_none):
        def run(rank, ddp):
            optimizer = optimizer_of(ddp)

            def step():
                with ddp.no_sync():
                    ddp(a=1.0, b=1.0).backward()
                if rank in who:
                    ddp.module.zero_grad(set_to_none=to_none)
                ddp(a=10.0, b=10.0).backward()
                ddp.finish_grad_sync()

            error = caught(step)
            found = main_grads(ddp.module)
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(a=1.0, b=1.0).backward()
            ddp(a=10.0, b=10.0).backward()
            optimizer.step()
            return error, found, weights(ddp)

        return run

    @MODES
    @pytest.mark.parametrize("to_none", [True, False])
    def test_on_all_ranks_is_what_torch_does(self, sharded, to_none):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded, bucket_size=100)

        results = ranks.run(self.program({0, 1}, to_none=to_none))

        assert [error for error, *_ in results] == [None, None]
        owners = [max(found[name] for _, found, _ in results) for name in "ab"]
        assert owners == [10.0, 10.0]

    @pytest.mark.filterwarnings("ignore:Using backward")
    def test_a_sum_that_keeps_its_graph_is_no_replacement(self):
        ranks = Ranks(2, Weights("ab"))

        def run(rank, ddp):
            with ddp.no_sync():
                ddp(a=1.0, b=1.0).backward(create_graph=rank == 1)
            ddp(a=10.0, b=10.0).backward(create_graph=rank == 1)
            return grads(ddp.module)

        assert ranks.run(run) == [{"a": 11.0, "b": 11.0}] * 2

    def test_gradients_scaled_in_place_on_one_rank_are_its_own_business(self):
        ranks = Ranks(2, Weights("ab"))

        def run(rank, ddp):
            with ddp.no_sync():
                ddp(a=4.0, b=4.0).backward()
            if rank == 1:
                ddp.scale_gradients(0.5)
            ddp(a=1.0, b=1.0).backward()
            return grads(ddp.module)

        assert ranks.run(run) == [{"a": 4.0, "b": 4.0}] * 2  # the mean of 4 + 1 and 2 + 1


class TestKeptGradients:
    def test_a_copy_that_one_rank_has_not_cleared_is_named(self):
        ranks = Ranks(2, Weights("ab"))

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            ddp(a=1.0, b=1.0).backward()
            for param in ddp.parameters():
                param.grad = param.grad / 2
            optimizer.step()
            if rank == 0:
                optimizer.zero_grad()
            return caught(ddp(a=10.0, b=10.0).backward)

        error = the_error(ranks.run(run))
        assert isinstance(error, StepMismatchError)
        assert (
            "step 1: steps begun without clearing the last gradients (zero_grad()) of 'a' differ between "
            "ranks: 0 on rank 0; 1 on rank 1." in str(error)
        )

    def test_ranks_that_keep_different_ones_are_told_which(self):
        ranks = Ranks(2, Weights("abc"))

        def run(rank, ddp):
            model = ddp.module
            both = [torch.optim.SGD([model.a, model.c], lr=1.0), torch.optim.SGD([model.b, model.c], lr=1.0)]
            ddp(a=1.0, b=1.0, c=1.0).backward()
            for optimizer in both:
                optimizer.step()
            both[rank].zero_grad()
            return caught(ddp(a=10.0, b=10.0, c=10.0).backward)

        error = the_error(ranks.run(run))
        assert isinstance(error, StepMismatchError)
        assert "without clearing the last gradients (zero_grad()) of 'b', 'a' differ between ranks: 1 on rank 0; 0" in str(
            error
        )

    def test_the_same_ones_on_all_ranks_accumulate_as_in_torch(self):
        ranks = Ranks(2, Weights("ab"))

        def run(_, ddp):
            ddp(a=1.0, b=1.0).backward()
            ddp.module.a.grad = None
            ddp(a=10.0, b=10.0).backward()
            return grads(ddp.module)

        assert ranks.run(run) == [{"a": 10.0, "b": 11.0}] * 2


class TestLoadedWeights:
    @MODES
    @pytest.mark.parametrize("which", ["wrapper", "module"])
    def test_on_one_rank_are_an_error_on_all_before_anybody_updates(self, sharded, which):
        ranks = Ranks(3, Weights("ab"), use_distributed_optimizer=sharded)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            if rank == 2:
                target = ddp if which == "wrapper" else ddp.module
                target.load_state_dict({name: torch.full((100,), 7.0) for name in "ab"})

            def step():
                ddp(a=1.0, b=1.0).backward()
                optimizer.step()

            return caught(step), weights(ddp)

        results = ranks.run(run)

        error = the_error([error for error, _ in results])
        assert isinstance(error, ReplicasDivergedError)
        assert str(error) == (
            "step 0: loads of weights (load_state_dict(), by submodule) since the last agreement differ between ranks: 0 on "
            "ranks 0, 1; 1 on rank 2. The replicas do not hold the same weights any more, and gradients of different models "
            "would be averaged. Load on every rank, or call ddp.broadcast_params() on every rank right after a load on the "
            "first; a rank that loads weights only to look at them does so in a copy: copy.deepcopy(ddp.module). Load the "
            "last checkpoint on every rank, or call ddp.broadcast_params() and make the optimizer anew."
        )
        assert [at_end["a"] for _, at_end in results] == [1.0, 1.0, 7.0]

    @MODES
    @pytest.mark.parametrize("remedy", ["all load", "broadcast", "load once more on all"])
    def test_loads_on_all_ranks_and_broadcasts_are_fine(self, sharded, remedy):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            state = {name: torch.full((100,), 7.0) for name in "ab"}
            if rank == 0 or remedy == "all load":
                ddp.load_state_dict(state)
            if remedy == "broadcast":
                ddp.broadcast_params()
            if remedy == "load once more on all":
                assert isinstance(caught(lambda: (ddp(a=1.0, b=1.0).backward(), optimizer.step())), ReplicasDivergedError)
                ddp.load_state_dict(state)
            for _ in range(2):
                ddp(a=1.0, b=1.0).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(ddp)

        assert ranks.run(run) == [{"a": 5.0, "b": 5.0}] * 2

    @MODES
    def test_a_load_right_after_a_failure_belongs_to_the_next_step(self, sharded):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=sharded)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            errors = []
            for index in range(2):
                if index == 0 and rank == 1:
                    ddp.abort_step("no")  # its fence is on the way
                else:
                    errors.append(caught(lambda: (ddp(a=1.0, b=1.0).backward(), optimizer.step())))
                ddp.load_state_dict({name: torch.full((100,), 7.0) for name in "ab"})
            return [type(error) for error in errors], weights(ddp)

        at_end = {"a": 7.0, "b": 7.0}
        nothing = type(None)
        assert ranks.run(run) == [([PeerFailedError, nothing], at_end), ([nothing], at_end)]


class TestHyperparameters:
    """Of an optimizer that updates in every step by what its rank says."""

    def steps(self, ddp, optimizer, *, num_steps=2, between=lambda: None):
        """The errors of some steps, and the weights before each."""
        errors, before = [], []
        for _ in range(num_steps):
            before.append(weights(ddp)["a"])
            errors.append(caught(lambda: (ddp(a=1.0, b=1.0).backward(), optimizer.step())))
            optimizer.zero_grad()
            between()
        return errors, before

    def test_shards_are_not_updated_by_different_ones(self):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, bucket_size=100)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            if rank == 1:
                optimizer.param_groups[0]["lr"] = 0.5

            def mend():
                optimizer.param_groups[0]["lr"] = 1.0

            return self.steps(ddp, optimizer, between=mend), weights(ddp)

        results = ranks.run(run)

        error = the_error([errors[0] for (errors, _), _ in results])
        assert isinstance(error, HyperparameterMismatchError)
        assert (error.what, error.by_rank) == ("lr of group 0", ("1.0", "0.5"))
        assert str(error) == (
            "step 0: hyperparameters differ between ranks: lr of group 0 is 1.0 on rank 0; 0.5 on rank 1. Each rank would "
            f"update its shard differently, which gathered weights do not show. {SAME} No rank has updated. {DROPPED}"
        )
        for (errors, before), at_end in results:
            assert (errors[1], before) == (None, [1.0, 1.0])
            assert at_end == {"a": 0.0, "b": 0.0}

    def test_a_scheduler_that_follows_a_local_loss_is_found(self):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, bucket_size=100)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.torch_optimizer, patience=0)
            losses = iter([1.0, 1.0, 1.0] if rank == 1 else [3.0, 2.0, 1.0])
            return self.steps(ddp, optimizer, num_steps=3, between=lambda: scheduler.step(next(losses)))[0]

        error = the_error([errors[2] for errors in ranks.run(run)])
        assert isinstance(error, HyperparameterMismatchError)
        assert "lr of group 0 is 1.0 on rank 0; 0.1 on rank 1" in str(error)

    @pytest.mark.parametrize("how", ["clip_grad", "scale_gradients"])
    def test_clipping_and_scaling_are_numbers_of_the_update_too(self, how):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, finish="explicit", bucket_size=100)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)

            def step():
                ddp(a=1.0, b=1.0).backward()
                ddp.finish_grad_sync()
                if how == "clip_grad":
                    optimizer.clip_grad = 0.5 + rank
                else:
                    ddp.scale_gradients(0.5 + rank)
                optimizer.step()

            return caught(step), weights(ddp)

        results = ranks.run(run)

        error = the_error([error for error, _ in results])
        assert isinstance(error, HyperparameterMismatchError)
        assert f"{how}{'()' if how == 'scale_gradients' else ''} is 0.5 on rank 0; 1.5 on rank 1" in str(error)
        assert [at_end for _, at_end in results] == [{"a": 1.0, "b": 1.0}] * 2

    def test_a_second_step_on_the_same_gradients_leaves_nothing_to_compare(self):
        ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, bucket_size=100)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            ddp(a=1.0, b=1.0).backward()
            optimizer.step()
            if rank == 1:
                assert caught(optimizer.step) is not None
            optimizer.zero_grad()
            ddp(a=1.0, b=1.0).backward()
            ddp.finish_grad_sync()
            return caught(optimizer.step)

        assert ranks.run(run) == [None, None]

    @pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
    def test_whole_parameters_have_diverged_when_the_next_fence_finds_it(self, wraps):
        ranks = Ranks(2, Weights("ab"))

        def run(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            stepper = mb.DistributedOptimizer(optimizer, ddp) if wraps else optimizer
            optimizer.param_groups[0]["lr"] = 1.0 - rank / 2
            return self.steps(ddp, stepper)[0]

        results = ranks.run(run)

        assert [errors[0] for errors in results] == [None, None]
        error = the_error([errors[1] for errors in results])
        assert isinstance(error, ReplicasDivergedError)
        assert (error.what, error.by_rank) == ("hyperparameters of the last update (lr of group 0)", ("1.0", "0.5"))
        assert str(error) == (
            "step 1: hyperparameters of the last update (lr of group 0) differ between ranks: 1.0 on rank 0; 0.5 on rank 1. "
            "The replicas do not hold the same weights any more, and gradients of different models would be averaged. Each "
            f"rank has updated them in its own way. {SAME} Load the last checkpoint on every rank, or call "
            "ddp.broadcast_params() and make the optimizer anew."
        )

    def test_the_parameters_of_a_group_are_compared_too(self):
        ranks = Ranks(2, Weights("ab"))

        def run(rank, ddp):
            params = [ddp.module.a, ddp.module.b]
            first, second = params if rank == 0 else reversed(params)
            optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.0}])
            return self.steps(ddp, optimizer)[0][1]

        error = the_error(ranks.run(run))
        assert isinstance(error, ReplicasDivergedError)
        # The CRC-32 of b"a" and of b"b".
        assert error.what == "hyperparameters of the last update (parameters of group 0)"
        assert error.by_rank == ("1 with CRC-32 e8b7be43 of their names", "1 with CRC-32 71beeff9 of their names")

    def test_a_factor_after_the_reduction_is_compared_with_the_update_that_uses_it(self):
        ranks = Ranks(2, Weights("ab"), grad_reduction="sum")

        def run(rank, ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            errors = []
            for factor in (0.5, 0.25 + rank):
                errors.append(caught(ddp(a=1.0, b=1.0).backward))
                ddp.scale_gradients(factor)
                optimizer.step()
                ddp.zero_grad()
            return [*errors, caught(ddp(a=1.0, b=1.0).backward)]

        results = ranks.run(run)

        assert [errors[:2] for errors in results] == [[None, None]] * 2
        error = the_error([errors[2] for errors in results])
        assert "hyperparameters of the last update (scale_gradients()) differ between ranks: 0.25 on rank 0; 1.25" in str(error)


class TestMakingTheOptimizer:
    """Every rank makes one at the same time."""

    def made(self, build, *, size=2, **switches):
        """What the constructor raises on each rank; the torch optimizer must be as it was."""
        ranks = Ranks(size, Weights("ab"), bucket_size=100, **({"use_distributed_optimizer": True} | switches))

        def run(rank, ddp):
            optimizer, kwargs = build(rank, ddp)
            before = [list(group["params"]) for group in optimizer.param_groups]
            error = caught(lambda: mb.DistributedOptimizer(optimizer, ddp, **kwargs))
            assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [list(map(id, g)) for g in before]
            return error

        return ranks.run(run)

    @pytest.mark.parametrize("sharded", [False, True])
    def test_with_groups_of_other_parameters_is_refused_on_all(self, sharded):
        def build(rank, ddp):
            params = [ddp.module.a, ddp.module.b]
            first, second = params if rank == 0 else reversed(params)
            return torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0), {}

        error = the_error(self.made(build, use_distributed_optimizer=sharded))

        assert isinstance(error, LayoutMismatchError)
        assert error.phase == "DistributedOptimizer()"
        assert str(error) == (
            "the optimizer is not the same on all ranks: entry 0: rank 0 has a in group 0, rank 1 has a in group 1; entry 1: "
            "rank 0 has b in group 1, rank 1 has b in group 0 (2 of 21 entries differ). Values that do not belong together "
            "would be mixed. Give every rank the same model, optimizer, state, config and versions, in the same order. The "
            "optimizer was changed on no rank."
        )

    @pytest.mark.parametrize(
        ("build", "text"),
        [
            (
                lambda rank, ddp: (torch.optim.SGD(ddp.parameters(), lr=1.0 + rank), {}),
                "rank 0 has lr of group 0=1.0, rank 1 has lr of group 0=2.0",
            ),
            (
                lambda rank, ddp: (torch.optim.SGD(ddp.parameters(), lr=1.0), {"clip_grad": float(rank)}),
                "rank 0 has clip_grad=0.0, rank 1 has clip_grad=1.0",
            ),
            (
                lambda rank, ddp: ((torch.optim.Adam, torch.optim.AdamW)[rank](ddp.parameters(), lr=1.0, weight_decay=0.0), {}),
                "rank 0 has Adam, rank 1 has AdamW",
            ),
        ],
        ids=["learning rate", "clip_grad", "class"],
    )
    def test_with_other_numbers_is_refused_on_all(self, build, text):
        error = the_error(self.made(build))

        assert isinstance(error, LayoutMismatchError)
        assert text in str(error)

    def test_with_state_on_one_rank_only_is_refused_on_all(self):
        def build(rank, ddp):
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1.0)
            if rank == 0:
                for param in ddp.parameters():
                    optimizer.state[param] = {
                        "step": torch.tensor(7.0),
                        "exp_avg": torch.ones(100),
                        "exp_avg_sq": torch.ones(100),
                    }
            return optimizer, {}

        error = the_error(self.made(build))

        assert (
            "rank 0 has a in group 0 exp_avg per element exp_avg_sq per element step=7.0 (float32, (), cpu), rank 1 has a"
            in (str(error))
        )

    @pytest.mark.parametrize(
        ("spoil", "cause"),
        [
            (lambda ddp: (torch.optim.SGD([ddp.module.a], lr=1.0), {}), "OptimizerParametersError: trainable parameters"),
            (lambda ddp: (torch.optim.SGD(ddp.parameters(), lr=1.0), {"clip_grad": -1.0}), "ConfigError: clip_grad must be"),
            (lambda ddp: (torch.optim.LBFGS(ddp.parameters(), lr=1.0), {}), "ConfigError: LBFGS.step() requires a closure"),
        ],
        ids=["parameters", "clip_grad", "class"],
    )
    def test_that_one_rank_cannot_make_keeps_nobody_waiting(self, spoil, cause):
        def build(rank, ddp):
            return spoil(ddp) if rank == 1 else (torch.optim.SGD(ddp.parameters(), lr=1.0), {})

        error = the_error(self.made(build))

        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.phase) == (1, "DistributedOptimizer()")
        assert str(error).startswith(f"rank 1 failed in DistributedOptimizer(): {cause}")
        assert str(error).endswith(". The optimizer was changed on no rank.")


class TestBeforeTheWrap:
    @pytest.mark.parametrize(
        ("mark", "text"),
        [
            (
                lambda module: module(a=1.0).backward(),
                "rank 0 has a (100,) float32, rank 1 has a (100,) float32 with a gradient from before wrapping",
            ),
            (
                lambda module: setattr(module.a, "shared_embedding", True),
                "rank 0 has a (100,) float32, rank 1 has a (100,) float32 with shared_embedding",
            ),
        ],
        ids=["gradient", "shared_embedding"],
    )
    def test_what_one_rank_has_set_on_a_parameter_is_refused_on_all(self, mark, text):
        with pytest.raises(LayoutMismatchError) as error:
            Ranks(2, Weights("ab"), prepare=lambda rank, module: mark(module) if rank == 1 else None)

        assert text in str(error.value)
        assert error.value.num_different == 1

    @pytest.mark.parametrize("frozen", [False, True])
    def test_what_all_ranks_have_set_is_fine(self, frozen):
        def prepare(rank, module):
            module.b.shared_embedding = True
            module(a=1.0 + rank, b=1.0).backward()
            module.b.requires_grad_(not frozen)

        ranks = Ranks(2, Weights("ab"), prepare=prepare)

        def run(_, ddp):
            ddp(a=1.0, b=1.0).backward()
            return ddp.module.a.grad[0].item()

        assert ranks.run(run) == [2.5, 2.5]  # the mean of 1 + 1 and 2 + 1

    def test_another_patch_of_python_is_the_same_model(self, monkeypatch):
        ranks = []

        def prepare(rank, _):
            ranks.append(rank)
            monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", str(len(ranks))))

        assert len(Ranks(2, Weights("ab"), prepare=prepare).ddps) == 2


class TestStepNumbers:
    @pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
    def test_of_numpy_and_torch_are_numbers(self, kind):
        ranks = Ranks(2, Weights("ab"))

        def run(rank, ddp):
            ddp.step_number = kind(3)
            error = caught(ddp(**({"a": 1.0, "b": 1.0} if rank == 0 else {"a": 1.0})).backward)
            return error, type(ddp.step_number), ddp.step_number

        results = ranks.run(run)

        assert isinstance(the_error([error for error, *_ in results]), UnusedParameterError)
        assert [rest for _, *rest in results] == [[int, 3]] * 2

    @pytest.mark.parametrize("number", [1.5, "3", math.nan, 2**62, -1, True], ids=repr)
    def test_other_things_are_refused(self, number):
        (ddp,) = Ranks(1, Weights("a")).ddps

        with pytest.raises(ConfigError, match="step_number must be None or an integer"):
            ddp.step_number = number

        assert ddp.step_number is None


def test_of_ranks_that_miss_other_parameters_the_first_is_named():
    ranks = Ranks(2, Weights("abc"))

    def run(rank, ddp):
        return caught(ddp(**({"b": 1.0, "c": 1.0} if rank == 0 else {"a": 1.0, "c": 1.0})).backward)

    error = the_error(ranks.run(run))
    assert isinstance(error, UnusedParameterError)
    assert (error.ranks, error.params) == ((0,), ("a",))
    assert "'a' got no gradient on rank 0 of 2 ranks (first in bucket 0 of 1, counted from 0)." in str(error)
