"""The closing table of a run: what was learned, how fast, what travelled, and what it took. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from megabucket.planning.memory import RankMemory
from megabucket.training.metrics import StepMetrics
from megabucket.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """What was trained, by whom, in which buffers."""

    mode: str
    """``reduce_scatter`` or ``all_reduce``."""
    backend: str
    num_ranks: int
    num_params: int
    """Elements of all parameters."""
    param_dtype: str
    num_buffers: int
    num_buckets: int
    padding_fraction: float
    layout_fingerprint: str
    computed_memory: RankMemory
    """Of this rank, from the layout."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What only the run could tell, on this rank."""

    held_out_bits_before: float
    held_out_bits_after: float
    train_s: float
    """Wall time of all steps, without the evaluations."""
    loopback_bytes: int | None
    """Sent over the loopback device by all processes of the machine during the steps; ``None``: not counted."""
    peak_growth_bytes: int
    """By how much the peak memory rose from before the model was built."""
    peak_source: str


@dataclass(slots=True)
class Totals:
    """Sums over the steps of a run, one addition per step."""

    num_steps: int = 0
    num_skipped: int = 0
    """Steps whose gradients were not finite, so that nothing was updated."""
    num_collectives: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    step_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    last_bits_per_byte: float = float("nan")

    def add(self, step: StepMetrics) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_skipped += not step.updated
        self.num_collectives += step.num_collectives
        self.payload_bytes += step.payload_bytes
        self.wire_bytes += step.wire_bytes
        self.step_s += step.step_s
        self.compute_s += step.compute_s
        self.comm_s += step.comm_s
        self.hidden_s += step.comm_s * (step.overlap_fraction or 0.0)
        self.exposed_s += step.exposed_s
        self.last_bits_per_byte = step.bits_per_byte


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished run, on this rank."""

    setup: Setup
    measured: Measured
    totals: Totals
    tokens_per_step: int
    """Over all ranks."""

    @property
    def steps_per_s(self) -> float:
        """Steps per second of training time."""
        return self.totals.num_steps / self.measured.train_s

    @property
    def overlap_fraction(self) -> float | None:
        """Share of the communication time in which this rank did not stand still; ``None`` without communication."""
        return self.totals.hidden_s / self.totals.comm_s if self.totals.comm_s > 0 else None

    @property
    def loopback_bytes_per_step(self) -> float | None:
        """Measured loopback traffic per step and rank, headers and other programs included; ``None``: not counted."""
        counted = self.measured.loopback_bytes
        return None if counted is None else counted / self.totals.num_steps / self.setup.num_ranks

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, ready for JSON; those per step are means over the steps."""
        per_step = {
            f"{name}_per_step": getattr(self.totals, name) / self.totals.num_steps
            for name in ("num_collectives", "payload_bytes", "wire_bytes", "step_s", "compute_s", "comm_s", "exposed_s")
        }
        return {
            **{key: value for key, value in asdict(self.setup).items() if key != "computed_memory"},
            "computed_bytes": {**asdict(self.setup.computed_memory), "total_bytes": self.setup.computed_memory.total_bytes},
            **asdict(self.measured),
            "num_steps": self.totals.num_steps,
            "num_skipped": self.totals.num_skipped,
            "last_bits_per_byte": self.totals.last_bits_per_byte,
            "steps_per_s": self.steps_per_s,
            "tokens_per_s": self.steps_per_s * self.tokens_per_step,
            **per_step,
            "loopback_bytes_per_step": self.loopback_bytes_per_step,
            "overlap_fraction": self.overlap_fraction,
        }


def summary_table(summary: Summary) -> Table:
    """Return the closing table: one figure a row, with what it means beside it."""
    setup = summary.setup
    title = f"{setup.mode}, {setup.num_ranks} rank(s), {setup.backend}, {setup.param_dtype} parameters"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    for row in (*_training_rows(summary), *_wire_rows(summary), *_time_rows(summary), *_memory_rows(summary)):
        table.add_row(*row)
    return table


_Row = tuple[str, str, str]


def _training_rows(summary: Summary) -> list[_Row]:
    measured, totals, setup = summary.measured, summary.totals, summary.setup
    speed = f"{summary.steps_per_s * summary.tokens_per_step:,.0f} tokens/s over all ranks"
    rows = [
        (
            "held-out bits/byte",
            f"{measured.held_out_bits_before:.3f} -> {measured.held_out_bits_after:.3f}",
            "before -> after, on files never trained on",
        ),
        (
            "steps/s",
            f"{summary.steps_per_s:.2f}",
            f"{totals.num_steps} steps in {format_seconds(measured.train_s)}, {speed}",
        ),
        (
            "buckets",
            f"{setup.num_buckets}",
            f"of {setup.num_buffers} buffer(s); {setup.num_params:,} parameters, padding {setup.padding_fraction:.2%}",
        ),
    ]
    if totals.num_skipped:
        rows.append(("steps not updated", f"{totals.num_skipped}", "their gradients were not finite"))
    return rows


def _wire_rows(summary: Summary) -> list[_Row]:
    totals, steps = summary.totals, summary.totals.num_steps
    measured = summary.loopback_bytes_per_step
    if measured is not None:
        seen = "everything on the loopback device, other programs too"
        loopback = [("  measured", format_bytes(measured), seen)]
    else:
        loopback = [("  measured", "-", "counted only over gloo on one Linux host")]
    return [
        ("collectives per step", f"{totals.num_collectives / steps:.1f}", "launched by each rank"),
        (
            "bytes on the wire, formula",
            format_bytes(totals.wire_bytes / steps),
            "per step and rank: all-reduce 2S(n-1)/n, others S(n-1)/n",
        ),
        *loopback,
        ("  payload", format_bytes(totals.payload_bytes / steps), "per step and rank: S, the buffers handed over"),
    ]


def _time_rows(summary: Summary) -> list[_Row]:
    totals, steps = summary.totals, summary.totals.num_steps
    overlap = summary.overlap_fraction
    return [
        (
            "communication time",
            format_seconds(totals.comm_s / steps),
            f"per step of {format_seconds(totals.step_s / steps)} (rank 0)",
        ),
        (
            "exposed communication",
            format_seconds(totals.exposed_s / steps),
            f"per step, {totals.exposed_s / totals.step_s:.1%} of it: rank 0 stood still",
        ),
        (
            "overlap",
            "-" if overlap is None else f"{overlap:.0%}",
            "no communication" if overlap is None else "of the communication was hidden behind computation",
        ),
    ]


def _memory_rows(summary: Summary) -> list[_Row]:
    memory, measured = summary.setup.computed_memory, summary.measured
    parts = (
        ("parameters", memory.parameter_bytes),
        ("gradients", memory.gradient_bytes),
        ("main parameters", memory.main_parameter_bytes),
        ("main gradients", memory.main_gradient_bytes),
        ("moments", memory.moment_bytes),
        ("exchange buffers", memory.exchange_bytes),
        ("padding", memory.padding_bytes + memory.optimizer_padding_bytes),
        ("scratch", memory.scratch_bytes),
    )
    held = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes)
    return [
        (
            "peak memory",
            f"+{format_bytes(measured.peak_growth_bytes)}",
            f"{measured.peak_source}, with activations and allocator overhead",
        ),
        ("  computed", format_bytes(memory.total_bytes), held),
    ]
