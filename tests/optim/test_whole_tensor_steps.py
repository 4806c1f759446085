"""A step of optimizers that update whole tensors, in every way to take it: on shards as after an all-reduce, bit by bit."""

import pytest
import torch
from optim_ranks import run_wrapped
from stand_ins import ScheduleFree
from whole_ranks import run_ranks
from whole_stand_ins import OPTIMIZERS, SHAPES, Tensors, factors_of, make, split
from whole_training import PULL, Alone, assert_same, backward, seed_of, train, weights_of

import megabucket as mb
from megabucket.errors import LayoutMismatchError, MegabucketError, PhaseError
from megabucket.testing import LoopbackWorld

CLIP = 50.0
SCALE = 64.0


def assert_as_all_reduced(program, name="Muon, AdamW", *, size=2, **fields):
    """Compare what ``program`` returns on the ranks with shards and without; return it."""
    sharded = run_ranks(size, name, program, **fields)
    reduced = run_ranks(size, name, program, **fields, sharded=False)
    for found in (*sharded, *reduced[1:]):
        assert_same(found, reduced[0])
    return reduced[0]


@pytest.mark.parametrize("by_hand", [("unscale",), ("clip",), ("unscale", "clip")], ids=" ".join)
@pytest.mark.parametrize("clip_grad", [0.0, CLIP])
def test_16_bit_gradients_that_were_changed_in_float32_reach_owners_and_norm_so(by_hand, clip_grad):
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            (ddp(seed_of(step, rank), PULL) * SCALE).backward()
            if "unscale" in by_hand:
                optimizer.unscale_grads(1 / SCALE)
            if "clip" in by_hand:
                found.append(float(optimizer.clip_grad_norm_(CLIP)))
            result = optimizer.step()
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append((result.grad_norm, result.num_zeros, weights_of(ddp.module)))
        return found

    config = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": False, "nonfinite_gradients": "allow"}
    assert_as_all_reduced(program, **config, options={"clip_grad": clip_grad, "returns_num_zeros": True})


def test_parts_step_one_by_one_on_gradients_that_were_unscaled():
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            (ddp(seed_of(step, rank), PULL) * SCALE).backward()
            optimizer.unscale_grads(1 / SCALE)
            found += [part.step().grad_norm for part in optimizer.parts]
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append(weights_of(ddp.module))
        return found

    config = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": False, "nonfinite_gradients": "allow"}
    assert_as_all_reduced(program, "8-bit Adam, Muon", **config, options={"clip_grad": CLIP})


@pytest.mark.parametrize("name", ["Muon, AdamW", "SOAP"])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_zeros_are_counted_in_the_gradients_of_the_step(name, in_fp32):
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            ddp(seed_of(step, rank)).backward()
            found.append(optimizer.step().num_zeros)
            optimizer.zero_grad()
        return found

    config = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": in_fp32, "options": {"returns_num_zeros": True}}
    found = assert_as_all_reduced(program, name, **config)

    sums = [zip(*(factors_of(seed_of(step, rank)).values() for rank in range(2)), strict=True) for step in range(3)]
    assert found == [sum(int((one + other == 0).sum()) for one, other in of_step) for of_step in sums]


SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2),
    "constant": lambda: mb.ConstantGradScaler(SCALE),
    "dynamic": lambda: mb.DynamicGradScaler(initial_scale=SCALE),
}


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize(("dtype", "in_fp32"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_a_loss_scaler_skips_the_step_of_an_infinite_gradient_on_all_ranks(kind, dtype, in_fp32):
    def program(rank, ddp, optimizer):
        scaler, found = SCALERS[kind](), []
        for step in range(4):
            loss = ddp(seed_of(step, rank), PULL)
            scaler.scale(loss * (float("inf") if (step, rank) == (2, 1) else 1.0)).backward()
            if kind == "torch" and step % 2:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(CLIP)
            scaler.step(optimizer)
            if kind == "torch":
                scaler.update()
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append((optimizer.last_step.updated, weights_of(ddp.module)))
        return found

    config = {"dtype": dtype, "grad_reduce_in_fp32": in_fp32, "nonfinite_gradients": "allow"}
    found = assert_as_all_reduced(program, **config, options={"clip_grad": 1.2 * CLIP})

    assert [updated for updated, _ in found] == [True, True, False, True]
    assert_same(found[1][1], found[2][1])


def test_a_step_above_the_threshold_changes_nothing_and_leaves_no_gradient_on_its_way():
    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            (ddp(seed_of(step, rank)) * (10 if step == 1 else 1)).backward()
            result = optimizer.step()
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append((result.updated, result.grad_norm, weights_of(ddp.module)))
        return found

    found = assert_as_all_reduced(program, options={"grad_norm_skip_threshold": 2000.0})

    assert [updated for updated, *_ in found] == [True, False, True]
    assert_same(found[0][2], found[1][2])


class SomeOfThem(torch.nn.Module):
    """Uses the parameters of the given names only."""

    def __init__(self):
        super().__init__()
        self.tensors = Tensors()

    def forward(self, seed, names):
        factors = factors_of(seed)
        return sum((getattr(self.tensors, name) * factors[name]).sum() for name in names)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_no_rank_has_used_are_left_alone_by_their_owners(name):
    def program(rank, ddp, optimizer):
        found = []
        for step in range(4):
            odd = ["wide", "scalar", "conv"] if rank == 0 else ["tall", "scalar"]
            ddp(seed_of(step, rank), odd if step % 2 else list(SHAPES)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append(weights_of(ddp.module))
        return found, optimizer.state_dict()["state"]

    found, _ = assert_as_all_reduced(program, name, model=SomeOfThem(), unused_parameters="skip", size=3)

    assert_same(found[1]["tensors.square"], found[0]["tensors.square"])
    assert not torch.equal(found[1]["tensors.tall"], found[0]["tensors.tall"])


@pytest.mark.parametrize("name", ["Muon, AdamW", "SOAP"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_of_the_weights_lies_at_the_owners_and_is_carried_along(name, dtype):
    def program(rank, ddp, optimizer):
        average = mb.ShardedEMA(optimizer, decay=0.5)
        for step in range(4):
            if step == 2:
                ddp.rebuild(ddp.ddp_config.model_copy(update={"bucket_size": 150}))
            train(ddp, optimizer, [step], rank)
            average.update()
        return average.values()

    assert_as_all_reduced(program, name, dtype=dtype)


@pytest.mark.parametrize("name", ["Muon, AdamW", "Adafactor"])
def test_norms_of_each_parameter_are_those_of_an_all_reduce(name):
    def program(rank, ddp, optimizer):
        ddp(seed_of(0, rank)).backward()
        with mb.param_norms(optimizer) as norms:
            optimizer.step()
        return {name: [pytest.approx(value, rel=1e-6) for value in of] for name, of in norms.items()}

    assert_as_all_reduced(program, name, options={"clip_grad": CLIP})


def test_hooks_of_each_given_optimizer_run_once_per_step_and_its_own_step_is_refused():
    def program(rank, ddp, optimizer):
        calls = []
        for index, given in enumerate(optimizer.torch_optimizers):
            given.register_step_pre_hook(lambda *_, index=index: calls.append(f"before {index}"))
            given.register_step_post_hook(lambda *_, index=index: calls.append(f"after {index}"))
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(ddp, optimizer, range(2), rank, microbatches=3)
        for given in optimizer.torch_optimizers:
            with pytest.raises(PhaseError, match=rf"step\(\) of the {type(given).__name__} inside a DistributedOptimizer"):
                given.step()
        return calls

    calls = assert_as_all_reduced(program)

    assert calls == 2 * ["before", "before 0", "after 0", "before 1", "after 1", "after"]


def test_closures_and_gradients_of_16_bits_meet_a_schedule_free_optimizer_beside_muon():
    def make_both(ddp):
        matrices, others = split(ddp.module)
        return [torch.optim.Muon(matrices, lr=0.02), ScheduleFree(others, lr=0.02)]

    def program(rank, ddp, optimizer):
        found = []
        for step in range(3):
            optimizer.train()
            optimizer.step(lambda step=step: backward(ddp, rank, step, pull=PULL))
            optimizer.zero_grad()
            optimizer.eval()
            ddp.finish_param_sync()
            found.append(weights_of(ddp.module))
        return found

    def run(**switches):
        optimizer_of = lambda ddp: mb.DistributedOptimizer(make_both(ddp), ddp, clip_grad=CLIP)  # noqa: E731
        config = {"grad_reduce_in_fp32": False, "bucket_size": 64}
        return run_wrapped(2, Tensors(torch.bfloat16), program, optimizer_of, **config, **switches)

    assert_same(run(use_distributed_optimizer=True), run(use_distributed_optimizer=False))


def test_a_chain_of_two_wrappers_with_muon_steps_as_after_an_all_reduce():
    def run(sharded):
        world, models = LoopbackWorld(2, timeout_s=30), [[Tensors(torch.bfloat16) for _ in range(2)] for _ in range(2)]
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=64)

        def program(rank):
            ddps = [mb.DistributedDataParallel(one, config, communicator=world.communicator(rank)) for one in models[rank]]
            optimizers = [mb.DistributedOptimizer(make("Muon, AdamW", ddp.module), ddp) for ddp in ddps]
            chain, found = mb.ChainedOptimizer(optimizers, clip_grad=CLIP), []
            for step in range(3):
                for index, ddp in enumerate(ddps):
                    ddp(seed_of(step, rank, index), PULL).backward()
                found.append(chain.step().grad_norm)
                chain.zero_grad()
                for ddp in ddps:
                    ddp.finish_param_sync()
                found.append([weights_of(ddp.module) for ddp in ddps])
            return found

        return world.run(program)

    assert_same(run(sharded=True), run(sharded=False))


def test_a_group_added_to_one_of_several_optimizers_joins_its_owners_at_the_rebuild():
    def program(rank, ddp, optimizer):
        ddp.module.tall.requires_grad_(False)
        muon, _ = optimizer.torch_optimizers
        muon.param_groups[0]["params"] = [p for p in muon.param_groups[0]["params"] if p is not ddp.module.tall]
        ddp.rebuild()
        found = train(ddp, optimizer, range(2), rank)
        ddp.module.tall.requires_grad_(True)
        muon.add_param_group({"params": [ddp.module.tall], "lr": 0.1})
        with pytest.raises(MegabucketError):
            optimizer.state_dict()
        ddp.rebuild()
        found += train(ddp, optimizer, range(2, 4), rank)
        state = optimizer.state_dict()
        return found, state["state"], [len(group["params"]) for group in state["param_groups"]]

    *_, sizes = assert_as_all_reduced(program, size=3)

    assert sizes == [5, 1, 4]


class WithFrozen(torch.nn.Module):
    """Tensors of all shapes, and a frozen matrix."""

    def __init__(self):
        super().__init__()
        self.tensors, self.frozen = Tensors(), torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, *args):
        return self.tensors(*args)


@pytest.mark.parametrize("fails", [False, True])
def test_a_frozen_group_added_to_the_first_optimizer_does_not_move_the_groups_of_the_next_also_if_a_load_fails(fails):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        optimizer.torch_optimizers[0].add_param_group({"params": [ddp.module.frozen]})
        if fails:
            state = optimizer.state_dict()
            state["param_groups"][0]["lr"] += rank
            with pytest.raises(LayoutMismatchError):
                optimizer.load_state_dict(state)
        found = train(ddp, optimizer, range(2, 4), rank)
        keys = {name: sorted(optimizer.state.get(param, ())) for name, param in ddp.named_parameters()}
        return keys["tensors.vector"], [weights for _, weights in found]

    def optimizer_of(ddp):
        return mb.DistributedOptimizer(make("Muon, AdamW", ddp.module.tensors), ddp)

    alone = Alone("Muon, AdamW", 2).train(range(4))[2:]
    for keys, found in run_wrapped(2, WithFrozen(), program, optimizer_of, use_distributed_optimizer=True, bucket_size=64):
        assert keys == ["exp_avg", "exp_avg_sq", "step"]
        for weights, expected in zip(found, alone, strict=True):
            assert_same({name: weights[f"tensors.{name}"] for name in SHAPES}, expected)


# Bugs of others #


def test_ranks_never_differ_whoever_has_updated_a_parameter():
    """DeepSpeed 8090: ranks went apart silently, since each ran Newton-Schulz on its own part of the matrices."""

    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(3), rank, pull=PULL)
        ddp.check_replicas()
        return weights_of(ddp.module)

    for size, bucket_size in [(2, 20), (3, 64), (4, 10**6)]:
        first, *others = run_ranks(size, "Muon, AdamW", program, bucket_size=bucket_size, overlap_param_gather=True)
        for other in others:
            assert_same(other, first)


def test_matrices_get_the_update_of_muon_which_does_not_grow_with_the_gradient():
    """DeepSpeed 8441: with ZeRO, parameters of Muon got SGD."""

    def program(rank, ddp, optimizer):
        found = []
        for factor in (1.0, 1024.0):
            optimizer.state.clear()
            before = weights_of(ddp.module)
            (ddp(seed_of(0, rank)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            ddp.finish_param_sync()
            found.append({name: values - before[name] for name, values in weights_of(ddp.module).items()})
        return found

    for once, more in run_ranks(2, "Muon, AdamW", program):
        for name in ("wide", "square", "turned", "tall"):
            assert once[name].abs().max() > 0
            torch.testing.assert_close(more[name], once[name], rtol=0, atol=0.01)  # the weights have decayed by 0.002 of theirs


def test_a_step_of_several_microbatches_is_one_update_of_the_sum():
    """DeepSpeed 8443: Muon's momentum and update ran once per microbatch."""

    def program(rank, ddp, optimizer):
        return train(ddp, optimizer, range(3), rank, microbatches=4), optimizer.state_dict()["state"]

    found, state = run_ranks(2, "Muon, AdamW", program)[0]

    alone = Alone("Muon, AdamW", 2)
    assert_same([weights for _, weights in found], alone.train(range(3), microbatches=4))
    muon = alone.optimizers[0]
    momenta = [
        muon.state[param]["momentum_buffer"] for group in muon.param_groups for param in group["params"] if param.numel()
    ]
    assert_same([of["momentum_buffer"] for of in state.values() if "momentum_buffer" in of], momenta)
