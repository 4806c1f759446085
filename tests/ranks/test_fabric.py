"""The emulated fabric on real ranks: whatever trains on gloo trains on it, with the same bits, and nothing comes too early.

Times are compared in one direction only: a collective must not be done before its link delivers. How late it may be is the
business of tests/benchmarks/fabric_accuracy.py.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from crew import Place, crew
from fabric_ranks import QUICK, RANKS, gather_into, joined, reduce_scatter_into, run
from pool import Rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import megabucket as mb
from megabucket.comm import AllToAll, Handle, ProcessGroupCommunicator
from megabucket.errors import ConfigError, PeerLostError
from megabucket.testing import EmulatedFabric, fabric_lateness

pytestmark = pytest.mark.dist

SLOW = EmulatedFabric(latency_s=10e-3, bytes_per_s=1e6)  # 4 KB over 2 ranks: 2 x (10 ms + 2 ms)


# Training #


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 3))


def steps_of(model, optimizer, rank: Rank, before_step=lambda: None) -> list[float]:
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank.index)
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def torch_ddp(rank: Rank) -> list[float]:
    model = torch.nn.parallel.DistributedDataParallel(
        make_model(), process_group=rank.group, bucket_cap_mb=0.001, gradient_as_bucket_view=True
    )
    return steps_of(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)


def torch_ddp_with_a_hook(rank: Rank) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = torch.nn.parallel.DistributedDataParallel(make_model(), process_group=rank.group, static_graph=True)
    model.register_comm_hook(rank.group, fp16_compress_hook)
    return steps_of(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)


def torch_zero(rank: Rank) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch imports what torch deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = torch.nn.parallel.DistributedDataParallel(make_model(), process_group=rank.group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, process_group=rank.group, lr=0.01
    )
    return steps_of(model, optimizer, rank)


def torch_fsdp(rank: Rank) -> list[float]:
    model = make_model()
    mesh = DeviceMesh.from_group(rank.group, "cpu") if rank.group is not None else None
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return steps_of(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)


def ours(rank: Rank, **options: Any) -> list[float]:
    config = mb.DistributedDataParallelConfig(bucket_size=100, **options)
    model = mb.DistributedDataParallel(make_model(), config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, clip_grad=0.5)
    losses = steps_of(model, optimizer, rank)
    model.detach()
    return losses


def ours_all_reduce(rank: Rank) -> list[float]:
    return ours(rank)


def ours_reduce_scatter(rank: Rank) -> list[float]:
    return ours(rank, use_distributed_optimizer=True, overlap_param_gather=True)


def ours_as_one_batch(rank: Rank) -> list[float]:
    return ours(rank, use_distributed_optimizer=True, bucket_groups="single")


TRAINERS = [torch_ddp, torch_ddp_with_a_hook, torch_zero, torch_fsdp, ours_all_reduce, ours_reduce_scatter, ours_as_one_batch]


def train_all(rank: Rank) -> list[list[float]]:
    return [trainer(rank) for trainer in TRAINERS]


def test_whatever_trains_on_gloo_trains_on_the_fabric_with_the_same_losses(pool):
    on_gloo = pool.run(train_all, ranks=RANKS, timeout_s=200.0)  # imports much of torch

    assert run(pool, train_all, QUICK, timeout_s=200.0) == on_gloo


def test_in_timing_only_mode_everything_runs_and_stays_finite(pool):
    for losses in run(pool, train_all, EmulatedFabric(latency_s=1e-5, bytes_per_s=1e9, moves_data=False)):
        assert torch.tensor(losses).isfinite().all()


def gathered_twice(rank: Rank, is_in_place: bool) -> list[list[float]]:
    """Return the first element of each part after one gather and after another."""
    full = torch.full((200,), torch.nan)
    own = full[100 * rank.index : 100 * (rank.index + 1)] if is_in_place else torch.zeros(100)
    seen = []
    for round_number in range(2):
        own.fill_(10.0 * round_number + rank.index)
        gather_into(full, own, group=rank.group)
        seen.append(full[::100].tolist())
    return seen


@pytest.mark.parametrize("is_in_place", [True, False])
def test_timing_only_moves_a_gather_into_memory_that_may_hold_anything_and_then_no_more(pool, is_in_place):
    fabric = EmulatedFabric(latency_s=1e-5, bytes_per_s=1e9, moves_data=False)

    assert run(pool, gathered_twice, fabric, is_in_place) == [[[0.0, 1.0], [10.0, 1.0]], [[0.0, 1.0], [0.0, 11.0]]]


def parts_kept(rank: Rank) -> list[list[float]]:
    """Reduce-scatter in place, into other memory, and of a transposed matrix, whose memory begins with its first column."""
    seen = []
    for full in (torch.arange(200.0), torch.arange(200.0), torch.arange(200.0).view(2, 100).t()):
        own = torch.zeros(100) if seen else full[100 * rank.index : 100 * (rank.index + 1)]
        reduce_scatter_into(own, full, group=rank.group)
        seen.append(own[:2].tolist())
    return seen


def test_timing_only_leaves_each_rank_its_own_part_of_a_reduce_scatter(pool):
    fabric = EmulatedFabric(latency_s=1e-5, bytes_per_s=1e9, moves_data=False)

    # Transposed: element (row, column) is 100 column + row; the first part is rows 0 to 49, the second 50 to 99.
    assert run(pool, parts_kept, fabric) == [
        [[0.0, 1.0], [0.0, 1.0], [0.0, 100.0]],
        [[100.0, 101.0], [100.0, 101.0], [50.0, 150.0]],
    ]


# Collectives #


def collectives(rank: Rank) -> dict[str, Any]:
    """Everything torch.distributed offers on a group, with rank-dependent values."""
    own, n, group, seen = rank.index, rank.size, rank.group, {}

    def ramp(numel: int = 4) -> torch.Tensor:
        return torch.arange(float(numel)) + 10 * own

    seen["all_reduce"] = ramp()
    dist.all_reduce(seen["all_reduce"], op=dist.ReduceOp.MAX, group=group)
    seen["average"] = ramp()
    dist.all_reduce(seen["average"], op=dist.ReduceOp.AVG, group=group)
    seen["broadcast"] = ramp()
    dist.broadcast(seen["broadcast"], group_src=1, group=group)
    seen["reduce"] = ramp()
    dist.reduce(seen["reduce"], group_dst=1, group=group)
    if own == 0:  # what a reduction leaves on other ranks is undefined
        del seen["reduce"]
    seen["all_gather"] = [torch.zeros(4) for _ in range(n)]
    dist.all_gather(seen["all_gather"], ramp(), group=group)
    seen["gather"] = [torch.zeros(4) for _ in range(n)] if own == 1 else None
    dist.gather(ramp(), seen["gather"], group_dst=1, group=group)
    seen["scatter"] = torch.zeros(4)
    dist.scatter(seen["scatter"], [ramp(), ramp() + 1] if own == 0 else None, group_src=0, group=group)
    seen["reduce_scatter list"] = torch.zeros(2, 2)
    dist.reduce_scatter(seen["reduce_scatter list"], [ramp().view(2, 2), ramp().view(2, 2) + 1], group=group)
    seen["all_to_all"] = torch.zeros(2 * n)
    dist.all_to_all_single(seen["all_to_all"], ramp(2 * n), group=group)
    seen["uneven"] = torch.zeros(3 * n if own else n)
    dist.all_to_all_single(seen["uneven"], ramp(4), [3] * n if own else [1] * n, [1, 3], group=group)
    seen["objects"] = [None] * n
    dist.all_gather_object(seen["objects"], {"rank": own}, group=group)
    seen["object"] = [f"from {own}"]
    dist.broadcast_object_list(seen["object"], group_src=1, group=group)
    dist.barrier(group=group)
    seen["integers"] = torch.tensor([own, 2])
    work = dist.all_reduce(seen["integers"], group=group, async_op=True)
    seen["future"] = work.get_future().wait()
    seen["functional"] = funcol.all_reduce(ramp(), "sum", group) + 1
    return {name: plain(value) for name, value in {**seen, **shards(rank)}.items()}


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def shards(rank: Rank) -> dict[str, Any]:
    """In place and out of place, single and coalesced."""
    seen: dict[str, Any] = {}
    for name, is_in_place, dtype in [("in place", True, torch.float32), ("apart", False, torch.bfloat16)]:
        fulls = [(torch.arange(3.0 * rank.size) * (i + 1) + rank.index).to(dtype) for i in range(2)]
        own = [full.chunk(rank.size)[rank.index] if is_in_place else torch.zeros(3, dtype=dtype) for full in fulls]
        for full, part in zip(fulls, own, strict=True):
            reduce_scatter_into(part, full, group=rank.group)
        seen[f"scattered {name}"] = [shard.clone() for shard in own]
        for full, part in zip(fulls, own, strict=True):
            gather_into(full, part, group=rank.group)
        seen[f"gathered {name}"] = fulls
    mask = torch.tensor([rank.index == 0, True]).view(torch.uint8)
    dist.broadcast(mask, group_src=0, group=rank.group)
    pair = [torch.full((2,), float(rank.index)), torch.full((3,), rank.index + 5.0)]
    with dist._coalescing_manager(rank.group, async_ops=True) as manager:
        for tensor in pair:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=rank.group)
    manager.wait()
    return seen | {"mask": mask, "pair": pair}


def test_every_collective_gives_what_gloo_gives(pool):
    on_gloo = pool.run(collectives, ranks=RANKS)

    on_fabric = run(pool, collectives, QUICK)

    assert on_fabric == on_gloo


def sums(rank: Rank) -> dict[str, list[int]]:
    """The bits of sums over all ranks, of lengths that not all numbers of ranks divide where that is allowed."""
    seen = {}
    for op, dtype in product((dist.ReduceOp.SUM, dist.ReduceOp.AVG), (torch.float32, torch.bfloat16, torch.float64)):
        full = values(rank, 20_001, dtype)
        dist.all_reduce(full, op=op, group=rank.group)
        seen[f"all-reduce {op} {dtype}"] = bits(full)
        full, part = values(rank, 10_000 * rank.size, dtype), torch.empty(10_000, dtype=dtype)
        reduce_scatter_into(part, full, op=op, group=rank.group)
        seen[f"reduce-scatter {op} {dtype}"] = bits(part)
        assert torch.equal(full, values(rank, 10_000 * rank.size, dtype))  # the input is the caller's
    return seen


def values(rank: Rank, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank.index)).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor, added up in eight ways: equal for equal tensors, and small enough to be sent to the test."""
    flat = tensor.view(torch.uint8).to(torch.int64)
    return [int((flat * (torch.arange(flat.numel()) % prime + 1)).sum()) for prime in (2, 3, 5, 7, 11, 13, 17, 19)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_have_the_bits_that_gloo_gives(pool, ranks):
    on_gloo = pool.run(sums, ranks=ranks)

    assert run(pool, sums, QUICK, ranks=ranks) == on_gloo


def waited_for_in_two_orders(rank: Rank) -> list[float]:
    tensors = [torch.full((70_000,), float(rank.index + number)) for number in range(4)]
    works = [dist.all_reduce(tensor, group=rank.group, async_op=True) for tensor in tensors]
    for work in works if rank.index == 0 else works[::-1]:
        work.wait()
    return [tensor.unique().item() for tensor in tensors]


def test_ranks_may_wait_in_different_orders(pool):
    assert run(pool, waited_for_in_two_orders, QUICK) == [[1.0, 3.0, 5.0, 7.0]] * 2


def waited_for_by_one_rank(rank: Rank, how: str) -> float:
    """Only the first rank asks for the result; the other one goes on, to another collective."""
    tensor = torch.full((70_000,), rank.index + 1.0)
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
def test_a_rank_that_waits_does_not_need_the_others_to_wait(pool, how):
    assert run(pool, waited_for_by_one_rank, QUICK, how) == [3.0, 3.0]


def not_offered(rank: Rank) -> list[str]:
    texts = []
    other, group = 1 - rank.index, rank.group
    for call in (
        lambda: dist.send(torch.zeros(2), group_dst=other, group=group),
        lambda: dist.recv(torch.zeros(2), group_src=other, group=group),
        lambda: dist.recv(torch.zeros(2), group=group),
        lambda: group.split_group([0, 1]),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_what_would_pass_the_link_by_is_refused(pool):
    text = "the emulated fabric has no messages and no split_group: use collectives, and dist.new_group()"

    assert run(pool, not_offered, QUICK) == [[text] * 4] * 2


# Time #


def launch_parts(rank: Rank) -> Handle:
    """Send 2000 elements from the first rank to the second, which sends nothing but its own part."""
    received_numels, sent_numels = ((10, 0), (10, 2000)) if rank.index == 0 else ((2000, 30), (0, 30))
    received, sent = torch.zeros(sum(received_numels)), torch.zeros(sum(sent_numels))
    call = AllToAll(received, sent, received_numels, sent_numels)
    return ProcessGroupCommunicator(rank.group).launch([call], label="parts")


def timed(rank: Rank) -> dict[str, tuple[float, float]]:
    """Return when each operation was launched and when it was done on this rank, on the clock all ranks share."""
    full = torch.ones(1000)
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=rank.group, async_op=True),
        "broadcast": lambda: dist.broadcast(full, group_src=0, group=rank.group, async_op=True),
        "all_gather": lambda: dist.all_gather([torch.zeros(500)] * 2, torch.zeros(500), group=rank.group, async_op=True),
        "barrier": lambda: dist.barrier(group=rank.group, async_op=True),
        "uneven all_to_all": lambda: launch_parts(rank),
    }
    seen = {}
    for name, launch in operations.items():
        if rank.index == 1:
            time.sleep(0.02)  # the first rank waits for this one, too
        start_s = time.monotonic()
        work = launch()
        work.wait()
        seen[name] = (start_s, time.monotonic())
    start_s = time.monotonic()
    works = [dist.all_reduce(full, group=rank.group, async_op=True) for _ in range(3)]
    works[-1].get_future().wait()
    seen["three in a row"] = (start_s, time.monotonic())
    assert fabric_lateness(rank.group).num_done > 0
    return seen


# 4000 bytes at 1 MB/s over a ring of two: 2 ms per pass; 10 ms per step, one step per pass.
DURATIONS_S = {
    "all_reduce": 2 * 12e-3,
    "broadcast": 12e-3,
    "all_gather": 12e-3,
    "barrier": 2 * 10e-3,
    "uneven all_to_all": 10e-3 + 8e-3,  # 8000 bytes of the rank that sends most
    "three in a row": 3 * 2 * 12e-3,
}


@pytest.mark.parametrize("moves_data", [True, False])
def test_nothing_is_done_before_the_link_delivers(pool, moves_data):
    fabric = EmulatedFabric(latency_s=SLOW.latency_s, bytes_per_s=SLOW.bytes_per_s, moves_data=moves_data)

    first, second = run(pool, timed, fabric)

    for name, duration_s in DURATIONS_S.items():
        last_launch_s = max(first[name][0], second[name][0])
        assert min(first[name][1], second[name][1]) >= last_launch_s + duration_s, name


def cpu_while_waiting(rank: Rank) -> float:
    start_s = time.thread_time()
    dist.all_reduce(torch.ones(100_000), group=rank.group)  # 2 x (10 ms + 200 ms)
    return time.thread_time() - start_s


def test_who_waits_sleeps(pool):
    fabric = EmulatedFabric(latency_s=10e-3, bytes_per_s=1e6, moves_data=False)

    # The caller's thread worked for less than a tenth of the 420 ms it waited.
    assert max(run(pool, cpu_while_waiting, fabric)) < 42e-3


def two_in_a_row(rank: Rank) -> tuple[float, float]:
    with joined(rank, SLOW, ranks=4) as whole:
        start_s = time.monotonic()
        for work in [dist.all_reduce(torch.ones(250), group=whole, async_op=True) for _ in range(2)]:
            work.wait()
        return start_s, time.monotonic()


def test_four_ranks_pay_for_three_steps_a_pass(pool):
    spans = pool.run(two_in_a_row, ranks=4)

    # Each: 2 x (3 x 10 ms + 1000 bytes x 3/4 at 1 MB/s); two, one after the other.
    assert min(stop for _, stop in spans) >= max(start for start, _ in spans) + 2 * 2 * (30e-3 + 0.75e-3)


# Ends #


def names_of_threads(rank: Rank) -> tuple[list[str], list[str]]:
    with joined(rank, QUICK) as group:
        if group is None:
            return [], []
        dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
        during = [thread.name for thread in threading.enumerate()]
        del group
    return during, [thread.name for thread in threading.enumerate()]


def test_the_thread_ends_with_the_group(pool):
    for index, (during, after) in enumerate(pool.run(names_of_threads, ranks=4)[:RANKS]):
        assert f"megabucket-nic-{index}" in during
        assert f"megabucket-nic-{index}" not in after


def refused(rank: Rank) -> str:
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG, group=rank.group)
    return str(caught.value)


def test_what_gloo_refuses_is_refused_with_its_text(pool):
    texts = pool.run(refused, ranks=RANKS)

    assert run(pool, refused, QUICK) == texts
    assert all(texts)


def slow_wait(rank: Rank) -> tuple[list[bool], list[float]]:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, group=rank.group, async_op=True)
    is_completed = [work.is_completed()]
    with pytest.raises(RuntimeError, match="Operation timed out!"):
        work.wait(timedelta(seconds=0.1))
    is_completed.append(work.is_completed())
    work.wait()
    return [*is_completed, work.is_completed()], tensor.tolist()


def test_a_wait_may_give_up_and_be_repeated(pool):
    fabric = EmulatedFabric(latency_s=0.15, bytes_per_s=1e9)  # 2 x 0.15 s

    assert run(pool, slow_wait, fabric) == [([False, False, True], [2.0, 2.0])] * 2


# Lost ranks #


def wait_for_the_last(place: Place, moves_data: bool) -> None:
    """The last rank goes away; the others know only what liveness tells them."""
    fabric = EmulatedFabric(latency_s=1e-3, bytes_per_s=1e9, moves_data=moves_data)
    group = dist.new_group(list(range(place.size)), backend=fabric.register(), pg_options=fabric)
    config = mb.DistributedDataParallelConfig(heartbeat_s=0.3, dead_after_s=20.0, init_sync=False)
    model = mb.DistributedDataParallel(torch.nn.Linear(40, 50), config, process_group=group)
    model(torch.ones(1, 40)).sum().backward()
    model.zero_grad()
    place.report("ready")
    if place.index == place.size - 1:
        time.sleep(60)
    place.report("waiting")
    model(torch.ones(1, 40)).sum().backward()


@pytest.mark.parametrize("moves_data", [True, False], ids=["data moves", "timing only"])
def test_a_killed_rank_is_named_on_the_fabric_too(moves_data):
    with crew(wait_for_the_last, moves_data, ranks=3) as ours:
        ours.expect_all("ready")
        ours.expect_all("waiting", [0, 1])
        ours.signal(2, signal.SIGKILL)
        messages = ours.expect_all("raised", [0, 1])

    for message in messages:
        assert isinstance(message.content, PeerLostError), message.traceback
        assert message.content.ranks == (2,)


def launch_alone(place: Place) -> list[str]:
    """The second rank never launches; the first finds out at the time limit of the group, and a future does, too."""
    fabric = EmulatedFabric(latency_s=1e-3, bytes_per_s=1e9, moves_data=False)
    options = {"backend": fabric.register(), "pg_options": fabric, "timeout": timedelta(seconds=0.5)}
    groups = [dist.new_group([0, 1], **options) for _ in range(2)]
    texts = []
    if place.index == 0:
        work = dist.all_reduce(torch.ones(2000), group=groups[0], async_op=True)
        future = dist.all_reduce(torch.ones(2000), group=groups[1], async_op=True).get_future()
        dist.destroy_process_group(groups[1])
        for wait in (work.wait, future.wait):
            with pytest.raises(RuntimeError) as caught:
                wait()
            texts.append(str(caught.value))
    return texts


def test_a_wait_ends_at_the_time_limit_and_a_future_with_the_group():
    with crew(launch_alone, ranks=2) as ours:
        (limit, destroyed), nothing = [message.content for message in ours.expect_all("returned")]

    assert limit == "Timed out waiting 500ms for the other ranks to launch on the emulated fabric"
    assert "the process group of the emulated fabric was destroyed" in destroyed
    assert nothing == []


# The default group #


def with_default_group(place: Place, meeting: str) -> dict[str, Any]:
    """Two groups of one fabric at once, launched in two orders."""
    dist.destroy_process_group()
    fabric = EmulatedFabric(latency_s=20e-3, bytes_per_s=1e9, moves_data=False)
    store = dist.FileStore(meeting, place.size)
    fabric.init_process_group(store=store, rank=place.index, world_size=place.size, timeout=timedelta(seconds=20))
    groups = [dist.new_group(), dist.new_group()]
    start_s = time.monotonic()
    order = groups if place.index == 0 else groups[::-1]
    for work in [dist.all_reduce(torch.ones(2000), group=group, async_op=True) for group in order]:
        work.get_future().wait()
    span_s = (start_s, time.monotonic())
    del order
    losses = torch_fsdp(Rank(place.index, place.size, None))  # on the mesh that torch makes of the default group
    backends = {dist.get_backend(), *(dist.get_backend(group) for group in groups)}
    dist.destroy_process_group()
    return {
        "span_s": span_s,
        "losses": losses,
        "backends": backends,
        "threads": [thread.name for thread in threading.enumerate()],
    }


def test_groups_of_the_default_groups_fabric_share_its_links(tmp_path):
    with crew(with_default_group, str(tmp_path / "meeting"), ranks=2) as ours:
        first, second = [message.content for message in ours.expect_all("returned")]

    # 2 steps of 20 ms for each of the two, one after the other, although neither group knows of the other.
    assert min(first["span_s"][1], second["span_s"][1]) >= max(first["span_s"][0], second["span_s"][0]) + 2 * 2 * 20e-3
    assert first["backends"] == {"megabucket_fabric"}
    assert torch.tensor(first["losses"]).isfinite().all()
    assert not [name for name in first["threads"] + second["threads"] if "nic" in name]


def disagree_about_options(place: Place) -> str:
    fabric = EmulatedFabric(latency_s=1e-3, bytes_per_s=1e9)
    with pytest.raises(ConfigError) as caught:
        dist.new_group([0, 1], backend=fabric.register(), pg_options="fast")
    return str(caught.value)


def test_options_that_are_no_fabric_are_refused():
    with crew(disagree_about_options, ranks=2) as ours:
        texts = [message.content for message in ours.expect_all("returned")]

    assert texts == ["pg_options of a group on the emulated fabric must be an EmulatedFabric, got 'fast'"] * 2
