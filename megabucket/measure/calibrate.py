"""Measures the cost of collectives on the ranks of a run: a table over sizes, which the planner reads as a link."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Final

import torch
from typing_extensions import Self

from megabucket.comm import Communicator, discover_communicator
from megabucket.errors import ConfigError
from megabucket.measure.collectives import Timing, cells_of, time_collectives
from megabucket.measure.hosts import HostLevels, measure_levels
from megabucket.measure.ranks import Ranks, machine_facts
from megabucket.planning.links import Fact, LinkTable, MeasuredLink, TableKey, fit_affine
from megabucket.planning.run_config import FabricConfig
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
class Calibration:
    """A measured link, and the repetitions behind it."""

    link: MeasuredLink
    """Medians, quartiles and facts."""
    timings: tuple[Timing, ...]
    levels: HostLevels | None = None
    """The times inside a host and across hosts, if the ranks are on several."""

    @classmethod
    def of(cls, timings: Sequence[Timing], num_ranks: int, facts: Mapping[str, Fact]) -> Self:
        """Return the calibration of some timings."""
        tables = []
        for (kind, dtype), rows in _by_table(timings).items():
            points = tuple((float(row.cell.num_bytes), row.median_s) for row in rows)
            spread_s = tuple(row.quartiles_s for row in rows)
            tables.append(LinkTable(operation=kind.value, dtype=dtype, points=points, spread_s=spread_s))
        remarks = enumerate(filter(None, map(_remark, tables)), start=1)
        facts = {**facts, **{f"remark {number}": text for number, text in remarks}}
        return cls(MeasuredLink(num_ranks=num_ranks, tables=tuple(tables), facts=facts), tuple(timings))

    def to_dict(self) -> dict[str, Any]:
        """Return the link with the line and the seconds of every repetition of each table as plain data, ready for JSON."""
        data = self.link.model_dump(mode="json", exclude_none=True)
        for table, rows in zip(data["tables"], _by_table(self.timings).values(), strict=True):
            table |= {"fit": fit_affine(table["points"])._asdict(), "seconds": [row.seconds for row in rows]}
        return data

    def with_levels(self, levels: HostLevels | None, obstacle: str) -> Calibration:
        """Return the calibration with the times by host and the lines through them, or the reason why there are none."""
        facts = dict(self.link.facts)
        if levels is None:
            facts["remark hosts"] = f"no times inside hosts and across them: {obstacle}; start equally many ranks on each host"
            return replace(self, link=self.link.model_copy(update={"facts": facts}))
        named = [("inside a host", levels.inside), ("across hosts", levels.across)]
        for name, level in named:
            if level is not None and abs(worst := level.worst_residual) > POOR_RESIDUAL:
                facts[f"remark {name}"] = f"{name}: the line is up to {worst:+.0%} off; predictions by host are as far off"
        if levels.inside is not None:
            facts["inside"] = levels.inside.way
        return replace(self, link=self.link.model_copy(update={"hosts": levels.link, "facts": facts}), levels=levels)


def residuals(table: LinkTable) -> list[float]:
    """Return ``(line - measured) / measured`` for each point of a table."""
    line = fit_affine(table.points)
    return [line(size) / seconds - 1 for size, seconds in table.points]


def _remark(table: LinkTable) -> str | None:
    """Return a warning if a point is further from the line than a quarter of its time."""
    worst, (size, _) = max(zip(residuals(table), table.points, strict=True), key=lambda pair: abs(pair[0]))
    if abs(worst) <= POOR_RESIDUAL:
        return None
    return (
        f"{table.operation} of {table.dtype} is not latency plus bytes over bandwidth: the line is {worst:+.0%} off at "
        f"{size:.0f} bytes; use the table (kind: table), not the line"
    )


def _by_table(timings: Iterable[Timing]) -> dict[TableKey, list[Timing]]:
    found: dict[TableKey, list[Timing]] = {}
    for timing in timings:
        found.setdefault((timing.cell.kind, timing.cell.dtype), []).append(timing)
    return found


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
        "hosts": max(len(ranks.hosts.ranks), 1),
        "cores_per_host": os.cpu_count(),
        "repetitions": plan.repetitions,
        **machine_facts(ranks.device),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{f"fabric_{name}": value for name, value in (fabric.model_dump() if fabric is not None else {}).items()},
    }
    calibration = Calibration.of(timings, ranks.num_ranks, facts)
    if not ranks.hosts.is_several:
        return calibration
    ranks.note("timing inside hosts and across them")
    levels = measure_levels(
        ranks, ranks.hosts, max_bytes=plan.max_bytes, dtypes=plan.dtypes, kinds=plan.kinds, repetitions=plan.repetitions
    )
    return calibration.with_levels(levels, ranks.hosts.obstacle)


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
    undisturbed_s = {
        alone.cell: min(alone.quartiles_s[0], together.quartiles_s[0])
        for alone, together in zip(calibration.timings, in_flight, strict=True)
    }
    points = {
        key: [(float(row.cell.num_bytes), undisturbed_s[row.cell]) for row in rows]
        for key, rows in _by_table(calibration.timings).items()
    }
    return MeasuredLink.of(points, calibration.link.num_ranks).model_copy(update={"hosts": calibration.link.hosts})
