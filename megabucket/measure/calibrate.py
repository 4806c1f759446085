"""``megabucket calibrate``: from ranks that were just started to a table of what collectives cost on them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from megabucket import __version__
from megabucket.comm import Accelerator, Communicator, discover_communicator
from megabucket.errors import ConfigError
from megabucket.measure.collectives import Timing, cells_of, time_collectives
from megabucket.measure.ranks import Launch, Note, Ranks, check_writable, joined_ranks, silent
from megabucket.planning.links import AffineFit, LinkTable, MeasuredLink, TableKey, fit_affine, write_link
from megabucket.planning.run_config import FabricConfig
from megabucket.trace import CollectiveKind
from megabucket.units import format_bytes, format_seconds

POOR_RESIDUAL: Final = 0.25
"""A line that is further than this from a point, as a fraction of the measured time, does not describe the table."""

_IN_FLIGHT_BYTES: Final = 8 * 2**20  # of larger collectives the rest is a small part
_UNDISTURBED_ROUNDS: Final = 7

Fact = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What to measure.

    Attributes:
        kinds: operations.
        dtypes: of the buffers, as in the config.
        max_bytes: of the largest full buffer.
        repetitions: rounds over everything.

    Raises:
        ConfigError: nothing to measure, something twice, or a number out of range.
    """

    kinds: tuple[CollectiveKind, ...] = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
    dtypes: tuple[str, ...] = ("float32",)
    max_bytes: int = 64 * 2**20
    repetitions: int = 9

    def __post_init__(self) -> None:
        for name in ("kinds", "dtypes"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                given = ", ".join(getattr(value, "value", value) for value in values) or "nothing"
                raise ConfigError(f"what to measure must be given, each once; {name} are {given}")
        if self.repetitions < 1:
            raise ConfigError(f"--repetitions={self.repetitions} measures nothing; give 1 or more")
        cells_of(self.kinds, self.dtypes, self.max_bytes, 1)  # refuses what has no second size, and unknown dtypes


@dataclass(frozen=True)
class Calibration:
    """Measured times, the lines through them, and where they were measured."""

    num_ranks: int
    timings: tuple[Timing, ...]
    facts: dict[str, Fact]

    @property
    def link(self) -> MeasuredLink:
        """The medians as a link for the simulator, with quartiles, fits and facts beside them."""
        tables = [
            LinkTable(
                operation=key[0].value,
                dtype=key[1],
                fit=self.fits[key],
                points=tuple((float(row.cell.num_bytes), row.median_s) for row in rows),
                spread_s=tuple(row.quartiles_s for row in rows),
            )
            for key, rows in self.tables.items()
        ]
        facts = self.facts | {f"remark {number}": text for number, text in enumerate(self.remarks, start=1)}
        return MeasuredLink(num_ranks=self.num_ranks, tables=tuple(tables), facts=facts)

    @property
    def tables(self) -> dict[TableKey, tuple[Timing, ...]]:
        """Timings by operation and dtype, by increasing size."""
        keys = dict.fromkeys((timing.cell.kind, timing.cell.dtype) for timing in self.timings)
        return {key: tuple(each for each in self.timings if (each.cell.kind, each.cell.dtype) == key) for key in keys}

    @property
    def fits(self) -> dict[TableKey, AffineFit]:
        """The line through each table."""
        return {key: fit_affine([(row.cell.num_bytes, row.median_s) for row in rows]) for key, rows in self.tables.items()}

    def residuals(self, key: TableKey) -> tuple[float, ...]:
        """Return ``(line - measured) / measured`` for each point of a table."""
        fit = self.fits[key]
        return tuple(fit.line(row.cell.num_bytes) / row.median_s - 1 for row in self.tables[key])

    def is_affine(self, key: TableKey) -> bool:
        """Whether the line describes the table: no point is further than a quarter of its time away."""
        return max(map(abs, self.residuals(key))) <= POOR_RESIDUAL

    @property
    def remarks(self) -> tuple[str, ...]:
        """What has to be known to use the lines."""
        found = []
        for key in self.tables:
            worst = max(zip(self.residuals(key), self.tables[key], strict=True), key=lambda pair: abs(pair[0]))
            if not self.is_affine(key):
                kind, dtype = key
                found.append(
                    f"{kind.value} of {dtype} is not latency plus bytes over bandwidth: the line is {worst[0]:+.0%} off at "
                    f"{worst[1].cell.num_bytes} bytes; use the table (kind: table), not the line"
                )
        return tuple(found)

    def describe(self) -> Iterator[str]:
        """Yield the line of each operation, and what must be known to use it."""
        facts = self.facts
        yield f"{facts['backend']} on {facts['device']}, {self.num_ranks} ranks, {facts['repetitions']} repetitions"
        for key, fit in self.fits.items():
            bandwidth = f"{1e-9 / fit.seconds_per_byte:.3g} GB/s" if fit.seconds_per_byte else "any bandwidth"
            line = f"{format_seconds(fit.latency_s)} + bytes / ({bandwidth}), median {fit.residual:.1%} off"
            yield f"{key[0].value} {key[1]}: {line}"
        yield from self.remarks

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a table of all sizes, head first: median, quartiles, and how far the line is from the median."""
        yield ("operation", "bytes", "median", "quartiles", "line")
        for key, timings in self.tables.items():
            for timing, residual in zip(timings, self.residuals(key), strict=True):
                quartiles = " ".join(f"{quartile / timing.median_s - 1:+.0%}" for quartile in timing.quartiles_s)
                size, median = format_bytes(timing.cell.num_bytes), format_seconds(timing.median_s)
                yield (f"{key[0].value} {key[1]}", size, median, quartiles, f"{residual:+.0%}")

    def write(self, path: Path) -> None:
        """Write ``link.yaml``: points, quartiles, fits and facts, as ``link: {path: link.yaml}`` reads them.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_link(path, self.link)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, with every repetition, ready for JSON."""
        tables = [
            {
                "operation": key[0].value,
                "dtype": key[1],
                "fit": self.fits[key].model_dump(),
                "is_affine": self.is_affine(key),
                "points": [
                    row.to_dict() | {"residual": residual} for row, residual in zip(rows, self.residuals(key), strict=True)
                ],
            }
            for key, rows in self.tables.items()
        ]
        return {"num_ranks": self.num_ranks, "facts": self.facts, "remarks": self.remarks, "tables": tables}


def calibrate(
    plan: CalibrationPlan,
    *,
    launch: Launch,
    out: Path,
    fabric: FabricConfig | None = None,
    note: Note = silent,
) -> Calibration:
    """Start the ranks' group, measure, and write the file. Every process of the run calls it.

    Args:
        out: the file; looked at before anything is measured, and written by the first rank after everything.
        fabric: an emulated link to measure instead of the machine's own.
        note: called on the first rank with what happens next.

    Raises:
        ConfigError: there is one rank only, the file cannot be written, or the buffers do not fit.
    """
    if launch.num_ranks == 1:
        raise ConfigError(
            "one rank has nobody to talk to, so there is nothing to measure; start more with torchrun --nproc-per-node 2 -m "
            "megabucket calibrate ..."
        )
    with joined_ranks(launch, fabric, note=note) as ranks:
        check_writable(ranks, [out])
        calibration = measure_link(plan, ranks, fabric=fabric)
        if ranks.rank == 0:
            calibration.write(out)
    return calibration


def measure_link(
    plan: CalibrationPlan,
    ranks: Ranks,
    *,
    fabric: FabricConfig | None = None,
) -> Calibration:
    """Measure on ranks that have joined; equal on all of them. Every rank calls it."""
    cells = cells_of(plan.kinds, plan.dtypes, plan.max_bytes, ranks.num_ranks)
    with closing(discover_communicator(None)) as communicator:
        timings = time_collectives(cells, communicator, device=ranks.device, repetitions=plan.repetitions, note=ranks.note)
    hosts = ranks.gather(platform.node())
    return Calibration(ranks.num_ranks, timings, _facts(plan, ranks, hosts, fabric))


def pipelined_link(calibration: Calibration, communicator: Communicator, *, device: torch.device) -> MeasuredLink:
    """Return what collectives take on the lane when nothing disturbs them: a table for buckets that queue up. Collective call.

    A calibration launches and waits one by one, so each of its points holds a launch and a waking thread, and nothing that a
    back-end does side by side shows. Of buckets in a queue only the lane's time counts; the host's part is counted by
    ``HostCosts``. So collectives are measured once more, several in flight, and the lower quartile of the rounds counts, of
    whichever kind is shorter: the other rounds show how long threads of the back-end stood in line for a core.
    """
    cells = [timing.cell for timing in calibration.timings]
    in_flight = time_collectives(
        cells, communicator, device=device, repetitions=_UNDISTURBED_ROUNDS, in_flight_bytes=_IN_FLIGHT_BYTES
    )
    undisturbed_s = {
        alone.cell: min(alone.quartiles_s[0], together.quartiles_s[0])
        for alone, together in zip(calibration.timings, in_flight, strict=True)
    }
    tables = {
        key: tuple((float(timing.cell.num_bytes), undisturbed_s[timing.cell]) for timing in timings)
        for key, timings in calibration.tables.items()
    }
    return MeasuredLink.of(tables, calibration.num_ranks)


def _facts(plan: CalibrationPlan, ranks: Ranks, hosts: Sequence[str], fabric: FabricConfig | None) -> dict[str, Fact]:
    accelerator = Accelerator.of(ranks.device)
    facts: dict[str, Fact] = {
        "origin": "measured" if fabric is None else "measured on an emulated fabric",
        "backend": ranks.backend,
        "device": platform.machine() if accelerator is None else accelerator.name,
        "ranks": ranks.num_ranks,
        "hosts": len(set(hosts)),
        "cores_per_host": os.cpu_count(),
        "repetitions": plan.repetitions,
        "megabucket": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return facts | {f"fabric_{name}": value for name, value in (fabric.model_dump() if fabric is not None else {}).items()}
