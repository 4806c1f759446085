"""The generated reference page is the one that is committed."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
import pytest

from megabucket.config import DistributedDataParallelConfig, Section

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import config_reference as reference  # noqa: E402 - a script of docs/, not of the package


def test_the_committed_reference_is_current():
    page = ROOT / "docs" / "reference" / "config.md"

    assert page.read_text(encoding="utf-8") == reference.render_reference(), (
        "run: python -m docs.tools.config_reference > docs/reference/config.md"
    )


@pytest.mark.parametrize("name", sorted(DistributedDataParallelConfig.model_fields))
def test_every_field_of_the_wrapper_is_documented(name):
    assert DistributedDataParallelConfig.model_fields[name].description
    assert f"| `{name}` |" in reference.render_reference()


@pytest.mark.parametrize(
    "row",
    [
        "| `bucket_size` | count `> 0` or null | `null` |",
        '| `layout` | `stable` or `megatron` | `"stable"` |',
        "| `shape` | list of integer `>= 0` | required |",
        "| `arguments` | mapping of text to true or false or integer or number or text or null | `{}` |",
    ],
)
def test_types_and_defaults_are_in_the_words_of_a_config_file(row):
    assert row in reference.render_reference()


def test_text_that_markdown_reads_as_a_table_is_escaped():
    class Plain(Section):
        either: Literal["a|b"]
        """One | the other, or ``None``."""
        large: Annotated[int, at.Gt(2), at.Le(10**12)] = 3
        other: complex = 1j  # type: ignore[assignment]

    Plain.__doc__ = None
    Plain.model_fields["other"].default = "j"

    page = reference._section("A title", Plain)

    # A bound of 10**12 is too large to be of interest; a type that has no word of ours is shown as Python shows it.
    assert page == (
        "## A title\n\n\n\n"
        "| field | type | default | meaning |\n|---|---|---|---|\n"
        "| `either` | `a\\|b` | required | One \\| the other, or `null`. |\n"
        "| `large` | integer `> 2` | `3` |  |\n"
        "| `other` | <class 'complex'> | `\"j\"` |  |\n"
    )
