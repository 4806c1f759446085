"""What each field of the config changes in the result, and what it must not change, on real ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cells import (
    HUGE,
    ONE_PARAMETER,
    STEPS,
    TINY,
    Cell,
    assert_none,
    difference,
    grad_error_over_bound,
    run_cells,
)
from odd_model import OddModel, Precision, flat, loss_of, tokens_of
from pool import FOUR_AT_NIGHT, ONE_AT_NIGHT, TWO_AT_NIGHT, Rank

import megabucket as mb

pytestmark = pytest.mark.dist

# Against the single process, with the bounds of cells.py #


@pytest.fixture(params=[TWO_AT_NIGHT, 3, FOUR_AT_NIGHT])
def ranks(request) -> int:
    return request.param


def cells_with(ranks: int, precision: Precision = "mixed", **options: Any) -> list[Cell]:
    """Return cells in both modes, with and without overlap, with further fields of the config."""
    return [
        Cell(ranks, driver, overlap, ONE_PARAMETER, 3, precision, tuple(options.items()))
        for driver in ("reduce-scatter", "all-reduce")
        for overlap in (True, False)
    ]


def assert_within_bounds(records: dict[Cell, Any], alone: Any) -> None:
    ratios = {
        (cell, step): grad_error_over_bound(cell, record, step, alone)
        for cell, record in records.items()
        for step in range(STEPS)
    }
    print(f"largest measured/bound: {max(ratios.values()):.3f}")
    assert_none([f"{cell}, step {step}: {ratio} times the bound" for (cell, step), ratio in ratios.items() if ratio > 1])


def assert_same_bits(records: dict[Cell, Any]) -> None:
    first, *rest = records
    assert rest
    assert_none([f"{first} and {cell}: {text}" for cell in rest if (text := difference(records[first], records[cell]))])


@pytest.mark.parametrize(
    "options",
    [
        {"grad_reduction": "sum"},
        {"average_in_collective": True},
        {"bucket_groups": "single"},
        {"pad_buckets_for_high_nccl_busbw": True},
    ],
    ids=str,
)
def test_gradients_stay_within_the_bound_and_have_equal_bits_in_both_modes_with(pool, alone, options, ranks):
    records = run_cells(pool, cells_with(ranks, **options))

    assert_within_bounds(records, alone)
    assert_same_bits(records)


def test_gradients_stay_within_the_bound_with_the_layout_of_megatron(pool, alone, ranks):
    # Its layout depends on mode and overlap, so the order of sums does too, and only two ranks have equal bits.
    records = run_cells(pool, cells_with(ranks, layout="megatron"))

    assert_within_bounds(records, alone)
    if ranks == 2:
        assert_same_bits(records)


def test_gradients_on_a_bfloat16_wire_stay_within_the_bound_of_bfloat16(pool, alone, ranks):
    records = run_cells(pool, cells_with(ranks, "bfloat16", grad_reduce_in_fp32=False))

    assert_within_bounds(records, alone)
    assert_same_bits(records)


def test_an_average_taken_by_gloo_has_the_bits_of_our_own_unless_one_over_the_ranks_is_rounded(pool, alone, ranks):
    ours = run_cells(pool, cells_with(ranks))
    in_collective = run_cells(pool, cells_with(ranks, average_in_collective=True))

    assert_within_bounds(in_collective, alone)
    if ranks == 3:  # gloo divides the sum
        return
    assert_none([str(a) for a, b in zip(ours, in_collective, strict=True) if difference(ours[a], in_collective[b])])


def weights_without_waiting(rank: Rank, cells: list[Cell]) -> list[torch.Tensor]:
    """Train without looking at parameters between the steps, so that only the forward waits for them."""
    return [train_unseen(rank, cell) for cell in cells]


def train_unseen(rank: Rank, cell: Cell) -> torch.Tensor:
    model = OddModel(cell.precision, seed=rank.index)
    ddp = mb.DistributedDataParallel(model, cell.config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp, clip_grad=0.5)
    for step in range(STEPS):
        loss_of(ddp, tokens_of(step, rank.index, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(ddp.state_dict().values())


@pytest.mark.parametrize("ranks", [ONE_AT_NIGHT, TWO_AT_NIGHT, 3, FOUR_AT_NIGHT])
def test_gathering_parameters_during_forward_changes_no_bit(pool, ranks):
    pairs = [
        tuple(
            Cell(ranks, "reduce-scatter", True, bucket_size, 1, precision, (("overlap_param_gather", overlaps),))
            for overlaps in (False, True)
        )
        for bucket_size in (TINY, ONE_PARAMETER, HUGE)
        for precision in ("float32", "bfloat16", "mixed")
    ]

    at_once = pool.run(weights_without_waiting, [pair[0] for pair in pairs], ranks=ranks)
    in_forward = pool.run(weights_without_waiting, [pair[1] for pair in pairs], ranks=ranks)

    assert_none(
        [
            f"{pairs[index][1]}, rank {rank}"
            for rank in range(ranks)
            for index in range(len(pairs))
            if not torch.equal(at_once[0][index], in_forward[rank][index])
        ]
    )


# Literally: weights start at 0 and lose their gradient in each step, so they show it #


class Sums(torch.nn.Module):
    """The gradient of ``a`` is the input, that of ``b`` ten times the input. A negative input leaves ``b`` out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3))
        self.b = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: float) -> torch.Tensor:
        return x * self.a.sum() + (10 * x * self.b.sum() if x > 0 else 0)


def learn(ddp: mb.DistributedDataParallel, optimizer: torch.optim.Optimizer, *inputs: float) -> list[float]:
    """Run one step over the inputs as microbatches and return the gradients it used: one element of ``a``, one of ``b``."""
    before = shown(ddp)
    for x in inputs[:-1]:
        with ddp.no_sync():
            ddp(x).backward()
    ddp(inputs[-1]).backward()
    if ddp.ddp_config.finish == "explicit":
        ddp.finish_grad_sync()
    optimizer.step()
    optimizer.zero_grad()
    return [old - new for old, new in zip(before, shown(ddp), strict=True)]


def shown(ddp: mb.DistributedDataParallel) -> list[float]:
    ddp.finish_param_sync()
    for param in ddp.parameters():
        assert len(set(param.tolist())) == 1, f"elements of one parameter differ: {param}"
    return [float(param.detach()[0]) for param in ddp.parameters()]


def wrapped(
    group: dist.ProcessGroup | None, mode: str, **options: Any
) -> tuple[mb.DistributedDataParallel, torch.optim.Optimizer]:
    """Return a wrapped model and an SGD with learning rate 1; mode is ``reduce-scatter``, ``all-reduce`` or ``plain``."""
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=mode == "reduce-scatter", bucket_size=1, **options)
    ddp = mb.DistributedDataParallel(Sums(), config, process_group=group)
    sgd = torch.optim.SGD(ddp.parameters(), lr=1.0)
    return ddp, sgd if mode == "plain" else mb.DistributedOptimizer(sgd, ddp)


MODES = ["reduce-scatter", "all-reduce", "plain"]


# Which ranks #


class Everything(torch.nn.Module):
    """Parameters, frozen ones and module buffers of several dtypes, all filled with one number."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.full((5,), float(value)))
        self.narrow = torch.nn.Parameter(torch.full((2, 3), float(value), dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.full((4, 2), float(value)).t(), requires_grad=False)
        self.register_buffer("running_mean", torch.full((3,), float(value)))
        self.register_buffer("num_batches", torch.tensor(value))
        self.register_buffer("mask", torch.tensor([value == 1, value == 2]))
        self.register_buffer("not_saved", torch.full((2,), value, dtype=torch.int16), persistent=False)


def values_after_wrapping(rank: Rank, members: list[int]) -> dict[str, Any]:
    group = dist.new_group(members)
    module = Everything(1 + rank.index)
    if rank.index in members:
        mb.DistributedDataParallel(module, process_group=group)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: sorted(set(tensor.flatten().tolist())) for name, tensor in tensors}


def test_wrapping_makes_replicas_equal_to_the_first_rank_of_the_group(pool):
    by_rank = pool.run(values_after_wrapping, [1, 2], ranks=4)

    equal = {"trained": [2.0], "narrow": [2.0], "frozen": [2.0], "running_mean": [2.0], "num_batches": [2]}
    equal |= {"mask": [False, True], "not_saved": [2]}
    assert by_rank[1] == by_rank[2] == equal
    assert by_rank[0]["trained"] == [1.0]  # not a member
    assert by_rank[3]["trained"] == [4.0]


def train_on_default_and_subgroup(rank: Rank, mode: str) -> list[Any]:
    """Train one wrapper on all four ranks and, between its steps, another one with other settings on ranks 1 and 3."""
    odd_ranks = dist.new_group([1, 3])
    everybody, everybodys_optimizer = wrapped(None, mode)
    seen: list[Any] = []
    if rank.index in (1, 3):
        few, fews_optimizer = wrapped(odd_ranks, "plain", grad_reduction="sum", bucket_groups="single")
    for _ in range(2):
        everybody(1.0 + rank.index).backward()
        if rank.index in (1, 3):
            seen.append(learn(few, fews_optimizer, 1.0 + rank.index))
        before = shown(everybody)
        everybodys_optimizer.step()
        everybodys_optimizer.zero_grad()
        seen.append([old - new for old, new in zip(before, shown(everybody), strict=True)])
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_two_wrappers_with_different_settings_and_groups_train_in_one_process(pool, mode):
    by_rank = pool.run(train_on_default_and_subgroup, mode, ranks=4)

    everybody = [2.5, 25.0]  # the default group: (1 + 2 + 3 + 4) / 4
    few = [6.0, 60.0]  # the sum over ranks 1 and 3: 2 + 4
    assert by_rank[0] == by_rank[2] == [everybody, everybody]
    assert by_rank[1] == by_rank[3] == [few, everybody, few, everybody]


# torch.compile #


def trained_compiled(rank: Rank, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights after four steps, by what is compiled: nothing, the module in one graph, or the wrapper."""
    return {what: train_compiled(rank, what, fields) for what in ("nothing", "module", "wrapper")}


def train_compiled(rank: Rank, what: str, fields: dict[str, Any]) -> torch.Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    if what == "module":
        module = torch.compile(module, backend="eager", fullgraph=True)
    config = mb.DistributedDataParallelConfig(bucket_size=ONE_PARAMETER, **fields)
    ddp = mb.DistributedDataParallel(module, config, process_group=rank.group)
    call = torch.compile(ddp, backend="eager") if what == "wrapper" else ddp
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.1), ddp, clip_grad=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank.index)
            with ddp.no_sync():
                call(torch.randn(4, 8, generator=generator)).square().mean().backward()
            call(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = flat(ddp.state_dict().values())
    ddp.detach()
    return weights


@pytest.mark.parametrize("mode", [pytest.param("all-reduce", marks=pytest.mark.nightly), "reduce-scatter"])
def test_a_compiled_model_trains_bit_by_bit_as_one_that_is_not(pool, mode):
    for weights in pool.run(trained_compiled, {"use_distributed_optimizer": mode == "reduce-scatter"}, ranks=2):
        assert torch.equal(weights["module"], weights["nothing"])
        assert torch.equal(weights["wrapper"], weights["nothing"])
