"""A trace of a step in which owners update whole matrices."""

import torch

import megabucket as mb
from megabucket.testing import LoopbackWorld
from megabucket.trace import Lane


def trace_of_a_step(communicator):
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, step_traces=True, num_buckets=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    ddp = mb.DistributedDataParallel(model, config, communicator=communicator)
    matrices, rest = ([param for param in model.parameters() if (param.ndim == 2) is is_matrix] for is_matrix in (True, False))
    optimizer = mb.DistributedOptimizer([torch.optim.Muon(matrices), torch.optim.AdamW(rest)], ddp)
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp.last_step_trace


def test_it_shows_the_exchange_the_update_and_the_return_in_this_order():
    world = LoopbackWorld(2)

    trace = world.run(lambda rank: trace_of_a_step(world.communicator(rank)))[0]

    sent = [one for one in trace.intervals if one.lane is Lane.COMM and one.label.startswith("gradients to owners")]
    update = max((one for one in trace.intervals if one.label == "optimizer"), key=lambda one: one.start_s)
    returned = [one for one in trace.intervals if one.lane is Lane.COMM and one.label.startswith("values to shards")]
    gathers = [one for one in trace.intervals if one.label.startswith("param gather")]
    assert [one.label for one in sent] == ["gradients to owners 0", "gradients to owners 1"]
    assert [one.label for one in returned] == ["values to shards 0", "values to shards 1"]
    assert max(one.stop_s for one in sent) <= update.start_s
    assert update.stop_s <= min(one.start_s for one in returned) <= min(one.start_s for one in gathers)
