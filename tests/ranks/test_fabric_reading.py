"""Large tensors on the fabric: ranks read each other's memory when one of them waits, and the bits are gloo's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from crew import Place, crew
from fabric_ranks import QUICK, joined, run
from pool import Rank

from megabucket.comm import ProcessGroupCommunicator, ReduceScatter, peer_memory
from megabucket.comm.plan import InBackground
from megabucket.comm.torch_group import _all_gather, _reduce_scatter  # by the names this torch has
from megabucket.testing import EmulatedFabric
from megabucket.testing.fabric import movement

pytestmark = pytest.mark.dist

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
LARGE = movement.LEAST_READ_BYTES // 4
"""Float32 elements that are read."""


def reader_of(rank: Rank) -> Any:
    return rank.group._get_backend(torch.device("cpu"))._reader  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def _readable(pool):
    if not all(run(pool, can_read, QUICK)):
        pytest.skip("here the kernel lets no process read another one's memory; gloo moves everything then")


def can_read(rank: Rank) -> bool:
    return reader_of(rank) is not None


@contextmanager
def counted(rank: Rank) -> Iterator[list[int]]:
    """Count what is read."""
    one = reader_of(rank)
    count: list[int] = []
    with mock.patch.object(
        one, "start", side_effect=lambda batch: count.append(len(batch.calls)) or type(one).start(one, batch)
    ):
        yield count


def values(rank: Rank, numel: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(7 * salt + rank.index)).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor, added up in eight ways: equal for equal tensors, and small enough to be sent to the test."""
    flat = tensor.contiguous().view(-1).view(torch.uint8).to(torch.int64)
    return [int((flat * (torch.arange(flat.numel()) % prime + 1)).sum()) for prime in (2, 3, 5, 7, 11, 13, 17, 19)]


# What is read #


def large_collectives(rank: Rank) -> dict[str, list[int]]:
    """Everything that is read where it can be, of a length that not all ranks divide into equal parts where that is allowed."""
    n, own, seen = rank.size, rank.index, {}
    for op, dtype in product((SUM, AVG), (torch.float32, torch.bfloat16, torch.float64)):
        full = values(rank, 2 * LARGE + 1, dtype)
        dist.all_reduce(full, op=op, group=rank.group)
        seen[f"all-reduce {op} {dtype}"] = bits(full)
        full, shard = values(rank, LARGE * n, dtype), torch.empty(LARGE, dtype=dtype)
        _reduce_scatter(shard, full, op=op, group=rank.group)
        seen[f"reduce-scatter {op} {dtype}"] = bits(shard)
    batch = [values(rank, LARGE + salt, salt=salt) for salt in range(3)]
    with dist._coalescing_manager(rank.group, async_ops=True) as manager:
        for tensor in batch:
            dist.all_reduce(tensor, group=rank.group)
    manager.wait()
    seen["batch"] = [number for tensor in batch for number in bits(tensor)]
    full = values(rank, LARGE * n)
    ProcessGroupCommunicator(rank.group).launch([ReduceScatter(full.chunk(n)[own], full)], label="in place").wait()
    seen["in place"] = bits(full.chunk(n)[own])
    fulls = [values(rank, LARGE * n, salt=salt) for salt in range(2)]
    shards = [torch.empty(LARGE) for _ in fulls]
    with dist._coalescing_manager(rank.group, async_ops=True) as manager:
        for shard, full in zip(shards, fulls, strict=True):
            _reduce_scatter(shard, full, group=rank.group)
    manager.wait()
    seen["batch of shards"] = [number for shard in shards for number in bits(shard)]
    with torch.inference_mode():
        made_here = values(rank, LARGE)
    dist.all_reduce(made_here, group=rank.group)
    seen["inference"] = bits(made_here)
    image = values(rank, LARGE).view(1, 4, -1, 64)
    image = image.contiguous(memory_format=torch.channels_last) if own else image
    dist.all_reduce(image.fill_(2.0), group=rank.group)
    seen["two layouts"] = bits(image)
    for is_in_place in (True, False):
        full = torch.zeros(LARGE * n)
        part = full.chunk(n)[own] if is_in_place else torch.empty(LARGE)
        part.copy_(values(rank, LARGE))
        _all_gather(full, part, group=rank.group)
        seen[f"all-gather {is_in_place}"] = bits(full)
    matrix = values(rank, 2 * LARGE).view(2, LARGE)
    dist.broadcast(matrix, group_src=n - 1, group=rank.group)
    seen["broadcast"] = bits(matrix)
    return seen


def left_to_gloo(rank: Rank) -> dict[str, list[int]]:
    """What is large and not read, and what is too small."""
    cases = [
        ("largest", MAX, values(rank, LARGE)),
        ("integers", SUM, torch.arange(LARGE) * (rank.index + 1)),
        ("small", SUM, values(rank, LARGE - 1)),
    ]
    for _, op, tensor in cases:
        dist.all_reduce(tensor, op=op, group=rank.group)
    return {name: bits(tensor) for name, _, tensor in cases}


def counting(rank: Rank, function: Callable[[Rank], Any]) -> tuple[Any, int]:
    with counted(rank) as count:
        return function(rank), len(count)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_large_collectives_have_the_bits_that_gloo_gives(pool, ranks):
    on_gloo = pool.run(large_collectives, ranks=ranks)

    seen = run(pool, counting, QUICK, large_collectives, ranks=ranks)

    assert [result for result, _ in seen] == on_gloo
    assert [count for _, count in seen] == [len(on_gloo[0]) + 1] * ranks  # the batch of two shards is read in two


def test_extremes_integers_and_small_tensors_are_left_to_gloo(pool):
    on_gloo = pool.run(left_to_gloo, ranks=2)

    assert run(pool, counting, QUICK, left_to_gloo) == [(result, 0) for result in on_gloo]


def blind_collectives(rank: Rank) -> tuple[dict[str, list[int]], bool]:
    """A fabric on which the second rank finds that it cannot read the others."""
    sight = mock.patch.object(peer_memory, "_reads_nonce", return_value=False) if rank.index == 1 else nullcontext()
    with sight, joined(rank, QUICK) as group:
        if group is None:
            return {}, True
        member = Rank(rank.index, 2, group)
        return large_collectives(member), reader_of(member) is None


def test_where_one_rank_cannot_read_gloo_moves_everything(pool):
    on_gloo = pool.run(large_collectives, ranks=2)

    seen = pool.run(blind_collectives, ranks=4)[:2]

    assert seen == [(result, True) for result in on_gloo]


# When it is read #


def waited_for_in_two_orders(rank: Rank) -> list[float]:
    tensors = [torch.full((LARGE,), float(rank.index + number)) for number in range(4)]
    works = [dist.all_reduce(tensor, group=rank.group, async_op=True) for tensor in tensors]
    for work in works if rank.index == 0 else works[::-1]:
        work.wait()
    return [tensor.unique().item() for tensor in tensors]


def test_ranks_may_wait_in_different_orders(pool):
    assert run(pool, waited_for_in_two_orders, QUICK) == [[1.0, 3.0, 5.0, 7.0]] * 2


def waited_for_by_one_rank(rank: Rank, how: str) -> float:
    """Only the first rank asks for the result; the other one goes on, to a collective that gloo does."""
    tensor = torch.full((LARGE,), rank.index + 1.0)
    work = dist.all_reduce(tensor, group=rank.group, async_op=True)
    if rank.index == 0:
        if how == "wait":
            work.wait()
        elif how == "future":
            work.get_future().wait()
        else:
            while not work.is_completed():
                time.sleep(1e-3)
    dist.barrier(group=rank.group)
    if rank.index == 1:
        work.wait()
    return tensor.unique().item()


@pytest.mark.parametrize("how", ["wait", "future", "look"])
def test_who_waits_needs_nobody_elses_wait(pool, how):
    assert run(pool, waited_for_by_one_rank, QUICK, how) == [3.0, 3.0]


def untouched_until_somebody_waits(rank: Rank) -> tuple[float, float]:
    tensor = torch.full((LARGE,), rank.index + 1.0)
    work = dist.all_reduce(tensor, group=rank.group, async_op=True)
    dist.barrier(group=rank.group)  # later than the end on the link
    time.sleep(0.05)
    before = tensor[0].item()
    dist.barrier(group=rank.group)
    work.wait()
    return before, tensor[0].item()


def test_cores_that_compute_move_nothing(pool):
    assert run(pool, untouched_until_somebody_waits, QUICK) == [(1.0, 3.0), (2.0, 3.0)]


def owned_again(rank: Rank) -> float:
    """Who has waited writes to its memory at once, however slow the others are."""
    tensor = torch.full((LARGE,), rank.index + 1.0)
    work = dist.all_reduce(tensor, group=rank.group, async_op=True)
    if rank.index == 1:
        time.sleep(0.1)
    work.wait()
    seen = tensor.sum().item() / LARGE
    tensor.fill_(-100.0)
    return seen


def test_memory_is_its_owners_again_when_the_wait_is_over(pool):
    for _ in range(5):
        assert run(pool, owned_again, QUICK) == [3.0, 3.0]


def written_to_while_others_read(rank: Rank) -> float:
    """The second rank is slow to read what the first one has; that one has waited, and writes to it."""
    full = torch.zeros(2 * LARGE)
    part = full.chunk(2)[rank.index].fill_(rank.index + 1.0)
    memory = reader_of(rank)._memory
    read = memory.read

    def read_slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return read(*args)

    with mock.patch.object(memory, "read", read_slowly) if rank.index == 1 else nullcontext():
        _all_gather(full, part, group=rank.group)
    seen = full[0].item()
    part.fill_(-100.0)
    return seen


def test_a_wait_ends_when_all_ranks_have_read(pool):
    assert run(pool, written_to_while_others_read, QUICK) == [1.0, 1.0]


# Faults #


def misread(rank: Rank) -> list[str]:
    """The first rank cannot read any more; what comes after that fails, too."""
    if rank.index == 0:
        reader_of(rank)._memory.pids = (-1, -1)
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(LARGE), group=rank.group)
        texts.append(str(caught.value))
    return texts


def test_a_rank_that_cannot_read_fails_all_ranks_from_then_on(pool):
    text = "rank 1 is there, but rank 0 could not read its memory"

    assert run(pool, misread, QUICK) == [[text, text]] * 2


def launched_differently(rank: Rank, how: str) -> str:
    numel = LARGE + (rank.index if how == "numel" else 0)
    dtype = torch.bfloat16 if how == "dtype" and rank.index else torch.float32
    tensor = torch.ones(2 * numel, dtype=dtype)
    launch = partial(dist.broadcast, group_src=0) if how == "kind" and rank.index else dist.all_reduce
    with pytest.raises(RuntimeError) as caught:
        launch(tensor, group=rank.group)
    return str(caught.value)


@pytest.mark.parametrize("how", ["numel", "dtype", "kind"])
def test_ranks_that_launch_different_things_are_told(pool, how):
    first, second = run(pool, launched_differently, QUICK, how)

    assert first.startswith("rank 0 has launched all_reduce of (131072,) torch.float32, and ranks [1] have launched something")
    assert second.startswith("rank 1 has launched")
    assert "ranks [0] have launched something else" in second


def refused_and_then_right(rank: Rank) -> float:
    """Gloo refuses what it cannot add up, and the group goes on."""
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(4 * LARGE).to(torch.float8_e5m2), group=rank.group)
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=rank.group)
    return tensor.unique().item()


def test_what_gloo_refuses_harms_nothing_that_is_read(pool):
    assert run(pool, refused_and_then_right, QUICK) == [2.0, 2.0]


def destroyed_first(rank: Rank) -> float:
    """The first rank destroys the group with a collective under way that the second one launches later."""
    group = dist.new_group([0, 1], backend=QUICK.register(), pg_options=QUICK)
    if rank.index > 1:
        return 2.0
    tensor = torch.ones(LARGE)
    if rank.index == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        backend = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="was destroyed"):
            backend._reader.start(InBackground([])).wait()
        work.wait()
    else:
        time.sleep(0.3)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    return tensor.unique().item()


def test_who_destroys_a_group_lets_the_others_end_what_it_has_launched(pool):
    assert pool.run(destroyed_first, ranks=4) == [2.0] * 4


def names_of_threads(rank: Rank) -> tuple[list[str], list[str]]:
    before = set(threading.enumerate())  # readers of other tests, perhaps
    with joined(rank, QUICK) as group:
        if group is None:
            return [], []
        dist.all_reduce(torch.ones(LARGE), group=group)
        forgotten = dist.all_reduce(torch.ones(LARGE), group=group, async_op=True)
        during = [thread.name for thread in set(threading.enumerate()) - before]
        del group
    del forgotten
    return during, [thread.name for thread in set(threading.enumerate()) - before]


def test_the_thread_ends_with_the_group_also_when_nobody_waited(pool):
    for index, (during, after) in enumerate(pool.run(names_of_threads, ranks=4)[:2]):
        assert f"megabucket-reader-{index}" in during
        assert f"megabucket-reader-{index}" not in after


def wait_for_a_dead_rank(place: Place) -> str:
    fabric = EmulatedFabric(latency_s=1e-3, bytes_per_s=1e9)
    group = dist.new_group(list(range(place.size)), backend=fabric.register(), pg_options=fabric)
    dist.all_reduce(torch.ones(LARGE), group=group)
    place.report("ready")
    if place.index == 1:
        time.sleep(60)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(LARGE), group=group)
    return str(caught.value)


def test_a_dead_rank_is_noticed_at_once():
    with crew(wait_for_a_dead_rank, ranks=2) as ours:
        ours.expect_all("ready")
        ours.signal(1, 9)
        (message,) = ours.expect_all("returned", [0])

    assert message.content == "Connection closed by peer"
