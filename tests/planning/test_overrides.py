"""``key=value`` arguments: syntax, values, and where they land."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.planning import load_config
from megabucket.planning.load import parse_override


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
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, f"{text!r} is not key=value with names joined by dots; write for example ddp.bucket_size=40M")
            for text in ("ddp", "=1", "ddp.=1", "--lr=1", "params.0.name=a")
        ),
        ("a=[1", "command line, 'a=[1': not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a=!t 1", "command line, 'a=!t 1': not valid YAML: could not determine a constructor for the tag '!t'"),
    ],
)
def test_an_argument_that_is_no_override_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_override(text)

    assert str(caught.value) == message


def test_a_later_override_wins_and_sections_are_made_on_the_way():
    run = load_config(None, ["ddp.num_buckets=2", "optimizer.name=adam", "ddp.num_buckets=3"])

    assert (run.ddp.num_buckets, run.optimizer.name) == (3, "adam")


@pytest.mark.parametrize("inner", ["[1]", "stable", "3", "false"])
def test_an_override_cannot_reach_into_a_value_that_is_no_section(inner):
    with pytest.raises(ConfigError, match="not a section, so nothing inside it can be set; override it as a whole"):
        load_config(None, [f"ddp.layout={inner}", "ddp.layout.x=1"])


@given(text=st.text(max_size=80))
def test_any_argument_is_an_override_or_a_short_config_error(text):
    try:
        message = "" if parse_override(text) else "falsy"
    except ConfigError as error:
        message = str(error)

    assert len(message) < 500
