"""Our own scalers: Megatron's sequences of scales, to the digit, in the loop of torch's scaler."""

import math
import sys
from pathlib import Path

import pytest
import torch
from optim_ranks import run_wrapped

from megabucket import (
    ConstantGradScaler,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    DynamicGradScaler,
    load_checkpoint,
    save_checkpoint,
)
from megabucket.errors import ConfigError, HyperparameterMismatchError, MegabucketError, PhaseError, ReplicasDivergedError
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("is_sharded", [False, True], ids=["all_reduce", "reduce_scatter"])

# Words of good and bad steps, and the scale after each: what DynamicGradScaler of megatron-core 0.16.1 makes of them.
GOLDEN = {
    "hysteresis is used up once": (
        {"initial_scale": 1024.0, "growth_interval": 3},
        "bbbgggbb",
        [1024, 512, 256, 256, 256, 512, 512, 256],
    ),
    "a good step does not refill it": ({"initial_scale": 1024.0, "growth_interval": 3}, "bgbgb", [1024, 1024, 512, 512, 256]),
    "the least scale": (
        {"initial_scale": 4.0, "growth_interval": 1, "hysteresis": 1},
        "bbbbbggg",
        [2, 1, 1, 1, 1, 2, 4, 8],
    ),
    "the largest numbers": (
        {"growth_interval": 2},
        "gggbbggbbbbbbggg",
        [2**32, 2**33, 2**33, 2**33, 2**32, 2**32, 2**33, 2**33, 2**32, 2**31, 2**30, 2**29, 2**28, 2**28, 2**29, 2**29],
    ),
    "factors that float32 rounds": (
        {"initial_scale": 1000.0, "min_scale": 300.0, "growth_factor": 1.1, "backoff_factor": 0.7, "growth_interval": 2},
        "bgbbgggggbgggbbb",
        [
            *(1000, 1000, 700, 490, 490, 539, 539, 592.9000244140625, 592.9000244140625, 592.9000244140625, 592.9000244140625),
            *(652.1900634765625, 652.1900634765625, 652.1900634765625, 456.5330505371094, 319.5731201171875),
        ],
    ),
}


def run_ranks(size, program, *, is_sharded, dtype=torch.float32, **switches):
    """Call ``program(rank, ddp, optimizer)`` on each rank; the model is one vector of ones."""
    model = torch.nn.Linear(64, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(model.weight)
    switches = {"nonfinite_gradients": "allow", "use_distributed_optimizer": is_sharded, **switches}

    def optimizer_of(ddp):
        return DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.25), ddp)

    return run_wrapped(size, model, program, optimizer_of, **switches)


def step(scaler, ddp, optimizer, factor=1.0):
    scaler.scale((ddp.module.weight * factor).float().sum()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return result.updated


@MODES
@pytest.mark.parametrize(("settings", "word", "scales"), GOLDEN.values(), ids=GOLDEN)
def test_scales_are_megatrons_to_the_digit_when_one_rank_overflows(settings, word, scales, is_sharded):
    def program(rank, ddp, optimizer):
        scaler, seen, updated = DynamicGradScaler(**settings), [], ""
        for letter in word:
            updated += "g" if step(scaler, ddp, optimizer, math.inf if letter == "b" and rank == 1 else 1.0) else "b"
            seen.append(scaler.get_scale())
        return updated, seen, ddp.module.weight.unique().tolist()

    weight = pytest.approx([1 - 0.25 * word.count("g")], abs=1e-5)
    assert run_ranks(2, program, is_sharded=is_sharded) == [(word, scales, weight)] * 2


@MODES
def test_a_constant_scale_only_leaves_steps_out(is_sharded):
    def program(rank, ddp, optimizer):
        scaler = ConstantGradScaler(1024.0)
        updated = [step(scaler, ddp, optimizer, factor) for factor in (1.0, 2.0**120, 1.0)]
        return updated, scaler.get_scale(), scaler.state_dict(), ddp.module.weight.unique().tolist()

    assert run_ranks(2, program, is_sharded=is_sharded) == [([True, False, True], 1024.0, {}, [0.5])] * 2


@MODES
def test_gradients_may_be_looked_at_and_clipped_between(is_sharded):
    def program(rank, ddp, optimizer):
        scaler = DynamicGradScaler(2.0**10)
        scaler.scale(ddp.module.weight.float().sum()).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(4.0).item()
        return norm, scaler.step(optimizer).grad_norm, ddp.module.weight.unique().tolist()

    # sqrt(64) = 8, so each gradient of 1 becomes 0.5
    expected = (8.0, pytest.approx(4.0), pytest.approx([1 - 0.25 * 0.5]))
    assert run_ranks(2, program, is_sharded=is_sharded) == [expected] * 2


def test_one_scaler_serves_several_optimizers_and_one_overflow_lowers_it():
    world = LoopbackWorld(2, timeout_s=30)
    config = DistributedDataParallelConfig(nonfinite_gradients="allow", use_distributed_optimizer=True)

    def play(rank):
        modules = [torch.nn.Linear(64, 1), torch.nn.Linear(32, 1)]
        ddps = [DistributedDataParallel(module, config, communicator=world.communicator(rank)) for module in modules]
        optimizers = [DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp) for ddp in ddps]
        scaler = DynamicGradScaler(16.0, hysteresis=1)
        for ddp, factor in zip(ddps, (1.0, math.inf), strict=True):
            scaler.scale(sum(param.sum() for param in ddp.parameters()) * factor).backward()
        updated = [scaler.step(optimizer).updated for optimizer in optimizers]
        scaler.update()
        return updated, scaler.get_scale()

    assert world.run(play) == [([True, False], 8.0)] * 2


@MODES
def test_scales_that_differ_between_ranks_are_named(is_sharded):
    def program(rank, ddp, optimizer):
        scaler = ConstantGradScaler(2.0**rank)
        if not is_sharded:
            step(scaler, ddp, optimizer)  # whole parameters are updated before the next fence compares how
        expected = HyperparameterMismatchError if is_sharded else ReplicasDivergedError
        with pytest.raises(expected, match=r"loss scale.*1\.0 on rank 0; 2\.0 on rank 1"):
            step(scaler, ddp, optimizer)

    run_ranks(2, program, is_sharded=is_sharded)


def test_its_state_goes_on_where_it_was_saved_also_in_a_checkpoint(tmp_path):
    settings = {"initial_scale": 1024.0, "growth_interval": 2}

    def train(rank, ddp, optimizer):
        scaler = DynamicGradScaler(**settings)
        for factor in (math.inf, math.inf, 1.0):
            step(scaler, ddp, optimizer, factor)
        save_checkpoint(tmp_path, ddp, optimizer, step=1, scaler=scaler)
        return scaler.state_dict()

    def go_on(rank, ddp, optimizer):
        scaler = DynamicGradScaler(**settings)
        load_checkpoint(tmp_path, ddp, optimizer, scaler=scaler)
        state = scaler.state_dict()
        step(scaler, ddp, optimizer)
        return state, scaler.get_scale()

    saved = {"scale": 512.0, "growth_tracker": 1, "hysteresis_tracker": 0}
    assert run_ranks(2, train, is_sharded=True) == [saved] * 2
    assert run_ranks(1, go_on, is_sharded=False) == [(saved, 1024.0)]


def test_the_state_of_megatron_with_its_tensor_is_taken():
    scaler = DynamicGradScaler()
    scaler.load_state_dict({"scale": torch.tensor([8.0]), "growth_tracker": 7, "hysteresis_tracker": 1})

    assert scaler.state_dict() == {"scale": 8.0, "growth_tracker": 7, "hysteresis_tracker": 1}


def test_an_update_without_a_step_and_a_second_unscaling_are_refused():
    def program(rank, ddp, optimizer):
        scaler = DynamicGradScaler(16.0)
        with pytest.raises(PhaseError, match="before any gradients were tested"):
            scaler.update()
        scaler.scale(ddp.module.weight.sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(PhaseError, match="unscaled already"):
            scaler.unscale_(optimizer)
        return scaler.step(optimizer).updated

    assert run_ranks(2, program, is_sharded=True) == [True, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"initial_scale": 0.0},
        {"initial_scale": math.inf},
        {"min_scale": 0.0},
        {"initial_scale": 1.0, "min_scale": 2.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings):
    name = list(settings)[-1]
    with pytest.raises(ConfigError, match=f"{name} must be .*{settings[name]}"):
        DynamicGradScaler(**settings)


@MODES
def test_a_step_that_the_wrapper_skips_lowers_the_scale_also_where_the_sum_is_finite(is_sharded):
    def program(rank, ddp, optimizer):
        scaler = DynamicGradScaler(2.0, hysteresis=1)
        # 2 * 2**126 is "too large to be summed" on rank 1, and yet 2**127 + 2 is a float32.
        updated = step(scaler, ddp, optimizer, 2.0**126 if rank == 1 else 1.0)
        return updated, scaler.get_scale(), ddp.module.weight.unique().tolist()

    fields = {"nonfinite_gradients": "skip_step", "grad_reduction": "sum"}
    assert run_ranks(2, program, is_sharded=is_sharded, **fields) == [(False, 1.0, [1.0])] * 2


@MODES
def test_a_step_without_a_scaler_runs_nothing_of_scaling_averages_trials_and_apex(is_sharded):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2), DistributedDataParallelConfig(use_distributed_optimizer=is_sharded))
    optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp, clip_grad=0.01)

    def step():
        ddp(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    called = set()
    sys.setprofile(lambda frame, *_: called.add("/".join(Path(frame.f_code.co_filename).parts[-2:])))
    try:
        step()
    finally:
        sys.setprofile(None)

    assert {"optim/distributed_optimizer.py", "optim/norm.py"} <= called
    assert called.isdisjoint(f"optim/{name}.py" for name in ("scaler", "averaging", "elementwise", "kernels"))


# Steps that fail after their gradients were unscaled #

SCALERS = {
    "constant": lambda: ConstantGradScaler(1024.0),
    "dynamic": lambda: DynamicGradScaler(1024.0),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
}


WAYS = [(True, "one rank"), (True, "all ranks"), (False, "all ranks")]  # an update that one rank misses is named otherwise


@pytest.mark.parametrize(("is_sharded", "fails_on"), WAYS)
@pytest.mark.parametrize("unscales_early", [False, True], ids=["in step", "before"])
@pytest.mark.parametrize("calls_update", [False, True], ids=["no update", "update"])
@pytest.mark.parametrize("kind", SCALERS)
def test_a_step_after_one_that_failed_is_unscaled_or_refused(kind, calls_update, unscales_early, is_sharded, fails_on):
    """Its caller has caught the error and cleared the gradients, and may have forgotten the scaler's ``update()``."""

    def program(rank, ddp, optimizer):
        scaler, seen = SCALERS[kind](), []
        for index in range(4):
            scaler.scale(ddp.module.weight.sum()).backward()
            optimizer.param_groups[0]["lr"] = 0.25
            try:
                if unscales_early or index == 1:
                    scaler.unscale_(optimizer)
                if index == 1 and (rank == 1 or fails_on == "all ranks"):
                    optimizer.param_groups[0]["lr"] = math.nan
                scaler.step(optimizer)
                scaler.update()
                seen.append("")
            except (MegabucketError, RuntimeError) as error:
                seen.append(str(error))
                if calls_update:
                    scaler.update()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return seen, ddp.module.weight.unique().tolist()

    for seen, weights in run_ranks(2, program, is_sharded=is_sharded):
        assert weights == [1.0 - 0.25 * seen.count("")]
        assert "learning rate of parameter group 0 is nan" in seen[1]
        if kind != "torch" or calls_update:
            assert [not text for text in seen] == [True, False, True, True]
        else:  # it unscales once between two calls of its update()
            refused = "since the last update()" if unscales_early else "Call scaler.update() and zero_grad() after every step"
            assert all(refused in text for text in seen[2:])


@MODES
def test_a_torch_scaler_that_gives_up_between_two_steps_leaves_no_trace(is_sharded):
    """A step without a scaler after steps with one, which has been updated, is a plain step."""

    def program(rank, ddp, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step(scaler, ddp, optimizer)
        ddp.module.weight.sum().backward()
        return optimizer.step().updated

    def step(scaler, ddp, optimizer):
        scaler.scale(ddp.module.weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert run_ranks(2, program, is_sharded=is_sharded) == [True] * 2
