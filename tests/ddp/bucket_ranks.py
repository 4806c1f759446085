"""Bucket groups on every rank of a loopback world, without a wrapper around them."""

import torch

from megabucket.buffer import GradSyncPolicy, ParamAndGradBuffer, _ParamAndGradBucketGroup
from megabucket.comm import ReduceOp
from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, build_layout
from megabucket.testing import LoopbackWorld

POLICY = GradSyncPolicy(reduce_scatters=False, op=ReduceOp.SUM, average=True)


class BucketRank:
    """Vectors of 4 elements called a, b, c and d. Group 0 holds d and c, group 1 holds b and a: the order of backward."""

    def __init__(self, world, rank):
        self.params = {name: torch.nn.Parameter(torch.zeros(4)) for name in "abcd"}
        # d [0, 4), c [64, 68): 68 elements close the bucket.
        (layout,) = build_layout(
            [ParamSpec(name, (4,)) for name in self.params], DistributedDataParallelConfig(bucket_size=68), dp_size=world.size
        ).buffers
        buffer = ParamAndGradBuffer(layout, self.params)
        self.groups = [
            _ParamAndGradBucketGroup([bucket], index=index, num_groups=2, communicator=world.communicator(rank), policy=POLICY)
            for index, bucket in enumerate(buffer.buckets)
        ]
        self.slots = {slot.name: slot for group in self.groups for slot in group.slots}

    def bring(self, **values):
        """Do what autograd and the hooks do with the gradients of a step."""
        for name, value in values.items():
            self.params[name].grad = torch.full((4,), float(value))
            group = self.groups[0] if name in "cd" else self.groups[1]
            group.receive_grad([slot.name for slot in group.slots].index(name), counts=True)

    def send(self):
        """Launch the groups."""
        for group in self.groups:
            group.start_grad_sync()

    def start_over(self):
        """Wait for the groups and forget the step."""
        for group in self.groups:
            group.finish_grad_sync()
            group.reset()


def bucket_ranks(size=2, **kwargs):
    """A world and its ranks."""
    world = LoopbackWorld(size, timeout_s=5, **kwargs)
    return world, [BucketRank(world, rank) for rank in range(size)]
