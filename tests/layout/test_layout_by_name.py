"""Cuts and orders by parameter name: where they lead, what they refuse, and what an error says."""

import pytest
from pydantic import ValidationError

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError, LayoutError
from megabucket.layout import BucketId, ModelLayout, ParamSpec, build_layout, launch_order
from megabucket.planning.describe import describe_rows
from megabucket.testing.invariants import check_layout, layout_diff

ABCD = [ParamSpec(name, (100,)) for name in "abcd"]


def layout_of(specs=ABCD, dp_size=2, **fields):
    return build_layout(specs, DistributedDataParallelConfig(**fields), dp_size=dp_size)


def params_of(layout):
    return [[bucket.params for bucket in buffer.buckets] for buffer in layout.buffers]


def test_a_named_parameter_closes_its_bucket_and_the_end_of_the_buffer_the_last_one():
    layout = layout_of(bucket_cuts=["c"])

    # d [0, 100), c [128, 228) and padding up to 256; b and a the same.
    assert params_of(layout) == [[("d", "c"), ("b", "a")]]
    assert [(bucket.start, bucket.stop, bucket.numel_unpadded) for bucket in layout.buffers[0].buckets] == [
        (0, 256, 228),
        (256, 512, 228),
    ]
    assert [row.closed_by for row in describe_rows(layout)] == ["cut", "end"]


@pytest.mark.parametrize(
    ("cuts", "buckets"),
    [
        ([], [("d", "c", "b", "a")]),
        (["a"], [("d", "c", "b", "a")]),  # where the buffer ends anyway
        (["b", "d"], [("d",), ("c", "b"), ("a",)]),
        (["d", "b", "a"], [("d",), ("c", "b"), ("a",)]),
    ],
)
def test_cuts_decide_alone_where_buckets_end(cuts, buckets):
    assert params_of(layout_of(bucket_cuts=cuts)) == [buckets]


def test_a_recorded_order_is_the_order_in_the_buffer():
    layout = layout_of(bucket_order=["b", "a", "d", "c"], bucket_size=200)

    assert params_of(layout) == [[("b", "a"), ("d", "c")]]
    assert {name: slot.ready_index for name, slot in layout.buffers[0].params.items()} == {"a": 1, "b": 0, "c": 3, "d": 2}
    assert check_layout(layout) == []


def test_buckets_of_two_dtypes_are_launched_as_their_last_gradients_come():
    specs = [ParamSpec("a", (4,)), ParamSpec("h", (4,), "float16"), ParamSpec("b", (4,)), ParamSpec("i", (4,), "float16")]

    def order(recorded):
        return launch_order(layout_of(specs, bucket_size=1, bucket_order=recorded))

    # Buffer 0 holds a and b, buffer 1 holds h and i; one parameter per bucket.
    assert order(None) == (BucketId(1, 0), BucketId(0, 0), BucketId(1, 1), BucketId(0, 1))  # i, b, h, a
    assert order(["a", "b", "i", "h"]) == (BucketId(0, 0), BucketId(0, 1), BucketId(1, 0), BucketId(1, 1))
    assert order(["h", "a", "b", "i"]) == (BucketId(1, 0), BucketId(0, 0), BucketId(0, 1), BucketId(1, 1))


def test_a_bucket_waits_for_the_last_of_its_gradients_not_for_the_first():
    specs = [ParamSpec("a", (4,)), ParamSpec("h", (4,), "float16"), ParamSpec("b", (4,))]

    layout = layout_of(specs, bucket_order=["b", "h", "a"])

    assert launch_order(layout) == (BucketId(1, 0), BucketId(0, 0))  # a comes last, so its bucket goes last


def test_a_shared_embedding_stays_alone_between_cuts():
    specs = [*ABCD[:2], ParamSpec("e", (100,), shared_embedding=True), *ABCD[2:]]

    layout = layout_of(specs, bucket_cuts=["b"], bucket_order=["d", "e", "c", "b", "a"])

    assert params_of(layout) == [[("d",), ("e",), ("c", "b"), ("a",)]]
    assert [row.closed_by for row in describe_rows(layout)] == ["shared embedding", "shared embedding", "cut", "end"]


def test_each_buffer_takes_the_cuts_of_its_own_parameters():
    specs = [ParamSpec(name, (4,), dtype) for name, dtype in zip("abcd", ["float32", "bfloat16"] * 2, strict=True)]

    layout = layout_of(specs, bucket_cuts=["d"])

    assert params_of(layout) == [[("c", "a")], [("d",), ("b",)]]
    assert [buffer.cuts for buffer in layout.buffers] == [(), ("d",)]


@pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_megatron_s_policy_takes_cuts_with_overlap_and_one_bucket_without(sharded, overlap):
    layout = layout_of(
        layout="megatron",
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=overlap,
        bucket_cuts=["c"],
        bucket_order=["c", "d", "b", "a"],
    )

    assert params_of(layout) == [[("c",), ("d", "b", "a")] if overlap else [("c", "d", "b", "a")]]
    assert layout.buffers[0].start_alignment == (64 if sharded else 1)
    assert check_layout(layout) == []


# What is refused


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cut_at_a_name_the_model_does_not_have_is_refused_also_where_cuts_are_not_used(overlap):
    with pytest.raises(ConfigError) as caught:
        layout_of(layout="megatron", overlap_grad_reduce=overlap, bucket_cuts=["c", "z", "y"])

    assert str(caught.value) == (
        "bucket_cuts names 'z', 'y', not among the 4 trainable parameters of the model. It fits one model only: plan the cuts "
        "for this model, or drop bucket_cuts. For a module that has changed since it was wrapped, give the config that fits "
        "now to ddp.rebuild(config)."
    )


def test_an_order_with_a_name_the_model_does_not_have_is_refused():
    text = "bucket_order names 'z', not among the 4 trainable parameters of the model. It fits one model only: record the order"
    with pytest.raises(ConfigError, match=text):
        layout_of(bucket_order=[*"dcbaz"])


def test_an_order_that_leaves_parameters_out_is_refused():
    with pytest.raises(ConfigError) as caught:
        layout_of(bucket_order=["d", "b"])

    assert str(caught.value) == (
        "bucket_order leaves out 'a', 'c' (2 of 4 trainable parameters), which would have no place in a buffer. It fits one "
        "model only: record the order of this model, or drop bucket_order. For a module that has changed since it was wrapped, "
        "give the config that fits now to ddp.rebuild(config)."
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"bucket_cuts": ["a", "b", "a"]},
            "bucket_cuts has 'a' more than once; a parameter has one place in its buffer",
        ),
        (
            {"bucket_order": ["a", "a", "b", "b"]},
            "bucket_order has 'a', 'b' more than once; a parameter has one place in its buffer",
        ),
        (
            {"bucket_cuts": ["a"], "bucket_size": 4},
            "bucket_size and bucket_cuts all size the buckets; keep one of them (got bucket_size=4, bucket_cuts=[1 names])",
        ),
        (
            {"bucket_cuts": [], "num_buckets": 4, "bucket_cap_mb": 1.5},
            (
                "bucket_cap_mb and num_buckets and bucket_cuts all size the buckets; keep one of them (got bucket_cap_mb=1.5, "
                "num_buckets=4, bucket_cuts=[0 names])"
            ),
        ),
    ],
)
def test_lists_that_contradict_themselves_or_a_size_are_refused(fields, text):
    with pytest.raises(ValidationError) as caught:
        DistributedDataParallelConfig(**fields)

    assert [detail["msg"] for detail in caught.value.errors()] == [f"Value error, {text}"]


@pytest.mark.parametrize("value", ["a", [1], [""], {"a": 1}, 3, [["a"]]])
@pytest.mark.parametrize("field", ["bucket_cuts", "bucket_order"])
def test_what_is_no_list_of_names_is_refused(field, value):
    with pytest.raises(ValidationError):
        DistributedDataParallelConfig(**{field: value})


# As data


def test_cuts_and_places_are_written_only_where_they_are_given():
    plain, named = layout_of(), layout_of(bucket_cuts=["c"], bucket_order=["d", "c", "b", "a"])

    assert '"cuts"' not in plain.to_json()
    assert '"ready"' not in plain.to_json()
    assert ModelLayout.from_json(named.to_json()) == named


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"cuts":["c"]', '"cuts":[1]', "buffers.0.cuts.0: Input should be a valid string"),
        ('"cuts":["c"]', '"cuts":{}', "buffers.0.cuts: Input should be a valid array"),
        ('"ready":0', '"ready":"0"', "buffers.0.params.3.ready: Input should be a valid integer"),
        ('"ready":0', '"ready":true', "buffers.0.params.3.ready: Input should be a valid integer"),
    ],
)
def test_damaged_cuts_and_places_are_refused_with_their_path(old, new, text):
    written = layout_of(bucket_cuts=["c"], bucket_order=["d", "c", "b", "a"]).to_json()
    assert old in written

    with pytest.raises(LayoutError, match=text):
        ModelLayout.from_json(written.replace(old, new))


def test_the_diff_names_cuts_that_only_one_layout_has_and_places():
    ours = layout_of(bucket_cuts=["c"], bucket_order=["d", "c", "b", "a"])

    more_cuts = layout_diff(ours, layout_of(bucket_cuts=["c", "b"], bucket_order=["d", "c", "b", "a"]))
    by_size = layout_diff(ours, layout_of(bucket_size=200))
    assert "buffer 0: cut 'b': missing != number 1" in more_cuts
    assert by_size[:3] == (
        "buffer 0: bucket_size: None != 200",
        "buffer 0: is cut by name: True != False",
        "buffer 0: cut 'c': number 0 != missing",
    )
    assert [line.count("ready_index=None") for line in by_size[3:]] == [1] * 4
