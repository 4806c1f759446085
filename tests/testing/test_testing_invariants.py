"""The public assertions: each is silent about a sound layout and says what is wrong with a broken one."""

from dataclasses import replace

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import BufferLayout, ModelLayout, ParamSpec, build_layout
from megabucket.testing import (
    assert_json_round_trip,
    assert_layouts_equal,
    assert_places,
    assert_shards_partition,
    assert_sound,
    assert_views_are_a_bijection,
)

# b [0, 100) and a [128, 228), one bucket of 256, two shards of 128.
SPECS = [ParamSpec("a", (10, 10)), ParamSpec("b", (100,))]
LAYOUT = build_layout(SPECS, DistributedDataParallelConfig(), dp_size=2)


def with_slot(name: str, **changes) -> ModelLayout:
    (buffer,) = LAYOUT.buffers
    return ModelLayout((replace(buffer, params={**buffer.params, name: buffer.params[name]._replace(**changes)}),))


def with_buffer(**changes) -> ModelLayout:
    return ModelLayout((replace(LAYOUT.buffers[0], **changes),))


def failure(check, *args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


def test_a_built_layout_passes_every_assertion():
    assert_sound(LAYOUT)
    assert_places(LAYOUT, SPECS)
    assert_shards_partition(LAYOUT)
    assert_views_are_a_bijection(LAYOUT)
    assert_json_round_trip(LAYOUT)
    assert_layouts_equal(LAYOUT, build_layout(SPECS, DistributedDataParallelConfig(), dp_size=2))


def test_assert_sound_lists_the_violations_by_name():
    assert failure(assert_sound, with_buffer(num_shards=3)) == (
        "the layout violates 1 invariant(s)\n"
        "  shards-are-equal: buffer 0 (dense/float32->float32): bucket 0 has 256 elements, not divisible into 3 shards"
    )


def test_assert_sound_lists_ten_violations_and_counts_the_others():
    layout = build_layout([ParamSpec(f"p{i}", (64,)) for i in range(14)], DistributedDataParallelConfig(), dp_size=2)
    shifted = replace(layout.buffers[0], start_alignment=48)  # 64 * i is a multiple of 48 for every third i

    lines = failure(assert_sound, ModelLayout((shifted,))).split("\n")

    assert lines[0] == "the layout violates 9 invariant(s)"
    assert len(lines) == 10


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


def test_assert_views_are_a_bijection_finds_overlapping_views():
    assert failure(assert_views_are_a_bijection, with_slot("a", start=90, stop=190)) == (
        "200 distinct numbers were written into buffer dense/float32->float32, 190 are left: views overlap"
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


def test_assert_layouts_equal_shows_the_diff():
    other = build_layout(SPECS, DistributedDataParallelConfig(), dp_size=4)

    assert failure(assert_layouts_equal, LAYOUT, other) == "the layouts differ\n  buffer 0: num_shards: 2 != 4"


def test_assert_json_round_trip_finds_what_json_does_not_keep():
    class Forgetful(ModelLayout):
        def to_json(self):
            return LAYOUT.to_json()

    assert "the layouts differ" in failure(assert_json_round_trip, Forgetful(with_slot("a", shape=(4, 25)).buffers))
