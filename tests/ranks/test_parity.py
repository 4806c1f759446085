"""The whole matrix against a single process: gradients, clip norm, optimizer and weights of every combination.

A cell is trained for five steps on the pool and leaves a record: weights before each step, the gradients the optimizer
stepped with (reduced and clipped), norms. The tests compare records with plain torch in this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from cells import (
    BF16_UNIT_ROUNDOFF,
    CLIP_AT_STEP,
    HUGE,
    ONE_PARAMETER,
    STEPS,
    TINY,
    Cell,
    Record,
    assert_none,
    difference,
    gamma,
    grad_error_over_bound,
    groupby_fields,
    run_cells,
)
from odd_model import OddModel

import megabucket as mb

pytestmark = pytest.mark.dist

Records = Mapping[Cell, Sequence[Record]]
FIELDS = ("ranks", "driver", "overlap", "bucket_size", "microbatches", "precision")


def all_cells(sizes: Sequence[int], microbatches: Sequence[int]) -> list[Cell]:
    cells = []
    for precision in ("float32", "bfloat16", "mixed"):
        # A plain AdamW steps on bfloat16 weights without main parameters; that is another algorithm.
        drivers = ("reduce-scatter", "all-reduce", *(["all-reduce and plain AdamW"] if precision == "float32" else []))
        cells += [
            Cell(ranks, driver, overlap, bucket_size, num_microbatches, precision)
            for ranks, driver, overlap, bucket_size, num_microbatches in itertools.product(
                sizes, drivers, (True, False), (TINY, ONE_PARAMETER, HUGE), microbatches
            )
        ]
    return cells


@pytest.fixture(scope="module")
def sizes(request) -> Sequence[int]:
    """Four ranks take as long as all others together, and two show little that three do not: both wait for the night."""
    return (1, 3) if "not nightly" in request.config.option.markexpr else (1, 2, 3, 4)


@pytest.fixture(scope="module")
def microbatches(request) -> Sequence[int]:
    """One microbatch is in test_torch_ddp.py, to 1e-6 of torch DDP: within these bounds it waits for the night."""
    return (3,) if "not nightly" in request.config.option.markexpr else (1, 3)


@pytest.fixture(scope="module")
def records(pool, sizes, microbatches) -> Records:
    return run_cells(pool, all_cells(sizes, microbatches))


def assert_equal_but_for(field: str, records: Records) -> None:
    """Cells that differ in nothing but one field have bitwise equal records."""
    groups = groupby_fields(records, *(name for name in FIELDS if name != field)).values()
    pairs = [(first, other) for first, *others in groups for other in others]
    assert pairs
    assert_none(
        [
            f"{first} and {other} differ: {text}"
            for first, other in pairs
            if (text := difference(records[first], records[other]))
        ]
    )


def test_the_matrix_is_complete_and_its_bucket_sizes_mean_what_they_say(records, sizes, microbatches):
    # float32 has 3 drivers, the others 2; x group sizes x overlap x 3 bucket sizes x numbers of microbatches
    assert len(records) == (3 + 2 + 2) * len(sizes) * 2 * 3 * len(microbatches)
    specs = [
        mb.ParamSpec(name, tuple(param.shape))
        for name, param in OddModel("float32", seed=0).named_parameters()
        if param.requires_grad
    ]
    buckets = {
        size: mb.build_layout(specs, mb.DistributedDataParallelConfig(bucket_size=size), dp_size=2).buffers[0].buckets
        for size in (TINY, ONE_PARAMETER, HUGE)
    }

    assert [len(buckets[size]) for size in (TINY, ONE_PARAMETER, HUGE)] == [10, 6, 1]
    assert buckets[TINY][-1].params == ("also_empty", "empty")  # nothing in it: 0 elements


def test_every_rank_holds_the_same_weights_and_norms_after_every_step(records):
    assert_none(
        [
            f"{cell}: rank {rank} differs from rank 0"
            for cell, record in records.items()
            for rank, one in enumerate(record)
            if one.norms != record[0].norms or not all(map(torch.equal, one.weights, record[0].weights))
        ]
    )


def test_each_gradient_is_owned_by_one_rank_after_reduce_scatter_and_by_all_after_all_reduce(records):
    failures = []
    for cell, record in records.items():
        for step in range(STEPS):
            owners = sum((~one.grads[step].isnan()).int() for one in record)
            expected = 1 if cell.driver == "reduce-scatter" else cell.ranks
            same = all(torch.equal(one.grads[step], record[0].grads[step]) for one in record)
            if not (owners == expected).all() or (expected == cell.ranks and not same):
                failures.append(f"{cell}, step {step}: owners per element {owners.unique().tolist()}, {same=}")
    assert_none(failures)


def test_gradients_equal_the_mean_of_all_microbatches_within_gamma_n_at_every_step(records, alone):
    ratios = {
        (cell, step): grad_error_over_bound(cell, record, step, alone)
        for cell, record in records.items()
        for step in range(STEPS)
    }

    print(f"largest measured/bound: {max(ratios.values()):.3f}")
    assert_none([f"{cell}, step {step}: {ratio} times the bound" for (cell, step), ratio in ratios.items() if ratio > 1])


def test_the_clip_norm_equals_the_norm_of_the_mean_gradient_and_clips_where_it_should(records, alone):
    """Two norms differ by at most the norm of the difference; ours is a float64 sum, rounded once to float32.

    ``clip_grad_norm_`` sums N squares in float32, which rounds N times, and takes norms of norms: gamma(N + 4) covers it.
    """
    failures, largest = [], 0.0
    for cell, record in records.items():
        for step, norm in enumerate(record[0].norms):
            terms = alone.terms(cell, step, record[0].weights[step])
            expected = (terms.sum(0) / cell.ranks).norm().item()
            own_roundings = terms.shape[1] + 4 if cell.is_plain else 1
            grad_bound = gamma(cell.num_terms) * terms.abs().sum(0) / cell.ranks
            bound = grad_bound.norm().item() + gamma(own_roundings) * expected
            largest = max(largest, abs(norm - expected) / bound)
            if not abs(norm - expected) <= bound or (norm > CLIP_AT_STEP[step]) != (step in (1, 3, 4)):
                failures.append(f"{cell}, step {step}: norm {norm}, expected {expected} within {bound}")
    print(f"largest measured/bound: {largest:.3f}")
    assert_none(failures)


def test_weights_are_bitwise_those_of_a_plain_adamw_given_the_same_gradients(records, alone):
    """With the two tests before, the step is right: gradients within the theorem, and no further error in the update."""
    assert_none(
        [
            f"{cell}: differs first after step {step}"
            for cell, record in records.items()
            for step, (ours, plain) in enumerate(zip(record[0].weights, alone.replay(cell, record), strict=True))
            if not torch.equal(ours, plain)
        ]
    )


def test_weights_after_five_steps_equal_an_independent_single_process(records, alone):
    """Rounding errors of a step change all later gradients, so no theorem in closed form bounds the whole run.

    Measured instead: the single process is run again with every gradient element pushed up or down, at random, by its full
    bound. Our errors are no larger than the pushes and no less independent, so to first order our run strays by 4 times what
    such runs stray with a probability below 2 exp(-8) (Hoeffding). With 16-bit weights a push may flip the last bit of a
    weight, which moves later gradients by up to 2^-8: there, that is the push.
    """
    failures, largest, bounds = [], 0.0, {}
    for cell, record in records.items():
        key = (cell.ranks, cell.microbatches, cell.precision)
        if key not in bounds:
            weights = alone.train(cell)
            push = gamma(cell.num_terms + 4) if cell.precision == "float32" else BF16_UNIT_ROUNDOFF
            strayed = [(alone.train(cell, push=push, signs=seed) - weights).abs().max().item() for seed in range(3)]
            bounds[key] = weights, 4 * max(strayed)
        weights, bound = bounds[key]
        error = (record[0].weights[STEPS] - weights).abs().max().item()
        largest = max(largest, error / bound)
        if not error <= bound:
            failures.append(f"{cell}: off by {error}, bound {bound}")
    print(f"largest measured/bound: {largest:.3f}")
    largest_bound = max(bound for (_, _, precision), (_, bound) in bounds.items() if precision == "float32")
    print(f"largest bound with float32 weights: {largest_bound:.1e}")
    assert_none(failures)


def test_overlap_on_and_off_are_bitwise_equal(records):
    assert_equal_but_for("overlap", records)


def test_all_reduce_and_reduce_scatter_are_bitwise_equal(records):
    # A plain loop computes its clip norm in float32, so it is compared with itself only.
    assert_equal_but_for("driver", {cell: record for cell, record in records.items() if not cell.is_plain})


def test_up_to_two_ranks_all_bucket_sizes_are_bitwise_equal(records):
    # The sum of two addends has one order only; of three it depends on where a bucket is cut.
    assert_equal_but_for("bucket_size", {cell: record for cell, record in records.items() if cell.ranks <= 2})


def test_a_repeated_run_is_bitwise_equal(pool, records, microbatches):
    cells = [cell for cell in records if cell.ranks == 3 and cell.overlap and cell.bucket_size == ONE_PARAMETER]
    again = run_cells(pool, cells)

    assert len(again) == (3 + 2 + 2) * len(microbatches)
    assert_none([f"{cell}: {text}" for cell in cells if (text := difference(again[cell], records[cell]))])
