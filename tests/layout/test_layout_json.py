"""Layouts as JSON: the exact text, reading it back, refusing what is no layout, comparing two."""

import dataclasses
import hashlib
import json
import pickle

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import LayoutError
from megabucket.layout import BufferLayout, ModelLayout, ParamSpec, build_layout
from megabucket.testing.invariants import layout_diff

SPECS = [ParamSpec("a", (2, 3), "bfloat16"), ParamSpec("é", (), "bfloat16", shared_embedding=True)]

# Version 1 of the format, written by hand. The embedding is registered last, so it is bucket 0 alone.
GOLDEN = (
    '{"buffers":[{"bucket_size":500,'
    '"buckets":[{"index":0,"numel_unpadded":1,"params":["\\u00e9"],"start":0,"stop":128},'
    '{"index":1,"numel_unpadded":6,"params":["a"],"start":128,"stop":256}],'
    '"end_multiple":128,"grad_dtype":"float32","group":"dense","num_shards":2,"param_dtype":"bfloat16",'
    '"params":[{"bucket":1,"index":0,"name":"a","shape":[2,3],"shared_embedding":false,"start":128,"stop":134},'
    '{"bucket":0,"index":1,"name":"\\u00e9","shape":[],"shared_embedding":true,"start":0,"stop":1}],'
    '"start_alignment":64}],"format":"megabucket-layout","version":1}'
)


def layout_of(specs, *, dp_size=2, bucket_size=500, **switches) -> ModelLayout:
    return build_layout(specs, DistributedDataParallelConfig(bucket_size=bucket_size, **switches), dp_size=dp_size)


def test_the_json_of_a_layout_is_exactly_this_text():
    assert layout_of(SPECS).to_json() == GOLDEN


def test_the_fingerprint_is_the_sha256_of_the_text():
    assert layout_of(SPECS).fingerprint == hashlib.sha256(GOLDEN.encode()).hexdigest()
    assert layout_of(SPECS).fingerprint == "2c3a7f4539b558e79e75302a523fcdff59e6976f5c4989a5681cb7aec3c72406"


def test_reading_the_text_gives_the_layout_back():
    again = ModelLayout.from_json(GOLDEN)

    assert again == layout_of(SPECS)
    assert again.buffers[0].params["a"].shape == (2, 3)


def test_spaces_and_key_order_of_the_text_do_not_matter():
    text = json.dumps(json.loads(GOLDEN), indent=3, sort_keys=False, ensure_ascii=False)

    assert ModelLayout.from_json(text).fingerprint == layout_of(SPECS).fingerprint


def test_a_single_bucket_without_size_is_null_in_json_and_none_again():
    layout = layout_of(SPECS, layout="megatron", overlap_grad_reduce=False)

    assert '"bucket_size":null' in layout.to_json()
    assert ModelLayout.from_json(layout.to_json()).buffers[0].bucket_size is None


def test_the_text_does_not_depend_on_the_order_in_which_slots_were_entered():
    layout = layout_of(SPECS)
    turned = reordered(layout)

    assert turned == layout
    assert turned.to_json() == layout.to_json()
    assert turned.fingerprint == layout.fingerprint


def reordered(layout: ModelLayout) -> ModelLayout:
    (buffer,) = layout.buffers
    return ModelLayout((dataclasses.replace(buffer, params=dict(reversed(buffer.params.items()))),))


def test_layouts_are_hashable_and_equal_layouts_have_equal_hashes():
    assert len({layout_of(SPECS), layout_of(SPECS), reordered(layout_of(SPECS)), layout_of(SPECS, dp_size=3)}) == 2


def test_a_layout_survives_pickle():
    layout = layout_of(SPECS)

    assert pickle.loads(pickle.dumps(layout)) == layout  # noqa: S301


def refusal(text: str) -> str:
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_json(text)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "nonsense", GOLDEN[:-1], GOLDEN + "x", "\ufeff{}", "[" * 1_000_000])
def test_text_that_is_not_json_is_refused(text):
    assert refusal(text).startswith("no layout that this release reads: the text: Invalid JSON: ")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[]", "the text"),
        ("null", "the text"),
        ("{}", "format"),
        ('{"format": 1}', "format"),
        ('{"format": "safetensors"}', "format"),
        ('{"format": "megabucket-layout"}', "version"),
        ('{"format": "megabucket-layout", "version": 2}', "version"),
        ('{"format": "megabucket-layout", "version": 0}', "version"),
        ('{"format": "megabucket-layout", "version": 1.5}', "version"),
        ('{"format": "megabucket-layout", "version": 1}', "buffers"),
        ('{"format": "megabucket-layout", "version": 1, "buffers": {}}', "buffers"),
        ('{"format": "megabucket-layout", "version": 1, "buffers": [7]}', "buffers.0"),
    ],
)
def test_json_that_is_no_layout_is_refused_with_the_place(text, place):
    assert refusal(text).startswith(f"no layout that this release reads: {place}: ")


def edited(path: str, value: object) -> str:
    """The golden text with one value replaced, or removed when ``value`` is ``...``."""
    data = json.loads(GOLDEN)
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    node = data["buffers"][0]
    for step in parents:
        node = node[step]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("params.0.start", 1.5, "params.0.start: Input should be a valid integer"),
        ("params.0.start", True, "params.0.start: Input should be a valid integer"),
        ("params.1.name", None, "params.1.name: Input should be a valid string"),
        ("params.1.shape", [2, "3"], "params.1.shape.1: Input should be a valid integer"),
        ("params.1.shape", [True], "params.1.shape.0: Input should be a valid integer"),
        ("params.1.shared_embedding", 0, "params.1.shared_embedding: Input should be a valid boolean"),
        ("params.1", [], "params.1: Input should be an object"),
        ("params", ..., "params: Field required"),
        ("buckets.1.stop", ..., "buckets.1.stop: Field required"),
        ("buckets.0.params", [1], "buckets.0.params.0: Input should be a valid string"),
        ("bucket_size", "500", "bucket_size: Input should be a valid integer"),
        ("bucket_size", ..., "bucket_size: Field required"),
        ("num_shards", None, "num_shards: Input should be a valid integer"),
        ("group", 3, "group: Input should be a valid string"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(path, value, problem):
    assert refusal(edited(path, value)) == f"no layout that this release reads: buffers.0.{problem}"


def test_a_parameter_that_stands_twice_is_refused():
    assert refusal(edited("params.1.name", "a")).endswith("a parameter stands twice among 'a'")


def test_equal_layouts_have_no_differences():
    assert layout_diff(layout_of(SPECS), layout_of(SPECS)) == ()


def test_the_diff_names_the_fields_and_parameters_that_differ():
    ours = layout_of([ParamSpec("a", (100,)), ParamSpec("b", (100,)), ParamSpec("c", (100,))], bucket_size=100)
    theirs = layout_of([ParamSpec("a", (100,)), ParamSpec("b", (70,)), ParamSpec("d", (100,))], bucket_size=150, dp_size=3)

    # Ours: three buckets of 128. Theirs: d [0, 100) and b [128, 198) reach 150, up to 384; a [384, 484), up to 768.
    lines = layout_diff(ours, theirs)
    assert lines[:4] == (
        "buffer 0: num_shards: 2 != 3",
        "buffer 0: bucket_size: 100 != 150",
        "buffer 0: end_multiple: 128 != 384",
        "buffer 0: numel: 384 != 768",
    )
    assert lines[4] == f"buffer 0: parameter 'a': {ours.buffers[0].params['a']} != {theirs.buffers[0].params['a']}"
    assert [line.partition(": ")[2].partition(":")[0] for line in lines[5:]] == [
        "parameter 'b'",
        "parameter 'c'",
        "bucket 0",
        "bucket 1",
        "bucket 2",
        "parameter 'd'",
    ]
    assert lines[6].endswith(" != missing")
    assert "parameter 'd': missing != ParamSlot(start=0, stop=100, " in lines[10]


def test_the_diff_counts_buffers_and_compares_their_keys():
    ours = layout_of([ParamSpec("a", (4,))])
    theirs = layout_of([ParamSpec("a", (4,), "bfloat16"), ParamSpec("b", (4,))])

    lines = layout_diff(ours, theirs)
    assert lines[0] == "buffer 0: key: dense/float32->float32 != dense/bfloat16->float32"
    assert "buffer 1: key: missing != dense/float32->float32" in lines


def test_the_diff_shows_a_shared_embedding():
    ours, theirs = (layout_of([ParamSpec("a", (4,), shared_embedding=shared)]) for shared in (False, True))

    (line,) = layout_diff(ours, theirs)
    assert "shared_embedding=False" in line.partition("!=")[0]
    assert "shared_embedding=True" in line.partition("!=")[2]


def test_the_diff_ends_after_20_lines_with_a_count():
    ours = layout_of([ParamSpec(f"ours{i}", (4,)) for i in range(15)], bucket_size=10**9)
    theirs = layout_of([ParamSpec(f"theirs{i}", (4,)) for i in range(15)], bucket_size=10**9)

    lines = layout_diff(ours, theirs)

    assert len(lines) == 21
    assert lines[-1] == "and 11 more differences"  # 15 + 15 names and the line about buckets, less 20


def test_a_diff_of_exactly_20_lines_has_no_count():
    ours = layout_of([ParamSpec(f"ours{i}", (4,)) for i in range(10)], bucket_size=10**9)
    theirs = layout_of([ParamSpec(f"theirs{i}", (4,)) for i in range(9)], bucket_size=10**9)

    lines = layout_diff(ours, theirs)

    assert len(lines) == 20  # 10 + 9 names and the line about buckets; both buffers have 640 elements
    assert not lines[-1].startswith("and ")


@pytest.mark.parametrize(
    "value", [SPECS[0], layout_of(SPECS), layout_of(SPECS).buffers[0], layout_of(SPECS).buffers[0].buckets[0]]
)
def test_nothing_in_a_layout_can_be_assigned(value):
    field = dataclasses.fields(value)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)


def test_a_model_counts_the_buckets_and_elements_of_its_buffers():
    layout = layout_of([ParamSpec("a", (500,)), ParamSpec("b", (500,)), ParamSpec("c", (500,), "bfloat16")])

    assert [type(buffer) for buffer in layout.buffers] == [BufferLayout, BufferLayout]
    assert (layout.num_buckets, layout.numel) == (3, 1536)  # 3 * 512


def test_a_diff_of_21_lines_has_a_count_of_one():
    ours = layout_of([ParamSpec(f"ours{i}", (4,)) for i in range(10)], bucket_size=10**9)
    theirs = layout_of([ParamSpec(f"theirs{i}", (4,)) for i in range(10)], bucket_size=10**9)

    assert layout_diff(ours, theirs)[20:] == ("and 1 more differences",)  # 10 + 10 names and the line about buckets


def test_the_diff_shows_a_bucket_that_only_one_layout_has():
    (buffer,) = layout_of(SPECS).buffers
    shorter = ModelLayout((dataclasses.replace(buffer, buckets=buffer.buckets[:1]),))

    numel, bucket = layout_diff(layout_of(SPECS), shorter)
    assert numel == "buffer 0: numel: 256 != 128"
    assert bucket.startswith("buffer 0: bucket 1: BucketLayout(index=1, start=128, stop=256, ")
    assert bucket.endswith(" != missing")


def test_parameters_stand_in_the_text_in_registration_order_and_not_by_name():
    layout = layout_of([ParamSpec("z", (4,)), ParamSpec("a", (4,))])

    assert [param["name"] for param in json.loads(layout.to_json())["buffers"][0]["params"]] == ["z", "a"]


def test_parameters_with_the_same_number_stand_in_the_text_by_name():
    (buffer,) = layout_of([ParamSpec("a", (4,)), ParamSpec("b", (4,))]).buffers
    params = {name: slot._replace(registration_index=0) for name, slot in buffer.params.items()}  # b lies before a

    text = ModelLayout((dataclasses.replace(buffer, params=params),)).to_json()

    assert [param["name"] for param in json.loads(text)["buffers"][0]["params"]] == ["a", "b"]


def test_buffers_that_differ_have_different_hashes():
    buffers = [layout_of(SPECS, bucket_size=size).buffers[0] for size in (500, 501, 502, 503)]

    assert len({hash(buffer) for buffer in buffers}) == 4
