"""Golden layouts: numbers worked out by hand from the rules, not printed by the code.

The rules of the padded walk, last registered parameter first: a parameter starts at a multiple of 64; a bucket closes at the
first parameter that brings it, gaps included, to ``bucket_size``; it ends at a multiple of lcm(dp, 128).
"""

import math

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import BufferLayout, ParamSpec, build_layout
from megabucket.testing.invariants import check_layout

EVERY_BUCKET_SIZE = (None, 9000, 9025, 9050, 18000, 18050, 20000)

# Two ways to the padded layout, and the one to the unpadded layout. "stable" has no way to ask for a single bucket except a
# bucket_size that is never reached; Megatron's own choices cut one bucket without overlap.
PADDED = {
    "stable": {"layout": "stable"},
    "stable, distributed optimizer": {"layout": "stable", "use_distributed_optimizer": True},
    "megatron, distributed optimizer": {"layout": "megatron", "use_distributed_optimizer": True},
}
UNPADDED = {"layout": "megatron", "use_distributed_optimizer": False}
NEVER_REACHED = 10**12


def linear_stack(*, bias: bool = False, shared_last: bool = False) -> list[ParamSpec]:
    """Ten Linear(95, 95) in bfloat16: weights of 95 * 95 = 9025 elements, biases of 95."""
    specs = []
    for i in range(10):
        specs.append(ParamSpec(f"{i}.weight", (95, 95), "bfloat16", shared_embedding=shared_last and i == 9))
        if bias:
            specs.append(ParamSpec(f"{i}.bias", (95,), "bfloat16"))
    return specs


def only_buffer(specs, *, dp_size, bucket_size=None, **switches) -> BufferLayout:
    if bucket_size is None:
        bucket_size = NEVER_REACHED
    config = DistributedDataParallelConfig(bucket_size=bucket_size, **switches)
    layout = build_layout(specs, config, dp_size=dp_size)
    (buffer,) = layout.buffers
    assert check_layout(layout) == []
    return buffer


def unpadded(buffer: BufferLayout) -> list[int]:
    return [bucket.numel_unpadded for bucket in buffer.buckets]


def padded(buffer: BufferLayout) -> list[int]:
    return [bucket.numel for bucket in buffer.buckets]


# Without bias: 9025 is followed by a gap up to 9088 = 142 * 64, the next multiple of 64; 71 * 128 is the bucket end, too.
#   one bucket     9 * 9088 + 9025 = 90817, up to 710 * 128 = 90880
#   two in one     9088 + 9025 = 18113, up to 142 * 128 = 18176
#   three in one   2 * 9088 + 9025 = 27201, up to 213 * 128 = 27264
NO_BIAS = {
    None: ([90817], [90880]),
    9000: ([9025] * 10, [9088] * 10),
    9025: ([9025] * 10, [9088] * 10),
    9050: ([18113] * 5, [18176] * 5),
    18000: ([18113] * 5, [18176] * 5),
    18050: ([18113] * 5, [18176] * 5),  # 18113 >= 18050: the gap of 63 counts, or three would be needed
    20000: ([27201] * 3 + [9025], [27264] * 3 + [9088]),
}


@pytest.mark.pairs
@pytest.mark.parametrize("switches", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("bucket_size", EVERY_BUCKET_SIZE)
def test_ten_linears_give_the_same_padded_buckets_on_1_2_4_and_8_ranks(bucket_size, dp_size, switches):
    buffer = only_buffer(linear_stack(), dp_size=dp_size, bucket_size=bucket_size, **switches)

    assert (unpadded(buffer), padded(buffer)) == NO_BIAS[bucket_size]
    assert buffer.num_shards == dp_size


# lcm(3, 128) = 384: buckets end at 48 * 384 = 18432 instead of 18176, and at 237 * 384 = 91008 instead of 90880.
# The second bucket starts at 18432, a multiple of 64, so its inside does not change.
@pytest.mark.parametrize(("bucket_size", "sizes"), [(9050, ([18113] * 5, [18432] * 5)), (None, ([90817], [91008]))])
def test_three_ranks_pad_buckets_to_multiples_of_384(bucket_size, sizes):
    buffer = only_buffer(linear_stack(), dp_size=3, bucket_size=bucket_size)

    assert (unpadded(buffer), padded(buffer)) == sizes


# With bias: the bias (95) is registered after its weight, so it comes first: [0, 95), and the weight at [128, 9153).
#   one pair       9153, up to 9216 = 144 * 64 = 72 * 128
#   one bucket     9 * 9216 + 9153 = 92097, up to 92160 = 720 * 128
#   two pairs      9216 + 9153 = 18369, up to 18432 = 144 * 128
#   three pairs    2 * 9216 + 9153 = 27585, up to 27648 = 216 * 128
WITH_BIAS = {
    None: ([92097], [92160]),
    9000: ([9153] * 10, [9216] * 10),
    9025: ([9153] * 10, [9216] * 10),
    9050: ([9153] * 10, [9216] * 10),
    18000: ([18369] * 5, [18432] * 5),
    18050: ([18369] * 5, [18432] * 5),
    20000: ([27585] * 3 + [9153], [27648] * 3 + [9216]),
}


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("bucket_size", EVERY_BUCKET_SIZE)
def test_a_bias_stands_before_its_weight_and_fills_the_bucket_with_it(bucket_size, dp_size):
    buffer = only_buffer(linear_stack(bias=True), dp_size=dp_size, bucket_size=bucket_size)

    assert (unpadded(buffer), padded(buffer)) == WITH_BIAS[bucket_size]
    assert (buffer.params["9.bias"].start, buffer.params["9.weight"].start) == (0, 128)  # 95 rounded up to 2 * 64


# The shared embedding is the last layer, so the walk meets it first: it closes its bucket at once, alone, with 9025 elements.
# The nine others follow:
#   one bucket     8 * 9088 + 9025 = 81729, up to 639 * 128 = 81792
#   18050          four pairs of 18113, then the ninth
#   20000          three of 27201
#   9000           nine of 9025
SHARED_LAST = {
    None: ([9025, 81729], [9088, 81792]),
    9000: ([9025] * 10, [9088] * 10),
    9025: ([9025] * 10, [9088] * 10),
    9050: ([9025] + [18113] * 4 + [9025], [9088] + [18176] * 4 + [9088]),
    18000: ([9025] + [18113] * 4 + [9025], [9088] + [18176] * 4 + [9088]),
    18050: ([9025] + [18113] * 4 + [9025], [9088] + [18176] * 4 + [9088]),
    20000: ([9025] + [27201] * 3, [9088] + [27264] * 3),
}


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("bucket_size", EVERY_BUCKET_SIZE)
def test_a_shared_last_layer_has_the_first_bucket_to_itself(bucket_size, dp_size):
    buffer = only_buffer(linear_stack(shared_last=True), dp_size=dp_size, bucket_size=bucket_size)

    assert (unpadded(buffer), padded(buffer)) == SHARED_LAST[bucket_size]
    assert buffer.buckets[0].params == ("9.weight",)


# Back to back: multiples of 9025. Two reach 18050 exactly, which closes the bucket; 20000 needs three, 27075.
PACKED = {
    None: [90250],
    9000: [9025] * 10,
    9025: [9025] * 10,
    9050: [18050] * 5,
    18000: [18050] * 5,
    18050: [18050] * 5,
    20000: [27075] * 3 + [9025],
}

# Pairs of bias and weight: 9120. The bias alone (95) reaches no bucket size, the pair reaches 9000 and 9050.
PACKED_WITH_BIAS = {
    None: [91200],
    9000: [9120] * 10,
    9025: [9120] * 10,
    9050: [9120] * 10,
    18000: [18240] * 5,
    18050: [18240] * 5,
    20000: [27360] * 3 + [9120],  # 18240 + 95 = 18335 is not enough, with the weight it is 27360
}


@pytest.mark.pairs
@pytest.mark.parametrize("shared_last", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bucket_size", EVERY_BUCKET_SIZE)
def test_the_unpadded_layout_packs_back_to_back_whatever_the_ranks_and_shared_flags(bucket_size, dp_size, shared_last):
    specs = linear_stack(shared_last=shared_last)

    buffer = only_buffer(specs, dp_size=dp_size, bucket_size=bucket_size, **UNPADDED)

    assert unpadded(buffer) == padded(buffer) == PACKED[bucket_size]
    assert buffer.numel == 90250  # 10 * 9025: nothing is padded
    assert buffer.num_shards == 1


@pytest.mark.parametrize("bucket_size", EVERY_BUCKET_SIZE)
def test_the_unpadded_layout_with_bias_packs_pairs(bucket_size):
    buffer = only_buffer(linear_stack(bias=True), dp_size=8, bucket_size=bucket_size, **UNPADDED)

    assert unpadded(buffer) == padded(buffer) == PACKED_WITH_BIAS[bucket_size]


def test_a_linear_of_4_by_4_with_bias_has_its_bias_at_0_and_its_weight_at_64():
    specs = [ParamSpec("weight", (4, 4)), ParamSpec("bias", (4,))]

    buffer = only_buffer(specs, dp_size=2)

    assert (buffer.params["bias"].start, buffer.params["bias"].stop) == (0, 4)
    assert (buffer.params["weight"].start, buffer.params["weight"].stop) == (64, 80)
    assert (unpadded(buffer), padded(buffer)) == ([80], [128])


@pytest.mark.parametrize(("numel", "start"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_a_parameter_starts_at_the_next_multiple_of_64(numel, start):
    specs = [ParamSpec("second in the buffer", (1,)), ParamSpec("first in the buffer", (numel,))]

    buffer = only_buffer(specs, dp_size=1)

    assert buffer.params["second in the buffer"].start == start


# lcm(dp, 128) by hand; Megatron's own test has dense on 3 ranks beside experts on 256.
@pytest.mark.parametrize(
    ("dp_size", "end"), [(1, 128), (2, 128), (3, 384), (5, 640), (96, 384), (128, 128), (256, 256), (7, 896)]
)
def test_a_bucket_of_one_element_ends_at_lcm_of_the_group_size_and_128(dp_size, end):
    buffer = only_buffer([ParamSpec("a", (1,))], dp_size=dp_size)

    assert (unpadded(buffer), padded(buffer)) == ([1], [end])


def test_dense_and_expert_buckets_end_at_multiples_of_their_own_group():
    specs = [ParamSpec("dense", (1000,)), ParamSpec("expert", (1000,), group="expert")]

    layout = build_layout(specs, DistributedDataParallelConfig(), dp_size=3, group_sizes={"expert": 256})

    dense, expert = layout.buffers
    assert (dense.end_multiple, dense.numel, dense.num_shards) == (384, 1152, 3)  # 3 * 384
    assert (expert.end_multiple, expert.numel, expert.num_shards) == (256, 1024, 256)  # 4 * 256


def test_unpadded_parameters_lie_back_to_back_in_reverse():
    buffer = only_buffer([ParamSpec("first", (100, 100)), ParamSpec("second", (50, 50))], dp_size=2, **UNPADDED)

    assert (buffer.params["second"].start, buffer.params["second"].stop) == (0, 2500)
    assert (buffer.params["first"].start, buffer.params["first"].stop) == (2500, 12500)


def test_three_of_10000_with_bucket_size_15000_make_a_bucket_of_two_and_one_of_one():
    buffer = only_buffer([ParamSpec(n, (10_000,)) for n in "abc"], dp_size=2, bucket_size=15_000, **UNPADDED)

    assert unpadded(buffer) == [20_000, 10_000]
    assert [bucket.params for bucket in buffer.buckets] == [("c", "b"), ("a",)]


def test_97_and_103_are_200_elements_unpadded_and_256_padded():
    specs = [ParamSpec("a", (97,)), ParamSpec("b", (103,))]

    packed = only_buffer(specs, dp_size=2, **UNPADDED)
    aligned = only_buffer(specs, dp_size=2)

    assert packed.numel == 200
    # b at [0, 103), then a at 103 rounded up to 128: [128, 225); 225 is rounded up to 2 * 128.
    assert (aligned.params["b"].start, aligned.params["b"].stop) == (0, 103)
    assert (aligned.params["a"].start, aligned.params["a"].stop) == (128, 225)
    assert (unpadded(aligned), padded(aligned)) == ([225], [256])


def test_two_of_1000_on_4_ranks_count_the_gap_between_them():
    buffer = only_buffer([ParamSpec("a", (1000,)), ParamSpec("b", (1000,))], dp_size=4)

    # 1000 rounded up to 16 * 64 = 1024, and 1000 more: 2024, up to 16 * 128 = 2048.
    assert (unpadded(buffer), padded(buffer)) == ([2024], [2048])


def test_three_of_5000_with_bucket_size_8000_make_two_buckets():
    buffer = only_buffer([ParamSpec(n, (5000,)) for n in "abc"], dp_size=2, bucket_size=8000)

    # 5000 rounded up to 79 * 64 = 5056, and 5000 more: 10056 >= 8000, up to 79 * 128 = 10112. Then 5000, up to 40 * 128 = 5120.
    assert (unpadded(buffer), padded(buffer)) == ([10_056, 5000], [10_112, 5120])


@pytest.mark.parametrize(("dp_size", "numel"), [(8, 65_536), (3, 196_608)])
def test_high_bus_bandwidth_pads_1000_elements_to_lcm_of_the_group_size_and_65536(dp_size, numel):
    buffer = only_buffer([ParamSpec("a", (1000,))], dp_size=dp_size, pad_buckets_for_high_nccl_busbw=True)

    assert (unpadded(buffer), padded(buffer)) == ([1000], [numel])  # 3 * 65536 = 196608


def test_a_shared_embedding_registered_last_closes_its_bucket_without_the_gap():
    specs = [ParamSpec("block", (1000,)), ParamSpec("embedding", (1000,), shared_embedding=True)]

    buffer = only_buffer(specs, dp_size=2)

    assert [bucket.params for bucket in buffer.buckets] == [("embedding",), ("block",)]
    assert (unpadded(buffer), padded(buffer)) == ([1000, 1000], [1024, 1024])


def test_a_shared_embedding_registered_first_closes_the_bucket_before_it_with_the_gap():
    specs = [ParamSpec("embedding", (1000,), shared_embedding=True), ParamSpec("block", (1000,))]

    buffer = only_buffer(specs, dp_size=2)

    # The walk has already aligned to 1024 for the embedding when it finds that a new bucket is needed.
    assert [bucket.params for bucket in buffer.buckets] == [("block",), ("embedding",)]
    assert (unpadded(buffer), padded(buffer)) == ([1024, 1000], [1024, 1024])


def test_a_shared_embedding_between_others_is_alone_although_the_bucket_size_is_far():
    specs = [
        ParamSpec("a", (100,)),
        ParamSpec("e", (100,), shared_embedding=True),
        ParamSpec("b", (100,)),
        ParamSpec("c", (100,)),
    ]

    buffer = only_buffer(specs, dp_size=2, bucket_size=10_000)

    # c at 0, b at 128: 228, aligned to 256 for e. The buckets start at 0, 256, 384.
    assert [bucket.params for bucket in buffer.buckets] == [("c", "b"), ("e",), ("a",)]
    assert (unpadded(buffer), padded(buffer)) == ([256, 100, 100], [256, 128, 128])


def test_parameters_of_whole_multiples_of_64_start_where_the_unpadded_layout_has_them():
    specs = [ParamSpec("a", (64,)), ParamSpec("b", (640,)), ParamSpec("c", (8, 16)), ParamSpec("d", (192,))]

    aligned, packed = only_buffer(specs, dp_size=4), only_buffer(specs, dp_size=4, **UNPADDED)

    starts = {name: slot.start for name, slot in aligned.params.items()}
    assert starts == {name: slot.start for name, slot in packed.params.items()}
    assert starts == {"d": 0, "c": 192, "b": 320, "a": 960}  # 192, + 128, + 640
    assert (aligned.numel, packed.numel) == (1024, 1024)  # 960 + 64 is a multiple of 128 already


def test_empty_parameters_and_scalars_have_their_places():
    specs = [ParamSpec("scalar", ()), ParamSpec("empty", (3, 0)), ParamSpec("w", (70,))]

    buffer = only_buffer(specs, dp_size=2)

    # w at [0, 70), the empty one at 128, the scalar at 128, too: an empty range moves nobody.
    assert {name: (slot.start, slot.stop) for name, slot in buffer.params.items()} == {
        "scalar": (128, 129),
        "empty": (128, 128),
        "w": (0, 70),
    }
    assert (unpadded(buffer), padded(buffer)) == ([129], [256])


def test_a_model_of_empty_parameters_has_one_bucket_without_elements():
    buffer = only_buffer([ParamSpec("a", (0,)), ParamSpec("b", (2, 0))], dp_size=4, bucket_size=1)

    assert (unpadded(buffer), padded(buffer)) == ([0], [0])
    assert buffer.padding_fraction == 0.0


def test_positions_beyond_32_bits_are_exact():
    specs = [ParamSpec("a", (3,)), ParamSpec("b", (65_536, 65_537)), ParamSpec("c", (2**31 + 11,))]

    buffer = only_buffer(specs, dp_size=2)

    # c ends at 2147483659, rounded up to 33554433 * 64 = 2147483712; b has 2**32 + 65536 elements and ends at 6442516544,
    # a multiple of 64; a ends at 6442516547, rounded up to 50332161 * 128 = 6442516608.
    assert buffer.params["b"].start == 2_147_483_712
    assert buffer.params["a"].start == 6_442_516_544
    assert buffer.numel == 6_442_516_608
    assert buffer.numel > 2**32


# 40 parameters of 10_000 elements on 2 ranks: 10_000 is followed by a gap up to 157 * 64 = 10048.
FORTY = [ParamSpec(f"p{i}", (10_000,)) for i in range(40)]


def test_num_buckets_closes_at_the_total_divided_by_it():
    layout = build_layout(FORTY, DistributedDataParallelConfig(num_buckets=8), dp_size=2)

    (buffer,) = layout.buffers
    assert buffer.bucket_size == 50_000  # 400_000 // 8
    # Five parameters reach 4 * 10048 + 10000 = 50192 >= 50000: eight buckets.
    assert unpadded(buffer) == [50_192] * 8


def test_num_buckets_counts_the_elements_of_all_buffers():
    specs = [ParamSpec("dense", (600,)), ParamSpec("expert", (400,), group="expert")]

    layout = build_layout(specs, DistributedDataParallelConfig(num_buckets=4), dp_size=2)

    assert [buffer.bucket_size for buffer in layout.buffers] == [250, 250]  # (600 + 400) // 4


def test_bucket_cap_mb_counts_bytes_of_gradients_in_each_buffer():
    specs = [ParamSpec("f64", (8,), "float64"), ParamSpec("f32", (8,)), ParamSpec("bf16", (8,), "bfloat16")]

    config = DistributedDataParallelConfig(bucket_cap_mb=1.5, grad_reduce_in_fp32=False)
    layout = build_layout(specs, config, dp_size=2)

    # 1.5 MiB = 1572864 bytes: at 8, 4 and 2 bytes per element.
    assert {buffer.key.grad_dtype: buffer.bucket_size for buffer in layout.buffers} == {
        "float64": 196_608,
        "float32": 393_216,
        "bfloat16": 786_432,
    }


def test_bucket_cap_mb_of_bfloat16_parameters_counts_their_float32_gradients():
    layout = build_layout([ParamSpec("a", (8,), "bfloat16")], DistributedDataParallelConfig(bucket_cap_mb=1), dp_size=2)

    assert layout.buffers[0].bucket_size == 262_144  # 1 MiB / 4 bytes


@pytest.mark.parametrize(("dp_size", "bucket_size"), [(1, 40_000_000), (40, 40_000_000), (41, 41_000_000), (512, 512_000_000)])
def test_the_default_bucket_size_is_40_million_or_a_million_per_rank(dp_size, bucket_size):
    layout = build_layout([ParamSpec("a", (8,))], DistributedDataParallelConfig(), dp_size=dp_size)

    assert layout.buffers[0].bucket_size == bucket_size


def test_a_layout_says_what_it_costs():
    specs = [ParamSpec("a", (97,), "bfloat16"), ParamSpec("b", (103,), "bfloat16")]

    buffer = only_buffer(specs, dp_size=2)

    assert buffer.params_numel == 200
    assert buffer.grad_bytes == 1024  # 256 elements of float32
    assert math.isclose(buffer.padding_fraction, 56 / 256)
