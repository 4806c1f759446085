"""Text of others, made safe and short for one line of a terminal, or safe for a page."""

from __future__ import annotations

import json
from typing import Any


def printable(text: str, max_chars: int = 200) -> str:
    r"""Return ``text`` with every character that does not print escaped, cut to ``max_chars`` characters.

    Control characters, line breaks and direction marks in a name could otherwise rewrite what a terminal shows.

    >>> printable("a" + chr(27) + "[31m")
    'a\\x1b[31m'
    >>> printable("abcdefgh", 6)
    'abc...'
    """
    # Escapes only lengthen the text, so what is cut off here could not be shown anyway.
    head = text[: max_chars + 1]
    if not head.isprintable():
        head = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in head)
    return head if len(head) <= max_chars else head[: max_chars - 3] + "..."


def quoted(text: str, max_chars: int = 60) -> str:
    """Return ``text`` in quotes, printable and short."""
    return f"'{printable(text, max_chars)}'"


def as_script_data(data: Any) -> str:
    r"""Return data as JSON that cannot end the script element it stands in.

    >>> as_script_data(["</script>"])
    '["\\u003c/script>"]'
    """
    text = json.dumps(data, separators=(",", ":"), default=list)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
