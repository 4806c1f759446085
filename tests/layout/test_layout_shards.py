"""Which rank owns which piece of which parameter: worked examples in the four coordinates."""

import pytest
from hypothesis import given

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import LayoutError
from megabucket.layout import ParamSpec, ShardSlice, Span, build_layout, shard_owners, shard_slices
from megabucket.layout.shards import ShardOwners
from megabucket.testing import dp_sizes, model_layouts, param_specs


def only_buffer(specs, *, dp_size, **switches):
    (buffer,) = build_layout(specs, DistributedDataParallelConfig(**switches), dp_size=dp_size).buffers
    return buffer


@pytest.fixture
def two_of_1000():
    """b at [0, 1000), a at [1024, 2024), one bucket of 2048 elements, four shards of 512."""
    return only_buffer([ParamSpec("a", (1000,)), ParamSpec("b", (1000,))], dp_size=4)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, ShardSlice("b", Span(0, 512), Span(0, 512), Span(0, 512), Span(0, 512))),
        (1, ShardSlice("b", Span(512, 1000), Span(512, 1000), Span(0, 488), Span(512, 1000))),  # 24 of the shard are a gap
        (2, ShardSlice("a", Span(1024, 1536), Span(1024, 1536), Span(0, 512), Span(0, 512))),
        (3, ShardSlice("a", Span(1536, 2024), Span(1536, 2024), Span(0, 488), Span(512, 1000))),
    ],
)
def test_two_of_1000_on_4_ranks_are_halved_each(two_of_1000, rank, expected):
    assert shard_slices(two_of_1000, bucket=0, rank=rank) == (expected,)


def test_shards_of_a_later_bucket_are_counted_from_its_own_start():
    buffer = only_buffer([ParamSpec("a", (200,)), ParamSpec("b", (200,))], dp_size=2, bucket_size=200)

    # Bucket 1 is [256, 512) and holds a at [256, 456); its shards are of 128.
    assert shard_slices(buffer, bucket=1, rank=1) == (
        ShardSlice("a", in_buffer=Span(384, 456), in_bucket=Span(128, 200), in_shard=Span(0, 72), in_param=Span(128, 200)),
    )


def test_one_shard_may_hold_pieces_of_several_parameters_with_gaps_between():
    specs = [ParamSpec("a", (300,)), ParamSpec("b", (10,)), ParamSpec("c", (100,))]
    buffer = only_buffer(specs, dp_size=2)

    # c [0, 100), b [128, 138), a [192, 492), bucket [0, 512), shards of 256.
    low, high = (shard_slices(buffer, bucket=0, rank=rank) for rank in (0, 1))

    assert [(piece.param, piece.in_shard, piece.in_param) for piece in low] == [
        ("c", Span(0, 100), Span(0, 100)),
        ("b", Span(128, 138), Span(0, 10)),
        ("a", Span(192, 256), Span(0, 64)),
    ]
    assert [(piece.param, piece.in_shard, piece.in_param) for piece in high] == [("a", Span(0, 236), Span(64, 300))]


def test_100_elements_on_8_ranks_leave_the_last_rank_nothing_but_padding():
    buffer = only_buffer([ParamSpec("a", (100,))], dp_size=8)

    owned = [sum(piece.in_param.numel for piece in shard_slices(buffer, bucket=0, rank=rank)) for rank in range(8)]

    assert buffer.shard_span(bucket=0, rank=0).numel == 16  # 128 / 8
    assert owned == [16, 16, 16, 16, 16, 16, 4, 0]
    assert shard_slices(buffer, bucket=0, rank=7) == ()


def test_with_high_bus_bandwidth_one_of_8_ranks_owns_all_1000_elements():
    buffer = only_buffer([ParamSpec("a", (1000,))], dp_size=8, pad_buckets_for_high_nccl_busbw=True)

    owned = [sum(piece.in_param.numel for piece in shard_slices(buffer, bucket=0, rank=rank)) for rank in range(8)]

    assert buffer.shard_span(bucket=0, rank=0).numel == 8192  # 65536 / 8
    assert owned == [1000, 0, 0, 0, 0, 0, 0, 0]


def test_an_empty_parameter_is_owned_by_nobody_and_hides_nobody():
    buffer = only_buffer([ParamSpec("a", (10,)), ParamSpec("empty", (0,)), ParamSpec("c", (64,))], dp_size=2)

    owners = [[piece.param for piece in shard_slices(buffer, bucket=0, rank=rank)] for rank in (0, 1)]

    assert owners == [["c"], ["a"]]  # the empty one lies at 64, as a does


def test_an_empty_parameter_inside_a_shard_is_no_piece():
    buffer = only_buffer([ParamSpec("a", (10,)), ParamSpec("empty", (0,)), ParamSpec("c", (10,))], dp_size=1)

    assert buffer.params["empty"].start == 64  # in the middle of [0, 128)
    assert [piece.param for piece in shard_slices(buffer, bucket=0, rank=0)] == ["c", "a"]


def test_an_unpadded_buffer_is_one_shard():
    buffer = only_buffer([ParamSpec("a", (7,)), ParamSpec("b", (5,))], dp_size=4, layout="megatron")

    pieces = shard_slices(buffer, bucket=0, rank=0)

    assert [(piece.param, piece.in_buffer) for piece in pieces] == [("b", Span(0, 5)), ("a", Span(5, 12))]


@pytest.mark.parametrize("bucket", [-1, 1])
def test_a_bucket_out_of_range_is_refused(two_of_1000, bucket):
    with pytest.raises(LayoutError) as caught:
        shard_slices(two_of_1000, bucket=bucket, rank=0)

    assert str(caught.value) == f"bucket {bucket} is out of range; the buffer dense/float32->float32 has 1 buckets"


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_is_refused(two_of_1000, rank):
    with pytest.raises(LayoutError) as caught:
        shard_slices(two_of_1000, bucket=0, rank=rank)

    assert str(caught.value) == f"rank {rank} is out of range; the buffer dense/float32->float32 is cut for 4 shards"


def test_a_shard_is_counted_in_whole_numbers(two_of_1000):
    span = two_of_1000.shard_span(bucket=0, rank=1)

    assert [type(border) for border in span] == [int, int]  # a float is wrong above 2**53 elements


def test_ranks_with_the_same_parameters_are_named_together():
    # c [0, 300), b [320, 330), a [384, 484), bucket [0, 512), shards of 64: c spans ranks 0 to 4, and b lies in rank 5's.
    buffer = only_buffer([ParamSpec("a", (100,)), ParamSpec("b", (10,)), ParamSpec("c", (300,))], dp_size=8)

    assert list(shard_owners(buffer, bucket=0)) == [
        ShardOwners(0, 4, ("c",)),
        ShardOwners(5, 5, ("b",)),
        ShardOwners(6, 7, ("a",)),
    ]


def test_a_rank_between_two_parameters_owns_pieces_of_both():
    # b [0, 100), a [128, 428), bucket [0, 768), shards of 256.
    buffer = only_buffer([ParamSpec("a", (300,)), ParamSpec("b", (100,))], dp_size=3)

    assert list(shard_owners(buffer, bucket=0)) == [
        ShardOwners(0, 0, ("b", "a")),
        ShardOwners(1, 1, ("a",)),
        ShardOwners(2, 2, ()),
    ]


def test_a_single_rank_in_the_gap_between_two_parameters_owns_padding_only():
    # b [0, 100), a [128, 228), bucket [0, 256), shards of 16: that of rank 7 is [112, 128).
    buffer = only_buffer([ParamSpec("a", (100,)), ParamSpec("b", (100,))], dp_size=16)

    assert list(shard_owners(buffer, bucket=0)) == [
        ShardOwners(0, 6, ("b",)),
        ShardOwners(7, 7, ()),
        ShardOwners(8, 14, ("a",)),
        ShardOwners(15, 15, ()),
    ]


@given(layout=model_layouts(specs=param_specs(max_params=8, max_numel=400), dp_size=dp_sizes(max_size=40)))
def test_owners_are_all_ranks_in_order_each_with_the_parameters_of_its_slices(layout):
    for buffer in layout.buffers:
        for bucket in buffer.buckets:
            told = [
                (rank, owners.params)
                for owners in shard_owners(buffer, bucket=bucket.index)
                for rank in range(owners.first_rank, owners.last_rank + 1)
            ]

            assert told == [
                (rank, tuple(piece.param for piece in shard_slices(buffer, bucket=bucket.index, rank=rank)))
                for rank in range(buffer.num_shards)
            ]
