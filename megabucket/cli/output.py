"""Prints tables, JSON and progress. The only place that knows the width of the output."""

from __future__ import annotations

import json
import shutil
import sys
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
_QUIET_S: Final = 2.0


def output_width() -> int:
    """Return the columns of the output."""
    return max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, _LEAST_WIDTH)


def text_table(rows: Sequence[Sequence[str]], *, num_left: int = 1, num_folded: int = 0, indent: int = 0) -> Iterator[str]:
    r"""Yield rows as lines with the cells of a column under each other; the first row is the head.

    Nothing is cut: where the output is too narrow, cells of text continue in the next line. Numbers never do.

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
    from rich.console import Console  # 0.1 s, for commands that print a table
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    least_width = -len(_GAP)
    for index, column in enumerate(zip(*rows, strict=True)):
        is_text = index < num_left or index >= len(rows[0]) - num_folded
        table.add_column(justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
        least_width += len(_GAP) + min(max(map(len, column)), _LEAST_TEXT if is_text else sys.maxsize)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=max(output_width() - indent, least_width), color_system=None)
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
