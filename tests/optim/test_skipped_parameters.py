"""A ``DistributedOptimizer`` with ``unused_parameters="skip"`` beside plain torch in one process.

There a parameter that nothing has used has no gradient, so the optimizer leaves it, its moments and its step count alone.
"""

import copy
import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_ranks import WAYS, in_ways

import megabucket as mb
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.testing import LoopbackWorld

MODES = in_ways("all_reduce", "all_reduce, explicit", "reduce_scatter", "overlap", "explicit", "no fence")
BOTH = in_ways("all_reduce", "reduce_scatter")
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, weight_decay=0.1),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, fused=True),
    "SGD alone": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
}
EACH = pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
NUMELS = {"a": 100, "b": 3, "c": 200, "d": 1, "e": 70}
STEPS, FIRST_USED_AT = 8, 5


class Parts(torch.nn.Module):
    """Vectors of which each forward uses some. Its output also depends on its input."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, numel in NUMELS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype)))

    def forward(self, used, seed):
        generator = torch.Generator().manual_seed(seed)
        total = torch.ones(1, requires_grad=True).sum()
        for name, param in self.named_parameters():
            target = torch.randn(param.shape, generator=generator)
            if name in used:
                total = total + (param.float() - target).square().sum()
        return total


def uses(step, rank, microbatch=0):
    """What a rank uses: ``a`` in every second step, ``b`` on one rank only, ``c`` at random, ``d`` late, ``e`` never.

    Some rank uses something, in each step; in odd steps others may use nothing.
    """
    found = {"a"} if step % 2 == 0 else set()
    found |= {"b"} if rank == 0 and (step % 3 or step == 3) else set()
    found |= {"c"} if random.Random(f"{step} {rank} {microbatch}").random() < 0.4 else set()
    return found | ({"d"} if rank != 1 and step >= FIRST_USED_AT else set())


def uses_some(*at):
    """The same, but something on each rank: what torch calls between backward and step needs a gradient there."""
    return uses(*at) or {"c"}


def seed_of(step, rank, microbatch=0):
    return 1000 * step + 10 * rank + microbatch


class Alone:
    """Training in one process, on the mean over ranks; float32 copies of 16-bit parameters as one writes them by hand."""

    def __init__(self, size, kind="AdamW", *, dtype=torch.float32, microbatches=1, set_to_none=True, clip=0.0, uses=uses):
        self.size, self.microbatches, self.set_to_none, self.clip, self.uses = size, microbatches, set_to_none, clip, uses
        self.module = Parts(dtype)
        self.mains = {name: torch.nn.Parameter(param.detach().float()) for name, param in self.module.named_parameters()}
        self.optimizer = OPTIMIZERS[kind](self.mains.values())
        self.norms, self.num_zeros, self.average = [], [], {}

    def step(self, step, *, is_dropped=False):
        for rank in range(self.size):
            for microbatch in range(self.microbatches):
                loss = self.module(self.uses(step, rank, microbatch), seed_of(step, rank, microbatch))
                (loss / self.size).backward()
        for name, param in self.module.named_parameters():
            self.mains[name].grad = None if param.grad is None else param.grad.float()
        grads = [main.grad for main in self.mains.values() if main.grad is not None]
        self.num_zeros.append(sum(grad.numel() - int(grad.count_nonzero()) for grad in grads))
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.mains.values(), self.clip or math.inf).item())
        if not is_dropped:
            stepped = [name for name, main in self.mains.items() if main.grad is not None]
            self.optimizer.step()
            for name, param in self.module.named_parameters():
                param.data.copy_(self.mains[name].data)
                if name in self.average:
                    self.average[name].lerp_(self.mains[name].detach(), 0.2)
                elif name in stepped:
                    self.average[name] = self.mains[name].detach().clone()
        self.module.zero_grad(set_to_none=self.set_to_none)

    def run(self, steps=range(STEPS)):
        for step in steps:
            self.step(step)
        return self

    def found(self):
        weights = {name: param.detach() for name, param in self.module.named_parameters()}
        return weights, {name: dict(self.optimizer.state.get(main, {})) for name, main in self.mains.items()}


def found_of(ddp, optimizer):
    """The weights and the state by parameter, without what is not there. A collective call."""
    ddp.finish_param_sync()
    names = [name for name, _ in ddp.module.named_parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    for values in state.values():
        values.pop("main_param", None)
        values.pop("ema", None)
    weights = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    return weights, {name: state.get(index, {}) for index, name in enumerate(names)}


def assert_alike(found, expected, *, atol=1e-6):
    weights, state = found
    expected_weights, expected_state = expected
    torch.testing.assert_close(weights, expected_weights, rtol=0.0, atol=atol)
    kept = {name: {key: value for key, value in of.items() if value is not None} for name, of in expected_state.items()}
    assert {name: set(of) for name, of in state.items()} == {name: set(of) for name, of in kept.items()}
    assert {n: float(of["step"]) for n, of in state.items() if "step" in of} == {
        n: float(of["step"]) for n, of in kept.items() if "step" in of
    }
    torch.testing.assert_close(state, kept, rtol=1e-5, atol=atol)


def wrap(communicator, *, kind="AdamW", dtype=torch.float32, bucket_size=120, given=None, optimizer=None, **switches):
    config = mb.DistributedDataParallelConfig(unused_parameters="skip", bucket_size=bucket_size, **switches)
    module = Parts(dtype)
    ranks = {"communicator": communicator} if given is None else {"groups": given}
    ddp = mb.DistributedDataParallel(module, config, **ranks)
    return ddp, mb.DistributedOptimizer(OPTIMIZERS[kind](ddp.parameters()), ddp, **(optimizer or {}))


def backward(ddp, rank, step, microbatches=1, scale=lambda loss: loss, uses=uses):
    for microbatch in range(microbatches - 1):
        with ddp.no_sync():
            scale(ddp(uses(step, rank, microbatch), seed_of(step, rank, microbatch))).backward()
    last = microbatches - 1
    scale(ddp(uses(step, rank, last), seed_of(step, rank, last))).backward()
    if ddp.ddp_config.finish == "explicit":
        ddp.finish_grad_sync()


def train(ddp, optimizer, rank, steps=range(STEPS), *, microbatches=1, set_to_none=True):
    results = []
    for step in steps:
        backward(ddp, rank, step, microbatches)
        results.append(optimizer.step())
        optimizer.zero_grad(set_to_none=set_to_none)
    return results


def run_ranks(size, program, **fields):
    """Call ``program(rank, ddp, optimizer)`` on each rank."""
    world = LoopbackWorld(size, timeout_s=20)
    return world.run(lambda rank: program(rank, *wrap(world.communicator(rank), **fields)))


@EACH
@MODES
@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_moments_and_step_counts_are_those_of_plain_torch(kind, switches, size):
    for microbatches, set_to_none in ((1, True), (2, False)):

        def program(rank, ddp, optimizer, microbatches=microbatches, set_to_none=set_to_none):
            train(ddp, optimizer, rank, microbatches=microbatches, set_to_none=set_to_none)
            return found_of(ddp, optimizer)

        expected = Alone(size, kind, microbatches=microbatches, set_to_none=set_to_none).run().found()
        for found in run_ranks(size, program, kind=kind, **switches):
            assert_alike(found, expected)


@BOTH
@pytest.mark.parametrize("bucket_size", [1, 10_000])
def test_they_are_with_any_buckets(switches, bucket_size):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, rank)
        return found_of(ddp, optimizer)

    expected = Alone(2).run().found()
    for found in run_ranks(2, program, bucket_size=bucket_size, **switches):
        assert_alike(found, expected)


@EACH
@BOTH
@pytest.mark.parametrize("in_fp32", [False, True])
def test_float32_values_of_16_bit_parameters_rest(kind, switches, in_fp32):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, rank)
        state = optimizer.state_dict()["state"]  # without an entry for the weights of a parameter that was never used
        params = [param for group in optimizer.param_groups for param in group["params"]]
        mains = [state.get(index, {}).get("main_param", param.detach().float()) for index, param in enumerate(params)]
        return *found_of(ddp, optimizer), dict(zip(NUMELS, mains, strict=True))

    alone = Alone(1, kind, dtype=torch.bfloat16).run()
    fields = {"kind": kind, "dtype": torch.bfloat16, "grad_reduce_in_fp32": in_fp32, **switches}
    for weights, state, mains in run_ranks(1, program, **fields):
        assert_alike((weights, state), alone.found())
        torch.testing.assert_close(mains, {name: main.detach() for name, main in alone.mains.items()}, rtol=0.0, atol=1e-6)
        assert torch.equal(mains["e"], weights["e"].float())


@BOTH
@pytest.mark.parametrize("set_to_none", [False, True])
def test_the_norm_and_zeros_are_those_of_the_parameters_with_a_gradient(switches, set_to_none):
    alone = Alone(2, clip=3.0, set_to_none=set_to_none).run()

    def program(rank, ddp, optimizer):
        results = train(ddp, optimizer, rank, set_to_none=set_to_none)
        return [result.grad_norm for result in results], [result.num_zeros for result in results], found_of(ddp, optimizer)

    fields = {"optimizer": {"clip_grad": 3.0, "returns_num_zeros": True}, **switches}
    for norms, num_zeros, found in run_ranks(2, program, **fields):
        assert norms == pytest.approx(alone.norms, rel=1e-5)
        assert max(norms) > 3.0
        assert num_zeros == alone.num_zeros
        assert_alike(found, alone.found(), atol=1e-5)


@BOTH
def test_clipping_by_hand_counts_the_same_parameters(switches):
    alone = Alone(2, clip=3.0).run()

    def program(rank, ddp, optimizer):
        norms = []
        for step in range(STEPS):
            backward(ddp, rank, step)
            norms.append(optimizer.clip_grad_norm_(3.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms, found_of(ddp, optimizer)

    for norms, found in run_ranks(2, program, **switches):
        assert norms == pytest.approx(alone.norms, rel=1e-5)
        assert_alike(found, alone.found(), atol=1e-5)


def test_torch_clips_the_gradients_that_are_there():
    alone = Alone(2, clip=3.0, uses=uses_some).run()

    def program(rank, ddp, optimizer):
        for step in range(STEPS):
            backward(ddp, rank, step, uses=uses_some)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 3.0)
            optimizer.step()
            optimizer.zero_grad()
        return found_of(ddp, optimizer)

    for found in run_ranks(2, program):
        assert_alike(found, alone.found(), atol=1e-5)


@BOTH
def test_norms_of_a_parameter_that_is_left_alone_are_zero(switches):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, rank, range(1))
        backward(ddp, rank, 1)  # without a and e
        with mb.param_norms(optimizer) as norms:
            optimizer.step()
        return {name: (of.grad, of.update) for name, of in norms.items()}

    for norms in run_ranks(2, program, **switches):
        assert {name for name, of in norms.items() if of == (0.0, 0.0)} == {"a", "d", "e"}


@BOTH
def test_a_closure_may_run_the_last_backward(switches):
    def program(rank, ddp, optimizer):
        for step in range(STEPS):
            optimizer.step(functools.partial(backward, ddp, rank, step))
            optimizer.zero_grad()
        return found_of(ddp, optimizer)

    expected = Alone(2).run().found()
    for found in run_ranks(2, program, **switches):
        assert_alike(found, expected)


SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3),
    "constant": lambda: mb.ConstantGradScaler(1024.0),
    "dynamic": lambda: mb.DynamicGradScaler(1024.0, growth_interval=3),
}


@BOTH
@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("bad", [None, 3, 4])
@pytest.mark.parametrize("size", [1, 2])
def test_loss_scalers_skip_a_step_as_a_whole(switches, kind, bad, size):
    alone = Alone(size, uses=uses_some)
    for step in range(STEPS):
        alone.step(step, is_dropped=step == bad)

    def program(rank, ddp, optimizer):
        scaler, updated = SCALERS[kind](), []
        for step in range(STEPS):
            factor = 1e38 if step == bad and rank == 0 else 1.0
            backward(ddp, rank, step, scale=lambda loss, factor=factor: scaler.scale(loss * factor), uses=uses_some)
            scaler.unscale_(optimizer)
            assert optimizer.is_unscaled or step == bad
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            updated.append(optimizer.last_step.updated)
        return updated, found_of(ddp, optimizer)

    for updated, found in run_ranks(size, program, nonfinite_gradients="allow", **switches):
        assert updated == [step != bad for step in range(STEPS)]
        assert_alike(found, alone.found())


@BOTH
@pytest.mark.parametrize("bad", [0, 3, FIRST_USED_AT])
def test_a_step_that_is_not_finite_is_skipped_as_a_whole(switches, bad):
    alone = Alone(2)
    for step in range(STEPS):
        alone.step(step, is_dropped=step == bad)

    def program(rank, ddp, optimizer):
        for step in range(STEPS):
            backward(ddp, rank, step, scale=lambda loss, step=step: loss * (math.nan if step == bad and rank == 0 else 1.0))
            assert optimizer.step().updated == (step != bad)
            optimizer.zero_grad()
        return found_of(ddp, optimizer)

    for found in run_ranks(2, program, nonfinite_gradients="skip_step", **switches):
        assert_alike(found, alone.found())


@BOTH
def test_a_norm_above_the_threshold_leaves_everything_as_it_was(switches):
    alone = Alone(2)
    for step in range(STEPS):
        alone.step(step, is_dropped=step == 2)

    def program(rank, ddp, optimizer):
        for step in range(STEPS):
            backward(ddp, rank, step, scale=lambda loss, step=step: loss * (1e6 if step == 2 else 1.0))
            assert optimizer.step().updated == (step != 2)
            optimizer.zero_grad()
        return found_of(ddp, optimizer)

    for found in run_ranks(2, program, optimizer={"grad_norm_skip_threshold": 1e5}, **switches):
        assert_alike(found, alone.found())


@BOTH
def test_an_average_begins_for_each_parameter_with_its_first_update(switches):
    alone = Alone(2).run()

    def program(rank, ddp, optimizer):
        average = mb.ShardedEMA(optimizer, decay=0.8)
        for step in range(STEPS):
            train(ddp, optimizer, rank, [step])
            average.update()
        return average.values()

    for values in run_ranks(2, program, **switches):
        assert "e" not in values
        torch.testing.assert_close(values, alone.average, rtol=0.0, atol=1e-6)


@BOTH
def test_optimizers_of_a_chain_step_as_one(switches):
    alone = [Alone(2), Alone(2)]
    for one in alone:
        one.run()

    def play(rank, world):
        pairs = [wrap(world.communicator(rank), **switches) for _ in range(2)]
        chain = mb.ChainedOptimizer([optimizer for _, optimizer in pairs])
        norms = []
        for step in range(STEPS):
            for ddp, _ in pairs:
                backward(ddp, rank, step)
            norms.append(chain.step().grad_norm)
            chain.zero_grad()
        return norms, [found_of(*pair) for pair in pairs]

    world = LoopbackWorld(2, timeout_s=20)
    for norms, found in world.run(lambda rank: play(rank, world)):
        assert norms == pytest.approx([math.sqrt(2) * norm for norm in alone[0].norms], rel=1e-5)
        for of_part in found:
            assert_alike(of_part, alone[0].found())


# State that moves #


@EACH
@BOTH
@pytest.mark.parametrize("at", [2, FIRST_USED_AT, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rebuild_changes_nothing(kind, switches, at, dtype):
    def program(rank, ddp, optimizer, rebuilds):
        train(ddp, optimizer, rank, range(at))
        if rebuilds:
            ddp.rebuild(ddp.ddp_config.model_copy(update={"bucket_size": 60}))
        train(ddp, optimizer, rank, range(at, STEPS))
        return found_of(ddp, optimizer)

    fields = {"kind": kind, "dtype": dtype, **switches}
    expected = run_ranks(2, functools.partial(program, rebuilds=False), **fields)[0]
    for found in run_ranks(2, functools.partial(program, rebuilds=True), **fields):
        assert_alike(found, expected, atol=0.0)


@EACH
@pytest.mark.parametrize("path", ["state_dict", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [2, FIRST_USED_AT + 1])
def test_state_goes_on_in_another_mode_on_another_number_of_ranks(kind, path, dtype, at, tmp_path):
    """Both numbers of ranks see the gradients of one, so the result is that of one process."""

    def first(rank, ddp, optimizer):
        train(ddp, optimizer, 0, range(at))
        if path == "checkpoint":
            mb.save_checkpoint(tmp_path, ddp, optimizer, step=at)
        return copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))

    def other(rank, ddp, optimizer):
        train(ddp, optimizer, 0, range(3))  # to be replaced
        if path == "checkpoint":
            mb.load_checkpoint(tmp_path, ddp, optimizer)
        else:
            ddp.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        restored = found_of(ddp, optimizer)
        train(ddp, optimizer, 0, range(at, STEPS))
        return restored, found_of(ddp, optimizer)

    fields = {"kind": kind, "dtype": dtype}
    at_save, expected = Alone(1, kind, dtype=dtype).run(range(at)).found(), Alone(1, kind, dtype=dtype).run().found()
    for sharded, size, other_size in ((False, 2, 3), (True, 3, 2), (True, 2, 1)):
        saved = run_ranks(size, first, use_distributed_optimizer=sharded, **fields)[0]
        for restored, found in run_ranks(other_size, other, use_distributed_optimizer=sharded or size == 2, **fields):
            assert_alike(restored, at_save)
            assert_alike(found, expected)
        for child in tmp_path.iterdir():
            child.rename(tmp_path.parent / f"{child.name} of {tmp_path.name}, {sharded}, {size}")


@EACH
@BOTH
def test_plain_torch_goes_on_from_its_state_and_it_from_that_of_plain_torch(kind, switches):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, 0, range(2))
        return copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))

    weights, state = run_ranks(2, program, kind=kind, **switches)[0]
    plain = Alone(1, kind)
    plain.module.load_state_dict(weights)
    for name, param in plain.module.named_parameters():
        plain.mains[name].data.copy_(param.data)
    plain.optimizer.load_state_dict(state)
    plain.run(range(2, 4))
    saved = copy.deepcopy((plain.module.state_dict(), plain.optimizer.state_dict()))

    def back(rank, ddp, optimizer):
        ddp.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(ddp, optimizer, 0, range(4, STEPS))
        return found_of(ddp, optimizer)

    expected = Alone(1, kind).run().found()
    for found in run_ranks(2, back, kind=kind, **switches):
        assert_alike(found, expected)


@BOTH
def test_state_of_a_given_optimizer_that_has_stepped_on_some_parameters_moves_in(switches):
    world = LoopbackWorld(2, timeout_s=20)

    def play(rank):
        alone = Alone(1).run(range(2))
        optimizer = OPTIMIZERS["AdamW"](alone.module.parameters())
        optimizer.load_state_dict(alone.optimizer.state_dict())
        config = mb.DistributedDataParallelConfig(unused_parameters="skip", bucket_size=120, **switches)
        ddp = mb.DistributedDataParallel(alone.module, config, communicator=world.communicator(rank))
        distributed = mb.DistributedOptimizer(optimizer, ddp)
        train(ddp, distributed, 0, range(2, STEPS))
        return found_of(ddp, distributed)

    expected = Alone(1).run().found()
    for found in world.run(play):
        assert_alike(found, expected)


@BOTH
def test_state_by_parameter_counts_the_steps_of_that_parameter(switches):
    alone = Alone(2).run()

    def program(rank, ddp, optimizer):
        train(ddp, optimizer, rank)
        return {name: dict(optimizer.state[param]) for name, param in ddp.module.named_parameters() if param in optimizer.state}

    expected = {name: float(of["step"]) for name, of in alone.found()[1].items() if of}
    found = run_ranks(2, program, **switches)
    for state in found:
        assert {name: float(of["step"]) for name, of in state.items()} == {name: expected[name] for name in state}
    assert set().union(*found) == set(expected)
    numels = [sum(state[name]["exp_avg"].numel() for state in found if name in state) for name in expected]
    assert numels == [NUMELS[name] * (1 if switches else 2) for name in expected]


# Replicas #


def test_replicas_of_the_shards_leave_the_same_parameters_alone():
    world = LoopbackWorld(4, timeout_s=20)
    inside, over = world.subgroup([0, 1]) | world.subgroup([2, 3]), world.subgroup([0, 2]) | world.subgroup([1, 3])

    def play(rank):
        dense = ReductionGroup(inside[rank], over[rank])
        given = ParallelGroups({"dense": dense}, step_group=world.communicator(rank))
        ddp, optimizer = wrap(None, given=given, use_distributed_optimizer=True)
        train(ddp, optimizer, rank)
        return found_of(ddp, optimizer)

    expected = Alone(4).run().found()
    for found in world.run(play):
        assert_alike(found, expected)


# What is sent, and what is stepped on #


def labels(world, rank, first=0):
    return [text.split(" [")[0] for text in world.schedule(rank)][first:]


@pytest.mark.parametrize("unused", ["error", "zero", "skip"])
@BOTH
def test_only_skip_sends_more_and_steps_on_more_tensors(switches, unused):
    world = LoopbackWorld(2, timeout_s=20)

    def play(rank):
        config = mb.DistributedDataParallelConfig(unused_parameters=unused, bucket_size=10_000, **switches)
        ddp = mb.DistributedDataParallel(Parts(), config, communicator=world.communicator(rank))
        optimizer = mb.DistributedOptimizer(OPTIMIZERS["AdamW"](ddp.parameters()), ddp)
        first = len(labels(world, rank))
        ddp("abcde", rank).backward()
        optimizer.step()
        ddp.finish_param_sync()
        return labels(world, rank, first), len(optimizer.sharding.shards)

    # e, d, c, b and a begin at 0, 128, 192, 448 and 512 of 768 elements: the ranks part inside c.
    after = ["grad norm", "param gather 0"] if switches else []
    for rank, (sent, num_tensors) in enumerate(world.run(play)):
        asked = ["unused parameters of dense"] if unused == "skip" else []
        assert sent == ["bucket 0", *asked, "fence", *after]
        assert num_tensors == (1 if unused != "skip" else 5 if not switches else (3, 3)[rank])


# Any steps #


@settings(max_examples=settings.default.max_examples * 3 // 10)  # each trains on both sides, in up to five steps
@given(
    plan=st.lists(st.lists(st.sets(st.sampled_from("abcde")), min_size=3, max_size=3), min_size=1, max_size=5),
    size=st.integers(1, 3),
    way=st.sampled_from(list(WAYS)),
    kind=st.sampled_from(list(OPTIMIZERS)),
    set_to_none=st.booleans(),
    bucket_size=st.sampled_from([1, 120, 10_000]),
)
def test_any_steps_are_those_of_plain_torch(plan, size, way, kind, set_to_none, bucket_size):
    module = Parts()
    plain = OPTIMIZERS[kind](module.parameters())
    for step, used in enumerate(plan):
        for rank in range(size):
            (module(used[rank], seed_of(step, rank)) / size).backward()
        plain.step()
        plain.zero_grad(set_to_none=set_to_none)

    def program(rank, ddp, optimizer):
        for step, used in enumerate(plan):
            ddp(used[rank], seed_of(step, rank)).backward()
            if ddp.ddp_config.finish == "explicit":
                ddp.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return found_of(ddp, optimizer)

    expected = {name: param.detach() for name, param in module.named_parameters()}
    state = {name: dict(plain.state.get(param, {})) for name, param in module.named_parameters()}
    for found in run_ranks(size, program, kind=kind, bucket_size=bucket_size, **WAYS[way]):
        assert_alike(found, (expected, state))
