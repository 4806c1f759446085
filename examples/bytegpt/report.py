"""The output of a run: progress lines, a log of JSON lines, and the closing figures. Only rank 0 writes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from megabucket.errors import ConfigError
from megabucket.units import format_bytes, format_seconds

_SCHEMA: Final = 1
_LINE_EVERY_S: Final = 5.0
_PER_STEP: Final = ("num_collectives", "payload_bytes", "wire_bytes", "step_s", "compute_s", "comm_s", "exposed_s")


class Progress:
    """Lines on stderr: notes, the first step, the last, and one every few seconds.

    Args:
        is_shown: whether this rank shows anything.
    """

    def __init__(self, *, is_shown: bool = False) -> None:
        self._is_shown, self._next_line_s = is_shown, 0.0

    def note(self, text: str) -> None:
        """Print a line."""
        if self._is_shown:
            print(text, file=sys.stderr, flush=True)

    def show(self, title: str, figures: Mapping[str, Any], *, num_steps: int) -> None:
        """Print a step of ``num_steps`` if a line is due."""
        step = figures["step"] + 1
        if step in (1, num_steps) or time.perf_counter() >= self._next_line_s:
            self._next_line_s = time.perf_counter() + _LINE_EVERY_S
            self.note(f"{title}: step {step}/{num_steps} {describe_step(figures)}")


def describe_step(figures: Mapping[str, Any]) -> str:
    """Return a short description of a step."""
    # Torch's own wrapper does not say when it communicates, and one rank does not communicate.
    exposed = f" exposed {format_seconds(figures['exposed_s'])}" if figures.get("comm_s") else ""
    skipped = "" if figures["updated"] else f" NOT UPDATED: {figures['reason']}"
    return f"{figures['bits_per_byte']:.3f} bits/byte {figures['tokens_per_s']:,.0f} tokens/s{exposed}{skipped}"


class MetricsLog:
    """A file of JSON lines, flushed one by one, so that a run can be followed and its log survives a crash.

    Existing lines are kept until ``start_anew``, except for an incomplete last line of a killed run.

    Args:
        path: the file, whose directory is made; ``None`` writes nothing.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
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

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one object and flush it. Numbers that are not finite become the strings ``nan``, ``inf`` and ``-inf``."""
        if self._file is not None:
            times = {"wall_time_s": time.time(), "monotonic_s": time.perf_counter()}
            line = {"kind": kind, **times, **fields} | {"schema": _SCHEMA, "kind": kind}
            self._file.write(json.dumps(jsonable(line), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def jsonable(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are the strings ``nan``, ``inf`` and ``-inf``: strict JSON."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def totals_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a step that are added up over a run."""
    hidden_s = figures.get("comm_s", 0.0) * (figures.get("overlap_fraction") or 0.0)
    counts = {"num_steps": 1, "num_skipped": int(not figures["updated"]), "hidden_s": hidden_s}
    return {**counts, **{name: figures.get(name, 0) for name in _PER_STEP}}


def summarize(totals: Counter[str], train_s: float, *, tokens_per_step: int) -> dict[str, Any]:
    """Return means over the steps, and speeds.

    Args:
        totals: sums of ``totals_of``.
        train_s: wall time of all steps, without the evaluations.
        tokens_per_step: over all ranks.
    """
    num_steps = totals["num_steps"]
    return {
        "train_s": train_s,
        "num_steps": num_steps,
        "num_skipped": totals["num_skipped"],
        "steps_per_s": num_steps / train_s,
        "tokens_per_s": num_steps / train_s * tokens_per_step,
        **{f"{name}_per_step": totals[name] / num_steps for name in _PER_STEP},
        # The share of the communication time in which this rank did not wait for it.
        "overlap_fraction": totals["hidden_s"] / totals["comm_s"] if totals["comm_s"] > 0 else None,
    }


def describe_summary(summary: Mapping[str, Any]) -> str:
    """Return the closing table: one figure per line, with its meaning."""
    title = "{mode}, {num_ranks} rank(s), {backend}, {param_dtype} parameters".format_map(summary)
    return "\n".join([title, *(f"  {name:<27}{figure:>16}  {meaning}" for name, figure, meaning in _rows(summary))])


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    step_s, overlap = summary["step_s_per_step"], summary["overlap_fraction"]
    bits = "{held_out_bits_before:.3f} -> {held_out_bits_after:.3f}".format_map(summary)
    yield "held-out bits/byte", bits, "before -> after, on files never trained on"
    speed = f"{summary['tokens_per_s']:,.0f} tokens/s over all ranks"
    yield (
        "steps/s",
        f"{summary['steps_per_s']:.2f}",
        f"{summary['num_steps']} steps in {format_seconds(summary['train_s'])}, {speed}",
    )
    cuts = "of {num_buffers} buffer(s); {num_params:,} parameters, padding {padding_fraction:.2%}".format_map(summary)
    yield "buckets", str(summary["num_buckets"]), cuts
    if summary["num_skipped"]:
        yield "steps not updated", str(summary["num_skipped"]), "their gradients were not finite"
    yield "collectives per step", f"{summary['num_collectives_per_step']:.1f}", "launched by each rank"
    formula = "per step and rank: all-reduce 2S(n-1)/n, others S(n-1)/n"
    yield "bytes on the wire, formula", format_bytes(summary["wire_bytes_per_step"]), formula
    yield "  payload", format_bytes(summary["payload_bytes_per_step"]), "per step and rank: S, the buffers handed over"
    of_step = f"per step of {format_seconds(step_s)} (rank 0)"
    yield "communication time", format_seconds(summary["comm_s_per_step"]), of_step
    exposed_s = summary["exposed_s_per_step"]
    yield "exposed communication", format_seconds(exposed_s), f"per step, {exposed_s / step_s:.1%} of it: rank 0 stood still"
    hidden = "no communication" if overlap is None else "of the communication was hidden behind computation"
    yield "overlap", "-" if overlap is None else f"{overlap:.0%}", hidden
