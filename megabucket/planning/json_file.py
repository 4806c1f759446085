"""Read a JSON file of a user: with a limit, and with one readable error. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from megabucket.errors import ConfigError, printable
from megabucket.planning.yaml_loader import YamlDocument


def read_json(path: Path, *, max_bytes: int, what: str) -> YamlDocument:
    """Return the values of a JSON file, which has no lines to point to.

    Args:
        what: the file is, for errors, with its article.

    Raises:
        ConfigError: the file cannot be read, is larger than ``max_bytes``, or is not JSON.
    """
    source = str(path)
    raw = read_limited(path, max_bytes=max_bytes, advice=f", the limit for {what}")
    try:
        return YamlDocument(json.loads(raw), {}, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON: {printable(str(error))}") from None


def read_limited(path: Path, *, max_bytes: int, advice: str) -> bytes:
    """Return the bytes of a file.

    Args:
        advice: what follows in the error about a file that is too large.

    Raises:
        ConfigError: the file cannot be read, or is larger than ``max_bytes``.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes} bytes{advice}")
    return raw
