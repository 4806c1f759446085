"""Save one checkpoint on all ranks, or on none: stage, write, vote, rename.

::

    every rank   begin ----- write ------------- vote ----- publish -------------------------------- conclude
    rank 0       lock, stage                                manifest, fsync, rename, latest, remove old
    exchange            ^                          ^                                                    ^
                        plans, space               what each rank wrote                                 it is there

``begin``, ``vote`` and ``conclude`` are collective; ``write`` and ``publish`` are not, and may run in another thread.
Whatever fails on a rank is said in the next exchange, so all ranks raise the same error and nothing is committed. A process
may die at any call: what was committed before is never touched, and a name appears in the root only for a whole checkpoint.

In the background, a thread writes, hashes, waits for the disk, renames and removes; the exchanges are made by ``save``,
``poll`` and ``close`` of ``BackgroundWriter``, which every rank calls at the same places. So no collective of a save can ever
meet one of training in another order on another rank.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megabucket.checkpoint.catalog import LOCK, MAX_STEP, Latest, RootDirectory, StepDirectory, latest_if_any
from megabucket.checkpoint.data_files import DEFAULT_FILE_BYTES, Content, content_of
from megabucket.checkpoint.file_system import FileSystem, attempt, reason_of, remove_tree
from megabucket.checkpoint.format import (
    Manifest,
    Snapshot,
    StoredBlock,
    StoredFile,
    StoredRange,
    TensorInfo,
    encode_manifest,
    json_text,
)
from megabucket.checkpoint.ranks import Ranks, as_error, written
from megabucket.errors import CheckpointNotSavedError, MegabucketError

WhenBusy = Literal["wait", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How checkpoints are saved.

    Args:
        keep_last: how many are kept, counting the one that is saved; None keeps all. Those of later steps (before a
            rollback) are neither counted nor removed.
        key: sign manifests with it.
        overwrite: a step that ``latest`` names or that is older may be saved again; the old one is there until the new one is.
    """

    keep_last: int | None = 2
    max_file_bytes: int = DEFAULT_FILE_BYTES
    key: bytes | None = field(default=None, repr=False)
    overwrite: bool = False
    file_system: FileSystem = field(default_factory=FileSystem)

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}; the checkpoint just saved is one to keep")


def save_snapshot(root: Path | str, step: int, snapshot: Snapshot, ranks: Ranks, settings: SaveSettings | None = None) -> Path:
    """Save what every rank gives, and return the directory; a collective.

    Args:
        root: one directory that every rank can reach.

    Raises:
        CheckpointNotSavedError: something failed on some rank. Nothing was committed, and every rank raises this.
    """
    settings = settings or SaveSettings()
    return Save(Path(root), step, ranks, settings).run(lambda: content_of(snapshot, ranks, settings.max_file_bytes))


class Save:
    """One save: ``begin``, ``write``, ``vote``, ``publish``, ``conclude`` in this order, and ``release`` in any case."""

    def __init__(self, root: Path, step: int, ranks: Ranks, settings: SaveSettings) -> None:
        self._root, self._ranks, self._settings, self.step = root, ranks, settings, step
        self._files = settings.file_system
        self._root_directory = RootDirectory(root, settings.file_system)
        self._lock: int | None = None
        self._staging = root
        self._latest: Latest | None = None
        self._last_good_step = -1
        self._content = Content({}, 0, (), lambda _file_system, _directory: [])
        self._written: list[StoredFile] = []
        self._reports: Sequence[Mapping[str, Any]] = ()
        self._published: StepDirectory | None = None
        self._failure: Exception | None = None

    def run(self, take: Callable[[], Content]) -> Path:
        """Do all of it, and return the directory; a collective, which raises what its parts raise."""
        try:
            self.begin(take)
            self.write()
            self.vote()
            self.publish()
            return self.conclude()
        finally:
            self.release()

    def begin(self, take: Callable[[], Content]) -> None:
        """Take what is to be saved, check all that can be checked, and make the staging directory; a collective.

        Raises:
            CheckpointNotSavedError: some rank cannot save, or the ranks do not want to save the same.
            MegabucketError: what ``take`` has raised on some rank.
        """
        facts = self._agree(lambda: self._plan(take), keeps_errors=True)
        self._staging = self._root / facts[0]["staging"]
        for rank, other in enumerate(facts):
            for what in ("step", "world_size", "values"):
                if other[what] != facts[0][what]:
                    self._give_up([rank], self._root, f"its {what} {other[what]} and that of rank 0 {facts[0][what]} differ")
        needed, free = sum(other["needs"] for other in facts), min(other["free"] for other in facts)
        if needed > free:
            short = next(rank for rank, other in enumerate(facts) if other["free"] == free)
            self._give_up([short], self._root, f"{needed} bytes are needed and {free} are free")

    def write(self) -> None:
        """Write this rank's files. What fails is kept for ``vote``."""
        try:
            self._written = self._content.write(self._files, self._staging)
        except FileNotFoundError as error:
            hint = "the directory that rank 0 made is not there: do all ranks see the same file system?"
            self._failure = OSError(error.errno, f"{error.strerror}; {hint}", error.filename)
        except Exception as error:  # a thread has nobody to raise to
            self._failure = error

    def vote(self) -> None:
        """Hear whether every rank has written its part; a collective.

        Raises:
            CheckpointNotSavedError: some rank could not.
        """
        self._reports = self._agree(self._report)

    def publish(self) -> None:
        """Make the checkpoint appear, and old ones go, if this is rank 0. What fails is kept for ``conclude``."""
        if self._ranks.rank != 0:
            return
        try:
            manifest = merge_reports(self.step, self._content, self._reports)
            raw = encode_manifest(manifest, key=self._settings.key)
            self._published = self._root_directory.publish(self._staging, self.step, raw, before=self._latest)
        except Exception as error:  # a thread has nobody to raise to
            self._failure = error
            return
        if self._settings.keep_last is not None:
            self._root_directory.remove_old(self._published, keep_last=self._settings.keep_last)

    def conclude(self) -> Path:
        """Hear whether the checkpoint is there, and return its directory; a collective.

        Raises:
            CheckpointNotSavedError: rank 0 could not commit it.
        """
        names = self._agree(lambda: self._published.name if self._published is not None else "")
        self.release()
        return self._root / str(names[0])

    def release(self) -> None:
        """Let go of the lock, if this rank holds it."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            attempt(lambda: self._files.unlock(lock))

    def __del__(self) -> None:
        """Let go of the lock of a save that was begun and forgotten, after an error perhaps."""
        self.release()

    # What each rank says, and what all conclude

    def _agree(self, act: Callable[[], Any], *, keeps_errors: bool = False) -> list[Any]:
        """Return what ``act`` gave on each rank, or raise the same error on all if it failed on any.

        Args:
            keeps_errors: whether an error of this library is raised as it is.
        """
        said: dict[str, Any] = {}
        own: Exception | None = None
        try:
            if self._failure is not None:
                raise self._failure  # noqa: TRY301 - said as what act() raises
            said["facts"] = act()
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            own = error
            path = error.filename if isinstance(error, OSError) else None
            said["failure"] = [str(path or self._staging), reason_of(error)]
            if keeps_errors and isinstance(error, MegabucketError):
                said["error"] = written(error, self._ranks.rank)
        said["last_good_step"] = self._last_good_step
        heard = [json.loads(payload) for payload in self._ranks.exchange(json.dumps(said).encode())]
        self._last_good_step = heard[0]["last_good_step"]
        failed = [rank for rank, other in enumerate(heard) if "failure" in other]
        if failed and "error" in heard[failed[0]]:
            self.discard()
            raise as_error(heard[failed[0]]["error"]) from own
        if failed:
            self._give_up(failed, *heard[failed[0]]["failure"])
        return [other["facts"] for other in heard]

    def _give_up(self, ranks: Sequence[int], path: Path | str, reason: str) -> None:
        """Remove what was staged and raise; only called when no rank writes any more."""
        self.discard()
        raise CheckpointNotSavedError(
            step=self.step, ranks=ranks, path=str(path), reason=reason, last_good_step=self._last_good_step
        )

    def discard(self) -> None:
        """Remove the staging directory, as far as that is possible, and let go of the lock."""
        if self._ranks.rank == 0:
            if self._staging != self._root:
                attempt(lambda: remove_tree(self._files, self._staging))
            self.release()

    def _plan(self, take: Callable[[], Content]) -> dict[str, Any]:
        self._files.make_root(self._root)  # whoever comes first
        if self._ranks.rank == 0:
            self._stage()
        if type(self.step) is not int or not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step {self.step!r} is not a whole number from 0 to {MAX_STEP}")
        self._content = content = take()
        return {
            "staging": self._staging.name,
            "step": self.step,
            "world_size": content.num_writers,
            "values": hashlib.sha256(json_text(content.values, sort_keys=True).encode()).hexdigest()[:16],
            "needs": content.bytes_bound,
            "free": self._files.free_bytes(self._root),
        }

    def _stage(self) -> None:
        root, files = self._root, self._files
        self._latest = latest_if_any(files, root)
        self._last_good_step = self._latest.directory.step if self._latest is not None else -1
        try:
            self._lock = files.lock(root / LOCK)
        except BlockingIOError:
            raise ValueError("another save into this directory is going on") from None
        names = files.names(root)
        is_saved = any(found is not None and found.step == self.step for found in map(StepDirectory.parse, names))
        if is_saved and self.step <= self._last_good_step and not self._settings.overwrite:
            raise ValueError(f"step {self.step} is saved already; overwrite=True saves it again")
        self._staging = self._root_directory.stage(self.step, names)

    def _report(self) -> dict[str, Any]:
        parts = []
        for index, file in enumerate(self._content.files):
            for part in file.parts:
                info = part.info
                fields = [info.name, info.dtype, info.shape, info.order, info.offset, info.global_shape, info.group]
                parts.append([fields, index, part.start, part.stop])
        return {"files": [[file.name, file.num_bytes, file.sha256] for file in self._written], "parts": parts}


def merge_reports(step: int, content: Content, reports: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return the manifest of what all ranks have written.

    Raises:
        ValueError: ranks describe a tensor differently.
    """
    files: list[StoredFile] = []
    infos: dict[str, TensorInfo] = {}
    ranges: dict[TensorInfo, list[StoredRange]] = {}
    for rank, report in enumerate(reports):
        first = len(files)
        files.extend(StoredFile(*fields) for fields in report["files"])
        for fields, index, start, stop in report["parts"]:
            name, dtype, shape, order, offset, whole, group = fields
            info = TensorInfo(name, dtype, tuple(shape), tuple(order), tuple(offset), tuple(whole), group)
            earlier = infos.setdefault(name, info)
            if info != earlier and (info.whole != earlier.whole or info.box == earlier.box):
                raise ValueError(f"{name!r} is {info} on rank {rank} and {earlier} on a rank before it")
            ranges.setdefault(info, []).append(StoredRange(first + index, start, stop))
    tensors: dict[str, tuple[StoredBlock, ...]] = dict.fromkeys(sorted(infos), ())
    for info, parts in sorted(ranges.items(), key=lambda item: item[0].offset):
        tensors[info.name] += (StoredBlock(info, tuple(sorted(parts, key=lambda part: part.start))),)
    return Manifest(step, content.num_writers, tuple(files), tensors, content.values)


class BackgroundWriter:
    """Saves one checkpoint at a time in the background; all methods are collective.

    Args:
        when_busy: what ``save`` does while the one before is being written: wait for it, or skip this one.
    """

    def __init__(self, root: Path | str, ranks: Ranks, settings: SaveSettings, *, when_busy: WhenBusy = "wait") -> None:
        if when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy is {when_busy!r}, and can be 'wait' or 'skip'")
        self._root, self._ranks, self._settings, self._when_busy = Path(root), ranks, settings, when_busy
        self._save: Save | None = None
        self._is_voted = False
        self._thread: threading.Thread | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved, or None."""
        return self._save.step if self._save is not None else None

    def save(self, step: int, take: Callable[[], Snapshot], *, overwrite: bool = False) -> bool:
        """Begin to save, and return whether it was begun: not when another is under way and this one is skipped.

        Args:
            take: gives the values as they are now, in memory that nobody else writes until the save is done. Called
                only if the save is begun; no collective.
            overwrite: whether a step that was saved already may be saved again, also where the settings say no.

        Raises:
            CheckpointNotSavedError: of the save before, which is over then and can be made anew, or of this one.
            MegabucketError: what ``take`` has raised on some rank.
        """
        is_writing = self._save is not None and not self._is_voted
        if is_writing and self._when_busy == "skip" and not self._is_over_everywhere():
            return False
        self.close()
        settings = replace(self._settings, overwrite=overwrite or self._settings.overwrite)
        save = Save(self._root, step, self._ranks, settings)
        try:
            save.begin(lambda: content_of(take(), self._ranks, settings.max_file_bytes))
        except BaseException:
            save.release()
            raise
        self._save, self._is_voted = save, False
        self._do(save.write)
        return True

    def _do(self, act: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=act, name="megabucket-save", daemon=True)
        self._thread.start()

    def poll(self) -> Path | None:
        """Go on with the save that is under way as far as that takes no waiting; return its directory once it is committed.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        path = None
        while self._save is not None and self._is_over_everywhere():
            path = self._go_on(self._save)
        return path

    def close(self) -> Path | None:
        """Wait for the save that is under way, commit it, and return its directory.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        path = None
        while self._save is not None:
            path = self._go_on(self._save)
        return path

    def _is_over_everywhere(self) -> bool:
        is_busy = self._thread is not None and self._thread.is_alive()
        return all(said == b"0" for said in self._ranks.exchange(b"1" if is_busy else b"0"))

    def _go_on(self, save: Save) -> Path | None:
        """Take the next step of a save: the vote when this rank has written, its end when all is done."""
        if self._thread is not None:
            self._thread.join()  # interrupted here, the save stays under way: the thread goes on with it
        try:
            if self._is_voted:
                path = save.conclude()
                self._forget(save)
                return path
            save.vote()
        except BaseException:
            self._forget(save)
            raise
        self._is_voted = True
        self._do(save.publish)
        return None

    def _forget(self, save: Save) -> None:
        save.release()
        self._save = self._thread = None
