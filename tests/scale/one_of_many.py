"""One rank of any number, alone in a process, as if all others said the same: counts and costs of a rank at scale.

Real code runs here, from the agreement to the optimizer's step, with 16,384 ranks as with two; only the other ranks and the
network are missing. What it moves and how often it asks is exact. Values are those of ranks that are all alike, so a sum is
this rank's share times their number, and gathered parameters are of no use.
"""

from __future__ import annotations

import torch

from megabucket.comm import AllGather, AllReduce, AllToAll, Batch, Call, Communicator, Handle, ReduceOp, ReduceScatter
from megabucket.trace.recorder import CollectiveRecord, Launch, Recorder


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

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        return _OneHandle(self, batch, record)

    @torch.no_grad()
    def run(self, call: Call) -> None:
        """Do one call as if all ranks had said the same. Of an all-to-all this rank gets its own part only."""
        if isinstance(call, AllToAll):
            received, sent = (
                torch.split(tensor.detach(), numels)[self.rank]
                for tensor, numels in ((call.received, call.received_numels), (call.sent, call.sent_numels))
            )
            received.copy_(sent)
            return
        if isinstance(call, AllGather):
            call.full.detach().view(self.size, -1).copy_(call.shard.detach().clone().view(1, -1))
        elif isinstance(call, ReduceScatter):
            call.shard.detach().copy_(call.full.detach().view(self.size, -1)[self.rank].clone())
        if isinstance(call, AllReduce | ReduceScatter):
            result = call.shard.detach() if isinstance(call, ReduceScatter) else call.full.detach()
            if call.op is ReduceOp.SUM:
                result.mul_(self.size)
            if call.divisor != 1:
                result.div_(call.divisor)


class _OneHandle(Handle):
    def __init__(self, owner: OneOfMany, batch: Batch, record: CollectiveRecord) -> None:
        self._owner, self._batch, self._record = owner, batch, record
        self._is_started = False

    @property
    def is_started(self) -> bool:
        return self._is_started

    def start(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        for call in self._batch:
            self._owner.run(call)
        launches = self._owner.launches
        launches.last = next(launches.numbers)
        for recorder in self._owner.recorders.active:
            recorder.record_launch(Launch(self._record, clock=None))

    def wait(self) -> None:
        pass
