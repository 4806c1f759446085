"""Save one checkpoint on all ranks, or on none: stage, write, vote, rename.

::

    every rank   plan ------- write ------------- vote ----- publish -------------------------------- end
    rank 0       lock, stage                                 manifest, fsync, rename, latest, remove old
    exchange            ^                           ^                                                  ^
                        plans                       what each rank wrote                               it is there

Writing and publishing are not collective and may run in another thread. A failure on a rank is reported in the next
exchange, so all ranks raise the same error and nothing is committed. A process may die at any call: committed checkpoints are
never touched, and a name appears in the root only for a whole checkpoint.

In the background, a thread writes, hashes, waits for the disk, renames and removes; the exchanges are made by ``save``,
``poll`` and ``close`` of ``BackgroundWriter``, which every rank calls at the same places. So no collective of a save can ever
meet one of training in another order on another rank.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from megabucket.buffer import dtype_name
from megabucket.checkpoint.catalog import LOCK, MAX_STEP, Latest, RootDirectory, latest_if_any, step_directories
from megabucket.checkpoint.file_system import NUM_FILE_THREADS, FileSystem, lock, reason_of, unlock
from megabucket.checkpoint.format import (
    ITEM_BYTES,
    Json,
    Manifest,
    Piece,
    Snapshot,
    StoredBlock,
    StoredFile,
    StoredRange,
    StoredTensor,
    TensorInfo,
    encode_header,
    encode_manifest,
    json_text,
)
from megabucket.checkpoint.ranks import CheckpointRanks, gather_results
from megabucket.errors import CheckpointNotSavedError, MegabucketError
from megabucket.units import MIB

DEFAULT_FILE_BYTES: Final = 64 * MIB
# Small enough that a hashed chunk is still in the cache when it is written, large enough that calls cost nothing.
_CHUNK_BYTES: Final = MIB

WhenBusy = Literal["wait", "skip"]

Work: TypeAlias = Callable[[], Any]
Works: TypeAlias = Generator[Work, Work, Path]
"""Gives the parts of a save that may run in another thread. It is sent a call that returns the result of a part, or raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How checkpoints are saved.

    Args:
        keep_last: how many are kept, counting the one that is saved; None keeps all. Those of later steps (before a
            rollback) are neither counted nor removed.
        overwrite: allow to save again a step that ``latest`` names or that is older; the old one is there until the new one is.
    """

    keep_last: int | None = 2
    max_file_bytes: int = DEFAULT_FILE_BYTES
    overwrite: bool = False
    file_system: FileSystem = field(default_factory=FileSystem)

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}; the checkpoint just saved is one to keep")


def save_snapshot(
    root: Path | str, step: int, snapshot: Snapshot, ranks: CheckpointRanks, settings: SaveSettings | None = None
) -> Path:
    """Save the snapshots of all ranks, and return the directory; a collective.

    Args:
        root: one directory that every rank can reach.

    Raises:
        CheckpointNotSavedError: something failed on some rank. Nothing was committed, and every rank raises this.
    """
    settings = settings or SaveSettings()
    return Save(Path(root), step, ranks, settings).run(lambda: content_of(snapshot, ranks, settings.max_file_bytes))


class Save:
    """One save: ``run`` does all of it, ``works`` lets another thread do the parts that are not collective."""

    def __init__(self, root: Path, step: int, ranks: CheckpointRanks, settings: SaveSettings) -> None:
        self._root, self._step, self._ranks, self._settings = root, step, ranks, settings
        self._root_directory = RootDirectory(root, settings.file_system)
        self._lock: FileIO | None = None
        self._staging = root
        self._latest: Latest | None = None
        self._content = Content({}, 0, {})

    def run(self, content: Callable[[], Content]) -> Path:
        """Do all of it, and return the directory; a collective, which raises the errors of ``works``."""
        works = self.works(content)
        work = next(works)
        try:
            while True:
                work = works.send(work)
        except StopIteration as end:
            path: Path = end.value
            return path

    def works(self, content: Callable[[], Content]) -> Works:
        """Give the two parts of the save that may run in another thread; return the directory.

        Starting it and each ``send`` is collective.

        Raises:
            CheckpointNotSavedError: some rank cannot save, or the ranks do not save the same. Nothing was committed.
            MegabucketError: an error of ``content``, on some rank.
        """
        try:
            plans = self._agree("plan", lambda: self._plan(content))
            self._staging = self._root / plans[0]["staging"]
            self._check([plan["same"] for plan in plans])
            written = yield lambda: self._content.write(self._settings.file_system, self._staging)
            reports = self._agree("files", lambda: self._report(written()))
            published = yield lambda: self._publish(reports)
            return self._root / str(self._agree("manifest", published)[0])
        except MegabucketError:
            if self._ranks.rank == 0 and self._staging != self._root:
                with suppress(OSError):  # the next save removes it
                    self._settings.file_system.remove_tree(self._staging)
            raise
        finally:
            if self._lock is not None:
                with suppress(OSError):
                    unlock(self._lock)

    def _plan(self, content: Callable[[], Content]) -> dict[str, Any]:
        """Get the content; on rank 0, take the lock and make the staging directory."""
        if self._ranks.rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
        self._latest = latest_if_any(self._root)
        if type(self._step) is not int or not 0 <= self._step <= MAX_STEP:
            raise ValueError(f"step {self._step!r} is not a whole number from 0 to {MAX_STEP}")
        if self._ranks.rank == 0:
            try:
                self._lock = lock(self._root / LOCK)
            except BlockingIOError:
                raise ValueError("another save into this directory is going on") from None
            is_saved = any(found.step == self._step for found in step_directories(self._root))
            if is_saved and self._step <= self._last_good_step and not self._settings.overwrite:
                raise ValueError(f"step {self._step} is saved already; overwrite=True saves it again")
            self._staging = self._root_directory.stage(self._step)
        self._content = content()
        values = hashlib.sha256(json_text(self._content.values, sort_keys=True).encode()).hexdigest()[:16]
        same = {"step": self._step, "world_size": self._content.num_writers, "values": values}
        return {"staging": self._staging.name, "same": same}

    def _check(self, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Refuse to save values that ranks do not have in common."""
        for rank, own in enumerate(by_rank):
            if differing := [name for name in own if own[name] != by_rank[0][name]]:
                name = differing[0]
                reason = f"its {name} {own[name]} and that of rank 0 {by_rank[0][name]} differ"
                raise self._not_saved(reason, rank=rank, path=self._root)

    def _report(self, written: Sequence[StoredFile]) -> list[Any]:
        """Return, for ``merge_reports``, the files of this rank and the pieces in them."""
        indices = enumerate(self._content.files.values())
        parts = [[astuple(piece.info), index, piece.start, piece.stop] for index, pieces in indices for piece in pieces]
        return [[astuple(file) for file in written], parts]

    def _publish(self, reports: Sequence[Any]) -> str:
        """On rank 0, make the checkpoint appear, remove old ones, and return the name of the directory."""
        if self._ranks.rank != 0:
            return ""
        raw = encode_manifest(merge_reports(self._step, self._content, reports))
        published = self._root_directory.publish(self._staging, self._step, raw, before=self._latest)
        if self._settings.keep_last is not None:
            self._root_directory.remove_old(published, keep_last=self._settings.keep_last)
        return published.name

    def _agree(self, place: str, act: Work) -> list[Any]:
        """Return the results of ``act`` on all ranks; if it failed on one, raise the same error on all."""

        def guarded() -> Any:
            try:
                return act()
            except MegabucketError:
                raise
            except Exception as error:  # of any kind: the other ranks wait for the report
                path, reason = getattr(error, "filename", None), reason_of(error)
                if isinstance(error, FileNotFoundError) and self._staging != self._root:
                    reason += (
                        "; the staging directory is gone: do all ranks see one file system, where nothing else removes files?"
                    )
                raise self._not_saved(reason, rank=self._ranks.rank, path=path) from error

        return gather_results(self._ranks, place, guarded)

    @property
    def _last_good_step(self) -> int:
        return self._latest.directory.step if self._latest is not None else -1

    def _not_saved(self, reason: str, *, rank: int, path: Path | str | None) -> CheckpointNotSavedError:
        where, last = str(path or self._staging), self._last_good_step
        return CheckpointNotSavedError(step=self._step, ranks=[rank], path=where, reason=reason, last_good_step=last)


def merge_reports(step: int, content: Content, reports: Sequence[Any]) -> Manifest:
    """Return the manifest of the files of all ranks.

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
    blocks: dict[str, list[StoredBlock]] = {}
    for info, found in sorted(ranges.items(), key=lambda item: item[0].offset):
        in_order = tuple(sorted(found, key=lambda part: part.start))
        stops = [0, *(part.stop for part in in_order)]
        if [*(part.start for part in in_order), info.numel] != stops:
            raise ValueError(f"the pieces of {info.key!r} do not hold each of its {info.numel} elements once: {in_order}")
        blocks.setdefault(info.name, []).append(StoredBlock(info.offset, info.shape, info.order, in_order))
    tensors = {
        name: StoredTensor(whole.dtype, whole.shape, tuple(blocks[name]), whole.group) for name, whole in sorted(wholes.items())
    }
    values = dict(content.values)
    return Manifest(step=step, world_size=content.num_writers, files=tuple(files), tensors=tensors, values=values)


class BackgroundWriter:
    """Saves one checkpoint at a time in the background; all methods are collective.

    Args:
        when_busy: ``save`` waits for a save that is still being written, or skips this one.
    """

    def __init__(
        self, root: Path | str, ranks: CheckpointRanks, settings: SaveSettings, *, when_busy: WhenBusy = "wait"
    ) -> None:
        if when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy is {when_busy!r}, and can be 'wait' or 'skip'")
        self._root, self._ranks, self._settings, self._when_busy = Path(root), ranks, settings, when_busy
        self._works: Works | None = None
        """The save that is under way."""
        self._result: Future[Any] = Future()
        """The result of its current part."""

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._works is not None

    def save(self, step: int, take: Callable[[], Snapshot], *, overwrite: bool = False) -> bool:
        """Start a save, and return whether it was started: not if another one is under way and this one is skipped.

        Args:
            take: returns the values as they are now, in memory that nothing else writes until the save is done. Called only if
                the save is started; not collective.
            overwrite: allow to save a step again, also where the settings do not.

        Raises:
            CheckpointNotSavedError: the save before has failed, and can be made again; or this one has.
            MegabucketError: an error of ``take`` on some rank.
        """
        if self.is_busy and self._when_busy == "skip" and not self._is_over_everywhere():
            return False
        self.close()
        settings = replace(self._settings, overwrite=overwrite or self._settings.overwrite)
        save = Save(self._root, step, self._ranks, settings)
        works = save.works(lambda: content_of(take(), self._ranks, settings.max_file_bytes))
        self._start(works, next(works))
        return True

    def poll(self) -> Path | None:
        """Continue the save that is under way as far as possible without waiting; return its directory once it is committed.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        path = None
        while self.is_busy and self._is_over_everywhere():
            path = self._continue()
        return path

    def close(self) -> Path | None:
        """Wait for the save that is under way, commit it, and return its directory.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        path = None
        while self.is_busy:
            path = self._continue()
        return path

    def _is_over_everywhere(self) -> bool:
        own = b"1" if self._result.done() else b"0"
        return all(is_done == b"1" for is_done in self._ranks.exchange(own, "progress"))

    def _start(self, works: Works, work: Work) -> None:
        self._works, self._result = works, Future()
        threading.Thread(target=_run, args=(work, self._result), name="megabucket-save", daemon=True).start()

    def _continue(self) -> Path | None:
        """Start the next part of the save when this one is over; return its directory after the last."""
        wait([self._result])  # interrupted here, the save stays under way
        works, self._works = self._works, None
        assert works is not None  # noqa: S101 - a save is under way
        try:
            self._start(works, works.send(self._result.result))
        except StopIteration as end:
            path: Path = end.value
            return path
        return None


def _run(work: Work, result: Future[Any]) -> None:
    try:
        result.set_result(work())
    except Exception as error:
        result.set_exception(error)
    except BaseException as error:
        # It would have ended this thread. In the caller's it would count as an interrupt, about which other ranks hear nothing.
        result.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


# Data files, cut to size. To read one element, all of its file is read and hashed, so files are bounded.


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The part of a checkpoint that one process writes.

    Args:
        values: everything that is not a tensor; the same on every rank.
        num_writers: how many ranks the files are written for.
        files: the pieces in each file, by its name.
        make: returns the pieces with their values when their file is about to be written; left out, they have them already.
    """

    values: Mapping[str, Json]
    num_writers: int
    files: Mapping[str, Sequence[Piece]]
    make: Callable[[Sequence[Piece]], Sequence[Piece]] = list

    def write(self, file_system: FileSystem, directory: Path) -> list[StoredFile]:
        """Write the files, and return them when they are on the disk; after a failure the rest is not started."""

        def write(name: str) -> StoredFile:
            pieces, digest = self.make(self.files[name]), hashlib.sha256()

            def hashed() -> Iterator[memoryview]:
                for chunk in _chunks(encode_header(pieces), (piece.values for piece in pieces)):
                    digest.update(chunk)
                    yield chunk

            num_bytes = file_system.write_file(directory / name, hashed())
            return StoredFile(name, num_bytes, digest.hexdigest())

        with ThreadPoolExecutor(NUM_FILE_THREADS, "megabucket-save") as pool:
            return list(pool.map(write, self.files))


def content_of(snapshot: Snapshot, ranks: CheckpointRanks, max_file_bytes: int) -> Content:
    """Return the files that this rank writes for its snapshot.

    Raises:
        ValueError: a piece has a dtype that no file can hold, or other values than it says.
    """
    for piece in snapshot.pieces:
        values, dtype = piece.values, piece.info.dtype
        is_flat = values.shape == (piece.stop - piece.start,) and values.is_contiguous()
        if not is_flat or dtype_name(values.dtype) != dtype or dtype not in ITEM_BYTES:
            raise ValueError(
                f"{piece.info.name!r} {piece.start}:{piece.stop} of {dtype} has values of shape {tuple(values.shape)}, stride "
                f"{values.stride()}, {values.dtype}; a file can hold flat values of {', '.join(ITEM_BYTES)}"
            )
    return Content(snapshot.values, ranks.size, cut_into_files(ranks.rank, snapshot.pieces, max_file_bytes))


def cut_into_files(writer: int, pieces: Iterable[Piece], max_file_bytes: int) -> dict[str, list[Piece]]:
    """Return the pieces of each file that a rank writes, with the widest dtypes first so that all values are aligned.

    Args:
        max_file_bytes: bound on the values in a file, unless one element is larger.
    """
    files: list[list[Piece]] = []
    keys: set[str] = set()
    room = 0
    for piece in sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.info.dtype]):
        step = max(1, max_file_bytes // ITEM_BYTES[piece.info.dtype])
        for start in range(piece.start, max(piece.stop, piece.start + 1), step):
            stop = min(start + step, piece.stop)
            part = Piece(piece.info, start, stop, piece.values[start - piece.start : stop - piece.start])
            if not files or part.num_bytes > room or part.key in keys:
                files.append([])
                keys, room = set(), max_file_bytes
            files[-1].append(part)
            keys.add(part.key)
            room -= part.num_bytes
    return {f"rank-{writer:05d}-{index:05d}.safetensors": parts for index, parts in enumerate(files)}


def _chunks(header: bytes, values: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yield header and values in chunks: small tensors together, large ones in slices of their own memory."""
    gathered = bytearray(header)
    for of_piece in values:
        view = of_piece.detach().cpu().view(torch.uint8).numpy().data
        if len(gathered) + len(view) > _CHUNK_BYTES:
            yield memoryview(gathered)
            gathered = bytearray()
        if len(view) <= _CHUNK_BYTES:
            gathered += view
        else:
            yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
    yield memoryview(gathered)
