"""What commands print: tables, JSON, and progress. The only place that knows how wide the output is."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from textwrap import wrap
from typing import Any, Final

import typer

WIDTH_WITHOUT_TERMINAL: Final = 160
"""Columns of output that goes to a file or a pipe; ``COLUMNS`` overrides it."""

_LEAST_WIDTH: Final = 40
_LEAST_COLUMN: Final = 12
_GAP: Final = "  "
_PATIENCE_S: Final = 2.0


def output_width() -> int:
    """Return the columns there are."""
    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, _LEAST_WIDTH)


def text_table(rows: Sequence[Sequence[str]], *, num_left: int = 1, num_folded: int = 0) -> Iterator[str]:
    r"""Yield rows as lines with the cells of a column under each other; the first row is the head.

    Args:
        rows: equally long.
        num_left: columns that are aligned to the left; the others, numbers, to the right.
        num_folded: columns at the end that break their lines where the output is too narrow, and are aligned to the left.

    >>> print("\n".join(text_table([["link", "ms"], ["ring", "9.1"], ["flat", "12.0"]])))
    link    ms
    ring   9.1
    flat  12.0
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first_folded = len(widths) - num_folded
    room = output_width() - sum(widths[:first_folded]) - len(_GAP) * (len(widths) - 1)
    for taken, index in enumerate(sorted(range(first_folded, len(widths)), key=widths.__getitem__)):
        # The narrowest column first: what it does not need is left to the others.
        widths[index] = min(widths[index], max(room // (num_folded - taken), _LEAST_COLUMN))
        room -= widths[index]
    aligned = [str.ljust if index < num_left or index >= first_folded else str.rjust for index in range(len(widths))]
    for row in rows:
        cells = [
            wrap(cell, width, break_on_hyphens=False) if index >= first_folded else [cell]
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            yield _GAP.join(align(part, width) for align, part, width in zip(aligned, parts, widths, strict=True)).rstrip()


def shortened(text: str, max_chars: int) -> str:
    """Return a text cut in the middle, where names of layers are most alike.

    >>> shortened("model.layers.11.mlp.down_proj.weight", 20)
    'model.la...oj.weight'
    """
    if len(text) <= max_chars:
        return text
    kept = max(max_chars - 3, 2)
    return f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout; a sentence longer than the output is wide goes on in the next line."""
    width = output_width()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        parts = wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        typer.echo("\n".join(parts) if len(line) > width else line)


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


@contextmanager
def told_when_slow(text: str) -> Iterator[None]:
    """Say on stderr what a command does when the block takes over two seconds."""
    timer = threading.Timer(_PATIENCE_S, typer.echo, (text,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def progress() -> Callable[[str], None]:
    """Return a function that says on stderr what a command does, from its third second on and every two seconds.

    A command that is done in less says nothing.
    """
    told_s = time.monotonic()

    def tell(text: str) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _PATIENCE_S:
            told_s = time.monotonic()
            typer.echo(text, err=True)

    return tell
