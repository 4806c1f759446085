"""A calibration as a table for people: one row a size, one column an operation."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from megabucket.measure.calibrate import Calibration
from megabucket.measure.collectives import Timing
from megabucket.planning.links import TableKey
from megabucket.units import format_bytes, format_seconds


def link_tables(calibration: Calibration) -> Iterator[Table]:
    """Return a table for each dtype: median, quartiles, and how far the line is from the median."""
    for dtype in dict.fromkeys(dtype for _, dtype in calibration.tables):
        keys = [key for key in calibration.tables if key[1] == dtype]
        table = Table(title=_title(calibration, dtype), title_justify="left")
        table.add_column("full buffer", justify="right", no_wrap=True)
        for kind, _ in keys:
            table.add_column(kind.value, justify="right", no_wrap=True)
        columns = [list(_cells(calibration, key)) for key in keys]
        for timing, *cells in zip(calibration.tables[keys[0]], *columns, strict=True):
            table.add_row(format_bytes(timing.cell.num_bytes), *cells)
        yield table


def describe_fits(calibration: Calibration) -> Iterator[str]:
    """Return a sentence for each line, and what has to be known to use it."""
    for key, fit in calibration.fits.items():
        kind, dtype = key
        bandwidth = f"{1e-9 / fit.seconds_per_byte:.3g} GB/s" if fit.seconds_per_byte else "any bandwidth"
        yield (f"{kind.value} {dtype}: {format_seconds(fit.latency_s)} + bytes / ({bandwidth}), median {fit.residual:.1%} off")
    yield from calibration.remarks


def _title(calibration: Calibration, dtype: str) -> str:
    facts = calibration.facts
    where = f"{facts['backend']} on {facts['device']}, {calibration.num_ranks} ranks, {dtype}"
    return f"{where}: median of {facts['repetitions']} (quartiles), line against median"


def _cells(calibration: Calibration, key: TableKey) -> Iterator[str]:
    for timing, residual in zip(calibration.tables[key], calibration.residuals(key), strict=True):
        yield f"{format_seconds(timing.median_s)} ({_spread(timing)}) {residual:+.0%}"


def _spread(timing: Timing) -> str:
    lower, upper = timing.quartiles_s
    return f"{lower / timing.median_s - 1:+.0%} {upper / timing.median_s - 1:+.0%}"
