"""Plain tables that fit a terminal: numbers are never cut, names are, and 80 columns are enough."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import Final

WIDTH_WITHOUT_TERMINAL: Final = 160
"""Columns of output that goes to a file or a pipe; ``COLUMNS`` overrides it."""

_LEAST_WIDTH: Final = 40


def output_width() -> int:
    """Return the columns there are."""
    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, _LEAST_WIDTH)


def text_table(rows: Sequence[Sequence[str]], *, num_left: int = 1, gap: str = "  ") -> Iterator[str]:
    r"""Yield rows as lines with the cells of a column under each other; the first row is the head.

    Args:
        rows: equally long.
        num_left: columns that are aligned to the left; the others, numbers, to the right.

    >>> print("\n".join(text_table([["link", "ms"], ["ring", "9.1"], ["flat", "12.0"]])))
    link    ms
    ring   9.1
    flat  12.0
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield gap.join(cells).rstrip()


def shortened(text: str, max_chars: int) -> str:
    """Return a text cut in the middle, where names of layers are most alike.

    >>> shortened("model.layers.11.mlp.down_proj.weight", 20)
    'model.la...oj.weight'
    """
    if len(text) <= max_chars:
        return text
    kept = max(max_chars - 3, 2)
    return f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"


def wrapped(text: str, *, width: int, indent: str) -> Iterator[str]:
    """Yield a text in lines of at most ``width`` columns, all of them indented; words longer than a line stay whole."""
    line = indent
    for word in text.split(" "):
        if len(line) > len(indent) and len(line) + 1 + len(word) > width:
            yield line
            line = indent
        line += word if len(line) == len(indent) else f" {word}"
    yield line
