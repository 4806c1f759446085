"""A model, an optimizer of whole tensors whose sums are exact, and one process to compare ranks with.

``Mirror`` gives each element the update of the one at the other end of its tensor, so a piece at a wrong place changes weights.
Gradients are small whole numbers, so means over two or four ranks have the same bits in any order.
"""

import math

import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.testing import LoopbackWorld

RATE, STEPS = 0.25, 4
SHAPES = {
    "a.weight": (24, 10),
    "a.bias": (10,),
    "b.weight": (9, 7),
    "b.bias": (7,),
    "c.weight": (20, 20),
    "expert.weight": (16, 8),
}
EXPERT = "expert.weight"
IN_ONE_BUCKET, IN_SEVERAL = {"bucket_size": 100_000}, {"bucket_size": 250}


class Mirror(torch.optim.Optimizer):
    """SGD with momentum that steps with the mirrored tensor."""

    update_kind = "tensor"

    def __init__(self, params, on_update=None):
        super().__init__(params, {"lr": RATE})
        self.on_update = on_update

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.5).add_(param.grad)
                param.sub_(group["lr"] * momentum.flatten().flip(0).view_as(param))
                if self.on_update is not None:
                    self.on_update(param)


class Model(torch.nn.Module):
    """Tensors whose gradients are given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("a", "b", "c", "expert"):
            setattr(self, name, torch.nn.Module())
        for name, shape in SHAPES.items():
            values = torch.randint(-8, 9, shape, generator=generator).to(dtype)
            of, own = name.split(".")
            self.get_submodule(of).register_parameter(own, torch.nn.Parameter(values))

    def forward(self, grads):
        return sum(
            (self.get_parameter(name) * grad.to(self.get_parameter(name).dtype)).float().sum() for name, grad in grads.items()
        )


def grads_of(rank, step, *, without=()):
    """The gradients of one rank in one step, by parameter."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = {name: torch.randint(-4, 5, shape, generator=generator).float() for name, shape in SHAPES.items()}
    return {name: grad for name, grad in found.items() if name not in without}


def make_optimizers(model, on_update=None):
    """``Mirror`` over the matrices, AdamW over the rest."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    return [Mirror(matrices, on_update), torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=RATE)]


def nothing(_):
    return ()


def held_by_all(*_):
    return True


def in_one_process(num_ranks, *, dtype=torch.float32, clip=0.0, skips=nothing, holds_same=held_by_all):
    """Return by rank the weights of plain torch, which steps on float32 values and is rounded after each step."""
    return [_of_rank(rank, num_ranks, dtype, clip, skips, holds_same) for rank in range(num_ranks)]


def _of_rank(rank, num_ranks, dtype, clip, skips, holds_same):
    model = Model(torch.float32)
    optimizers = make_optimizers(model)
    for step in range(STEPS):
        norm = 0.0
        for name, param in model.named_parameters():
            held = [grads_of(other, step)[name] for other in range(num_ranks) if holds_same(rank, other, name)]
            param.grad = None if name in skips(step) else torch.stack(held).sum(0) / num_ranks
            norm += 0.0 if param.grad is None else float(param.grad.square().sum())
        if clip:
            for param in model.parameters():
                param.grad.mul_(min(clip / math.sqrt(norm), 1.0))
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach().to(dtype) for name, param in model.named_parameters()}


def on_ranks(
    size,
    program,
    *,
    dtype=torch.float32,
    completion="immediate",
    groups=None,
    recorder=None,
    on_update=None,
    settings=None,
    **config,
):
    """Wrap the model on each rank of a loopback world and call ``program(rank, ddp, optimizer)``.

    Args:
        groups: makes the groups of a rank of what returns the communicators of some ranks.
        recorder: by rank, of launches.
        on_update: by rank, called behind the update of each matrix.
        settings: of the optimizer.
    """
    world = LoopbackWorld(size, timeout_s=20, completion=completion)
    given = groups(world) if groups else None
    fields = {"use_distributed_optimizer": True, **IN_SEVERAL, **config}

    def play(rank):
        told = () if recorder is None else (recorder(rank),)
        ranks = {"communicator": world.communicator(rank, *told)} if given is None else {"groups": given(rank)}
        model = Model(dtype)
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**fields), **ranks)
        each = None if on_update is None else on_update(rank)
        optimizer = DistributedOptimizer(make_optimizers(model, each), ddp, **(settings or {}))
        return program(rank, ddp, optimizer)

    return world.run(play)


def train(rank, ddp, optimizer, *, scale=1.0, skips=nothing, steps=range(STEPS)):
    """Train and return the weights."""
    for step in steps:
        (ddp(grads_of(rank, step, without=skips(step))) * scale).backward()
        if scale != 1.0:
            optimizer.unscale_grads(1 / scale)
        assert optimizer.step().updated
        optimizer.zero_grad()
    ddp.finish_param_sync()
    return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}


def experts(world):
    """Every second of four ranks holds the same expert."""
    everyone, second = world.subgroup([0, 1, 2, 3]), {**world.subgroup([0, 2]), **world.subgroup([1, 3])}
    return lambda rank: ParallelGroups({"dense": everyone[rank], "expert": second[rank]}, group_of={EXPERT: "expert"})


def holds_same_expert(rank, other, name):
    return name != EXPERT or rank % 2 == other % 2


def replicas(world):
    """Pairs of neighbours share shards, and every second rank has the same one."""
    everyone = world.subgroup([0, 1, 2, 3])
    pair = {**world.subgroup([0, 1]), **world.subgroup([2, 3])}
    second = {**world.subgroup([0, 2]), **world.subgroup([1, 3])}
    return lambda rank: ParallelGroups({"dense": ReductionGroup(pair[rank], replicate=second[rank])}, step_group=everyone[rank])


def tensor_parallel(world):
    """Neighbours are tensor-parallel, every second rank has the same pieces."""
    everyone = world.subgroup([0, 1, 2, 3])
    pair = {**world.subgroup([0, 1]), **world.subgroup([2, 3])}
    second = {**world.subgroup([0, 2]), **world.subgroup([1, 3])}
    return lambda rank: ParallelGroups(
        {"dense": second[rank]}, copies={"tp": pair[rank]}, norm_group=everyone[rank], step_group=everyone[rank]
    )


def assert_equal(found, expected, **tolerance):
    """Compare weights by rank; bit by bit without a tolerance."""
    for rank, (own, right) in enumerate(zip(found, expected, strict=True)):
        for name, values in right.items():
            torch.testing.assert_close(
                own[name],
                values,
                **(tolerance or {"rtol": 0, "atol": 0}),
                msg=lambda text, at=f"{name} on rank {rank}": f"{at}: {text}",
            )
