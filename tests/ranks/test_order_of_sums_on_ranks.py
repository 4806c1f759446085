"""With ``reduction_order="rank"`` no bit depends on the bucket plan, the mode, or how ranks exchange their values, on gloo."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from pool import FOUR_AT_NIGHT, Rank
from sum_orders import Case, Trained, cases_and_plans, check, groups_of, in_rank_order, members_of, train

from megabucket.comm import (
    AllReduce,
    Call,
    ReduceOp,
    ReduceScatter,
    SameHostCommunicator,
    discover_communicator,
    gloo,
    samehost,
    with_same_host_copies,
)
from megabucket.comm.samehost import _Copies

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WAYS = ("copies", "sockets", "plain")


@contextlib.contextmanager
def exchanging(way: str) -> Iterator[None]:
    """Copy between processes, also what is small; or use sockets; or torch's own collectives where there are exchanges."""
    where, name = (gloo, "_MOST_RANKS") if way == "plain" else (samehost, "LEAST_BYTES")
    with mock.patch.object(where, name, 0):
        yield


def differing_sums(rank: Rank, way: str) -> list[str]:
    """Return what is not the sum, or the mean, in rank order, to the bit."""
    differing = []
    own = discover_communicator(rank.group)
    communicator = with_same_host_copies(own, torch.device("cpu")) if way == "copies" else own
    if not isinstance(communicator, SameHostCommunicator):  # perhaps the kernel lets no process read another one's memory
        way = "sockets"
    for dtype, numel, op, scatters in itertools.product(DTYPES, (1, 128, 70_003), (ReduceOp.SUM, ReduceOp.AVG), (True, False)):
        generators = [torch.Generator().manual_seed(97 * source + numel) for source in range(rank.size)]
        values = [torch.randn(numel * rank.size, generator=one).to(dtype) for one in generators]
        total = in_rank_order([value.float() for value in values] if dtype.itemsize == 2 else values)
        expected = (total / rank.size if op is ReduceOp.AVG else total).to(dtype).div_(3.0)
        full = torch.empty_like(values[0])
        shard = full.view(rank.size, -1)[rank.index]
        call: Call = ReduceScatter(shard, full, op, divisor=3.0, in_rank_order=True)
        if not scatters:
            call = AllReduce(full, op, 3.0, in_rank_order=True)
        batch = communicator.prepare([call])
        for calls in (batch, batch, [call]):
            full.copy_(values[rank.index])
            communicator.launch(calls, label="sum").wait()
            found, wanted = (shard, expected.view(rank.size, -1)[rank.index]) if scatters else (full, expected)
            if not torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8)):
                differing.append(f"{way} {dtype} {numel} {op} {scatters}")
        if isinstance(batch.plan, _Copies) != (way == "copies"):
            differing.append(f"{way} has gone another way")
    dist.barrier(group=rank.group)
    communicator.close()
    return differing


def sums_in(rank: Rank, way: str) -> list[str]:
    with exchanging(way):
        return differing_sums(rank, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_in_rank_order_add_in_rank_order_to_the_bit_on_every_way(pool, ranks, way):
    assert pool.run(sums_in, way, ranks=ranks) == [[]] * ranks


def train_in_ways(rank: Rank, case: Case, plans: list[dict[str, Any]], ways: list[str]) -> list[Trained]:
    """Train by each plan, in a way of its own."""
    mine: dict[str, Any] = {"all": rank.group}
    for name, lists in members_of(case).items():
        for ranks in lists if name != "all" else ():
            group = dist.new_group(ranks)
            if rank.index in ranks:
                mine[name] = group
    found = []
    for plan, way in zip(plans, ways, strict=True):
        with exchanging(way):
            groups = groups_of(case, mine)
            ranks_of_plan = {"process_group": rank.group} if groups is None else {"groups": groups}
            found.append(train(case, rank.index, {"read_peer_memory": way == "copies", **plan}, ranks_of_plan))
    return found


def check_in_ways(pool: Any, case: Case, plans: list[dict[str, Any]], ways: list[str]) -> None:
    by_rank = pool.run(train_in_ways, case, plans, ways, ranks=case.size)

    check(case, [[of_rank[index] for of_rank in by_rank] for index in range(len(plans))])


SHARDED = {"use_distributed_optimizer": True}
PLANS = [{"bucket_cuts": ()}, {"bucket_size": 1}, {"bucket_cuts": (), **SHARDED}, {"bucket_size": 1, **SHARDED}]


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, FOUR_AT_NIGHT])
def test_plans_modes_and_exchanges_train_alike(pool, ranks, is_narrow):
    dtype = torch.bfloat16 if is_narrow else torch.float32
    case = Case(size=ranks, numels=(700, 3_000, 50, 900), clip_grad=1e-2 * is_narrow, dtype=dtype, is_narrow=is_narrow)

    check_in_ways(pool, case, [*PLANS, PLANS[3]], ["copies", "sockets", "sockets", "copies", "plain"])


@pytest.mark.parametrize("form", ["experts", "replicas"])
def test_groups_and_replicas_train_alike(pool, form):
    plans = [{**plan, **SHARDED} if form == "replicas" else plan for plan in PLANS[:2]]

    check_in_ways(pool, Case(size=4, numels=(700, 3_000, 50), form=form, clip_grad=1e-2), plans, ["copies", "sockets"])


@pytest.mark.nightly
@settings(max_examples=100)
@given(drawn=cases_and_plans(num_plans=3, sizes=(2, 3, 4)))
def test_random_plans_and_models_train_alike(pool, drawn):
    case, plans = drawn

    check_in_ways(pool, case, plans, list(WAYS))
