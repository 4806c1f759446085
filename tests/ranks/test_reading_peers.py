"""Ranks that read each other's memory get the bits of gloo's own collectives, and nobody waits for a rank that gave up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Rank

import megabucket as mb
from megabucket.comm import (
    AllGather,
    AllReduce,
    Liveness,
    ProcessGroupCommunicator,
    ReduceOp,
    ReduceScatter,
    peer_memory,
    reading_paths,
    torch_group,
)
from megabucket.comm.plan import InBackground, Plan
from megabucket.comm import Batch, Call
from megabucket.errors import GroupDestroyedError, InvariantError, PeerFailedError, PeerLostError
from megabucket.planning.memory import exchange_memory
from megabucket.trace.recorder import Lane, ListRecorder

pytestmark = pytest.mark.dist

OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG}
NO_DATA = ValueError("no more data")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@contextlib.contextmanager
def reading_anything() -> Iterator[None]:
    """Read small tensors, too."""
    with mock.patch.object(reading_paths, "LEAST_BYTES", 0):
        yield


def can_read(rank: Rank) -> bool:
    with reading_anything():
        return bool(prepared(ProcessGroupCommunicator(rank.group), [AllReduce(torch.zeros(4))]).plan)


@pytest.fixture(scope="module", autouse=True)
def _readable(pool):
    if not all(pool.run(can_read, ranks=2)):
        pytest.skip("here the kernel lets no process read another one's memory; everything is sent then")


def prepared(communicator: ProcessGroupCommunicator, calls: Sequence[Call]) -> Batch:
    """Return a batch of which the ranks know how to read it."""
    batch = communicator.prepare(calls)
    communicator.introduce([batch])
    return batch


def is_read(batch: Any) -> bool:
    return isinstance(batch, Batch) and batch.plan is not None and batch.plan.is_read


def values_of(rank: Rank, numel: int, dtype: torch.dtype, *, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * salt + 97 * rank.index + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def part_of(full: torch.Tensor, rank: Rank) -> torch.Tensor:
    return full.view(rank.size, -1)[rank.index]


def launched(communicator: ProcessGroupCommunicator, batch: Batch, values: list[torch.Tensor]) -> None:
    """Launch a batch that is read, twice, on the values."""
    for _ in range(2):
        for call, value in zip(batch, values, strict=True):
            call.full.copy_(value)
        handle = communicator.launch(batch, label="sum")
        assert batch.plan.is_read
        handle.wait()
        handle.wait()


def differing_sums(rank: Rank) -> list[str]:
    communicator = ProcessGroupCommunicator(rank.group)
    differing = []
    with reading_anything():
        for dtype, numel, op in product(DTYPES, (1, 3, 128, 400_001), OPS):
            values = values_of(rank, numel * rank.size, dtype)
            expected = values.clone()
            dist.all_reduce(expected, op=OPS[op], group=rank.group)
            scattered, reduced = torch.empty_like(values), torch.empty_like(values)
            scatter: list[Call] = [ReduceScatter(part_of(scattered, rank), scattered, op)]
            launched(communicator, prepared(communicator, scatter), [values])
            launched(communicator, prepared(communicator, [AllReduce(reduced, op)]), [values])
            if not torch.equal(bits(part_of(scattered, rank)), bits(part_of(expected, rank))):
                differing.append(f"reduce-scatter {dtype} {numel} {op}")
            if not torch.equal(bits(reduced), bits(expected)):
                differing.append(f"all-reduce {dtype} {numel} {op}")
    return differing


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_and_means_have_the_bits_of_the_all_reduce_of_gloo(pool, ranks):
    assert pool.run(differing_sums, ranks=ranks) == [[]] * ranks


def differing_batches(rank: Rank) -> list[str]:
    """A batch of one dtype is all-reduced as one tensor, so where a tensor lies in it decides the order of its sums."""
    communicator = ProcessGroupCommunicator(rank.group)
    differing = []
    for numels in ((128, 128), (384, 1, 40_000), (7,), (300_001, 5)):
        dtypes = (torch.float32, torch.float64, torch.float32)[: len(numels)]
        values = [
            values_of(rank, numel * rank.size, dtype, salt=salt)
            for salt, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
        ]
        expected = [value.clone() for value in values]
        communicator.launch([AllReduce(value) for value in expected], label="all-reduce").wait()
        with reading_anything():
            reduced = [torch.empty_like(value) for value in values]
            launched(communicator, prepared(communicator, [AllReduce(full) for full in reduced]), values)
            fulls = [torch.empty_like(value) for value in values]
            scatters: list[Call] = [ReduceScatter(part_of(full, rank), full) for full in fulls]
            launched(communicator, prepared(communicator, scatters), values)
        for index, total in enumerate(expected):
            if not torch.equal(bits(reduced[index]), bits(total)):
                differing.append(f"all-reduce, tensor {index} of {numels}")
            if not torch.equal(bits(part_of(fulls[index], rank)), bits(part_of(total, rank))):
                differing.append(f"reduce-scatter, tensor {index} of {numels}")
    return differing


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_batch_has_the_bits_of_the_all_reduce_of_that_batch(pool, ranks):
    assert pool.run(differing_batches, ranks=ranks) == [[]] * ranks


def sums_of_odd_length(rank: Rank) -> list[list[float]]:
    """Reduce tensors that no number of ranks divides, also ones shorter than there are ranks."""
    communicator = ProcessGroupCommunicator(rank.group)
    totals = []
    with reading_anything():
        for numel in (1, 2, 5, 300_007):
            full = torch.arange(numel, dtype=torch.float64) + rank.index
            communicator.launch(prepared(communicator, [AllReduce(full)]), label="sum").wait()
            totals.append((full - rank.size * torch.arange(numel)).unique().tolist())
    return totals


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_need_not_be_equal(pool, ranks):
    assert pool.run(sums_of_odd_length, ranks=ranks) == [[[sum(range(ranks))]] * 4] * ranks


def divided(rank: Rank, divisor: float) -> list[bool]:
    """Return whether sums were divided as ``div_`` does it, and who says so."""
    communicator = ProcessGroupCommunicator(rank.group)
    values = values_of(rank, 200_000 * rank.size, torch.float32)
    expected = values.clone()
    dist.all_reduce(expected, group=rank.group)
    expected.div_(divisor)
    told = []
    for reads in (True, False):
        reduced, scattered = values.clone(), values.clone()
        reduce: list[Call] = [AllReduce(reduced, divisor=divisor)]
        scatter: list[Call] = [ReduceScatter(part_of(scattered, rank), scattered, divisor=divisor)]
        with reading_anything():
            for calls in (reduce, scatter):
                handle = communicator.launch(
                    prepared(communicator, calls) if reads else communicator.prepare(calls), label="mean"
                )
                handle.wait()
                told.append(handle.has_divided is reads)
        if reads:
            told += [torch.equal(reduced, expected), torch.equal(part_of(scattered, rank), part_of(expected, rank))]
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_who_adds_up_divides_in_the_same_pass_and_says_so(pool, ranks):
    assert pool.run(divided, 6.0, ranks=ranks) == [[True] * 6] * ranks


def gathered(rank: Rank, part_numel: int, in_place: bool) -> bool:
    communicator = ProcessGroupCommunicator(rank.group)
    parts = [torch.randn(part_numel, generator=torch.Generator().manual_seed(index)) for index in range(rank.size)]
    full = torch.zeros(part_numel * rank.size)
    own = part_of(full, rank) if in_place else torch.zeros(part_numel)
    is_right = True
    with reading_anything():
        batch = prepared(communicator, [AllGather(full, own)])
        for factor in (1, 2):
            own.copy_(parts[rank.index] * factor)
            communicator.launch(batch, label="gather").wait()
            assert is_read(batch)
            is_right = is_right and torch.equal(full, torch.cat(parts) * factor)
            own.zero_()  # nobody reads it any more
    communicator.close()
    return is_right


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("part_numel", [5, 100_003])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathers_bring_every_part(pool, ranks, part_numel, in_place):
    assert pool.run(gathered, part_numel, in_place, ranks=ranks) == [True] * ranks


def gathered_by_whom_and_when(rank: Rank) -> list[list[float]]:
    """The first rank waits backwards, the second one forwards, the third one for nothing until all others are through."""
    before = set(threading.enumerate())  # readers of other tests, perhaps
    communicator = ProcessGroupCommunicator(rank.group)
    fulls = [torch.zeros(3 * rank.size) for _ in range(4)]
    for number, full in enumerate(fulls):
        part_of(full, rank).fill_(10.0 * number + rank.index)
    with reading_anything():
        batches = [prepared(communicator, [AllGather(full, part_of(full, rank))]) for full in fulls]
    handles = [communicator.launch(batch, label=f"param gather {number}") for number, batch in enumerate(batches)]
    if rank.index == 2:
        dist.barrier(group=rank.group)
    for handle in handles[::-1] if rank.index == 0 else handles:
        handle.wait()
    if rank.index != 2:
        dist.barrier(group=rank.group)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert names.count(f"megabucket-reader-{rank.index}") == 1
    communicator.close()
    assert f"megabucket-reader-{rank.index}" not in [thread.name for thread in set(threading.enumerate()) - before]
    with pytest.raises(InvariantError, match="after close"):
        communicator.launch(batches[0], label="param gather 0")
    return [full[::3].tolist() for full in fulls]


def in_another_network(rank: Rank) -> bool:
    """Return whether a gather in the background was read where one rank is in another network; it is right in any case."""
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.zeros(3 * rank.size)
    part_of(full, rank).fill_(float(rank.index))
    with reading_anything(), mock.patch.object(torch_group, "can_meet", lambda tell_all: tell_all(b"") and False):
        batch = prepared(communicator, [AllGather(full, part_of(full, rank))])
    communicator.launch(batch, label="param gather 0").wait()
    assert full[::3].tolist() == [0.0, 1.0]
    return is_read(batch)


def test_in_two_networks_the_background_is_sent(pool):
    assert pool.run(in_another_network, ranks=2) == [False] * 2


def test_in_the_background_a_wait_needs_nobody_elses(pool):
    expected = [[10.0 * number + rank for rank in range(3)] for number in range(4)]

    assert pool.run(gathered_by_whom_and_when, ranks=3) == [expected] * 3


def overwritten_at_once(rank: Rank) -> float:
    """Write to what was sent as soon as the wait is over, while other ranks may be slow; return how wrong the sum is."""
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.empty(1 << 20)
    batch = prepared(communicator, [AllReduce(full)])
    worst = 0.0
    for step in range(20):
        full.fill_(step + rank.index)
        handle = communicator.launch(batch, label="sum")
        handle.wait()
        expected = float(rank.size * step + sum(range(rank.size)))
        worst = max(worst, float((full - expected).abs().max()))
        full.fill_(torch.nan)
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_is_its_owners_again_when_the_wait_is_over(pool, ranks):
    assert pool.run(overwritten_at_once, ranks=ranks) == [0.0] * ranks


def read_before_anybody_waits(rank: Rank) -> bool:
    """Return whether a sum is there although no rank has waited for it."""
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.full((1 << 20,), 1.0 + rank.index)
    handle = communicator.launch(prepared(communicator, [AllReduce(full)]), label="sum")
    expected, deadline_s = torch.full_like(full, sum(range(1, rank.size + 1))), time.monotonic() + 20
    while not torch.equal(full, expected) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    is_there = torch.equal(full, expected)
    dist.barrier(group=rank.group)
    handle.wait()
    return is_there


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_launched_is_read_at_once(pool, ranks):
    assert pool.run(read_before_anybody_waits, ranks=ranks) == [True] * ranks


def planned_anew(rank: Rank) -> list[bool]:
    """Launch a batch twice, and again when the second rank has it elsewhere; return when it was planned anew."""
    communicator = ProcessGroupCommunicator(rank.group)
    batch = prepared(communicator, [AllReduce(torch.empty(1 << 20))])
    plans = []
    for launch in range(4):
        if launch == 2 and rank.index == 1:
            elsewhere = communicator.prepare([AllReduce(torch.empty(1 << 20))])
            elsewhere.plan = Plan([InBackground(tuple(elsewhere))])
            batch = elsewhere
        batch[0].full.fill_(launch + rank.index)
        communicator.launch(batch, label="sum").wait()
        assert batch[0].full.unique().tolist() == [2.0 * launch + 1]
        plans.append(batch.plan.starts[0].reading)
    return [one is not other for one, other in pairwise(plans)]


def test_a_batch_is_planned_once_unless_a_rank_has_it_elsewhere(pool):
    assert pool.run(planned_anew, ranks=2) == [[False, True, False]] * 2


def interrupted(rank: Rank) -> list[float]:
    """A signal ends the first wait of the first rank, whose batch the others launch later; it waits again."""
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.full((1 << 20,), 1.0 + rank.index)
    batch = prepared(communicator, [AllReduce(full, divisor=2.0)])
    if rank.index:
        time.sleep(0.6)
    handle = communicator.launch(batch, label="sum")
    if rank.index == 0:
        before = signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ValueError, match="no more data"):
            handle.wait()
        signal.signal(signal.SIGALRM, before)
    handle.wait()
    return full.unique().tolist()


def test_a_wait_that_is_begun_again_adds_and_divides_nothing_twice(pool):
    assert pool.run(interrupted, ranks=3) == [[3.0]] * 3


# Who may read #


def ways(rank: Rank, blind: int | None, calls_of: str) -> bool:
    """Return whether a batch was read, when one rank cannot read the others."""
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.ones(12 * rank.size)
    calls: dict[str, list[Call]] = {
        "sum": [AllReduce(full)],
        "largest": [AllReduce(full, ReduceOp.MAX)],
        "integers": [AllReduce(torch.ones(4, dtype=torch.int64))],
        "elsewhere": [ReduceScatter(torch.zeros(12), full)],
        "in float32": [ReduceScatter(part_of(full.bfloat16(), rank), full.bfloat16(), in_fp32=True)],
    }
    sees = mock.patch.object(
        peer_memory, "_reads_nonce", (lambda _: False) if rank.index == blind else peer_memory._reads_nonce
    )
    with reading_anything(), sees:
        batch = prepared(communicator, calls[calls_of])
        communicator.launch(batch, label="sum").wait()
    if calls_of == "sum":
        assert full.unique().tolist() == [float(rank.size)]
    return batch.plan.is_read


@pytest.mark.parametrize("calls_of", ["largest", "integers", "elsewhere", "in float32"])
def test_what_is_never_read(pool, calls_of):
    assert pool.run(ways, None, calls_of, ranks=2) == [False] * 2


@pytest.mark.parametrize(("blind", "reads"), [(None, True), (0, False), (2, False)])
def test_either_every_rank_reads_or_none_does(pool, blind, reads):
    assert pool.run(ways, blind, "sum", ranks=3) == [reads] * 3


def read_sizes(rank: Rank) -> list[bool]:
    communicator = ProcessGroupCommunicator(rank.group)
    read = []
    for numel, is_wanted in ((1 << 18, True), ((1 << 18) - 2, True), (1 << 18, False)):
        calls: list[Call] = [AllReduce(torch.zeros(numel))]
        batch = prepared(communicator, calls) if is_wanted else communicator.prepare(calls)
        communicator.launch(batch, label="sum").wait()
        read.append(batch.plan.is_read)
    return read


def test_small_buckets_and_those_of_nobody_who_asked_are_sent(pool):
    assert pool.run(read_sizes, ranks=2) == [[True, False, False]] * 2


# Waits that do not come to their end #


def unreadable(rank: Rank, kind: str) -> str:
    """Rank 0 looks for the others where they are not."""
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.ones(300_000 * rank.size)
    calls: dict[str, list[Call]] = {
        "all-reduce": [AllReduce(full)],
        "reduce-scatter": [ReduceScatter(part_of(full, rank), full)],
        "all-gather": [AllGather(full, part_of(full, rank))],
    }
    with reading_anything():
        batch = prepared(communicator, calls[kind])
    if rank.index == 0:
        memory = communicator._reader._memory  # type: ignore[union-attr]
        memory.pids = (0, -1, memory.pids[2])
    handle = communicator.launch(batch, label="bucket 3")
    try:
        handle.wait()
    except PeerLostError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-gather"])
def test_a_rank_that_cannot_be_read_is_named_on_all_ranks_in_the_same_words(pool, kind):
    texts = pool.run(unreadable, kind, ranks=3)

    assert len(set(texts)) == 1
    assert "rank 1 is there, but rank 0 could not read its memory" in texts[0]
    assert "while waiting for bucket 3" in texts[0]


def left_by_destruction(rank: Rank, launches: bool) -> str:
    """Rank 0 destroys the group the others wait over, and launches, or does nothing; return what each is told."""
    group = dist.new_group(range(rank.size))
    communicator = ProcessGroupCommunicator(group, liveness=Liveness(heartbeat_s=0.2, dead_after_s=1.0))
    full = torch.ones(1 << 20)
    batch = prepared(communicator, [AllReduce(full)])
    communicator.launch(batch, label="bucket 3").wait()
    try:
        if rank.index == 0:
            dist.destroy_process_group(group)
            if launches:
                communicator.launch(batch, label="bucket 3")
        else:
            communicator.launch(batch, label="bucket 3").wait()
    except (GroupDestroyedError, PeerLostError) as error:
        return str(error)
    finally:
        dist.barrier(group=rank.group)  # nobody closes before
        communicator.close()
    return ""


@pytest.mark.parametrize("launches", [True, False])
def test_a_rank_that_destroys_its_group_is_missed_by_those_who_wait_for_it(pool, launches):
    of_destroyer, *texts = pool.run(left_by_destruction, launches, ranks=4)  # all there are: each makes the group

    assert ("process group of the wrapper was destroyed" in of_destroyer) is launches
    for text in texts:
        assert "rank 0 went away" in text
        assert "while waiting for bucket 3" in text
        assert "Connection closed by peer" in text  # not found out by its silence


# Training #


def received_bytes(rank: Rank) -> tuple[int, int]:
    """Return what two steps have taken to receive in, and the formula. Buckets of 1.3 and 2.6 MB are read, and one is not."""
    module = torch.nn.Sequential(*(torch.nn.Linear(width, 1_100) for width in (3, 300, 600)))
    module.forward = lambda data: sum(layer(data[:, : layer.in_features]).sum() for layer in module)  # type: ignore[method-assign]
    cuts = ["0.bias", "1.bias", "2.bias"]
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_cuts=cuts)
    ddp = mb.DistributedDataParallel(module, config, process_group=rank.group)
    for _ in range(2):
        ddp(torch.ones(1, 600)).backward()
        ddp.finish_grad_sync()
        ddp.zero_grad()
    given = {buffer.grad_data.untyped_storage().data_ptr() for buffer in ddp.param_and_grad_buffers}
    taken = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for group in ddp.bucket_groups
        for tensor in group._scatter_calls.plan.tensors
        if not group._scatter_calls.plan.is_read
    }
    blocks = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for group in ddp.bucket_groups
        if group._scatter_calls.plan.is_read
        for stage in group._scatter_calls.plan.starts[0].reading.stages
        for function, arguments in stage
        if function is torch.Tensor.add_
        for tensor in arguments[0]
    }
    total = sum(taken[place] for place in taken.keys() - given) + sum(blocks[place] for place in blocks.keys() - given)
    formula = exchange_memory(ddp.layout, reads_peers=True).exchange_bytes
    ddp.detach()
    return total, formula


@pytest.mark.parametrize("ranks", [2, 3])
def test_reading_takes_what_the_formula_says(pool, ranks):
    for taken, formula in pool.run(received_bytes, ranks=ranks):
        assert taken == formula > 0


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(4)))


def train(rank: Rank, fields: dict[str, Any], reads: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Train four steps; return the weights, and the labels of what was read."""
    recorder = ListRecorder()
    config = mb.DistributedDataParallelConfig(bucket_size=1_500, read_peer_memory=reads, **fields)
    with reading_anything():
        ddp = mb.DistributedDataParallel(model(), config, process_group=rank.group, recorder=recorder)
        read = read_labels(ddp)
        inner = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        optimizer = mb.DistributedOptimizer(inner, ddp) if fields.get("use_distributed_optimizer") else inner
        for step in range(4):
            data = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank.index))
            ddp(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        assert {interval.label for interval in recorder.intervals if interval.lane is Lane.WAIT}
        weights = [param.detach().clone() for param in ddp.parameters()]
        ddp.detach()
    return weights, sorted(read)


def read_labels(ddp: mb.DistributedDataParallel) -> set[str]:
    """Return a set that the labels of batches are added to when they are read."""
    labels: set[str] = set()
    launch = ddp.communicator.launch

    def noting(calls: Any, *, label: str) -> Any:
        handle = launch(calls, label=label)
        if is_read(calls):
            labels.add(label.rstrip("0123456789 "))
        return handle

    ddp.communicator.launch = noting  # type: ignore[method-assign]
    return labels


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({}, ["bucket"]),
        ({"average_in_collective": True}, ["bucket"]),
        ({"fence": False}, []),
        ({"bucket_groups": "single"}, ["bucket"]),
        ({"use_distributed_optimizer": True}, ["bucket", "param gather"]),
        ({"use_distributed_optimizer": True, "reduce_in_place": True}, ["bucket", "param gather"]),
        ({"use_distributed_optimizer": True, "overlap_param_gather": True}, ["bucket", "param gather"]),
    ],
    ids=["all-reduce", "avg", "no-fence", "single", "reduce-scatter", "in-place", "overlap"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_does_not_depend_on_it(pool, ranks, fields, labels):
    reading, sending = (pool.run(train, fields, reads, ranks=ranks) for reads in (True, False))

    for (weights, read), (expected, nothing) in zip(reading, sending, strict=True):
        assert (read, nothing) == (labels, [])
        assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


def fail(*_: Any) -> None:
    raise NO_DATA


def fail_and_stay_away(rank: Rank, sharded: bool, phase: str) -> tuple[list[str], float]:
    """Rank 1 fails in the first of two steps and does not touch the wrapper until the others have been told."""
    config = mb.DistributedDataParallelConfig(bucket_size=1_500, use_distributed_optimizer=sharded)
    with reading_anything():
        ddp = mb.DistributedDataParallel(model(), config, process_group=rank.group)
        errors = []
        for step in range(2):
            fails = rank.index == 1 and step == 0
            place = ddp.module[1]
            hook = place.register_forward_pre_hook(fail) if fails and phase == "forward" else None
            hook = place.register_full_backward_hook(fail) if fails and phase == "backward" else hook
            try:
                ddp(torch.full((2, 24), 1.0)).sum().backward()
                ddp.finish_grad_sync()
            except (PeerFailedError, ValueError) as error:
                errors.append(str(error))
                dist.barrier(group=rank.group)  # the failed rank comes here without a wait
            if hook is not None:
                hook.remove()
            if step == 0:
                ddp.zero_grad()
        total = float(sum(bucket.shard(bucket.grad_data, rank.index).sum() for bucket in ddp.param_and_grad_buffers[0].buckets))
        ddp.detach()
    return errors, total


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("sharded", [False, True])
def test_nobody_waits_for_the_wait_of_a_rank_that_has_failed(pool, sharded, phase):
    (first, total), (failed, _), (third, _) = pool.run(fail_and_stay_away, sharded, phase, ranks=3, timeout_s=20)

    assert failed == ["no more data"]
    for text in (*first, *third):
        assert f"rank 1 failed in {phase}" in text
    assert len(first) == len(third) == 1
    assert total != 0  # the second step is whole


ENDS_WITH_A_TRACEBACK = """
import sys, time
import torch, torch.distributed as dist
import megabucket as mb
from megabucket.errors import PeerFailedError

rank, place = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=3)
ddp = mb.DistributedDataParallel(torch.nn.Linear(800, 800), mb.DistributedDataParallelConfig())
assert ddp.bucket_groups[0]._reduce_calls.plan.is_read


def fail(*_):
    raise ValueError("no data")


if rank == 1:
    ddp.module.register_forward_pre_hook(fail)
else:
    time.sleep(2.5)  # until its program has come to the end, and would like to be gone
try:
    ddp(torch.ones(4, 800)).sum().backward()
except PeerFailedError as error:
    print(str(error))
    dist.destroy_process_group()
"""


def test_a_program_that_ends_with_an_exception_tells_the_others_which(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS_WITH_A_TRACEBACK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    texts = [program.communicate(timeout=60) for program in programs]

    assert "ValueError: no data" in texts[1][1]
    for rank in (0, 2):
        assert "rank 1 failed in forward: ValueError: no data" in texts[rank][0], texts[rank]
