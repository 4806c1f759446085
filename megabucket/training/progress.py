"""What rank 0 shows while it trains: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megabucket.training.metrics import StepMetrics
from megabucket.units import format_seconds

_LINE_EVERY_S: Final = 5.0
_WIDE: Final = 100
"""Columns from which there is room for a longer bar; the figures fit into 80."""


class View(Protocol):
    """Receives what a reader may want to see, from rank 0 or from a rank nobody watches."""

    def note(self, text: str) -> None:
        """Say something that stays."""
        ...

    def start(self, num_steps: int, title: str) -> None:
        """Begin a run of steps."""
        ...

    def show(self, metrics: StepMetrics) -> None:
        """Show one finished step."""
        ...

    def stop(self) -> None:
        """End the run of steps; a second call does nothing."""
        ...


class SilentView:
    """Shows nothing: every rank but the first."""

    def note(self, text: str) -> None:
        """Drop it."""

    def start(self, num_steps: int, title: str) -> None:
        """Drop it."""

    def show(self, metrics: StepMetrics) -> None:
        """Drop it."""

    def stop(self) -> None:
        """Do nothing."""


class LineView:
    """Prints the first step, the last, and one every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps = 0
        self._title = ""
        self._next_line_s = 0.0

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, num_steps: int, title: str) -> None:
        """Remember what is counted."""
        self._num_steps, self._title, self._next_line_s = num_steps, title, 0.0

    def show(self, metrics: StepMetrics) -> None:
        """Print the step when its time has come."""
        is_last = metrics.step + 1 == self._num_steps
        if is_last or time.perf_counter() >= self._next_line_s:
            self._next_line_s = time.perf_counter() + _LINE_EVERY_S
            self.note(f"{self._title}: step {metrics.step + 1}/{self._num_steps} {describe_step(metrics)}")

    def stop(self) -> None:
        """Do nothing: lines are printed at once."""


class LiveView:
    """Keeps one bar up to date."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def note(self, text: str) -> None:
        """Print a line, above the bar when there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, num_steps: int, title: str) -> None:
        """Draw the bar."""
        self.stop()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if self._console.width >= _WIDE else 8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._progress.add_task(title, total=num_steps, figures="")
        self._progress.start()

    def show(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step + 1, figures=describe_step(metrics))

    def stop(self) -> None:
        """Leave the bar where it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make_view(console: Console) -> View:
    """Return the view that suits what the console writes to."""
    return LiveView(console) if console.is_terminal else LineView(console)


def describe_step(metrics: StepMetrics) -> str:
    """Return one step in a few words."""
    # Torch's own wrapper tells nobody when it communicates, and one rank does not communicate.
    exposed = f" exposed {format_seconds(metrics.exposed_s)}" if metrics.comm_s > 0 else ""
    skipped = "" if metrics.updated else f" NOT UPDATED: {metrics.reason}"
    return f"{metrics.bits_per_byte:.3f} bits/byte {metrics.tokens_per_s:,.0f} tokens/s{exposed}{skipped}"
