"""Two wrappers on one group, in every order: real processes. Other ways to mix ranks up are in tests/faults."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Place, crew
from pool import Rank

import megabucket as mb
from megabucket.errors import WrapperBrokenError

pytestmark = pytest.mark.dist

TOLD_S = 5.0  # a wait is written to the board after a second; the rest is a busy machine
INTERRUPTED_TOLD_S = 2.0
MODES = [{}, {"use_distributed_optimizer": True}]


class Vector(torch.nn.Module):
    """Has gradients that are its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, factor: float) -> torch.Tensor:
        return (factor * self.weight).sum()


def wrapped(group: dist.ProcessGroup | None = None, **fields: Any) -> mb.DistributedDataParallel:
    config = mb.DistributedDataParallelConfig(heartbeat_s=0.3, dead_after_s=1.5, straggler_warning_s=None, **fields)
    return mb.DistributedDataParallel(Vector(), config, process_group=group)


def own_grads(ddp: mb.DistributedDataParallel) -> list[float]:
    """Return the values of the gradients that this rank is responsible for."""
    rank, is_sharded = ddp.communicator.rank, ddp.ddp_config.use_distributed_optimizer
    buckets = [(buffer.grad_data, bucket) for buffer in ddp.param_and_grad_buffers for bucket in buffer.buckets]
    shards = [bucket.shard(grad_data, rank) if is_sharded else grad_data for grad_data, bucket in buckets]
    return sorted(set(torch.cat(shards).tolist()) - {0.0})


# Two wrappers #


def step_in_orders(rank: Rank, fields: dict[str, Any]) -> list[dict[str, list[float]]]:
    return [step_in_order(rank, order, fields) for order in ORDERS]


def step_in_order(rank: Rank, order: tuple[str, ...], fields: dict[str, Any]) -> dict[str, list[float]]:
    """Do the forwards (a, b), backwards (A, B) and finishes (1, 2) of two wrappers in an order, in two steps."""
    ddps = {"a": wrapped(rank.group, **fields), "b": wrapped(rank.group, **fields)}
    factors, losses = {"a": 1.0, "b": 10.0}, {}
    for step in range(2):
        for what in order:
            name = what.lower().translate({ord("1"): "a", ord("2"): "b"})
            if what in "ab":
                losses[name] = ddps[name](factors[name] * (1 + rank.index + step))
            elif what in "AB":
                losses[name].backward()
            else:
                ddps[name].finish_grad_sync()
        grads = {name: own_grads(ddp) for name, ddp in ddps.items()}
        for ddp in ddps.values():
            ddp.zero_grad()
    for ddp in ddps.values():
        ddp.detach()
    return grads


ORDERS = [
    order
    for order in permutations("aAbB12")
    if all(order.index(first) < order.index(then) for first, then in ("aA", "bB", "A1", "B2"))
]


@pytest.mark.parametrize("fields", MODES, ids=["all-reduce", "reduce-scatter"])
def test_two_wrappers_on_one_group_do_not_mix_whatever_the_order_that_all_ranks_keep(pool, fields):
    assert len(ORDERS) == 20  # the ways to shuffle two sequences of three

    first, second = pool.run(step_in_orders, fields, ranks=2)

    # The means of 2 and 3, the factors of the second step on two ranks, and of 20 and 30. The first shard holds all eight.
    expected = {"a": [2.5], "b": [25.0]}
    assert first == [expected] * 20
    assert second == [{"a": [], "b": []} if fields else expected] * 20


def step_in_another_order(place: Place, fields: dict[str, Any]) -> list[str]:
    ddps = [wrapped(**fields), wrapped(**fields)]
    texts = []
    place.report("ready")
    for number in (0, 1) if place.index == 0 else (1, 0):
        try:
            ddps[number](1.0).backward()
            ddps[number].finish_grad_sync()
        except WrapperBrokenError as error:  # noqa: PERF203
            with pytest.raises(WrapperBrokenError) as again:  # nothing goes over it any more
                ddps[number].finish_grad_sync()
            texts += [str(error), str(again.value)]
            break
    place.report("told", texts)
    for ddp in ddps:
        ddp.detach()
    return texts


@pytest.mark.parametrize("fields", MODES, ids=["all-reduce", "reduce-scatter"])
def test_ranks_that_step_two_wrappers_in_different_orders_are_told_so_and_both_are_broken(fields):
    with crew(step_in_another_order, fields, ranks=2) as ours:
        ready = ours.expect_all("ready")
        told = ours.expect_all("told")
        ours.expect_all("returned")

    print("told after", [f"{message.at_s - ready[0].at_s:.1f} s" for message in told])
    for message in told:
        assert [text.count("ranks wait for one another") for text in message.content] == [1, 1]
        assert "rank 0 waits for" in message.content[0]
        assert "rank 1 waits for" in message.content[0]
    assert max(message.at_s for message in told) - max(message.at_s for message in ready) <= TOLD_S
