"""What rank 0 shows while it trains: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from examples.bytegpt.metrics import StepMetrics
from megabucket.units import format_seconds

_LINE_EVERY_S: Final = 5.0
_WIDE: Final = 100
"""Columns from which there is room for a longer bar; the figures fit into 80."""


class SilentView:
    """Shows nothing: every rank but the first. The other views show what they are told."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def start(self, num_steps: int, title: str) -> None:
        """Begin a run of steps."""

    def show(self, metrics: StepMetrics) -> None:
        """Show one finished step."""

    def stop(self) -> None:
        """End the run of steps; a second call does nothing."""


class LineView(SilentView):
    """Prints the first step, the last, and one every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps, self._title, self._next_line_s = 0, "", 0.0

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, num_steps: int, title: str) -> None:
        """Remember what is counted."""
        self._num_steps, self._title, self._next_line_s = num_steps, title, 0.0

    def show(self, metrics: StepMetrics) -> None:
        """Print the step when its time has come."""
        if metrics.step + 1 == self._num_steps or time.perf_counter() >= self._next_line_s:
            self._next_line_s = time.perf_counter() + _LINE_EVERY_S
            self.note(f"{self._title}: step {metrics.step + 1}/{self._num_steps} {describe_step(metrics)}")


class LiveView(LineView):
    """Keeps one bar up to date, below the notes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if console.width >= _WIDE else 8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._bar = TaskID(0)

    def start(self, num_steps: int, title: str) -> None:
        """Draw the bar."""
        self._bar = self._progress.add_task(title, total=num_steps, figures="")
        self._progress.start()

    def show(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        self._progress.update(self._bar, completed=metrics.step + 1, figures=describe_step(metrics))

    def stop(self) -> None:
        """Leave the bar where it is."""
        self._progress.stop()


def make_view(console: Console) -> SilentView:
    """Return the view that suits what the console writes to."""
    return LiveView(console) if console.is_terminal else LineView(console)


def describe_step(metrics: StepMetrics) -> str:
    """Return one step in a few words."""
    # Torch's own wrapper tells nobody when it communicates, and one rank does not communicate.
    exposed = f" exposed {format_seconds(metrics.exposed_s)}" if metrics.comm_s > 0 else ""
    skipped = "" if metrics.updated else f" NOT UPDATED: {metrics.reason}"
    return f"{metrics.bits_per_byte:.3f} bits/byte {metrics.tokens_per_s:,.0f} tokens/s{exposed}{skipped}"
