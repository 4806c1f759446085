"""Tied weights in different wrappers of their ranks, as in a virtual pipeline: compared, made equal, summed and counted once.

::

    stage 0   chunk 0: embedding   chunk 1: a layer
    stage 1   chunk 0: a layer     chunk 1: head, with the weight of the embedding
"""

from functools import partial

import pytest
import torch

from megabucket import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    ParallelGroups,
    finalize_grads,
)
from megabucket.errors import LayoutMismatchError
from megabucket.layout.identity import megatron_identity
from megabucket.testing import LoopbackWorld

NUM_STEPS, CLIP = 12, 0.5
SGD = {"lr": 0.1, "momentum": 0.9}
TIED = "embedding.weight"


def made(kind, seed):
    torch.manual_seed(seed)
    return {"embedding": torch.nn.Embedding(16, 8), "layer": torch.nn.Linear(8, 8)}[kind]


def chunks_of(stage, *, own_bucket=True):
    if stage == 0:
        first, second = made("embedding", 0), made("layer", 2)
        tied = first.weight
    else:
        first, second = made("layer", 1), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 16, bias=False))
        second[0].load_state_dict(made("layer", 3).state_dict())
        tied = second[1].weight
        torch.nn.init.zeros_(tied)  # until the stages make it equal
    tied.shared, tied.shared_embedding = True, own_bucket
    return [first, second]


def name_of(stage, chunk, name):
    if (stage, chunk) == (0, 0) or name == "1.weight":
        return TIED
    return f"layers.{(stage + 2 * chunk - 1) if chunk == 0 or stage == 0 else 2}.{name.removeprefix('0.')}"


def losses_of(step, dp_rank):
    """Return, by stage and chunk, a loss of the module of that place; each step has a larger gradient than ``CLIP``."""
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    tokens = torch.randint(16, (12,), generator=generator)
    inputs = torch.randn(3, 6, 8, generator=generator)
    return {
        (0, 0): lambda module: (module(tokens) - 1).square().mean() * 20,
        (1, 0): lambda module: (module(inputs[0]) - 1).square().mean(),
        (0, 1): lambda module: (module(inputs[1]) + 1).square().mean(),
        (1, 1): lambda module: (module(inputs[2]) - 2).square().mean() * 4,
    }


def in_one_process():
    tied = made("embedding", 0)
    head = torch.nn.Linear(8, 16, bias=False)
    head.weight = tied.weight
    layers = [made("layer", seed) for seed in (1, 2, 3)]
    places = {(0, 0): tied, (1, 0): layers[0], (0, 1): layers[1], (1, 1): torch.nn.Sequential(layers[2], head)}
    whole = torch.nn.ModuleDict({"embedding": tied, "layers": torch.nn.ModuleList(layers)})
    before = {name: param.detach().clone() for name, param in whole.named_parameters()}
    optimizer, norms = torch.optim.SGD(whole.parameters(), **SGD), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for dp_rank in range(2):
            losses = losses_of(step, dp_rank)
            (sum(loss(places[place]) for place, loss in losses.items()) / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)))
        optimizer.step()
    return before, {name: param.detach() for name, param in whole.named_parameters()}, norms


class Ranks:
    """Two pipeline stages of two replicas: rank = stage + 2 * replica."""

    def __init__(self, *, own_bucket=True):
        self.chunks = [chunks_of(rank % 2, own_bucket=own_bucket) for rank in range(4)]  # not in threads, which share seeds
        self.world = LoopbackWorld(4, timeout_s=20)
        self.pp = self.world.subgroup([0, 1]) | self.world.subgroup([2, 3])
        self.dp = self.world.subgroup([0, 2]) | self.world.subgroup([1, 3])

    def wrap(self, rank, *, is_sharded, bucket_size=80):
        whole, stages, made = self.world.communicator(rank), self.pp[rank], []
        config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, finish="explicit", bucket_size=bucket_size)
        for chunk, module in enumerate(self.chunks[rank]):
            identity = megatron_identity(tp_rank=0, tp_size=1, name_of=partial(name_of, rank % 2, chunk))
            groups = ParallelGroups(
                {"dense": self.dp[rank]}, copies_across={"embd": stages}, norm_group=whole, step_group=whole, identity=identity
            )
            made.append(DistributedDataParallel(module, config, groups=groups))
        return made


@pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_weights_tied_across_chunks_train_as_in_one_process(is_sharded):
    ranks = Ranks()

    def train(rank):
        wrappers = ranks.wrap(rank, is_sharded=is_sharded)
        members = [DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp) for ddp in wrappers]
        optimizer, norms = ChainedOptimizer(members, clip_grad=CLIP), []
        for step in range(NUM_STEPS):
            losses = losses_of(step, rank // 2)
            for chunk, ddp in enumerate(wrappers):
                losses[rank % 2, chunk](ddp).backward()
            finalize_grads(wrappers)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        for ddp in wrappers:
            ddp.check_replicas()
        weights = {
            ddp.identities[name].global_name: param.detach().clone()
            for ddp in wrappers
            for name, param in ddp.module.named_parameters()
        }
        return weights, norms

    before, expected, expected_norms = in_one_process()
    results = ranks.world.run(train)

    assert min(expected_norms) > 2 * CLIP
    for (weights, norms), (others, _) in zip(results[::2], results[1::2], strict=True):
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        assert torch.equal(weights[TIED], others[TIED])
        found = weights | others
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            moved = (value - before[name]).abs().max()
            assert moved > 0
            assert (found[name] - value).abs().max() <= 1e-4 * moved, name


def test_tied_weights_of_other_shards_are_refused_when_the_chunks_are_chained():
    ranks = Ranks(own_bucket=False)

    def chain(rank):
        # The head's weight is in the bucket of the layer before it, so the ranks of the two stages own other parts of it.
        wrappers = ranks.wrap(rank, is_sharded=True, bucket_size=1000)
        members = [DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp) for ddp in wrappers]
        with pytest.raises(LayoutMismatchError, match=r"copies 'embd'.*embedding\.weight"):
            ChainedOptimizer(members)

    ranks.world.run(chain)
