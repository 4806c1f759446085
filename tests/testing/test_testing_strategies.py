"""The public strategies: what they refuse, what they shrink towards, what they can reach."""

import math

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument, NoSuchExample

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ModelLayout, ParamSpec
from megabucket.testing import LayoutInput, ddp_configs, dp_sizes, layout_inputs, model_layouts, param_shapes, param_specs

pytestmark = pytest.mark.long_file

SEARCH = settings(max_examples=5_000, database=None, derandomize=True)
WITHOUT_SHRINKING = settings(SEARCH, phases=[Phase.generate])


def minimal(strategy, condition=lambda _: True):
    return find(strategy, condition, settings=SEARCH)


def any_one(strategy, condition):
    return find(strategy, condition, settings=WITHOUT_SHRINKING)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: param_shapes(max_numel=0), "max_numel=0 must be an integer >= 1"),
        (lambda: param_shapes(max_dims=True), "max_dims=True must be an integer >= 1"),
        (lambda: param_specs(min_params=-1), "min_params=-1 must be an integer >= 0"),
        (lambda: param_specs(max_params=2.0), "max_params=2.0 must be an integer >= 0"),
        (lambda: param_specs(min_params=3, max_params=2), "min_params=3 must not exceed max_params=2"),
        (lambda: param_specs(max_numel="9"), "max_numel='9' must be an integer >= 1"),
        (
            lambda: param_specs(dtypes=[]),
            "dtypes=[] must be a non-empty sequence out of float32, bfloat16, float16, float64",
        ),
        (
            lambda: param_specs(dtypes=["int8"]),
            "dtypes=['int8'] must be a non-empty sequence out of float32, bfloat16, float16, float64",
        ),
        (lambda: param_specs(groups="dense"), "groups='dense' must be a non-empty sequence of names"),
        (lambda: param_specs(groups=["dense", ""]), "groups=['dense', ''] must be a non-empty sequence of names"),
        (lambda: ddp_configs(layouts=["flat"]), "layouts=['flat'] must be a non-empty sequence out of stable, megatron"),
        (lambda: dp_sizes(min_size=0), "min_size=0 must be an integer >= 1"),
        (lambda: dp_sizes(min_size=5, max_size=4), "min_size=5 must not exceed max_size=4"),
        (
            lambda: layout_inputs(sizings=["auto"]),
            (
                "sizings=['auto'] must be a non-empty sequence out of default, bucket_size, bucket_cap_mb, num_buckets, "
                "bucket_cuts"
            ),
        ),
        (lambda: model_layouts(layouts=()), "layouts=() must be a non-empty sequence out of stable, megatron"),
    ],
)
def test_impossible_arguments_are_refused_when_the_strategy_is_made(call, text):
    with pytest.raises(InvalidArgument) as caught:
        call()

    assert str(caught.value) == text


def test_strategies_take_keywords_only():
    with pytest.raises(TypeError):
        param_specs(1, 2)


def test_shapes_shrink_to_one_element():
    assert minimal(param_shapes()) == (1,)


@pytest.mark.nightly
def test_models_shrink_to_the_fewest_parameters_of_one_element():
    assert minimal(param_specs()) == (ParamSpec("p0", (1,)),)
    assert minimal(param_specs(min_params=2)) == (ParamSpec("p0", (1,)), ParamSpec("p1", (1,)))
    assert minimal(param_specs(min_params=0)) == ()
    assert minimal(param_specs(dtypes=["float16"], groups=["expert"])) == (ParamSpec("p0", (1,), "float16", "expert"),)


@pytest.mark.nightly
def test_configs_shrink_to_the_default():
    assert minimal(ddp_configs()) == DistributedDataParallelConfig()
    assert minimal(ddp_configs(layouts=["megatron"], sizings=["bucket_size"])) == DistributedDataParallelConfig(
        layout="megatron", bucket_size=1
    )


@pytest.mark.nightly
def test_a_switch_that_matters_is_the_only_one_left_after_shrinking():
    found = minimal(ddp_configs(), lambda config: config.overlap_param_gather)

    # The gather needs the other one; nothing else differs from the default.
    assert found == DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)


def test_group_sizes_shrink_to_the_smallest():
    assert (minimal(dp_sizes()), minimal(dp_sizes(min_size=3))) == (1, 3)


@pytest.mark.nightly
def test_inputs_shrink_to_one_parameter_the_default_config_and_one_rank():
    assert minimal(layout_inputs()) == LayoutInput((ParamSpec("p0", (1,)),), DistributedDataParallelConfig(), 1, {})


@pytest.mark.nightly
def test_a_layout_of_two_buckets_shrinks_to_two_parameters_of_one_element():
    found = minimal(model_layouts(sizings=["bucket_size"]), lambda layout: layout.num_buckets == 2)

    (buffer,) = found.buffers
    assert [(name, slot.shape) for name, slot in buffer.params.items()] == [("p0", (1,)), ("p1", (1,))]


@pytest.mark.parametrize(
    ("what", "strategy", "condition"),
    [
        ("a scalar", param_shapes(), lambda shape: shape == ()),
        ("an empty shape", param_shapes(), lambda shape: 0 in shape),
        ("four dimensions", param_shapes(), lambda shape: len(shape) == 4 and math.prod(shape) > 1),
        ("a prime above the alignments", param_shapes(), lambda shape: shape == (1021,)),
        ("more than 2**31 elements", param_shapes(max_numel=2**41), lambda shape: math.prod(shape) > 2**31),
        ("2**31 by factors that fit", param_shapes(max_numel=2**41), lambda shape: shape == (46_341, 46_341)),
        ("a shared embedding", param_specs(), lambda specs: any(spec.shared_embedding for spec in specs)),
        ("three groups at once", param_specs(), lambda specs: len({spec.group for spec in specs}) == 3),
        ("a group of any name", param_specs(groups=["a", "b"]), lambda specs: {spec.group for spec in specs} == {"a", "b"}),
        ("four dtypes at once", param_specs(), lambda specs: len({spec.dtype for spec in specs}) == 4),
        ("a name with a quote", param_specs(), lambda specs: '"' in specs[0].name),
        ("a group that is no power of two", dp_sizes(), lambda size: size & (size - 1) and size > 100),
        ("a group of 1024", dp_sizes(), lambda size: size == 1024),
        (
            "groups of three sizes",
            layout_inputs(),
            lambda case: len({case.group_sizes.get(spec.group, case.dp_size) for spec in case.specs}) == 3,
        ),
        (
            "a size of a group without a parameter",
            layout_inputs(),
            lambda case: bool(case.group_sizes.keys() - {spec.group for spec in case.specs}),
        ),
        ("a model without elements", layout_inputs(), lambda case: sum(spec.numel for spec in case.specs) == 0),
        ("ten buckets", model_layouts(), lambda layout: layout.num_buckets >= 10),
        ("a cut in the middle", model_layouts(), lambda layout: len(layout.buffers[0].cuts or ()) == 1),
        (
            "an order that is not registration's",
            model_layouts(),
            lambda layout: [slot.ready_index for slot in layout.buffers[0].params.values()][:2] == [0, 1],
        ),
        ("a bucket of empty parameters", model_layouts(), lambda layout: layout.buffers[0].buckets[-1].numel == 0),
        (
            "a rank with padding only",
            model_layouts(),
            lambda layout: any(
                b.num_shards > 1 and b.numel // b.num_shards * (b.num_shards - 1) >= b.params_numel for b in layout.buffers
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_strategies_reach(what, strategy, condition):
    assert condition(any_one(strategy, condition))


def test_shapes_without_a_zero_can_be_asked_for():
    with pytest.raises(NoSuchExample):
        find(
            param_shapes(allow_empty=False), lambda shape: 0 in shape, settings=settings(WITHOUT_SHRINKING, max_examples=1_000)
        )


@given(
    data=st.data(),
    max_numel=st.sampled_from([1, 2, 7, 63, 1000, 2**31, 2**41, 2**63 - 1, 10**21 + 37]),
    max_dims=st.integers(1, 6),
)
def test_shapes_stay_within_their_bounds(data, max_numel, max_dims):
    shape = data.draw(param_shapes(max_numel=max_numel, max_dims=max_dims))

    assert math.prod(shape) <= max_numel
    assert len(shape) <= max_dims


@given(specs=param_specs(min_params=2, max_params=20, shared_embeddings=False, dtypes=["float16", "float32"]))
def test_models_have_distinct_names_and_what_was_asked_for(specs):
    assert 2 <= len({spec.name for spec in specs}) == len(specs) <= 20
    assert {spec.dtype for spec in specs} <= {"float16", "float32"}
    assert not any(spec.shared_embedding for spec in specs)


@given(size=dp_sizes(min_size=5, max_size=17))
def test_group_sizes_stay_within_their_bounds(size):
    assert 5 <= size <= 17


@pytest.mark.parametrize("field", DistributedDataParallelConfig.model_fields)
def test_every_field_of_the_config_takes_another_value_than_its_default(field):
    default = getattr(DistributedDataParallelConfig(), field)

    strategy = ddp_configs(param_names=["a", "b"])

    assert getattr(any_one(strategy, lambda config: getattr(config, field) != default), field) != default


@given(case=layout_inputs(sizings=["num_buckets"], recorded_orders=False), config=ddp_configs())
def test_what_names_parameters_can_be_left_out(case, config):
    assert (case.config.bucket_cuts, case.config.bucket_order) == (None, None)
    assert (config.bucket_cuts or (), config.bucket_order) == ((), None)  # such a config fits every model


@given(case=layout_inputs() | layout_inputs(specs=param_specs(max_params=2, max_numel=2**70)))
def test_every_input_is_accepted(case):
    assert isinstance(case.build(), ModelLayout)
