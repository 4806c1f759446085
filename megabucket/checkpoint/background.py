"""Save while training goes on: files are written in a thread, everything collective stays on the thread that trains.

The thread writes, hashes, waits for the disk, renames and removes; the exchanges before, between and after are made by
``save``, ``poll`` and ``close``, which every rank calls at the same places. So no collective of a save can ever meet one of
training in another order on another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megabucket.checkpoint.format import Snapshot
from megabucket.checkpoint.ranks import Ranks
from megabucket.checkpoint.save import Save, SaveSettings, content_from

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
            save.begin(lambda: content_from(take(), self._ranks, settings))
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
