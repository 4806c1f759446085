"""The training data: bytes of Python source, in a fixed order, cut into a training and a held-out part. No torch.

``read_corpus`` is called once per process. Nothing is downloaded: the default corpus is
the standard library of the running Python, so its bytes depend on the version of Python; the SHA-256 says which.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from megabucket.errors import CorpusError, name_list

STDLIB: Final = "stdlib"
"""The corpus name that means the standard library of the running Python."""

_TEST_DIRECTORIES: Final = frozenset({"test", "tests", "idle_test"})
_FOREIGN_DIRECTORIES: Final = frozenset({"__pycache__", "site-packages", "dist-packages"})
# Files that the build of Python wrote: they differ between machines with one version of Python.
_GENERATED_PREFIXES: Final = ("_sysconfigdata", "config-")


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """One part of a corpus: the bytes of its files, one after the other in sorted order of their paths."""

    data: npt.NDArray[np.uint8]
    num_files: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Bytes in this part."""
        return int(self.data.size)


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


def read_corpus(name: str, *, held_out_every: int) -> Corpus:
    """Read ``stdlib`` or the ``.py`` files of a directory, and hold out every ``held_out_every``-th file.

    Paths are sorted by their POSIX form relative to the root. Test directories, caches, installed packages and files
    that the build of Python generated are left out.

    Raises:
        CorpusError: the directory does not exist, cannot be read, or has too few files for both parts.
    """
    root = Path(sysconfig.get_path("stdlib")) if name == STDLIB else Path(name)
    paths = source_files(root)
    train, held_out = split_paths(paths, held_out_every=held_out_every)
    if not train or not held_out:
        listed = ": " + name_list([path.relative_to(root).as_posix() for path in paths]) if paths else ""
        raise CorpusError(
            f"the corpus {name!r} ({root}) has {len(paths)} .py file(s) outside test directories{listed}; "
            f"held_out_every={held_out_every} leaves {len(train)} to train on and {len(held_out)} to hold out. "
            f"Name a directory with at least {held_out_every} files, or lower data.held_out_every."
        )
    return Corpus(name=name, train=_read_split(train), held_out=_read_split(held_out))


def describe_corpus(corpus: Corpus) -> str:
    """Return the sizes and hashes of a corpus in three lines."""
    lines = [f"corpus {corpus.name} (Python {platform.python_version()})"]
    for name, part in (("train", corpus.train), ("held out", corpus.held_out)):
        lines.append(f"  {name:<8} {part.num_files:>5} files  {part.num_bytes:>12,} bytes  SHA-256 {part.sha256}")
    return "\n".join(lines)


def source_files(root: Path) -> list[Path]:
    """Return the ``.py`` files below ``root`` that belong to a corpus, sorted by their relative path.

    Raises:
        CorpusError: ``root`` is not a directory that can be listed.
    """
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise CorpusError(
            f"the corpus directory {str(root)!r} {problem}. Set data.corpus to a directory with Python source, or to "
            f"{STDLIB!r} for the standard library."
        )
    relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file())
    return [root / path for path in relative if _belongs(path)]


def split_paths(paths: Sequence[Path], *, held_out_every: int) -> tuple[list[Path], list[Path]]:
    """Return the paths to train on and those to hold out: the last of each full run of ``held_out_every``.

    >>> [[path.name for path in part] for part in split_paths([Path(c) for c in "abcdefg"], held_out_every=3)]
    [['a', 'b', 'd', 'e', 'g'], ['c', 'f']]
    """
    held_out = [path for index, path in enumerate(paths) if index % held_out_every == held_out_every - 1]
    train = [path for index, path in enumerate(paths) if index % held_out_every != held_out_every - 1]
    return train, held_out


def _belongs(relative_path: str) -> bool:
    *directories, _ = parts = relative_path.split("/")
    if not _TEST_DIRECTORIES.isdisjoint(directories) or not _FOREIGN_DIRECTORIES.isdisjoint(directories):
        return False
    return not any(part.startswith(_GENERATED_PREFIXES) for part in parts)


def _read_split(paths: Sequence[Path]) -> Split:
    digest = hashlib.sha256()
    pieces = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CorpusError(
                f"{str(path)!r} of the corpus cannot be read: {error.strerror}. Ranks must train on the same bytes, so it "
                "not skipped. Make it readable or move it away."
            ) from error
        digest.update(content)
        pieces.append(content)
    # frombuffer of a bytes object is read-only; a bytearray gives an array that torch may wrap without a copy.
    data = np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8)
    return Split(data=data, num_files=len(paths), sha256=digest.hexdigest())
