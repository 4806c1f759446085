"""Two parts of a model, each with a wrapper and an optimizer, step as one: against the whole model in one process."""

import copy
import math

import pytest
import torch
from optim_ranks import WAYS, in_ways
from torch.optim.lr_scheduler import LambdaLR

from megabucket import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    DynamicGradScaler,
    finalize_grads,
)
from megabucket.errors import (
    ConfigError,
    LayoutMismatchError,
    MegabucketError,
    NonFiniteGradientError,
    PeerFailedError,
    PhaseError,
    UnreducedGradientsError,
    WrapperBrokenError,
)
from megabucket.testing import LoopbackWorld

MODES = in_ways("all_reduce", "all_reduce, explicit", "reduce_scatter", "explicit", "overlap")
SHARDED = in_ways("reduce_scatter", "overlap")
SIZE, CLIP, NUM_STEPS = 2, 0.5, 6
DTYPE = torch.float64


def whole():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 5)).to(DTYPE)


def loss_of(parts, step, rank):
    """Return the loss of a rank in a step; it is larger in odd steps."""
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=DTYPE)
    for part in parts:
        inputs = torch.tanh(part(inputs)) * (3 if step % 2 else 1)
    return (inputs - 1).square().mean()


class Side:
    """One rank: two wrapped parts and their optimizers."""

    def __init__(self, world, rank, parts, *, switches, clips=(0.0, 0.0), member=None, wish=None, **fields):
        self.rank = rank
        config = DistributedDataParallelConfig(bucket_size=30, **switches)
        self.ddps = [DistributedDataParallel(part, config, communicator=world.communicator(rank)) for part in parts]
        self.optimizers = [
            DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.05), ddp, clip_grad=clip, **(member or {}))
            for ddp, clip in zip(self.ddps, clips, strict=True)
        ]
        self.chain = ChainedOptimizer(self.optimizers, **fields)

    def backward(self, step, factor=1.0):
        (loss_of(self.ddps, step, self.rank) * factor).backward()
        self.finish()

    def finish(self):
        if self.ddps[0].ddp_config.finish == "explicit":
            finalize_grads(self.ddps)

    def train(self, steps):
        results = []
        for step in steps:
            self.backward(step)
            results.append(self.chain.step())
            self.chain.zero_grad()
        return results

    def weights(self):
        for ddp in self.ddps:
            ddp.finish_param_sync()
        return [param.detach().clone() for ddp in self.ddps for param in ddp.module.parameters()]


def run_ranks(program, *, size=SIZE, **fields):
    """Call ``program(side)`` on each rank; returns the world and the results."""
    world, parts = LoopbackWorld(size, timeout_s=20), [whole() for _ in range(size)]
    return world, world.run(lambda rank: program(Side(world, rank, parts[rank], **fields)))


def plain(steps, *, size=SIZE, clip=CLIP, norm_type=2.0, clips=None):
    """Return norms and weights of the whole model in plain torch. ``clips``: of each part, by a norm of its own."""
    model, norms = whole(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in steps:
        sum(loss_of(model, step, rank) / size for rank in range(size)).backward()
        for params, limit in [(model, clip)] if clips is None else zip(model, clips, strict=True):
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.parameters(), limit, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [param.detach() for param in model.parameters()]


def assert_same(weights, expected):
    for own, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)


@MODES
@pytest.mark.parametrize("size", [1, 3])
def test_two_parts_train_as_the_whole_model_does(size, switches):
    def program(side):
        return [result.grad_norm for result in side.train(range(NUM_STEPS))], side.weights()

    world, found = run_ranks(program, size=size, switches=switches, clip_grad=CLIP)
    norms, expected = plain(range(NUM_STEPS), size=size)

    assert sum(norm > 2 * CLIP for norm in norms) >= NUM_STEPS / 2  # clipping bites
    for own, weights in found:
        assert own == pytest.approx(norms, rel=1e-6)  # rounded to float32
        assert_same(weights, expected)
    num_norms = sum(text.startswith("grad norm") for text in world.schedule(0))
    assert num_norms == (NUM_STEPS if size > 1 and "use_distributed_optimizer" in switches else 0)


def test_norms_of_another_kind_and_zeros_are_over_both_parts():
    def program(side):
        return [(result.grad_norm, result.num_zeros) for result in side.train([0])]

    member = {"norm_type": 1.0, "returns_num_zeros": True}
    _, found = run_ranks(program, switches=WAYS["reduce_scatter"], member=member)

    assert found == [[(pytest.approx(plain([0], norm_type=1.0)[0][0], rel=1e-6), 0)]] * SIZE


@MODES
def test_a_part_with_a_clip_grad_of_its_own_has_a_norm_of_its_own(switches):
    def program(side):
        (result,) = side.train([1])
        return [result.grad_norm, *(optimizer.last_step.grad_norm for optimizer in side.optimizers)], side.weights()

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP, clips=(0.0, 0.1))
    norms, expected = plain([1], clips=(CLIP, 0.1))

    assert norms[0] > CLIP
    assert norms[1] > 0.1
    for own, weights in found:
        assert own == pytest.approx([norms[0], *norms], rel=1e-6)
        assert_same(weights, expected)


@MODES
def test_a_common_norm_above_the_threshold_updates_no_part(switches):
    def program(side):
        return side.train([0, 1, 2]), side.weights()

    norms, _ = plain([0, 1], clip=math.inf)
    threshold = sum(norms) / 2
    _, found = run_ranks(program, switches=switches, member={"grad_norm_skip_threshold": threshold})

    assert norms[0] < threshold < norms[1]
    for (first, skipped, last), weights in found:
        assert [first.updated, skipped.updated, last.updated] == [True, False, True]
        assert f"above grad_norm_skip_threshold={threshold:g}" in skipped.reason
        assert_same(weights, plain([0, 2], clip=math.inf)[1])


# Faults #


def poison(parameter):
    """Make the next gradient of a parameter nan."""
    handle = parameter.register_hook(lambda grad: handle.remove() or grad * math.nan)


@MODES
@pytest.mark.parametrize(("at", "clears"), [(0, True), (1, True), (1, False)])
def test_a_nan_in_one_part_on_one_rank_updates_no_part_on_any_rank(at, clears, switches):
    def program(side):
        before = side.weights()
        if side.rank == 1:
            poison(side.ddps[at].module.weight)
        with pytest.raises(NonFiniteGradientError) as caught:  # noqa: PT012 - at the end of backward, or in step()
            side.backward(0)
            side.chain.step()
        is_same = all(map(torch.equal, before, side.weights()))
        if clears or "finish" in switches:  # of parts that finish one after the other, the first one is reduced already
            side.chain.zero_grad()
        (result,) = side.train([1])
        return str(caught.value), is_same, result.updated, side.weights()

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP)

    assert len({text for text, *_ in found}) == 1
    for text, is_same, updated, weights in found:
        assert "'weight'" in text
        assert "rank 1" in text
        assert is_same
        assert updated
        assert_same(weights, plain([1])[1])


@MODES
@pytest.mark.parametrize("policy", ["skip_step", "allow"])
def test_a_nan_that_is_no_error_skips_the_step_of_both_parts(policy, switches):
    def program(side):
        if side.rank == 1:
            poison(side.ddps[1].module.weight)
        results = side.train([0, 1])
        return [(result.updated, result.reason) for result in results], side.weights()

    _, found = run_ranks(program, switches={**switches, "nonfinite_gradients": policy}, clip_grad=CLIP)

    reasons = [results[0][1] for results, _ in found]
    assert any(reason.startswith("optimizer 1: ") and "weight" in reason for reason in reasons)
    for ((skipped, _), (stepped, _)), weights in found:
        assert not skipped
        assert stepped
        assert_same(weights, plain([1])[1])


@pytest.mark.parametrize("at", [0, 1])
@SHARDED
def test_a_part_whose_backward_has_not_run_on_one_rank_is_told_to_all(at, switches):
    def program(side):
        before = side.weights()
        if side.rank == 0:
            side.backward(0)
        else:
            sum(param.sum() for param in side.ddps[1 - at].parameters()).backward()
        with pytest.raises(MegabucketError) as caught:
            side.chain.step()
        is_same = all(map(torch.equal, before, side.weights()))
        side.chain.zero_grad()
        (result,) = side.train([1])
        return caught.value, is_same, result.updated, side.weights()

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP)

    assert isinstance(found[0][0], PeerFailedError)
    assert "rank 1 failed in optimizer.step()" in str(found[0][0])
    assert isinstance(found[1][0], UnreducedGradientsError)
    for _, is_same, updated, weights in found:
        assert (is_same, updated) == (True, True)
        assert_same(weights, plain([1])[1])


@MODES
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_part_that_fails_on_one_rank_ends_the_step_of_both_parts_on_all(phase, at, switches):
    """The loop catches the error, clears gradients and goes on."""

    def fail(*_):
        raise ArithmeticError("no")

    def program(side):
        before = side.weights()
        if side.rank == 1:
            module = side.ddps[at].module
            handle = (module.register_forward_pre_hook if phase == "forward" else module.weight.register_hook)(fail)
        with pytest.raises((ArithmeticError, PeerFailedError)) as caught:  # noqa: PT012 - at the end of backward, or in step()
            side.backward(0)
            side.chain.step()
        is_same = all(map(torch.equal, before, side.weights()))
        side.chain.zero_grad()
        if side.rank == 1:
            handle.remove()
        (result,) = side.train([1])
        return caught.value, is_same, result.updated, side.weights()

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP)

    assert isinstance(found[0][0], PeerFailedError)
    assert "rank 1 failed in" in str(found[0][0])
    assert isinstance(found[1][0], ArithmeticError)
    for _, is_same, updated, weights in found:
        assert (is_same, updated) == (True, True)
        assert_same(weights, plain([1])[1])


@MODES
def test_parts_without_a_backward_on_any_rank_are_refused_and_the_next_step_is_right(switches):
    def program(side):
        for _ in range(2):
            with pytest.raises(UnreducedGradientsError):
                side.chain.step()
            side.chain.zero_grad()
        side.train([0])
        with pytest.raises((UnreducedGradientsError, PhaseError)):  # gradients were cleared
            side.chain.step()
        side.chain.zero_grad()
        side.train([1])
        return side.weights()

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP)

    for weights in found:
        assert_same(weights, plain([0, 1])[1])


@SHARDED
def test_two_steps_on_the_same_gradients_are_refused_and_the_next_one_is_right(switches):
    def program(side):
        side.backward(0)
        side.chain.step()
        with pytest.raises(MegabucketError):
            side.chain.step()
        side.chain.zero_grad()
        side.train([1])
        return side.weights()

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP)

    for weights in found:
        assert_same(weights, plain([0, 1])[1])


@pytest.mark.parametrize("at", [0, 1])
@MODES
def test_an_update_that_fails_on_one_rank_is_told_to_the_others(at, switches):
    def program(side):
        inner = side.optimizers[at].torch_optimizer
        inner.register_step_pre_hook(lambda *_: 1 / 0 if side.rank == 1 else None)
        with pytest.raises((ZeroDivisionError, WrapperBrokenError)) as caught:  # noqa: PT012 - then, or in the next step
            for step in range(2):
                side.backward(step)
                side.chain.step()
                side.chain.zero_grad()
        return caught.value

    _, (told, own) = run_ranks(program, switches=switches, clip_grad=CLIP)

    assert isinstance(own, ZeroDivisionError)
    assert isinstance(told, WrapperBrokenError)
    assert "rank 1" in str(told)


@MODES
def test_limits_that_differ_between_ranks_are_named(switches):
    def program(side):
        side.chain.clip_grad += side.rank
        with pytest.raises(MegabucketError) as caught:
            side.train([0, 1])
        return str(caught.value)

    _, found = run_ranks(program, switches=switches, clip_grad=CLIP)

    assert found[0] == found[1]
    assert "clip_grad of all" in found[0]


# Loss scalers, schedulers, state #


@MODES
@pytest.mark.parametrize("scaler_of", [DynamicGradScaler, torch.amp.GradScaler], ids=["megatron", "torch"])
def test_a_scaler_leaves_out_the_step_of_both_parts_or_of_none(scaler_of, switches):
    def program(side):
        options = {"hysteresis": 1} if scaler_of is DynamicGradScaler else {"device": "cpu"}
        scaler, results = scaler_of(**{"growth_interval": 100, **options}), []
        if scaler_of is torch.amp.GradScaler:
            scaler.scale(torch.zeros(()))
        for step in range(3):
            if side.rank == 1 and step == 1:
                poison(side.ddps[1].module.weight)
            scaler.scale(loss_of(side.ddps, step, side.rank)).backward()
            side.finish()
            scaler.step(side.chain)
            scaler.update()
            results.append((side.chain.last_step.updated, scaler.get_scale()))
            side.chain.zero_grad()
        return results, side.weights()

    _, found = run_ranks(program, switches={**switches, "nonfinite_gradients": "allow"}, clip_grad=CLIP)

    for results, weights in found:
        first, second, third = results
        assert [first[0], second[0], third[0]] == [True, False, True]
        assert first[1] == 2 * second[1] == 2 * third[1]
        assert_same(weights, plain([0, 2])[1])


def test_a_scheduler_turns_all_groups():
    def program(side):
        scheduler = LambdaLR(side.chain, lambda step: 1 / (1 + step))
        for _ in range(2):
            side.train([0])
            scheduler.step()
        return [group["lr"] for optimizer in side.optimizers for group in optimizer.torch_optimizer.param_groups]

    _, found = run_ranks(program, switches=WAYS["reduce_scatter"])

    assert found == [[pytest.approx(0.05 / 3)] * 2] * SIZE


@SHARDED
def test_state_goes_on_in_another_chain(switches):
    def program(side):
        side.train([0, 1])
        state = copy.deepcopy(side.chain.state_dict())
        side.train([2])
        middle = side.weights()
        side.chain.load_state_dict(state)
        return state, middle, side.chain.state_dict()

    _, found = run_ranks(program, switches=switches)

    for state, _, again in found:
        for own, other in zip(state["optimizers"], again["optimizers"], strict=True):
            assert own["state"].keys() == other["state"].keys()
            for index, values in own["state"].items():
                assert all(torch.equal(values[key], other["state"][index][key]) for key in values)


# What does not go together #


def refused(match, *, others=None, chained=None, **fields):
    """Chain two optimizers, the second of them with other settings."""
    world, parts = LoopbackWorld(1), whole()
    ddps = [
        DistributedDataParallel(part, DistributedDataParallelConfig(**switches), communicator=world.communicator(0))
        for part, switches in zip(parts, (fields, {**fields, **(others or {})}), strict=True)
    ]
    optimizers = [
        DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, **(chained or {} if ddp is ddps[1] else {}))
        for ddp in ddps
    ]
    with pytest.raises(ConfigError, match=match):
        ChainedOptimizer(optimizers)
    return optimizers


def test_what_cannot_step_as_one_is_refused():
    refused("differ in use_distributed_optimizer", others={"use_distributed_optimizer": True})
    refused("differ in norm_type", chained={"norm_type": 1.0})
    optimizers = refused("needs fence=True", fence=False)
    with pytest.raises(ConfigError, match="at least one"):
        ChainedOptimizer([])
    with pytest.raises(ConfigError, match="same wrapper"):
        ChainedOptimizer(optimizers[:1] * 2)


def test_wrappers_of_other_ranks_are_refused():
    world, parts = LoopbackWorld(2), [whole() for _ in range(2)]
    alone = [world.subgroup([rank])[rank] for rank in range(2)]

    def program(rank):
        ddps = [
            DistributedDataParallel(part, communicator=communicator)
            for part, communicator in zip(parts[rank], (world.communicator(rank), alone[rank]), strict=True)
        ]
        optimizers = [DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp) for ddp in ddps]
        with pytest.raises(PeerFailedError, match=r"differ in ranks that agree on steps: \[\(0, 1\), \(0,\)\]"):
            ChainedOptimizer(optimizers)

    world.run(program)


def test_arguments_that_differ_between_ranks_are_named():
    def program(side):
        with pytest.raises(LayoutMismatchError, match=r"clip_grad 1\.0.*clip_grad 2\.0"):
            ChainedOptimizer(side.optimizers, clip_grad=1.0 + side.rank)

    run_ranks(program, switches={})


def test_without_a_part_in_it_the_common_norm_is_not_computed():
    def program(side):
        return side.train([0])[0].grad_norm

    _, norms = run_ranks(program, switches=WAYS["reduce_scatter"], clips=(1.0, 2.0))

    assert all(map(math.isnan, norms))


def test_a_limit_that_is_no_number_is_told_to_the_others():
    def program(side):
        with pytest.raises(PeerFailedError, match=r"rank 1 failed .* clip_grad must be a finite number"):
            ChainedOptimizer(side.optimizers, clip_grad=None if side.rank else 1.0)

    run_ranks(program, switches={})
