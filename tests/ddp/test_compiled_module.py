"""``torch.compile`` of a module and of its wrapper: one graph where torch DDP gives one, and the same weights as without."""

import pytest
import torch
from torch._dynamo.exc import Unsupported

import megabucket as mb

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own

SHARDED = mb.DistributedDataParallelConfig(use_distributed_optimizer=True)
OVERLAP = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
ONE_GRAPH = {"fullgraph": True, "backend": "eager"}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, inputs):
        return self.second(torch.nn.functional.gelu(self.first(inputs)))


def uncompiled(net, config):
    ddp = mb.DistributedDataParallel(net, config)
    return ddp, ddp


def compiled_before_wrapping(net, config):
    ddp = mb.DistributedDataParallel(torch.compile(net, **ONE_GRAPH), config)
    return ddp, ddp


def compiled_in_place_before_wrapping(net, config):
    net.compile(**ONE_GRAPH)
    return uncompiled(net, config)


def compiled_in_place_after_wrapping(net, config):
    ddp = mb.DistributedDataParallel(net, config)
    ddp.module.compile(**ONE_GRAPH)
    return ddp, ddp


def inner_module_called(net, config):
    ddp = mb.DistributedDataParallel(net, config)
    return ddp, torch.compile(ddp.module, **ONE_GRAPH)


def wrapper_compiled(net, config):
    ddp = mb.DistributedDataParallel(net, config)
    return ddp, torch.compile(ddp, backend="eager")


IN_ONE_GRAPH = [
    compiled_before_wrapping,
    compiled_in_place_before_wrapping,
    compiled_in_place_after_wrapping,
    inner_module_called,
]


def train(make, config):
    torch._dynamo.reset()  # it would use the graphs of the run before
    net = Net()
    ddp, call = make(net, config)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1), ddp)
    torch.manual_seed(1)
    for _ in range(3):
        with ddp.no_sync():
            call(torch.randn(4, 8)).square().mean().backward()
        call(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp.detach()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


@pytest.mark.parametrize("config", [None, SHARDED], ids=["all-reduce", "sharded"])
@pytest.mark.parametrize("make", [*IN_ONE_GRAPH, wrapper_compiled])
def test_a_compiled_module_ends_with_the_weights_of_one_that_is_not(make, config):
    assert torch.equal(train(make, config), train(uncompiled, config))


def test_with_overlapped_gathers_graphs_break_where_a_module_waits_for_its_parameters():
    assert torch.equal(train(wrapper_compiled, OVERLAP), train(uncompiled, OVERLAP))
    with pytest.raises(Unsupported, match="use overlap_param_gather=False with fullgraph=True"):
        train(compiled_before_wrapping, OVERLAP)


@pytest.mark.parametrize("make", [uncompiled, *IN_ONE_GRAPH[:3], wrapper_compiled])
def test_training_forwards_through_the_wrapper_are_counted_once_however_it_is_compiled(make):
    torch._dynamo.reset()
    ddp, call = make(Net(), None)

    for expected in (1, 2):
        outputs = call(torch.randn(4, 8))
        assert ddp.sync.counters.num_open_forwards == expected
    outputs.sum().backward()

    assert ddp.sync.counters.num_open_forwards == 1
    ddp.detach()


def test_a_compiled_forward_that_fails_gives_up_the_step():
    torch._dynamo.reset()
    ddp, call = compiled_in_place_after_wrapping(Net(), None)
    call(torch.randn(4, 8)).sum().backward()

    with pytest.raises(Exception, match=r"shapes|size"):
        call(torch.randn(4, 9))

    assert "failure" in ddp.sync.counters.problems
    ddp.detach()
