"""What ``planning.memory`` computes is what the library allocates, to the byte: every tensor that lives after some steps.

The tensors are found by the garbage collector, so that one nobody thought of is found, too.
"""

import gc
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.buffer import WithheldGrad
from megabucket.config.resolve import fp32_local_params
from megabucket.layout.owners import plan_owners
from megabucket.planning.memory import RankMemory, offload_bytes, rank_memory
from megabucket.testing import LoopbackWorld

FP32_LOCAL = [(), ("all",), ("p0", "p[35]")]
ADAMW, MOMENTUM, SGD = 2, 1, 0  # moments per element
BUILD = {
    ADAMW: lambda params: torch.optim.AdamW(params, lr=0.1),
    MOMENTUM: lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    SGD: lambda params: torch.optim.SGD(params, lr=0.1),
}


class Model(torch.nn.Module):
    """Vectors of the given lengths, some of 16 bits."""

    def __init__(self, numels, dtypes):
        super().__init__()
        for i, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True)):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.ones(numel, dtype=dtype)))

    def forward(self):
        return sum(param.double().sum() for param in self.parameters())


@contextmanager
def only_new_objects():
    """Let the garbage collector know only what is made inside."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def count_living_bytes():
    """The bytes of every storage that a tensor object looks at, each storage once."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors = [each for each in found if not issubclass(type(each), WithheldGrad)]  # has no memory
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def wrap_and_step(model_of, size, config, build, *, own_optimizer=True, group_of=None):
    """Wrapped models of all ranks after two steps, their optimizers, and the bytes that live now and did not before."""
    world = LoopbackWorld(size)

    def program(rank):
        model = model_of()
        ddp = DistributedDataParallel(model, config, communicator=world.communicator(rank))
        groups = {}
        for name, param in model.named_parameters():
            groups.setdefault((group_of or {}).get(name, 0), []).append(param)
        plain = build([{"params": params} for params in groups.values()])
        optimizer = DistributedOptimizer(plain, ddp) if own_optimizer else plain
        for _ in range(2):
            ddp().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return ddp, optimizer

    with only_new_objects():
        ranks = world.run(program)
        return ranks, count_living_bytes()


@st.composite
def cases(draw):
    numels = draw(st.lists(st.integers(0, 300), min_size=1, max_size=7).filter(any))
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    dtypes = draw(st.lists(dtype, min_size=len(numels), max_size=len(numels)))
    is_sharded, in_fp32 = draw(st.booleans()), draw(st.booleans())
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded,
        grad_reduce_in_fp32=in_fp32,
        param_name_patterns_for_fp32_local_accumulation=() if in_fp32 else draw(st.sampled_from(FP32_LOCAL)),
        layout=draw(st.sampled_from(["stable", "megatron"])),
        fence=draw(st.booleans()),
        overlap_param_gather=is_sharded and draw(st.booleans()),
        bucket_size=draw(st.sampled_from([1, 200, 10_000])),
        unused_parameters=draw(st.sampled_from(["error", "skip"])),
    )
    names = [f"p{i}" for i in range(len(numels))]
    group_of = {name: draw(st.sampled_from([0, 0, 1])) for name in names}
    return numels, dtypes, config, draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([ADAMW, MOMENTUM, SGD])), group_of


@settings(max_examples=25)
@given(case=cases())
def test_everything_that_lives_from_step_to_step_is_computed_to_the_byte(case):
    numels, dtypes, config, size, moments, group_of = case
    numbers = sorted(set(group_of.values()))
    group_of = {name: numbers.index(group) for name, group in group_of.items()}

    ranks, alive_bytes = wrap_and_step(lambda: Model(numels, dtypes), size, config, BUILD[moments], group_of=group_of)

    computed = [
        rank_memory(
            ddp.layout,
            rank=rank,
            is_sharded=config.use_distributed_optimizer,
            moments_per_element=moments,
            has_fence=size > 1,
            group_of=group_of,
            skips_unused=config.unused_parameters == "skip",
            fp32_local=fp32_local_params(config, [f"p{i}" for i in range(len(numels))]),
        )
        for rank, (ddp, _) in enumerate(ranks)
    ]
    groups = [group for _, optimizer in ranks for group in optimizer.sharding.updates[0].twin.param_groups]
    num_placeholders = sum(param.numel() == 0 for group in groups for param in group["params"])
    step_count_bytes = 4 if moments == ADAMW else 0  # all that they have
    assert alive_bytes == sum(memory.total_bytes for memory in computed) + step_count_bytes * num_placeholders
    for memory, (ddp, optimizer) in zip(computed, ranks, strict=True):
        assert_categories(memory, ddp, optimizer)


@settings(max_examples=10)
@given(case=cases())
def test_so_is_what_a_phase_gives_back(case):
    numels, dtypes, config, size, moments, group_of = case
    numbers = sorted(set(group_of.values()))
    group_of = {name: numbers.index(group) for name, group in group_of.items()}
    ranks, _ = wrap_and_step(lambda: Model(numels, dtypes), size, config, BUILD[moments], group_of=group_of)
    world = ranks[0][0].communicator.world

    given = world.run(lambda rank: ranks[rank][0].offload(params=True))

    for rank, (ddp, _) in enumerate(ranks):
        planned = offload_bytes(
            ddp.layout,
            rank=rank,
            is_sharded=config.use_distributed_optimizer,
            moments_per_element=moments,
            group_of=group_of,
            skips_unused=config.unused_parameters == "skip",
            fp32_local=fp32_local_params(config, [f"p{i}" for i in range(len(numels))]),
        )
        assert {kind: num for kind, num in asdict(planned).items() if num} == {**given[rank].freed_bytes}
        assert given[rank].held == []
    world.run(lambda rank: ranks[rank][0].onload())
    for ddp, optimizer in ranks:
        assert_categories(
            rank_memory(
                ddp.layout,
                rank=ddp.communicator.rank,
                is_sharded=config.use_distributed_optimizer,
                moments_per_element=moments,
                has_fence=size > 1,
                group_of=group_of,
                skips_unused=config.unused_parameters == "skip",
                fp32_local=fp32_local_params(config, [f"p{i}" for i in range(len(numels))]),
            ),
            ddp,
            optimizer,
        )


def assert_categories(memory, ddp, optimizer):
    """Each category is what its own tensors hold; padding is shared by the buffers and the optimizer's flat tensors."""
    buffers = ddp.param_and_grad_buffers
    buffer_bytes = sum(
        bytes_of(buffer.param_data) + sum(map(bytes_of, (buffer.grad_data, *buffer.local_grads))) for buffer in buffers
    )
    values = sum(slot.param.numel() * slot.param.itemsize for group in ddp.bucket_groups for slot in group.slots)
    slots = [slot for group in ddp.bucket_groups for slot in group.slots]
    grads = sum(
        slot.in_buffer.nbytes + (slot.view.nbytes if slot.view.data_ptr() != slot.in_buffer.data_ptr() else 0) for slot in slots
    )
    assert (memory.parameter_bytes, memory.gradient_bytes) == (values, grads)
    shards = optimizer.sharding.shards
    mains = sum(bytes_of(shard.main.data) for shard in shards if shard.has_own_values)
    main_grads = sum(bytes_of(shard.grad) for shard in shards if shard.grad.dtype != shard.buffer_grads.dtype)
    states = [optimizer.sharding.updates[0].twin.state[shard.main] for shard in shards]
    state = [value for values in states for value in values.values() if isinstance(value, torch.Tensor)]
    moments = sum(bytes_of(value) for value in state if value.dim())
    counts = sum(bytes_of(value) for value in state if not value.dim())
    assert memory.padding_bytes == buffer_bytes - values - grads
    owned_bytes = memory.main_parameter_bytes + memory.main_gradient_bytes + memory.moment_bytes
    assert memory.optimizer_padding_bytes == mains + main_grads + moments - owned_bytes
    assert (mains > 0, main_grads > 0, moments > 0) == (
        memory.main_parameter_bytes > 0,
        memory.main_gradient_bytes > 0,
        memory.moment_bytes > 0,
    )
    nans = sum(slot.param.itemsize for group in ddp.bucket_groups for slot in group.slots)
    fence = bytes_of(ddp.sync._fence._gate._vector) if ddp.communicator.size > 1 else 0
    uses = len(slots) if ddp.ddp_config.unused_parameters == "skip" else 0
    assert memory.scratch_bytes == counts + nans + fence + uses + bytes_of(optimizer.global_norm._total)


def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("dtype", "in_fp32", "moments"),
    [
        (torch.float32, True, ADAMW),
        (torch.bfloat16, False, ADAMW),  # torch's Adam takes no gradients of another dtype
        (torch.bfloat16, False, MOMENTUM),
        (torch.bfloat16, True, MOMENTUM),
        (torch.bfloat16, True, SGD),
    ],
)
@pytest.mark.parametrize("unused", ["error", "skip"])
def test_a_plain_optimizer_steps_on_whole_parameters_with_state_in_the_dtype_of_the_gradients(dtype, in_fp32, moments, unused):
    config = DistributedDataParallelConfig(bucket_size=100, grad_reduce_in_fp32=in_fp32, unused_parameters=unused)

    ranks, alive_bytes = wrap_and_step(
        lambda: Model((100, 7, 0, 130), [dtype] * 4), 2, config, BUILD[moments], own_optimizer=False
    )

    layout = ranks[0][0].layout
    fields = {"moments_per_element": moments, "has_main_params": False, "skips_unused": unused == "skip"}
    computed = rank_memory(layout, rank=0, is_sharded=False, **fields)
    assert alive_bytes == 2 * computed.total_bytes


def test_a_model_of_two_widths_costs_what_its_arithmetic_says():
    # bfloat16: 200 values in 256 elements, padded for 2 ranks; float32: 100 values in 128.
    ranks, alive_bytes = wrap_and_step(
        lambda: Model((200, 100), (torch.bfloat16, torch.float32)),
        2,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        BUILD[ADAMW],
    )

    memories = [rank_memory(ranks[0][0].layout, rank=rank, is_sharded=True) for rank in (0, 1)]
    padding = 56 * (2 + 4) + 28 * (4 + 4)
    assert memories == [
        RankMemory(
            parameter_bytes=200 * 2 + 100 * 4,
            gradient_bytes=300 * 4,
            padding_bytes=padding,
            main_parameter_bytes=owned_16 * 4,  # a float32 rank steps on the buffer itself
            moment_bytes=(owned_16 + owned_32) * 8,
            scratch_bytes=48 + 8 + 2 + 4 + 2 * 4,  # fence, norm, a NaN of each width, two step counts
        )
        for owned_16, owned_32 in ((128, 64), (72, 36))
    ]
    assert alive_bytes == sum(memory.total_bytes for memory in memories)


class Matrices(torch.nn.Module):
    """Matrices and vectors of one dtype."""

    def __init__(self, shapes, dtype):
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self):
        return sum((param.float() * 0.5).square().sum() for param in self.parameters())


@settings(max_examples=15)
@given(
    shapes=st.lists(st.sampled_from([(4, 6), (16, 8), (3, 40), (1, 1), (30,), (7,)]), min_size=1, max_size=7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    in_fp32=st.booleans(),
    is_sharded=st.booleans(),
    size=st.sampled_from([1, 2, 3]),
    bucket_size=st.sampled_from([1, 100, 10_000]),
)
def test_so_is_the_memory_of_parameters_that_are_updated_whole(shapes, dtype, in_fp32, is_sharded, size, bucket_size):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded, grad_reduce_in_fp32=in_fp32, bucket_size=bucket_size
    )
    whole = [f"p{index}" for index, shape in enumerate(shapes) if len(shape) == 2]
    world = LoopbackWorld(size)

    def program(rank):
        model = Matrices(shapes, dtype)
        ddp = DistributedDataParallel(model, config, communicator=world.communicator(rank))
        matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
        inner = [torch.optim.Muon(matrices)] if matrices else []
        inner += [torch.optim.SGD(rest, lr=0.1, momentum=0.9)] if rest else []
        optimizer = DistributedOptimizer(inner, ddp)
        for _ in range(2):
            ddp().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return ddp, optimizer

    with only_new_objects():
        ranks = world.run(program)
        alive_bytes = count_living_bytes()

    owners = plan_owners(ranks[0][0].layout, whole)
    fields = {"is_sharded": is_sharded, "moments_per_element": MOMENTUM, "has_fence": size > 1, "owners": owners}
    assert alive_bytes == sum(rank_memory(ranks[0][0].layout, rank=rank, **fields).total_bytes for rank in range(size))
