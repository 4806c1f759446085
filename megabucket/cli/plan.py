"""``megabucket plan``: print the layout a model would get, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megabucket.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from megabucket.layout.describe import BucketRow, LayoutTotals

ROWS_SHOWN_AT_EACH_END = 5
_WIDTH_WITHOUT_TERMINAL = 140


def plan(
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file with a model section")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example ddp.bucket_size=40M")] = None,
    dp_size: Annotated[int, typer.Option(min=1, help="data-parallel ranks that buckets are cut for")] = 1,
    expert_dp_size: Annotated[int | None, typer.Option(min=1, help="ranks that expert buckets are cut for")] = None,
    max_padding: Annotated[float, typer.Option(min=0, max=1, help="exit with 1 above this fraction of padding")] = 1.0,
    show_all: Annotated[bool, typer.Option("--all", help="print every bucket, not only the first and last few")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan as JSON on stdout")] = False,
) -> None:
    """Print the buckets a model would get: parameters, elements, padding, gradient bytes."""
    from megabucket.config.load import load_config
    from megabucket.errors import ConfigError
    from megabucket.layout import build_layout
    from megabucket.layout.describe import describe_rows, describe_totals
    from megabucket.planning.architecture import param_specs

    run = load_config(config, overrides or [])
    if run.model is None:
        raise ConfigError(f"{config}: model is required to plan; describe one, for example model: {{kind: gpt, ...}}")
    layout = build_layout(param_specs(run.model), run.ddp, dp_size=dp_size, expert_dp_size=expert_dp_size)
    rows = describe_rows(layout)
    totals = describe_totals(layout, rows)
    if json:
        sizes = {"dp_size": dp_size, "expert_dp_size": expert_dp_size}
        _print_json(rows, totals, {**sizes, "fingerprint": layout.fingerprint})
    else:
        _print_tables(rows, show_all=show_all)
        _print_totals(totals, layout.fingerprint)
    if totals.padding_fraction > max_padding:
        text = f"error: padding is {totals.padding_fraction:.4%} of the buffers, more than --max-padding {max_padding:.4%}"
        typer.echo(text, err=True)
        raise typer.Exit(ExitCode.FAILED)


def _print_json(rows: tuple[BucketRow, ...], totals: LayoutTotals, head: dict[str, Any]) -> None:
    import json
    from dataclasses import asdict

    buckets = [{**asdict(row), "padding_fraction": row.padding_fraction} for row in rows]
    summary = {**asdict(totals), "padding_fraction": totals.padding_fraction}
    typer.echo(json.dumps({**head, "totals": summary, "buckets": buckets}, indent=2))


def _print_tables(rows: tuple[BucketRow, ...], *, show_all: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megabucket.config.text import printable
    from megabucket.units import format_bytes

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    for buffer in dict.fromkeys(row.buffer for row in rows):
        of_buffer = [row for row in rows if row.buffer == buffer]
        ends = 2 * ROWS_SHOWN_AT_EACH_END
        is_cut = not show_all and len(of_buffer) > ends + 1
        table = Table(
            title=f"buffer {buffer}: {_counted(len(of_buffer), 'bucket')} cut for {_counted(of_buffer[0].num_shards, 'rank')}"
        )
        for heading in ("bucket", "params", "elements", "padding", "gradients", "only padding"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("from ... to")
        for position, row in enumerate(of_buffer):
            if is_cut and position == ROWS_SHOWN_AT_EACH_END:
                table.add_row("...", "", "", "", "", "", f"{len(of_buffer) - ends} more, see --all")
            if is_cut and ROWS_SHOWN_AT_EACH_END <= position < len(of_buffer) - ROWS_SHOWN_AT_EACH_END:
                continue
            names = dict.fromkeys((printable(row.first_param), printable(row.last_param)))
            table.add_row(
                str(row.bucket),
                str(row.num_params),
                f"{row.numel:,}",
                f"{row.padding_fraction:.3%}",
                format_bytes(row.grad_bytes),
                f"{row.num_padding_only_ranks} ranks" if row.num_padding_only_ranks else "none",
                # Of all columns only this one may be cut, so the text forbids wrapping and not the column.
                Text(" ... ".join(names), no_wrap=True, overflow="ellipsis"),
            )
        console.print(table)


def _print_totals(totals: LayoutTotals, fingerprint: str) -> None:
    from megabucket.units import format_bytes, format_count

    elements = f"{totals.params_numel:,} elements ({format_count(totals.params_numel)})"
    typer.echo(
        f"{_counted(totals.num_params, 'parameter')}, {elements}, in {_counted(totals.num_buckets, 'bucket')} of "
        f"{_counted(totals.num_buffers, 'buffer')}"
    )
    typer.echo(
        f"padding {totals.numel - totals.params_numel:,} elements ({totals.padding_fraction:.4%}); "
        f"gradients {format_bytes(totals.grad_bytes)}, parameters {format_bytes(totals.param_bytes)}"
    )
    if totals.num_buckets_with_padding_only_ranks:
        buckets = _counted(totals.num_buckets_with_padding_only_ranks, "bucket")
        typer.echo(f"in {buckets} some ranks own only padding and have nothing to update")
    typer.echo(f"fingerprint {fingerprint}")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
