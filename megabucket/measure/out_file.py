"""Can a file be written? Asked before minutes of measuring, not after."""

from __future__ import annotations

import os
from pathlib import Path


def why_not_writable(path: Path) -> str:
    """Return why a file cannot be written, or nothing. Makes its directory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            return not_writable(path, "it is a directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            return not_writable(path, "permission denied")
    except (OSError, ValueError) as error:
        return not_writable(path, getattr(error, "strerror", None) or str(error))
    return ""


def not_writable(path: Path, reason: str) -> str:
    """Return the text of the error."""
    return f"--out {path}: cannot be written: {reason}"
