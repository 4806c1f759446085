"""``optimizer.parts``: the torch optimizers of one wrapper stepped one by one, as in plain torch on the mean gradient."""

import copy
import math

import pytest
import torch
from torch.nn.functional import softplus

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import (
    CheckpointMismatchError,
    LateGradientError,
    MegabucketError,
    PhaseError,
    ReplicasDivergedError,
    UnreducedGradientsError,
)
from megabucket.testing import LoopbackWorld

SHARDED = {"use_distributed_optimizer": True}
MODES = pytest.mark.parametrize(
    "switches",
    [{}, SHARDED, {**SHARDED, "overlap_param_gather": True}],
    ids=["all_reduce", "reduce_scatter", "overlapped gather"],
)


class Gan(torch.nn.Module):
    """A generator and a judge, with a loss each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maker = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
        self.judge = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.GELU(), torch.nn.Linear(6, 1))

    def forward(self, noise, real=None):
        if real is None:
            return softplus(-self.judge(self.maker(noise))).mean()
        return softplus(-self.judge(real)).mean() + softplus(self.judge(self.maker(noise).detach())).mean()


def batch(step, rank, index=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def adams(model):
    return [
        torch.optim.AdamW(model.maker.parameters(), lr=0.02, betas=(0.5, 0.9)),
        torch.optim.Adam(model.judge.parameters(), lr=0.01),
    ]


def muon_and_adamw(model):
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def sgds(model):
    return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (model.maker, model.judge)]


class Ranks:
    """A wrapped copy of the model on each rank, with an optimizer over several torch optimizers."""

    def __init__(self, size=2, make=adams, *, model=None, completion="immediate", optimizer=None, **switches):
        self.world = LoopbackWorld(size, completion=completion, timeout_s=20)
        model = Gan() if model is None else model
        self.modules = [copy.deepcopy(model) for _ in range(size)]
        config = DistributedDataParallelConfig(**{"bucket_size": 40} | switches)

        def wrap(rank):
            ddp = DistributedDataParallel(self.modules[rank], config, communicator=self.world.communicator(rank))
            return ddp, DistributedOptimizer(make(ddp.module), ddp, **optimizer or {})

        self.wrapped = self.world.run(wrap)

    def run(self, program):
        """Call ``program(rank, ddp, optimizer)`` on every rank."""
        return self.world.run(lambda rank: program(rank, *self.wrapped[rank]))

    @property
    def weights(self):
        """The weights of all ranks, which are equal."""
        self.run(lambda _, ddp, __: ddp.finish_param_sync())
        of_ranks = [[param.detach().clone() for param in module.parameters()] for module in self.modules]
        assert all(equal(weights, of_ranks[0]) for weights in of_ranks)
        return of_ranks[0]


def equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def both_losses(model, step, rank, index=0):
    noise, real = batch(step, rank, index)
    return model(noise) + model(noise, real)


def error_of(call):
    try:
        call()
    except MegabucketError as error:
        return error
    return None


# One backward, several optimizers #


@MODES
@pytest.mark.parametrize("make", [adams, muon_and_adamw])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_that_step_one_after_another_end_with_the_weights_of_a_joint_step(switches, make, order):
    jointly = Ranks(3, make, **switches)
    in_turn = Ranks(3, make, completion="manual", **switches)  # finds writes into a gather on its way

    def joint(rank, ddp, optimizer):
        for step in range(4):
            both_losses(ddp, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    def one_by_one(rank, ddp, optimizer):
        for step in range(4):
            both_losses(ddp, step, rank).backward()
            assert [optimizer.parts[part].step().updated for part in order] == [True, True]
            optimizer.zero_grad()

    jointly.run(joint)
    in_turn.run(one_by_one)

    assert equal(in_turn.weights, jointly.weights)


@MODES
def test_each_part_clears_its_gradients_after_its_step_as_with_plain_torch(switches):
    jointly, in_turn = Ranks(2, **switches), Ranks(2, **switches)

    def joint(rank, ddp, optimizer):
        for step in range(4):
            both_losses(ddp, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    def one_by_one(rank, ddp, optimizer):
        for step in range(4):
            both_losses(ddp, step, rank).backward()
            for part in optimizer.parts:
                part.step()
                part.zero_grad()
            assert all(param.grad is None for param in ddp.module.parameters())

    jointly.run(joint)
    in_turn.run(one_by_one)

    assert equal(in_turn.weights, jointly.weights)


@MODES
def test_each_part_clips_by_the_norm_of_its_parameters(switches):
    ranks = Ranks(2, sgds, optimizer={"clip_grad": 0.05}, **switches)
    plain, optimizers, norms = Gan(), None, []
    optimizers = sgds(plain)
    for step in range(3):
        (sum(both_losses(plain, step, rank) for rank in range(2)) / 2).backward()
        for optimizer, of_part in zip(optimizers, (plain.maker, plain.judge), strict=True):
            norms.append(float(torch.nn.utils.clip_grad_norm_(of_part.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()

    def run(rank, ddp, optimizer):
        found = []
        for step in range(3):
            both_losses(ddp, step, rank).backward()
            found += [part.step().grad_norm for part in optimizer.parts]
            optimizer.zero_grad()
        return found

    found = ranks.run(run)

    assert found[0] == found[1] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.05
    assert_near(ranks.weights, plain.parameters())


@MODES
def test_a_part_may_be_clipped_by_hand_before_its_step(switches):
    ranks = Ranks(2, sgds, **switches)
    plain, norms = Gan(), []
    optimizers = sgds(plain)
    for step in range(3):
        (sum(both_losses(plain, step, rank) for rank in range(2)) / 2).backward()
        for optimizer, of_part in zip(optimizers, (plain.maker, plain.judge), strict=True):
            norms.append(float(torch.nn.utils.clip_grad_norm_(of_part.parameters(), 0.05)))
            optimizer.step()
        plain.zero_grad()

    def run(rank, ddp, optimizer):
        found = []
        for step in range(3):
            both_losses(ddp, step, rank).backward()
            for part in optimizer.parts:
                found.append(float(part.clip_grad_norm_(0.05)))
                part.step()
            optimizer.zero_grad()
        return found

    found = ranks.run(run)

    assert found[0] == found[1] == pytest.approx(norms, rel=1e-5)
    assert_near(ranks.weights, plain.parameters())


@MODES
def test_microbatches_accumulate_before_parts_step(switches):
    ranks, plain = Ranks(2, **switches), Gan()
    optimizers = adams(plain)
    for step in range(3):
        for index in range(2):
            (sum(both_losses(plain, step, rank, index) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        plain.zero_grad()

    def run(rank, ddp, optimizer):
        for step in range(3):
            with ddp.no_sync():
                both_losses(ddp, step, rank, 0).backward()
            both_losses(ddp, step, rank, 1).backward()
            for part in optimizer.parts:
                part.step()
                part.zero_grad()

    ranks.run(run)

    assert_near(ranks.weights, plain.parameters())


@MODES
def test_each_part_follows_its_own_scheduler(switches):
    def schedulers(optimizers):
        first, second = optimizers
        return [torch.optim.lr_scheduler.StepLR(first, 1, 0.5), torch.optim.lr_scheduler.OneCycleLR(second, 0.1, total_steps=5)]

    ranks, plain = Ranks(2, **switches), Gan()
    optimizers = adams(plain)
    of_plain = schedulers(optimizers)
    for step in range(4):
        (sum(both_losses(plain, step, rank) for rank in range(2)) / 2).backward()
        for optimizer, scheduler in zip(optimizers, of_plain, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def run(rank, ddp, optimizer):
        made = schedulers(optimizer.parts)
        for step in range(4):
            both_losses(ddp, step, rank).backward()
            for part, scheduler in zip(optimizer.parts, made, strict=True):
                part.step()
                part.zero_grad()
                scheduler.step()
        return [part.param_groups[0]["lr"] for part in optimizer.parts]

    assert ranks.run(run) == [[optimizer.param_groups[0]["lr"] for optimizer in optimizers]] * 2
    assert_near(ranks.weights, plain.parameters())


# A GAN: several backwards, each with the step of one part #


def train_plain_gan(size, *, steps=4, toggles=True):
    """One process on the mean loss of all ranks. As torch DDP does with find_unused_parameters=True."""
    plain = Gan()
    optimizers = adams(plain)
    for step in range(steps):
        of_ranks = [batch(step, rank) for rank in range(size)]
        for optimizer, other, loss in (
            (optimizers[0], plain.judge, lambda of_ranks=of_ranks: sum(plain(noise) for noise, _ in of_ranks) / size),
            (optimizers[1], plain.maker, lambda of_ranks=of_ranks: sum(plain(*both) for both in of_ranks) / size),
        ):
            other.requires_grad_(not toggles)
            loss().backward()
            other.requires_grad_(True)
            optimizer.step()
            plain.zero_grad()
    return list(plain.parameters())


# Not called by submodules, cleared after the step and not toggled: the judge would have gradients of the other loss, which only
# its own zero_grad() clears. ``test_gradients_of_another_part_that_were_not_cleared...`` has that case.
CLEARING = [
    (calls, clears, toggles)
    for calls in ("wrapper", "submodules")
    for clears in ("before", "after")
    for toggles in (True, False)
    if (calls, clears, toggles) != ("submodules", "after", False)
]


@MODES
@pytest.mark.parametrize(("calls", "clears", "toggles"), CLEARING)
def test_a_gan_ends_with_the_weights_of_plain_torch(switches, toggles, clears, calls):
    ranks = Ranks(2, unused_parameters="skip", **switches)

    def run(rank, ddp, optimizer):
        (maker, judge), gan = optimizer.parts, ddp.module
        for step in range(4):
            noise, real = batch(step, rank)
            for part, other, inputs in ((maker, gan.judge, (noise,)), (judge, gan.maker, (noise, real))):
                if toggles:
                    other.requires_grad_(False)
                if clears == "before":
                    part.zero_grad()
                if calls == "submodules":  # as in a step of Lightning, which is one forward
                    ddp.finish_param_sync()
                (ddp if calls == "wrapper" else gan.forward)(*inputs).backward()
                assert part.step().updated
                if clears == "after":
                    part.zero_grad()
                other.requires_grad_(True)

    ranks.run(run)

    assert_near(ranks.weights, train_plain_gan(2))


@MODES
def test_gradients_of_another_part_that_were_not_cleared_are_an_error_without_a_forward(switches):
    ranks = Ranks(2, unused_parameters="skip", **switches)

    def run(rank, ddp, optimizer):
        noise, real = batch(0, rank)
        ddp(noise).backward()
        optimizer.parts[0].step()
        optimizer.parts[0].zero_grad()
        ddp.finish_param_sync()
        error = error_of(lambda: (ddp.module.forward(noise, real).backward(), optimizer.parts[1].step()))
        optimizer.zero_grad()
        both_losses(ddp, 1, rank).backward()
        return error, optimizer.step().updated

    (error, updated), (other, _) = ranks.run(run)

    assert isinstance(error, LateGradientError)
    assert str(error) == str(other)
    assert updated


@MODES
def test_a_half_of_a_gan_that_no_loss_uses_keeps_its_state(switches):
    ranks = Ranks(2, unused_parameters="skip", **switches)

    def run(rank, ddp, optimizer):
        for step in range(3):
            ddp(*batch(step, rank)).backward()
            optimizer.parts[1].step()
            optimizer.parts[1].zero_grad()
        return [part.state_dict()["state"] for part in optimizer.parts]

    maker, judge = ranks.run(run)[0]

    assert not maker
    assert [float(of["step"]) for of in judge.values()] == [3.0] * 4
    assert equal(ranks.weights[:4], list(Gan().maker.parameters()))


# Steps that are skipped #


@MODES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_no_part_updates_if_the_gradients_of_one_are_not_finite(switches, order):
    ranks = Ranks(2, sgds, nonfinite_gradients="skip_step", **switches)

    def run(rank, ddp, optimizer):
        noise, real = batch(0, rank)
        (ddp(noise) + ddp(noise, real) * (math.inf if rank == 1 else 1.0)).backward()  # finite for the maker
        results = [optimizer.parts[part].step() for part in order]
        for part in optimizer.parts:
            part.zero_grad()
        both_losses(ddp, 1, rank).backward()
        return [*(result.updated for result in results), *(optimizer.parts[part].step().updated for part in order)]

    assert ranks.run(run) == [[False, False, True, True]] * 2
    expected = Ranks(2, sgds, **switches)
    expected.run(lambda rank, ddp, optimizer: [both_losses(ddp, 1, rank).backward(), optimizer.step()])
    assert equal(ranks.weights, expected.weights)


@MODES
@pytest.mark.parametrize("clears", ["each", "all"])
def test_a_torch_scaler_skips_all_parts_and_goes_on_as_without_one(switches, clears):
    ranks = Ranks(2, sgds, nonfinite_gradients="allow", **switches)

    def run(rank, ddp, optimizer):
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
        for step in range(5):
            factor = math.inf if (step, rank) == (1, 1) else 1.0
            scaler.scale(both_losses(ddp, step, rank) * factor).backward()
            for part in optimizer.parts:
                scaler.step(part)
                if clears == "each":
                    part.zero_grad()
            if clears == "all":
                optimizer.zero_grad()
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    scales = ranks.run(run)

    plain = Gan()
    optimizers = sgds(plain)
    for step in (0, 2, 3, 4):
        (sum(both_losses(plain, step, rank) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        plain.zero_grad()
    assert scales == [[2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10]] * 2
    assert_near(ranks.weights, plain.parameters())


@MODES
def test_a_torch_scaler_unscales_before_each_part_is_clipped(switches):
    scaled, unscaled = (Ranks(2, sgds, nonfinite_gradients="allow", **switches) for _ in range(2))

    def with_scaler(rank, ddp, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            scaler.scale(both_losses(ddp, step, rank)).backward()
            for part in optimizer.parts:
                scaler.unscale_(part)
                part.clip_grad_norm_(0.05)
            for part in optimizer.parts:
                scaler.step(part)
            scaler.update()
            optimizer.zero_grad()

    def without(rank, ddp, optimizer):
        for step in range(3):
            both_losses(ddp, step, rank).backward()
            for part in optimizer.parts:
                part.clip_grad_norm_(0.05)
                part.step()
            optimizer.zero_grad()

    scaled.run(with_scaler)
    unscaled.run(without)

    assert_near(scaled.weights, unscaled.weights)


# State #


@MODES
@pytest.mark.parametrize(("make", "size"), [(adams, 2), (adams, 3), (muon_and_adamw, 1), (muon_and_adamw, 2)])
def test_state_of_parts_goes_on_with_any_number_of_ranks(switches, make, size):
    def train(steps, num_ranks):
        def run(rank, ddp, optimizer):
            for step in steps:
                # The same mean gradient on any number of ranks.
                (sum(both_losses(ddp.module, step, part) for part in range(6)) / 6).backward()
                for part in optimizer.parts:
                    part.step()
                    part.zero_grad()
            states = [copy.deepcopy(part.state_dict()) for part in optimizer.parts]
            ddp.finish_param_sync()
            return states, copy.deepcopy(ddp.module.state_dict())

        return run

    def load(rank, ddp, optimizer):
        ddp.load_state_dict(weights)
        for part, state in zip(optimizer.parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))

    whole, half, again = Ranks(2, make, **switches), Ranks(2, make, **switches), Ranks(size, make, **switches)
    whole.run(train(range(4), 2))
    states, weights = half.run(train(range(2), 2))[0]

    again.run(load)
    again.run(train(range(2, 4), size))

    if size == 2:
        assert equal(again.weights, whole.weights)
    assert_near(again.weights, whole.weights)


@MODES
def test_the_state_of_a_part_is_that_of_its_plain_optimizer(switches):
    ranks, plain = Ranks(2, **switches), Gan()
    optimizers = adams(plain)
    for step in range(2):
        (sum(both_losses(plain, step, rank) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def run(rank, ddp, optimizer):
        for step in range(2):
            both_losses(ddp, step, rank).backward()
            for part in optimizer.parts:
                part.step()
            optimizer.zero_grad()
        return [part.state_dict() for part in optimizer.parts]

    for found, optimizer in zip(ranks.run(run)[1], optimizers, strict=True):
        expected = optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for key, of_param in expected["state"].items():
            assert found["state"][key].keys() == of_param.keys()
            assert_near(found["state"][key].values(), of_param.values())
        optimizer.load_state_dict(found)


@MODES
def test_state_of_another_part_is_refused_on_all_ranks_and_changes_nothing(switches):
    def make(model):
        adams_of_judge = (torch.optim.Adam(model.judge[index].parameters()) for index in (0, 2))
        return [torch.optim.SGD(model.maker.parameters(), lr=0.5), *adams_of_judge]

    ranks = Ranks(2, make, **switches)

    def run(rank, ddp, optimizer):
        both_losses(ddp, 0, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        _, second, third = (part.state_dict() for part in optimizer.parts)
        loads = [(optimizer.parts[2], second), (optimizer.parts[1], {})]
        errors = [error_of(lambda part=part, state=state: part.load_state_dict(state)) for part, state in loads]
        return errors, equal(optimizer.parts[2].state_dict()["state"][0].values(), third["state"][0].values())

    for errors, is_same in ranks.run(run):
        assert [type(error) for error in errors] == [CheckpointMismatchError] * 2
        assert is_same


@MODES
@pytest.mark.parametrize("clears", [True, False])
def test_a_half_that_does_not_step_stands_in_the_way_of_no_checkpoint_and_no_rebuild(switches, clears):
    def run(rank, ddp, optimizer, *, calls=True):
        maker, judge = optimizer.parts
        for step in range(3):
            for part, inputs in ((maker, batch(step, rank)[:1]), (judge, batch(step, rank))):
                part.zero_grad()
                ddp(*inputs).backward()
                part.step()
                if clears:
                    part.zero_grad()
                if calls:
                    part.load_state_dict(part.state_dict())
                    ddp.check_replicas()
            if calls:
                ddp.rebuild()

    ranks, expected = (Ranks(2, unused_parameters="skip", **switches) for _ in range(2))
    ranks.run(run)
    expected.run(lambda *rank: run(*rank, calls=False))

    assert equal(ranks.weights, expected.weights)


@MODES
def test_training_goes_on_with_parts_after_a_rebuild(switches):
    ranks, expected = Ranks(2, **switches), Ranks(2, **switches)

    def run(rank, ddp, optimizer, *, rebuilds=True):
        for step in range(4):
            both_losses(ddp, step, rank).backward()
            for part in optimizer.parts:
                part.step()
                part.zero_grad()
            if step == 1 and rebuilds:
                ddp.rebuild()

    ranks.run(run)
    expected.run(lambda *rank: run(*rank, rebuilds=False))

    assert equal(ranks.weights, expected.weights)


# Calls that are wrong #


@MODES
@pytest.mark.parametrize("how", ["part", "whole"])
def test_stepping_twice_on_the_same_gradients_is_an_error_on_all_ranks_and_the_next_step_is_right(switches, how):
    ranks, expected = Ranks(2, sgds, **switches), Ranks(2, sgds, **switches)

    def run(rank, ddp, optimizer):
        both_losses(ddp, 0, rank).backward()
        optimizer.parts[0].step()
        error = error_of(optimizer.parts[0].step if how == "part" else optimizer.step)
        optimizer.zero_grad()
        both_losses(ddp, 1, rank).backward()
        optimizer.step()
        return error

    def only_one_part_first(rank, ddp, optimizer):
        both_losses(ddp, 0, rank).backward()
        optimizer.parts[0].step()
        optimizer.zero_grad()
        both_losses(ddp, 1, rank).backward()
        optimizer.step()

    for error in ranks.run(run):
        assert isinstance(error, PhaseError)
        assert ("SGD.step() was called twice" if how == "part" else "after one of its parts") in str(error)
    expected.run(only_one_part_first)
    assert equal(ranks.weights, expected.weights)


@MODES
def test_a_part_steps_on_reduced_gradients_only(switches):
    ranks = Ranks(2, **switches)

    def run(rank, ddp, optimizer):
        with ddp.no_sync():
            both_losses(ddp, 0, rank).backward()
        return error_of(optimizer.parts[0].step)

    assert [type(error) for error in ranks.run(run)] == [UnreducedGradientsError] * 2


def nothing(_):
    """Begin the next step."""


STEP_SECOND = lambda optimizer: optimizer.parts[1].step()  # noqa: E731
DIFFERENT = {
    "another part": (STEP_SECOND, nothing, nothing),
    "another part first": (STEP_SECOND, lambda optimizer: optimizer.parts[0].step(), STEP_SECOND),
    "zero_grad": (None, lambda optimizer: optimizer.zero_grad(), STEP_SECOND),
    "zero_grad of a part": (None, lambda optimizer: optimizer.parts[0].zero_grad(), STEP_SECOND),
    "the next forward": (None, nothing, STEP_SECOND),
    "the same part again": (None, lambda optimizer: optimizer.parts[0].step(), STEP_SECOND),
    "all parts": (None, lambda optimizer: optimizer.step(), STEP_SECOND),
    "a clip": (None, lambda optimizer: optimizer.parts[1].clip_grad_norm_(0.1), STEP_SECOND),
    "a call": (None, lambda optimizer: optimizer.state_dict(), STEP_SECOND),
}


@pytest.mark.pairs
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("how", DIFFERENT)
@MODES
def test_ranks_that_do_not_step_the_same_parts_get_one_error(switches, how, odd):
    ranks = Ranks(2, completion="manual", **switches)
    first, of_odd, of_other = DIFFERENT[how]

    def run(rank, ddp, optimizer):
        errors = []

        def call(*steps):
            try:
                for step in steps:
                    step(optimizer)
            except MegabucketError as error:
                errors.append(error)

        both_losses(ddp, 0, rank).backward()
        call(first if rank == odd and first else lambda optimizer: optimizer.parts[0].step())
        call(of_odd if rank == odd else of_other)
        clears = [] if of_odd is nothing and rank == odd else [lambda optimizer: optimizer.zero_grad()]
        while ddp.sync.step < 5 and ddp.sync.broken is None and len(errors) < 8:
            # As many steps on all ranks, whatever was dropped on the way.
            backward = lambda _, step=ddp.sync.step: both_losses(ddp, step, rank).backward()  # noqa: E731
            call(*clears, backward, lambda optimizer: optimizer.step())
            clears = [lambda optimizer: optimizer.zero_grad()]
        return errors, ddp.sync.broken, ddp.sync.step

    found = ranks.run(run)

    is_order_free = not switches and how == "another part first"  # each rank updates by itself
    of_ranks = [[str(error).partition("] ")[2] or str(error) for error in errors] for errors, *_ in found]
    # The rank that fails raises its own error, and the others one that contains it.
    alike = [(text, other) for text in of_ranks[0] for other in of_ranks[1] if text in other or other in text]
    assert bool(alike) is not is_order_free, found
    is_diverged = any(isinstance(error, ReplicasDivergedError) for errors, *_ in found for error in errors)
    assert is_diverged or found[0][1] is found[1][1] is None, found
    assert found[0][2] == found[1][2] == 5
    if not is_diverged:
        assert ranks.weights
