"""Updated parameters arrive before anything reads them, and not earlier than they are needed."""

import pytest
import torch
from loop_ranks import Ranks, Weights

from megabucket import DistributedOptimizer
from megabucket.buffer import ParamPhase

OVERLAPPED = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1}


class Layer(torch.nn.Module):
    """One vector of 100 elements."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(100))

    def forward(self, factor):
        return (self.w * factor).sum()


class Stack(torch.nn.Module):
    """Three layers; ``seen`` holds the phases of all groups just before each layer's forward, and the values it reads."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, factor):
        return sum(layer(factor) for layer in self.layers)


def ranks_after_a_step(**switches):
    """Every rank has stepped once with a gradient of 2 (mean of 0 and 4) and a learning rate of 1: all values are -1."""
    ranks = Ranks(2, Stack(), completion="manual", **{**OVERLAPPED, **switches})

    def step(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(4.0 * rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    ranks.optimizers = ranks.run(step)
    return ranks


def phases(ddp):
    return [group.param_phase for group in ddp.bucket_groups]


def test_a_step_launches_the_gathers_of_the_first_layers_first_and_does_not_wait():
    ranks = ranks_after_a_step()

    # Groups count from the last layer; the front of the model is group 2.
    assert ranks.schedule()[-3:] == ["param gather 2", "param gather 1", "param gather 0"]
    assert phases(ranks.ddps[0]) == [ParamPhase.IN_FLIGHT] * 3


def test_each_layer_waits_for_its_own_bucket_only():
    ranks = ranks_after_a_step()

    def forward(rank, ddp):
        seen = []
        for layer in ddp.module.layers:
            layer(1.0)
            seen.append((layer.w.unique().tolist(), [phase is ParamPhase.GATHERED for phase in phases(ddp)]))
        return seen

    expected = [([-1.0], [False, False, True]), ([-1.0], [False, True, True]), ([-1.0], [True, True, True])]
    assert ranks.run(forward) == [expected] * 2


def test_training_goes_on_without_any_call():
    ranks = ranks_after_a_step()

    def steps(rank, ddp):
        for _ in range(2):
            ddp(4.0 * rank).backward()
            ranks.optimizers[rank].step()
            ranks.optimizers[rank].zero_grad()
        ddp.finish_param_sync()
        return [layer.w.unique().tolist() for layer in ddp.module.layers]

    assert ranks.run(steps) == [[[-5.0]] * 3] * 2  # -1 - 2 * 2


@pytest.mark.parametrize("which", ["wrapper", "module", "layer"])
def test_loaded_values_are_not_overwritten_by_a_gather_that_arrives_later(which):
    ranks = ranks_after_a_step()

    def load(rank, ddp):
        layer = ddp.module.layers[0]
        target, prefix = {"wrapper": (ddp, "layers.0."), "module": (ddp.module, "layers.0."), "layer": (layer, "")}[which]
        target.load_state_dict({f"{prefix}w": torch.full((100,), 7.0)}, strict=False)
        ddp.finish_param_sync()
        return layer.w.unique().tolist()

    assert ranks.run(load) == [[7.0]] * 2


def test_without_overlap_a_step_returns_when_parameters_may_be_read():
    ranks = ranks_after_a_step(overlap_param_gather=False)

    assert phases(ranks.ddps[0]) == [ParamPhase.GATHERED] * 3
    assert [layer.w.unique().tolist() for layer in ranks.modules[0].layers] == [[-1.0]] * 3


def test_without_the_distributed_optimizer_there_is_nothing_to_gather():
    ranks = Ranks(2, Weights("a"))

    ranks.run(lambda _, ddp: ddp.start_param_sync(force_sync=True))

    assert ranks.schedule() == []


def test_a_tied_parameter_is_waited_for_by_every_layer_that_uses_it():
    model = Stack()
    model.layers[2].w = model.layers[0].w
    ranks = Ranks(2, model, completion="manual", **OVERLAPPED)

    def program(rank, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(2.0 * rank).backward()
        optimizer.step()
        ddp.module.layers[2](1.0)  # not the layer that registers it first
        return ddp.module.layers[2].w.unique().tolist()

    assert ranks.run(program) == [[-1.0]] * 2  # 1 - 2 * mean(0, 2)
