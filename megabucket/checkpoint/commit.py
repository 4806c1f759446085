"""Make a staged checkpoint appear, and old ones go: what one rank does once all have written.

Names in the root change by renames only, in an order that leaves a whole checkpoint behind ``latest`` wherever it stops:
the directory, then ``latest``, then what is old.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megabucket.checkpoint.catalog import LATEST, TEMPORARY, Latest, StepDirectory, read_latest, step_directories
from megabucket.checkpoint.file_system import FileSystem, attempt, reason_of, remove_tree, write_file
from megabucket.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredFile, StoredTensor, seal_of
from megabucket.checkpoint.pieces import Json, TensorInfo
from megabucket.checkpoint.plan import StoredRange
from megabucket.errors import InvariantError


class CheckpointWarning(UserWarning):
    """Something about checkpoints that does not stop the program: old ones that cannot be removed, a fallback."""


class RootDirectory:
    """The directory that checkpoints of one run are in; used by one process at a time, which holds the lock."""

    def __init__(self, root: Path, file_system: FileSystem) -> None:
        self._root, self._files = root, file_system

    def stage(self, step: int, names: Iterable[str]) -> Path:
        """Remove what dead saves have left, and return a new directory to write into.

        Args:
            names: what the root holds.
        """
        for name in names:
            if name.startswith(TEMPORARY):
                attempt(partial(remove_tree, self._files, self._root / name))
        staging = self._temporary(StepDirectory(step).name)
        self._files.make_directory(staging)
        return staging

    def publish(self, staging: Path, step: int, manifest: bytes, *, before: Latest | None) -> str:
        """Write the manifest, give the directory its name, and let ``latest`` say so; return the name.

        Args:
            before: what ``latest`` says now.

        Raises:
            OSError: a call failed. What was done is undone, as far as that is possible.
        """
        files, root = self._files, self._root
        write_file(files, staging / MANIFEST_NAME, manifest)
        files.sync_directory(staging)
        same_step = [directory for directory in step_directories(files, root) if directory.step == step]
        directory = StepDirectory(step, max((other.revision for other in same_step), default=0) + 1)
        files.rename(staging, root / directory.name)
        try:
            files.sync_directory(root)
            self._replace_latest(Latest(directory, seal_of(manifest)))
            files.sync_directory(root)
        except OSError:
            self._take_back(directory, staging, before)
            raise
        return directory.name

    def _take_back(self, directory: StepDirectory, staging: Path, before: Latest | None) -> None:
        """Undo a commit that did not get to its end, so that "not saved" is all there is to say.

        If that fails, too, what is left is a whole checkpoint: named by ``latest``, or by nothing.
        """
        try:
            now = latest_if_any(self._files, self._root)
        except OSError:
            return
        if now is not None and now.directory == directory:
            if before is None:
                is_undone = attempt(lambda: self._files.remove_file(self._root / LATEST))
            else:
                is_undone = attempt(lambda: self._replace_latest(before))
            if not is_undone:
                return  # a directory that ``latest`` names must stay
        attempt(lambda: self._files.rename(self._root / directory.name, staging))

    def _replace_latest(self, latest: Latest) -> None:
        temporary = self._temporary(LATEST)
        write_file(self._files, temporary, latest.encode())
        self._files.rename(temporary, self._root / LATEST)

    def remove_old(self, saved: str, *, keep_last: int) -> None:
        """Remove what is not kept, never ``saved`` nor anything of later steps. What cannot be removed is a warning."""
        current = StepDirectory.parse(saved)
        if current is None:
            raise InvariantError(f"{saved!r} is not a name of a checkpoint; please report this")
        older = [directory for directory in step_directories(self._files, self._root) if directory < current]
        steps = sorted({directory.step for directory in older if directory.step < current.step})
        kept = set(steps[max(0, len(steps) - (keep_last - 1)) :])
        for directory in older:
            if directory.step in kept:
                continue
            try:
                # Renamed first: a crash while its files are removed must not leave what looks like a checkpoint.
                gone = self._temporary(f"old-{directory.name}")
                self._files.rename(self._root / directory.name, gone)
                remove_tree(self._files, gone)
            except OSError as error:
                text = f"the old checkpoint {self._root / directory.name} cannot be removed: {reason_of(error)}"
                warnings.warn(text, CheckpointWarning, stacklevel=4)

    def _temporary(self, name: str) -> Path:
        return self._root / f"{TEMPORARY}{name}-{secrets.token_hex(8)}"


def latest_if_any(files: FileSystem, root: Path) -> Latest | None:
    """Return what ``latest`` says; nothing when it is not there, or says nothing that can be understood.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return read_latest(files, root)
    except (FileNotFoundError, ValueError):
        return None


def merge_reports(step: int, num_writers: int, reports: Sequence[Mapping[str, Any]], values: Mapping[str, Json]) -> Manifest:
    """Return the manifest of what all ranks have written.

    Raises:
        ValueError: ranks describe a tensor differently.
    """
    files: list[StoredFile] = []
    infos: dict[str, TensorInfo] = {}
    ranges: dict[str, list[StoredRange]] = {}
    for rank, report in enumerate(reports):
        first = len(files)
        files.extend(StoredFile(*fields) for fields in report["files"])
        for name, fields in report["tensors"].items():
            info = TensorInfo(name, fields["dtype"], tuple(fields["shape"]), tuple(fields["order"]))
            if infos.setdefault(name, info) != info:
                raise ValueError(f"{name!r} is {info} on rank {rank} and {infos[name]} on a rank before it")
            parts = (StoredRange(first + index, start, stop) for index, start, stop in fields["pieces"])
            ranges.setdefault(name, []).extend(parts)
    tensors = {
        name: StoredTensor(info, tuple(sorted(ranges[name], key=lambda part: part.start)))
        for name, info in sorted(infos.items())
    }
    return Manifest(step, num_writers, tuple(files), tensors, values)
