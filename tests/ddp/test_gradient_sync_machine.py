"""Any order of calls, on two or three ranks: the gradients are exact, or all ranks raise the same error that names the fault.

The machine holds a model of each rank in plain integers (``Expected``) and drives ``GradSync`` and its bucket groups, with real
backwards, over a loopback world whose collectives complete when hypothesis says so. One thread plays all ranks as long as
nobody waits; where ranks wait for one another (fence, vote) each has a thread. All gradients are multiples of a pattern of small
integers, chosen so that every sum and every mean is exact in the buffers; the model adds ``Fraction`` and rounds nothing.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megabucket.buffer import GradPhase, GradSyncPolicy, ParamAndGradBuffer, _ParamAndGradBucketGroup
from megabucket.buffer.views import dtype_name
from megabucket.comm import LoopbackWorld, ReduceOp
from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp.grad_hook import grad_hook
from megabucket.ddp.grad_sync import GradSync
from megabucket.errors import (
    LateGradientError,
    MegabucketError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    StepMismatchError,
    UnusedParameterError,
)
from megabucket.layout import ParamSpec, build_layout, launch_order

# (14 + 6) * 3 ranks * 4 = 240: a single gradient is exact in bfloat16 (8 bits), sums are exact in float32.
AMOUNTS = st.integers(-14, 14)
INDEX = st.integers(0, 63)
ORDER = st.permutations(range(5))
RANKS_IN_ORDER = st.permutations(range(3))
UNKNOWN_CAUSE = "an exception that autograd keeps to itself"


def pattern(numel):
    """1, 2, 3, 4, 1, 2, ...: what a gradient of 1 is."""
    return (torch.arange(numel) % 4 + 1).float()


class Boom(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise KeyError("boom")


class Rank:
    """The real thing: parameters in buffers, groups and their sync, without a module."""

    def __init__(self, rank, world, specs, config):
        self.params = {
            spec.name: torch.nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in specs
        }
        layout = build_layout(specs, config, dp_size=world.size)
        self.buffers = [ParamAndGradBuffer(buffer, self.params) for buffer in layout.buffers]
        policy = GradSyncPolicy(
            reduce_scatters=config.use_distributed_optimizer,
            op=ReduceOp.AVG if config.average_in_collective else ReduceOp.SUM,
            average=config.grad_reduction == "mean",
        )
        buckets = [self.buffers[i].buckets[j] for i, j in launch_order(layout)]
        batches = [buckets] if config.bucket_groups == "single" else [[bucket] for bucket in buckets]
        self.groups = [
            _ParamAndGradBucketGroup(
                batch, index=index, num_groups=len(batches), communicator=world.communicator(rank), policy=policy
            )
            for index, batch in enumerate(batches)
        ]
        self.sync = GradSync(self.groups, config)
        for group in self.groups:
            for position, slot in enumerate(group.slots):
                slot.param.register_post_accumulate_grad_hook(grad_hook(self.sync, group.index, position))
        self.open_no_syncs = []

    def backward(self, amounts, *, fails_after=None):
        """Run one backward that brings the gradients in the order given: that of the term made last comes first.

        Args:
            amounts: pairs of name and amount.
            fails_after: raise when so many gradients have arrived.
        """
        terms = [(self.params[name] * (pattern(self.params[name].numel()) * amount)).sum().float() for name, amount in amounts]
        terms.reverse()
        if fails_after is not None:
            fuse = torch.zeros((), requires_grad=True)
            at = len(terms) - fails_after
            tail = [(self.params[name] * 1.0 * (pattern(self.params[name].numel()) * amount)).sum() for name, amount in []]
            assert not tail
            terms = self._terms(amounts[fails_after:]) + [Boom.apply(fuse)] + self._terms(amounts[:fails_after])
            assert at >= 0
        torch.stack(terms).sum().backward()
