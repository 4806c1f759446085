"""Every way to run backward: checkpointing, several losses, no_sync in odd places, and what plain torch code does to gradients.

Two ranks, so every mean has one order of additions and the expected values hold bit by bit: each rank computes both local
gradients with plain torch at the weights of the step and halves their sum.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from cells import grads_on_this_rank
from odd_model import flat
from pool import Rank
from torch.utils.checkpoint import checkpoint

import megabucket as mb

pytestmark = pytest.mark.dist

STEPS = 3


class Layers(torch.nn.Module):
    """Three layers; the second can be used twice, and each can be checkpointed."""

    def __init__(self, *, checkpointed: str = "never", uses: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.order = [0, *[1] * uses, 2]
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            layer = self.layers[index]
            if self.checkpointed == "never" or index == 0:  # a reentrant checkpoint needs an input that requires grad
                x = layer(x).tanh()
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant").tanh()
        return x


class Alone(torch.nn.Module):
    """A model without a wrapper, as the scenarios use it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


Backward = Callable[[Any, Iterator[torch.Tensor]], None]


@dataclass(frozen=True)
class Scenario:
    """How the backwards of one step run, and which model they run on. Inputs are drawn from an endless supply."""

    run: Backward
    model: tuple[tuple[str, Any], ...] = ()


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


def once(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    loss(model, next(inputs)).backward()


def microbatches(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    for _ in range(2):
        with model.no_sync():
            once(model, inputs)
    once(model, inputs)


def through_the_inner_module(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    loss(model.module, next(inputs)).backward()


def forward_inside_no_sync_and_backward_outside(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    with model.no_sync():
        value = loss(model, next(inputs))
    value.backward()


def forward_outside_no_sync_and_backward_inside(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    value = loss(model, next(inputs))
    with model.no_sync():
        value.backward()
    once(model, inputs)


def nested_no_sync(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    with model.no_sync():
        with model.no_sync():
            once(model, inputs)
        once(model, inputs)
    once(model, inputs)


def exception_inside_no_sync(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    with contextlib.suppress(ZeroDivisionError), model.no_sync():
        once(model, inputs)
        raise ZeroDivisionError
    once(model, inputs)


def two_losses_of_one_forward(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    output = model(next(inputs))
    with model.no_sync():
        output.square().mean().backward(retain_graph=True)
    output.sum().backward()


def gradient_penalty(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    x = next(inputs).requires_grad_()
    value = loss(model, x)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (value + slope.square().sum()).backward()


def differentiable_backward(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    differentiably(loss(model, next(inputs)))


def differentiably(value: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        value.backward(create_graph=True)


def penalty_on_gradients(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    with model.no_sync():
        differentiably(loss(model, next(inputs)))
    torch.stack([param.grad.square().sum() for param in model.module.parameters()]).sum().backward()


def penalty_on_gradients_of_two_microbatches(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    with model.no_sync():
        once(model, inputs)
        differentiably(loss(model, next(inputs)))
        torch.stack([param.grad.square().sum() for param in model.module.parameters()]).sum().backward()
    once(model, inputs)


def only_some_parameters_per_microbatch(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    with model.no_sync():
        once(model, inputs)
    model.module.layers[2](next(inputs)).sum().backward()


def two_synced_backwards(model: Any, inputs: Iterator[torch.Tensor]) -> None:
    once(model, inputs)
    once(model, inputs)


SCENARIOS: MappingProxyType[str, Scenario] = MappingProxyType(
    {
        run.__name__: Scenario(run)
        for run in (
            once,
            microbatches,
            through_the_inner_module,
            forward_inside_no_sync_and_backward_outside,
            forward_outside_no_sync_and_backward_inside,
            nested_no_sync,
            exception_inside_no_sync,
            two_losses_of_one_forward,
            gradient_penalty,
            differentiable_backward,
            penalty_on_gradients,
            penalty_on_gradients_of_two_microbatches,
            only_some_parameters_per_microbatch,
            two_synced_backwards,
        )
    }
    | {
        f"{kind}, {name}, {uses} uses": Scenario(run, (("checkpointed", kind), ("uses", uses)))
        for kind in ("reentrant", "non-reentrant")
        for uses in (1, 2)
        for name, run in (("once", once), ("microbatches", microbatches), ("inner module", through_the_inner_module))
    }
)


def inputs_of(step: int, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    while True:
        yield torch.randn(5, 4, generator=generator)


def expected_grads(scenario: Scenario, weights: dict[str, torch.Tensor], step: int, ranks: int) -> torch.Tensor:
    """Return the mean over all ranks of what plain torch computes on each."""
    total = torch.zeros(())
    for rank in range(ranks):
        model = Layers(**dict(scenario.model))
        model.load_state_dict(weights)
        scenario.run(Alone(model), inputs_of(step, rank))
        total = total + flat(param.grad for param in model.parameters())
    return total / ranks


def wrong_steps(rank: Rank, name: str, options: dict[str, Any]) -> tuple[list[str], int]:
    """Train three steps. Return in which ones gradients are not the expected ones, and how many elements this rank owns."""
    scenario = SCENARIOS[name]
    model = Layers(**dict(scenario.model))
    ddp = mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(**options), process_group=rank.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    used: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(grads_on_this_rank(ddp)))
    stepper = mb.DistributedOptimizer(optimizer, ddp) if ddp.ddp_config.use_distributed_optimizer else optimizer
    wrong = []
    for step in range(STEPS):
        weights = {key: value.clone() for key, value in ddp.state_dict().items()}
        expected = expected_grads(scenario, weights, step, rank.size)
        scenario.run(ddp, inputs_of(step, rank.index))
        stepper.step()
        stepper.zero_grad()
        owned = ~used[step].isnan()
        if not torch.equal(used[step][owned], expected[owned]):
            wrong.append(f"step {step}: off by {float((used[step] - expected)[owned].abs().max())}")
    return wrong, int(owned.sum())


def assert_right(pool: Any, scenario: str, *, reduce_scatters: bool, overlap: bool) -> None:
    options = {"use_distributed_optimizer": reduce_scatters, "overlap_grad_reduce": overlap, "bucket_size": 20}

    (wrong_on_0, owned_by_0), (wrong_on_1, owned_by_1) = pool.run(wrong_steps, scenario, options, ranks=2)

    assert wrong_on_0 == wrong_on_1 == []
    assert owned_by_0 + owned_by_1 == 3 * (4 * 4 + 4) * (1 if reduce_scatters else 2)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reduce_scatters", [True, False])
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "two_synced_backwards"])
def test_the_gradient_is_the_mean_of_plain_torch(pool, scenario, reduce_scatters, overlap):
    assert_right(pool, scenario, reduce_scatters=reduce_scatters, overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_two_backwards_of_one_step_are_reduced_together_in_reduce_scatter_mode(pool, overlap):
    assert_right(pool, "two_synced_backwards", reduce_scatters=True, overlap=overlap)


# What plain torch code does, against torch's own DistributedDataParallel #


def clear_in_place(model: Any, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    once(model, inputs)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def clear_through_the_module(model: Any, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    model.module.zero_grad()
    once(model, inputs)
    optimizer.step()


def accumulate_reduced_gradients(model: Any, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    once(model, inputs)
    once(model, inputs)
    optimizer.step()
    optimizer.zero_grad()


def never_clear(model: Any, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    once(model, inputs)
    optimizer.step()


def clip_and_scale(model: Any, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    microbatches(model, inputs)
    for param in model.parameters():
        param.grad.div_(3)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def replace_gradients(model: Any, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    once(model, inputs)
    for param in model.parameters():
        param.grad = param.grad.sign()
    optimizer.step()
    optimizer.zero_grad()


PLAIN_LOOPS = MappingProxyType(
    {
        run.__name__: run
        for run in (
            clear_in_place,
            clear_through_the_module,
            accumulate_reduced_gradients,
            never_clear,
            clip_and_scale,
            replace_gradients,
        )
    }
)


def weights_of_both(rank: Rank, loop: str, overlap: bool) -> list[torch.Tensor]:
    """Run a plain loop under torch's wrapper and under ours."""
    torchs = torch.nn.parallel.DistributedDataParallel(Layers(), process_group=rank.group)
    config = mb.DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=20)
    ours = mb.DistributedDataParallel(Layers(), config, process_group=rank.group)
    for model in (torchs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            PLAIN_LOOPS[loop](model, optimizer, inputs_of(step, rank.index))
    return [flat(model.parameters()) for model in (torchs, ours)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("loop", PLAIN_LOOPS)
def test_plain_loops_end_with_the_weights_of_torch_ddp(pool, loop, overlap):
    for rank, (torchs, ours) in enumerate(pool.run(weights_of_both, loop, overlap, ranks=2)):
        assert torch.equal(torchs, ours), f"rank {rank}: off by {float((torchs - ours).abs().max())}"


def errors_of_an_old_graph(rank: Rank, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Run backward through a graph of weights that an optimizer has updated since: under torch's wrapper and under ours."""
    torchs = torch.nn.parallel.DistributedDataParallel(Layers(), process_group=rank.group)
    ours = mb.DistributedDataParallel(Layers(), mb.DistributedDataParallelConfig(**options), process_group=rank.group)
    found = []
    for model in (torchs, ours):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = mb.DistributedOptimizer(sgd, model) if isinstance(model, mb.DistributedDataParallel) else sgd
        value = loss(model, next(inputs_of(0, rank.index)))
        value.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        try:
            value.backward()
        except RuntimeError as error:
            found.append((type(error).__name__, str(error).split(":")[0]))
    optimizer.zero_grad()
    once(ours, inputs_of(1, rank.index))  # the error ended its own step only
    optimizer.step()
    ours.check_replicas()
    return found


@pytest.mark.parametrize("reduce_scatters", [False, True])
def test_a_graph_of_old_weights_is_the_error_that_torch_ddp_raises(pool, reduce_scatters):
    options = {"use_distributed_optimizer": reduce_scatters, "overlap_param_gather": reduce_scatters, "bucket_size": 20}

    for torchs, ours in pool.run(errors_of_an_old_graph, options, ranks=2):
        assert ours == torchs
        assert "modified by an inplace operation" in ours[1]
