"""Training with buckets that are cut by name, in a recorded order; and taking another plan while training."""

import pytest
import torch
from loop_ranks import Ranks, Weights

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import ConfigError, LayoutMismatchError, PeerFailedError, PhaseError

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])

# Backward makes the gradients of d, c, b, a in this order, for Weights adds its terms up in the order of the names.
BACKWARDS = ("d", "c", "b", "a")
FACTORS = {"a": 1, "b": 2, "c": 3, "d": 4}


def train(rank, ddp, *, steps=2, lr=0.5):
    """Steps of plain SGD with momentum, on factors that differ between ranks and steps."""
    torch_optimizer = torch.optim.SGD(ddp.module.parameters(), lr=lr, momentum=0.5)
    optimizer = DistributedOptimizer(torch_optimizer, ddp)
    for step in range(steps):
        take_step(rank, ddp, optimizer, step)
    return optimizer


def take_step(rank, ddp, optimizer, step):
    names = [name for name, param in ddp.module.named_parameters() if param.requires_grad]
    ddp(**{name: FACTORS[name] * (rank + 1) * (step + 1) for name in names}).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_by_hand(num_ranks, steps, *, lr=0.5, momentum=0.5):
    """The same in numbers: every element of a vector has one value."""
    values, velocities = dict.fromkeys(FACTORS, 1.0), dict.fromkeys(FACTORS, 0.0)
    for step in range(steps):
        for name, factor in FACTORS.items():
            grad = factor * (step + 1) * sum(rank + 1 for rank in range(num_ranks)) / num_ranks
            velocities[name] = momentum * velocities[name] + grad
            values[name] -= lr * velocities[name]
    return values


def values_of(module):
    return {name: set(param.detach().flatten().tolist()) for name, param in module.named_parameters()}


@MODES
@pytest.mark.parametrize(
    ("order", "cuts", "buckets"),
    [
        (BACKWARDS, ("d", "c"), [("d",), ("c",), ("b", "a")]),
        (("a", "c", "b", "d"), ("c",), [("a", "c"), ("b", "d")]),  # not the order of backward: buckets wait, nothing breaks
        (("b", "a", "c", "d"), (), [("b", "a", "c", "d")]),
        (None, ("b",), [("d", "c", "b"), ("a",)]),
    ],
)
def test_a_model_with_cuts_and_another_order_trains_as_by_hand(sharded, order, cuts, buckets):
    ranks = Ranks(2, Weights(), use_distributed_optimizer=sharded, bucket_cuts=cuts, bucket_order=order)

    ranks.run(train)

    assert [tuple(slot.name for slot in group.slots) for group in ranks.ddps[0].bucket_groups] == buckets
    sent = [label for label in ranks.schedule() if label.startswith("bucket ")]
    assert sent == [f"bucket {index}" for index in range(len(buckets))] * 2
    expected = {name: {value} for name, value in trained_by_hand(2, steps=2).items()}
    assert [values_of(module) for module in ranks.modules] == [expected, expected]


def test_a_plan_reaches_buckets_of_two_dtypes_in_the_order_in_which_they_are_complete():
    model = Weights("abcd")
    for name in "bd":
        setattr(model, name, torch.nn.Parameter(getattr(model, name).detach().to(torch.float64)))

    ranks = Ranks(2, model, use_distributed_optimizer=True, bucket_cuts=("c",), bucket_order=("c", "b", "d", "a"))
    ranks.run(train)

    assert [[slot.name for slot in group.slots] for group in ranks.ddps[0].bucket_groups] == [["c"], ["b", "d"], ["a"]]
    expected = {name: {value} for name, value in trained_by_hand(2, steps=2).items()}
    assert [values_of(module) for module in ranks.modules] == [expected, expected]


# Agreement


def refusals(world, modules, configs):
    def wrap(rank):
        try:
            DistributedDataParallel(modules[rank], configs[rank], communicator=world.communicator(rank))
        except Exception as error:
            return error
        return None

    return world.run(wrap)


def test_ranks_with_other_cuts_or_orders_are_told_the_names_that_differ():
    world = Ranks(2, Weights()).world
    configs = [
        DistributedDataParallelConfig(bucket_cuts=("c",), bucket_order=("d", "c", "b", "a")),
        DistributedDataParallelConfig(bucket_cuts=("b",), bucket_order=("d", "c", "a", "b")),
    ]

    errors = refusals(world, [Weights(), Weights()], configs)

    assert [type(error) for error in errors] == [LayoutMismatchError] * 2
    assert [difference.split(": ", 1)[1] for difference in errors[0].differences] == [
        "rank 0 has config bucket_cuts[0]=c, rank 1 has config bucket_cuts[0]=b",
        "rank 0 has config bucket_order[2]=b, rank 1 has config bucket_order[2]=a",
        "rank 0 has config bucket_order[3]=a, rank 1 has config bucket_order[3]=b",
    ]


def test_a_rank_without_cuts_is_told_so():
    world = Ranks(2, Weights()).world

    errors = refusals(world, [Weights(), Weights()], [DistributedDataParallelConfig(bucket_cuts=("c",)), None])

    differences = [difference.split(": ", 1)[1] for difference in errors[0].differences]
    assert "rank 0 has config bucket_cuts=1 names, rank 1 has config bucket_cuts=None" in differences


# Rebuilding


@MODES
def test_a_rebuild_takes_another_plan_and_training_goes_on_with_the_same_moments(sharded):
    before = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    after = before.model_copy(update={"bucket_cuts": ("b", "d"), "bucket_order": ("b", "d", "a", "c")})
    ranks = Ranks(2, Weights(), use_distributed_optimizer=sharded)

    def program(rank, ddp):
        optimizer = train(rank, ddp, steps=1)
        ddp.rebuild(after)
        take_step(rank, ddp, optimizer, 1)

    ranks.run(program)

    assert ranks.ddps[0].ddp_config == after
    assert [[slot.name for slot in group.slots] for group in ranks.ddps[0].bucket_groups] == [["b"], ["d"], ["a", "c"]]
    expected = {name: {value} for name, value in trained_by_hand(2, steps=2).items()}
    assert [values_of(module) for module in ranks.modules] == [expected, expected]


@MODES
def test_cuts_at_a_parameter_that_is_frozen_now_end_the_rebuild_until_a_config_fits(sharded):
    fields = {"use_distributed_optimizer": sharded, "bucket_cuts": ("c",)}
    ranks = Ranks(2, Weights(), **fields)

    def program(rank, ddp):
        ddp.module.c.requires_grad_(False)
        with pytest.raises(ConfigError, match="bucket_cuts names 'c', not among the 3 trainable parameters"):
            ddp.rebuild()
        with pytest.raises(PhaseError, match="the module is not wrapped, because rebuild\\(\\) has failed"):
            ddp.sync  # noqa: B018
        ddp.rebuild(DistributedDataParallelConfig(**{**fields, "bucket_cuts": ("b",)}))
        train(rank, ddp)

    ranks.run(program)

    assert [[slot.name for slot in group.slots] for group in ranks.ddps[0].bucket_groups] == [["d", "b"], ["a"]]
    expected = {name: {value} for name, value in {**trained_by_hand(2, steps=2), "c": 1.0}.items()}
    assert [values_of(module) for module in ranks.modules] == [expected, expected]


def test_the_config_of_a_rebuild_that_failed_is_not_kept():
    ranks = Ranks(2, Weights())

    def program(_, ddp):
        with pytest.raises(ConfigError, match="bucket_cuts names 'nope'"):
            ddp.rebuild(DistributedDataParallelConfig(bucket_cuts=("nope",)))
        ddp.rebuild()

    ranks.run(program)

    assert ranks.ddps[0].ddp_config == DistributedDataParallelConfig()


def test_a_rebuild_cannot_change_what_is_not_a_plan_and_leaves_all_as_it_was():
    ranks = Ranks(2, Weights())
    other = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduction="sum", bucket_cuts=("c",))

    def program(rank, ddp):
        with pytest.raises(ConfigError) as caught:
            ddp.rebuild(other)
        train(rank, ddp)
        return str(caught.value)

    texts = ranks.run(program)

    assert (
        texts[0]
        == texts[1]
        == (
            "rebuild() cannot change use_distributed_optimizer=False to use_distributed_optimizer=True; grad_reduction=mean to "
            "grad_reduction=sum. It may only cut buckets anew, by bucket_cap_mb, bucket_cuts, bucket_groups, bucket_order, "
            "bucket_size, num_buckets; for the rest, detach and wrap again."
        )
    )
    expected = {name: {value} for name, value in trained_by_hand(2, steps=2).items()}
    assert [values_of(module) for module in ranks.modules] == [expected, expected]


def test_a_config_that_one_rank_cannot_take_is_refused_on_all():
    ranks = Ranks(2, Weights())
    configs = [DistributedDataParallelConfig(bucket_cuts=("c",)), DistributedDataParallelConfig(grad_reduction="sum")]

    def program(rank, ddp):
        with pytest.raises(PeerFailedError, match="rebuild\\(\\) cannot change grad_reduction=mean"):
            ddp.rebuild(configs[rank])
        train(rank, ddp)

    ranks.run(program)

    assert [len(ddp.bucket_groups) for ddp in ranks.ddps] == [1, 1]
