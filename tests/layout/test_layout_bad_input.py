"""What no layout can be built from: each refusal with its text."""

import pytest

from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import LayoutError
from megabucket.layout import ParamSpec, build_layout

DEFAULT = DistributedDataParallelConfig()


def refusal(call) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    assert isinstance(caught.value, ValueError)  # what code that does not know this library catches
    return str(caught.value)


def test_no_parameter_is_refused():
    text = refusal(lambda: build_layout([], DEFAULT, dp_size=2))

    assert text == "a layout needs at least one trainable parameter, got none"


def test_the_same_parameter_twice_is_refused_by_name():
    specs = [ParamSpec("a", (4,)), ParamSpec("b", (4,)), ParamSpec("a", (4,))]

    text = refusal(lambda: build_layout(specs, DEFAULT, dp_size=2))

    assert text == (
        "the same parameter is given twice: 'a'. A parameter owns one range of one buffer; "
        "pass each name once (a tied parameter counts under its first name)"
    )


def test_the_same_parameter_in_two_dtypes_is_refused_although_the_buffers_differ():
    specs = [ParamSpec("a", (4,)), ParamSpec("a", (4,), "bfloat16")]

    assert refusal(lambda: build_layout(specs, DEFAULT, dp_size=2)).startswith("the same parameter is given twice: 'a'. ")


def test_many_parameters_given_twice_are_listed_up_to_five():
    specs = [ParamSpec(f"p{i}", (4,)) for i in range(7)] * 2

    text = refusal(lambda: build_layout(specs, DEFAULT, dp_size=2))

    assert text.startswith("the same parameter is given twice: 'p0', 'p1', 'p2', 'p3', 'p4' and 2 more. ")


@pytest.mark.parametrize("size", [0, -1, True, 2.0, float("nan"), "2"], ids=repr)
def test_a_dp_size_that_is_no_positive_integer_is_refused(size):
    text = refusal(lambda: build_layout([ParamSpec("a", (4,))], DEFAULT, dp_size=size))

    assert text == f"dp_size={size!r} is not a group size; give the number of data-parallel ranks, at least 1"


@pytest.mark.parametrize("size", [0, -1, True, 1.5], ids=repr)
def test_a_group_size_that_is_no_positive_integer_is_refused_by_name_also_without_a_parameter(size):
    text = refusal(lambda: build_layout([ParamSpec("a", (4,))], DEFAULT, dp_size=2, group_sizes={"expert": size}))

    assert text == f"group_sizes['expert']={size!r} is not a group size; give the number of data-parallel ranks, at least 1"


@pytest.mark.parametrize("shape", [(-1,), (3, -2), (2.0,), (True,), ("3",), (None,)], ids=repr)
def test_a_shape_with_anything_but_natural_numbers_is_refused(shape):
    text = refusal(lambda: ParamSpec("block.weight", shape))

    assert text == f"parameter 'block.weight': the shape must hold integers >= 0, got {shape!r}"


def test_one_integer_is_a_shape_of_one_dimension():
    assert ParamSpec("a", 7).shape == (7,)


@pytest.mark.parametrize("dtype", ["complex64", "int64", "bool", "float8_e4m3fn", "torch.float32", "Float32", ""])
def test_a_dtype_that_no_buffer_holds_is_refused_with_the_ones_it_does(dtype):
    text = refusal(lambda: ParamSpec("block.weight", (4,), dtype))

    assert text == (
        f"parameter 'block.weight': dtype {dtype!r} cannot be held by a buffer; use one of float64, float32, bfloat16, float16"
    )


@pytest.mark.parametrize("group", ["", None, 3, ("expert",)], ids=repr)
def test_a_group_without_a_name_is_refused(group):
    text = refusal(lambda: ParamSpec("block.weight", (4,), group=group))

    assert text == f"parameter 'block.weight': group must be a non-empty string, got {group!r}"


@pytest.mark.parametrize("name", ["", None, 3], ids=repr)
def test_a_parameter_without_a_name_is_refused(name):
    assert refusal(lambda: ParamSpec(name, (4,))) == f"a parameter needs a non-empty name, got {name!r}"


@pytest.mark.parametrize("flag", [1, "yes", None], ids=repr)
def test_a_shared_embedding_flag_that_is_no_bool_is_refused(flag):
    text = refusal(lambda: ParamSpec("embedding", (4,), shared_embedding=flag))

    assert text == f"parameter 'embedding': shared_embedding must be a bool, got {flag!r}"
