"""With ``reduction_order="rank"`` no bit depends on the bucket plan, the mode or overlap: random models in loopback worlds.

Loopback worlds add in the order of gloo's ring otherwise, so the opposite shows as well.
"""

import pytest
import torch
from hypothesis import given, settings
from pydantic import ValidationError
from sum_orders import Case, cases_and_plans, check, in_loopback, train

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, finalize_grads
from megabucket.ddp.groups import ParallelGroups
from megabucket.errors import ConfigError
from megabucket.testing import LoopbackWorld

IS_NIGHTLY = settings.default.max_examples >= 2_000
ONE_BUCKET, MANY_BUCKETS = {"bucket_cuts": ()}, {"bucket_size": 1}
SHARDED = {"use_distributed_optimizer": True}


@pytest.mark.timeout(3_600)
@settings(max_examples=settings.default.max_examples if IS_NIGHTLY else 20)
@given(drawn=cases_and_plans())
def test_any_two_plans_train_alike_to_the_bit_and_as_sums_in_rank_order_in_one_process(drawn):
    case, plans = drawn

    check(case, [in_loopback(case, plan) for plan in plans])


def differences(case, *fields):
    first, *others = [in_loopback(case, one) for one in fields]
    return [ours.difference(theirs) for other in others for ours, theirs in zip(first, other, strict=True)]


@pytest.mark.parametrize("clip_grad", [0.0, 1e-2])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_backends_order_depends_on_the_plan_with_three_ranks_or_more_and_rank_order_does_not(size, clip_grad):
    case = Case(size=size, clip_grad=clip_grad, seed=1)
    backend = {"reduction_order": "backend"}

    assert all(differences(case, {**ONE_BUCKET, **backend}, {**MANY_BUCKETS, **backend}))
    assert not any(differences(case, ONE_BUCKET, MANY_BUCKETS, {**ONE_BUCKET, **SHARDED}, {**MANY_BUCKETS, **SHARDED}))


@pytest.mark.parametrize("fields", [{}, SHARDED], ids=["all-reduce", "reduce-scatter"])
def test_another_plan_from_the_second_step_on_changes_no_bit(fields):
    case = Case(size=3, clip_grad=1e-2)

    found = in_loopback(case, {**ONE_BUCKET, **fields}, rebuilt=MANY_BUCKETS)

    assert [one.difference(other) for one, other in zip(found, in_loopback(case, ONE_BUCKET), strict=True)] == [""] * 3


def test_what_the_ranks_launch():
    """Buckets are reduce-scattered in backward and gathered after the fence; the norm of whole gradients sends nothing."""
    world, case = LoopbackWorld(2), Case(size=2)
    world.run(lambda rank: train(case, rank, {"bucket_cuts": ("dense_1",)}, {"communicator": world.communicator(rank)}))

    labels = [text.split(" of ")[0] for text in world.schedule(0)]
    step = labels[labels.index("bucket 0 [reduce_scatter sum") :][:5]
    assert step == [
        "bucket 0 [reduce_scatter sum",
        "bucket 1 [reduce_scatter sum",
        "fence [all_reduce max",
        "gradient gather 0 [all_gather",
        "gradient gather 1 [all_gather",
    ]


def test_copies_on_other_ranks_are_added_in_rank_order():
    # Three ranks hold copies with parts of a gradient each: next to 2**24 a float32 has steps of 2, so that
    # (1 + 2**24) - 2**24 = 0 and (2**24 - 2**24) + 1 = 1. The ring adds the last third in the order 1, 0, 2.
    values = [1.0, 2.0**24, -(2.0**24)]
    found = {}

    for order in ("backend", "rank"):
        world = LoopbackWorld(3)
        everybody = world.subgroup([0, 1, 2])
        alone_in_data = [world.subgroup([rank])[rank] for rank in range(3)]

        def program(rank, order=order, everybody=everybody, alone_in_data=alone_in_data):
            module = torch.nn.Module()
            module.w = torch.nn.Parameter(torch.zeros(1200))
            module.w.sequence_parallel = True
            module.forward = lambda value: (module.w * value).sum()
            groups = ParallelGroups(
                {"dense": alone_in_data[rank]},
                copies={"tp": everybody[rank]},
                norm_group=everybody[rank],
                step_group=everybody[rank],
            )
            config = DistributedDataParallelConfig(reduction_order=order, finish="explicit")
            ddp = DistributedDataParallel(module, config, groups=groups)
            ddp(values[rank]).backward()
            finalize_grads(ddp)
            return module.w.main_grad.tolist()

        found[order] = world.run(program)

    assert found["rank"] == [[0.0] * 1200] * 3
    assert found["backend"][0] == found["backend"][1] != found["rank"][0]


@pytest.mark.parametrize("norm_type", [3.0, 1.5])
def test_other_norms_are_refused_before_a_step_and_when_asked_for_later(norm_type):
    def program(communicator):
        ddp = DistributedDataParallel(
            torch.nn.Linear(2, 2), DistributedDataParallelConfig(reduction_order="rank"), communicator=communicator
        )
        with pytest.raises(ConfigError, match=rf"norm_type 1, 2 or infinite, got norm_type={norm_type}"):
            DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, norm_type=norm_type)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
        ddp(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ConfigError, match="norm_type 1, 2 or infinite"):
            optimizer.clip_grad_norm_(1.0, norm_type=norm_type)
        assert float(optimizer.clip_grad_norm_(1.0, norm_type=1)) == 6.0

    program(LoopbackWorld(1).communicator(0))


def test_buckets_that_are_not_padded_have_no_equal_parts():
    with pytest.raises(ValidationError, match=r"reduction_order='rank' adds equal parts .* use layout='stable'"):
        DistributedDataParallelConfig(reduction_order="rank", layout="megatron")

    DistributedDataParallelConfig(reduction_order="rank", layout="megatron", use_distributed_optimizer=True)
