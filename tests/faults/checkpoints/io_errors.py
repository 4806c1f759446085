"""Every call of a save refused, on every rank, with every error number: the old checkpoint stays, and all ranks say why."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from faults.checkpoints import sample
from faults.checkpoints.crash_points import NEW, NEXT, OLD, save_on_ranks, settings_with
from faults.checkpoints.faulty import FaultyFileSystem, fail_at, nothing
from faults.checkpoints.threads import ThreadRanks, in_threads
from megabucket.checkpoint.catalog import TEMPORARY
from megabucket.checkpoint.file_system import FileSystem
from megabucket.errors import CheckpointNotSavedError

CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class IoErrors:
    """What became of each refused call.

    Args:
        outcomes: how many saves failed with the error, and how many succeeded all the same.
    """

    outcomes: Counter[str]
    failures: tuple[str, ...]


def run_io_errors(
    base: Path, *, size: int, codes: tuple[int, ...] = CODES, report: Callable[[str], None], until: str | None = None
) -> IoErrors:
    """Refuse each call of a save on each rank, once and from then on, with each error number.

    Args:
        base: an empty directory to work in.
        until: end with the first failure that says this.
    """
    before, work = base / "before", base / "work"
    save_on_ranks(before, OLD, FileSystem(), size=size)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    calls = ((victim, index) for victim in range(size) for index in range(_num_calls(before, work, victim, size)))
    for (victim, index), code, for_good in ((call, *fault) for call in calls for fault in product(codes, (False, True))):
        outcome, problem = _try(before, work, FaultyFileSystem(fail_at(index, code, for_good=for_good)), victim, size)
        outcomes[outcome] += 1
        if problem:
            name = f"{errno.errorcode[code]}{' for good' if for_good else ''}"
            failures.append(f"rank {victim}, call {index}, {name}: {problem}")
            if until is not None and until in failures[-1]:
                break
    report(f"{size} ranks: {outcomes.total()} refused calls: {dict(outcomes)}, {len(failures)} failures")
    return IoErrors(outcomes, tuple(failures))


def _num_calls(before: Path, work: Path, victim: int, size: int) -> int:
    counter = FaultyFileSystem(nothing)
    _results(before, work, counter, victim, size)
    return counter.num_calls


def _results(before: Path, work: Path, fault: FileSystem, victim: int, size: int) -> list[Path | Exception]:
    if work.exists():
        shutil.rmtree(work)
    shutil.copytree(before, work)

    def act(ranks: ThreadRanks) -> Path:
        file_system = fault if ranks.rank == victim else FileSystem()
        return sample.save(work, NEW, ranks, settings_with(file_system, keep_last=1))

    return in_threads(size, act)


def _try(before: Path, work: Path, fault: FaultyFileSystem, victim: int, size: int) -> tuple[str, str]:
    """Return what became of the save, and what is wrong with that."""
    results = _results(before, work, fault, victim, size)
    texts = {str(result) for result in results}
    try:
        loaded = sample.loaded_step(work)
        if all(isinstance(result, Path) for result in results):
            outcome, problem = "saved", "" if loaded == NEW else f"saved, and step {loaded} is loaded"
        elif not all(isinstance(result, CheckpointNotSavedError) for result in results) or len(texts) != 1:
            outcome, problem = "different", f"{results}"
        else:
            outcome, problem = "named", _problem_of(results[0], work, victim, loaded)
        save_on_ranks(work, NEXT, FileSystem(), size=size)
        left = [path.name for path in work.iterdir() if path.name.startswith(TEMPORARY)]
        if sample.loaded_step(work) != NEXT or left:
            problem = problem or f"the save after it left {left}"
    except Exception as error:  # whatever it is, it is what must not be
        return "failed", f"{type(error).__name__}: {error}"
    return outcome, problem


def _problem_of(error: Path | Exception, root: Path, victim: int, loaded: int) -> str:
    if not isinstance(error, CheckpointNotSavedError):
        return f"{error!r}"
    wrong = []
    if error.ranks != (victim,):
        wrong.append(f"blames {error.ranks}")
    if not error.path.startswith(str(root)):
        wrong.append(f"names the path {error.path}")
    if "[Errno" not in error.reason:
        wrong.append(f"gives the reason {error.reason}")
    if error.last_good_step not in {OLD, -1}:
        wrong.append(f"last good step {error.last_good_step}")
    # Only when undoing failed as well may the new one be there, and then all of it.
    if loaded not in {OLD, NEW}:
        wrong.append(f"loads step {loaded}")
    return ", ".join(wrong)
