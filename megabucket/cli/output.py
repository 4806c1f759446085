"""Prints tables, JSON and progress. The only place that knows the width of the output."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, Final

import typer

WIDTH_WITHOUT_TERMINAL: Final = 160
"""Columns of output that goes to a file or a pipe; ``COLUMNS`` overrides it."""

_LEAST_WIDTH: Final = 40
_LEAST_TEXT: Final = 8
_GAP: Final = "  "
_BELOW: Final = 8  # columns before text that stands below its numbers
_QUIET_S: Final = 2.0


def output_width() -> int:
    """Return the columns of the output."""
    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, _LEAST_WIDTH)


def text_table(rows: Sequence[Sequence[str]], *, num_left: int = 1, num_folded: int = 0, indent: int = 0) -> Iterator[str]:
    r"""Yield rows as lines with the cells of a column under each other; the first row is the head.

    Nothing is cut, and numbers are never broken. Where the output is too narrow, cells of text continue in the next line, and
    heads of numbers break between words. Where a word of the text would break, such as a name, the text before and after the
    numbers has lines of its own above and below them.

    Args:
        rows: equally long.
        num_left: columns of text at the start; the others are numbers, aligned to the right.
        num_folded: columns of text at the end.
        indent: columns before each line.

    >>> print("\n".join(text_table([["link", "ms"], ["ring", "9.1"], ["flat", "12.0"]])))
    link    ms
    ring   9.1
    flat  12.0
    """
    first, stop = num_left, len(rows[0]) - num_folded  # of the columns of numbers
    columns = list(zip(*rows, strict=True))
    texts = [*columns[:first], *columns[stop:]]
    room = output_width() - indent - len(_GAP) * (len(columns) - 1) - sum(_longest_word(column) for column in texts)
    numbers = columns[first:stop]
    widths = [max(map(_width, column)) for column in numbers]
    if sum(widths) > room:
        widths = [max(_longest_word(column[:1]), *map(_width, column[1:])) for column in numbers]
    if sum(widths) <= room or not numbers or not texts:
        yield from _beside(rows, widths, num_left, indent)
        return
    # The head of the numbers may take several lines; each row of them takes one.
    inner = indent + len(_GAP) * bool(first)
    lines = list(text_table([row[first:stop] for row in rows], num_left=0, indent=inner))
    num_head = len(lines) - len(rows) + 1
    for row, of_row in zip(rows, [lines[:num_head], *([line] for line in lines[num_head:])], strict=True):
        if before := _GAP.join(filter(None, row[:first])):
            yield " " * indent + before
        yield from filter(str.strip, of_row)
        if after := _GAP.join(filter(None, row[stop:])):
            yield " " * (indent + _BELOW) + after


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _longest_word(cells: Iterable[str]) -> int:
    return max((_width(word) for cell in cells for word in cell.split()), default=0)


def _beside(rows: Sequence[Sequence[str]], number_widths: Sequence[int], num_left: int, indent: int) -> Iterator[str]:
    """Yield rows with text beside numbers of these widths; the widest text is narrowed first."""
    from rich.console import Console  # 0.1 s, for commands that print a table
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(*rows, strict=True))
    widths = [max(map(_width, column)) for column in columns]
    least = [min(width, max(_longest_word(column), _LEAST_TEXT)) for width, column in zip(widths, columns, strict=True)]
    numbers = range(num_left, num_left + len(number_widths))
    for index, width in zip(numbers, number_widths, strict=True):
        widths[index] = least[index] = width
    most = output_width() - indent - len(_GAP) * (len(columns) - 1)
    if sum(least) > most:  # text only, or numbers only
        least = [each if index in numbers else min(each, _LEAST_TEXT) for index, each in enumerate(least)]
    while sum(widths) > most and widths != least:
        widest = max(range(len(widths)), key=lambda index: widths[index] * (widths[index] > least[index]))
        widths[widest] -= 1
    table = Table(box=None, pad_edge=False, show_header=False)
    for index, width in enumerate(widths):
        table.add_column(justify="right" if index in numbers else "left", width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=sum(widths) + len(_GAP) * (len(columns) - 1), color_system=None)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        yield " " * indent + line.rstrip()


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout; one that is wider than the output continues in the next line, indented."""
    width = output_width()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        parts = wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        typer.echo("\n".join(parts) if len(line) > width else line)


def print_answer(data: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print an answer on stdout: its data as JSON, or its lines."""
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        print_lines(lines)


@contextmanager
def notice_when_slow(text: str) -> Iterator[None]:
    """Print a text on stderr if the block takes over two seconds."""
    timer = threading.Timer(_QUIET_S, typer.echo, (text,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def progress() -> Callable[[str], None]:
    """Return a function that prints its text on stderr, from the third second on and at most every two seconds."""
    printed_s = time.monotonic()

    def report(text: str) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= _QUIET_S:
            printed_s = time.monotonic()
            typer.echo(text, err=True)

    return report
