"""The closing table of a run: what was learned, how fast, what travelled, and what it took. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from examples.bytegpt.metrics import StepMetrics
from megabucket.planning.memory import RankMemory
from megabucket.units import format_bytes, format_seconds

PER_STEP: Final = ("num_collectives", "payload_bytes", "wire_bytes", "step_s", "compute_s", "comm_s", "exposed_s")
"""What is summed over the steps, and shown as a mean."""


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
        self.hidden_s += step.comm_s * (step.overlap_fraction or 0.0)
        self.last_bits_per_byte = step.bits_per_byte
        for name in PER_STEP:
            setattr(self, name, getattr(self, name) + getattr(step, name))


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished run, on this rank."""

    setup: Setup
    totals: Totals
    held_out_bits_before: float
    held_out_bits_after: float
    train_s: float
    """Wall time of all steps, without the evaluations."""
    tokens_per_step: int
    """Over all ranks."""

    @property
    def steps_per_s(self) -> float:
        """Steps per second of training time."""
        return self.totals.num_steps / self.train_s

    @property
    def overlap_fraction(self) -> float | None:
        """Share of the communication time in which this rank did not stand still; ``None`` without communication."""
        return self.totals.hidden_s / self.totals.comm_s if self.totals.comm_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, ready for JSON; those per step are means over the steps."""
        setup, memory = asdict(self.setup), self.setup.computed_memory
        return {
            "computed_bytes": {**setup.pop("computed_memory"), "total_bytes": memory.total_bytes},
            **setup,
            **{name: getattr(self, name) for name in ("held_out_bits_before", "held_out_bits_after", "train_s")},
            **{name: getattr(self.totals, name) for name in ("num_steps", "num_skipped", "last_bits_per_byte")},
            "steps_per_s": self.steps_per_s,
            "tokens_per_s": self.steps_per_s * self.tokens_per_step,
            **{f"{name}_per_step": getattr(self.totals, name) / self.totals.num_steps for name in PER_STEP},
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
    for row in (*_training_rows(summary), *_communication_rows(summary)):
        table.add_row(*row)
    return table


def _training_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    totals, setup, memory = summary.totals, summary.setup, asdict(summary.setup.computed_memory)
    bits = f"{summary.held_out_bits_before:.3f} -> {summary.held_out_bits_after:.3f}"
    yield "held-out bits/byte", bits, "before -> after, on files never trained on"
    speed = f"{summary.steps_per_s * summary.tokens_per_step:,.0f} tokens/s over all ranks"
    steps = f"{totals.num_steps} steps in {format_seconds(summary.train_s)}, {speed}"
    yield "steps/s", f"{summary.steps_per_s:.2f}", steps
    cuts = f"of {setup.num_buffers} buffer(s); {setup.num_params:,} parameters, padding {setup.padding_fraction:.2%}"
    yield "buckets", f"{setup.num_buckets}", cuts
    if totals.num_skipped:
        yield "steps not updated", f"{totals.num_skipped}", "their gradients were not finite"
    named = {name.removesuffix("_bytes").replace("_", " "): value for name, value in memory.items() if value}
    held = ", ".join(f"{name} {format_bytes(value)}" for name, value in named.items())
    yield "memory, computed", format_bytes(setup.computed_memory.total_bytes), held


def _communication_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    totals, steps, overlap = summary.totals, summary.totals.num_steps, summary.overlap_fraction
    yield "collectives per step", f"{totals.num_collectives / steps:.1f}", "launched by each rank"
    formula = "per step and rank: all-reduce 2S(n-1)/n, others S(n-1)/n"
    yield "bytes on the wire, formula", format_bytes(totals.wire_bytes / steps), formula
    yield "  payload", format_bytes(totals.payload_bytes / steps), "per step and rank: S, the buffers handed over"
    of_step = f"per step of {format_seconds(totals.step_s / steps)} (rank 0)"
    yield "communication time", format_seconds(totals.comm_s / steps), of_step
    stood = f"per step, {totals.exposed_s / totals.step_s:.1%} of it: rank 0 stood still"
    yield "exposed communication", format_seconds(totals.exposed_s / steps), stood
    hidden = "no communication" if overlap is None else "of the communication was hidden behind computation"
    yield "overlap", "-" if overlap is None else f"{overlap:.0%}", hidden
