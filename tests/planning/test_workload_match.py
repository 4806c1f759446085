import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.planning.workload import TensorWork, Workload, check_workload_matches, model_fingerprint
from megabucket.testing import param_specs

SPECS = [ParamSpec("embedding", (10, 4)), ParamSpec("head.weight", (4, 3)), ParamSpec("head.bias", (3,))]


def workload_of(specs):
    return Workload(tuple(TensorWork(spec.name, spec.numel) for spec in specs))


@given(param_specs(max_numel=2**40))
def test_a_model_matches_its_own_workload(specs):
    check_workload_matches(workload_of(specs), specs, fingerprint=model_fingerprint(specs))


@given(param_specs(min_params=2, max_numel=2**40), st.data())
def test_a_model_that_lacks_a_parameter_or_has_it_elsewhere_is_another_model(specs, data):
    index = data.draw(st.integers(0, len(specs) - 1))
    without = [spec for position, spec in enumerate(specs) if position != index]
    moved = [*without, specs[index]] if index < len(specs) - 1 else [specs[index], *without]

    for other in (without, moved):
        with pytest.raises(ConfigError, match="is from another model"):
            check_workload_matches(workload_of(specs), other)
        with pytest.raises(ConfigError, match="is from another model"):
            check_workload_matches(workload_of(other), specs)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (SPECS[:2], f"parameter 2 is 'head.bias' with {SPECS[2].numel} elements instead of nothing"),
        ([*SPECS, ParamSpec("more", (1,))], "parameter 3 is nothing instead of 'more' with 1 elements"),
        (
            [SPECS[0], ParamSpec("head.weight", (4, 5)), SPECS[2]],
            "parameter 1 is 'head.weight' with 12 elements instead of 'head.weight' with 20",
        ),
        ([SPECS[1], SPECS[0], SPECS[2]], "parameter 0 is 'embedding' with 40 elements instead of 'head.weight' with 12"),
        ([SPECS[0], ParamSpec("head.weight", (3, 4)), SPECS[2]], "some parameters have other shapes"),
    ],
)
def test_the_error_names_what_differs_and_says_what_to_do(specs, text):
    with pytest.raises(ConfigError) as caught:
        check_workload_matches(workload_of(SPECS), specs, fingerprint=model_fingerprint(SPECS))

    assert f"is from another model ({len(specs)} trainable parameters): {text}" in str(caught.value)
    assert str(caught.value).endswith("Profile this model, or describe the one that was profiled.")


def test_shapes_are_compared_only_where_the_workload_tells_them():
    check_workload_matches(workload_of(SPECS), [SPECS[0], ParamSpec("head.weight", (3, 4)), SPECS[2]])


def test_a_name_that_would_control_the_terminal_is_escaped():
    specs = [ParamSpec("a\x1b[31m", (2,))]

    with pytest.raises(ConfigError) as caught:
        check_workload_matches(Workload((TensorWork("a\x1b[31m", 3),)), specs)

    assert str(caught.value).isprintable()


@given(st.permutations(SPECS))
def test_the_fingerprint_depends_on_order(specs):
    assert (model_fingerprint(specs) == model_fingerprint(SPECS)) == (list(specs) == SPECS)
