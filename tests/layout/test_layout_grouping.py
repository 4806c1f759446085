"""Which parameters share a buffer, which layout a config asks for, and in which order buckets are launched."""

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import BucketId, BufferKey, ParamSpec, build_layout, launch_order

DEFAULT = DistributedDataParallelConfig()


def test_parameters_of_one_dtype_and_group_share_one_buffer():
    layout = build_layout([ParamSpec("a", (4,)), ParamSpec("b", (4,))], DEFAULT, dp_size=2)

    assert [buffer.key for buffer in layout.buffers] == [BufferKey("float32", "float32", "dense")]
    assert list(layout.buffers[0].params) == ["a", "b"]


def test_each_pair_of_dtype_and_group_has_a_buffer_in_the_order_of_first_registration():
    specs = [
        ParamSpec("a", (4,), "bfloat16"),
        ParamSpec("b", (4,)),
        ParamSpec("c", (4,), "bfloat16", "expert"),
        ParamSpec("d", (4,), "bfloat16"),
        ParamSpec("e", (4,), "float64"),
    ]

    layout = build_layout(specs, DEFAULT, dp_size=2)

    assert [(str(buffer.key), list(buffer.params)) for buffer in layout.buffers] == [
        ("dense/bfloat16->float32", ["a", "d"]),
        ("dense/float32->float32", ["b"]),
        ("expert/bfloat16->float32", ["c"]),
        ("dense/float64->float64", ["e"]),
    ]


def test_each_buffer_has_an_index_space_of_its_own_but_one_numbering_of_parameters():
    specs = [ParamSpec("a", (100,), "bfloat16"), ParamSpec("b", (100,)), ParamSpec("c", (100,), "bfloat16")]

    half, full = build_layout(specs, DEFAULT, dp_size=2).buffers

    assert {name: (slot.start, slot.registration_index) for name, slot in half.params.items()} == {"a": (128, 0), "c": (0, 2)}
    assert {name: (slot.start, slot.registration_index) for name, slot in full.params.items()} == {"b": (0, 1)}
    assert [bucket.index for bucket in full.buckets] == [0]


@pytest.mark.parametrize(
    ("param_dtype", "in_fp32", "grad_dtype"),
    [
        ("bfloat16", True, "float32"),
        ("float16", True, "float32"),
        ("float32", True, "float32"),
        ("float64", True, "float64"),  # float32 would be a loss, not a gain
        ("bfloat16", False, "bfloat16"),
        ("float16", False, "float16"),
        ("float64", False, "float64"),
    ],
)
def test_half_precision_gradients_are_float32_when_asked_and_others_keep_their_dtype(param_dtype, in_fp32, grad_dtype):
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32)

    layout = build_layout([ParamSpec("a", (4,), param_dtype)], config, dp_size=2)

    assert layout.buffers[0].key == BufferKey(param_dtype, grad_dtype, "dense")


def test_experts_are_cut_for_the_dense_group_when_they_have_none_of_their_own():
    layout = build_layout([ParamSpec("a", (4,), group="expert")], DEFAULT, dp_size=3)

    assert (layout.buffers[0].num_shards, layout.buffers[0].numel) == (3, 384)


SPECS = [ParamSpec("a", (100,)), ParamSpec("b", (100,)), ParamSpec("c", (100,))]


def build(**switches):
    (buffer,) = build_layout(SPECS, DistributedDataParallelConfig(bucket_size=100, **switches), dp_size=2).buffers
    return buffer


def test_megatron_without_the_distributed_optimizer_packs_buckets_without_padding():
    buffer = build(layout="megatron", use_distributed_optimizer=False)

    assert [(bucket.start, bucket.stop) for bucket in buffer.buckets] == [(0, 100), (100, 200), (200, 300)]
    assert (buffer.num_shards, buffer.start_alignment, buffer.end_multiple) == (1, 1, 1)


def test_megatron_with_the_distributed_optimizer_pads_as_stable_does():
    assert build(layout="megatron", use_distributed_optimizer=True) == build(layout="stable")
    assert [(bucket.start, bucket.stop) for bucket in build().buckets] == [(0, 128), (128, 256), (256, 384)]


@pytest.mark.parametrize(("sharded", "numel"), [(False, 300), (True, 384)])  # 128 + 128 + 100 = 356, up to 3 * 128
def test_megatron_without_overlap_cuts_a_single_bucket(sharded, numel):
    buffer = build(layout="megatron", overlap_grad_reduce=False, use_distributed_optimizer=sharded)

    assert [bucket.params for bucket in buffer.buckets] == [("c", "b", "a")]
    assert (buffer.bucket_size, buffer.numel) == (None, numel)


def test_megatron_without_overlap_still_gives_a_shared_embedding_its_bucket_when_padded():
    specs = [ParamSpec("block", (100,)), ParamSpec("embedding", (100,), shared_embedding=True)]
    config = DistributedDataParallelConfig(layout="megatron", overlap_grad_reduce=False, use_distributed_optimizer=True)

    (buffer,) = build_layout(specs, config, dp_size=2).buffers

    assert [bucket.params for bucket in buffer.buckets] == [("embedding",), ("block",)]


def test_stable_without_overlap_cuts_the_same_buckets():
    assert build(layout="stable", overlap_grad_reduce=False) == build(layout="stable")


def test_more_buckets_than_elements_are_refused_with_both_numbers():
    with pytest.raises(ConfigError) as caught:
        build_layout(SPECS, DistributedDataParallelConfig(num_buckets=301), dp_size=2)

    assert str(caught.value) == (
        "num_buckets=301 is more than the 300 elements there are to put into buckets. "
        "Ask for at most 300, or give bucket_size instead."
    )


def test_specs_may_come_from_a_generator():
    assert build_layout((spec for spec in SPECS), DEFAULT, dp_size=2) == build_layout(SPECS, DEFAULT, dp_size=2)


def test_buckets_of_one_buffer_are_launched_in_index_order():
    layout = build_layout(SPECS, DistributedDataParallelConfig(bucket_size=100), dp_size=2)

    assert launch_order(layout) == (BucketId(0, 0), BucketId(0, 1), BucketId(0, 2))


def test_buckets_of_two_buffers_are_launched_in_the_order_in_which_backward_completes_them():
    # Numbers:                0           1           2           3           4           5
    specs = [ParamSpec(name, (100,), "bfloat16" if name in "bdf" else "float32") for name in "abcdef"]
    layout = build_layout(specs, DistributedDataParallelConfig(bucket_size=101), dp_size=2)
    assert [[bucket.params for bucket in buffer.buckets] for buffer in layout.buffers] == [
        [("e", "c"), ("a",)],  # float32, complete when c (2) and a (0) are
        [("f", "d"), ("b",)],  # bfloat16, complete when d (3) and b (1) are
    ]

    order = launch_order(layout)

    assert order == (BucketId(1, 0), BucketId(0, 0), BucketId(1, 1), BucketId(0, 1))
