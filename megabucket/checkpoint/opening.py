"""Find and open a checkpoint: the newest, one by its step, or an older one if that is allowed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megabucket.checkpoint.catalog import (
    LATEST,
    Latest,
    StepDirectory,
    read_latest,
    read_manifest,
    step_directories,
    whole_steps,
)
from megabucket.checkpoint.commit import CheckpointWarning
from megabucket.checkpoint.file_system import FileSystem, reason_of
from megabucket.checkpoint.manifest import MANIFEST_NAME
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.errors import CheckpointError, CheckpointInvalidError, CheckpointMissingError


def open_checkpoint(
    root: Path | str,
    step: Literal["latest"] | int = "latest",
    *,
    key: bytes | None = None,
    allow_fallback: bool = False,
    file_system: FileSystem | None = None,
) -> StoredCheckpoint:
    """Return a checkpoint whose manifest is whole and whose files are all there; their contents are verified when read.

    Local: ranks that open for themselves may see different things when a disk fails on one of them. Let one rank open
    and the others name its step.

    Args:
        key: demand a signature made with it.
        allow_fallback: verify all of it first, and take the newest older checkpoint that is whole if this one is not;
            warns when it does.

    Raises:
        CheckpointMissingError: there is none.
        CheckpointInvalidError: it is damaged, and no other may be taken or none is whole.
    """
    opener = _Opener(Path(root), key, file_system or FileSystem())
    if not allow_fallback:
        return opener.newest() if step == "latest" else opener.of_step(step)
    return opener.newest_whole(step)


def open_at(path: Path, *, step: int | None = None, key: bytes | None = None) -> StoredCheckpoint:
    """Return the checkpoint that a user means by a path: a run's root (its newest, or ``step``), or one of its directories.

    Raises:
        CheckpointError: see ``open_checkpoint``.
    """
    # Not resolved: what is named must be a directory itself, as everywhere.
    directory = StepDirectory.parse(path.absolute().name)
    if directory is None or step is not None:
        return open_checkpoint(path, "latest" if step is None else step, key=key)
    return _Opener(path.absolute().parent, key, FileSystem()).exactly(directory)


class _Opener:
    def __init__(self, root: Path, key: bytes | None, file_system: FileSystem) -> None:
        self._root, self._key, self._files = root, key, file_system

    def newest(self) -> StoredCheckpoint:
        latest = self._latest()
        while True:
            try:
                stored = self._open(latest.directory)
                break
            except CheckpointError:
                # A save may have replaced and removed it since ``latest`` was read.
                again = self._latest()
                if again == latest:
                    raise
                latest = again
        if stored.seal != latest.seal:
            raise self._invalid(
                self._root, LATEST, f"it names {latest.directory.name} with another seal: one of the two was changed", None
            )
        return stored

    def of_step(self, step: int) -> StoredCheckpoint:
        directories = [directory for directory in step_directories(self._files, self._root) if directory.step == step]
        if not directories:
            raise self._missing(f"step {step}")
        return self._open(directories[-1])

    def exactly(self, directory: StepDirectory) -> StoredCheckpoint:
        return self._open(directory)

    def newest_whole(self, step: Literal["latest"] | int) -> StoredCheckpoint:
        problems: list[CheckpointError] = []
        for candidate in self._candidates(step, problems):
            try:
                stored = self._open(candidate)
                stored.verify()
            except CheckpointError as error:
                problems.append(error)
                continue
            if problems:
                warnings.warn(
                    f"falling back to the checkpoint of step {stored.step} ({stored.path}): {problems[0]}",
                    CheckpointWarning,
                    stacklevel=3,
                )
            return stored
        raise problems[0] if problems else self._missing(str(step))

    def _candidates(self, step: Literal["latest"] | int, problems: list[CheckpointError]) -> Iterator[StepDirectory]:
        directories = step_directories(self._files, self._root)[::-1]
        if step != "latest":
            if not any(directory.step == step for directory in directories):
                problems.append(self._missing(f"step {step}"))
            yield from (directory for directory in directories if directory.step <= step)
            return
        try:
            first = self._latest().directory
        except CheckpointError as error:
            problems.append(error)  # nobody can say which are of an abandoned run
            yield from directories
            return
        try:
            self.newest()
        except CheckpointError as error:
            problems.append(error)
        yield from (directory for directory in directories if directory <= first)

    def _latest(self) -> Latest:
        try:
            return read_latest(self._files, self._root)
        except FileNotFoundError:
            raise self._missing(f"{LATEST!r}, which is not there") from None
        except (OSError, ValueError) as error:
            raise self._invalid(self._root, LATEST, str(error), None) from None

    def _open(self, directory: StepDirectory) -> StoredCheckpoint:
        path = self._root / directory.name
        try:
            names = set(self._files.names(path))
        except FileNotFoundError:
            raise self._missing(directory.name) from None
        except OSError as error:
            raise self._invalid(path, ".", f"the directory cannot be read: {reason_of(error)}", directory) from None
        try:
            sealed = read_manifest(self._files, path, directory, key=self._key)
        except FileNotFoundError:
            raise self._invalid(path, MANIFEST_NAME, "it is missing", directory) from None
        except OSError as error:
            problem = f"it cannot be read: {reason_of(error)}"
            raise self._invalid(path, MANIFEST_NAME, problem, directory) from None
        except ValueError as error:
            raise self._invalid(path, MANIFEST_NAME, str(error), directory) from None
        missing = [file.name for file in sealed.manifest.files if file.name not in names]
        if missing:
            problem = "it is missing" if len(missing) == 1 else f"it and {len(missing) - 1} other files are missing"
            raise self._invalid(path, missing[0], problem, directory)
        return StoredCheckpoint(self._root, directory, sealed, self._files)

    def _missing(self, wanted: str) -> CheckpointMissingError:
        return CheckpointMissingError(root=str(self._root), wanted=wanted, steps=whole_steps(self._files, self._root))

    def _invalid(self, path: Path, file: str, problem: str, but: StepDirectory | None) -> CheckpointInvalidError:
        steps = whole_steps(self._files, self._root, but=but)
        return CheckpointInvalidError(path=str(path), file=file, problem=problem, steps=steps)
