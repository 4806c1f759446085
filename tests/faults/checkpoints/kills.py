"""SIGKILL at random moments: a process saves one step after another until it is killed, and the next one goes on.

All of it in one directory. What the process has reported as saved must never be lost: the next load gives that step, or
the one that was being saved.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.checkpoints import sample
from faults.checkpoints.crash_points import settings_with
from faults.checkpoints.threads import ThreadRanks, in_threads
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.save import BackgroundWriter
from megabucket.errors import MegabucketError

_LONGEST_S = 0.06
_STEP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Kills:
    """What became of random kills.

    Args:
        num_old: kills after which the last reported step was loaded, not the one being saved.
    """

    num_kills: int
    num_steps: int
    num_old: int
    failures: tuple[str, ...]


def run_kills(root: Path, num_kills: int, seed: int, *, size: int, report: Callable[[str], None]) -> Kills:
    """Kill ``num_kills`` processes that save, each after a random time, and load after each.

    Args:
        root: an empty directory.
    """
    draw = random.Random(f"kills {seed}")
    loaded, num_old, failures = 0, 0, []
    for index in range(num_kills):
        in_background = draw.random() < 0.5
        saved = _save_until_killed(root, loaded, draw.random() * _LONGEST_S, size=size, in_background=in_background)
        last = max(saved, loaded)
        try:
            found = sample.loaded_step(root) if last > 0 or (root / "latest").exists() else 0
        except (MegabucketError, sample.WrongStateError) as error:
            failures.append(f"kill {index}: {type(error).__name__}: {error}")
            break
        if not last <= found <= last + 1:
            failures.append(f"kill {index}: step {last} was saved, and step {found} is loaded")
            break
        num_old += found == last
        loaded = found
        if (index + 1) % 200 == 0:
            report(f"{index + 1} kills, step {loaded}, {len(failures)} failures")
    report(
        f"{num_kills} kills of {size} ranks while {loaded} steps were saved: {num_old} loaded the last step that was "
        f"reported as saved, {num_kills - num_old - len(failures)} the one that was being saved, {len(failures)} failures"
    )
    return Kills(num_kills, loaded, num_old, tuple(failures))


def _save_until_killed(root: Path, loaded: int, after_s: float, *, size: int, in_background: bool) -> int:
    """Return the last step that the child has reported as saved, or 0."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            in_threads(size, lambda ranks: _save_on(root, loaded, ranks, writer, in_background=in_background))
        finally:
            os._exit(1)
    os.close(writer)
    # The first word says that the ranks are there: the time counts from then on.
    said = os.read(reader, _STEP_BYTES)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(reader, 4096):
        said += chunk
    os.close(reader)
    return int.from_bytes(said[-_STEP_BYTES:], "little")


def _save_on(root: Path, loaded: int, ranks: ThreadRanks, writer: int, *, in_background: bool) -> None:
    settings = settings_with(FileSystem(), keep_last=2)
    background = BackgroundWriter(root, ranks, settings)

    def tell(step: int) -> None:
        if ranks.rank == 0:
            os.write(writer, step.to_bytes(_STEP_BYTES, "little"))

    tell(0)
    step = loaded
    while True:
        step += 1
        if in_background:
            taken = sample.snapshot(step, rank=ranks.rank, size=ranks.size)
            background.save(step, lambda taken=taken: taken)  # type: ignore[misc]
            background.close()
        else:
            sample.save(root, step, ranks, settings)
        tell(step)
