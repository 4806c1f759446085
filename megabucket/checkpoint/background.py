"""Save while training goes on: files are written in a thread, everything collective stays on the thread that trains.

The thread writes, hashes and waits for the disk; the exchange before and the votes and the rename after it are made by
``save``, ``poll`` and ``close``, which every rank calls at the same places. So no collective of a save can ever meet one
of training in another order on another rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeAlias

from megabucket.checkpoint.cut import FileCutter
from megabucket.checkpoint.data_files import content_of
from megabucket.checkpoint.pieces import Snapshot
from megabucket.checkpoint.ranks import Ranks
from megabucket.checkpoint.save import Save, SaveSettings

WhenBusy = Literal["wait", "skip"]


class _Writing:
    """A save that another thread writes."""

    def __init__(self, save: Save) -> None:
        self.save = save
        self._is_over = threading.Event()

    def run(self) -> None:
        """Write; what fails is kept by the save."""
        try:
            self.save.write()
        finally:
            self._is_over.set()

    @property
    def is_over(self) -> bool:
        """Whether the thread has no more to do with it."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """Return when it is over."""
        self._is_over.wait()


_Tasks: TypeAlias = SimpleQueue[_Writing | None]


def _run_all(tasks: _Tasks) -> None:
    """Run tasks until there is None instead of one."""
    while (task := tasks.get()) is not None:
        task.run()
        del task  # a save that everybody has forgotten must not be held until the next


class BackgroundWriter:
    """Saves one checkpoint at a time in the background; all methods are collective.

    Args:
        when_busy: what ``save`` does while the one before is being written: wait for it, or skip this one.
    """

    def __init__(self, root: Path | str, ranks: Ranks, settings: SaveSettings, *, when_busy: WhenBusy = "wait") -> None:
        if when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy is {when_busy!r}, and can be 'wait' or 'skip'")
        self._root, self._ranks, self._settings, self._when_busy = Path(root), ranks, settings, when_busy
        self._cutter = FileCutter(settings.max_file_bytes)
        self._under_way: _Writing | None = None
        self._tasks: _Tasks | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved, or None."""
        return self._under_way.save.step if self._under_way is not None else None

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
        if self._under_way is not None:
            if self._when_busy == "skip" and not self._all_written(self._under_way):
                return False
            self._commit(self._under_way)
        settings = replace(self._settings, overwrite=overwrite or self._settings.overwrite)
        save = Save(self._root, step, self._ranks, settings)
        try:
            save.begin(lambda: content_of(take(), rank=self._ranks.rank, size=self._ranks.size, cutter=self._cutter))
        except BaseException:
            save.release()
            raise
        self._under_way = _Writing(save)
        self._thread_tasks().put(self._under_way)
        return True

    def _thread_tasks(self) -> _Tasks:
        """Return what the thread is given; there is one from the first save on, because to start one takes its time."""
        if self._tasks is None:
            tasks: _Tasks = SimpleQueue()
            threading.Thread(target=_run_all, args=(tasks,), name="megabucket-save", daemon=True).start()
            weakref.finalize(self, tasks.put, None)
            self._tasks = tasks
        return self._tasks

    def poll(self) -> Path | None:
        """Commit the save that is under way if every rank has written its part; return its directory then.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        if self._under_way is None or not self._all_written(self._under_way):
            return None
        return self._commit(self._under_way)

    def close(self) -> Path | None:
        """Wait for the save that is under way, commit it, and return its directory.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        return self._commit(self._under_way) if self._under_way is not None else None

    def _all_written(self, writing: _Writing) -> bool:
        return all(said == b"0" for said in self._ranks.exchange(b"0" if writing.is_over else b"1"))

    def _commit(self, writing: _Writing) -> Path:
        self._under_way = None
        try:
            writing.wait()
            return writing.save.commit()
        finally:
            writing.save.release()
