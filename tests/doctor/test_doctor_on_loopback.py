"""The doctor on worlds that are well and on worlds that lie: each lie is found, and said by name."""

from __future__ import annotations

from functools import cache

import pytest
from liars import (
    Garbler,
    Liar,
    Refuser,
    Spoiler,
    counting,
    dropping,
    examine,
    line,
    rounding,
    scaling_before_averaging,
    summing_instead_of_averaging,
)

from megabucket.comm import AllGather, AllReduce, ReduceOp
from megabucket.config import DistributedDataParallelConfig
from megabucket.doctor import Status, run_doctor
from megabucket.errors import CollectiveError, ConfigError
from megabucket.testing import LoopbackWorld

AVERAGING = DistributedDataParallelConfig(average_in_collective=True)
SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True)
GRADIENTS = "gradients as configured"
BITS = "all ranks hold the same bits"


def honest(communicator):
    return communicator


@cache
def examine_an_honest_world(size):
    """Return the report of a world that is well, which several tests read."""
    return examine(size, honest)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_honest_world_is_healthy(size):
    report = examine_an_honest_world(size)

    assert report.findings == ()
    assert report.is_healthy
    assert report.num_ranks == size
    assert len(report.lines) == 10
    assert line(report, GRADIENTS).answer == "exact"
    assert line(report, "all-reduce SUM").answer == "exact"
    assert line(report, "float32 sums are precise").answer == "no error is larger than float32 rounding explains"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("config", [None, SHARDED], ids=["all-reduce", "reduce-scatter"])
def test_a_rank_whose_contribution_is_dropped_is_named_everywhere(size, config):
    report = examine(size, lambda communicator: Liar(communicator, dropping(1)), config)

    assert line(report, "all-reduce SUM").answer == "torch.float32: rank 1 is missing"
    assert line(report, "reduce-scatter in place").answer == "torch.float32: rank 1 is missing"
    gradients = line(report, GRADIENTS)
    assert gradients.answer == "step 1: rank 1 is missing (in bfloat16, float16, float32)"
    assert gradients.ranks == (1,)
    assert not report.is_healthy


def test_a_rank_that_is_counted_twice_is_named_everywhere():
    report = examine(3, lambda communicator: Liar(communicator, counting(2, times=2)))

    assert line(report, "all-reduce SUM").answer == "torch.float32: rank 2 is counted 2x instead of 1x"
    assert line(report, GRADIENTS).answer.startswith("step 1: rank 2 is counted 2x instead of 1x (in ")
    assert line(report, GRADIENTS).ranks == (2,)


def test_a_lie_that_only_the_wrapper_s_own_collectives_are_told_is_found_in_gradients():
    report = examine(2, lambda communicator: Liar(communicator, dropping(0), only="bucket"))

    (found,) = report.findings
    assert found.question == GRADIENTS
    assert found.answer == "step 1: rank 0 is missing (in bfloat16, float16, float32)"
    assert found.ranks == (0,)


def test_avg_that_sums_is_found_where_the_config_uses_it_and_nowhere_else():
    lying = lambda communicator: Liar(communicator, summing_instead_of_averaging)  # noqa: E731

    report = examine(3, lying, AVERAGING)

    (found,) = report.findings
    assert found.answer.startswith("step 1: every value is 3 times the right one (in ")
    assert examine(3, lying).is_healthy


def test_avg_that_rounds_first_is_a_note_with_its_error():
    narrow = AVERAGING.model_copy(update={"grad_reduce_in_fp32": False})

    report = examine(3, lambda communicator: Liar(communicator, scaling_before_averaging(3)), narrow)

    assert report.is_healthy
    gradients = line(report, GRADIENTS)
    assert gradients.status is Status.NOTE
    assert gradients.answer.startswith("rounded by up to ")


def test_sums_that_lose_digits_on_the_way_are_found():
    report = examine(2, lambda communicator: Liar(communicator, rounding))

    precision = line(report, "float32 sums are precise")
    assert precision.status is Status.FINDING
    # Three digits less than float32.
    assert precision.answer.endswith(" times the most that float32 rounding can cause")
    assert float(precision.answer.removeprefix("the largest error is ").split()[0]) > 100
    assert line(report, "all-reduce SUM").status is Status.HOLDS  # small whole numbers have few digits


def test_a_rank_that_receives_something_else_is_named():
    report = examine(3, lambda communicator: Spoiler(communicator, AllReduce, rank=1))

    digests = line(report, BITS)
    assert digests.status is Status.FINDING
    assert digests.ranks == (1,)
    assert line(report, GRADIENTS).status is Status.FINDING
    assert line(report, GRADIENTS).ranks == (1,)


def test_a_gather_that_brings_wrong_parameters_is_found_after_the_update():
    spoiling = lambda communicator: Spoiler(communicator, AllGather, rank=1)  # noqa: E731

    report, all_reducing = examine(2, spoiling, SHARDED), examine(2, spoiling)

    assert line(report, "all-gather").ranks == (1,)
    assert line(all_reducing, GRADIENTS).status is Status.HOLDS
    gradients = line(report, GRADIENTS)
    assert gradients.ranks == (1,)
    assert gradients.answer.partition("; ")[2].startswith("step 1: not a sum of ranks: element 0 is ")


def test_a_missing_avg_is_found_where_the_config_asks_for_it():
    refusing = lambda communicator: Refuser(communicator, ReduceOp.AVG)  # noqa: E731

    (found,) = examine(2, refusing, AVERAGING).findings

    assert found.answer == "refused: RuntimeError: Cannot use ReduceOp.AVG here"
    assert examine(2, refusing).is_healthy


def test_a_missing_max_is_a_finding_because_of_the_fence():
    report = examine(2, lambda communicator: Refuser(communicator, ReduceOp.MAX))

    assert line(report, "all-reduce MAX of integers").status is Status.FINDING
    assert line(report, "all-reduce MAX of integers").meaning.startswith("the fence")


@pytest.mark.parametrize(
    "fields",
    [
        {"use_distributed_optimizer": True, "overlap_param_gather": True, "num_buckets": 500},
        {"layout": "megatron", "overlap_grad_reduce": False, "bucket_size": 40},
        {"finish": "explicit", "bucket_cap_mb": 0.001, "grad_reduction": "sum", "fence": False},
        {"grad_reduce_in_fp32": False, "use_distributed_optimizer": True, "pad_buckets_for_high_nccl_busbw": True},
        {"bucket_groups": "single", "average_in_collective": True, "bucket_size": 40},
    ],
)
def test_the_configured_path_is_tried_as_it_is(fields):
    report = examine(2, honest, DistributedDataParallelConfig(**fields))

    assert report.findings == ()
    assert line(report, GRADIENTS).answer == "exact"


def test_ranks_with_different_configs_are_named():
    world = LoopbackWorld(3, timeout_s=60)
    configs = [DistributedDataParallelConfig(bucket_size=size) for size in (1000, 1000, 2000)]

    reports = world.run(lambda rank: run_doctor(configs[rank], communicator=world.communicator(rank)))

    assert reports[0].lines == reports[2].lines
    assert line(reports[0], "config").ranks == (2,)
    assert line(reports[0], "config").status is Status.FINDING
    # The real wrapper refuses on every rank, and the other questions are answered all the same.
    assert "LayoutMismatchError" in line(reports[0], GRADIENTS).answer


def test_each_question_is_announced():
    asked = []

    run_doctor(note=asked.append)

    assert asked[0] == "asking: ranks and versions"
    assert len(asked) == 10


def test_garbled_facts_end_the_examination():
    world = LoopbackWorld(2, timeout_s=60)

    with pytest.raises(CollectiveError, match="cannot compare their facts"):
        world.run(lambda rank: run_doctor(communicator=Garbler(world.communicator(rank))))


def test_a_communicator_and_a_group_are_one_too_many():
    with pytest.raises(ConfigError, match="drop process_group="):
        run_doctor(communicator=LoopbackWorld(1).communicator(0), process_group=object())
