"""The public assertions: each is silent about a sound layout and says what is wrong with a broken one."""

from dataclasses import replace

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, ParamSpec, build_layout
from megabucket.testing import (
    assert_layouts_equal,
    assert_places,
    assert_sound,
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


def test_assert_layouts_equal_shows_the_diff():
    other = build_layout(SPECS, DistributedDataParallelConfig(), dp_size=4)

    assert failure(assert_layouts_equal, LAYOUT, other) == "the layouts differ\n  buffer 0: num_shards: 2 != 4"


def test_a_buffer_that_one_layout_lacks_differs_in_values_that_are_none_as_well():
    config = DistributedDataParallelConfig(bucket_cuts=[])  # so that bucket_size is None
    two = build_layout([*SPECS, ParamSpec("c", (1,), "float64")], config, dp_size=2)
    one = build_layout(SPECS, config, dp_size=2)

    assert "buffer 1: bucket_size: missing != None" in layout_diff(one, two)
    assert "buffer 1: bucket_size: None != missing" in layout_diff(two, one)
