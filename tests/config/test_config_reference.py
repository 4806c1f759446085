"""The generated reference page is the one that is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabucket.config import DistributedDataParallelConfig, reference

ROOT = Path(__file__).parents[2]


def test_the_committed_reference_is_current():
    page = ROOT / "docs" / "reference" / "config.md"

    assert page.read_text(encoding="utf-8") == reference.render_reference(), (
        "run: python -m megabucket.config.reference > docs/reference/config.md"
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
        "| `betas` | [number `>= 0` `< 1`, number `>= 0` `< 1`] | `[0.9, 0.95]` |",
        "| `shape` | list of integer `>= 0` | required |",
        "| `arguments` | mapping of text to true or false or integer or number or text or null | `{}` |",
    ],
)
def test_types_and_defaults_are_in_the_words_of_a_config_file(row):
    assert row in reference.render_reference()
