"""DistributedDataParallelConfig as Python sees it: bad values, unknown keys, contradictions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megabucket.config import DistributedDataParallelConfig
from megabucket.config.ddp import NonNegative, Positive, Section
from megabucket.planning import RunConfig


def problems(**fields):
    """What is wrong, as (dotted field, text)."""
    with pytest.raises(ValidationError) as caught:
        DistributedDataParallelConfig(**fields)
    return [(".".join(map(str, detail["loc"])), detail["msg"]) for detail in caught.value.errors()]


@pytest.mark.parametrize(
    ("written", "elements"), [("40M", 40_000_000), ("5e8", 500_000_000), (5e8, 500_000_000), ("1.5K", 1_500), (1, 1)]
)
def test_a_bucket_size_may_be_written_as_a_count(written, elements):
    assert DistributedDataParallelConfig(bucket_size=written).bucket_size == elements


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "Input should be greater than 0"),
        (-1, "Input should be greater than 0"),
        (True, "Input should be a valid integer"),
        (math.nan, "Input should be a valid integer"),
        (math.inf, "Input should be a valid integer"),
        (1.5, "Input should be a valid integer"),
        ("40m2", "Value error, '40m2' is not a count; write 40000000, 4e7 or 40M"),
        ("1.5", "Value error, '1.5' is not a whole number of elements"),
        ("-4", "Value error, '-4' is not a count; write 40000000, 4e7 or 40M"),
        ([4], "Input should be a valid integer"),
        (10**400, "Input should be less than or equal to 4611686018427387904"),
    ],
)
@pytest.mark.parametrize("field", ["bucket_size", "num_buckets"])
def test_a_bad_count_is_refused(field, value, message):
    assert problems(**{field: value}) == [(field, message)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "Input should be greater than 0"),
        (-25.0, "Input should be greater than 0"),
        (True, "Input should be a valid number"),
        (math.nan, "Input should be a finite number"),
        ("25", "Input should be a valid number"),
        (10**400, "Input should be a valid number"),
        (1e300, "Input should be less than or equal to 4611686018427388000"),
    ],
)
def test_a_bad_bucket_cap_is_refused(value, message):
    assert problems(bucket_cap_mb=value) == [("bucket_cap_mb", message)]


@pytest.mark.parametrize("value", [1, 0, "true", "yes", None, 1.0])
def test_a_switch_takes_nothing_but_a_boolean(value):
    assert problems(overlap_grad_reduce=value) == [("overlap_grad_reduce", "Input should be a valid boolean")]


class Rates(Section):
    rate: Positive = 1.0
    decay: NonNegative = 0.0


@pytest.mark.parametrize(("written", "number"), [("3e-4", 3e-4), ("+.5E1", 5.0), ("2.", 2.0), (0.5, 0.5), (2, 2.0)])
def test_a_rate_may_be_written_as_yaml_leaves_it(written, number):
    assert Rates.model_validate({"rate": written}).rate == number


@pytest.mark.parametrize("value", ["", "nan", "inf", "0x1", "1_0", "1e", "quick", True, None, ["1"]])
def test_what_is_no_number_is_no_rate(value):
    with pytest.raises(ValidationError, match="Input should be a valid number"):
        Rates.model_validate({"decay": value})


def test_names_may_be_a_list_but_not_one_text():
    assert DistributedDataParallelConfig(bucket_cuts=["a", "b"]).bucket_cuts == ("a", "b")
    assert problems(bucket_cuts="ab") == [("bucket_cuts", "Input should be a valid tuple")]


# Unknown keys


def test_a_misspelt_key_is_answered_with_the_likely_one():
    assert problems(bucket_sise=4) == [("bucket_sise", "unknown key 'bucket_sise'; did you mean 'bucket_size'?")]


def test_a_key_like_no_other_is_answered_with_the_known_ones():
    ((field, message),) = problems(zzz=4)

    assert field == "zzz"
    assert message.startswith("unknown key 'zzz'; known keys are use_distributed_optimizer, overlap_grad_reduce, ")


def test_unknown_keys_do_not_hide_bad_values():
    with pytest.raises(ValidationError) as caught:
        DistributedDataParallelConfig(bucket_sise=4, num_buckets=0)

    assert [(detail["loc"], detail["msg"], detail["input"]) for detail in caught.value.errors()] == [
        (("bucket_sise",), "unknown key 'bucket_sise'; did you mean 'bucket_size'?", None),
        (("num_buckets",), "Input should be greater than 0", 0),
    ]


def test_twenty_thousand_unknown_keys_give_five_names_and_a_count():
    with pytest.raises(ValidationError) as caught:
        DistributedDataParallelConfig(**{f"bucket_size{i}": i for i in range(20_000)})

    found = [detail["msg"] for detail in caught.value.errors()]
    assert found[0] == "unknown key 'bucket_size0'; did you mean 'bucket_size'?"
    assert len(found) == 6
    assert found[5] == "and 19995 more unknown keys"
    assert len(str(caught.value)) < 2_000


def test_a_huge_unknown_key_is_cut():
    ((_, message),) = problems(**{"x" * 100_000: 1})

    assert message.startswith("unknown key '" + "x" * 60 + "'; ")


def test_a_key_of_a_section_given_at_the_top_is_answered_with_its_place():
    with pytest.raises(ValidationError, match=r"unknown key 'bucket_size'; did you mean 'ddp\.bucket_size'\?"):
        RunConfig.model_validate({"bucket_size": 4})


def test_unknown_keys_of_nested_sections_carry_their_path():
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"ddp": {"layuot": "stable"}, "optimizer": {"learning_rate": 1.0}})

    assert [detail["loc"] for detail in caught.value.errors()] == [("ddp", "layuot"), ("optimizer", "learning_rate")]


# Contradictions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"bucket_size": 10, "num_buckets": 2},
            "bucket_size and num_buckets all size the buckets; keep one of them (got bucket_size=10, num_buckets=2)",
        ),
        (
            {"bucket_cap_mb": 25, "num_buckets": 2},
            "bucket_cap_mb and num_buckets all size the buckets; keep one of them (got bucket_cap_mb=25.0, num_buckets=2)",
        ),
    ],
)
def test_two_ways_to_size_buckets_are_refused_with_both_names(fields, message):
    assert problems(**fields) == [("", f"Value error, {message}")]


def test_contradictions_are_reported_together():
    ((_, message),) = problems(
        bucket_size=10, bucket_cap_mb=25, average_in_collective=True, grad_reduction="sum", overlap_param_gather=True
    )

    assert message.split("; ") == [
        "Value error, bucket_size and bucket_cap_mb all size the buckets",
        "keep one of them (got bucket_size=10, bucket_cap_mb=25.0)",
        "average_in_collective=True divides, but grad_reduction='sum' asks for the plain sum",
        "drop one of them",
        "overlap_param_gather=True needs use_distributed_optimizer=True: without it there is nothing to gather",
    ]


def test_a_config_cannot_be_changed():
    config = DistributedDataParallelConfig()

    with pytest.raises(ValidationError, match="frozen"):
        config.bucket_size = 4


@given(config=st.builds(RunConfig))
def test_a_run_survives_being_written_and_read_again(config):
    assert RunConfig.model_validate(config.model_dump()) == config


@given(value=st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers())))
def test_whatever_is_given_as_bucket_size_becomes_a_positive_integer_or_a_validation_error(value):
    try:
        config = DistributedDataParallelConfig(bucket_size=value)
    except ValidationError:
        return

    assert config.bucket_size is None or (type(config.bucket_size) is int and config.bucket_size > 0)


@pytest.mark.parametrize(
    ("num_keys", "last"),
    [(5, "unknown key 'zz4'"), (6, "and 1 more unknown keys"), (7, "and 2 more unknown keys")],
)
def test_only_what_five_names_leave_out_is_counted(num_keys, last):
    found = problems(**{f"zz{i}": i for i in range(num_keys)})

    assert found[-1][1] == last
    assert found[4] == ("zz4", "unknown key 'zz4'")  # the known keys are listed once, with the first


def test_an_unknown_key_at_the_top_does_not_change_what_is_said_about_one_below():
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"zzz": 1, "ddp": {"layuot": "stable"}})

    assert [(detail["loc"], detail["msg"], detail["input"]) for detail in caught.value.errors()] == [
        (("zzz",), f"unknown key 'zzz'; known keys are {', '.join(RunConfig.model_fields)}", None),
        (("ddp", "layuot"), "unknown key 'layuot'; did you mean 'layout'?", None),
    ]


@pytest.mark.parametrize(("mode", "is_distributed"), [("reduce_scatter", True), ("all_reduce", False)])
def test_a_section_made_in_python_says_only_what_it_was_given(mode, is_distributed):
    run = RunConfig(mode=mode, ddp=DistributedDataParallelConfig(bucket_size=5))

    assert (run.ddp.use_distributed_optimizer, run.ddp.bucket_size) == (is_distributed, 5)


def test_a_section_made_in_python_may_contradict_the_mode():
    with pytest.raises(ValidationError, match="mode=all_reduce contradicts"):
        RunConfig(mode="all_reduce", ddp=DistributedDataParallelConfig(use_distributed_optimizer=True))
