"""How ``megabucket plan`` puts a plan into words: tables of buckets, of memory, and the totals. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Final

from megabucket.cli.output import counted, output_width, shortened, text_table
from megabucket.errors import printable
from megabucket.planning.describe import BucketRow, LayoutTotals
from megabucket.planning.memory import RankMemory
from megabucket.units import format_bytes, format_count

ROWS_SHOWN_AT_EACH_END: Final = 5
_INDENT: Final = " " * 10
_HEAD: Final = ("bucket", "params", "elements", "padding", "gradients")


def bucket_lines(rows: Sequence[BucketRow], *, show_all: bool) -> Iterator[str]:
    """Yield a table per buffer, with the names beside the numbers where there is room for all of them, else below."""
    width = output_width()
    for number, buffer in enumerate(dict.fromkeys(row.buffer for row in rows)):
        if number:
            yield ""
        of_buffer = [row for row in rows if row.buffer == buffer]
        cut_for = counted(of_buffer[0].num_shards, "rank")
        by_name = ", at named parameters" if any(row.closed_by == "cut" for row in of_buffer) else ""
        yield f"buffer {buffer}: {counted(len(of_buffer), 'bucket')} cut for {cut_for}{by_name}"
        ends = 2 * ROWS_SHOWN_AT_EACH_END
        is_cut = not show_all and len(of_buffer) > ends + 1
        shown = [*of_buffer[:ROWS_SHOWN_AT_EACH_END], *of_buffer[-ROWS_SHOWN_AT_EACH_END:]] if is_cut else of_buffer
        has_idle_ranks = any(row.num_padding_only_ranks for row in shown)
        cells = [(*_cells(row), *([_idle(row)] if has_idle_ranks else [])) for row in shown]
        head, *lines = text_table([(*_HEAD, *(["only padding"] if has_idle_ranks else [])), *cells], num_left=0)
        room = width - len(head) - 2
        has_room = all(len(_names(row)) <= room for row in shown)
        yield f"{head}  from ... to" if has_room else head
        for position, (row, line) in enumerate(zip(shown, lines, strict=True)):
            if is_cut and position == ROWS_SHOWN_AT_EACH_END:
                yield f"{'...':>{len(_HEAD[0])}}  {len(of_buffer) - ends} more, see --all"
            if has_room:
                yield f"{line}  {_names(row)}"
            else:
                yield line
                yield from (f"{_INDENT}{text}" for text in _name_lines(row, width - len(_INDENT)))


def memory_lines(memory: Mapping[str, RankMemory], *, optimizer: str, dp_size: int, chosen: str) -> Iterator[str]:
    """Yield the table of memory by category, a column per mode; what is zero in all of them is left out.

    Args:
        chosen: the mode of the config.
    """
    yield f"memory of the first of {counted(dp_size, 'rank')}, DistributedOptimizer with {optimizer}"
    rows = [["", *(f"{mode}{' *' if mode == chosen else ''}" for mode in memory)]]
    for field in fields(RankMemory):
        sizes = [getattr(each, field.name) for each in memory.values()]
        if any(sizes):
            rows.append([_category(field.name), *map(format_bytes, sizes)])
    rows.append(["total", *(format_bytes(each.total_bytes) for each in memory.values())])
    yield from text_table(rows, indent=2)
    left_out = "" if any(each.activation_bytes for each in memory.values()) else "; activations: --activation-gib"
    yield f"  * the mode of this config{left_out}"
    yield ""


def total_lines(totals: LayoutTotals, fingerprint: str) -> Iterator[str]:
    """Yield the sums over all buckets."""
    parameters, buckets = counted(totals.num_params, "parameter"), counted(totals.num_buckets, "bucket")
    yield f"{parameters}, {totals.params_numel:,} elements ({format_count(totals.params_numel)})"
    yield f"{buckets} in {counted(totals.num_buffers, 'buffer')}"
    yield f"padding {totals.numel - totals.params_numel:,} elements ({totals.padding_fraction:.4%})"
    yield f"gradients {format_bytes(totals.grad_bytes)}, parameters {format_bytes(totals.param_bytes)}"
    if totals.num_buckets_with_padding_only_ranks:
        idle = counted(totals.num_buckets_with_padding_only_ranks, "bucket")
        yield f"in {idle} some ranks own only padding and have nothing to update"
    yield f"fingerprint {fingerprint}"
    yield ""


def _cells(row: BucketRow) -> tuple[str, ...]:
    return (
        str(row.bucket),
        str(row.num_params),
        f"{row.numel:,}",
        f"{row.padding_fraction:.3%}",
        format_bytes(row.grad_bytes),
    )


def _idle(row: BucketRow) -> str:
    return counted(row.num_padding_only_ranks, "rank") if row.num_padding_only_ranks else "none"


def _names(row: BucketRow) -> str:
    return " ... ".join(dict.fromkeys((printable(row.first_param), printable(row.last_param))))


def _name_lines(row: BucketRow, width: int) -> Iterator[str]:
    """Yield the names on one line, or on two if they are long; a name is cut only if a whole line does not hold it."""
    if len(_names(row)) <= width:
        yield _names(row)
        return
    yield shortened(printable(row.first_param), width)
    if row.num_params > 1:
        yield shortened(f"... {printable(row.last_param)}", width)


def _category(field: str) -> str:
    """Return the words for a field of ``RankMemory``: things that are counted, in the plural.

    >>> _category("main_parameter_bytes"), _category("padding_bytes")
    ('main parameters', 'padding')
    """
    words = field.removesuffix("_bytes").replace("_", " ")
    return words if words.endswith(("padding", "scratch")) else f"{words}s"
