"""SIGKILL at every call to the operating system that a save makes, one after another: none may lose a checkpoint."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.checkpoints import sample
from faults.checkpoints.faulty import FaultyFileSystem, kill_at, nothing
from faults.checkpoints.forked import run_forked
from faults.checkpoints.threads import in_threads
from megabucket.checkpoint.catalog import TEMPORARY
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.save import SaveSettings

OLD, NEW, NEXT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class CrashPoints:
    """What became of each crash point.

    Args:
        loaded: by crash point, the step that was loaded.
        failures: what must not be, in words.
    """

    num_calls: int
    loaded: tuple[int, ...]
    failures: tuple[str, ...]


def settings_with(file_system: FileSystem, *, keep_last: int = 1) -> SaveSettings:
    """Return settings of a save of the sample."""
    return SaveSettings(keep_last=keep_last, max_file_bytes=sample.FILE_BYTES, file_system=file_system)


def save_on_ranks(root: Path, step: int, file_system: FileSystem, *, size: int) -> None:
    """Save the sample of a step on ranks that are threads.

    Raises:
        Exception: what a rank has raised.
    """
    for result in in_threads(size, lambda ranks: sample.save(root, step, ranks, settings_with(file_system))):
        if isinstance(result, Exception):
            raise result


def run_crash_points(
    base: Path, *, size: int, torn: bool, report: Callable[[str], None], until: str | None = None
) -> CrashPoints:
    """Save over an old checkpoint as often as a save has calls, and kill each save at another call.

    Args:
        base: an empty directory to work in.
        size: how many ranks save, as threads of the process that is killed.
        torn: a write that the kill hits has written half.
        until: end with the first failure that says this.
    """
    before, work = base / "before", base / "work"
    save_on_ranks(before, OLD, FileSystem(), size=size)
    counter = FaultyFileSystem(nothing, torn=torn)
    shutil.copytree(before, work)
    save_on_ranks(work, NEW, counter, size=size)
    loaded, failures = [], []
    for index in range(counter.num_calls + 1):
        shutil.rmtree(work)
        shutil.copytree(before, work)
        code = run_forked(
            lambda index=index: save_on_ranks(work, NEW, FaultyFileSystem(kill_at(index), torn=torn), size=size)  # type: ignore[misc]
        )
        if code != (-signal.SIGKILL if index < counter.num_calls else 0):
            failures.append(f"call {index}: the child ended with {code}")
        step, problem = _judge(work, size)
        loaded.append(step)
        if problem:
            failures.append(f"call {index}: {problem}")
        if until is not None and any(until in failure for failure in failures):
            break
    report(
        f"{size} ranks{', torn writes' if torn else ''}: {counter.num_calls} calls, {len(loaded)} saves killed: "
        f"{loaded.count(OLD)} loaded the old checkpoint, {loaded.count(NEW)} the new one, {len(failures)} failures"
    )
    return CrashPoints(counter.num_calls, tuple(loaded), tuple(failures))


def _judge(root: Path, size: int) -> tuple[int, str]:
    """Return the step that is loaded, and what is wrong."""
    try:
        step = sample.loaded_step(root)
        if step not in {OLD, NEW}:
            return step, f"loaded step {step}"
        save_on_ranks(root, NEXT, FileSystem(), size=size)
        after = sample.loaded_step(root)
    except Exception as error:  # whatever it is, it is what must not be
        return -1, f"{type(error).__name__}: {error}"
    left = [path.name for path in root.iterdir() if path.name.startswith(TEMPORARY)]
    if after != NEXT or left:
        return step, f"the save after it: loaded {after}, left {left}"
    return step, ""
