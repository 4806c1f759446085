"""The figures of a run as JSON lines: one object a line, written at once, so that a run can be followed and survives a crash.

Every object has ``schema``, ``kind``, ``wall_time_s`` (Unix time) and ``monotonic_s`` (``time.perf_counter``). Rank 0 writes;
the logs of the other ranks have no path and write nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from megabucket.errors import ConfigError

SCHEMA: Final = 1
"""Version of the objects; raised when a field changes its meaning or goes away."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of one rank: what training did and, from the wrapper's trace of it, what its communication cost."""

    step: int
    """Counted from 0."""
    bits_per_byte: float
    """Training loss of this rank's windows, before the update."""
    learning_rate: float
    grad_norm: float
    """Global 2-norm of the gradients, before clipping."""
    updated: bool
    reason: str
    """Why parameters were not updated; empty when they were."""
    step_s: float
    tokens_per_s: float
    """Over all ranks."""
    compute_s: float = 0.0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    overlap_fraction: float | None = None
    num_collectives: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    """By the formula of ``CollectiveRecord.wire_bytes``, on this rank."""
    launches: list[dict[str, Any]] | None = None
    """When each collective was ready, launched, done and waited for: seconds since the first forward (``ddp.step_traces``)."""


class MetricsLog:
    """A file of JSON lines, replaced when it is opened.

    Args:
        path: where to write, its directory is made; ``None`` writes nothing.
        keeps_lines: keep what is there until ``start_anew``, without a last line that is not whole: its writer was killed.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None, *, keeps_lines: bool = False) -> None:
        self._file: IO[str] | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = path.read_bytes() if keeps_lines and path.exists() else b""
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(kept.rfind(b"\n") + 1)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise ConfigError(
                f"train.log_path={str(path)!r} cannot be written: {error.strerror}. Name a file in a directory of yours, or "
                "set it to null to write no metrics."
            ) from error

    def start_anew(self) -> None:
        """Remove the lines of an earlier run."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()

    @property
    def has_lines(self) -> bool:
        """Whether something was written."""
        return self._file is not None and self._file.tell() > 0

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one object and flush it. Numbers that are not finite become the strings ``nan``, ``inf`` and ``-inf``."""
        if self._file is None:
            return
        head = {"schema": SCHEMA, "kind": kind, "wall_time_s": time.time(), "monotonic_s": time.perf_counter()}
        self._file.write(json.dumps(jsonable({**head, **fields}), allow_nan=False) + "\n")
        self._file.flush()

    def write_step(self, metrics: StepMetrics) -> None:
        """Append one object of the kind ``step``."""
        self.write("step", asdict(metrics))

    def close(self) -> None:
        """Close the file; what is written later goes nowhere."""
        if self._file is not None:
            self._file.close()
            self._file = None


def jsonable(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are the strings ``nan``, ``inf`` and ``-inf``: strict JSON."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
