"""What travels to owners and back is what is planned, to the byte; and nothing is held twice."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_ranks import run_ranks
from whole_stand_ins import Lamb
from whole_training import train

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.layout.owners import plan_exchange
from megabucket.testing import ListRecorder, LoopbackWorld
from megabucket.trace.recorder import CollectiveKind


class Model(torch.nn.Module):
    """Parameters of given shapes, of which some are 16-bit."""

    def __init__(self, shapes, dtypes):
        super().__init__()
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self):
        return sum(param.double().sum() for param in self.parameters())


@st.composite
def cases(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8))
    shapes = shapes if any(map(math.prod, shapes)) else [*shapes, (3,)]
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    dtypes = draw(st.lists(dtype, min_size=len(shapes), max_size=len(shapes)))
    is_whole = draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    config = {"bucket_size": draw(st.integers(1, 500)), "grad_reduce_in_fp32": draw(st.booleans())}
    return draw(st.integers(1, 4)), Model(shapes, dtypes), is_whole, config


def optimizers_of(ddp, is_whole):
    params = list(zip(ddp.module.parameters(), is_whole, strict=True))
    whole, flat = [param for param, is_one in params if is_one], [param for param, is_one in params if not is_one]
    return [made for made in (Lamb(whole) if whole else None, torch.optim.AdamW(flat) if flat else None) if made is not None]


def planned(ddp, optimizer, rank):
    """The elements that a rank sends to others, by label: gradients there, values back, each times the size of its dtype."""
    found = {}
    for group in ddp.bucket_groups:
        for bucket in group.buckets:
            buffer = bucket.buffer
            plan = plan_exchange(buffer.layout, bucket.layout, optimizer.sharding.owner_of, rank=rank)
            if plan is not None:
                to, back = f"gradients to owners {group.index}", f"values to shards {group.index}"
                found[to] = found.get(to, 0) + plan.sent_numel(rank) * buffer.grad_data.itemsize
                found[back] = found.get(back, 0) + plan.received_numel(rank) * buffer.param_data.itemsize
    return found


@given(case=cases())
@settings(max_examples=30)
def test_the_bytes_sent_to_owners_and_back_are_those_planned(case):
    size, model, is_whole, config = case
    world, recorders = LoopbackWorld(size, timeout_s=30), [ListRecorder() for _ in range(size)]
    models = [copy.deepcopy(model) for _ in range(size)]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **config)

    def program(rank):
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank, recorders[rank]))
        optimizer = DistributedOptimizer(optimizers_of(ddp, is_whole), ddp)
        ddp().backward()
        optimizer.step()
        return planned(ddp, optimizer, rank)

    for of_rank, recorder in zip(world.run(program), recorders, strict=True):
        sent = {one.label: one.payload_bytes for one in recorder.collectives if one.kind is CollectiveKind.ALL_TO_ALL}
        assert sent == of_rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_values_and_state_of_a_whole_parameter_are_at_its_owner_alone(dtype):
    def program(rank, ddp, optimizer):
        train(ddp, optimizer, range(2), rank)
        sharding = optimizer.sharding
        return {
            shard.name: (
                [shard.main.data_ptr() == getattr(ddp.module, shard.name).data_ptr(), shard.has_own_values],
                {key: value.numel() for key, value in sharding.state_of(shard).items()},
                shard.main.numel(),
                shard.buffer_grads.untyped_storage().nbytes(),
            )
            for shard in sharding.whole_shards
        }

    by_rank = run_ranks(3, "Muon, AdamW", program, dtype=dtype)

    assert sorted(name for of_rank in by_rank for name in of_rank) == ["one", "square", "tall", "turned", "wide"]
    is_copy = dtype == torch.bfloat16
    for memory, state, numel, grad_bytes in [found for of_rank in by_rank for found in of_rank.values()]:
        assert memory == [not is_copy, is_copy]
        assert state == {"momentum_buffer": numel}
        assert grad_bytes == 0  # after the step


def test_adamw_alone_sends_nothing_to_owners():
    world, recorders = LoopbackWorld(2), [ListRecorder(), ListRecorder()]
    models = [Model([(4, 4), (5,)], [torch.float32] * 2) for _ in range(2)]

    def program(rank):
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank, recorders[rank]))
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), ddp, clip_grad=1.0)
        first = len(recorders[rank].collectives)
        ddp().backward()
        optimizer.step()
        return [one.label for one in recorders[rank].collectives[first:]], optimizer.sharding.exchange

    labels, exchange = world.run(program)[0]

    assert exchange is None
    assert labels == ["bucket 0", "fence", "grad norm", "param gather 0"]
