"""The directory of a run's checkpoints: list them, read ``latest``, commit a new one, remove old ones. No torch.

::

    <root>/latest                "step-00000120 <seal of its manifest>", replaced atomically
    <root>/step-00000120/        one checkpoint, never written into again
    <root>/step-00000120.2/      the same step saved once more; the highest number counts
    <root>/.tmp-...              a save that is running, or that died
    <root>/.lock                 held during a save

``latest`` repeats the seal, so a damaged ``latest`` cannot name another checkpoint unnoticed. Names in the root change by
renames only, in an order that leaves a whole checkpoint behind ``latest`` at every moment: the directory, then ``latest``, then
old directories.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megabucket.checkpoint.file_system import FileSystem, read_file, reason_of
from megabucket.checkpoint.format import MANIFEST_NAME, seal_of
from megabucket.errors import log_once

LATEST: Final = "latest"
LOCK: Final = ".lock"
TEMPORARY: Final = ".tmp-"
MAX_STEP: Final = 10**15 - 1
_STEP: Final = re.compile(r"step-([0-9]{8,15})(?:\.([1-9][0-9]{0,8}))?")
_LATEST: Final = re.compile(r"(step-[0-9.]{8,40}) ([0-9a-f]{64})\n")
_MAX_LATEST_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, order=True)
class StepDirectory:
    """The directory of one checkpoint; it sorts by step, then by revision."""

    step: int
    revision: int = 1

    @property
    def name(self) -> str:
        """Its name in the root."""
        return f"step-{self.step:08d}" + (f".{self.revision}" if self.revision > 1 else "")

    @classmethod
    def parse(cls, name: str) -> StepDirectory | None:
        """Return the directory of a name, or None if it is not the one way to write such a name."""
        match = _STEP.fullmatch(name)
        found = cls(int(match[1]), int(match[2] or 1)) if match else None
        return found if found is not None and found.name == name else None


@dataclass(frozen=True, slots=True)
class Latest:
    """The contents of ``latest``."""

    directory: StepDirectory
    seal: str

    def encode(self) -> bytes:
        """Return the contents of the file."""
        return f"{self.directory.name} {self.seal}\n".encode("ascii")


def read_latest(root: Path) -> Latest:
    """Return the contents of ``latest``.

    Raises:
        OSError: it cannot be read.
        ValueError: it names no checkpoint.
    """
    match = _LATEST.fullmatch(str(read_file(root / LATEST, _MAX_LATEST_BYTES), "ascii", errors="replace"))
    directory = StepDirectory.parse(match[1]) if match else None
    if match is None or directory is None:
        raise ValueError("it does not name a checkpoint")
    return Latest(directory, match[2])


def latest_if_any(root: Path) -> Latest | None:
    """Return the contents of ``latest``; None if it does not exist or names no checkpoint.

    Raises:
        OSError: it exists and cannot be read.
    """
    try:
        return read_latest(root)
    except (FileNotFoundError, ValueError):
        return None


def step_directories(root: Path) -> list[StepDirectory]:
    """Return the checkpoints by their names, oldest first; none if there is no such root."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(directory for directory in map(StepDirectory.parse, names) if directory is not None)


def saved_steps(root: Path, *, but: StepDirectory | None = None) -> tuple[int, ...]:
    """Return the steps of the checkpoints, by their names, except for one directory."""
    try:
        return tuple(sorted({directory.step for directory in step_directories(root) if directory != but}))
    except OSError:
        return ()  # this is for texts of errors, which must not fail


class RootDirectory:
    """The directory with the checkpoints of one run. Only the process that holds the lock changes it."""

    def __init__(self, root: Path, file_system: FileSystem) -> None:
        self._root, self._files = root, file_system

    def stage(self, step: int) -> Path:
        """Remove the remains of dead saves, and return a new directory to write into."""
        for path in sorted(self._root.glob(f"{TEMPORARY}*")):
            with suppress(OSError):
                self._files.remove_tree(path)
        staging = self._temporary(StepDirectory(step).name)
        self._files.call(os.mkdir, staging)
        return staging

    def publish(self, staging: Path, step: int, manifest: bytes, *, before: Latest | None) -> StepDirectory:
        """Write the manifest, give the directory its name, and let ``latest`` name it; return the directory.

        Args:
            before: the contents of ``latest`` now.

        Raises:
            OSError: a call failed. The steps before it are undone, as far as possible.
        """
        files, root = self._files, self._root
        files.write_file(staging / MANIFEST_NAME, [manifest])
        files.sync_directory(staging)
        revisions = [other.revision for other in step_directories(root) if other.step == step]
        directory = StepDirectory(step, max(revisions, default=0) + 1)
        files.call(os.rename, staging, root / directory.name)
        try:
            files.sync_directory(root)
            self._replace_latest(Latest(directory, seal_of(manifest)))
            files.sync_directory(root)
        except OSError:
            with suppress(OSError):
                self._take_back(directory, staging, before)
            raise
        return directory

    def _take_back(self, directory: StepDirectory, staging: Path, before: Latest | None) -> None:
        """Undo an incomplete commit, so that "not saved" is true.

        If that fails as well, a whole checkpoint is left, with or without ``latest``. So ``latest`` comes first.
        """
        now = latest_if_any(self._root)
        if now is not None and now.directory == directory:
            if before is None:
                self._files.call(os.unlink, self._root / LATEST)
            else:
                self._replace_latest(before)
        self._files.call(os.rename, self._root / directory.name, staging)

    def _replace_latest(self, latest: Latest) -> None:
        temporary = self._temporary(LATEST)
        self._files.write_file(temporary, [latest.encode()])
        self._files.call(os.rename, temporary, self._root / LATEST)

    def remove_old(self, saved: StepDirectory, *, keep_last: int) -> None:
        """Remove old checkpoints, never ``saved`` nor later steps. A directory that cannot be removed is a warning."""
        try:
            older = [directory for directory in step_directories(self._root) if directory < saved]
        except OSError as error:  # the new checkpoint is committed, so nothing may fail any more
            log_once(f"the old checkpoints in {self._root} cannot be listed: {reason_of(error)}")
            return
        steps = sorted({directory.step for directory in older if directory.step < saved.step})
        kept = set(steps[max(0, len(steps) - (keep_last - 1)) :])
        for directory in older:
            if directory.step in kept:
                continue
            try:
                # Renamed first: a crash while its files are removed must not leave a directory with the name of a checkpoint.
                gone = self._temporary(f"old-{directory.name}")
                self._files.call(os.rename, self._root / directory.name, gone)
                self._files.remove_tree(gone)
            except OSError as error:
                log_once(f"the old checkpoint {self._root / directory.name} cannot be removed: {reason_of(error)}")

    def _temporary(self, name: str) -> Path:
        return self._root / f"{TEMPORARY}{name}-{secrets.token_hex(8)}"
