"""Figures of steps for files and dashboards: plain data, JSON lines, TensorBoard scalars. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from typing_extensions import Self

from megabucket.errors import ConfigError
from megabucket.trace.step_trace import LaunchTimes, StepTrace

SCHEMA: Final = 1
"""Version of the lines; raised when a field changes its meaning or goes away."""

_TIMES: Final = ("duration_s", "compute_s", "comm_s", "exposed_s", "overlap_fraction")
_FIGURES: Final = ("step", "rank", "start_s", *_TIMES, "num_collectives", "payload_bytes", "wire_bytes")


def step_figures(trace: StepTrace) -> dict[str, Any]:
    """Return the figures of one step as plain data, ready for JSON.

    ``*_s`` at the top are seconds within the step; those of ``launches`` are seconds since its start, or ``None`` for events
    that did not happen in it or are not known.
    """
    figures = {name: getattr(trace, name) for name in _FIGURES}
    launches = [_launch(launch, trace.start_s) for launch in trace.launches]
    return {"schema": SCHEMA, "kind": "step_trace", **figures, "launches": launches}


def _launch(launch: LaunchTimes, start_s: float) -> dict[str, Any]:
    data = {**asdict(launch), "kind": launch.kind.value}
    times = {name: moment_s - start_s for name, moment_s in data.items() if name.endswith("_s") and moment_s is not None}
    return {**data, **times}


class StepTraceLog:
    """A file of JSON lines, one per step, flushed line by line. Also a context manager.

    Args:
        path: replaced when it exists; its directory is made.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file: IO[str] | None = None
        self._last: tuple[int, float] | None = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the log is
        except OSError as error:
            raise ConfigError(f"the step trace log {str(path)!r} cannot be written: {error.strerror}") from error

    def write(self, trace: StepTrace | None) -> None:
        """Append a step; nothing when there is none yet, or when it was the last one written."""
        if self._file is None or trace is None or self._last == (trace.step, trace.start_s):
            return
        self._last = (trace.step, trace.start_s)
        self._file.write(json.dumps(step_figures(trace), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; later writes do nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoardLog:
    """Writes the figures of steps as TensorBoard scalars ``megabucket/exposed_s`` and so on.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or any object with ``add_scalar(tag, value, step)``.
        prefix: of the tags.
    """

    def __init__(self, writer: Any, *, prefix: str = "megabucket") -> None:
        self._writer, self._prefix = writer, prefix

    def write(self, trace: StepTrace | None) -> None:
        """Write the figures of a step; nothing when there is none yet. Unknown figures are left out."""
        if trace is None:
            return
        for name in _TIMES:
            if (value := getattr(trace, name)) is not None:
                self._writer.add_scalar(f"{self._prefix}/{name}", value, trace.step)
