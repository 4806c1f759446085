"""``unused_parameters="skip"``: what no rank has used in a step stays as it was, and what some have used is reduced."""

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from grids import Grid
from hypothesis import given
from hypothesis import strategies as st
from loop_ranks import Ranks, Weights, grads, optimizer_of
from test_instances import Grid as Replicas

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, finalize_grads
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.errors import (
    ConfigError,
    MegabucketError,
    NonFiniteGradientError,
    TrainabilityChangedError,
    UnusedParameterError,
)
from megabucket.layout.identity import plain_identity
from megabucket.testing import LoopbackWorld

BYTES, FENCE = "unused parameters of dense", "fence"
MODES = [(sharded, overlaps) for sharded in (False, True) for overlaps in (True, False)]


class Parts(Weights):
    """Of which a forward may use none: its output then depends on its input only."""

    def forward(self, **factors):
        return super().forward(**factors) + torch.ones(1, requires_grad=True).sum()


def skipping(size=2, model=None, **switches):
    return Ranks(size, model or Parts(), unused_parameters="skip", **{"bucket_size": 150, **switches})


def take_step(ddp, *microbatches):
    """Run backwards, each with the factor of each weight that it uses, and finish the sync."""
    for factors in microbatches[:-1]:
        with ddp.no_sync():
            ddp(**factors).backward()
    ddp(**microbatches[-1]).backward()
    ddp.finish_grad_sync(force_all_reduce=ddp.ddp_config.use_distributed_optimizer)


# On any ranks, in any steps #

CLEARINGS = {
    "removed": lambda ddp: ddp.zero_grad(),
    "zeroed": lambda ddp: ddp.zero_grad(set_to_none=False),
    "removed by torch": lambda ddp: ddp.module.zero_grad(),
    "zeroed by torch": lambda ddp: ddp.module.zero_grad(set_to_none=False),
    "kept": lambda _: None,
}
# A gradient that is kept is scaled again in each of up to four steps: at three ranks whole numbers stay whole with 3**4.
FACTORS = st.dictionaries(st.sampled_from("abcd"), st.integers(-3, 3).map(lambda factor: 2.0 * 3**4 * factor), max_size=4)
STEPS = st.lists(st.tuples(st.lists(FACTORS, min_size=6, max_size=6), st.sampled_from(list(CLEARINGS))), min_size=1, max_size=4)


@given(
    size=st.integers(1, 3),
    num_microbatches=st.integers(1, 2),
    steps=STEPS,
    sharded=st.booleans(),
    overlaps=st.booleans(),
    finish=st.sampled_from(["auto", "explicit"]),
    bucket_size=st.sampled_from([1, 150, 10_000]),
)
def test_each_gradient_is_that_of_before_plus_the_mean_and_none_if_there_was_none_and_no_rank_has_one(
    size, num_microbatches, steps, sharded, overlaps, finish, bucket_size
):
    ranks = skipping(
        size, use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps, finish=finish, bucket_size=bucket_size
    )
    ways = [clearing.removesuffix(" by torch").replace("kept", "zeroed") if sharded else clearing for _, clearing in steps]

    def run(rank, ddp):
        found = []
        for (microbatches, _), clearing in zip(steps, ways, strict=True):
            take_step(ddp, *microbatches[rank::size][:num_microbatches])
            found.append((grads(ddp.module), ddp.sync.skipped))
            CLEARINGS[clearing](ddp)
        return found

    expected, before = [], dict.fromkeys("abcd")
    for (microbatches, _), clearing in zip(steps, ways, strict=True):
        given_factors = [factors for rank in range(size) for factors in microbatches[rank::size][:num_microbatches]]
        after = dict(before)
        for name in {name for factors in given_factors for name in factors}:
            total = sum(Fraction(factors.get(name, 0)) for factors in given_factors)
            after[name] = (before[name] or 0) + float(total / size)
        expected.append((after, {name for name, value in after.items() if value is None}))
        is_zeroed = clearing.startswith("zeroed")
        before = after if clearing == "kept" else {n: 0.0 if is_zeroed and v is not None else None for n, v in after.items()}
    assert ranks.run(run) == [expected] * size
    for rank in range(size):
        assert ranks.schedule(rank) == ranks.schedule(0)
        assert ranks.schedule(rank).count(BYTES) == (len(steps) if size > 1 else 0)


@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
def test_the_bytes_go_out_after_the_last_bucket_and_before_the_fence(sharded, overlaps):
    ranks = skipping(use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps, num_buckets=2, bucket_size=None)

    ranks.run(lambda _, ddp: [ddp(a=1.0).backward(), optimizer_of(ddp).step()] if not sharded else ddp(a=1.0).backward())
    ranks.run(lambda _, ddp: ddp.finish_grad_sync())

    assert ranks.schedule()[:4] == ["bucket 0", "bucket 1", BYTES, FENCE]


@pytest.mark.parametrize("unused", ["error", "zero"])
@pytest.mark.parametrize("sharded", [False, True])
def test_without_it_no_rank_sends_anything_else(unused, sharded):
    ranks = Ranks(2, Parts(), unused_parameters=unused, use_distributed_optimizer=sharded, bucket_size=150)

    ranks.run(lambda _, ddp: take_step(ddp, dict.fromkeys("abcd", 1.0)))

    gathers = ["gradient gather 0", "gradient gather 1"] if sharded else []
    assert ranks.schedule() == ["bucket 0", "bucket 1", FENCE, *gathers]


# Where gradients are not those of autograd #


def test_a_gradient_that_was_kept_is_left_to_the_last_bit():
    """The mean of three equal numbers is not always that number."""
    ranks = skipping(3, grad_reduce_in_fp32=False, model=Parts(dtype=torch.bfloat16))
    value = 1.0 + 2.0**-7

    def run(_, ddp):
        take_step(ddp, {"a": 1.0, "b": 1.0})
        for step in range(3):
            ddp.module.b.grad.fill_(value)
            take_step(ddp, {"a": float(step)})
        return grads(ddp.module)["b"]

    assert ranks.run(run) == [value] * 3


def test_values_added_by_hand_to_buffers_of_zeros_count():
    ranks = skipping(2)

    def run(rank, ddp):
        ddp.zero_grad_buffer()
        ddp.module.b.main_grad.fill_(2.0 * (rank + 1))
        take_step(ddp, {"a": 1.0})
        return grads(ddp.module), ddp.sync.skipped

    assert ranks.run(run) == [({"a": 1.0, "b": 3.0, "c": 0.0, "d": 0.0}, frozenset())] * 2


@pytest.mark.parametrize("comes_on", [(), (1,), (0, 1)])
def test_a_delayed_gradient_may_be_missing(comes_on):
    model = Parts()
    model.a.skip_backward_post_hook = True
    ranks = skipping(2, model=model, finish="explicit", prepare=lambda _, module: setattr(module.a, *DELAYED))

    def run(rank, ddp):
        ddp(b=1.0).backward()
        if rank in comes_on:
            ddp.module.a.grad = torch.full((100,), 4.0)
            ddp.grad_ready(ddp.module.a)
        ddp.finish_grad_sync()
        return grads(ddp.module)["a"], "a" in ddp.sync.skipped

    assert ranks.run(run) == [(2.0 * len(comes_on) if comes_on else None, not comes_on)] * 2


DELAYED = ("skip_backward_post_hook", True)


# Groups #


def experts(size, config="skip", **unused):
    """One wrapper per rank: ``a`` and ``b`` on all ranks, ``c`` and ``d`` on every second one."""
    world = LoopbackWorld(size, timeout_s=20)
    pairs = {}
    for first in range(size // 2):
        pairs |= world.subgroup([first, first + size // 2])

    def wrap(rank):
        groups = {"dense": world.communicator(rank), "expert": ReductionGroup(pairs[rank], divisor=2, **unused)}
        given = ParallelGroups(groups, group_of={"[cd]": "expert"})
        config_of = DistributedDataParallelConfig(unused_parameters=config, bucket_size=1)
        return DistributedDataParallel(Parts(), config_of, groups=given)

    return world, world.run(wrap)


def test_each_group_decides_for_itself():
    world, ddps = experts(4)

    def run(rank):
        # Ranks 0 and 2 share their experts, and rank 2 uses one of them; nobody uses those of ranks 1 and 3.
        take_step(ddps[rank], {"a": 1.0, "c": 8.0} if rank == 2 else {"a": 1.0})
        return grads(ddps[rank].module), ddps[rank].sync.skipped

    with_c = ({"a": 1.0, "b": None, "c": 4.0, "d": None}, {"b", "d"})
    without = ({"a": 1.0, "b": None, "c": None, "d": None}, {"b", "c", "d"})
    assert world.run(run) == [with_c, without, with_c, without]
    launched = [text.split(" [")[0] for text in world.schedule(0)]
    assert launched[-3:] == ["unused parameters of expert", BYTES, FENCE]  # as their buckets


def test_experts_may_have_gradients_to_keep_on_the_ranks_of_one_group_only():
    world, ddps = experts(4)

    def run(rank):
        for _ in range(2):
            take_step(ddps[rank], {"a": 1.0, "c": 8.0} if rank == 2 else {"a": 1.0})
            ddps[rank].module.zero_grad(set_to_none=False)
        return grads(ddps[rank].module)["c"]

    assert world.run(run) == [0.0, None, 0.0, None]


@pytest.mark.parametrize(
    ("config", "of_experts", "expected"),
    [
        ("skip", None, {"a": 1.0, "b": None, "c": None, "d": None}),
        ("skip", "zero", {"a": 1.0, "b": None, "c": 0.0, "d": 0.0}),
        ("zero", None, {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}),
        ("zero", "skip", {"a": 1.0, "b": 0.0, "c": None, "d": None}),
    ],
)
def test_other_groups_than_dense_may_differ_and_do_as_the_config_if_that_skips(config, of_experts, expected):
    world, ddps = experts(2, config, unused_parameters=of_experts)

    def run(rank):
        take_step(ddps[rank], {"a": 1.0})
        return grads(ddps[rank].module)

    assert world.run(run) == [expected] * 2


def test_experts_may_still_have_to_be_used():
    world, ddps = experts(2, unused_parameters="error")

    def run(rank):
        with pytest.raises(UnusedParameterError) as caught:
            take_step(ddps[rank], {"a": 1.0})
        return caught.value.params

    assert world.run(run) == [("d", "c")] * 2


@pytest.mark.parametrize("completion", ["immediate", "at_wait"])
def test_all_replicas_of_the_shards_decide_together(completion):
    grid = Replicas([[0, 1], [2, 3]], completion=completion)
    ddps = grid.run(lambda rank: grid.wrap(rank, Parts(), unused_parameters="skip"))

    def run(rank):
        found = []
        for _ in range(2):
            take_step(ddps[rank], {"a": 1.0, "b": 8.0} if rank == 3 else {"a": 1.0})
            found.append((grads(ddps[rank].module) if rank < 0 else None, ddps[rank].sync.skipped))
            ddps[rank].zero_grad()
        return found

    assert grid.run(run) == [[(None, {"c", "d"})] * 2] * 4


def test_a_sum_over_copies_counts_as_used():
    """Here no rank has used the parameter, but another copy of it may have a gradient that ``finalize_grads`` adds."""
    grid = Grid(2, 2)

    def identity(name, param):
        found = plain_identity(name, tuple(param.shape))
        return replace(found, copies=("tp",), partial=("tp",) if name == "b" else ())

    config = {"unused_parameters": "skip", "finish": "explicit"}
    ddps = grid.run(lambda rank: grid.wrap(rank, Parts(), config=config, reduction=["dense"], copies=["tp"], identity=identity))

    def run(rank):
        ddps[rank](**({"a": 1.0, "b": 3.0} if rank % 2 else {"a": 1.0})).backward()
        finalize_grads(ddps[rank])
        return grads(ddps[rank].module), ddps[rank].sync.skipped

    assert grid.run(run) == [({"a": 1.0, "b": 3.0, "c": None, "d": None}, {"c", "d"})] * 4


# Steps that are dropped #


def fails_in_forward(ddp):
    with ddp.step():
        raise ValueError("no batch")


def fails_in_backward(ddp):
    loss = ddp(a=1.0)
    loss.register_hook(lambda _: 1 / 0)
    loss.backward()


def has_nan(ddp):
    ddp(a=float("nan"), b=1.0).backward()
    ddp.finish_grad_sync()


def aborts(ddp):
    ddp(a=1.0)
    ddp.abort_step("no")


def calls(ddp):
    ddp.check_replicas()


FAULTS = {
    "forward": fails_in_forward,
    "backward": fails_in_backward,
    "nan": has_nan,
    "abort": aborts,
    "call": calls,
}


@pytest.mark.pairs
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
def test_all_ranks_send_the_same_in_a_step_that_is_dropped_and_the_next_one_is_right(fault, sharded, overlaps):
    ranks = skipping(2, use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps)

    def run(rank, ddp):
        take_step(ddp, {"a": 1.0, "b": 2.0})  # buckets learn how many gradients to expect
        ddp.zero_grad()
        with suppress(MegabucketError, ValueError, ZeroDivisionError):
            FAULTS[fault](ddp) if rank == 1 else take_step(ddp, {"a": 1.0, "b": 2.0})
        ddp.zero_grad()
        take_step(ddp, {"a": 1.0, "c": 2.0} if rank else {"a": 1.0})
        return grads(ddp.module), ddp.sync.skipped, ddp.last_error is not None

    assert ranks.run(run) == [({"a": 1.0, "b": None, "c": 1.0, "d": None}, {"b", "d"}, True)] * 2
    on_data = [[label for label in ranks.schedule(rank) if label.startswith("bucket") or label == BYTES] for rank in (0, 1)]
    assert on_data[0] == on_data[1] == ["bucket 0", "bucket 1", BYTES] * 3


def test_a_sum_that_overflows_drops_the_step_with_its_bytes():
    ranks = skipping(2, grad_reduce_in_fp32=False, model=Parts(dtype=torch.float16), grad_reduction="sum")

    def run(_, ddp):
        with pytest.raises(NonFiniteGradientError):
            take_step(ddp, {"a": 4e4, "b": 1.0})
        take_step(ddp, {"a": 1.0})
        return grads(ddp.module)

    assert ranks.run(run) == [{"a": 2.0, "b": None, "c": None, "d": None}] * 2


# Torch DDP's argument #


class TestFindUnusedParameters:
    def test_it_is_this_setting(self):
        ddp = DistributedDataParallel(Parts(), find_unused_parameters=True)

        assert ddp.ddp_config == DistributedDataParallelConfig(unused_parameters="skip")

    @pytest.mark.parametrize(("given", "unused"), [(False, "zero"), (True, "skip")])
    def test_it_may_say_what_the_config_says(self, given, unused):
        config = DistributedDataParallelConfig(unused_parameters=unused)

        assert DistributedDataParallel(Parts(), config, find_unused_parameters=given).ddp_config == config

    @pytest.mark.parametrize("unused", ["zero", "error"])
    def test_it_may_not_contradict_the_config(self, unused):
        config = DistributedDataParallelConfig(unused_parameters=unused)

        with pytest.raises(ConfigError, match=f"find_unused_parameters=True is .* has unused_parameters='{unused}'; keep one"):
            DistributedDataParallel(Parts(), config, find_unused_parameters=True)


# Parameters that are frozen for a while #


@pytest.mark.parametrize(("sharded", "overlaps"), MODES)
@pytest.mark.parametrize("ranks_that_freeze", [(0, 1), (1,)])
def test_a_parameter_that_is_frozen_for_a_step_counts_as_unused_there(sharded, overlaps, ranks_that_freeze):
    ranks = skipping(use_distributed_optimizer=sharded, overlap_grad_reduce=overlaps)

    def run(rank, ddp):
        optimizer, found = optimizer_of(ddp), []
        for step in range(3):
            ddp.module.a.requires_grad_(not (step == 1 and rank in ranks_that_freeze))
            take_step(ddp, {"a": 2.0, "b": 4.0})
            found.append(grads(ddp.module))
            optimizer.step()
            ddp.module.a.requires_grad_(True)
            ddp.zero_grad()
        return found, ddp.module.a[0].item(), ddp.module.b[0].item()

    # Zeros of the rank that has frozen it: (2 + 0) / 2.
    of_a = None if len(ranks_that_freeze) == 2 else 1.0
    expected = [{"a": a, "b": 4.0, "c": None, "d": None} for a in (2.0, of_a, 2.0)]
    assert ranks.run(run) == [(expected, 1 - 4.0 - (of_a or 0.0), 1 - 12.0)] * 2


@pytest.mark.parametrize("unused", ["error", "zero"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_frozen_parameter_is_an_error_that_names_skip_where_it_is_not_left_alone(sharded, unused):
    ranks = Ranks(2, Parts(), unused_parameters=unused, use_distributed_optimizer=sharded, bucket_size=150)

    def run(rank, ddp):
        ddp.module.a.requires_grad_(rank == 0)
        with pytest.raises(TrainabilityChangedError, match=r"frozen 'a'.*wrap with unused_parameters='skip'") as caught:
            take_step(ddp, dict.fromkeys("abcd", 1.0))
        ddp.module.a.requires_grad_(True)
        take_step(ddp, dict.fromkeys("abcd", 1.0))
        return str(caught.value)

    first, second = ranks.run(run)

    assert first == second


@pytest.mark.parametrize("sharded", [False, True])
def test_a_parameter_that_becomes_trainable_is_still_an_error(sharded):
    model = Parts()
    model.d.requires_grad_(False)
    ranks = skipping(2, model, use_distributed_optimizer=sharded)

    def run(rank, ddp):
        ddp.module.d.requires_grad_(True)
        ddp.module.a.requires_grad_(False)
        with pytest.raises(
            TrainabilityChangedError, match=r"rank 0 has unfrozen 'd' .*on every rank after changing requires_grad\. The"
        ):
            take_step(ddp, {"b": 1.0, "d": 1.0})

    ranks.run(run)
