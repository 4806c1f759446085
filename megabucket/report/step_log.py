"""Figures of steps for files and dashboards: plain data, JSON lines, TensorBoard scalars. Torch only where TensorBoard is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any, Final, Protocol

from typing_extensions import Self

from megabucket.errors import ConfigError
from megabucket.trace.step_trace import LaunchTimes, StepTrace

SCHEMA: Final = 1
"""Version of the lines; raised when a field changes its meaning or goes away."""

_SCALARS: Final = ("duration_s", "compute_s", "comm_s", "exposed_s", "overlap_fraction")


def step_figures(trace: StepTrace) -> dict[str, Any]:
    """Return the figures of one step as plain data, ready for JSON.

    ``*_s`` at the top are seconds within the step; those of ``launches`` are seconds since its start, or ``None`` for what did
    not happen in it or is not known.
    """
    return {
        "schema": SCHEMA,
        "kind": "step_trace",
        "step": trace.step,
        "rank": trace.rank,
        "start_s": trace.start_s,
        "duration_s": trace.duration_s,
        "compute_s": trace.compute_s,
        "comm_s": trace.comm_s,
        "exposed_s": trace.exposed_s,
        "overlap_fraction": trace.overlap_fraction,
        "num_collectives": trace.num_collectives,
        "payload_bytes": trace.payload_bytes,
        "wire_bytes": trace.wire_bytes,
        "launches": launch_figures(trace),
    }


def launch_figures(trace: StepTrace) -> list[dict[str, Any]]:
    """Return one mapping per launch of the step, its times in seconds since the start of the step."""
    return [_launch(launch, trace.start_s) for launch in trace.launches]


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
            raise ConfigError(
                f"the step trace log {str(path)!r} cannot be written: {error.strerror}. Name a file in a directory of yours."
            ) from error

    def write(self, trace: StepTrace | None) -> None:
        """Append a step; nothing when there is none yet, or when it is the one that was written last."""
        if self._file is None or trace is None or self._last == (trace.step, trace.start_s):
            return
        self._last = (trace.step, trace.start_s)
        self._file.write(json.dumps(step_figures(trace), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; what is written later goes nowhere."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScalarWriter(Protocol):
    """What is used of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number of one step."""
        ...

    def close(self) -> Any:
        """Write what is left."""
        ...


class TensorBoardLog:
    """Writes the figures of steps as TensorBoard scalars ``megabucket/exposed_s`` and so on.

    Args:
        target: a directory for a ``SummaryWriter`` of its own, or a writer, which is then left open.
        prefix: of the tags.

    Raises:
        ConfigError: a directory is given and TensorBoard is not installed.
    """

    def __init__(self, target: str | Path | ScalarWriter, *, prefix: str = "megabucket") -> None:
        self._owns_writer = isinstance(target, str | Path)
        self._writer: ScalarWriter = _open_writer(str(target)) if isinstance(target, str | Path) else target
        self._prefix = prefix

    def write(self, trace: StepTrace | None) -> None:
        """Write the figures of a step; nothing when there is none yet. What is unknown in it is left out."""
        if trace is None:
            return
        figures = step_figures(trace)
        for name in _SCALARS:
            if figures[name] is not None:
                self._writer.add_scalar(f"{self._prefix}/{name}", figures[name], trace.step)

    def close(self) -> None:
        """Close the writer, if it is our own."""
        if self._owns_writer:
            self._writer.close()


def _launch(launch: LaunchTimes, start_s: float) -> dict[str, Any]:
    def since_start(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - start_s

    return {
        "label": launch.label,
        "kind": launch.kind.value,
        "payload_bytes": launch.payload_bytes,
        "ready_s": since_start(launch.ready_s),
        "launched_s": since_start(launch.launched_s),
        "done_s": since_start(launch.done_s),
        "wait_start_s": since_start(launch.wait_start_s),
        "wait_stop_s": since_start(launch.wait_stop_s),
    }


def _open_writer(directory: str) -> ScalarWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard is not installed: run pip install tensorboard, or pass a writer of your own that has "
            "add_scalar(tag, value, step)."
        ) from error
    writer: ScalarWriter = SummaryWriter(directory)
    return writer
