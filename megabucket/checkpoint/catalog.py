"""Which checkpoints a directory holds, and what ``latest`` says. No torch.

::

    <root>/latest                "step-00000120 <seal of its manifest>", replaced atomically
    <root>/step-00000120/        one checkpoint, never written into again
    <root>/step-00000120.2/      the same step saved once more; the highest number counts
    <root>/.tmp-...              a save that is going on, or died
    <root>/.lock                 held while a save is going on

``latest`` repeats the seal, so a damaged ``latest`` cannot name another checkpoint unseen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megabucket.checkpoint.file_system import FileSystem, read_file, reason_of
from megabucket.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MIN_KEY_BYTES,
    SealedManifest,
    decode_manifest,
)
from megabucket.errors import ConfigError

LATEST = "latest"
LOCK = ".lock"
TEMPORARY = ".tmp-"
_STEP = re.compile(r"step-([0-9]{8,15})(?:\.([1-9][0-9]{0,8}))?")
_LATEST = re.compile(r"(step-[0-9.]{8,40}) ([0-9a-f]{64})\n")
_LATEST_MAX_BYTES = 200
_KEY_MAX_BYTES = 4096
_MAX_LOOKED_AT = 50
MAX_STEP = 10**15 - 1


@dataclass(frozen=True, slots=True, order=True)
class StepDirectory:
    """The directory of one checkpoint; it sorts by step, then by revision."""

    step: int
    revision: int = 1

    @property
    def name(self) -> str:
        """Its name in the root."""
        return f"step-{self.step:08d}" + (f".{self.revision}" if self.revision > 1 else "")

    @classmethod
    def parse(cls, name: str) -> StepDirectory | None:
        """Return what a name means, or None when it is no such name in the one way to write it."""
        match = _STEP.fullmatch(name)
        found = cls(int(match[1]), int(match[2] or 1)) if match else None
        return found if found is not None and found.name == name else None


@dataclass(frozen=True, slots=True)
class Latest:
    """What ``latest`` says."""

    directory: StepDirectory
    seal: str

    def encode(self) -> bytes:
        """Return the contents of the file."""
        return f"{self.directory.name} {self.seal}\n".encode("ascii")


def read_latest(file_system: FileSystem, root: Path) -> Latest:
    """Return what ``latest`` says.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not say anything.
    """
    raw = read_file(file_system, root / LATEST, max_bytes=_LATEST_MAX_BYTES)
    match = _LATEST.fullmatch(raw.decode("ascii", errors="replace"))
    directory = StepDirectory.parse(match[1]) if match else None
    if match is None or directory is None:
        raise ValueError("it does not say which checkpoint is the newest")
    return Latest(directory, match[2])


def step_directories(file_system: FileSystem, root: Path) -> list[StepDirectory]:
    """Return what looks like a checkpoint by its name, oldest first; nothing if there is no such root."""
    try:
        names = file_system.names(root.resolve())
    except OSError:
        return []
    found = (StepDirectory.parse(name) for name in names)
    return sorted(directory for directory in found if directory is not None)


def read_manifest(file_system: FileSystem, path: Path, directory: StepDirectory, *, key: bytes | None) -> SealedManifest:
    """Return the manifest in ``path``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not sealed, not as it must be, or of another step than the directory.
    """
    raw = read_file(file_system, path / MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    sealed = decode_manifest(raw, key=key)
    if sealed.manifest.step != directory.step:
        raise ValueError(f"it is of step {sealed.manifest.step}, in the directory of step {directory.step}")
    return sealed


def whole_steps(file_system: FileSystem, root: Path, *, but: StepDirectory | None = None) -> tuple[int, ...]:
    """Return the newest steps with a sealed manifest and all files, which is not to say that these were verified.

    For texts of errors: it reads manifests, so it looks at the newest fifty directories only.

    Args:
        but: leave this one out.
    """
    steps = []
    for directory in step_directories(file_system, root)[-_MAX_LOOKED_AT:]:
        path = root / directory.name
        try:
            manifest = read_manifest(file_system, path, directory, key=None).manifest
            is_whole = {file.name for file in manifest.files} <= set(file_system.names(path))
        except (OSError, ValueError):
            continue
        if is_whole and directory != but:
            steps.append(directory.step)
    return tuple(sorted(set(steps)))


def read_key(path: Path) -> bytes:
    """Return the key in a file, without a line break at its end.

    Raises:
        ConfigError: it cannot be read, or is too short or too long for a key.
    """
    try:
        key = read_file(FileSystem(), path.resolve(), max_bytes=_KEY_MAX_BYTES).removesuffix(b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the key cannot be read: {reason_of(error)}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{path}: a key of {len(key)} bytes; it takes {MIN_KEY_BYTES} or more, such as 32 random ones")
    return key
