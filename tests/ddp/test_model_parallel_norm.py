"""The norm under tensor and expert parallelism: each element of the whole model counts once, or clipping is refused.

Ranks are those of loopback worlds. All gradients are 1 where only the counting is tested; float32 sums of them are exact.
"""

import math
from dataclasses import replace

import pytest
import torch
from grids import Grid, cut, of_expert

from megabucket import ChainedOptimizer, DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import ConfigError, LayoutMismatchError, PeerFailedError, PhaseError
from megabucket.layout.identity import megatron_identity
from megabucket.testing import LoopbackWorld

MODES = [pytest.param(False, id="all-reduce"), pytest.param(True, id="reduce-scatter")]
GRIDS = [  # tensor-parallel and data-parallel ranks; expert-parallel ranks, and those that cut each expert
    (2, 2, 1, 1),
    (2, 2, 4, 1),
    (2, 4, 2, 1),
    (2, 4, 2, 2),
    (1, 4, 2, 2),
    (2, 8, 2, 1),
    (4, 4, 2, 1),
    (4, 4, 2, 2),
    (4, 4, 4, 4),
]
NO_STEP = {"lr": 0.0}


def root(num_elements):
    """Return the square root, rounded as norms are."""
    return float(torch.tensor(math.sqrt(num_elements), dtype=torch.float32))


def ones(*shape):
    return torch.nn.Parameter(torch.ones(shape))


DENSE_NUMEL, EXPERT_NUMEL = 2 * 64 * 9 + 145, 4 * 96 + 17  # so many that no rank's shard holds all of a parameter


class Parts(torch.nn.Module):
    """Parameters of every kind, ``DENSE_NUMEL`` and for each expert ``EXPERT_NUMEL`` elements on all ranks together."""

    def __init__(self, tp, etp=1):
        super().__init__()
        self.column = cut(ones(64 // tp, 9), 0)
        self.row = cut(ones(9, 64 // tp), 1)
        self.bias = ones(145)
        self.expert_weight = of_expert(ones(4 // etp, 96))
        if etp > 1:
            cut(self.expert_weight, 0)
        self.expert_bias = of_expert(ones(17))


def grads_of_one(module, *, experts):
    """Run a backward after which each gradient is 1, divided by ``experts`` for experts."""
    sum(param.sum() / (1 if getattr(param, "allreduce", True) else experts) for param in module.parameters()).backward()


def norm_of_ones(grid, module_of, *, config=None, **groups):
    """Return by rank the norm where all reduced gradients are 1. Experts sum ``edp`` ranks and are divided by ``dp``."""

    def program(rank):
        ddp = grid.wrap(rank, module_of(rank), config=config, **groups)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **NO_STEP), ddp)
        grads_of_one(ddp.module, experts=grid.edp / grid.dp)
        return optimizer.step().grad_norm

    return grid.run(program)


# Each element once #


@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize(("tp", "dp", "ep", "etp"), GRIDS)
def test_a_norm_of_ones_is_the_square_root_of_the_number_of_elements_of_the_model(tp, dp, ep, etp, is_sharded):
    grid = Grid(tp, dp, ep=ep, etp=etp)

    norms = norm_of_ones(grid, lambda _: Parts(tp, etp), config={"use_distributed_optimizer": is_sharded})

    # Naive, over the data-parallel ranks: at tp 4 these have 144 + 144 + 145 of the 1,297 dense elements.
    assert norms == [root(DENSE_NUMEL + EXPERT_NUMEL * ep)] * grid.size


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_norm_over_the_ranks_of_some_replicas_is_that_over_all(num_replicas):
    """Where gradients are all-reduced Megatron takes it over those of one replica."""
    grid = Grid(2, 4)
    grid.lines["replicas"] = grid.line(lambda rank: rank // (2 * num_replicas))

    norms = norm_of_ones(grid, lambda _: DenseParts(), reduction=["dense"], copies=["tp"], norm_group="replicas")

    assert norms == [root(DENSE_NUMEL)] * 8


@pytest.mark.parametrize("is_sharded", MODES)
def test_the_norm_over_two_chained_wrappers_is_that_of_the_whole_model(is_sharded):
    grid = Grid(2, 4, ep=2, etp=2)

    def program(rank):
        ddps = [grid.wrap(rank, Parts(2, 2), config={"use_distributed_optimizer": is_sharded}) for _ in range(2)]
        chained = ChainedOptimizer([DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **NO_STEP), ddp) for ddp in ddps])
        for ddp in ddps:
            grads_of_one(ddp.module, experts=grid.edp / grid.dp)
        return chained.step().grad_norm

    assert grid.run(program) == [root(2 * (DENSE_NUMEL + EXPERT_NUMEL * 2))] * grid.size


class DenseParts(torch.nn.Module):
    """The dense parameters of ``Parts``, over two tensor-parallel ranks."""

    def __init__(self):
        super().__init__()
        self.column, self.row, self.bias = cut(ones(32, 9), 0), cut(ones(9, 32), 1), ones(145)


class OneOfEach(torch.nn.Module):
    """A scalar that all ranks hold copies of, and one that belongs to the expert of this rank."""

    def __init__(self):
        super().__init__()
        self.copied, self.expert = ones(1), of_expert(ones(1))


@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_copied_scalar_and_one_expert_scalar_on_each_rank(size, dtype, is_sharded):
    """Megatron's pull request 6470. There experts count on the first tensor-parallel rank only: the square root of 2."""
    grid = Grid(size, 1, ep=size)

    norms = norm_of_ones(grid, lambda _: OneOfEach().to(dtype), config={"use_distributed_optimizer": is_sharded})

    assert norms == [root(1 + size)] * size


@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_zeros_count_once_as_elements_of_a_norm_do(size, is_sharded):
    """The same pull request: where all gradients are zero there are 1 + world of them."""
    grid = Grid(size, 1, ep=size)

    def program(rank):
        ddp = grid.wrap(rank, OneOfEach(), config={"use_distributed_optimizer": is_sharded})
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **NO_STEP), ddp, returns_num_zeros=True)
        sum(param.sum() * 0 for param in ddp.parameters()).backward()
        return optimizer.step().num_zeros

    assert grid.run(program) == [1 + size] * size


@pytest.mark.parametrize("is_sharded", MODES)
def test_experts_that_are_copies_along_the_ranks_they_are_reduced_over_count_once(is_sharded):
    """Megatron's pull request 5916, experts neither parallel nor cut, tp 2: no ``expert_tp`` says so, and tp makes them copies.

    Naive, only the first along tp counts: of the shards of four ranks, those of two.
    """
    grid = Grid(2, 2)

    norms = norm_of_ones(grid, lambda _: Parts(2), config={"use_distributed_optimizer": is_sharded}, copies=["tp"])

    assert norms == [root(DENSE_NUMEL + EXPERT_NUMEL)] * 4


def test_pieces_of_an_expert_are_never_reduced_with_each_other():
    """Megatron's pull request 5916, expert tensor parallelism above the dense one: gradients of unrelated columns mix."""
    grid = Grid(1, 2, etp=2)  # the group of dense gradients is taken for experts, too

    def program(rank):
        groups = replace(grid.groups(rank), reduction={name: grid.of(rank, "dense") for name in ("dense", "expert")})
        with pytest.raises(LayoutMismatchError, match="expert_weight"):
            DistributedDataParallel(Parts(1, 2), groups=replace(groups, copies={**groups.copies, "tp": grid.of(rank, "tp")}))

    grid.run(program)


class Sinks(torch.nn.Module):
    """One attention sink per head of this rank, which nothing marks as cut, and a weight of 8 elements that is."""

    def __init__(self):
        super().__init__()
        self.sinks, self.weight = ones(2), cut(ones(4, 1), 0)


def identity_of_sinks(tp):
    by_attribute = megatron_identity(tp_rank=tp.rank, tp_size=tp.size)

    def identity(name, param):
        found = by_attribute(name, param)
        return replace(found, global_shape=(4,), offset=(2 * tp.rank,), copies=()) if name == "sinks" else found

    return identity


def test_attention_sinks_count_on_every_tensor_parallel_rank_where_identity_says_that_they_are_cut():
    """Megatron's issue 7452. By the attributes alone those of the first rank count, which gives the square root of 10."""
    grid = Grid(2, 2)

    def program(rank):
        identity = identity_of_sinks(grid.of(rank, "tp"))
        ddp = grid.wrap(rank, Sinks(), reduction=["dense"], copies=["tp"], identity=identity)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **NO_STEP), ddp)
        grads_of_one(ddp.module, experts=1)
        return optimizer.step().grad_norm

    assert grid.run(program) == [root(4 + 8)] * 4


# Clipping is refused where the norm would be wrong #


def optimizer_of(ddp, **arguments):
    return DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, **arguments)


@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize("arguments", [{"clip_grad": 1.0, "returns_grad_norm": False}, {}])
def test_a_norm_over_parts_of_a_model_that_nothing_describes_is_refused(is_sharded, arguments):
    """W1: the norm over data-parallel ranks clips tensor-parallel ranks by different factors, and copies come apart."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    ddp = DistributedDataParallel(DenseParts(), config, communicator=LoopbackWorld(1).communicator(0))

    with pytest.raises(ConfigError, match=r"'column'.*copies=\{\"tp\": tp\}, norm_group=.*returns_grad_norm=False"):
        optimizer_of(ddp, **arguments)


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ({"copies": ["tp"], "norm_group": None}, "column"),  # a part of a larger parameter
        ({"copies": [], "norm_group": "world"}, "column"),  # the copies would count on every rank
    ],
)
def test_half_a_description_is_refused(groups, name):
    grid = Grid(2, 2)

    def program(rank):
        ddp = grid.wrap(rank, DenseParts(), reduction=["dense"], **groups)
        with pytest.raises(ConfigError, match=f"'{name}'"):
            optimizer_of(ddp, clip_grad=1.0)
        optimizer_of(ddp, returns_grad_norm=False)

    grid.run(program)


def test_copies_alone_are_refused():
    grid = Grid(2, 1)

    def program(rank):
        ddp = grid.wrap(rank, torch.nn.Linear(2, 2), reduction=["dense"], copies=["tp"], norm_group=None)
        with pytest.raises(ConfigError, match=r"'weight'.*norm_group="):
            optimizer_of(ddp, clip_grad=1.0)

    grid.run(program)


def test_without_a_norm_such_a_model_is_trained_and_clipping_cannot_be_switched_on():
    ddp = DistributedDataParallel(DenseParts(), communicator=LoopbackWorld(1).communicator(0))
    optimizer = optimizer_of(ddp, returns_grad_norm=False)

    grads_of_one(ddp, experts=1)
    result = optimizer.step()
    optimizer.zero_grad()
    optimizer.clip_grad = 1.0
    grads_of_one(ddp, experts=1)

    assert result.updated
    assert math.isnan(result.grad_norm)
    with pytest.raises(ConfigError, match="'column'"):
        optimizer.step()


def test_one_tensor_parallel_rank_is_no_model_parallelism():
    """Megatron marks parameters also where there is nothing to cut; a group of one rank says so."""
    grid = Grid(1, 2)

    def program(rank):
        ddp = grid.wrap(rank, DenseParts(), reduction=["dense"], copies=["tp"], norm_group=None)
        optimizer = optimizer_of(ddp, clip_grad=1.0)
        grads_of_one(ddp, experts=1)
        return optimizer.step().grad_norm

    assert grid.run(program) == [root(288 + 288 + 145)] * 2


def test_shards_of_float16_still_look_for_overflow_where_there_is_no_norm():
    grid = Grid(2, 2)

    def program(rank):
        ddp = grid.wrap(
            rank,
            DenseParts().half(),
            config={"use_distributed_optimizer": True, "grad_reduce_in_fp32": False, "grad_reduction": "sum"},
            reduction=["dense"],
            copies=["tp"],
            norm_group=None,
        )
        optimizer = optimizer_of(ddp, returns_grad_norm=False)
        results = []
        for factor in (1.0, 40_000.0):  # 40,000 + 40,000 is more than float16 can hold
            (sum(param.float().sum() for param in ddp.parameters()) * factor).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
        return [(result.updated, result.grad_norm) for result in results], results[1].reason

    for (fine, overflown), reason in grid.run(program):
        assert fine[0]
        assert math.isnan(fine[1])  # that over the data-parallel ranks is not the norm
        assert not overflown[0]
        assert "the gradient norm is inf" in reason


@pytest.mark.parametrize("is_sharded", MODES)
@pytest.mark.parametrize("scales", [True, False])
def test_an_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all_where_there_is_no_norm(scales, is_sharded):
    grid = Grid(2, 2)

    def program(rank):
        config = {"use_distributed_optimizer": is_sharded, "nonfinite_gradients": "allow"}
        ddp = grid.wrap(rank, DenseParts(), config=config, reduction=["dense"], copies=["tp"], norm_group=None)
        optimizer = optimizer_of(ddp, returns_grad_norm=False)
        scaler, updates = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales), []
        for step in range(2):
            loss = sum(param.sum() for param in ddp.parameters())
            scaler.scale(loss * (math.inf if step == 0 and rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            updates.append(optimizer.last_step.updated)
            optimizer.zero_grad()
        return updates

    assert grid.run(program) == [[False, True]] * 4


def test_a_rank_that_refuses_its_update_keeps_no_rank_waiting_that_takes_part_in_the_norm():
    grid = Grid(2, 2)

    def program(rank):
        config = {"nonfinite_gradients": "allow"}
        ddp = grid.wrap(rank, DenseParts(), config=config, reduction=["dense"], copies=["tp"], norm_group=None)
        optimizer = optimizer_of(ddp, returns_grad_norm=False)
        sum(param.sum() for param in ddp.parameters()).backward()
        if rank == 1:
            next(iter(ddp.parameters())).grad = None
        with pytest.raises(PhaseError if rank == 1 else PeerFailedError, match="'column' was cleared"):
            optimizer.step()
        optimizer.zero_grad()
        sum(param.sum() for param in ddp.parameters()).backward()
        return optimizer.step().updated

    assert grid.run(program) == [True] * 4


@pytest.mark.parametrize("is_sharded", MODES)
def test_a_step_with_nan_on_one_tensor_parallel_rank_is_skipped_on_all(is_sharded):
    grid = Grid(2, 2)

    def program(rank):
        config = {"use_distributed_optimizer": is_sharded, "nonfinite_gradients": "skip_step"}
        ddp = grid.wrap(rank, DenseParts(), config=config, reduction=["dense"], copies=["tp"])
        optimizer = optimizer_of(ddp, clip_grad=1.0)
        updates = []
        for step in range(2):
            factor = math.nan if step == 0 and rank == 2 else 1.0
            (sum(param.sum() for param in ddp.parameters()) * factor).backward()
            result = optimizer.step()
            updates.append((result.updated, "rank 2" in result.reason))
            optimizer.zero_grad()
        ddp.check_replicas()
        return updates

    assert grid.run(program) == [[(False, True), (True, False)]] * 4


@pytest.mark.parametrize("is_sharded", MODES)
def test_a_norm_over_one_of_several_pipeline_stages_is_refused(is_sharded):
    """Nothing is cut and nothing is a copy; only the ranks that agree on steps tell that there are other parameters."""
    grid = Grid(2, 2)

    def program(rank):
        config = {"use_distributed_optimizer": is_sharded, "finish": "explicit"}
        ddp = grid.wrap(rank, torch.nn.Linear(2, 2), config=config, reduction=["dense"], copies=[], norm_group=None)
        with pytest.raises(ConfigError, match=r"'weight'.*norm_group="):
            optimizer_of(ddp, clip_grad=1.0)

    grid.run(program)


@pytest.mark.parametrize(
    ("is_sharded", "norm_group", "other", "lacks"),
    [(False, "dense", 1, "copies 'tp'"), (True, "dense", 1, "copies 'tp'"), (True, "tp", 2, "dense")],
)
def test_a_norm_group_that_lacks_ranks_of_copies_or_shards_is_refused(is_sharded, norm_group, other, lacks):
    grid = Grid(2, 2)

    def program(rank):
        config = {"use_distributed_optimizer": is_sharded}
        # Each rank lacks another one, so all raise the error about the first.
        with pytest.raises(
            PeerFailedError, match=rf"rank 0 failed in groups=: .*norm_group= lacks ranks \[{other}\] of {lacks}"
        ):
            grid.wrap(rank, DenseParts(), config=config, reduction=["dense"], copies=["tp"], norm_group=norm_group)

    grid.run(program)
