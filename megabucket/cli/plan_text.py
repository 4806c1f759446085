"""How ``megabucket plan`` puts a plan into words: tables of buckets, of memory, and the totals. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Final

from megabucket.cli.output import counted, text_table
from megabucket.errors import printable
from megabucket.planning.describe import BucketRow, LayoutTotals
from megabucket.planning.memory import OffloadBytes, RankMemory
from megabucket.planning.owners import GroupOwners
from megabucket.units import format_bytes, format_count

ROWS_SHOWN_AT_EACH_END: Final = 5
_HEAD: Final = ("bucket", "params", "elements", "padding, %", "gradients, bytes", "padding-only ranks", "from ... to")
_IDLE: Final = _HEAD.index("padding-only ranks")


def bucket_lines(rows: Sequence[BucketRow], *, show_all: bool) -> Iterator[str]:
    """Yield a table per buffer; names that are too long for the output go on in the next line."""
    for number, buffer in enumerate(dict.fromkeys(row.buffer for row in rows)):
        if number:
            yield ""
        of_buffer = [row for row in rows if row.buffer == buffer]
        cut_for = counted(of_buffer[0].num_shards, "rank")
        by_name = ", at named parameters" if any(row.closed_by == "cut" for row in of_buffer) else ""
        yield f"buffer {buffer}: {counted(len(of_buffer), 'bucket')} cut for {cut_for}{by_name}"
        num_hidden = 0 if show_all else max(len(of_buffer) - 2 * ROWS_SHOWN_AT_EACH_END, 0)
        cells = [_HEAD, *map(_cells, of_buffer)]
        if num_hidden > 1:
            hidden = (*[""] * (len(_HEAD) - 1), f"... {num_hidden} more, see --all")
            cells[ROWS_SHOWN_AT_EACH_END + 1 : -ROWS_SHOWN_AT_EACH_END] = [hidden]
        if not any(row.num_padding_only_ranks for row in of_buffer):
            cells = [(*row[:_IDLE], *row[_IDLE + 1 :]) for row in cells]
        yield from text_table(cells, num_left=0, num_folded=1)


def memory_lines(
    memory: Mapping[str, RankMemory], offload: OffloadBytes, *, optimizer: str, dp_size: int, chosen: str
) -> Iterator[str]:
    """Yield the table of memory by category, a column per mode; categories that are zero in all of them are left out.

    Args:
        chosen: the mode of the config.
    """
    which = "busiest owner" if optimizer == "muon" else "first"
    yield f"memory of the {which} of {counted(dp_size, 'rank')}, DistributedOptimizer with {optimizer}"
    rows = [["", *(f"{mode}, bytes{' *' if mode == chosen else ''}" for mode in memory)]]
    for field in fields(RankMemory):
        sizes = [getattr(each, field.name) for each in memory.values()]
        if any(sizes):
            rows.append([_category(field.name), *map(format_bytes, sizes)])
    rows.append(["total", *(format_bytes(each.total_bytes) for each in memory.values())])
    yield from text_table(rows, indent=2)
    left_out = "" if any(each.activation_bytes for each in memory.values()) else "; activations: --activation-gib"
    yield f"  * the mode of this config{left_out}"
    given_back = ", ".join(f"{field.name} {format_bytes(getattr(offload, field.name))}" for field in fields(offload)[:-1])
    yield f"  ddp.offload() gives back: {given_back}; with params=True also {format_bytes(offload.params)}"
    yield ""


def owner_lines(owners: Sequence[GroupOwners], *, optimizer: str) -> Iterator[str]:
    """Yield a table of the owners of whole tensors, a row per reduction group; nothing without any."""
    if not owners:
        return
    yield f"owners of the tensors that {optimizer} updates whole; bytes of the busiest rank in a step"
    head = (
        "",
        "ranks",
        "tensors",
        "elements",
        "busiest/mean",
        "busiest/bound",
        "sent, bytes",
        "received, bytes",
        "of the rest, %",
        "buffers, bytes",
    )
    rows = [
        (
            printable(each.group),
            f"{each.num_ranks:,}",
            f"{each.num_tensors:,}",
            format_count(each.numel),
            f"{each.busiest_flop / each.mean_flop:.3f}" if each.mean_flop else "-",
            f"{each.busiest_flop / each.least_flop:.3f}" if each.least_flop else "-",
            format_bytes(each.sent_bytes),
            format_bytes(each.received_bytes),
            f"{each.sent_fraction:.2%}".rstrip("%"),
            format_bytes(each.exchange_buffer_bytes),
        )
        for each in owners
    ]
    yield from text_table([head, *rows], indent=2)
    yield "  the rest: reduce-scatters and gathers; buffers: of the exchange, inside a step, on top of the memory above"
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
        f"{row.padding_fraction:.3%}".rstrip("%"),
        format_bytes(row.grad_bytes),
        f"{row.num_padding_only_ranks:,}",
        " ... ".join(dict.fromkeys((printable(row.first_param), printable(row.last_param)))),
    )


def _category(field: str) -> str:
    """Return the words for a field of ``RankMemory``: things that are counted, in the plural.

    >>> _category("main_parameter_bytes"), _category("padding_bytes")
    ('main parameters', 'padding')
    """
    words = field.removesuffix("_bytes").replace("_", " ")
    return words if words.endswith(("padding", "scratch")) else f"{words}s"
