"""Ranks that wait for a device, as over NCCL, when one of them dies. Real processes; the device is a queue over gloo.

Its collectives are gloo's. A wait for one lets the queue wait, not the host; where gloo says that a rank is gone, NCCL would
say nothing and wait for ever, and so does the queue.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Place, crew

import megabucket as mb
from megabucket.comm import Accelerator
from megabucket.errors import PeerLostError

pytestmark = pytest.mark.dist

NAME = "queued"


class Queue:
    """The device. All is done in order, so when something waits for ever, everything behind it does."""

    stream_id = 0
    is_stuck = False

    def current_id(self) -> int:
        return self.stream_id

    def current(self) -> Any:
        return nullcontext(self)

    def record(self) -> Queue:
        return self

    def query(self) -> bool:
        return not self.is_stuck

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


QUEUE = Queue()


class QueuedWork:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> bool:
        try:
            self._work.wait()
        except RuntimeError:
            QUEUE.is_stuck = True
        return True


class QueuedGloo(dist.ProcessGroup):
    """A group whose collectives are done in the queue."""

    num_aborts = 0
    _device_types = (torch.device("cpu"),)

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def _get_backend(self, _: torch.device) -> QueuedGloo:
        return self

    def abort(self) -> None:
        QueuedGloo.num_aborts += 1

    def shutdown(self) -> None:
        pass

    def allreduce(self, *arguments: Any) -> QueuedWork:
        return QueuedWork(self._inner.allreduce(*arguments))

    def broadcast(self, *arguments: Any) -> QueuedWork:
        return QueuedWork(self._inner.broadcast(*arguments))

    def _allgather_base(self, *arguments: Any) -> QueuedWork:
        return QueuedWork(self._inner._allgather_base(*arguments))

    def _reduce_scatter_base(self, *arguments: Any) -> QueuedWork:
        return QueuedWork(self._inner._reduce_scatter_base(*arguments))


def train_until_one_dies(place: Place, is_sharded: bool, is_killed: bool) -> tuple[str, int]:
    Accelerator.of = staticmethod(lambda _: QUEUE)  # type: ignore[method-assign, assignment]
    dist.Backend.register_backend(
        NAME,
        lambda options, _: QueuedGloo(options.store, options.group_rank, options.group_size),
        extended_api=True,
        devices=["cpu"],
    )
    torch.manual_seed(0)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, bucket_size=1)
    ddp = mb.DistributedDataParallel(torch.nn.Linear(4, 4), config, process_group=dist.new_group(backend=NAME))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if is_sharded:
        optimizer = mb.DistributedOptimizer(optimizer, ddp)

    def train() -> None:
        ddp(torch.ones(4) * place.index).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    ddp.finish_param_sync()
    ddp.check_replicas()
    place.report("trained")
    if place.index == 1 and not is_killed:
        os._exit(1)
    if place.index == 1:
        time.sleep(60)
    with pytest.raises(PeerLostError) as caught:
        train()
    with pytest.raises(PeerLostError) as again:
        train()
    assert str(again.value) == str(caught.value)
    assert caught.value.ranks == (1,)
    return str(caught.value), QueuedGloo.num_aborts


@pytest.mark.parametrize(
    ("is_sharded", "is_killed"), [(False, False), (True, True)], ids=["all-reduce, os._exit", "reduce-scatter, SIGKILL"]
)
def test_the_ranks_that_are_left_name_the_one_that_died(is_sharded, is_killed):
    with crew(train_until_one_dies, is_sharded, is_killed, ranks=3) as ours:
        ours.expect_all("trained")
        if is_killed:
            time.sleep(0.5)  # the others wait
            ours.signal(1, signal.SIGKILL)
        texts, aborts = zip(*(message.content for message in ours.expect_all("returned", [0, 2])), strict=True)

    assert len(set(texts)) == 1
    assert "rank 1 died: process" in texts[0]
    assert aborts == (1, 1)
