"""Every way in which a collective is done over gloo gives the bits of gloo's own all-reduce."""

from __future__ import annotations

import signal
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from pool import Rank

import megabucket as mb
from megabucket.comm import AllGather, AllReduce, Batch, Call, ProcessGroupCommunicator, ReduceOp, ReduceScatter, gloo
from megabucket.comm.plan import Start
from megabucket.planning import memory

pytestmark = pytest.mark.dist

OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG, ReduceOp.MAX: dist.ReduceOp.MAX}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHARD_NUMELS = (1, 3, 128, 40_000, 400_001)


def values_of(rank: Rank, numel: int, dtype: torch.dtype, *, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * salt + 97 * rank.index + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def reduced_by_torch(rank: Rank, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result, op=OPS[op], group=rank.group)
    return result


def is_exchange(start: Start) -> bool:
    return start.method in ("all_to_all_single", "alltoall_base")


def launched_twice(
    communicator: ProcessGroupCommunicator, calls: list[Call], values: list[torch.Tensor], is_prepared: bool
) -> list[Start]:
    """Launch the calls on the values, twice if they are prepared; return the exchanges they became."""
    batch = communicator.prepare(calls) if is_prepared else calls
    for _ in range(1 + is_prepared):
        for call, value in zip(calls, values, strict=True):
            call.full.copy_(value)
        handle = communicator.launch(batch, label="sum")
        handle.wait()
        handle.wait()
    starts = batch.plan.starts if isinstance(batch, Batch) else []
    return [start for start in starts if is_exchange(start)]


def differing_sums(rank: Rank, is_prepared: bool) -> list[str]:
    communicator = ProcessGroupCommunicator(rank.group)
    differing = []
    for dtype, shard_numel, op in product(DTYPES, SHARD_NUMELS, (ReduceOp.SUM, ReduceOp.AVG)):
        numel = shard_numel * rank.size
        own = slice(rank.index * shard_numel, (rank.index + 1) * shard_numel)
        values = values_of(rank, numel, dtype)
        expected = reduced_by_torch(rank, values, op)
        scattered, reduced = torch.empty_like(values), torch.empty_like(values)
        exchanges = launched_twice(communicator, [ReduceScatter(scattered[own], scattered, op)], [values], is_prepared)
        if is_prepared and len(exchanges) != 1:
            differing.append(f"no exchange: {dtype} {shard_numel} {op}")
        launched_twice(communicator, [AllReduce(reduced, op)], [values], is_prepared)
        if not torch.equal(bits(scattered[own]), bits(expected[own])):
            differing.append(f"reduce-scatter {dtype} {shard_numel} {op}")
        if not torch.equal(bits(reduced), bits(expected)):
            differing.append(f"all-reduce {dtype} {shard_numel} {op}")
    return differing


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_and_means_have_the_bits_of_the_all_reduce_of_gloo(pool, ranks, is_prepared):
    assert pool.run(differing_sums, is_prepared, ranks=ranks) == [[]] * ranks


def differing_batches(rank: Rank) -> list[str]:
    """A batch of one dtype is all-reduced as one tensor, so where a tensor lies in it decides the order of its sums."""
    communicator = ProcessGroupCommunicator(rank.group)
    differing = []
    for shard_numels in ((128, 128), (384, 1, 40_000), (7,), (300_000, 5)):
        dtypes = (torch.float32, torch.float64, torch.float32)[: len(shard_numels)]
        values = [
            values_of(rank, numel * rank.size, dtype, salt=salt)
            for salt, (numel, dtype) in enumerate(zip(shard_numels, dtypes, strict=True))
        ]
        expected = [value.clone() for value in values]
        communicator.launch([AllReduce(value) for value in expected], label="all-reduce").wait()
        fulls = [torch.empty_like(value) for value in values]
        shards = [full.view(rank.size, -1)[rank.index] for full in fulls]
        calls: list[Call] = [ReduceScatter(shard, full) for shard, full in zip(shards, fulls, strict=True)]
        launched_twice(communicator, calls, values, is_prepared=True)
        for index, (shard, total) in enumerate(zip(shards, expected, strict=True)):
            if not torch.equal(bits(shard), bits(total.view(rank.size, -1)[rank.index])):
                differing.append(f"tensor {index} of {shard_numels}")
    return differing


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_batch_has_the_bits_of_the_all_reduce_of_that_batch(pool, ranks):
    assert pool.run(differing_batches, ranks=ranks) == [[]] * ranks


def exchanged_until_there_is_no_room(rank: Rank) -> list[bool]:
    """Prepare small all-reduces until there is no more room; return which were exchanged. All of them are right."""
    communicator = ProcessGroupCommunicator(rank.group)
    exchanged = []
    for _ in range(8):
        tensor = torch.full((1 << 18,), rank.index + 1.0)  # 1 MiB, of which an exchange takes six
        batch = communicator.prepare([AllReduce(tensor)])
        communicator.launch(batch, label="sum").wait()
        assert tensor.unique().tolist() == [6.0]
        exchanged.append(is_exchange(batch.plan.starts[0]))
    return exchanged


def test_the_formula_of_memory_ends_where_exchanges_do():
    assert memory._MOST_EXCHANGING_RANKS == gloo._MOST_RANKS  # planning must not import torch


def test_small_all_reduces_take_no_more_than_a_bound(pool):
    assert pool.run(exchanged_until_there_is_no_room, ranks=3) == [[True] * 5 + [False] * 3] * 3


def gathered(rank: Rank, part_numel: int) -> bool:
    communicator = ProcessGroupCommunicator(rank.group)
    parts = [torch.randn(part_numel, generator=torch.Generator().manual_seed(index)) for index in range(rank.size)]
    full = torch.zeros(part_numel * rank.size)
    own = full.view(rank.size, -1)[rank.index]
    batch = communicator.prepare([AllGather(full, own)])
    is_right = True
    for factor in (1, 2):
        own.copy_(parts[rank.index] * factor)
        communicator.launch(batch, label="gather").wait()
        is_right = is_right and torch.equal(full, torch.cat(parts) * factor)
    return is_right


@pytest.mark.parametrize("part_numel", [5, 100_003])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_of_any_size_bring_every_part(pool, ranks, part_numel):
    assert pool.run(gathered, part_numel, ranks=ranks) == [True] * ranks


def kinds_of_exchange(rank: Rank) -> dict[str, int]:
    """Return how many exchanges each call becomes."""
    communicator = ProcessGroupCommunicator(rank.group)
    small, large, large_numbers = torch.zeros(1_000), torch.zeros(1_000_000), torch.zeros(12 * rank.size)
    own = large_numbers[12 * rank.index : 12 * (rank.index + 1)]
    calls: dict[str, list[Call]] = {
        "small": [AllReduce(small)],
        "large": [AllReduce(large)],
        "two": [AllReduce(small), AllReduce(large[:1_000])],
        "largest of integers": [AllReduce(torch.zeros(18, dtype=torch.int64), ReduceOp.MAX)],
        "largest of floats": [AllReduce(small, ReduceOp.MAX)],
        "scatter": [ReduceScatter(own, large_numbers)],
        "largest of parts": [ReduceScatter(own, large_numbers, ReduceOp.MAX)],
    }
    return {
        name: len(launched_twice(communicator, batch, [call.full for call in batch], True)) for name, batch in calls.items()
    }


def test_what_is_exchanged_and_what_is_left_to_gloo(pool):
    assert (
        pool.run(kinds_of_exchange, ranks=3)
        == [
            {
                "small": 1,
                "large": 0,
                "two": 0,
                "largest of integers": 1,
                "largest of floats": 0,
                "scatter": 1,
                "largest of parts": 0,
            }
        ]
        * 3
    )


def interrupted_while_waiting(rank: Rank) -> bool:
    """Wait again after waits that an alarm ended; return whether the sum is right."""
    communicator = ProcessGroupCommunicator(rank.group)
    numel = 200_000  # several additions from three ranks on
    values = values_of(rank, numel * rank.size, torch.float32)
    expected = reduced_by_torch(rank, values, ReduceOp.SUM)
    own = slice(rank.index * numel, (rank.index + 1) * numel)
    batch = communicator.prepare([ReduceScatter(values[own], values)])
    if rank.index == 1:
        time.sleep(0.3)  # so that the others wait

    def interrupt(*_: object) -> None:
        raise InterruptedError

    handle = communicator.handle(batch, label="sum")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.02)
    is_done = False
    try:
        while not is_done:
            try:
                handle.start()
                handle.wait()
                is_done = True
            except InterruptedError:  # noqa: PERF203
                continue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return torch.equal(values[own], expected[own])


def test_a_launch_and_a_wait_that_are_begun_again_send_and_add_nothing_twice(pool):
    assert pool.run(interrupted_while_waiting, ranks=4) == [True] * 4


def summed_in_float32(rank: Rank, dtype: torch.dtype, numels: tuple[int, ...], op: ReduceOp) -> list[bool]:
    """Return, per tensor of a batch of 16-bit ones and a float32 one, whether the shard is the rounded sum in rank order."""
    communicator = ProcessGroupCommunicator(rank.group)
    dtypes = [*(dtype for _ in numels), torch.float32]
    by_rank = [
        [
            torch.randn(numel * rank.size, generator=torch.Generator().manual_seed(10 * source + index)).to(each)
            for index, (numel, each) in enumerate(zip((*numels, 128), dtypes, strict=True))
        ]
        for source in range(rank.size)
    ]
    values = by_rank[rank.index]
    fulls = [torch.empty_like(value) for value in values]
    calls: list[Call] = [
        ReduceScatter(full.view(rank.size, -1)[rank.index], full, op, in_fp32=full.element_size() == 2) for full in fulls
    ]
    launched_twice(communicator, calls, values, is_prepared=True)
    right = []
    for index, full in enumerate(fulls):
        total = by_rank[0][index].float()
        for other in by_rank[1:]:
            total = total + other[index].float()
        if op is ReduceOp.AVG:
            total = total / rank.size
        own = full.view(rank.size, -1)[rank.index]
        expected = total.to(own.dtype).view(rank.size, -1)[rank.index]
        right.append(torch.equal(own, expected) if own.element_size() == 2 else torch.allclose(own, expected, atol=1e-5))
    return right


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sixteen_bits_can_be_added_up_in_float32_and_are_rounded_once(pool, ranks, dtype, op):
    numels = (1, 128, 150_000)

    assert pool.run(summed_in_float32, dtype, numels, op, ranks=ranks) == [[True] * 4] * ranks


def gradient_of_a_weight(rank: Rank, in_fp32: bool) -> list[float]:
    """Train one step with gradients of 256 on one rank and 1 on the others; return this rank's shard of the reduced one."""
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.ones(128 * rank.size, dtype=torch.bfloat16))
    module.forward = lambda factor: (module.w * factor).sum()
    config = mb.DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=False,
        grad_reduction="sum",
        reduce_scatter_with_fp32_accumulation=in_fp32,
    )
    ddp = mb.DistributedDataParallel(module, config, process_group=rank.group)
    ddp(256.0 if rank.index == 0 else 1.0).backward()
    ddp.finish_grad_sync()
    buffer = ddp.param_and_grad_buffers[0]
    return buffer.buckets[0].shard(buffer.buckets[0].grad_data, rank.index).unique().tolist()


@pytest.mark.parametrize(("in_fp32", "totals"), [(False, [260.0, 256.0, 256.0, 260.0]), (True, [260.0] * 4)])
def test_a_config_field_keeps_what_sixteen_bits_would_lose(pool, in_fp32, totals):
    # Next to 256 bfloat16 has steps of 2, and a half is rounded to the even one: 256 + 1 is 256, and 256 + 3 or 258 + 1 is 260.
    # Gloo adds the shard of rank 0 in the order 3, 2, 1, 0, so 1 + 1 + 1 + 256; that of rank 1 in the order 0, 3, 2, 1; that of
    # rank 2 in the order 1, 0, 3, 2; that of rank 3 in the order 2, 1, 0, 3, so 1 + 1 + 256 + 1.
    assert pool.run(gradient_of_a_weight, in_fp32, ranks=4) == [[total] for total in totals]
