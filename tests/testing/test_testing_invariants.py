"""The public assertions: each is silent about a sound layout and says what is wrong with a broken one."""

from dataclasses import replace

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import BufferLayout, ModelLayout, ParamSpec, ShardSlice, Span, build_layout, shard_slices
from megabucket.testing import (
    assert_layouts_equal,
    assert_places,
    assert_shards_partition,
    assert_sound,
    assert_views_are_a_bijection,
    invariants,
)
from megabucket.testing.invariants import layout_diff

# b [0, 100) and a [128, 228), one bucket of 256, two shards of 128.
SPECS = [ParamSpec("a", (10, 10)), ParamSpec("b", (100,))]
LAYOUT = build_layout(SPECS, DistributedDataParallelConfig(), dp_size=2)


def with_slot(name: str, **changes) -> ModelLayout:
    (buffer,) = LAYOUT.buffers
    return ModelLayout((replace(buffer, params={**buffer.params, name: buffer.params[name]._replace(**changes)}),))


def with_buffer(**changes) -> ModelLayout:
    return ModelLayout((replace(LAYOUT.buffers[0], **changes),))


@pytest.mark.parametrize(
    ("ours", "theirs", "line"),
    [
        (("b", "a"), ("a", "b"), "buffer 0: cut 'b': number 0 != number 1"),
        (None, (), "buffer 0: is cut by name: False != True"),
    ],
)
def test_layouts_whose_cuts_alone_differ_are_different(ours, theirs, line):
    one, two = with_buffer(cuts=ours), with_buffer(cuts=theirs)

    assert one != two
    assert line in layout_diff(one, two)
    with pytest.raises(AssertionError):
        assert_layouts_equal(one, two)


def failure(check, *args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


def test_a_built_layout_passes_every_assertion():
    assert_sound(LAYOUT)
    assert_places(LAYOUT, SPECS)
    assert_shards_partition(LAYOUT)
    assert_views_are_a_bijection(LAYOUT)
    assert_layouts_equal(LAYOUT, build_layout(SPECS, DistributedDataParallelConfig(), dp_size=2))


def test_assert_sound_lists_the_violations_by_name():
    assert failure(assert_sound, with_buffer(num_shards=3)) == (
        "the layout violates 1 invariant(s)\n"
        "  shards-are-equal: buffer 0 (dense/float32->float32): bucket 0 has 256 elements, not divisible into 3 shards"
    )


@pytest.mark.parametrize(("num_params", "num_violations", "rest"), [(15, 10, []), (17, 11, ["  and 1 more"])])
def test_assert_sound_lists_ten_violations_and_counts_the_others(num_params, num_violations, rest):
    layout = build_layout([ParamSpec(f"p{i}", (64,)) for i in range(num_params)], DistributedDataParallelConfig(), dp_size=2)
    shifted = replace(layout.buffers[0], start_alignment=48)  # 64 * i is a multiple of 48 for every third i

    lines = failure(assert_sound, ModelLayout((shifted,))).split("\n")

    assert lines[0] == f"the layout violates {num_violations} invariant(s)"
    assert all("starts-are-aligned" in line for line in lines[1:11])
    assert lines[11:] == rest


def test_assert_sound_can_ignore_an_invariant_that_other_code_does_not_promise():
    swapped = with_buffer(
        params={
            "a": LAYOUT.buffers[0].params["a"]._replace(registration_index=1),
            "b": LAYOUT.buffers[0].params["b"]._replace(registration_index=0),
        }
    )

    assert "order-is-reverse-registration" in failure(assert_sound, swapped)
    assert_sound(swapped, ignoring=["order-is-reverse-registration"])


def test_assert_sound_refuses_to_ignore_what_is_no_invariant():
    with pytest.raises(ValueError, match=r"\['order'\] cannot be ignored: the invariants are each-parameter-in-one-bucket, "):
        assert_sound(LAYOUT, ignoring=["order"])


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        (
            [*SPECS, ParamSpec("c", (1,))],
            "'c': (number, shape, shared, dtype, group) is None, expected [(2, (1,), False, 'float32', 'dense')]",
        ),
        (SPECS[1:], "'a': (number, shape, shared, dtype, group) is [(0, (10, 10), False, 'float32', 'dense')], expected None"),
        (
            [replace(SPECS[0], dtype="float64"), SPECS[1]],
            (
                "'a': (number, shape, shared, dtype, group) is [(0, (10, 10), False, 'float32', 'dense')], "
                "expected [(0, (10, 10), False, 'float64', 'dense')]"
            ),
        ),
        (
            [replace(SPECS[0], shape=(5, 20)), SPECS[1]],
            (
                "'a': (number, shape, shared, dtype, group) is [(0, (10, 10), False, 'float32', 'dense')], "
                "expected [(0, (5, 20), False, 'float32', 'dense')]"
            ),
        ),
    ],
)
def test_assert_places_names_the_parameter_that_is_not_where_it_belongs(specs, problem):
    text = failure(assert_places, LAYOUT, specs)

    assert text.startswith("the layout does not hold the given parameters\n")
    assert problem in text


def test_assert_places_counts_a_parameter_in_two_buffers():
    twice = ModelLayout((*LAYOUT.buffers, *LAYOUT.buffers))
    place = "(0, (10, 10), False, 'float32', 'dense')"

    assert f"is [{place}, {place}], expected [{place}]" in failure(assert_places, twice, SPECS)


def test_assert_shards_partition_finds_shards_that_leave_elements_out():
    # 256 // 3 = 85 elements per shard: the 256th belongs to nobody.
    assert failure(assert_shards_partition, with_buffer(num_shards=3)) == "the shards of bucket 0 end at 255, the bucket at 256"


class EverySecondShard(BufferLayout):
    """Somebody's own cut: rank 1 is given what rank 0 has."""

    def shard_span(self, *, bucket, rank):
        return super().shard_span(bucket=bucket, rank=0)


def test_assert_shards_partition_finds_shards_that_overlap():
    buffer = LAYOUT.buffers[0]
    same = EverySecondShard(
        buffer.key,
        buffer.params,
        buffer.buckets,
        buffer.num_shards,
        buffer.bucket_size,
        buffer.start_alignment,
        buffer.end_multiple,
    )

    assert failure(assert_shards_partition, ModelLayout((same,))) == "shard 1 of bucket 0 starts at 0, expected 128"


def test_assert_shards_partition_finds_a_parameter_beyond_its_bucket():
    text = failure(assert_shards_partition, with_slot("a", start=200, stop=300))

    assert text == "the pieces of 'a' do not continue one another at (stop, next start) [(56, 100)]"  # 256 - 200


# What is wrong with the pieces of a, [0, 100), which lies in [128, 228): rank 1 owns all of it.
A = ShardSlice("a", Span(128, 228), Span(128, 228), Span(0, 100), Span(0, 100))
NOTHING = A._replace(in_buffer=Span(138, 138), in_bucket=Span(138, 138), in_shard=Span(10, 10), in_param=Span(10, 10))
LOW = ShardSlice("a", Span(128, 138), Span(128, 138), Span(0, 10), Span(0, 10))
MIDDLE = ShardSlice("a", Span(138, 148), Span(138, 148), Span(10, 20), Span(10, 20))
HIGH = ShardSlice("a", Span(148, 228), Span(148, 228), Span(20, 100), Span(20, 100))


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        (
            [A._replace(in_bucket=Span(129, 229))],
            f"the four ranges of a piece of 'a' name different elements: {A._replace(in_bucket=Span(129, 229))}",
        ),
        ([A, NOTHING], f"a piece of 'a' is empty or leaves its shard of 128 elements: {NOTHING}"),
        ([LOW, MIDDLE, HIGH], "'a' is cut into 3 pieces for 2 ranks"),
        ([LOW, HIGH], "the pieces of 'a' do not continue one another at (stop, next start) [(10, 20)]"),
    ],
    ids=["coordinates", "empty", "three of two ranks", "hole"],
)
def test_assert_shards_partition_finds_wrong_pieces(pieces, problem, monkeypatch):
    def wrong_slices(buffer, *, bucket, rank):
        return tuple(pieces) if rank == 1 else shard_slices(buffer, bucket=bucket, rank=rank)

    monkeypatch.setattr(invariants, "shard_slices", wrong_slices)

    assert failure(assert_shards_partition, LAYOUT) == problem


def test_assert_shards_partition_finds_owners_of_an_empty_parameter(monkeypatch):
    empty = with_slot("a", shape=(0,), stop=128)
    assert_shards_partition(empty)

    monkeypatch.setattr(invariants, "shard_slices", lambda _, bucket, rank: (LOW,) if rank == 1 else ())  # noqa: ARG005

    problem = f"'a' is empty but has owners: {[LOW.in_param]}"
    assert (
        failure(assert_shards_partition, ModelLayout((replace(empty.buffers[0], params={"a": empty.buffers[0].params["a"]}),)))
        == problem
    )


def test_assert_views_are_a_bijection_finds_overlapping_views():
    assert failure(assert_views_are_a_bijection, with_slot("a", start=90, stop=190)) == (
        "200 elements of buffer dense/float32->float32 were written at 190 places: views overlap"
    )


@pytest.mark.parametrize(("start", "stop"), [(200, 300), (-100, 0)])
def test_assert_views_are_a_bijection_finds_a_view_outside_the_buffer(start, stop):
    assert failure(assert_views_are_a_bijection, with_slot("a", start=start, stop=stop)) == (
        f"'a' of shape (10, 10) at [{start}, {stop}) is no view of 256 elements"
    )


def test_assert_views_are_a_bijection_finds_a_shape_of_another_size():
    assert (
        failure(assert_views_are_a_bijection, with_slot("a", shape=(3, 3)))
        == "'a' of shape (3, 3) at [128, 228) is no view of 256 elements"
    )


def test_assert_views_are_a_bijection_refuses_to_allocate_a_whole_model():
    layout = build_layout([ParamSpec("a", (50_000_001,))], DistributedDataParallelConfig(), dp_size=1)

    with pytest.raises(ValueError, match="has 50000128 elements; this check allocates at most 50000000"):
        assert_views_are_a_bijection(layout)


def test_assert_views_are_a_bijection_allocates_as_much_as_it_says(monkeypatch):
    monkeypatch.setattr(invariants, "_MAX_ALLOCATED_NUMEL", 256)

    assert_views_are_a_bijection(LAYOUT)


def test_assert_layouts_equal_shows_the_diff():
    other = build_layout(SPECS, DistributedDataParallelConfig(), dp_size=4)

    assert failure(assert_layouts_equal, LAYOUT, other) == "the layouts differ\n  buffer 0: num_shards: 2 != 4"


def test_a_buffer_that_one_layout_lacks_differs_in_values_that_are_none_as_well():
    config = DistributedDataParallelConfig(bucket_cuts=[])  # so that bucket_size is None
    two = build_layout([*SPECS, ParamSpec("c", (1,), "float64")], config, dp_size=2)
    one = build_layout(SPECS, config, dp_size=2)

    assert "buffer 1: bucket_size: missing != None" in layout_diff(one, two)
    assert "buffer 1: bucket_size: None != missing" in layout_diff(two, one)
