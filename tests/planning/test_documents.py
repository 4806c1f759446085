"""The YAML loader: what it reads, what it refuses, and that nothing but ConfigError comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.planning.documents import MAX_BYTES, Document, parse_yaml, read_json, read_yaml


def load(text):
    return parse_yaml(text, source=Path("run.yaml"))


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


def refusal_or_nothing(read):
    """The text of the ConfigError, "" when there is none; anything else that is raised fails the test."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return ""


# What is read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3e-4", 3e-4),
        ("3E+4", 30000.0),
        ("5e8", 5e8),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("0", 0),
        ("-12", -12),
        ("+12", 12),
        ("40M", "40M"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("-.inf", -math.inf),
        ("2026-11-20", "2026-11-20"),
        ("''", ""),
        ("'010'", "010"),
        ('"1:30"', "1:30"),
        ("[0.9,0.95]", [0.9, 0.95]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
    ],
)
def test_scalars_and_flow_collections_have_the_values_of_yaml_1_2(text, value):
    result = load(f"key: {text}")

    assert result == {"key": value}
    assert type(result["key"]) is type(value)


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "y", "n", "Yes", "NO"])
def test_the_booleans_of_yaml_1_1_are_text(text):
    assert load(f"key: {text}") == {"key": text}


def test_nan_is_read_as_a_float_so_that_the_sections_can_refuse_it():
    assert math.isnan(load(".nan"))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_a_document_without_values_is_null(text):
    assert load(text) is None


def test_block_collections_nest():
    text = "a:\n  - b: 1\n    c: 2\n  - [3]\nd: |\n  text\n"

    assert load(text) == {"a": [{"b": 1, "c": 2}, [3]], "d": "text\n"}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 1),
        (("a",), 1),
        (("a", "b"), 2),
        (("a", "c", 1), 5),
        (("a", "c", 7), 3),
        (("a", "missing"), 1),
        (("skipped", "a"), 1),
    ],
)
def test_a_value_is_placed_at_the_line_of_its_key_or_of_the_innermost_section(path, line):
    text = b"a:\n  b: 1\n  c:\n    - x\n    - y\n"

    assert Document(load(text), Path("run.yaml"), text).place(path) == f"run.yaml:{line}"


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")

    assert read_yaml(path).data == {"a": 1}


# What is refused, with the text


@pytest.mark.parametrize("text", ["0o17", "0x1F", "0b1", "1:30", "1:30:00", "4_0", "40_000_000", "0_0"])
def test_a_number_that_yaml_versions_read_differently_is_text(text):
    assert load(f"key: {text}") == {"key": text}


def test_a_key_given_twice_is_refused_with_both_lines():
    assert refusal("ddp:\n  bucket_size: 1\n  layout: stable\n  bucket_size: 2\n") == (
        "run.yaml:4: not valid YAML: the key 'bucket_size' is given twice, first in line 2; keep one of them"
    )


@pytest.mark.parametrize(("text", "decimal"), [("010", "10"), ("-010", "-10"), ("+07", "+7"), ("00", "0")])
def test_a_whole_number_that_begins_with_a_zero_is_refused(text, decimal):
    assert refusal(f"a: 1\nkey: {text}") == (
        f"run.yaml:2: not valid YAML: '{text}' is octal in some versions of YAML; write {decimal} for a "
        "number, or quote the text"
    )


def test_a_key_given_twice_on_one_line_is_refused():
    assert refusal("ddp: {num_buckets: 4, num_buckets: 8}") == (
        "run.yaml:1: not valid YAML: the key 'num_buckets' is given twice, first in line 1; keep one of them"
    )


def test_the_same_key_in_two_mappings_is_not_a_duplicate():
    assert load("a: {x: 1}\nb: {x: 2}") == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "!!python/object/apply:os.system [id]",
            "run.yaml:1: not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/",
        ),
        ("? [a]\n: b", "run.yaml:1: not valid YAML: found unhashable key"),
        ("a\n---\nb", "run.yaml:2: not valid YAML: but found another document"),
        ("a: [", "run.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("a:\n\tb: 1", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: b: c", "run.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: \x00", "run.yaml: not valid YAML: unacceptable character #x0000: special characters are not allowed"),
    ],
)
def test_what_a_config_does_not_need_is_refused_with_its_line(text, message):
    assert refusal(text).startswith(message)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_nesting_that_no_config_has_is_refused(opening):
    assert refusal(opening * 10_000).startswith("run.yaml: not valid YAML: maximum recursion depth exceeded")


def test_a_hundred_levels_are_read():
    assert load("[" * 100 + "]" * 100) is not None


@pytest.mark.parametrize("text", ["a: 1\nb: &x {c: 1}", "a: 1\nb: *x"])
def test_anchors_and_aliases_are_refused(text):
    assert refusal(text) == (
        "run.yaml:2: not valid YAML: anchors (&) and aliases (*) are not read, as an override would change both places; "
        "write it twice"
    )


@pytest.mark.parametrize(
    "text",
    ['a: "\\UFFFFFFFF"', "%YAML " + "9" * 5_000 + ".1\n---\na", "%YAML 9.9\n---\na", "%TAG ! !\n%TAG ! !\n---\na", "\ud800"],
    ids=["escape beyond unicode", "endless version", "unknown version", "repeated directive", "surrogate"],
)
def test_what_breaks_the_scanner_is_a_config_error_too(text):
    assert "not valid YAML" in refusal(text)


# Files


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "missing.yaml"

    with pytest.raises(ConfigError) as caught:
        read_yaml(path)

    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"


def test_a_directory_is_not_a_config(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read_yaml(tmp_path)


def test_a_file_over_one_mebibyte_is_refused_without_parsing_it(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_bytes(b"[" * (MAX_BYTES + 1))

    with pytest.raises(ConfigError) as caught:
        read_yaml(path)

    assert str(caught.value) == f"{path}: larger than 1048576 bytes, the limit for a config. Is it the right file?"


def test_bytes_that_are_not_utf_8_are_refused_with_their_line(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")

    with pytest.raises(ConfigError) as caught:
        read_yaml(path)

    assert str(caught.value).startswith(f"{path}: not valid YAML: unacceptable character #x00ff: invalid start byte")


def test_json_with_a_number_of_thousands_of_digits_is_refused(tmp_path):
    path = tmp_path / "big.json"
    path.write_text("1" * 5_000)

    with pytest.raises(ConfigError, match=r"big\.json: not valid JSON: Exceeds the limit"):
        read_json(path, max_bytes=MAX_BYTES, what="a test")


# Any input at all

STRUCTURE = [":", ": ", "- ", "\n", "\n  ", "[", "]", "{", "}", ",", "? ", "|", ">", "---\n", "...\n", "'", '"', "#", "\t"]
EXTRAS = [
    "&a ",
    "*a",
    "!!t ",
    "<<",
    "%",
    "\\",
    "\\x",
    "\\U",
    "1",
    "0",
    "_",
    ".",
    "e",
    "~",
    "@",
    "`",
    "\r",
    "\x85",
    "\ufeff",
    "é",
]
yaml_pieces = st.sampled_from([*STRUCTURE, *EXTRAS])
documents = st.one_of(st.text(max_size=200), st.lists(yaml_pieces, max_size=60).map("".join))


@given(text=documents)
def test_any_text_is_read_or_refused_with_a_short_config_error(text):
    message = refusal_or_nothing(lambda: load(text))

    assert not message or message.startswith("run.yaml:")
    assert len(message) < 500


@given(raw=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_with_a_short_config_error(raw, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(raw)

    message = refusal_or_nothing(lambda: read_yaml(path))

    assert not message or message.startswith(f"{path}:")
    assert len(message) < 500 + len(str(path))


plain_keys = st.from_regex(r"k[A-Za-z_]{1,8}", fullmatch=True)
# JSON escapes characters beyond the basic plane as surrogate pairs, which YAML does not join.
plain_text = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
plain_scalars = st.one_of(
    st.booleans(), st.none(), st.integers(-(10**18), 10**18), st.floats(allow_nan=False, allow_infinity=False), plain_text
)
plain_values = st.recursive(
    plain_scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain_keys, inner, max_size=4),
    max_leaves=15,
)


@given(value=st.dictionaries(plain_keys, plain_values, max_size=4))
def test_json_is_read_as_the_value_it_is(value):
    text = json.dumps(value)

    result = load(text)

    assert result == value
    assert repr(result) == repr(value)  # tells 1 from 1.0 and True


# The borders of what is read


def test_a_file_of_exactly_one_mebibyte_is_read(tmp_path):
    path = tmp_path / "full.yaml"
    path.write_bytes(b"# " + b"x" * (MAX_BYTES - 2))

    assert read_yaml(path).data is None


def test_a_path_that_no_file_can_have_is_named_with_the_reason():
    with pytest.raises(ConfigError) as caught:
        read_yaml(Path("a\0b"))

    assert str(caught.value) == "a\0b: cannot be read: embedded null byte"
