"""A process group whose collectives run on a stream of their own, as those of NCCL do. Every other rank says the same.

A launch lets that stream wait for the one that launches. Waiting for a work lets the current stream wait for it, not the host.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from fake_accelerator import COMM

from megabucket.comm.communicator import LaunchCount, RankState
from megabucket.comm.liveness.heartbeat import Heartbeat
from megabucket.comm.torch import store_of

NAME = "fakenccl"


class FakeWork:
    def __init__(self, device, stream):
        self._event = device.event().record(stream)

    def wait(self, timeout=None):
        assert timeout is None, "a wait with a time limit blocks the host, and ends the group when the time is over"
        self._event.wait()
        return True

    def is_completed(self):
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future


class FakeNccl(dist.ProcessGroup):
    """One rank of a group. ``device`` is that of the test which runs."""

    device = None
    num_aborts = 0
    stream_number = COMM
    _device_types = (torch.device("cpu"),)

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def getBackendName(self):
        return NAME

    name = getBackendName

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def _get_backend(self, device):
        return self

    def shutdown(self):
        pass

    def abort(self):
        FakeNccl.num_aborts += 1

    def _launch(self, operation, reads, writes, run):
        device = FakeNccl.device
        comm = device.stream(self.stream_number)
        comm.wait_stream(device.current())
        device.access(operation, reads=reads, writes=writes, stream=self.stream_number)
        with device.blind(), torch.no_grad():
            run()
        return FakeWork(device, comm)

    def _sum(self, tensor, op):
        if op.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._size)

    def allreduce(self, tensors, opts):
        return self._launch("all_reduce", (), tensors, lambda: [self._sum(tensor, opts) for tensor in tensors])

    allreduce_coalesced = allreduce

    def _gather(self, fulls, shards):
        def run():
            for full, shard in zip(fulls, shards, strict=True):
                full.view(self._size, -1).copy_(shard.clone().view(1, -1))

        return self._launch("all_gather", shards, fulls, run)

    def _scatter(self, shards, fulls, opts):
        def run():
            for shard, full in zip(shards, fulls, strict=True):
                shard.copy_(full.view(self._size, -1)[self._rank].clone())
                self._sum(shard, opts)

        return self._launch("reduce_scatter", fulls, shards, run)

    def all_gather_single(self, full, shard, opts):
        return self._gather([full], [shard])

    def all_gather_single_coalesced(self, fulls, shards, opts):
        return self._gather(fulls, shards)

    def reduce_scatter_single(self, shard, full, opts):
        return self._scatter([shard], [full], opts)

    def reduce_scatter_single_coalesced(self, shards, fulls, opts):
        return self._scatter(shards, fulls, opts)

    def all_to_all_single(self, received, sent, received_sizes, sent_sizes, opts):
        def run():
            start = sum(sent_sizes[: self._rank])
            for part in received.split(received_sizes):
                if part.numel():
                    part.copy_(sent[start : start + part.numel()])

        return self._launch("all_to_all", [sent], [received], run)

    def broadcast(self, tensors, opts):
        return self._launch("broadcast", (), tensors, lambda: None)

    # The names of these methods before torch 2.13.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


@contextmanager
def fake_nccl(size):
    """Make the default group of this process one of so many ranks."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            NAME, lambda options, _: FakeNccl(options.group_rank, options.group_size), extended_api=True, devices=["cpu"]
        )
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def other_ranks():
    """Signs of life of the other ranks of the default group: the one wrapper that is made inside waits for them."""
    group = dist.group.WORLD
    others = [
        Heartbeat(
            store_of(group),
            rank=rank,
            members=range(group.size()),
            state=RankState(),
            launches=LaunchCount(),
            every_s=0.1,
            is_wanted=lambda: True,
        )
        for rank in range(1, group.size())
    ]
    for heartbeat in others:
        heartbeat.launches.last = 1 << 40
    try:
        yield others
    finally:
        for heartbeat in others:
            heartbeat.stop()
