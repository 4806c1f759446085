"""Loopback worlds whose ranks form Megatron's grids, and tensor-parallel layers on them."""

import copy

import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.comm import AllReduce
from megabucket.ddp.groups import ParallelGroups
from megabucket.testing import LoopbackWorld


def cut(param, dim):
    """Mark a parameter as Megatron's layers mark what is cut over tensor-parallel ranks."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
    return param


def of_expert(param):
    """Mark a parameter as Megatron's layers mark those of experts."""
    param.allreduce = False
    return param


class Grid:
    """Ranks in Megatron's order: tensor-parallel ones are neighbours; those of experts form a grid of their own.

    ::

        dense    rank = tp index + tp * dp index
        experts  rank = etp index + etp * (ep index + ep * edp index)
    """

    def __init__(self, tp, dp, *, ep=1, etp=1, make_world=LoopbackWorld):
        self.ep, self.etp = ep, etp
        self.size = tp * dp
        self.dp, self.edp = dp, self.size // (etp * ep)
        self.world = make_world(self.size, timeout_s=20)
        self.lines = {
            "tp": self.line(lambda rank: rank // tp),
            "dense": self.line(lambda rank: rank % tp),
            "expert_tp": self.line(lambda rank: rank // etp),
            "expert": self.line(lambda rank: rank % (etp * ep)),
            "world": self.line(lambda _: 0),
        }

    def line(self, key):
        """Return by rank the communicator of all ranks with the same key."""
        found = {}
        for index in sorted({key(rank) for rank in range(self.size)}):
            found |= self.world.subgroup([rank for rank in range(self.size) if key(rank) == index])
        return found

    def of(self, rank, name):
        return self.lines[name][rank]

    def groups(self, rank, *, reduction=("dense", "expert"), copies=("tp", "expert_tp"), norm_group="world", identity=None):
        return ParallelGroups(
            {name: self.of(rank, name) for name in reduction},
            copies={name: self.of(rank, name) for name in copies},
            norm_group=None if norm_group is None else self.of(rank, norm_group),
            step_group=self.of(rank, "world"),
            identity=identity,
        )

    def wrap(self, rank, module, *, config=None, **groups):
        config = DistributedDataParallelConfig(**{"bucket_size": 40, **(config or {})})
        return DistributedDataParallel(module, config, groups=self.groups(rank, **groups))

    def run(self, program):
        return self.world.run(program)


def _all_reduced(tensor, communicator):
    result = tensor.contiguous().clone()
    communicator.launch([AllReduce(result)], label="tensor parallel").wait()
    return result


class _CopyTo(torch.autograd.Function):
    """Every rank uses the input for its part, so their gradients of it add up."""

    @staticmethod
    def forward(ctx, inputs, communicator):
        ctx.communicator = communicator
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduced(grad, ctx.communicator), None


class _ReduceFrom(torch.autograd.Function):
    """The outputs of all ranks add up to one, whose gradient every rank knows."""

    @staticmethod
    def forward(_, inputs, communicator):
        return _all_reduced(inputs, communicator)

    @staticmethod
    def backward(_, grad):
        return grad, None


class WholeNet(torch.nn.Module):
    """What ``CutNet`` computes, on one rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(6)
        self.column = torch.nn.Linear(6, 8)
        self.row = torch.nn.Linear(8, 3)

    def forward(self, inputs):
        return self.row(torch.tanh(self.column(self.norm(inputs))))


class CutNet(torch.nn.Module):
    """A column-parallel and a row-parallel layer behind a norm that all tensor-parallel ranks hold copies of.

    Args:
        whole: the net to cut. Made by one thread: all of them draw from one generator.
        sums_grads: whether the gradient of the column-parallel layer's input is summed, as it has to be.
    """

    def __init__(self, whole, tp, *, sums_grads=True):
        super().__init__()
        part = slice(8 // tp.size * tp.rank, 8 // tp.size * (tp.rank + 1))
        self._tp, self._sums_grads = tp, sums_grads
        self.norm = copy.deepcopy(whole.norm)
        self.column_weight = cut(torch.nn.Parameter(whole.column.weight.detach()[part].clone()), 0)
        self.column_bias = cut(torch.nn.Parameter(whole.column.bias.detach()[part].clone()), 0)
        self.row_weight = cut(torch.nn.Parameter(whole.row.weight.detach()[:, part].clone()), 1)
        self.row_bias = torch.nn.Parameter(whole.row.bias.detach().clone())

    def forward(self, inputs):
        normed = self.norm(inputs)
        if self._sums_grads:
            normed = _CopyTo.apply(normed, self._tp)
        hidden = torch.tanh(torch.nn.functional.linear(normed, self.column_weight, self.column_bias))
        return _ReduceFrom.apply(torch.nn.functional.linear(hidden, self.row_weight), self._tp) + self.row_bias
