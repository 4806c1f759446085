"""``key=value`` arguments: syntax, values, and where they land."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.planning.load import apply_overrides, parse_override


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("ddp.bucket_size=40M", ("ddp", "bucket_size"), "40M"),
        ("optimizer.betas=[0.9,0.95]", ("optimizer", "betas"), [0.9, 0.95]),
        ("optimizer.lr=3e-4", ("optimizer", "lr"), 3e-4),
        ("mode=reduce_scatter", ("mode",), "reduce_scatter"),
        ("ddp.bucket_size=null", ("ddp", "bucket_size"), None),
        ("ddp.bucket_size=", ("ddp", "bucket_size"), None),
        ("data.corpus=/a/b=c", ("data", "corpus"), "/a/b=c"),
        ("data.corpus='010'", ("data", "corpus"), "010"),
        ("model={kind: gpt, bias: false}", ("model",), {"kind": "gpt", "bias": False}),
    ],
)
def test_an_override_is_a_dotted_key_and_a_yaml_value(text, path, value):
    override = parse_override(text)

    assert (override.path, override.value) == (path, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp", "'ddp' is not key=value; write for example ddp.bucket_size=40M"),
        ("=1", "'=1': the key must be names joined by dots, for example ddp.bucket_size=40M"),
        ("ddp.=1", "'ddp.=1': the key must be names joined by dots, for example ddp.bucket_size=40M"),
        ("--lr=1", "'--lr=1': the key must be names joined by dots, for example ddp.bucket_size=40M"),
        ("params.0.name=a", "'params.0.name=a': the key must be names joined by dots, for example ddp.bucket_size=40M"),
        (
            "a=b: c",
            "command line, 'a=b: c': only a plain value, [...] or {...} can stand here; quote text that contains ': ' or '- '",
        ),
        ("a=[1", "command line, 'a=[1': not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a=&x 1", "command line, 'a=&x 1': the anchor 'x' is not allowed; write the value out where it is used"),
        ("a=!t 1", "command line, 'a=!t 1': the tag '!t' is not allowed; write the plain value"),
    ],
)
def test_what_is_no_override_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_override(text)

    assert str(caught.value) == message


def test_a_later_override_wins_and_sections_are_made_on_the_way():
    overrides = [parse_override(text) for text in ("ddp.num_buckets=2", "optimizer.lr=1.0", "ddp.num_buckets=3")]

    assert apply_overrides({"ddp": None}, overrides) == {"ddp": {"num_buckets": 3}, "optimizer": {"lr": 1.0}}


def test_the_values_given_are_not_changed():
    data = {"ddp": {"num_buckets": 2}}

    apply_overrides(data, [parse_override("ddp.num_buckets=3")])

    assert data == {"ddp": {"num_buckets": 2}}


@pytest.mark.parametrize(
    ("inner", "kind"),
    [([1], "a list"), ("stable", "the value 'stable'"), (3, "the value '3'"), (False, "the value 'False'")],
)
def test_an_override_cannot_reach_into_what_is_no_section(inner, kind):
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"ddp": {"layout": inner}}, [parse_override("ddp.layout.x=1")])

    assert str(caught.value) == (
        f"'ddp.layout.x=1': ddp.layout is {kind}, not a section, so nothing inside it can be set; override it as a whole"
    )


@given(text=st.text(max_size=80))
def test_any_argument_is_an_override_or_a_short_config_error(text):
    try:
        override = parse_override(text)
    except ConfigError as error:
        message = str(error)
    else:
        message, result = "", apply_overrides({}, [override])
        for part in override.path:
            result = result[part]
        assert repr(result) == repr(override.value)

    assert len(message) < 500


def test_a_key_has_at_most_20_parts():
    twenty = ".".join("abcdefghijklmnopqrst")

    assert len(parse_override(f"{twenty}=1").path) == 20
    with pytest.raises(ConfigError, match="the key must be names joined by dots"):
        parse_override(f"{twenty}.u=1")
