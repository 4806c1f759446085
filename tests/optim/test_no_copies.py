"""What holds shards is not copied or pickled: the refusal says what to save instead, and changes nothing in the process."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from optim_ranks import Net, in_ways

import megabucket as mb
from megabucket.errors import CheckpointUnavailableError, PhaseError
from megabucket.integrations import FrameworkOptimizer

BOTH = in_ways("all_reduce", "reduce_scatter")
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "old pickle": lambda held: pickle.dumps(held, protocol=2),
    "torch.save": lambda held: torch.save(held, io.BytesIO()),
    "to another process": ForkingPickler.dumps,
}


class Run:
    """A wrapped model, its optimizer, and what holds the optimizer."""

    def __init__(self, kind=mb.DistributedOptimizer, **switches):
        self.ddp = mb.DistributedDataParallel(Net(), mb.DistributedDataParallelConfig(**switches))
        self.inner = torch.optim.AdamW(self.ddp.parameters(), lr=0.1)
        self.optimizer = kind(self.inner, self.ddp)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)

    def train(self):
        self.ddp(torch.ones(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat([param.detach().flatten() for param in self.ddp.module.parameters()])


def check_that_nothing_has_changed(run, **switches):
    """The old optimizer and a new one step as they would have without the attempt."""
    old, new = run.train(), Run(type(run.optimizer), **switches).train()

    assert torch.equal(old, new)


HOLDERS = {
    "optimizer": lambda run: run.optimizer,
    "averages": lambda run: mb.ShardedEMA(run.optimizer, decay=0.9),
    "chain": lambda run: mb.ChainedOptimizer([run.optimizer]),
    "stop": lambda run: mb.AgreedStop(run.ddp),
    "checkpointer": lambda run: mb.Checkpointer("nowhere", run.ddp, run.optimizer),
    "wrapper": lambda run: run.ddp,
    "scheduler": lambda run: run.scheduler,
    "schedulers in a row": lambda run: torch.optim.lr_scheduler.SequentialLR(run.optimizer, [run.scheduler], milestones=[]),
    "swa scheduler": lambda run: torch.optim.swa_utils.SWALR(run.optimizer, swa_lr=0.1),
    "dict": lambda run: {"epoch": 1, "optimizer": run.optimizer},
}
SHALLOW = {"scheduler", "schedulers in a row", "swa scheduler", "dict", "stop", "checkpointer"}
"""Copying these without their contents makes a second holder of the same optimizer, as in torch."""


@BOTH
@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_refused_and_training_goes_on_as_without_the_attempt(way, name, switches):
    run, steps = Run(**switches), (mb.DistributedOptimizer.step, mb.ChainedOptimizer.step)
    held = HOLDERS[name](run)

    if way == "copy" and name in SHALLOW:
        copy.copy(held)
    else:
        with pytest.raises(PhaseError, match=r" cannot be copied or pickled: .*state_dict\(\)"):
            COPIES[way](held)

    assert (mb.DistributedOptimizer.step, mb.ChainedOptimizer.step) == steps
    check_that_nothing_has_changed(run, **switches)


@pytest.mark.parametrize("way", COPIES)
def test_the_optimizer_of_a_framework_is_refused_under_its_own_name(way):
    run, step = Run(FrameworkOptimizer), FrameworkOptimizer.step

    with pytest.raises(PhaseError, match="a FrameworkOptimizer cannot be copied"):
        COPIES[way](run.optimizer)

    assert FrameworkOptimizer.step is step
    check_that_nothing_has_changed(run)


@pytest.mark.parametrize("scaler", [mb.ConstantGradScaler(8.0), mb.DynamicGradScaler(8.0)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("way", COPIES)
def test_a_loss_scaler_is_moved_by_its_state(way, scaler):
    with pytest.raises(PhaseError, match=rf"a {type(scaler).__name__} cannot be .*state_dict\(\)"):
        COPIES[way](scaler)

    assert scaler.get_scale() == 8.0


@BOTH
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("of", [lambda run: run.inner, lambda run: [run.inner]], ids=["optimizer", "list"])
def test_a_copy_of_the_given_optimizer_would_hold_flat_shards_as_if_they_were_the_model(of, way, switches):
    run = Run(**switches)
    run.train()

    if way == "copy" and isinstance(of(run), list):
        copy.copy(of(run))
    else:
        with pytest.raises(CheckpointUnavailableError, match=r"a copy or pickle of the AdamW .* Call state_dict\(\) of"):
            COPIES[way](of(run))

    run.train()
    assert run.optimizer.last_step.updated


@BOTH
def test_a_scheduler_over_the_given_optimizer_is_refused_too(switches):
    run = Run(**switches)
    scheduler = torch.optim.lr_scheduler.StepLR(run.inner, step_size=1)

    with pytest.raises(CheckpointUnavailableError):
        copy.deepcopy(scheduler)

    check_that_nothing_has_changed(run, **switches)


@BOTH
def test_the_given_optimizer_is_copied_and_pickled_as_before_once_it_holds_whole_parameters_again(switches):
    run = Run(**switches)
    expected = run.train()

    run.optimizer.before_rebuild()
    run.ddp.detach()
    copied, restored = copy.deepcopy(run.inner), pickle.loads(pickle.dumps(run.inner))  # noqa: S301 - our own bytes

    for optimizer in (copied, restored):
        values = torch.cat([param.detach().flatten() for param in optimizer.param_groups[0]["params"]])
        assert torch.equal(values, expected)
        assert [state["step"].item() for state in optimizer.state_dict()["state"].values()] == [1.0] * 4


@BOTH
def test_a_rebuild_keeps_the_refusal(switches):
    run = Run(**switches)
    run.ddp.rebuild()

    with pytest.raises(CheckpointUnavailableError):
        copy.deepcopy(run.inner)

    check_that_nothing_has_changed(run, **switches)


@BOTH
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_groups_may_be_copied_to_remember_their_hyperparameters(duplicate, switches):
    run = Run(**switches)

    before = duplicate(run.optimizer.param_groups)

    assert before[0]["lr"] == 0.1
    check_that_nothing_has_changed(run, **switches)
