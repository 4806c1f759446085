"""The training data: bytes of Python source in a fixed order, cut into a training and a held-out part, and windows of them.

Nothing is downloaded: the default corpus is the standard library of the running Python, so its bytes depend on the version of
Python; the SHA-256 says which. Windows are chosen by numbers alone, so that a run can be repeated: training windows depend on
seed and step, held-out windows lie evenly spread.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megabucket.errors import ConfigError, name_list

STDLIB: Final = "stdlib"
"""The corpus name that means the standard library of the running Python."""

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and next-byte targets, both int64 of shape ``(windows, sequence_length)``."""

_LEFT_OUT: Final = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})
# Files that the build of Python wrote: they differ between machines with one version of Python.
_GENERATED_PREFIXES: Final = ("_sysconfigdata", "config-")


class CorpusError(ConfigError):
    """The training data cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """One part of a corpus: the bytes of its files, one after the other in sorted order of their paths."""

    data: npt.NDArray[np.uint8]
    num_files: int
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Bytes to train on and bytes that training never sees."""

    name: str
    train: Split
    held_out: Split

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when both parts hold the same bytes."""
        return f"{self.train.sha256}:{self.held_out.sha256}"

    def describe(self) -> str:
        """Return sizes and hashes in three lines."""
        lines = [f"corpus {self.name} (Python {platform.python_version()})"]
        for name, part in (("train", self.train), ("held out", self.held_out)):
            lines.append(f"  {name:<8} {part.num_files:>5} files  {part.data.size:>12,} bytes  SHA-256 {part.sha256}")
        return "\n".join(lines)


def read_corpus(name: str, *, held_out_every: int) -> Corpus:
    """Read ``stdlib`` or the ``.py`` files of a directory, and hold out every ``held_out_every``-th file.

    Raises:
        CorpusError: the directory does not exist, cannot be read, or has too few files for both parts.
    """
    root = Path(sysconfig.get_path("stdlib")) if name == STDLIB else Path(name)
    paths = source_files(root)
    held_out = paths[held_out_every - 1 :: held_out_every]
    if not held_out:
        listed = ": " + name_list([path.relative_to(root).as_posix() for path in paths]) if paths else ""
        raise CorpusError(
            f"the corpus {name!r} ({root}) has {len(paths)} .py file(s) outside test directories{listed}; "
            f"held_out_every={held_out_every} leaves none to hold out. "
            f"Name a directory with at least {held_out_every} files, or lower data.held_out_every."
        )
    chosen = set(held_out)
    return Corpus(name, _read_split([path for path in paths if path not in chosen]), _read_split(held_out))


def source_files(root: Path) -> list[Path]:
    """Return the ``.py`` files below ``root`` that belong to a corpus, sorted by their POSIX path relative to it.

    Test directories, caches, installed packages and files that the build of Python generated are left out.

    Raises:
        CorpusError: ``root`` is not a directory.
    """
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise CorpusError(
            f"the corpus directory {str(root)!r} {problem}. Set data.corpus to a directory with Python source, or to "
            f"{STDLIB!r} for the standard library."
        )
    relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file())
    return [root / path for path in relative if _belongs(path.split("/"))]


def _belongs(parts: Sequence[str]) -> bool:
    return _LEFT_OUT.isdisjoint(parts[:-1]) and not any(part.startswith(_GENERATED_PREFIXES) for part in parts)


def _read_split(paths: Sequence[Path]) -> Split:
    try:
        content = b"".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise CorpusError(
            f"{str(error.filename)!r} of the corpus cannot be read: {error.strerror}. Ranks must train on the same bytes, so "
            "it is not skipped. Make it readable or move it away."
        ) from error
    # frombuffer of a bytes object is read-only; a bytearray gives an array that torch may wrap without a copy.
    return Split(np.frombuffer(bytearray(content), dtype=np.uint8), len(paths), hashlib.sha256(content).hexdigest())


class Windows:
    """Cuts one part of a corpus into inputs and next-byte targets.

    Args:
        split: the bytes.
        sequence_length: tokens per window.
        device: where batches are made.

    Raises:
        CorpusError: the part is shorter than one window and its last target.
    """

    def __init__(self, split: Split, sequence_length: int, *, device: torch.device) -> None:
        self.num_starts = split.data.size - sequence_length
        if self.num_starts < 1:
            raise CorpusError(
                f"{split.num_files} file(s) with {split.data.size} bytes are too few for one window of {sequence_length} "
                "bytes and its next byte. Use a larger corpus or a smaller model.sequence_length."
            )
        self._data = torch.from_numpy(split.data)
        self._offsets = torch.arange(sequence_length + 1)
        self._device = device

    def batch(self, starts: npt.NDArray[np.int64]) -> Batch:
        """Return the windows that begin at ``starts``."""
        rows = self._data[torch.from_numpy(starts)[:, None] + self._offsets].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]

    def random_starts(self, num_windows: int, *, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Return random starts that depend on ``key`` only: seed and step."""
        return np.random.default_rng(key).integers(0, self.num_starts, size=num_windows)

    def even_starts(self, num_windows: int) -> npt.NDArray[np.int64]:
        """Return starts spread evenly from the first possible window to the last."""
        return np.linspace(0, self.num_starts - 1, num_windows).astype(np.int64)
