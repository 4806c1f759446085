"""``torch.amp.GradScaler``, unchanged, with ``DistributedOptimizer``: the scales, skips and losses of one process."""

import copy
import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from optim_ranks import WAYS, in_ways, run_wrapped
from torch.utils._python_dispatch import TorchDispatchMode

from megabucket import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from megabucket.buffer import CHECK_AND_UNSCALE
from megabucket.errors import (
    ConfigError,
    HyperparameterMismatchError,
    MegabucketError,
    NonFiniteGradientError,
    PeerFailedError,
    PhaseError,
    ReplicasDivergedError,
)
from megabucket.testing import LoopbackWorld

STEPS = 12
MODES = in_ways("all_reduce", "reduce_scatter", "overlap", "explicit")
BOTH = in_ways("all_reduce", "reduce_scatter")


def model_of(*widths):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, *others = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return torch.nn.Sequential(first, *(part for layer in others for part in (torch.nn.Tanh(), layer)))


MODEL = model_of(20, 30, 8)
TINY = model_of(3, 1)  # 3 elements at 0, 1 at 64, in a bucket of 128: ranks 1 and 3 of 4 own padding
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def run_ranks(size, program, model=MODEL, *, make=OPTIMIZERS["SGD"], nonfinite="allow", clip_grad=0.0, **switches):
    """Call ``program(rank, ddp, optimizer)`` on each rank."""
    switches = {"bucket_size": 300, "nonfinite_gradients": nonfinite, **switches}

    def optimizer_of(ddp):
        return DistributedOptimizer(make(ddp.parameters()), ddp, clip_grad=clip_grad)

    return run_wrapped(size, model, program, optimizer_of, **switches)


def scaler_of(**changes):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 3, **changes})


def loss_of(module, rank, step, dtype):
    """The loss of one rank. Scaled, that of rank 1 in step 2 is infinite, and that of rank 0 in step 7."""
    width = next(module.parameters()).shape[1]
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(10 * step + rank))
    with torch.autocast("cpu", dtype=dtype):
        outputs = module(inputs)
    return outputs.float().square().mean() * (1e36 if (rank, step) in ((1, 2), (0, 7)) else 1.0)


def train_alone(size, dtype, *, max_norm, model=MODEL, make=OPTIMIZERS["SGD"]):
    """Train in one process on the mean of the losses of all ranks; scales before each step, and losses by rank."""
    module = copy.deepcopy(model)
    optimizer, scaler = make(module.parameters()), scaler_of()
    scales, losses = [], []
    for step in range(STEPS):
        of_ranks = [loss_of(module, rank, step, dtype) for rank in range(size)]
        scales.append(scaler.get_scale())
        losses.append([loss.item() for loss in of_ranks])
        for loss in of_ranks:
            scaler.scale(loss / size).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales, losses


def train(rank, ddp, optimizer, *, dtype, max_norm):
    """The loop of torch's documentation; with ``max_norm`` gradients are unscaled before, and clipped."""
    scaler = scaler_of()
    scales, losses, updated = [], [], []
    for step in range(STEPS):
        loss = loss_of(ddp, rank, step, dtype)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        scaler.scale(loss).backward()
        if ddp.ddp_config.finish == "explicit":
            ddp.finish_grad_sync()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(max_norm)
        scaler.step(optimizer)
        scaler.update()
        updated.append(optimizer.last_step.updated)
        optimizer.zero_grad()
    return scales, losses, updated


def assert_same(results, alone):
    scales, losses = alone
    skips = [after < before for before, after in zip(scales, [*scales[1:], math.inf], strict=True)]
    assert (2 if len(results) > 1 else 1) <= sum(skips) < STEPS / 2  # on one rank only, and on none
    for rank, (own_scales, own_losses, updated) in enumerate(results):
        assert own_scales == scales
        assert updated[:-1] == [not skip for skip in skips[:-1]]
        expected = [of_ranks[rank] for of_ranks in losses]
        assert own_losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.pairs
@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_scales_skips_and_losses_are_those_of_one_process(size, max_norm, dtype, switches):
    results = run_ranks(size, lambda *here: train(*here, dtype=dtype, max_norm=max_norm), **switches)

    assert_same(results, train_alone(size, dtype, max_norm=max_norm))


@MODES
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_waits_for_all_ranks_also_one_that_unscales_in_its_kernel(make, switches):
    results = run_ranks(2, lambda *here: train(*here, dtype=torch.float16, max_norm=None), make=make, **switches)

    assert_same(results, train_alone(2, torch.float16, max_norm=None, make=make))


@MODES
def test_clip_grad_clips_what_the_scaler_has_unscaled(switches):
    results = run_ranks(2, lambda *here: train(*here, dtype=torch.float16, max_norm=None), clip_grad=0.1, **switches)

    assert_same(results, train_alone(2, torch.float16, max_norm=0.1))


def test_a_scaler_makes_the_one_private_call_that_shard_gradients_answer():
    calls = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is CHECK_AND_UNSCALE:
                calls.append((*args, kwargs))
            return func(*args, **(kwargs or {}))

    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    params[0].grad, params[1].grad = torch.tensor([8.0, 4.0]), torch.tensor([math.inf, 2.0])
    scaler = scaler_of(init_scale=4.0)
    scaler.scale(torch.ones(()))

    with Calls():
        scaler.unscale_(torch.optim.SGD(params))

    ((grads, found_inf, inv_scale, kwargs),) = calls
    assert [grad is param.grad for grad, param in zip(grads, params, strict=True)] == [True, True]
    assert (found_inf.item(), inv_scale.item()) == (1.0, 0.25)
    assert not kwargs
    assert [grad.tolist() for grad in grads] == [[2.0, 1.0], [math.inf, 0.5]]


@MODES
def test_ranks_that_own_nothing_but_padding_decide_alike(switches):
    results = run_ranks(4, lambda *here: train(*here, dtype=torch.bfloat16, max_norm=0.1), TINY, **switches)

    assert_same(results, train_alone(4, torch.bfloat16, max_norm=0.1, model=TINY))


def reference_of_main_parameters(size, dtype):
    """What textbooks do by hand with a 16-bit model: the scaler looks at float32 copies."""
    module = copy.deepcopy(MODEL).to(dtype)
    mains = [torch.nn.Parameter(param.detach().float()) for param in module.parameters()]
    optimizer, scaler = OPTIMIZERS["SGD"](mains), scaler_of()
    scales, losses = [], []
    for step in range(STEPS):
        scales.append(scaler.get_scale())
        losses.append([])
        sums = [torch.zeros_like(main) for main in mains]
        for rank in range(size):
            loss = loss_of(module, rank, step, dtype)
            losses[-1].append(loss.item())
            scaler.scale(loss).backward()
            for total, param in zip(sums, module.parameters(), strict=True):
                total.add_(param.grad.float())
                param.grad = None
        for main, total in zip(mains, sums, strict=True):
            main.grad = total / size
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for main, param in zip(mains, module.parameters(), strict=True):
                param.copy_(main)
    return scales, losses


@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_a_16_bit_model_is_unscaled_and_clipped_in_float32(max_norm, dtype, switches):
    model = copy.deepcopy(MODEL).to(dtype)
    results = run_ranks(2, lambda *here: train(*here, dtype=dtype, max_norm=max_norm), model, **switches)

    assert_same(results, reference_of_main_parameters(2, dtype))


@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_reduce_scattered_float16_gradients_are_widened_before_they_are_unscaled(max_norm):
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        # 2**-23 is a float16 times 2**16, and far below the smallest one without.
        scaler.scale(ddp(torch.full((1, 20), 2.0**-10, dtype=torch.float16)).float().sum() * 2.0**-13).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            assert optimizer.clip_grad_norm_(max_norm) == pytest.approx(2.0**-23 * math.sqrt(20))
        scaler.step(optimizer)
        return optimizer.last_step.grad_norm, ddp.module.weight.mean().item()

    model = torch.nn.Linear(20, 1, bias=False, dtype=torch.float16)
    torch.nn.init.zeros_(model.weight)
    make = partial(torch.optim.SGD, lr=2.0**16)
    (norm, weight), other = run_ranks(2, program, model, make=make, grad_reduce_in_fp32=False, **WAYS["reduce_scatter"])

    assert other == (norm, weight)
    assert norm == pytest.approx(2.0**-23 * math.sqrt(20))
    assert weight == -(2.0**-7)  # 2**16 * 2**-23


def test_reduced_float16_gradients_are_refused_by_torch_s_scaler_as_under_torch_ddp():
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(ddp(torch.ones(1, 20, dtype=torch.float16)).float().sum()).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)

    run_ranks(2, program, torch.nn.Linear(20, 1, bias=False, dtype=torch.float16), grad_reduce_in_fp32=False)


@MODES
def test_where_infinite_gradients_are_errors_a_scaler_is_refused_by_name(switches):
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 0, torch.float16)).backward()
        if ddp.ddp_config.finish == "explicit":
            ddp.finish_grad_sync()
        with pytest.raises(ConfigError, match=r"torch\.amp\.GradScaler.*nonfinite_gradients='allow'"):
            scaler.step(optimizer)

    run_ranks(2, program, nonfinite="error", **switches)


def test_an_infinite_gradient_that_is_an_error_names_the_scaler():
    def program(rank, ddp, optimizer):
        with pytest.raises(NonFiniteGradientError, match=r"torch\.amp\.GradScaler"):
            scaler_of().scale(loss_of(ddp, rank, 2, torch.float16)).backward()

    run_ranks(2, program, nonfinite="error")


@MODES
def test_steps_that_the_wrapper_skips_are_skips_of_the_scaler(switches):
    results = run_ranks(2, lambda *here: train(*here, dtype=torch.float16, max_norm=0.1), nonfinite="skip_step", **switches)

    assert_same(results, train_alone(2, torch.float16, max_norm=0.1))


@BOTH
def test_a_skipped_step_is_over_and_its_result_names_the_parameters(switches):
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 2, torch.float16)).backward()
        assert scaler.step(optimizer) is None
        scaler.update()
        before = [value.clone() for value in ddp.state_dict().values()]
        assert optimizer.state_dict()["state"] == {}  # between two steps, so it may be saved
        ddp(torch.ones(1, 20)).sum()  # a loop that clears gradients after its forward
        optimizer.zero_grad()
        train(rank, ddp, optimizer, dtype=torch.float16, max_norm=None)
        return before, optimizer.last_step

    results = run_ranks(2, program, skipped_forwards="allow", **switches)
    for before, _ in results:
        assert all(map(torch.equal, before, MODEL.state_dict().values()))

    def first(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 2, torch.float16)).backward()
        scaler.step(optimizer)
        return optimizer.last_step

    for result in run_ranks(2, first, **switches):
        assert not result.updated
        assert math.isnan(result.grad_norm)
        assert result.reason.startswith("the loss scaler skips the step: not finite in this rank's shard of ")


@BOTH
def test_a_step_in_spite_of_the_scaler_changes_nothing(switches):
    def program(rank, ddp, optimizer):
        scaler_of().scale(loss_of(ddp, rank, 2, torch.float16)).backward()
        assert optimizer.unscale_grads(0.5)
        if ddp.policy.is_sharded:
            with pytest.raises(PhaseError, match="twice"):
                optimizer.step()
        else:
            assert not optimizer.step().updated
        return ddp.state_dict()

    for values in run_ranks(2, program, **switches):
        assert all(map(torch.equal, values.values(), MODEL.state_dict().values()))


@BOTH
def test_scalers_that_differ_between_ranks_are_named_on_all(switches):
    def program(rank, ddp, optimizer):
        scaler = scaler_of(init_scale=2.0 ** (10 + rank))
        texts = []
        for step in range(2):
            try:
                scaler.scale(loss_of(ddp, rank, step, torch.float16)).backward()
                scaler.step(optimizer)
            except (HyperparameterMismatchError, ReplicasDivergedError) as error:
                texts.append(str(error))
                break
            scaler.update()
            optimizer.zero_grad()
        return texts

    first, second = run_ranks(2, program, **switches)
    assert first == second
    assert "loss scale" in first[0]
    assert "1024.0 on rank 0; 2048.0 on rank 1" in first[0]


@BOTH
def test_gradients_are_unscaled_once(switches):
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 0, torch.float16)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer)
        another = scaler_of()
        another.scale(torch.ones(()))
        with pytest.raises(PhaseError, match="unscaled already"):
            another.unscale_(optimizer)
        return scaler.step(optimizer).updated

    assert run_ranks(2, program, **switches) == [True, True]


def halve(ddp):
    ddp.scale_gradients(0.5)


def clip_in_place(ddp):
    torch.nn.utils.clip_grad_norm_(ddp.module.parameters(), 1e-3)


def replace(ddp):
    ddp.module[0].weight.grad = torch.ones_like(ddp.module[0].weight)


def unscale_and_change(change, ddp, optimizer, rank):
    scaler = scaler_of()
    scaler.scale(loss_of(ddp, rank, 0, torch.bfloat16)).backward()
    scaler.unscale_(optimizer)
    change(ddp)
    return scaler


def test_what_would_be_lost_after_16_bit_gradients_were_unscaled_is_refused():
    def program(rank, ddp, optimizer):
        scaler = unscale_and_change(halve, ddp, optimizer, rank)
        with pytest.raises(PhaseError, match="the change would be lost"):
            scaler.step(optimizer)

    run_ranks(2, program, copy.deepcopy(MODEL).bfloat16(), grad_reduce_in_fp32=False, **WAYS["reduce_scatter"])


@pytest.mark.parametrize("change", [halve, clip_in_place, replace])
def test_changes_to_reduced_16_bit_gradients_after_they_were_unscaled_are_those_of_the_step(change):
    def program(rank, ddp, optimizer):
        scaler = unscale_and_change(change, ddp, optimizer, rank)
        expected = torch.nn.utils.get_total_norm([param.grad.double() for param in ddp.module.parameters()]).item()
        return scaler.step(optimizer).grad_norm, expected

    for norm, expected in run_ranks(2, program, copy.deepcopy(MODEL).bfloat16(), grad_reduce_in_fp32=False):
        assert norm == pytest.approx(expected)


def test_float32_gradients_that_the_caller_changes_after_unscaling_are_those_of_the_step():
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 0, torch.bfloat16)).backward()
        scaler.unscale_(optimizer)
        norms = [torch.nn.utils.clip_grad_norm_(ddp.module.parameters(), 1e-3).item()]
        ddp.module[0].weight.grad = torch.zeros_like(ddp.module[0].weight)
        norms.append(torch.nn.utils.get_total_norm([param.grad for param in ddp.module.parameters()]).item())
        return norms, scaler.step(optimizer).grad_norm

    for (before, after), norm in run_ranks(2, program):
        assert before > 1e-3 > after
        assert norm == pytest.approx(after)


@BOTH
def test_a_rank_that_fails_between_unscale_and_step_ends_the_step_on_all_and_the_next_is_right(switches):
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        if switches:

            def step():
                with ddp.step():
                    scaler.scale(loss_of(ddp, rank, 0, torch.float16)).backward()
                    scaler.unscale_(optimizer)
                    if rank == 1:
                        raise ValueError("boom")
                    scaler.step(optimizer)

            with pytest.raises(PeerFailedError, match=r"rank 1 failed .*boom"):
                step()
        optimizer.zero_grad()
        return train(rank, ddp, optimizer, dtype=torch.float16, max_norm=0.1)

    assert_same(run_ranks(2, program, **switches), train_alone(2, torch.float16, max_norm=0.1))


@BOTH
def test_a_scaler_that_is_switched_off_is_no_scaler(switches):
    def program(rank, ddp, optimizer):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(ddp, rank, 0, torch.bfloat16)).backward()
        scaler.unscale_(optimizer)
        return scaler.step(optimizer).updated

    assert run_ranks(2, program, nonfinite="error", **switches) == [True, True]


def test_the_step_of_the_torch_optimizer_inside_is_refused_on_every_rank():
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 0, torch.bfloat16)).backward()
        with pytest.raises(PhaseError, match=r"step\(\) of the SGD inside a DistributedOptimizer"):
            scaler.step(optimizer.torch_optimizer)

    run_ranks(4, program, TINY, use_distributed_optimizer=True)


@pytest.mark.parametrize("path", ["state_dict", "rebuild", "checkpoint"])
def test_placeholders_of_ranks_without_a_shard_are_in_no_state(path, tmp_path):
    def program(rank, ddp, optimizer):
        train(rank, ddp, optimizer, dtype=torch.bfloat16, max_norm=0.1)
        state = optimizer.state_dict()
        if path == "state_dict":
            optimizer.load_state_dict(state)
        elif path == "rebuild":
            ddp.rebuild()
        else:
            save_checkpoint(tmp_path, ddp, optimizer, step=1)
            load_checkpoint(tmp_path, ddp, optimizer)
        after = optimizer.state_dict()
        results = train(rank, ddp, optimizer, dtype=torch.bfloat16, max_norm=0.1)
        return len(optimizer.sharding.shards), state, after, results

    results = run_ranks(4, program, TINY, use_distributed_optimizer=True)

    num_shards = [num for num, *_ in results]
    assert num_shards == [1, 0, 1, 0]
    for _, state, after, (scales, _, updated) in results:
        assert sorted(state["state"]) == [0, 1]
        assert str(after) == str(state)
        assert (scales, updated) == (results[0][3][0], results[0][3][2])


class Plain(torch.optim.SGD):
    """Torch's own optimizer and clipping, with what ``train`` asks for."""

    def __init__(self, ddp):
        super().__init__(ddp.parameters(), lr=0.1, momentum=0.9)
        self.last_step = SimpleNamespace(updated=False)
        self.register_step_post_hook(lambda *_: setattr(self.last_step, "updated", True))

    def clip_grad_norm_(self, max_norm):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], max_norm)

    def zero_grad(self):
        super().zero_grad()
        self.last_step.updated = False


@pytest.mark.parametrize("size", [1, 2])
def test_a_plain_optimizer_on_all_reduced_gradients_needs_nothing(size):
    world, models = LoopbackWorld(size, timeout_s=30), [copy.deepcopy(MODEL) for _ in range(size)]
    config = DistributedDataParallelConfig(bucket_size=300, nonfinite_gradients="allow")

    def play(rank):
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        return train(rank, ddp, Plain(ddp), dtype=torch.float16, max_norm=0.1)

    assert_same(world.run(play), train_alone(size, torch.float16, max_norm=0.1))


def test_a_rank_that_is_interrupted_while_scalers_agree_is_named_on_the_others(monkeypatch):
    def program(rank, ddp, optimizer):
        scaler = scaler_of()
        scaler.scale(loss_of(ddp, rank, 0, torch.bfloat16)).backward()
        if rank == 1:
            monkeypatch.setattr(optimizer.global_norm, "of", interrupted)
        try:
            scaler.step(optimizer)
        except (KeyboardInterrupt, MegabucketError) as error:
            return type(error).__name__, str(error)

    def interrupted(_):
        raise KeyboardInterrupt

    (kind, text), (own_kind, _) = run_ranks(2, program, use_distributed_optimizer=True)
    assert own_kind == "KeyboardInterrupt"
    assert kind == "WrapperBrokenError"
    assert text.startswith("step 0: rank 1 stopped in unscaling gradients, with the others about to go on: KeyboardInterrupt")
