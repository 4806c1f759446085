"""``megabucket calibrate``: from ranks that were just started to a table of what collectives cost on them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

from megabucket import __version__
from megabucket.comm import discover_communicator
from megabucket.errors import ConfigError
from megabucket.measure.collectives import Timing, cells_of, time_collectives
from megabucket.measure.out_file import check_writable, not_writable, raise_on_all
from megabucket.measure.ranks import Launch, Ranks, joined_ranks
from megabucket.planning.fit import AffineFit, fit_affine
from megabucket.planning.inputs import write_link
from megabucket.planning.links import MeasuredLink, TableKey
from megabucket.planning.simulation_config import FabricConfig
from megabucket.trace import CollectiveKind

POOR_RESIDUAL: Final = 0.25
"""A line that is further than this from a point, as a fraction of the measured time, does not describe the table."""

MAX_BYTES: Final = 2**36
"""The largest buffer that is measured."""

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
        if self.max_bytes > MAX_BYTES:
            raise ConfigError(f"--max-bytes={self.max_bytes} is more than {MAX_BYTES}, the largest buffer that is measured")
        cells_of(self.kinds, self.dtypes, self.max_bytes, 1)  # refuses what has no second size, and unknown dtypes


@dataclass(frozen=True)
class Calibration:
    """Measured times, the lines through them, and where they were measured."""

    num_ranks: int
    timings: tuple[Timing, ...]
    facts: dict[str, Fact]

    @property
    def link(self) -> MeasuredLink:
        """The medians as a link for the simulator."""
        return MeasuredLink({key: tuple(_point(each) for each in rows) for key, rows in self.tables.items()}, self.num_ranks)

    @property
    def tables(self) -> dict[TableKey, tuple[Timing, ...]]:
        """Timings by operation and dtype, by increasing size."""
        keys = dict.fromkeys((timing.cell.kind, timing.cell.dtype) for timing in self.timings)
        return {key: tuple(each for each in self.timings if (each.cell.kind, each.cell.dtype) == key) for key in keys}

    @property
    def fits(self) -> dict[TableKey, AffineFit]:
        """The line through each table."""
        return {key: fit_affine(points) for key, points in self.link.tables.items()}

    def residuals(self, key: TableKey) -> tuple[float, ...]:
        """Return ``(line - measured) / measured`` for each point of a table."""
        fit = self.fits[key]
        return tuple(fit.seconds(size) / seconds - 1 for size, seconds in self.link.tables[key])

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

    def write(self, path: Path) -> None:
        """Write ``link.yaml``: points, quartiles, fits and facts, as ``link: {path: link.yaml}`` reads them.

        Raises:
            ConfigError: the file cannot be written.
        """
        spreads_s = {key: [timing.quartiles_s for timing in rows] for key, rows in self.tables.items()}
        facts = self.facts | {f"remark {number}": text for number, text in enumerate(self.remarks, start=1)}
        try:
            write_link(path, self.link, fits=self.fits, spreads_s=spreads_s, facts=facts)
        except OSError as error:
            raise ConfigError(not_writable(path, error.strerror or str(error))) from None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, with every repetition, ready for JSON."""
        tables = []
        for key, rows in self.tables.items():
            points = [
                {"bytes": row.cell.num_bytes, "median_s": row.median_s, "quartiles_s": row.quartiles_s, "seconds": row.seconds}
                for row in rows
            ]
            for point, residual in zip(points, self.residuals(key), strict=True):
                point["residual"] = residual
            fit = asdict(self.fits[key])
            kind, dtype = key
            tables.append(
                {"operation": kind.value, "dtype": dtype, "fit": fit, "is_affine": self.is_affine(key), "points": points}
            )
        return {"num_ranks": self.num_ranks, "facts": self.facts, "remarks": self.remarks, "tables": tables}


def calibrate(
    plan: CalibrationPlan,
    *,
    launch: Launch,
    out: Path,
    fabric: FabricConfig | None = None,
    on_round: Callable[[int], None] = lambda _: None,
    use: Callable[[Calibration], None] = lambda _: None,
) -> Calibration:
    """Start the ranks' group, measure, and write the file. Every process of the run calls it.

    Args:
        out: the file; looked at before anything is measured, and written by the first rank after everything.
        fabric: an emulated link to measure instead of the machine's own.
        on_round: called on the first rank after each round.
        use: called on the first rank before the file is written, so that nothing is lost when that fails.

    Raises:
        ConfigError: there is one rank only, the file cannot be written, or the buffers do not fit.
    """
    if launch.num_ranks == 1:
        raise ConfigError(
            "one rank has nobody to talk to, so there is nothing to measure; start more with torchrun --nproc-per-node 2 -m "
            "megabucket calibrate ..."
        )
    with joined_ranks(launch, fabric) as ranks:
        check_writable(ranks, [out])
        calibration = measure_link(plan, ranks, fabric=fabric, on_round=on_round if ranks.rank == 0 else lambda _: None)
        failure = ""
        if ranks.rank == 0:
            use(calibration)
            try:
                calibration.write(out)
            except ConfigError as error:
                failure = str(error)
        # torchrun ends the other ranks as soon as one has failed; none may leave before the file is out.
        raise_on_all(ranks, failure)
    return calibration


def measure_link(
    plan: CalibrationPlan,
    ranks: Ranks,
    *,
    fabric: FabricConfig | None = None,
    on_round: Callable[[int], None] = lambda _: None,
) -> Calibration:
    """Measure on ranks that have joined; equal on all of them. Every rank calls it."""
    communicator = discover_communicator(None)
    try:
        cells = cells_of(plan.kinds, plan.dtypes, plan.max_bytes, ranks.num_ranks)
        timings = time_collectives(cells, communicator, device=ranks.device, repetitions=plan.repetitions, on_round=on_round)
    finally:
        communicator.close()
    hosts = ranks.gather(platform.node())
    return Calibration(ranks.num_ranks, timings, _facts(plan, ranks, hosts, fabric))


def _facts(plan: CalibrationPlan, ranks: Ranks, hosts: Sequence[str], fabric: FabricConfig | None) -> dict[str, Fact]:
    is_cuda = ranks.device.type == "cuda"
    facts: dict[str, Fact] = {
        "origin": "measured",
        "backend": ranks.backend,
        "device": torch.cuda.get_device_name(ranks.device) if is_cuda else platform.machine(),
        "ranks": ranks.num_ranks,
        "hosts": len(set(hosts)),
        "cores_per_host": os.cpu_count(),
        "repetitions": plan.repetitions,
        "megabucket": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if fabric is not None:
        facts |= {"origin": "measured on an emulated fabric"}
        facts |= {f"fabric_{name}": value for name, value in fabric.model_dump().items()}
    return facts


def _point(timing: Timing) -> tuple[float, float]:
    return float(timing.cell.num_bytes), timing.median_s
