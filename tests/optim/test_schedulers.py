"""Every scheduler of torch on a ``DistributedOptimizer``: the hyperparameters and weights of plain torch."""

import pytest
import torch
from torch.optim import lr_scheduler

import megabucket as mb

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


def train(build, *, is_distributed):
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_distributed:
        model = mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
        optimizer = mb.DistributedOptimizer(optimizer, model)
    scheduler, seen = build(optimizer), []
    for _ in range(6):
        loss = (model(torch.linspace(-1, 1, 5)) - 3).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*[torch.tensor(1.0)] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    return seen, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("build", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_does_what_it_does_with_plain_torch(build):
    expected, weights = train(build, is_distributed=False)

    found, trained = train(build, is_distributed=True)

    assert found == expected
    assert len(set(found)) > 1
    assert all(torch.equal(a, b) for a, b in zip(trained, weights, strict=True))


def test_it_is_every_one_that_torch_has():
    assert set(SCHEDULERS) == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler", "_LRScheduler"}
