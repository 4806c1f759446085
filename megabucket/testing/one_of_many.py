"""One rank of any number, alone in a process, as if all others said the same: counts and costs of a rank at scale.

Real code runs here, from the agreement to the optimizer's step, with 16,384 ranks as with two; only the other ranks and the
network are missing. What it moves and how often it asks is exact. Values are those of ranks that are all alike, so a sum is
this rank's share times their number, and gathered parameters are of no use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megabucket.comm.port import AllGather, AllReduce, Call, Communicator, DoneHandle, Handle, ReduceOp, ReduceScatter
from megabucket.trace.recorder import Recorder


class OneOfMany(Communicator):
    """The communicator of one rank whose peers all contribute what it does. Nothing is sent.

    >>> communicator = OneOfMany(size=1_000)
    >>> tensor = torch.tensor([3.0])
    >>> communicator.launch([AllReduce(tensor)], label="sum").wait()
    >>> tensor
    tensor([3000.])
    """

    def __init__(self, *, size: int, rank: int = 0, recorder: Recorder | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in a world of {size} (ranks count from 0)")
        super().__init__(rank=rank, size=size, recorder=recorder)

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:  # noqa: ARG002 - the port's
        with torch.no_grad():
            for call in calls:
                self._run(call)
        return DoneHandle()

    def _run(self, call: Call) -> None:
        if isinstance(call, AllGather):
            call.full.detach().view(self.size, -1).copy_(call.shard.detach().clone().view(1, -1))
        elif isinstance(call, ReduceScatter):
            call.shard.detach().copy_(call.full.detach().view(self.size, -1)[self.rank].clone())
        if isinstance(call, AllReduce | ReduceScatter) and call.op is ReduceOp.SUM:
            (call.tensor if isinstance(call, AllReduce) else call.shard).detach().mul_(self.size)
