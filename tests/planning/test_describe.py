"""Rows and totals of a layout, checked against the shards themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import BucketLayout, BufferKey, BufferLayout, ModelLayout, ParamSpec, build_layout, shard_slices
from megabucket.planning.describe import describe_rows, describe_totals


def layout_of(*numels, dp_size=1, **config):
    specs = [ParamSpec(f"p{index}", (numel,)) for index, numel in enumerate(numels)]
    return build_layout(specs, DistributedDataParallelConfig(**config), dp_size=dp_size)


def test_a_row_counts_padding_with_the_gaps_and_the_tail():
    (row,) = describe_rows(layout_of(100, 10, dp_size=2))

    # p1 at [0, 10), a gap up to 64, p0 at [64, 164), the tail up to 256 = 2 * lcm(2, 128)
    assert (row.first_param, row.last_param, row.num_params) == ("p1", "p0", 2)
    assert (row.params_numel, row.numel, row.grad_bytes) == (110, 256, 1_024)
    assert row.padding_fraction == 1 - 110 / 256
    assert row.num_padding_only_ranks == 0  # shards [0, 128) and [128, 256) both hold some of p0


@pytest.mark.parametrize(
    ("numel", "dp_size", "high_busbw", "ranks"),
    [
        (100, 8, False, 1),  # a bucket of 128, shards of 16: seven hold 16,16,16,16,16,16,4, the last holds none
        (1_000, 8, True, 7),  # a bucket of 65536, shards of 8192: only the first holds anything
        (128, 8, False, 0),
        (1, 128, False, 127),
    ],
)
def test_ranks_whose_shard_lies_behind_the_last_parameter_are_counted(numel, dp_size, high_busbw, ranks):
    (row,) = describe_rows(layout_of(numel, dp_size=dp_size, pad_buckets_for_high_nccl_busbw=high_busbw))

    assert row.num_padding_only_ranks == ranks


def test_ranks_whose_shard_lies_in_a_gap_are_counted():
    # p1 at [0, 1), p0 at [64, 65); a bucket of 128 for 128 ranks: ranks 0 and 64 own one element each
    (row,) = describe_rows(layout_of(1, 1, dp_size=128))

    assert row.num_padding_only_ranks == 126


def test_an_unsharded_layout_has_no_padding_only_ranks():
    rows = describe_rows(layout_of(100, 10, dp_size=8, layout="megatron", bucket_size=1))

    assert [(row.num_shards, row.num_padding_only_ranks, row.padding_fraction) for row in rows] == [(1, 0, 0.0)] * 2


def test_a_bucket_of_empty_parameters_is_nothing_to_anyone():
    (row,) = describe_rows(layout_of(0, dp_size=4))

    assert (row.numel, row.padding_fraction, row.num_padding_only_ranks) == (0, 0.0, 4)


def test_totals_add_up_over_buffers():
    specs = [ParamSpec("a", (100,), "bfloat16"), ParamSpec("b", (10,), "float32"), ParamSpec("c", (1,), "float32", "expert")]
    layout = build_layout(specs, DistributedDataParallelConfig(), dp_size=2, group_sizes={"expert": 1})

    totals = describe_totals(layout, describe_rows(layout))

    assert (totals.num_buffers, totals.num_buckets, totals.num_params) == (3, 3, 3)
    assert (totals.params_numel, totals.numel) == (111, 384)  # three buckets of 128
    assert totals.grad_bytes == 3 * 128 * 4
    assert totals.param_bytes == 128 * 2 + 128 * 4 + 128 * 4
    assert totals.padding_fraction == 1 - 111 / 384
    assert totals.num_buckets_with_padding_only_ranks == 1  # b: ten elements, shards of 64


@given(
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    dp_size=st.integers(1, 40),
    bucket_size=st.none() | st.integers(1, 1_000),
)
def test_counting_by_arithmetic_equals_asking_every_rank(numels, dp_size, bucket_size):
    layout = layout_of(*numels, dp_size=dp_size, bucket_size=bucket_size)
    (buffer,) = layout.buffers

    counted = [row.num_padding_only_ranks for row in describe_rows(layout)]

    assert counted == [
        sum(not shard_slices(buffer, bucket=bucket.index, rank=rank) for rank in range(dp_size)) for bucket in buffer.buckets
    ]


def test_a_row_says_which_bucket_of_which_buffer_it_is():
    rows = describe_rows(
        build_layout(
            [ParamSpec("a", (4,), "bfloat16"), ParamSpec("b", (4,)), ParamSpec("c", (4,))],
            DistributedDataParallelConfig(bucket_size=4),
            dp_size=2,
        )
    )

    assert [(row.buffer, row.bucket, row.first_param) for row in rows] == [
        ("dense/bfloat16->float32", 0, "a"),
        ("dense/float32->float32", 0, "c"),
        ("dense/float32->float32", 1, "b"),
    ]


def test_an_empty_parameter_hides_no_owner_behind_it():
    # p2 at [0, 1), p1 empty at 64, p0 at [64, 65); a bucket of 128 for 128 ranks: ranks 0 and 64 own one element each
    (row,) = describe_rows(layout_of(1, 0, 1, dp_size=128))

    assert row.num_padding_only_ranks == 126
    assert type(row.num_padding_only_ranks) is int  # a float is wrong above 2**53 elements


def test_a_bucket_without_parameters_has_a_row_without_names():
    key = BufferKey("float32", "float32", "dense")
    bare = BufferLayout(
        key, {}, (BucketLayout(0, 0, 128, 0, ()),), num_shards=2, bucket_size=None, start_alignment=64, end_multiple=128
    )

    (row,) = describe_rows(ModelLayout((bare,)))

    assert (row.first_param, row.last_param, row.num_params, row.params_numel, row.numel) == ("", "", 0, 0, 128)
    assert row.num_padding_only_ranks == 2
