"""Save one checkpoint on all ranks, or on none: stage, write, vote, rename.

::

    every rank   plan ------- write ------------- vote ----- publish -------------------------------- end
    rank 0       lock, stage                                 manifest, fsync, rename, latest, remove old
    exchange            ^                           ^                                                  ^
                        plans, space                what each rank wrote                               it is there

Writing and publishing are no collectives, and may run in another thread. Whatever fails on a rank is reported in the next
exchange, so all ranks raise the same error and nothing is committed. A process may die at any call: what was committed before
is never touched, and a name appears in the root only for a whole checkpoint.

In the background, a thread writes, hashes, waits for the disk, renames and removes; the exchanges are made by ``save``,
``poll`` and ``close`` of ``BackgroundWriter``, which every rank calls at the same places. So no collective of a save can ever
meet one of training in another order on another rank.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megabucket.checkpoint.catalog import (
    LOCK,
    MAX_STEP,
    Latest,
    RootDirectory,
    latest_if_any,
    step_directories,
)
from megabucket.checkpoint.data_files import DEFAULT_FILE_BYTES, Content, content_of
from megabucket.checkpoint.file_system import FileSystem, free_bytes, lock, reason_of, remove_tree, unlock
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
from megabucket.checkpoint.ranks import Ranks, gather_results
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
    """One save, which ``run`` does at once; ``works`` lets another thread do what is no collective."""

    def __init__(self, root: Path, step: int, ranks: Ranks, settings: SaveSettings) -> None:
        self._root, self._ranks, self._settings, self.step = root, ranks, settings, step
        self.path = root
        """The directory of the checkpoint, when it is there."""
        self._root_directory = RootDirectory(root, settings.file_system)
        self._lock: int | None = None
        self._staging = root
        self._latest: Latest | None = None
        self._content = Content({}, 0, {})
        self._written: list[StoredFile] = []
        self._failure: Exception | None = None

    def run(self, content: Callable[[], Content]) -> Path:
        """Do all of it, and return the directory; a collective, which raises what ``works`` raises."""
        for work in self.works(content):
            work()
        return self.path

    def works(self, content: Callable[[], Content]) -> Iterator[Callable[[], None]]:
        """Give, one after the other, the two calls that make the save and may run in another thread.

        Asking for the next one, and for the end behind them, is collective. What fails in a call is raised there.

        Raises:
            CheckpointNotSavedError: some rank cannot save, or the ranks do not want to save the same. Nothing was committed.
            MegabucketError: what ``content`` has raised on some rank.
        """
        try:
            plans = self._agree(lambda: self._plan(content))
            self._staging = self._root / plans[0]["staging"]
            self._check(plans)
            yield self._kept(self._write)
            reports = self._agree(self._report)
            yield self._kept(lambda: self._publish(reports))
            self.path = self._root / str(self._agree(lambda: self.path.name)[0])
        except MegabucketError:
            if self._ranks.rank == 0 and self._staging != self._root:
                with suppress(OSError):  # the next save removes what is left
                    remove_tree(self._settings.file_system, self._staging)
            raise
        finally:
            if self._lock is not None:
                with suppress(OSError):
                    unlock(self._lock)

    def _plan(self, content: Callable[[], Content]) -> dict[str, Any]:
        """Take what is to be saved; if this is rank 0, take the lock and make the staging directory."""
        if self._ranks.rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
        self._latest = latest_if_any(self._root)
        if type(self.step) is not int or not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step {self.step!r} is not a whole number from 0 to {MAX_STEP}")
        if self._ranks.rank == 0:
            try:
                self._lock = lock(self._root / LOCK)
            except BlockingIOError:
                raise ValueError("another save into this directory is going on") from None
            is_saved = any(found.step == self.step for found in step_directories(self._root))
            if is_saved and self.step <= self._last_good_step and not self._settings.overwrite:
                raise ValueError(f"step {self.step} is saved already; overwrite=True saves it again")
            self._staging = self._root_directory.stage(self.step)
        self._content = content()
        values = hashlib.sha256(json_text(self._content.values, sort_keys=True).encode()).hexdigest()[:16]
        return {
            "staging": self._staging.name,
            "same": {"step": self.step, "world_size": self._content.num_writers, "values": values},
            "needs": self._content.num_bytes,
            "free": free_bytes(self._root) if self._root.exists() else 2**62,  # it may be made at this moment, or be elsewhere
        }

    def _check(self, plans: Sequence[Mapping[str, Any]]) -> None:
        for rank, plan in enumerate(plans):
            for what, own in plan["same"].items():
                if own != plans[0]["same"][what]:
                    reason = f"its {what} {own} and that of rank 0 {plans[0]['same'][what]} differ"
                    raise self._not_saved(reason, rank=rank, path=self._root)
        needed, free = sum(plan["needs"] for plan in plans), [plan["free"] for plan in plans]
        if needed > min(free):
            reason = f"{needed} bytes are needed and {min(free)} are free"
            raise self._not_saved(reason, rank=free.index(min(free)), path=self._root)

    def _write(self) -> None:
        self._written = self._content.write(self._settings.file_system, self._staging)

    def _report(self) -> list[Any]:
        indices = enumerate(self._content.files.values())
        parts = [[astuple(piece.info), index, piece.start, piece.stop] for index, pieces in indices for piece in pieces]
        return [[astuple(file) for file in self._written], parts]

    def _publish(self, reports: Sequence[Any]) -> None:
        """Make the checkpoint appear, and old ones go, if this is rank 0."""
        if self._ranks.rank == 0:
            raw = encode_manifest(merge_reports(self.step, self._content, reports), key=self._settings.key)
            published = self._root_directory.publish(self._staging, self.step, raw, before=self._latest)
            self.path = self._root / published.name
            if self._settings.keep_last is not None:
                self._root_directory.remove_old(published, keep_last=self._settings.keep_last)

    def _kept(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return a call that keeps its error for the next exchange: a thread has nobody to raise to."""

        def call() -> None:
            try:
                act()
            except FileNotFoundError as error:
                hint = "the staging directory is gone: do all ranks see one file system, where nothing else removes files?"
                self._failure = OSError(error.errno, f"{error.strerror}; {hint}", error.filename)
            except Exception as error:
                self._failure = error

        return call

    def _agree(self, act: Callable[[], Any]) -> list[Any]:
        """Return what ``act`` gave on each rank, or raise the same error on all if it, or what came before, failed."""

        def guarded() -> Any:
            try:
                if self._failure is not None:
                    raise self._failure  # noqa: TRY301 - reported as what act() raises
                return act()
            except Exception as error:  # whatever it is, the other ranks wait for the report
                if isinstance(error, MegabucketError) and error is not self._failure:
                    raise
                path = error.filename if isinstance(error, OSError) else None
                raise self._not_saved(reason_of(error), rank=self._ranks.rank, path=path) from error

        return gather_results(self._ranks, guarded)

    @property
    def _last_good_step(self) -> int:
        return self._latest.directory.step if self._latest is not None else -1

    def _not_saved(self, reason: str, *, rank: int, path: Path | str | None) -> CheckpointNotSavedError:
        where, last = str(path or self._staging), self._last_good_step
        return CheckpointNotSavedError(step=self.step, ranks=[rank], path=where, reason=reason, last_good_step=last)


def merge_reports(step: int, content: Content, reports: Sequence[Any]) -> Manifest:
    """Return the manifest of what all ranks have written.

    Raises:
        ValueError: ranks describe a tensor differently, or do not write each of its elements once.
    """
    files: list[StoredFile] = []
    wholes: dict[str, TensorInfo] = {}
    ranges: dict[TensorInfo, list[StoredRange]] = {}
    for written, parts in reports:
        first = len(files)
        files.extend(StoredFile(*fields) for fields in written)
        for fields, index, start, stop in parts:
            known: Any = [tuple(field) if isinstance(field, list) else field for field in fields]
            info = TensorInfo(*known)
            if wholes.setdefault(info.name, info.whole) != info.whole:
                raise ValueError(f"{info.name!r} is {info.whole} on one rank and {wholes[info.name]} on another")
            ranges.setdefault(info, []).append(StoredRange(first + index, start, stop))
    tensors: dict[str, tuple[StoredBlock, ...]] = dict.fromkeys(sorted(wholes), ())
    for info, found in sorted(ranges.items(), key=lambda item: item[0].offset):
        in_order = tuple(sorted(found, key=lambda part: part.start))
        stops = [0, *(part.stop for part in in_order)]
        if [*(part.start for part in in_order), info.numel] != stops:
            raise ValueError(f"the pieces of {info.key!r} do not hold each of its {info.numel} elements once: {in_order}")
        tensors[info.name] += (StoredBlock(info, in_order),)
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
        self._works: Iterator[Callable[[], None]] = iter(())
        self._thread: threading.Thread | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved, or None."""
        return self._save.step if self._save is not None else None

    def save(self, step: int, take: Callable[[], Snapshot], *, overwrite: bool = False) -> bool:
        """Begin to save, and return whether it was begun: not when another is under way and this one is skipped.

        Args:
            take: gives the values as they are now, in memory that nobody else writes until the save is done. Called only if
                the save is begun; no collective.
            overwrite: whether a step that was saved already may be saved again, also where the settings say no.

        Raises:
            CheckpointNotSavedError: of the save before, which is over then and can be made anew, or of this one.
            MegabucketError: what ``take`` has raised on some rank.
        """
        if self._save is not None and self._when_busy == "skip" and not self._is_over_everywhere():
            return False
        self.close()
        settings = replace(self._settings, overwrite=overwrite or self._settings.overwrite)
        save = Save(self._root, step, self._ranks, settings)
        self._works = save.works(lambda: content_of(take(), self._ranks, settings.max_file_bytes))
        self._do(next(self._works))
        self._save = save
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
        return all(busy == b"0" for busy in self._ranks.exchange(b"1" if is_busy else b"0"))

    def _go_on(self, save: Save) -> Path | None:
        """Begin the next part of a save when this one is over; return its directory after the last."""
        if self._thread is not None:
            self._thread.join()  # interrupted here, the save stays under way: the thread goes on with it
        self._save = None
        work = next(self._works, None)
        if work is None:
            return save.path
        self._save = save
        self._do(work)
        return None
