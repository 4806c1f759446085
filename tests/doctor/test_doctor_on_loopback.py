"""The doctor on worlds that are well and on worlds that lie: each lie is found, and said by name."""

from __future__ import annotations

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
from megabucket.doctor import Verdict, run_doctor
from megabucket.errors import CollectiveError, ConfigError
from megabucket.testing import LoopbackWorld


def honest(communicator):
    return communicator


def paths_with_findings(report):
    return [line for line in report.findings if line.section == "gradients"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_honest_world_is_healthy(size):
    report = examine(size, honest)

    assert report.findings == ()
    assert report.is_healthy
    assert report.num_ranks == size
    gradients = [line for line in report.lines if line.section == "gradients"]
    assert len(gradients) == 1 + 2 * 2 * 2 * 4  # as configured, then mode x overlap x grouping x reduction
    assert {line.answer for line in gradients} == {"exact"}
    assert [line.answer for line in report.lines if line.probe == "all-reduce of a large bucket"] == ["exact; sent"]


def test_what_needs_a_process_group_is_not_tried_without_one():
    report = examine(2, honest)

    group_lines = [line for line in report.lines if line.section == "process group"]
    assert {line.verdict for line in group_lines} == {Verdict.NOT_TRIED}
    assert {line.meaning for line in group_lines} == {"there is no process group"}


def test_two_ranks_cannot_tell_how_averages_and_bfloat16_sums_round():
    report = examine(2, honest)

    assert line(report, "all-reduce AVG, float32").answer == "sum / n (2 ranks cannot tell: 1/2 is exact)"
    assert line(report, "bfloat16 sums").answer == "2 ranks cannot tell: one addition rounds the same in both"


def test_three_ranks_tell_that_the_loopback_world_adds_in_the_tensors_own_dtype():
    report = examine(3, honest)

    assert line(report, "all-reduce AVG, bfloat16").answer == "sum / n"
    assert line(report, "bfloat16 sums").verdict is Verdict.NOTE
    # 256 + 1 is 256 in bfloat16, whose next value is 258
    assert line(report, "bfloat16 sums").answer == "added in bfloat16: 256 + 2 ones gave 256 instead of 258"


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_whose_contribution_is_dropped_is_named_everywhere(size):
    report = examine(size, lambda communicator: Liar(communicator, dropping(1)))

    assert line(report, "all-reduce SUM, float32").answer == "rank 1 is missing"
    assert line(report, "reduce-scatter in place, bfloat16").answer == "rank 1 is missing"
    paths = paths_with_findings(report)
    assert len(paths) == 33
    for path in paths:
        assert path.answer.startswith("step 1: rank 1 is missing (in '"), path
        assert path.ranks == (1,)
    assert not report.is_healthy


def test_a_rank_that_is_counted_twice_is_named_everywhere():
    report = examine(3, lambda communicator: Liar(communicator, counting(2, times=2)))

    assert line(report, "all-reduce SUM, float64").answer == "rank 2 is counted twice"
    paths = paths_with_findings(report)
    assert len(paths) == 33
    for path in paths:
        assert path.answer.startswith("step 1: rank 2 is counted twice (in '"), path
        assert path.ranks == (2,)


def test_a_lie_that_only_the_wrapper_s_own_collectives_are_told_is_found_on_its_paths():
    report = examine(2, lambda communicator: Liar(communicator, dropping(0), only="bucket"))

    assert {line.section for line in report.findings} == {"gradients"}
    configured = line(report, "as configured")
    assert configured.answer.startswith("step 1: rank 0 is missing (in 'float32_0', ")
    assert configured.answer.endswith(" and 7 more)")  # of 12 parameters, five are shown
    assert configured.ranks == (0,)
    assert configured.meaning == "training would go wrong without a word"


def test_avg_that_sums_is_found_on_its_own_and_on_the_paths_that_use_it():
    report = examine(3, lambda communicator: Liar(communicator, summing_instead_of_averaging))

    average = line(report, "all-reduce AVG, float32")
    assert average.verdict is Verdict.FINDING
    assert average.answer == "the sum, not divided, off by 200.0%"
    paths = paths_with_findings(report)
    assert len(paths) == 8
    for path in paths:
        assert "AVG" in path.probe
        assert path.answer.startswith("step 1: every value is 3 times the right one: not divided"), path


def test_avg_that_rounds_first_is_a_note_with_its_error_and_the_default_is_exact():
    report = examine(3, lambda communicator: Liar(communicator, scaling_before_averaging(3)))

    assert report.is_healthy
    average = line(report, "all-reduce AVG, bfloat16")
    assert average.verdict is Verdict.NOTE
    assert average.answer == "scaled by a rounded 1/n first"
    assert line(report, "as configured").answer == "exact"
    path = line(report, "all-reduce, overlap, each bucket, mean by AVG")
    assert path.verdict is Verdict.NOTE
    assert path.answer.startswith("every rank once, but rounded: up to ")


def test_sums_that_lose_digits_on_the_way_are_found():
    report = examine(2, lambda communicator: Liar(communicator, rounding))

    precision = line(report, "float32 sums are precise")
    assert precision.verdict is Verdict.FINDING
    assert "times the bound" in precision.answer
    assert line(report, "all-reduce SUM, float32").verdict is Verdict.HOLDS  # small whole numbers have few digits


def test_a_rank_that_receives_something_else_is_named():
    report = examine(3, lambda communicator: Spoiler(communicator, AllReduce, rank=1))

    digests = line(report, "all ranks hold the same bits")
    assert digests.verdict is Verdict.FINDING
    assert digests.ranks == (1,)
    assert digests.answer.startswith("rank 1 differs for 1 x float32, 7 x float32, ")
    path = line(report, "all-reduce, overlap, each bucket, sum")
    assert path.verdict is Verdict.FINDING
    assert path.ranks == (1,)


def test_a_gather_that_brings_wrong_parameters_is_found_after_the_update():
    report = examine(2, lambda communicator: Spoiler(communicator, AllGather, rank=1))

    assert line(report, "all-gather, also in place").ranks == (1,)
    assert line(report, "all-reduce, overlap, each bucket, sum").verdict is Verdict.HOLDS
    path = line(report, "reduce-scatter, overlap, each bucket, sum")
    assert path.verdict is Verdict.FINDING
    assert path.ranks == (1,)
    assert path.answer.startswith("step 1: parameters are wrong after the update on rank 1 (in '")


def test_a_missing_avg_is_a_note_unless_the_config_asks_for_it():
    refusing = lambda communicator: Refuser(communicator, ReduceOp.AVG)  # noqa: E731

    report = examine(2, refusing)
    asking = examine(2, refusing, DistributedDataParallelConfig(average_in_collective=True))

    assert report.is_healthy
    average = line(report, "all-reduce AVG, float32")
    assert average.verdict is Verdict.NOTE
    assert average.answer == "refused: RuntimeError: Cannot use ReduceOp.AVG here"
    assert line(report, "all-reduce, overlap, each bucket, mean by AVG").verdict is Verdict.NOTE
    assert [line.probe for line in asking.findings] == ["all-reduce AVG, float32", "as configured"]


def test_a_missing_max_is_a_finding_because_of_the_fence():
    report = examine(2, lambda communicator: Refuser(communicator, ReduceOp.MAX))

    assert line(report, "all-reduce MAX, int64").verdict is Verdict.FINDING
    assert line(report, "all-reduce MAX, int64").meaning == "ranks cannot agree on a step"


@pytest.mark.parametrize(
    "fields",
    [
        {"use_distributed_optimizer": True, "overlap_param_gather": True, "num_buckets": 500},
        {"layout": "megatron", "overlap_grad_reduce": False, "bucket_size": 40},
        {"finish": "explicit", "bucket_cap_mb": 0.001, "grad_reduction": "sum", "fence": False},
        {"grad_reduce_in_fp32": False, "use_distributed_optimizer": True, "pad_buckets_for_high_nccl_busbw": True},
    ],
)
def test_the_configured_path_is_tried_as_it_is(fields):
    report = examine(2, honest, DistributedDataParallelConfig(**fields))

    assert report.findings == ()
    assert line(report, "as configured").answer == "exact"


def test_ranks_with_different_configs_are_named():
    world = LoopbackWorld(3, timeout_s=60)
    configs = [DistributedDataParallelConfig(bucket_size=size) for size in (1000, 1000, 2000)]

    reports = world.run(lambda rank: run_doctor(configs[rank], communicator=world.communicator(rank)))

    assert reports[0].lines == reports[2].lines
    assert line(reports[0], "config").ranks == (2,)
    assert line(reports[0], "config").verdict is Verdict.FINDING
    # The real wrapper refuses too, on every rank, and the other paths are tried all the same.
    assert "LayoutMismatchError" in line(reports[0], "as configured").answer


def test_facts_that_arrive_garbled_end_the_examination():
    world = LoopbackWorld(2, timeout_s=60)

    with pytest.raises(CollectiveError, match="cannot even compare notes"):
        world.run(lambda rank: run_doctor(communicator=Garbler(world.communicator(rank))))


def test_a_communicator_and_a_group_are_one_too_many():
    with pytest.raises(ConfigError, match="drop process_group="):
        run_doctor(communicator=LoopbackWorld(1).communicator(0), process_group=object())
