"""Several torch optimizers in one DistributedOptimizer, as one torch optimizer."""

import pytest
import torch

import megabucket as mb
from megabucket.errors import ConfigError, OptimizerParametersError


def wrapped(sharded=True):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded))


def two(ddp):
    matrices, rest = ([param for param in ddp.parameters() if (param.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.2)


def test_groups_are_those_of_the_first_then_those_of_the_second():
    ddp = wrapped()
    muon, adamw = two(ddp)

    optimizer = mb.DistributedOptimizer([muon, adamw], ddp)

    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert optimizer.param_groups[0] is muon.param_groups[0]
    assert optimizer.param_groups[1] is adamw.param_groups[0]
    assert optimizer.torch_optimizers == (muon, adamw)


def test_hooks_of_state_run_once_on_the_joined_state():
    ddp = wrapped()
    optimizer = mb.DistributedOptimizer(two(ddp), ddp)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda of: calls.append(("save", of)))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {key: of for key, of in state.items() if key != "mark"})
    optimizer.register_load_state_dict_post_hook(lambda of: calls.append(("loaded", of)))

    state = optimizer.state_dict()
    optimizer.load_state_dict(state)

    assert state["mark"] == 1
    assert calls == [("save", optimizer), ("loaded", optimizer)]


def test_a_group_is_added_to_one_of_them():
    ddp = wrapped()
    muon, adamw = two(ddp)
    optimizer = mb.DistributedOptimizer([muon, adamw], ddp)

    with pytest.raises(ConfigError, match="several torch optimizers"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    adamw.add_param_group({"params": [torch.nn.Parameter(torch.ones(2), requires_grad=False)]})

    assert len(optimizer.param_groups) == 3
    ddp(torch.ones(2, 6)).sum().backward()
    assert optimizer.step().updated  # a frozen parameter needs no shard


@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_are_disjoint_and_complete(sharded):
    ddp = wrapped(sharded)
    muon, adamw = two(ddp)

    with pytest.raises(OptimizerParametersError, match=r"several optimizers have the same parameter: '0.weight', '2.weight'"):
        mb.DistributedOptimizer([muon, adamw, torch.optim.SGD(muon.param_groups[0]["params"])], ddp)
    with pytest.raises(OptimizerParametersError, match=r"in no group of the optimizer .* '0.bias', '2.bias'"):
        mb.DistributedOptimizer([muon], ddp)
    assert mb.DistributedOptimizer([muon, adamw], ddp)


@pytest.mark.parametrize("given", [[], ["no optimizer"]])
def test_what_is_no_optimizer_is_refused(given):
    with pytest.raises(ConfigError, match="needs a torch optimizer, or several in a list"):
        mb.DistributedOptimizer(given, wrapped())
