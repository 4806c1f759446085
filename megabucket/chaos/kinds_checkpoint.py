"""Kinds of fault while a checkpoint is saved or loaded on the ranks of a training run.

Every cell saves a good checkpoint first, between two steps. After the fault ranks open what is there and read all of it: it
must be the good one, or the new one. The campaigns of ``megabucket.chaos.checkpoints`` try every call and every byte; these
cells try some of them with real ranks, collectives, wrappers and optimizers.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from megabucket.chaos.cell import Combo, Mode
from megabucket.chaos.checkpoints.faulty import FaultyFileSystem
from megabucket.chaos.expectation import RIGHT, Expectation, Recovery, named
from megabucket.chaos.fault import Fault, Here
from megabucket.chaos.kind import PAIRS, Kind, not_in_torch
from megabucket.checkpoint.capture import TrainingParts, capture
from megabucket.checkpoint.checkpointer import load_checkpoint
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.opening import open_checkpoint
from megabucket.checkpoint.restore import restore
from megabucket.checkpoint.save import SaveSettings, save_now
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.checkpoint.together import GroupRanks
from megabucket.errors import PeerLostError

_GOOD, _NEXT = 1, 2
_NOTICE_DEAD_S: Final = 1.0
_NO_TORCH: Final = not_in_torch("torch DDP has no checkpoints of its own")

_CALLS: Final = {
    "data": ("write", 0),
    "sync": ("sync", 0),
    "manifest": ("sync_directory", 0),
    "rename": ("rename", 0),
    "latest": ("rename", 1),
}
"""The call at which a fault comes, by phase of a save: its name, and how many like it come before.

The last three are made by the first rank only.
"""

_FIRST_RANK: Final = (*tuple(combo for combo in PAIRS if not combo.overlaps), Combo(Mode.REDUCE_SCATTER, False, 3))
"""Combinations in which the first rank is at fault."""


class _At:
    """Does something before a certain call."""

    def __init__(self, phase: str, act: Callable[[], None]) -> None:
        self._name, self._left = _CALLS[phase]
        self._act = act

    def __call__(self, _index: int, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left < 0:
                self._act()


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory that all ranks know, and the ranks."""

    root: Path
    ranks: GroupRanks

    @classmethod
    def of(cls, here: Here) -> _Place:
        """Make a directory; all ranks call it."""
        ranks = GroupRanks.of(here.ddp)
        made = tempfile.mkdtemp(prefix="megabucket-chaos-") if ranks.rank == 0 else ""
        return cls(Path(ranks.exchange(made.encode())[0].decode()), ranks)

    def save(self, here: Here, step: int, file_system: FileSystem) -> None:
        """Save what the rank trains."""
        snapshot = capture(TrainingParts(here.ddp, here.optimizer))
        save_now(self.root, step, snapshot, self.ranks, SaveSettings(file_system=file_system))

    def remove(self, *, meets: bool) -> None:
        """Remove the directory, once every rank has looked at it if the ranks can still meet."""
        if meets:
            self.ranks.exchange(b"looked")
        if self.ranks.rank == 0 or not meets:
            shutil.rmtree(self.root, ignore_errors=True)


def _check_whole(root: Path, allowed: tuple[int, ...]) -> None:
    """Read all of what ``latest`` names.

    Raises:
        AssertionError: it is not one of the steps that it may be.
        CheckpointError: it is not whole.
    """
    stored = open_checkpoint(root)
    stored.verify()
    if stored.step not in allowed:
        raise AssertionError(f"after the fault the checkpoint of step {stored.step} is loaded, not of {allowed}")


class SaveRefused(Fault):
    """A call of the rank at fault is refused by the operating system."""

    def expect(self) -> Expectation:
        """Return the error on every rank, with rank, reason and the last good step."""
        code, _ = self.cell.place.split("-")
        return named(
            "CheckpointNotSavedError",
            fields={"step": _NEXT, "ranks": (self.cell.culprit,), "last_good_step": _GOOD},
            texts=(os.strerror(_number(code)), "megabucket-chaos-"),
            is_agreed=False,
        )

    def arm(self, here: Here) -> None:
        """Save twice before the first forward; the second save meets the fault."""
        here.points["start"] = lambda: self._run(here)

    def _run(self, here: Here) -> None:
        place = _Place.of(here)
        try:
            place.save(here, _GOOD, FileSystem())
            place.save(here, _NEXT, self._file_system(here))
        finally:
            _check_whole(place.root, (_GOOD,))
            place.remove(meets=True)

    def _file_system(self, here: Here) -> FileSystem:
        code, phase = self.cell.place.split("-")

        def refuse() -> None:
            here.announce()
            raise OSError(_number(code), os.strerror(_number(code)))

        return FaultyFileSystem(_At(phase, refuse)) if here.is_culprit else FileSystem()


class SaveKilled(Fault):
    """The process at fault is killed in the middle of a save."""

    def expect(self) -> Expectation:
        """Return the loss, named on the others."""
        return named(
            "PeerLostError",
            fields={"ranks": (self.cell.culprit,)},
            lost=(self.cell.culprit,),
            within_s=_NOTICE_DEAD_S,
            recovery=Recovery.OVER,
        )

    def arm(self, here: Here) -> None:
        """Save twice before the first forward; the second save is the end of the process at fault."""
        here.points["start"] = lambda: self._run(here)

    def _run(self, here: Here) -> None:
        place = _Place.of(here)
        place.save(here, _GOOD, FileSystem())

        def die() -> None:
            here.announce()
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            place.save(here, _NEXT, FaultyFileSystem(_At(self.cell.place, die)) if here.is_culprit else FileSystem())
        except PeerLostError:
            # The others cannot meet any more: one of them looks at what is there.
            if here.rank == min(rank for rank in range(here.num_ranks) if rank != self.cell.culprit):
                _check_whole(place.root, (_GOOD, _NEXT))
                place.remove(meets=False)
            raise


class LoadDamaged(Fault):
    """A file of the checkpoint is not what was written, or cannot be read by the rank at fault."""

    is_armed_on_all = True

    def expect(self) -> Expectation:
        """Return the error on every rank; weights are as they were."""
        return named("CheckpointInvalidError", texts=(_DAMAGE[self.cell.place][1],), is_agreed=False)

    def arm(self, here: Here) -> None:
        """Save, damage and load before the first forward."""
        here.points["start"] = lambda: self._run(here)

    def _run(self, here: Here) -> None:
        place = _Place.of(here)
        place.save(here, _GOOD, FileSystem())
        damage, _ = _DAMAGE[self.cell.place]
        if place.ranks.rank == 0:
            damage(place.root)
        place.ranks.exchange(b"damaged")
        here.announce()
        try:
            if self.cell.place == "EIO":
                restore(self._open(here, place.root), TrainingParts(here.ddp, here.optimizer))
            else:
                load_checkpoint(place.root, here.ddp, here.optimizer)
        finally:
            place.remove(meets=True)

    @staticmethod
    def _open(here: Here, root: Path) -> StoredCheckpoint:
        is_open = False

        def refuse(_index: int, name: str) -> None:
            if name == "read_into" and here.is_culprit and is_open:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        stored = open_checkpoint(root, file_system=FaultyFileSystem(refuse))
        is_open = True
        return stored


class LoadRight(Fault):
    """Weights are spoilt on every rank, and the checkpoint brings them back."""

    is_armed_on_all = True

    def expect(self) -> Expectation:
        """Return a run that goes on as if nothing had been."""
        return RIGHT

    def arm(self, here: Here) -> None:
        """Save, spoil and load before the first forward."""
        here.points["start"] = lambda: self._run(here)

    @staticmethod
    def _run(here: Here) -> None:
        place = _Place.of(here)
        place.save(here, _GOOD, FileSystem())
        here.announce()
        with torch.no_grad():
            for param in here.model.parameters():
                param.zero_()
        load_checkpoint(place.root, here.ddp, here.optimizer)
        place.remove(meets=True)


def _number(code: str) -> int:
    number: int = getattr(errno, code)
    return number


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


_DAMAGE: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "flipped": (lambda root: _flip(_data_files(root)[0]), "its SHA-256 is"),
    "truncated": (_truncate, "and the manifest says"),
    "deleted": (lambda root: _data_files(root)[-1].unlink(), "it is missing"),
    "swapped": (_swap, "and the manifest says"),
    "manifest": (lambda root: _flip(next(root.glob("step-*/manifest.json"))), "its seal is not the SHA-256 of its text"),
    "latest": (lambda root: _flip(root / "latest"), "latest"),
    "EIO": (lambda _root: None, "it cannot be read: [Errno 5]"),
}
"""What is done to the files, and what the error must say."""

CHECKPOINT_KINDS: Final = (
    Kind(
        "save-refused",
        "Every rank names the rank, the reason and the last good step; that checkpoint is whole, and the next step is right.",
        SaveRefused,
        places=("ENOSPC-data", "EDQUOT-data", "EROFS-data", "EIO-sync"),
        combos=PAIRS,
        torch_skip=_NO_TORCH,
    ),
    Kind(
        "commit-refused",
        "As save-refused, for what the first rank does when all have voted.",
        SaveRefused,
        places=("ENOSPC-manifest", "EIO-rename", "EROFS-latest"),
        combos=_FIRST_RANK,
        torch_skip=_NO_TORCH,
    ),
    Kind(
        "save-killed",
        "The others raise an error that names the rank within 1 s; the old or the new checkpoint is whole.",
        SaveKilled,
        places=("data", "sync"),
        combos=PAIRS,
        torch_skip=_NO_TORCH,
    ),
    Kind(
        "commit-killed",
        "As save-killed, for what the first rank does when all have voted.",
        SaveKilled,
        places=("manifest", "rename", "latest"),
        combos=_FIRST_RANK,
        torch_skip=_NO_TORCH,
    ),
    Kind(
        "load-damaged",
        "Every rank raises the error that names the file; nothing was changed, and the next step is right.",
        LoadDamaged,
        places=tuple(_DAMAGE),
        combos=PAIRS,
        torch_skip=_NO_TORCH,
    ),
    Kind(
        "save-and-load",
        "Right: weights that were spoilt on every rank are what they were.",
        LoadRight,
        combos=PAIRS,
        torch_skip=_NO_TORCH,
    ),
)
