"""A collective call that fails on one rank, before its exchange and in it: real processes on gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Rank, WorkerPool

import megabucket as mb

pytestmark = pytest.mark.dist

LABEL = "state_dict(): optimizer state"
TOLD_S = 5.0  # a tenth of a second; the rest is a busy machine


class Run:
    """One rank's wrapper and optimizer; the mean gradient of each step is 2."""

    def __init__(self, rank: Rank, layer: torch.nn.Module) -> None:
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, heartbeat_s=0.3, dead_after_s=1.5)
        self.rank, self.ddp = rank, mb.DistributedDataParallel(layer, config, process_group=rank.group)
        self.optimizer = mb.DistributedOptimizer(torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9), self.ddp)

    def step(self) -> list[float]:
        self.optimizer.zero_grad()
        (self.ddp(torch.ones(1, 256)) * (1 + 2 * self.rank.index)).sum().backward()
        self.optimizer.step()
        return sorted({round(value, 5) for value in next(self.ddp.module.parameters()).flatten().tolist()})

    def momentum(self) -> dict[str, Any]:
        state: dict[str, Any]
        (state,) = self.optimizer.sharding.updates[0].twin.state.values()
        return state


def zeros() -> torch.nn.Linear:
    layer = torch.nn.Linear(256, 1, bias=False)  # half of it on each rank
    torch.nn.init.zeros_(layer.weight)
    return layer


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return kind and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail_in_the_exchange(rank: Rank) -> dict[str, Any]:
    run = Run(rank, zeros())
    run.step()
    if rank.index == 1:  # its values cannot be copied, as where there is no memory for the whole state
        run.momentum()["momentum_buffer"] = run.momentum()["momentum_buffer"].to("meta")
    start_s = time.monotonic()
    errors = [error_of(run.optimizer.state_dict), error_of(run.optimizer.state_dict), error_of(run.step)]
    took_s = time.monotonic() - start_s
    run.ddp.detach()
    return {"errors": errors, "took_s": took_s, "after": Run(rank, run.ddp.module).step()}


def fail_before_the_exchange(rank: Rank) -> dict[str, Any]:
    run = Run(rank, zeros())
    run.step()
    if rank.index == 1:
        run.momentum()["table"] = {}
    error = error_of(run.optimizer.state_dict)
    if rank.index == 1:
        del run.momentum()["table"]
    after = run.step()
    run.optimizer.state_dict()
    run.ddp.detach()
    return {"error": error, "after": after}


def test_a_failure_in_the_exchange_of_a_call_is_told_to_the_rank_that_waits_in_it(pool: WorkerPool) -> None:
    waited, failed = pool.run(fail_in_the_exchange, ranks=2)

    kind, text = waited["errors"][0]
    assert kind == "WrapperBrokenError"
    own_kind, own_text = failed["errors"][0]
    assert (
        f"rank 1 stopped in state_dict(): optimizer state, with the others about to go on: {own_kind}: {own_text[:30]}" in text
    )
    assert waited["errors"][1:] == failed["errors"][1:] == [(kind, text)] * 2
    assert max(waited["took_s"], failed["took_s"]) < TOLD_S
    assert waited["after"] == failed["after"] == [-0.4]  # wrapped anew: 0 - 0.1 * 2, twice


def test_a_failure_before_the_exchange_of_a_call_is_told_at_the_gate_and_the_next_step_is_right(pool: WorkerPool) -> None:
    results = pool.run(fail_before_the_exchange, ranks=2)

    kind, text = results[0]["error"]
    assert [result["error"] for result in results] == [(kind, text)] * 2
    assert kind == "PeerFailedError"
    assert text.startswith("rank 1 failed in state_dict(): OptimizerParametersError")
    assert "table: dict" in text
    assert [result["after"] for result in results] == [[-0.58]] * 2  # 0 - 0.1 * 2 - 0.1 * (2 + 0.9 * 2)
