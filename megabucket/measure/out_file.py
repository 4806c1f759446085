"""Can a file be written? Asked before minutes of measuring, not after."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megabucket.errors import ConfigError
from megabucket.measure.ranks import Ranks


def check_writable(ranks: Ranks, paths: Sequence[Path]) -> None:
    """Raise on every rank if the first one cannot write one of the files. All ranks must call it.

    Raises:
        ConfigError: a file cannot be written.
    """
    found = [problem for path in paths if ranks.rank == 0 and (problem := _why_not_writable(path))]
    raise_on_all(ranks, found[0] if found else "")


def raise_on_all(ranks: Ranks, problem: str) -> None:
    """Raise what the first rank has found, if anything. All ranks must call it, so none leaves before the first is done.

    Raises:
        ConfigError: the first rank gave a text.
    """
    problem = ranks.gather(problem)[0]
    if problem:
        raise ConfigError(problem)


def write_text(path: Path, text: str) -> str:
    """Write a file, making its directory; return why it could not be written, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        return f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""


def not_writable(path: Path, reason: str) -> str:
    """Return the text of the error."""
    return f"--out {path}: cannot be written: {reason}"


def _why_not_writable(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            return not_writable(path, "it is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            return not_writable(path, "permission denied")
    except (OSError, ValueError) as error:
        return not_writable(path, getattr(error, "strerror", None) or str(error))
    return ""
