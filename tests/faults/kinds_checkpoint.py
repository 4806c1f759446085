"""Kinds of fault while a checkpoint is saved or loaded on the ranks of a training run.

Every cell saves a good checkpoint first, between two steps. After the fault ranks open what is there and read all of it: it
must be the good one, or the new one. The campaigns of ``faults.checkpoints`` try every call and every byte; these cells try
some of them with real ranks, collectives, wrappers and optimizers.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megabucket.checkpoint.capture import TrainingParts, capture
from megabucket.checkpoint.checkpointer import load_checkpoint
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.ranks import GroupRanks
from megabucket.checkpoint.restore import restore
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import PeerLostError

from .cells import PAIRS, RIGHT, Cell, Combo, Fault, Here, Kind, Mode, Recovery, named
from .checkpoints.faulty import FaultyFileSystem

_GOOD, _NEXT = 1, 2
_NOTICE_DEAD_S = 1.0
_CALLS = {
    "data": ("write", 0),
    "sync": ("fsync", 0),
    "manifest": ("sync_directory", 0),
    "rename": ("rename", 0),
    "latest": ("rename", 1),
}
"""The call at which a fault comes, by phase of a save: its name, and how many like it come before.

The last three are made by the first rank only.
"""
_FIRST_RANK = (*tuple(combo for combo in PAIRS if not combo.overlaps), Combo(Mode.REDUCE_SCATTER, False, 3))
"""Combinations in which the first rank is at fault."""


def _failing(phase: str, act: Callable[[], None]) -> FileSystem:
    """Return a file system that does something before a certain call."""
    wanted, left = _CALLS[phase]

    def at(_index: int, name: str) -> None:
        nonlocal left
        if name == wanted:
            left -= 1
            if left < 0:
                act()

    return FaultyFileSystem(at)


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory that all ranks know, and the ranks."""

    root: Path
    ranks: GroupRanks

    @classmethod
    def of(cls, here: Here) -> _Place:
        """Make a directory; all ranks call it."""
        ranks = GroupRanks(here.ddp, "saving or loading a checkpoint")
        made = tempfile.mkdtemp(prefix="megabucket-faults-") if ranks.rank == 0 else ""
        return cls(Path(ranks.exchange(made.encode(), "directory")[0].decode()), ranks)

    def save(self, here: Here, step: int, file_system: FileSystem) -> None:
        """Save what the rank trains."""
        snapshot = capture(TrainingParts(here.ddp, here.optimizer))
        save_snapshot(self.root, step, snapshot, self.ranks, SaveSettings(file_system=file_system))

    def remove(self, *, meets: bool) -> None:
        """Remove the directory, once every rank has looked at it if the ranks can still meet."""
        if meets:
            self.ranks.exchange(b"looked", "end")
        if self.ranks.rank == 0 or not meets:
            shutil.rmtree(self.root, ignore_errors=True)

    def check_whole(self, *allowed: int) -> None:
        """Read all of what ``latest`` names.

        Raises:
            AssertionError: it is not one of the steps that it may be.
            CheckpointError: it is not whole.
        """
        stored = open_checkpoint(self.root)
        stored.verify()
        if stored.step not in allowed:
            raise AssertionError(f"after the fault the checkpoint of step {stored.step} is loaded, not of {allowed}")


def _at_start(run: Callable[[Here], None]) -> Callable[[Here], None]:
    return lambda here: here.points.update(start=lambda: run(here))


def _save_refused(cell: Cell) -> Fault:
    """Let the operating system refuse a call of the rank at fault."""
    code, phase = cell.place.split("-")
    number: int = getattr(errno, code)

    def run(here: Here) -> None:
        def refuse() -> None:
            here.announce()
            raise OSError(number, os.strerror(number))

        place = _Place.of(here)
        try:
            place.save(here, _GOOD, FileSystem())
            place.save(here, _NEXT, _failing(phase, refuse) if here.is_culprit else FileSystem())
        finally:
            place.check_whole(_GOOD)
            place.remove(meets=True)

    fields = {"step": _NEXT, "ranks": (cell.culprit,), "last_good_step": _GOOD}
    texts = (os.strerror(number), "megabucket-faults-")
    return Fault(named("CheckpointNotSavedError", fields=fields, texts=texts, is_agreed=False), arm=_at_start(run))


def _save_killed(cell: Cell) -> Fault:
    """Kill the process at fault in the middle of a save."""

    def run(here: Here) -> None:
        def die() -> None:
            here.announce()
            os.kill(os.getpid(), signal.SIGKILL)

        place = _Place.of(here)
        place.save(here, _GOOD, FileSystem())
        try:
            place.save(here, _NEXT, _failing(cell.place, die) if here.is_culprit else FileSystem())
        except PeerLostError:
            # The others cannot meet any more: one of them looks at what is there.
            if here.rank == min(rank for rank in range(here.num_ranks) if rank != cell.culprit):
                place.check_whole(_GOOD, _NEXT)
                place.remove(meets=False)
            raise

    lost = (cell.culprit,)
    expect = named("PeerLostError", fields={"ranks": lost}, lost=lost, within_s=_NOTICE_DEAD_S, recovery=Recovery.OVER)
    return Fault(expect, arm=_at_start(run))


def _load_damaged(cell: Cell) -> Fault:
    """Load a checkpoint of which a file is not what was written, or cannot be read by the rank at fault."""
    damage, text = _DAMAGE[cell.place]

    def run(here: Here) -> None:
        place = _Place.of(here)
        place.save(here, _GOOD, FileSystem())
        if place.ranks.rank == 0:
            damage(place.root)
        place.ranks.exchange(b"damaged", "damage")
        here.announce()
        try:
            if cell.place == "EIO":
                _restore_unreadable(here, place.root)
            else:
                load_checkpoint(place.root, here.ddp, here.optimizer)
        finally:
            place.remove(meets=True)

    return Fault(named("CheckpointInvalidError", texts=(text,), is_agreed=False), arm=_at_start(run), on_all=True)


class _Unreadable(type(Path())):  # type: ignore[misc]
    """A path below which no data file can be opened."""

    def __fspath__(self) -> str:
        if self.suffix == ".safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return str(self)


def _restore_unreadable(here: Here, root: Path) -> None:
    stored = open_checkpoint(root)
    if here.is_culprit:
        stored.path = _Unreadable(stored.path)
    restore(stored, TrainingParts(here.ddp, here.optimizer))


def _load_right(cell: Cell) -> Fault:
    """Spoil the weights on every rank; the checkpoint brings them back."""

    def run(here: Here) -> None:
        place = _Place.of(here)
        place.save(here, _GOOD, FileSystem())
        here.announce()
        with torch.no_grad():
            for param in here.model.parameters():
                param.zero_()
        load_checkpoint(place.root, here.ddp, here.optimizer)
        place.remove(meets=True)

    return Fault(RIGHT, arm=_at_start(run), on_all=True)


def _data_files(root: Path) -> list[Path]:
    return sorted(root.glob("step-*/*.safetensors"))


def _flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def _swap(root: Path) -> None:
    first, second, *_ = _data_files(root)
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)


def _truncate(root: Path) -> None:
    path = _data_files(root)[0]
    path.write_bytes(path.read_bytes()[:-1])


_DAMAGE: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (lambda root: _flip(_data_files(root)[0]), "its SHA-256 is"),
    "truncated": (_truncate, "and the manifest says"),
    "deleted": (lambda root: _data_files(root)[-1].unlink(), "it is missing"),
    "swapped": (_swap, "The file was damaged or changed after it was written"),
    "manifest": (lambda root: _flip(next(root.glob("step-*/manifest.json"))), "its seal is not the SHA-256 of its text"),
    "latest": (lambda root: _flip(root / "latest"), "latest"),
    "EIO": (lambda _root: None, "it cannot be read: [Errno 5]"),
}
"""What is done to the files, and what the error must say."""


def _kind(
    name: str,
    says: str,
    fault: Callable[[Cell], Fault],
    places: tuple[str, ...] = ("step",),
    combos: tuple[Combo, ...] = PAIRS,
    *,
    kills: bool = False,
) -> Kind:
    why = "torch DDP has no checkpoints of its own"
    return Kind(name, says, fault, places, combos, needs_processes=kills, not_in_torch=why, soaks=False)


_NAMED = "Every rank names the rank, the reason and the last good step; that checkpoint is whole, and the next step is right."
_KILLED = "The others raise an error that names the rank within 1 s; the old or the new checkpoint is whole."
_DAMAGED = "Every rank raises the error that names the file; nothing was changed, and the next step is right."

CHECKPOINT_KINDS = (
    _kind("save-refused", _NAMED, _save_refused, ("ENOSPC-data", "EDQUOT-data", "EROFS-data", "EIO-sync")),
    _kind("commit-refused", _NAMED, _save_refused, ("ENOSPC-manifest", "EIO-rename", "EROFS-latest"), _FIRST_RANK),
    _kind("save-killed", _KILLED, _save_killed, ("data", "sync"), kills=True),
    _kind("commit-killed", _KILLED, _save_killed, ("manifest", "rename", "latest"), _FIRST_RANK, kills=True),
    _kind("load-damaged", _DAMAGED, _load_damaged, tuple(_DAMAGE)),
    _kind("save-and-load", "Right: weights that were spoilt on every rank are what they were.", _load_right),
)
