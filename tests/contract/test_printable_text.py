"""Text of others on one line: what does not print is escaped, what is long is cut."""

from __future__ import annotations

import pytest

from megabucket.errors import printable, quoted


@pytest.mark.parametrize(
    ("text", "max_chars", "shown"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abc..."),
        ("", 6, ""),
        ("a\nb", 6, "a\\nb"),
        ("a\nbcde", 6, "a\\n..."),
        ("é", 6, "é"),
        ("\u202e", 6, "\\u202e"),  # turns the direction of what follows
        ("\u202ex", 6, "\\u2..."),
    ],
)
def test_text_is_escaped_and_then_cut_to_as_many_characters_as_allowed(text, max_chars, shown):
    assert printable(text, max_chars) == shown


def test_200_characters_are_shown_unless_told_otherwise():
    assert printable("x" * 200) == "x" * 200
    assert printable("x" * 201) == "x" * 197 + "..."


def test_60_characters_are_quoted_unless_told_otherwise():
    assert quoted("x" * 60) == f"'{'x' * 60}'"
    assert quoted("x" * 61) == f"'{'x' * 57}...'"
    assert quoted("x" * 61, 61) == f"'{'x' * 61}'"
