"""Fused and schedule-free optimizers of other packages on shards, bit by bit as on whole parameters."""

import copy

import pytest
import torch
from optim_ranks import WAYS, in_ways, run_wrapped
from stand_ins import FusedAdam, FusedSGD, ScheduleFree, TransformerEngineFusedAdam

from megabucket import (
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from megabucket.errors import ConfigError, PeerFailedError


def schedule_free(groups):
    optimizer = ScheduleFree(groups, weight_decay=0.01)
    optimizer.train()  # before it is wrapped, as its package asks for
    return optimizer


OPTIMIZERS = {
    "FusedAdam": FusedAdam,
    "FusedAdam, L2": lambda groups: FusedAdam(groups, adam_w_mode=False, bias_correction=False, weight_decay=0.1),
    "FusedAdam, capturable": lambda groups: FusedAdam(groups, capturable=True, weight_decay=0.1),
    "FusedAdam of Transformer Engine": lambda groups: TransformerEngineFusedAdam(groups, weight_decay=0.01),
    "FusedSGD": lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "FusedSGD, Nesterov": lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9, nesterov=True, wd_after_momentum=True),
    "schedule-free": schedule_free,
}
MODES = in_ways("all_reduce", "reduce_scatter", "overlap")


def model_of(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 8)).to(dtype)


def groups_of(module):
    """The first holds a part of the first bucket only: of 4 ranks, three have no shard of it."""
    weight, *others = module.parameters()
    return [{"params": others[:1]}, {"params": [weight, *others[1:]], "lr": 0.05}]


def loss_of(model, step):
    """The same on every rank, so that one process computes the same gradients."""
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def train(model, optimizer, steps):
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(module):
    return torch.cat([param.detach().flatten() for param in module.parameters()])


class Alone:
    """Plain torch in one process, with float32 copies of the parameters by hand."""

    def __init__(self, make, dtype):
        self.model, self.mains = model_of(dtype), model_of(dtype).float()
        self.optimizer = make(groups_of(self.mains))

    def train(self, steps):
        for step in steps:
            loss_of(self.model, step).backward()
            for param, main in zip(self.model.parameters(), self.mains.parameters(), strict=True):
                main.grad, param.grad = param.grad.float(), None
            self.optimizer.step()
            self.round()

    @torch.no_grad()
    def round(self):
        for param, main in zip(self.model.parameters(), self.mains.parameters(), strict=True):
            param.copy_(main)


def run_ranks(size, program, make, dtype=torch.float32, **switches):
    def optimizer_of(ddp):
        return DistributedOptimizer(make(groups_of(ddp.module)), ddp)

    return run_wrapped(size, model_of(dtype), program, optimizer_of, bucket_size=300, **switches)


@pytest.mark.parametrize("path", ["without a break", "state_dict", "checkpoint", "rebuild"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_ranks_without_a_shard_of_a_group_train_save_and_resume(make, path, tmp_path):
    def program(rank, ddp, optimizer):
        has_no_shard = any(not group["params"][0].numel() for group in optimizer.sharding.updates[0].twin.param_groups)
        train(ddp, optimizer, range(3))
        if path == "rebuild":
            ddp.rebuild()
        elif path == "state_dict":
            state, weights = optimizer.state_dict(), copy.deepcopy(ddp.state_dict())
            train(ddp, optimizer, [7, 8])
            ddp.load_state_dict(weights)
            optimizer.load_state_dict(state)
        elif path == "checkpoint":
            save_checkpoint(tmp_path, ddp, optimizer, step=3)
            train(ddp, optimizer, [7, 8])
            load_checkpoint(tmp_path, ddp, optimizer)
        train(ddp, optimizer, range(3, 5))
        ddp.finish_param_sync()
        return has_no_shard, weights_of(ddp.module)

    alone = Alone(make, torch.float32)
    alone.train(range(5))

    found = run_ranks(4, program, make, use_distributed_optimizer=True)

    assert sum(has_no_shard for has_no_shard, _ in found) == 3
    assert all(torch.equal(weights, weights_of(alone.model)) for _, weights in found)


@MODES
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_bf16_model_is_stepped_in_float32(make, switches):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(4))
        ddp.finish_param_sync()
        return weights_of(ddp.module)

    alone = Alone(make, torch.bfloat16)
    alone.train(range(4))

    found = run_ranks(2, program, make, torch.bfloat16, **switches)

    assert all(torch.equal(weights, weights_of(alone.model)) for weights in found)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
def test_float32_copies_of_its_own_are_refused(is_sharded):
    def make(groups):
        optimizer = FusedAdam(groups, capturable=True, master_weights=True)
        optimizer.update_kind = "elementwise"
        return optimizer

    with pytest.raises(ConfigError, match=r"FusedAdam\(master_weights=True\) keeps float32 copies of the parameters, and so"):
        run_ranks(2, lambda *_: None, make, use_distributed_optimizer=is_sharded)


class TestScheduleFree:
    @MODES
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_eval_and_train_exchange_the_weights_of_all_ranks(self, switches, dtype):
        def program(rank, ddp, optimizer):
            seen = []
            for step in range(4):
                train(ddp, optimizer, [step])
                optimizer.eval()
                with torch.no_grad():
                    seen.append(loss_of(ddp, 9))
                seen.append(weights_of(ddp.module))
                optimizer.train()
            ddp.finish_param_sync()
            return [*seen, weights_of(ddp.module)]

        alone, expected = Alone(schedule_free, dtype), []
        for step in range(4):
            alone.train([step])
            alone.optimizer.eval()
            alone.round()
            expected += [loss_of(alone.model, 9).detach(), weights_of(alone.model)]
            alone.optimizer.train()
            alone.round()
        expected.append(weights_of(alone.model))

        for seen in run_ranks(4, program, schedule_free, dtype, **switches):
            torch.testing.assert_close(seen, expected, rtol=0, atol=0)

    @MODES
    def test_it_may_be_wrapped_before_it_is_switched_to_training(self, switches):
        def program(rank, ddp, optimizer):
            optimizer.train()  # as transformers' Trainer does, in its first step
            train(ddp, optimizer, range(4))
            ddp.finish_param_sync()
            return weights_of(ddp.module)

        alone = Alone(schedule_free, torch.float32)
        alone.train(range(4))

        for weights in run_ranks(2, program, lambda groups: ScheduleFree(groups, weight_decay=0.01), **switches):
            assert torch.equal(weights, weights_of(alone.model))

    def test_asked_for_the_mode_it_is_in_it_does_nothing_also_in_a_step(self):
        def program(rank, ddp, optimizer):
            ddp(torch.ones(1, 20)).sum().backward()
            if rank == 0:
                optimizer.train()  # no collective: the other rank does not call it
            return optimizer.step().updated

        assert run_ranks(2, program, schedule_free, **WAYS["overlap"]) == [True, True]

    def test_in_a_step_it_is_refused_on_all_ranks_and_nothing_is_exchanged(self):
        def program(rank, ddp, optimizer):
            train(ddp, optimizer, range(2))
            ddp.finish_param_sync()
            before = weights_of(ddp.module)
            if rank == 0:
                with ddp.no_sync():
                    ddp(torch.ones(1, 20)).sum().backward()
            with pytest.raises(PeerFailedError, match=r"rank 0 failed in eval\(\)"):
                optimizer.eval()
            assert torch.equal(weights_of(ddp.module), before)
            return optimizer.param_groups[0]["train_mode"]

        assert run_ranks(2, program, schedule_free, use_distributed_optimizer=True) == [True, True]

    def test_other_optimizers_have_no_such_methods(self):
        def program(rank, ddp, optimizer):
            return [hasattr(optimizer, name) for name in ("train", "eval")]

        assert run_ranks(1, program, torch.optim.AdamW) == [[False, False]]
