"""Measures the cost of collectives on the ranks of a run: a table over sizes, which the planner reads as a link."""

from __future__ import annotations

import os
import platform
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from megabucket.comm import Communicator, discover_communicator
from megabucket.errors import ConfigError
from megabucket.measure.collectives import Timing, cells_of, time_collectives
from megabucket.measure.ranks import Ranks, machine_facts
from megabucket.planning.documents import write_text
from megabucket.planning.links import AffineFit, MeasuredLink, TableKey, fit_affine
from megabucket.planning.simulation_config import FabricConfig
from megabucket.trace import CollectiveKind

POOR_RESIDUAL: Final = 0.25
"""A line this far from a point, as a fraction of the measured time, does not describe the table."""

_IN_FLIGHT_BYTES: Final = 8 * 2**20  # overlap gains little for larger collectives
_UNDISTURBED_ROUNDS: Final = 7


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What to measure.

    Attributes:
        kinds: operations.
        dtypes: of the buffers, as in the config.
        max_bytes: of the largest full buffer.
        repetitions: rounds over everything.
    """

    kinds: tuple[CollectiveKind, ...] = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
    dtypes: tuple[str, ...] = ("float32",)
    max_bytes: int = 64 * 2**20
    repetitions: int = 9


@dataclass(frozen=True)
class Table:
    """The timings of one operation and dtype, by increasing size."""

    kind: CollectiveKind
    dtype: str
    timings: tuple[Timing, ...]

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Bytes of the full buffer and median seconds."""
        return tuple((float(timing.cell.num_bytes), timing.median_s) for timing in self.timings)

    @cached_property
    def fit(self) -> AffineFit:
        """The line through the points."""
        return fit_affine(self.points)

    @property
    def residuals(self) -> tuple[float, ...]:
        """``(line - measured) / measured`` for each point."""
        return tuple(self.fit.line(size) / seconds - 1 for size, seconds in self.points)

    @property
    def remark(self) -> str | None:
        """A warning if the line does not describe the table: a point is further than a quarter of its time away."""
        worst, size = max(zip(self.residuals, self.points, strict=True), key=lambda pair: abs(pair[0]))
        if abs(worst) <= POOR_RESIDUAL:
            return None
        return (
            f"{self.kind.value} of {self.dtype} is not latency plus bytes over bandwidth: the line is {worst:+.0%} off at "
            f"{size[0]:.0f} bytes; use the table (kind: table), not the line"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return points, quartiles and the line as the planner's link file has them."""
        return {
            "operation": self.kind.value,
            "dtype": self.dtype,
            "fit": asdict(self.fit),
            "points": [list(point) for point in self.points],
            "spread_s": [list(timing.quartiles_s) for timing in self.timings],
        }


@dataclass(frozen=True)
class Calibration:
    """Measured times, and where they were measured."""

    num_ranks: int
    timings: tuple[Timing, ...]
    facts: dict[str, bool | int | float | str | None]

    @cached_property
    def tables(self) -> dict[TableKey, Table]:
        """Timings by operation and dtype."""
        timings: dict[TableKey, list[Timing]] = {}
        for timing in self.timings:
            timings.setdefault((timing.cell.kind, timing.cell.dtype), []).append(timing)
        return {key: Table(*key, tuple(found)) for key, found in timings.items()}

    @property
    def link(self) -> MeasuredLink:
        """The medians as a link for the simulator."""
        return MeasuredLink({key: table.points for key, table in self.tables.items()}, self.num_ranks)

    @property
    def remarks(self) -> list[str]:
        """Warnings about the lines."""
        return [table.remark for table in self.tables.values() if table.remark]

    def to_dict(self, *, has_repetitions: bool = False) -> dict[str, Any]:
        """Return everything as plain data: a link as ``link: {path: link.yaml}`` reads it.

        Args:
            has_repetitions: add the seconds of every repetition, which a link file does not have.
        """
        tables = [table.to_dict() for table in self.tables.values()]
        if has_repetitions:
            for data, table in zip(tables, self.tables.values(), strict=True):
                data["seconds"] = [list(timing.seconds) for timing in table.timings]
        facts = self.facts | {f"remark {number}": text for number, text in enumerate(self.remarks, start=1)}
        return {"kind": "table", "num_ranks": self.num_ranks, "facts": facts, "tables": tables}

    def write(self, path: Path) -> None:
        """Write ``link.yaml``.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False, width=120, default_flow_style=None))


def measure_link(plan: CalibrationPlan, ranks: Ranks, *, fabric: FabricConfig | None = None) -> Calibration:
    """Return a calibration on ranks that have joined, equal on all of them. Every rank calls it.

    Args:
        fabric: the emulated link that the ranks have joined over, for the facts.

    Raises:
        ConfigError: there is one rank only, the plan has fewer than two sizes, or the buffers do not fit into memory.
    """
    if ranks.num_ranks == 1:
        raise ConfigError(
            "one rank sends nothing, so there is nothing to measure; start more with torchrun --nproc-per-node 2 -m megabucket "
            "calibrate ..."
        )
    cells = cells_of(plan.kinds, plan.dtypes, plan.max_bytes, ranks.num_ranks)
    with closing(discover_communicator(None)) as communicator:
        timings = time_collectives(cells, communicator, device=ranks.device, repetitions=plan.repetitions, note=ranks.note)
    facts = {
        "origin": "measured" if fabric is None else "measured on an emulated fabric",
        "backend": ranks.backend,
        "ranks": ranks.num_ranks,
        "hosts": len(set(ranks.gather(platform.node()))),
        "cores_per_host": os.cpu_count(),
        "repetitions": plan.repetitions,
        **machine_facts(ranks.device),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{f"fabric_{name}": value for name, value in (fabric.model_dump() if fabric is not None else {}).items()},
    }
    return Calibration(ranks.num_ranks, timings, facts)


def pipelined_link(calibration: Calibration, communicator: Communicator, *, device: torch.device) -> MeasuredLink:
    """Return the undisturbed times of collectives on the lane: a table for buckets that queue up. Collective call.

    A calibration waits for each collective before the next, so each point includes a launch and a waking thread and shows no
    parallel work of the back-end. For buckets in a queue only the lane's time counts; ``HostCosts`` has the host's. So
    collectives are measured again with several in flight, and the shorter lower quartile of the two counts: the other rounds
    show how long the back-end's threads waited for a core.
    """
    cells = [timing.cell for timing in calibration.timings]
    in_flight = time_collectives(
        cells, communicator, device=device, repetitions=_UNDISTURBED_ROUNDS, in_flight_bytes=_IN_FLIGHT_BYTES
    )
    points: dict[TableKey, list[tuple[float, float]]] = {key: [] for key in calibration.tables}
    for alone, together in zip(calibration.timings, in_flight, strict=True):
        cell = alone.cell
        undisturbed_s = min(alone.quartiles_s[0], together.quartiles_s[0])
        points[cell.kind, cell.dtype].append((float(cell.num_bytes), undisturbed_s))
    return MeasuredLink({key: tuple(found) for key, found in points.items()}, calibration.num_ranks)
