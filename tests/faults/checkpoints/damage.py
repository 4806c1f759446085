"""Damage to every file of a checkpoint, one thing at a time: each must be found, or have changed nothing that is loaded.

Not here, because nothing in the files can tell: a whole directory put back as it was before, ``latest`` with it.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.checkpoints import sample
from faults.checkpoints.crash_points import NEW, OLD, settings_with
from faults.checkpoints.threads import in_threads
from megabucket.checkpoint.catalog import LATEST, StepDirectory
from megabucket.checkpoint.file_system import FileSystem
from megabucket.errors import CheckpointInvalidError, CheckpointMissingError


@dataclass(frozen=True, slots=True)
class Damage:
    """What became of each piece of damage.

    Args:
        found: by kind, how often an error named it.
        harmless: by kind, how often the right state was loaded all the same, bit for bit.
        failures: damage that was loaded, or that ended in another error than ours.
    """

    found: Counter[str]
    harmless: Counter[str]
    failures: tuple[str, ...]


class _Vandal:
    """Two checkpoints on the disk, and random damage to what the newest one needs."""

    def __init__(self, root: Path, draw: random.Random, size: int) -> None:
        self.root, self._draw = root, draw
        for step in (OLD, NEW):
            results = in_threads(
                size,
                lambda ranks, step=step: sample.save(root, step, ranks, settings_with(FileSystem(), keep_last=2)),  # type: ignore[misc]
            )
            if not all(isinstance(result, Path) for result in results):
                raise RuntimeError(f"cannot save: {results}")
        self._old, self._new = (root / StepDirectory(step).name for step in (OLD, NEW))
        self._targets = sorted([*self._new.iterdir(), root / LATEST])
        self._contents = {path: path.read_bytes() for path in self._targets}
        self.kinds: dict[str, Callable[[Path], None]] = {
            "flip": self._flip,
            "several bytes": self._several_bytes,
            "truncate": self._truncate,
            "extend": self._extend,
            "zero": self._zero,
            "delete": self._delete,
            "swap": self._swap,
            "copy of another file": self._copy_of_another,
            "copy of the old step": self._copy_of_old,
            "no regular file": self._no_regular_file,
        }

    def harm(self, kind: str) -> Path:
        """Do one thing to one file, and return which."""
        path = self._draw.choice(self._targets)
        self.kinds[kind](path)
        return path

    def mend(self) -> None:
        """Put everything back."""
        for path, contents in self._contents.items():
            if path.is_symlink() or not path.is_file() or path.read_bytes() != contents:
                self._gone(path)
                path.write_bytes(contents)

    def _gone(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def _write(self, path: Path, changed: bytes) -> None:
        path.write_bytes(changed)

    def _flip(self, path: Path) -> None:
        changed = bytearray(self._contents[path])
        changed[self._draw.randrange(len(changed))] ^= 1 << self._draw.randrange(8)
        self._write(path, bytes(changed))

    def _several_bytes(self, path: Path) -> None:
        changed = bytearray(self._contents[path])
        for _ in range(self._draw.randint(1, 8)):
            changed[self._draw.randrange(len(changed))] = self._draw.randrange(256)
        self._write(path, bytes(changed))

    def _truncate(self, path: Path) -> None:
        self._write(path, self._contents[path][: self._draw.randrange(len(self._contents[path]))])

    def _extend(self, path: Path) -> None:
        self._write(path, self._contents[path] + self._draw.randbytes(self._draw.randint(1, 40)))

    def _zero(self, path: Path) -> None:
        changed = bytearray(self._contents[path])
        start = self._draw.randrange(len(changed))
        stop = min(len(changed), start + self._draw.randint(1, 512))
        changed[start:stop] = bytes(stop - start)
        self._write(path, bytes(changed))

    def _delete(self, path: Path) -> None:
        path.unlink()

    def _swap(self, path: Path) -> None:
        other = self._draw.choice([one for one in self._targets if one != path])
        self._write(path, self._contents[other])
        self._write(other, self._contents[path])

    def _copy_of_another(self, path: Path) -> None:
        self._write(path, self._contents[self._draw.choice([one for one in self._targets if one != path])])

    def _copy_of_old(self, path: Path) -> None:
        """Put the file of the step before in its place; for ``latest``, one that names the other directory."""
        old = self._old / path.name
        if path.name == LATEST:
            self._write(path, self._contents[path].replace(self._new.name.encode(), self._old.name.encode()))
        else:
            shutil.copyfile(old, path)

    def _no_regular_file(self, path: Path) -> None:
        path.unlink()
        how = self._draw.randrange(3)
        if how == 0:
            path.mkdir()
        elif how == 1:
            os.mkfifo(path)
        else:
            path.symlink_to(self._old / path.name)


def run_damage(
    root: Path, num_cases: int, seed: int, *, size: int, report: Callable[[str], None], until: str | None = None
) -> Damage:
    """Damage a file, load, and put it back, ``num_cases`` times; the kinds take turns.

    Args:
        root: an empty directory.
        until: end with the first failure that says this.
    """
    draw = random.Random(f"damage {seed}")
    vandal = _Vandal(root, draw, size)
    found: Counter[str] = Counter()
    harmless: Counter[str] = Counter()
    failures = []
    for index in range(num_cases):
        kind = list(vandal.kinds)[index % len(vandal.kinds)]
        path = vandal.harm(kind)
        outcome = _outcome(root)
        vandal.mend()
        if outcome == "found":
            found[kind] += 1
        elif outcome == "harmless":
            harmless[kind] += 1
        else:
            failures.append(f"case {index}, {kind} of {path.name}: {outcome}")
            if until is not None and until in failures[-1]:
                break
        if (index + 1) % 2_000 == 0:
            report(f"{index + 1} cases, {len(failures)} failures")
    report(
        f"{num_cases} cases: {found.total()} found, {harmless.total()} changed nothing ({dict(harmless)}), "
        f"{len(failures)} undetected; by kind: {dict(found)}"
    )
    return Damage(found, harmless, tuple(failures))


def _outcome(root: Path) -> str:
    try:
        step = sample.loaded_step(root)
    except (CheckpointInvalidError, CheckpointMissingError):
        return "found"
    except Exception as error:  # whatever it is, it is what must not be
        return f"{type(error).__name__}: {error}"
    return "harmless" if step == NEW else f"step {step} was loaded"
