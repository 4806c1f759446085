"""Ranks that copy from each other's memory get the bits of gloo's own collectives; no rank waits for one that gave up."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import FOUR_AT_NIGHT, TWO_AT_NIGHT, Rank

import megabucket as mb
from megabucket.comm import (
    AllGather,
    AllReduce,
    Batch,
    Call,
    Communicator,
    Liveness,
    ReduceOp,
    ReduceScatter,
    SameHostCommunicator,
    discover_communicator,
    samehost,
    with_same_host_copies,
)
from megabucket.comm.plan import Plan
from megabucket.comm.samehost import _Copies
from megabucket.errors import GroupDestroyedError, PeerFailedError, PeerLostError
from megabucket.planning.memory import exchange_bytes
from megabucket.testing import ListRecorder

pytestmark = pytest.mark.dist

OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG}
NO_DATA = ValueError("no more data")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@contextlib.contextmanager
def copying_anything() -> Iterator[None]:
    """Copy small tensors, too."""
    with mock.patch.object(samehost, "LEAST_BYTES", 0):
        yield


@contextlib.contextmanager
def copies_of(rank: Rank) -> Iterator[SameHostCommunicator]:
    """Give a communicator that copies, and close it on all ranks together."""
    communicator = copying(rank.group)
    assert isinstance(communicator, SameHostCommunicator)
    yield communicator
    dist.barrier(group=rank.group)
    communicator.close()


def copying(group: dist.ProcessGroup, liveness: Liveness | None = None) -> Communicator:
    return with_same_host_copies(discover_communicator(group, liveness), torch.device("cpu"))


def can_copy(rank: Rank) -> bool:
    communicator = copying(rank.group)
    communicator.close()
    return isinstance(communicator, SameHostCommunicator)


@pytest.fixture(scope="module", autouse=True)
def _readable(pool):
    if not all(pool.run(can_copy, ranks=2)):
        pytest.skip("here the kernel lets no process read another one's memory; everything is sent then")


def is_copied(batch: Any) -> bool:
    return isinstance(batch, Batch) and isinstance(batch.plan, _Copies)


def values_of(rank: Rank, numel: int, dtype: torch.dtype, *, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * salt + 97 * rank.index + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def part_of(full: torch.Tensor, rank: Rank) -> torch.Tensor:
    return full.view(rank.size, -1)[rank.index]


def launched(communicator: Communicator, calls: Sequence[Call], values: list[torch.Tensor]) -> None:
    """Launch calls that are copied, twice, on the values."""
    batch = communicator.prepare(calls)
    for _ in range(2):
        for call, value in zip(batch, values, strict=True):
            call.full.copy_(value)
        handle = communicator.launch(batch, label="sum")
        assert is_copied(batch)
        handle.wait()
        handle.wait()


def differing_sums(rank: Rank) -> list[str]:
    differing = []
    with copies_of(rank) as communicator, copying_anything():
        for dtype, numel, op in product(DTYPES, (1, 3, 128, 400_001), OPS):
            values = values_of(rank, numel * rank.size, dtype)
            expected = values.clone()
            dist.all_reduce(expected, op=OPS[op], group=rank.group)
            scattered, reduced = torch.empty_like(values), torch.empty_like(values)
            launched(communicator, [ReduceScatter(part_of(scattered, rank), scattered, op)], [values])
            launched(communicator, [AllReduce(reduced, op)], [values])
            if not torch.equal(bits(part_of(scattered, rank)), bits(part_of(expected, rank))):
                differing.append(f"reduce-scatter {dtype} {numel} {op}")
            if not torch.equal(bits(reduced), bits(expected)):
                differing.append(f"all-reduce {dtype} {numel} {op}")
    return differing


@pytest.mark.parametrize("ranks", [TWO_AT_NIGHT, 3, FOUR_AT_NIGHT])
def test_sums_and_means_have_the_bits_of_the_all_reduce_of_gloo(pool, ranks):
    assert pool.run(differing_sums, ranks=ranks) == [[]] * ranks


def differing_batches(rank: Rank) -> list[str]:
    """A batch of one dtype is all-reduced as one tensor, so where a tensor lies in it decides the order of its sums."""
    differing = []
    with copies_of(rank) as communicator:
        for numels in ((128, 128), (384, 1, 40_000), (7,), (300_001, 5)):
            dtypes = (torch.float32, torch.float64, torch.float32)[: len(numels)]
            values = [
                values_of(rank, numel * rank.size, dtype, salt=salt)
                for salt, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
            ]
            expected = [value.clone() for value in values]
            communicator.launch([AllReduce(value) for value in expected], label="all-reduce").wait()  # sent, as not prepared
            with copying_anything():
                reduced = [torch.empty_like(value) for value in values]
                launched(communicator, [AllReduce(full) for full in reduced], values)
                fulls = [torch.empty_like(value) for value in values]
                launched(communicator, [ReduceScatter(part_of(full, rank), full) for full in fulls], values)
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
    totals = []
    with copies_of(rank) as communicator, copying_anything():
        for numel in (1, 2, 5, 300_007):
            full = torch.arange(numel, dtype=torch.float64) + rank.index
            communicator.launch(communicator.prepare([AllReduce(full)]), label="sum").wait()
            totals.append((full - rank.size * torch.arange(numel)).unique().tolist())
    return totals


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_need_not_be_equal(pool, ranks):
    assert pool.run(sums_of_odd_length, ranks=ranks) == [[[sum(range(ranks))]] * 4] * ranks


def divided(rank: Rank, divisor: float) -> list[bool]:
    """Return whether sums were divided as ``div_`` does it, copied and sent."""
    values = values_of(rank, 200_000 * rank.size, torch.float32)
    expected = values.clone()
    dist.all_reduce(expected, group=rank.group)
    expected.div_(divisor)
    told = []
    with copies_of(rank) as communicator, copying_anything():
        for is_prepared in (True, False):
            reduced, scattered = values.clone(), values.clone()
            reduce: list[Call] = [AllReduce(reduced, divisor=divisor)]
            scatter: list[Call] = [ReduceScatter(part_of(scattered, rank), scattered, divisor=divisor)]
            for calls in (reduce, scatter):
                communicator.launch(communicator.prepare(calls) if is_prepared else calls, label="mean").wait()
            told += [torch.equal(reduced, expected), torch.equal(part_of(scattered, rank), part_of(expected, rank))]
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_come_divided(pool, ranks):
    assert pool.run(divided, 6.0, ranks=ranks) == [[True] * 4] * ranks


def gathered(rank: Rank, part_numel: int) -> bool:
    parts = [torch.randn(part_numel, generator=torch.Generator().manual_seed(index)) for index in range(rank.size)]
    full = torch.zeros(part_numel * rank.size)
    own = part_of(full, rank)
    is_right = True
    with copies_of(rank) as communicator, copying_anything():
        batch = communicator.prepare([AllGather(full, own)])
        for factor in (1, 2):
            own.copy_(parts[rank.index] * factor)
            communicator.launch(batch, label="gather").wait()
            assert is_copied(batch)
            is_right = is_right and torch.equal(full, torch.cat(parts) * factor)
            own.zero_()  # no rank reads it any more
    return is_right


@pytest.mark.parametrize("part_numel", [5, 100_003])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathers_bring_every_part(pool, ranks, part_numel):
    assert pool.run(gathered, part_numel, ranks=ranks) == [True] * ranks


def gathered_by_whom_and_when(rank: Rank) -> list[list[float]]:
    """The first rank waits backwards, the second one forwards, the third one for nothing until all others are through."""
    fulls = [torch.zeros(3 * rank.size) for _ in range(4)]
    for number, full in enumerate(fulls):
        part_of(full, rank).fill_(10.0 * number + rank.index)
    with copies_of(rank) as communicator, copying_anything():
        batches = [communicator.prepare([AllGather(full, part_of(full, rank))]) for full in fulls]
        handles = [communicator.launch(batch, label=f"param gather {number}") for number, batch in enumerate(batches)]
        if rank.index == 2:
            dist.barrier(group=rank.group)
        for handle in handles[::-1] if rank.index == 0 else handles:
            handle.wait()
        if rank.index != 2:
            dist.barrier(group=rank.group)
    return [full[::3].tolist() for full in fulls]


def test_a_wait_needs_no_wait_of_another_rank(pool):
    expected = [[10.0 * number + rank for rank in range(3)] for number in range(4)]

    assert pool.run(gathered_by_whom_and_when, ranks=3) == [expected] * 3


def left_by_close(rank: Rank) -> tuple[set[str], set[str]]:
    """Return the threads, and the descriptors, that a communicator leaves when it was used and closed.

    What is gone besides is not counted: garbage of earlier tests may be collected meanwhile.
    """

    def descriptors() -> Counter[str]:
        opened = Counter[str]()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                opened[str(descriptor.readlink())] += 1
        return opened

    full, left = torch.zeros(1 << 20), (set[str](), set[str]())
    for _ in range(2):  # what torch opens once, and keeps, is there after the first time
        threads, before = set(threading.enumerate()), descriptors()
        with copies_of(rank) as communicator:
            batch = communicator.prepare([AllReduce(full)])
            communicator.launch(batch, label="sum").wait()
            assert is_copied(batch)
        del communicator, batch
        left = {thread.name for thread in set(threading.enumerate()) - threads}, set(descriptors() - before)
    return left


@pytest.mark.parametrize("ranks", [2, 3])
def test_closing_leaves_neither_threads_nor_descriptors(pool, ranks):
    assert pool.run(left_by_close, ranks=ranks) == [(set(), set())] * ranks


def in_another_network(rank: Rank) -> bool:
    """Return whether ranks copy where one of them is in another network."""
    with mock.patch.object(samehost, "network_space", return_value=f"net:[{rank.index}]"):
        communicator = copying(rank.group)
    full = torch.zeros(3 * rank.size)
    part_of(full, rank).fill_(float(rank.index))
    communicator.launch([AllGather(full, part_of(full, rank))], label="param gather 0").wait()
    assert full[::3].tolist() == [0.0, 1.0]
    communicator.close()
    return isinstance(communicator, SameHostCommunicator)


def test_in_two_networks_everything_is_sent(pool):
    assert pool.run(in_another_network, ranks=2) == [False] * 2


def overwritten_at_once(rank: Rank) -> float:
    """Write to what was sent as soon as the wait is over, while other ranks may be slow; return how wrong the sum is."""
    full, worst = torch.empty(1 << 20), 0.0
    with copies_of(rank) as communicator:
        batch = communicator.prepare([AllReduce(full)])
        for step in range(20):
            full.fill_(step + rank.index)
            communicator.launch(batch, label="sum").wait()
            expected = float(rank.size * step + sum(range(rank.size)))
            worst = max(worst, float((full - expected).abs().max()))
            full.fill_(torch.nan)
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_is_its_owners_again_when_the_wait_is_over(pool, ranks):
    assert pool.run(overwritten_at_once, ranks=ranks) == [0.0] * ranks


def copied_before_any_wait(rank: Rank) -> bool:
    """Return whether a sum is there although no rank has waited for it."""
    full = torch.full((1 << 20,), 1.0 + rank.index)
    with copies_of(rank) as communicator:
        handle = communicator.launch(communicator.prepare([AllReduce(full)]), label="sum")
        expected, deadline_s = torch.full_like(full, sum(range(1, rank.size + 1))), time.monotonic() + 20
        while not torch.equal(full, expected) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        is_there = torch.equal(full, expected)
        dist.barrier(group=rank.group)
        handle.wait()
    return is_there


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_launched_is_copied_at_once(pool, ranks):
    assert pool.run(copied_before_any_wait, ranks=ranks) == [True] * ranks


def planned_anew(rank: Rank) -> list[bool]:
    """Launch a batch twice, and again when the second rank has it elsewhere; return when it was planned anew."""
    plans = []
    with copies_of(rank) as communicator:
        batch = communicator.prepare([AllReduce(torch.empty(1 << 20))])
        for launch in range(4):
            if launch == 2 and rank.index == 1:
                batch = communicator.prepare([AllReduce(torch.empty(1 << 20))])
            batch[0].full.fill_(launch + rank.index)
            communicator.launch(batch, label="sum").wait()
            assert batch[0].full.unique().tolist() == [2.0 * launch + 1]
            plans.append(batch.plan._stages)
    return [one is not other for one, other in pairwise(plans)]


def test_a_batch_is_planned_once_unless_a_rank_has_it_elsewhere(pool):
    assert pool.run(planned_anew, ranks=2) == [[False, True, False]] * 2


def interrupted(rank: Rank) -> list[float]:
    """A signal ends the first wait of the first rank, whose batch the others launch later; it waits again."""
    full = torch.full((1 << 20,), 1.0 + rank.index)
    with copies_of(rank) as communicator:
        batch = communicator.prepare([AllReduce(full, divisor=2.0)])
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


# Who may copy, and what #


def ways(rank: Rank, blind: int | None, calls_of: str) -> bool:
    """Return whether a batch was copied, when one rank cannot read the others."""
    reads_nonce = (lambda *_: False) if rank.index == blind else samehost._reads_nonce
    with mock.patch.object(samehost, "_reads_nonce", reads_nonce):
        communicator = copying(rank.group)
    full, narrow = torch.ones(12 * rank.size), torch.ones(12 * rank.size, dtype=torch.bfloat16)
    calls: dict[str, list[Call]] = {
        "sum": [AllReduce(full)],
        "largest": [AllReduce(full, ReduceOp.MAX)],
        "integers": [AllReduce(torch.ones(4, dtype=torch.int64))],
        "in float32": [ReduceScatter(part_of(narrow, rank), narrow, in_fp32=True)],
    }
    with copying_anything():
        batch = communicator.prepare(calls[calls_of])
        communicator.launch(batch, label="sum").wait()
    if calls_of == "sum":
        assert full.unique().tolist() == [float(rank.size)]
    dist.barrier(group=rank.group)
    communicator.close()
    return is_copied(batch)


@pytest.mark.parametrize("calls_of", ["largest", "integers", "in float32"])
def test_what_is_never_copied(pool, calls_of):
    assert pool.run(ways, None, calls_of, ranks=2) == [False] * 2


@pytest.mark.parametrize(("blind", "copies"), [(None, True), (0, False), (2, False)])
def test_either_every_rank_copies_or_none_does(pool, blind, copies):
    assert pool.run(ways, blind, "sum", ranks=3) == [copies] * 3


def copied_sizes(rank: Rank) -> list[bool]:
    copied = []
    with copies_of(rank) as communicator:
        for numel in (1 << 18, (1 << 18) - 2):
            batch = communicator.prepare([AllReduce(torch.zeros(numel))])
            communicator.launch(batch, label="sum").wait()
            copied.append(is_copied(batch))
    return copied


def test_small_buckets_are_sent(pool):
    assert pool.run(copied_sizes, ranks=2) == [[True, False]] * 2


# Waits that do not come to their end #


def unreadable(rank: Rank, kind: str) -> str:
    """Rank 0 looks for the others where they are not."""
    communicator = copying(rank.group)
    assert isinstance(communicator, SameHostCommunicator)
    full = torch.ones(300_000 * rank.size)
    calls: dict[str, list[Call]] = {
        "all-reduce": [AllReduce(full)],
        "reduce-scatter": [ReduceScatter(part_of(full, rank), full)],
        "all-gather": [AllGather(full, part_of(full, rank))],
    }
    if rank.index == 0:
        memory = communicator._memory
        memory.pids = (0, -1, memory.pids[2])
    with copying_anything():
        handle = communicator.launch(communicator.prepare(calls[kind]), label="bucket 3")
    try:
        handle.wait()
    except PeerLostError as error:
        return str(error)
    finally:
        dist.barrier(group=rank.group)
        communicator.close()
    return ""


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-gather"])
def test_a_rank_that_cannot_be_read_is_named_on_all_ranks_in_the_same_words(pool, kind):
    texts = pool.run(unreadable, kind, ranks=3)

    assert len(set(texts)) == 1
    assert "rank 1 is there, but rank 0 could not read its memory" in texts[0]
    assert "while waiting for bucket 3" in texts[0]


def left_by_destruction(rank: Rank, launches: bool) -> str:
    """Rank 0 destroys the group the others wait over, and launches, or closes; return what each is told."""
    group = dist.new_group(range(rank.size))
    communicator = copying(group, Liveness(heartbeat_s=0.2, dead_after_s=30.0))
    full = torch.ones(1 << 20)
    batch = communicator.prepare([AllReduce(full)])
    communicator.launch(batch, label="bucket 3").wait()
    assert is_copied(batch)
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
        dist.barrier(group=rank.group)  # no rank closes before
        communicator.close()
    return ""


@pytest.mark.parametrize("launches", [True, False])
def test_a_rank_that_destroys_its_group_is_missed_by_those_who_wait_for_it(pool, launches):
    of_destroyer, *texts = pool.run(left_by_destruction, launches, ranks=4)  # all there are: each makes the group

    assert ("process group of the wrapper was destroyed" in of_destroyer) is launches
    for text in texts:
        assert "rank 0 left: its program ended, its process group was destroyed" in text
        assert "while waiting for bucket 3" in text


# Training #


def received_bytes(rank: Rank) -> tuple[int, int]:
    """Return what two steps have taken to receive in, and the formula. Buckets of 1.3 and 2.6 MB are copied, and one is not."""
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
    plans = [group._grad_calls.plan for group in ddp.bucket_groups]
    tensors = [tensor for plan in plans if isinstance(plan, Plan) for start in plan.starts for tensor in start.tensors]
    if any(isinstance(plan, _Copies) for plan in plans):
        assert isinstance(ddp.communicator, SameHostCommunicator)
        tensors.append(ddp.communicator._memory._blocks)
    taken = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    total = sum(nbytes for place, nbytes in taken.items() if place not in given)
    formula = exchange_bytes(ddp.layout, reads_peers=True)
    assert [isinstance(plan, _Copies) for plan in plans].count(True) == 2
    ddp.detach()
    return total, formula


@pytest.mark.parametrize("ranks", [2, 3])
def test_copying_takes_what_the_formula_says(pool, ranks):
    for taken, formula in pool.run(received_bytes, ranks=ranks):
        assert taken == formula > 0


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(4)))


def train(rank: Rank, fields: dict[str, Any], copies: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Train four steps; return the weights, and the labels of what was copied."""
    recorder = ListRecorder()
    config = mb.DistributedDataParallelConfig(bucket_size=1_500, read_peer_memory=copies, **fields)
    with copying_anything():
        ddp = mb.DistributedDataParallel(model(), config, process_group=rank.group, recorder=recorder)
        copied = copied_labels(ddp)
        inner = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        optimizer = mb.DistributedOptimizer(inner, ddp) if fields.get("use_distributed_optimizer") else inner
        for step in range(4):
            data = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank.index))
            ddp(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        assert all(launch.launched <= launch.done <= launch.wait_stop for launch in recorder.launches[-2:])
        weights = [param.detach().clone() for param in ddp.parameters()]
        ddp.detach()
    return weights, sorted(copied)


def copied_labels(ddp: mb.DistributedDataParallel) -> set[str]:
    """Return a set that the labels of batches are added to when they are copied."""
    labels: set[str] = set()
    make = ddp.communicator.handle

    def noting(calls: Any, *, label: str) -> Any:
        handle = make(calls, label=label)
        if is_copied(calls) and label != "grad norm":  # one number, which nothing but the patch has made large enough
            labels.add(label.rstrip("0123456789 "))
        return handle

    ddp.communicator.handle = noting  # type: ignore[method-assign]
    return labels


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({}, ["bucket"]),
        ({"average_in_collective": True}, ["bucket"]),
        ({"fence": False}, []),
        ({"bucket_groups": "single"}, ["bucket"]),
        ({"use_distributed_optimizer": True}, ["bucket", "param gather"]),
        ({"use_distributed_optimizer": True, "overlap_param_gather": True}, ["bucket", "param gather"]),
    ],
    ids=["all-reduce", "avg", "no-fence", "single", "reduce-scatter", "overlap"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_does_not_depend_on_it(pool, ranks, fields, labels):
    copying, sending = (pool.run(train, fields, copies, ranks=ranks) for copies in (True, False))

    for (weights, copied), (expected, nothing) in zip(copying, sending, strict=True):
        assert (copied, nothing) == (labels, [])
        assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


def fail(*_: Any) -> None:
    raise NO_DATA


def fail_and_stay_away(rank: Rank, sharded: bool, phase: str) -> tuple[list[str], float]:
    """Rank 1 fails in the first of two steps and does not touch the wrapper until the others have been told."""
    config = mb.DistributedDataParallelConfig(bucket_size=1_500, use_distributed_optimizer=sharded)
    with copying_anything():
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
from megabucket.comm import SameHostCommunicator
from megabucket.errors import PeerFailedError

rank, place = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=3)
ddp = mb.DistributedDataParallel(torch.nn.Linear(800, 800), mb.DistributedDataParallelConfig())
assert isinstance(ddp.communicator, SameHostCommunicator)


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


@pytest.mark.nightly
def test_a_program_that_ends_with_an_exception_tells_the_others_which(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS_WITH_A_TRACEBACK)
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
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
