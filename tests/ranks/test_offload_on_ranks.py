"""``ddp.offload()`` and ``ddp.onload()`` on gloo: bits, receive memory, ranks that stay away or die."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import dtensor_models
import pytest
import torch
import torch.distributed as dist
from crew import Place, crew
from dtensor_models import mesh_of
from pool import FOUR_AT_NIGHT, Rank

import megabucket as mb
from megabucket.comm import samehost
from megabucket.errors import CallMismatchError, PeerLostError, PhaseError

pytestmark = pytest.mark.dist

STEPS = 4


def model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 60), torch.nn.Tanh(), torch.nn.Linear(60, 24)).to(dtype)


def wrapped(rank: Rank | None, dtype: torch.dtype, **config: Any) -> tuple[mb.DistributedDataParallel, mb.DistributedOptimizer]:
    fields = mb.DistributedDataParallelConfig(bucket_size=600, **config)
    ddp = mb.DistributedDataParallel(model(dtype), fields, process_group=None if rank is None else rank.group)
    return ddp, mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp, clip_grad=0.5)


def take_step(ddp: mb.DistributedDataParallel, optimizer: mb.DistributedOptimizer, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 24, generator=generator).to(next(ddp.parameters()).dtype)
    ddp(inputs).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank: Rank, dtype: torch.dtype, config: dict[str, Any], flags: dict[str, bool] | None, copies: bool) -> Any:
    """Return weights and state after some steps, with phases or without; small buckets are copied on one host as well."""
    with ExitStack() as stack:
        if copies:
            stack.enter_context(mock.patch.object(samehost, "LEAST_BYTES", 0))
        ddp, optimizer = wrapped(rank, dtype, read_peer_memory=copies, **config)
        rooms = []
        for step in range(STEPS):
            take_step(ddp, optimizer, step, rank.index)
            rooms.append(room_of(ddp))
            if flags is not None:
                with ddp.offload(**flags) as given:
                    assert given.held == [], given.held
                    assert given.freed_bytes["grads"] > 0
        ddp.finish_param_sync()
        assert len(set(rooms)) == 1
        found = [param.detach().clone() for param in ddp.parameters()], optimizer.state_dict()["state"]
        ddp.detach()
        return found


def room_of(ddp: mb.DistributedDataParallel) -> int:
    """The receive memory that batches of small all-reduces may still take."""
    communicator = getattr(ddp.communicator, "inner", ddp.communicator)
    return int(communicator._room_bytes)


@pytest.mark.parametrize("ranks", [2, FOUR_AT_NIGHT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copies", [False, True], ids=["sockets", "same host"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_the_bits_of_a_run_with_phases_are_those_of_a_run_without(pool, ranks, dtype, copies, is_sharded):
    config = {"use_distributed_optimizer": is_sharded, "overlap_param_gather": is_sharded}
    config["grad_reduce_in_fp32"] = not copies

    expected = pool.run(train, dtype, config, None, copies, ranks=ranks)
    found = pool.run(train, dtype, config, {"params": True}, copies, ranks=ranks)

    for (weights, state), (other_weights, other_state) in zip(found, expected, strict=True):
        assert all(map(torch.equal, weights, other_weights))
        assert state.keys() == other_state.keys()
        for index, values in state.items():
            assert all(torch.equal(value, other_state[index][key]) for key, value in values.items())


def train_dtensors(_: Rank, has_phases: bool) -> Any:
    """Train a tensor-parallel model; what a caller keeps of a DTensor holds its memory."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    ddp, optimizer = dtensor_models.wrapped(mesh, "sequence parallel", use_distributed_optimizer=True)
    norms = []
    for step in range(3):
        norms += dtensor_models.train(ddp, optimizer, mesh["dp"], range(step, step + 1))
        optimizer.zero_grad()
        if has_phases:
            shown = ddp.module.up.weight
            with ddp.offload(params=True) as given:
                assert "'up.weight'" in str(given.held), given.held
            del shown
            with ddp.offload(params=True) as given:
                assert given.held == [], given.held
    ddp.finish_param_sync()
    weights = [dtensor_models.whole(param).clone() for param in ddp.module.state_dict().values()]
    ddp.detach()
    return norms, weights


@pytest.mark.nightly
def test_the_bits_of_dtensors_are_those_of_a_run_without(pool):
    found, expected = (pool.run(train_dtensors, flag, ranks=4) for flag in (True, False))

    for (norms, weights), (other_norms, other_weights) in zip(found, expected, strict=True):
        assert norms == other_norms
        assert all(map(torch.equal, weights, other_weights))


def many_phases(rank: Rank, num_phases: int) -> list[tuple[int, int]]:
    ddp, optimizer = wrapped(rank, torch.bfloat16, use_distributed_optimizer=False)
    sizes = []
    for step in range(num_phases):
        take_step(ddp, optimizer, step, rank.index)
        with ddp.offload(params=True) as given:
            assert given.held == [], given.held
        if step in (num_phases // 2, num_phases - 1):
            sizes.append((room_of(ddp), int(Path("/proc/self/statm").read_text().split()[1])))
    ddp.detach()
    return sizes


@pytest.mark.nightly
def test_receive_memory_and_the_process_do_not_grow_over_two_hundred_phases(pool):
    for (room, pages), (last_room, last_pages) in pool.run(many_phases, 200, ranks=2, timeout_s=110):
        assert room == last_room
        assert last_pages < pages + 512  # 2 MiB


def stay_away(rank: Rank) -> list[str]:
    """One rank does not offload, then one does not onload."""
    ddp, optimizer = wrapped(rank, torch.float32, use_distributed_optimizer=True)
    take_step(ddp, optimizer, 0, rank.index)
    texts = []
    with pytest.raises(CallMismatchError) as found:
        ddp.check_replicas() if rank.index else ddp.offload()
    texts.append(str(found.value))
    ddp.offload()
    if rank.index:
        with pytest.raises(PhaseError) as refused:
            ddp.check_replicas()
        texts.append(str(refused.value))
    ddp.onload()
    take_step(ddp, optimizer, 1, rank.index)
    ddp.check_replicas()
    ddp.detach()
    return texts


def test_a_rank_that_stays_away_is_named_and_all_go_on(pool):
    (first,), (second, refused) = pool.run(stay_away, ranks=2)

    assert first == second
    assert "offload() on rank 0; check_replicas() on rank 1" in first
    assert "Call ddp.onload() on every rank" in refused


def wait_for_the_lost(place: Place) -> list[torch.Tensor]:
    ddp, optimizer = wrapped(None, torch.bfloat16, use_distributed_optimizer=True)
    take_step(ddp, optimizer, 0, place.index)
    ddp.finish_param_sync()
    before = [param.detach().clone() for param in ddp.parameters()]
    ddp.offload(params=True)
    place.report("offloaded")
    place.wait_for_word()
    with pytest.raises(PeerLostError) as found:
        ddp.onload()
    with pytest.raises(PeerLostError):
        ddp.onload()
    place.report("lost", str(found.value))
    module = ddp.detach()
    assert all(map(torch.equal, module.parameters(), before))
    assert all(type(param) is torch.nn.Parameter for param in module.parameters())
    module(torch.ones(2, 24).bfloat16()).sum().backward()
    dist.destroy_process_group()
    return before


def test_a_rank_that_is_killed_in_between_is_named_by_the_next_call_and_detach_gives_all_weights_back():
    with crew(wait_for_the_lost, ranks=2) as ours:
        ours.expect_all("offloaded")
        ours.signal(1, signal.SIGKILL)
        ours.tell(0)
        text = ours.expect(0, "lost").content
        ours.expect(0, "returned")

    assert "rank 1" in text
    assert "onload()" in text
