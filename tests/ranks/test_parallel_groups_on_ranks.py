"""Parallel groups on four real ranks. Deaths are named everywhere.

Experts that exchange tokens are equal to one process that holds them all; two replicas of two shards to one group of all ranks.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Place, crew
from moe_ranks import NUM_RANKS, Moe, groups_of, loss_of, own_experts, tokens_of
from pool import Rank
from torch.distributed.device_mesh import DeviceMesh

import megabucket as mb
from megabucket.ddp.groups import ParallelGroups
from megabucket.errors import LayoutMismatchError, PeerLostError

pytestmark = pytest.mark.dist

STEPS = 20
LEARNING_RATE = 3e-3
DEAD_NOTICED_S = 5.0  # a second each for the ranks that see it and for those that hear of it; the rest is a busy machine


@dataclass(frozen=True)
class Run:
    """What training in one process gives."""

    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    norms: list[float]
    thresholds: list[float]  # to clip at; 0 in every other step


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@cache
def in_one_process() -> Run:
    """Train the whole model on the batches of all ranks at once. In every other step gradients shrink to two fifths."""
    model = Moe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    run = Run(values_of(model), {}, [], [])
    for step in range(STEPS):
        batches = [tokens_of(rank, step) for rank in range(NUM_RANKS)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss_of(model, (inputs, targets)).backward()
        run.norms.append(float(torch.nn.utils.get_total_norm(param.grad for param in model.parameters())))
        run.thresholds.append(0.4 * run.norms[-1] if step % 2 else 0.0)
        if run.thresholds[-1]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.thresholds[-1])
        optimizer.step()
        optimizer.zero_grad()
    run.weights.update(values_of(model))
    return run


def train(
    rank: Rank, expert_parallel: int, fields: dict[str, Any], thresholds: list[float]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the norm of each step and the last weights of this rank."""
    exchanging, same = groups_of(rank.index, expert_parallel)
    model = Moe(own_experts(rank.index, expert_parallel), exchanging)
    config = mb.DistributedDataParallelConfig(bucket_size=400, **fields)
    ddp = mb.DistributedDataParallel(model, config, groups=ParallelGroups({"dense": rank.group, "expert": same}))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), ddp)
    norms = []
    for step, threshold in enumerate(thresholds):
        loss_of(ddp, tokens_of(rank.index, step)).backward()
        if config.grad_reduction == "sum":
            ddp.finish_grad_sync()
            ddp.scale_gradients(1 / NUM_RANKS)
        optimizer.clip_grad = threshold
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    ddp.check_replicas()
    ddp.detach()
    return norms, values_of(model)


SHARDED = {"use_distributed_optimizer": True}
BLOCKING = {"overlap_grad_reduce": False}


SUM, AVG = {"grad_reduction": "sum"}, {"average_in_collective": True}
CELLS = list(product((2, 4), ({}, SHARDED), ({}, BLOCKING), ({}, SUM, AVG)))


def cells(*by_day: int) -> pytest.MarkDecorator:
    """Give a test ranks of an expert's group and fields of the config; of all combinations those by day are numbers."""
    params = [(ranks, mode | overlap | way) for ranks, mode, overlap, way in CELLS]
    marks = [() if index in by_day else pytest.mark.nightly for index in range(len(CELLS))]
    return pytest.mark.parametrize(
        ("expert_parallel", "fields"),
        [pytest.param(*one, marks=mark) for one, mark in zip(params, marks, strict=True)],
        ids=str,
    )


@cells(2, 7, 15, 20)
def test_experts_on_several_ranks_train_as_in_one_process(pool, expert_parallel, fields):
    check_experts(pool, expert_parallel, fields)


def test_experts_train_as_in_one_process_where_the_gather_overlaps(pool):
    check_experts(pool, 2, SHARDED | {"overlap_param_gather": True})


def check_experts(pool, expert_parallel, fields):
    expected = in_one_process()

    results = pool.run(train, expert_parallel, fields, expected.thresholds, ranks=NUM_RANKS)

    seen = set()
    for rank, (norms, weights) in enumerate(results):
        assert norms == pytest.approx(expected.norms, rel=1e-5)
        seen |= weights.keys()
        for name, values in weights.items():
            moved = (expected.weights[name] - expected.initial[name]).abs().max()
            difference = (values - expected.weights[name]).abs().max()
            assert difference <= 1e-4 * moved, f"{name} on rank {rank}: {difference / moved:.1e} of the way"
    assert seen == expected.weights.keys()


def wrap_with_another_group(rank: Rank, odd: str) -> str:
    """Return the error of a wrapper whose second rank has another expert group."""
    solo = [dist.new_group([index]) for index in range(NUM_RANKS)][rank.index]
    groups: dict[str, Any] = {"dense": rank.group, "expert": rank.group}
    if rank.index == 1:
        others = {"ranks": solo, "divisor": mb.ReductionGroup(rank.group, divisor=3.0)}
        groups = {**groups, "expert": others[odd]} if odd in others else {"dense": rank.group}
    with pytest.raises(LayoutMismatchError) as caught:
        mb.DistributedDataParallel(torch.nn.Linear(2, 2), groups=groups)
    return str(caught.value)


@pytest.mark.parametrize(
    ("odd", "text"),
    [("ranks", "; rank 1, divisor="), ("name", "nothing on rank 1"), ("divisor", "divisor=3.0")],
)
def test_a_group_that_is_another_one_on_one_rank_is_named_before_anybody_waits_for_it(pool, odd, text):
    texts = pool.run(wrap_with_another_group, odd, ranks=NUM_RANKS)

    assert len(set(texts)) == 1
    assert "expert: ranks 0, 1, 2, 3, divisor=None" in texts[0]
    assert text in texts[0]


# Shards inside, replicas across #


def replicated_net() -> torch.nn.Module:
    """Return layers of which one is large enough to be copied between processes of one host."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 512), torch.nn.GELU(), torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 4)]
    return torch.nn.Sequential(*layers)


def two_replicas(rank: int) -> mb.ReductionGroup:
    """Make all groups, on all ranks, and return that of ``rank``."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return mb.ReductionGroup(made[rank // 2], replicate=made[2 + rank % 2])


def train_replicated(
    rank: Rank, way: str, fields: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], Counter[tuple[str, int]]]:
    """Return the norms, the last weights, and the bytes that a step must send, by kind and number of ranks.

    Args:
        way: ``plain`` has one group of all ranks; else two replicas of two shards, given as a mesh or as two groups.
    """
    where: dict[str, Any] = {"process_group": rank.group}
    if way == "mesh":
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
        where = {"process_group": mesh}
    elif way == "groups":
        where = {"groups": {"dense": two_replicas(rank.index)}}
    config = mb.DistributedDataParallelConfig(bucket_size=400, use_distributed_optimizer=True, step_traces=True, **fields)
    ddp = mb.DistributedDataParallel(replicated_net(), config, **where)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), ddp, clip_grad=0.05)
    norms = []
    for step in range(8):
        generator = torch.Generator().manual_seed(100 * step + rank.index)
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    ddp.finish_param_sync()
    trace = ddp.last_step_trace
    assert trace is not None
    sent: Counter[tuple[str, int]] = Counter()
    for record in trace.collectives:
        if record.label.startswith("bucket"):
            sent[record.kind.value, record.num_ranks] += round(record.wire_bytes)
    ddp.check_replicas()
    ddp.detach()
    return norms, values_of(ddp.module), sent


@pytest.mark.parametrize(
    ("way", "fields"),
    [
        ("mesh", {}),
        ("groups", {"average_in_collective": True, "overlap_param_gather": True}),
        ("groups", BLOCKING | {"read_peer_memory": False}),
    ],
    ids=str,
)
def test_two_replicas_of_two_shards_train_as_one_group_of_four_ranks(pool, way, fields):
    initial = values_of(replicated_net())
    plain = pool.run(train_replicated, "plain", fields, ranks=NUM_RANKS)

    results = pool.run(train_replicated, way, fields, ranks=NUM_RANKS)

    (expected_norms, expected, sent), *_ = plain
    ((kind, _), bytes_of_one_group), *_ = sent.items()
    num_bytes = bytes_of_one_group * 4 // 3  # a reduce-scatter of four ranks sends three quarters of the buffer
    assert kind == "reduce_scatter"
    for norms, weights, own_sent in results:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        # Half of the buffer inside; over the replicas an all-reduce of half a buffer, which sends all of that half.
        assert own_sent == {("reduce_scatter", 2): num_bytes // 2, ("all_reduce", 2): num_bytes // 2}
        for name, values in weights.items():
            assert torch.equal(values, results[0][1][name])
            moved = (expected[name] - initial[name]).abs().max()
            assert (values - expected[name]).abs().max() <= 1e-4 * moved, name


# 16 bits #


def in_bf16(parts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return the weights of one process that trains in bfloat16 with float32 gradients and main parameters.

    Args:
        parts: which ranks' batches go through the model together; gradients of parts are added in their order.
    """
    model = Moe().to(torch.bfloat16)
    mains = {name: param.detach().float() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(mains.values(), lr=LEARNING_RATE)
    for step in range(STEPS):
        for main in mains.values():
            main.grad = torch.zeros_like(main)
        for ranks in parts:
            batches = [tokens_of(rank, step) for rank in ranks]
            inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
            model.zero_grad()
            (loss_of(model, (inputs, targets)) * len(ranks) / NUM_RANKS).backward()
            for name, param in model.named_parameters():
                mains[name].grad += param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(mains[name])
    return values_of(model)


def train_bf16(rank: Rank, expert_parallel: int, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the last weights of this rank."""
    exchanging, same = groups_of(rank.index, expert_parallel)
    model = Moe(own_experts(rank.index, expert_parallel), exchanging).to(torch.bfloat16)
    config = mb.DistributedDataParallelConfig(bucket_size=400, **fields)
    ddp = mb.DistributedDataParallel(model, config, groups=ParallelGroups({"dense": rank.group, "expert": same}))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), ddp)
    for step in range(STEPS):
        scale = NUM_RANKS if ddp.ddp_config.grad_reduction == "sum" else 1
        (loss_of(ddp, tokens_of(rank.index, step)) / scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = values_of(model)
    ddp.detach()
    return weights


@cells(0, 18)
def test_in_bf16_ranks_stay_as_near_as_one_process_stays_to_itself(pool, expert_parallel, fields):
    """In 16 bits it matters how many tokens are summed at once; ranks sum those that their experts get."""
    reference = in_bf16([[0], [1], [2], [3]])
    others = [in_bf16([[0, 1, 2, 3]]), in_bf16([[1, 3], [0, 2]]), in_bf16([[0, 1], [2, 3]])]

    def distances(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the largest difference to the reference, and the root of the mean square."""
        differences = torch.cat([(values.double() - reference[name]).flatten() for name, values in weights.items()])
        return torch.stack([differences.abs().max(), differences.square().mean().sqrt()])

    results = pool.run(train_bf16, expert_parallel, fields, ranks=NUM_RANKS)

    ours = distances({name: values for weights in results for name, values in weights.items()})
    bounds = torch.stack([distances(other) for other in others]).max(0).values
    print(f"largest and root mean square: {ours.tolist()}, of one process {bounds.tolist()}")
    assert (ours <= bounds).all()


# A rank that dies #


def train_until_one_dies(place: Place, where: str) -> None:
    """Take steps; in the second one the last rank stops for good at a place, until the test kills it."""
    if where == "update of a replica":  # two groups over the same ranks
        model, groups = Moe(), dict.fromkeys(("dense", "expert"), two_replicas(place.index))
    else:
        exchanging, same = groups_of(place.index, 2)
        model, groups = Moe(own_experts(place.index, 2), exchanging), {"dense": dist.group.WORLD, "expert": same}
    config = mb.DistributedDataParallelConfig(
        bucket_size=400, use_distributed_optimizer=True, heartbeat_s=0.3, dead_after_s=10.0, straggler_warning_s=None
    )
    ddp = mb.DistributedDataParallel(model, config, groups=groups)
    inner = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE)
    optimizer = mb.DistributedOptimizer(inner, ddp)
    step = 0

    def stop(*_: Any) -> None:
        if step == 1:
            place.report("there")
            time.sleep(60)

    if place.index == NUM_RANKS - 1:
        if where == "backward":
            next(model.experts.parameters()).register_hook(stop)  # before the gradients of tokens are sent back
        else:
            inner.register_step_post_hook(stop)  # before parameters are gathered
    for step in range(3):
        try:
            loss_of(ddp, tokens_of(place.index, step)).backward()
        except RuntimeError as error:
            place.report("failed", str(error))
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("a step went on without the dead rank")


def kill_the_last_rank(where: str) -> list[PeerLostError]:
    """Kill the last rank in a phase; return the errors of all others, which must name it in time."""
    alive = list(range(NUM_RANKS - 1))
    with crew(train_until_one_dies, where, ranks=NUM_RANKS) as ours:
        ours.expect(NUM_RANKS - 1, "there")
        time.sleep(0.3)  # the others come to their waits
        killed_s = ours.signal(NUM_RANKS - 1, signal.SIGKILL)
        if where == "backward":
            # Its peer in the exchange of tokens, which is the program's own, and with which gloo knows no more than that.
            assert "Connection closed by peer" in ours.expect(2, "failed").content
        messages = ours.expect_all("raised", alive)

    print("noticed after", [f"{message.at_s - killed_s:.3f} s" for message in messages])
    for message in messages:
        assert isinstance(message.content, PeerLostError), message.traceback
        assert message.content.ranks == (NUM_RANKS - 1,)
        assert message.content.states[0].startswith("died: process ")
    assert max(message.at_s for message in messages) - killed_s <= DEAD_NOTICED_S
    return [message.content for message in messages]


@pytest.mark.nightly
def test_a_rank_that_dies_while_others_wait_for_its_experts_is_named_on_all_of_them():
    errors = kill_the_last_rank("update")

    # Which gather of which group finds it first depends on the clock; the others hear of it.
    assert all("waiting for param gather" in error.during for error in errors)


@pytest.mark.nightly
def test_a_rank_that_dies_in_the_backward_of_its_expert_is_named_on_all_others():
    errors = kill_the_last_rank("backward")

    assert all("fence" in error.during for error in errors)


def test_a_rank_that_dies_in_its_update_is_named_in_both_replicas():
    errors = kill_the_last_rank("update of a replica")

    # Its own replica waits for its shards; the other one has taken the step and needs it in the next one, or hears of it.
    assert "waiting for param gather" in errors[2].during or "fence" in errors[2].during
