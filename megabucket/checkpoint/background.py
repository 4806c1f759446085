"""Save while training goes on: files are written in a thread, everything collective stays on the thread that trains.

The thread writes, hashes and waits for the disk; the exchange before and the votes and the rename after it are made by
``save``, ``poll`` and ``close``, which every rank calls at the same places. So no collective of a save can ever meet one
of training in another order on another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megabucket.checkpoint.cut import FileCutter
from megabucket.checkpoint.data_files import content_of
from megabucket.checkpoint.pieces import Snapshot
from megabucket.checkpoint.ranks import Ranks
from megabucket.checkpoint.save import Save, SaveSettings

WhenBusy = Literal["wait", "skip"]


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
        self._under_way: tuple[Save, threading.Thread] | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved, or None."""
        return self._under_way[0].step if self._under_way is not None else None

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
            if self._when_busy == "skip" and not self._all_written(self._under_way[1]):
                return False
            self._commit(*self._under_way)
        settings = replace(self._settings, overwrite=overwrite or self._settings.overwrite)
        save = Save(self._root, step, self._ranks, settings)
        try:
            save.begin(lambda: content_of(take(), rank=self._ranks.rank, size=self._ranks.size, cutter=self._cutter))
        except BaseException:
            save.release()
            raise
        thread = threading.Thread(target=save.write, name=f"megabucket-save-{step}", daemon=True)
        self._under_way = save, thread
        thread.start()
        return True

    def poll(self) -> Path | None:
        """Commit the save that is under way if every rank has written its part; return its directory then.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        if self._under_way is None or not self._all_written(self._under_way[1]):
            return None
        return self._commit(*self._under_way)

    def close(self) -> Path | None:
        """Wait for the save that is under way, commit it, and return its directory.

        Raises:
            CheckpointNotSavedError: it failed on some rank.
        """
        return self._commit(*self._under_way) if self._under_way is not None else None

    def _all_written(self, thread: threading.Thread) -> bool:
        return all(said == b"0" for said in self._ranks.exchange(b"1" if thread.is_alive() else b"0"))

    def _commit(self, save: Save, thread: threading.Thread) -> Path:
        self._under_way = None
        try:
            thread.join()
            return save.commit()
        finally:
            save.release()
