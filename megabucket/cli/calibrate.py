"""``megabucket calibrate``: measure the cost of collectives on these ranks, and write it as a link for the planner."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from megabucket.cli.output import counted, print_answer, progress, text_table
from megabucket.cli.workload import Overrides
from megabucket.trace import CollectiveKind
from megabucket.units import format_seconds, parse_count

if TYPE_CHECKING:
    from megabucket.measure.calibrate import Calibration

_OPERATIONS: Final = [CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER]


def calibrate(
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML file; only its fabric section is read")] = None,
    out: Annotated[Path, typer.Option(help="file for the link")] = Path("link.yaml"),
    max_bytes: Annotated[
        int, typer.Option(parser=parse_count, metavar="N", help="largest full buffer, for example 64M (decimal)")
    ] = "64M",  # type: ignore[assignment] # read by the parser
    repetitions: Annotated[int, typer.Option(min=1, help="rounds over all sizes and operations")] = 9,
    operations: Annotated[
        list[CollectiveKind], typer.Option("--operation", help="measure this; may be repeated")
    ] = _OPERATIONS,
    dtypes: Annotated[list[str], typer.Option("--dtype", help="measure buffers of this dtype; may be repeated")] = ["float32"],  # noqa: B006
    json: Annotated[
        bool, typer.Option("--json", help="print the link, with the seconds of every repetition, as JSON on stdout")
    ] = False,
) -> None:
    """Measure collectives over sizes; start the ranks with torchrun -m megabucket calibrate ..."""
    from megabucket.measure.calibrate import CalibrationPlan, measure_link
    from megabucket.measure.ranks import check_writable, joined_ranks
    from megabucket.planning.links import write_link
    from megabucket.planning.run_config import load_config

    fabric = load_config(config, overrides or []).fabric
    plan = CalibrationPlan(tuple(operations), tuple(dtypes), max_bytes, repetitions)
    with joined_ranks(os.environ, fabric, note=progress()) as ranks:
        check_writable(ranks, [out])
        calibration = measure_link(plan, ranks, fabric=fabric)
    if ranks.rank:
        return
    write_link(out, calibration.link)
    print_answer(calibration.to_dict(), _lines(calibration, out), as_json=json)


def _lines(calibration: Calibration, out: Path) -> Iterator[str]:
    from megabucket.measure.calibrate import residuals
    from megabucket.planning.links import fit_affine

    facts = calibration.link.facts
    yield f"wrote {out}; use it with: link: {{path: {out}}}"
    yield f"{facts['backend']} on {facts['device']}, {calibration.link.num_ranks} ranks, {facts['repetitions']} repetitions"
    rows = [("operation", "bytes", "median", "quartiles", "line")]
    for table in calibration.link.tables:
        name = f"{table.operation} {table.dtype}"
        line, errors = fit_affine(table.points), residuals(table)
        bandwidth = f"{1e-9 / line.seconds_per_byte:.3g} GB/s" if line.seconds_per_byte else "any bandwidth"
        off = statistics.median(map(abs, errors))
        yield f"{name}: {format_seconds(line.latency_s)} + bytes / ({bandwidth}), median {off:.1%} off"
        for (size, median_s), spread_s, residual in zip(table.points, table.spread_s, errors, strict=True):
            quartiles = " ".join(f"{quartile / median_s - 1:+.0%}" for quartile in spread_s)
            rows.append((name, f"{size:,.0f}", format_seconds(median_s), quartiles, f"{residual:+.0%}"))
    yield from _host_lines(calibration)
    yield from (str(text) for name, text in facts.items() if name.startswith("remark "))
    yield ""
    yield from text_table(rows)


def _host_lines(calibration: Calibration) -> Iterator[str]:
    levels = calibration.levels
    if levels is None:
        return
    for name, level in (("inside a host", levels.inside), ("across hosts", levels.across)):
        if level is not None:
            ring, ranks = level.ring, counted(level.num_ranks, "rank")
            yield (
                f"{name}: {ranks}, {level.way}: {format_seconds(ring.latency_s)} + {1e-9 * ring.bytes_per_s:.3g} GB/s from one "
                f"rank to the next, up to {abs(level.worst_residual):.0%} off"
            )
