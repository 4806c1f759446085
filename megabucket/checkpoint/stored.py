"""A checkpoint on the disk: found and opened, verified, and ranges of it read into tensors.

Everything here is local: each rank opens and reads for itself, only the files it needs. Nothing is unpickled and no code
of a checkpoint is run.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import in_shape
from megabucket.checkpoint.catalog import (
    LATEST,
    Latest,
    StepDirectory,
    read_latest,
    read_manifest,
    saved_steps,
    step_directories,
)
from megabucket.checkpoint.file_system import num_file_threads, read_file, reason_of
from megabucket.checkpoint.format import (
    ITEM_BYTES,
    MANIFEST_NAME,
    Json,
    Manifest,
    Piece,
    StoredBlock,
    StoredFile,
    TensorInfo,
    first_bytes,
    key_of,
    overlap,
)
from megabucket.errors import CheckpointError, CheckpointInvalidError, CheckpointMismatchError, CheckpointMissingError, log_once

_Target: TypeAlias = tuple[StoredBlock, int, torch.Tensor]
"""A block, and what is to be filled with its elements from a first one on."""


class Stored:
    """A checkpoint that was opened, whatever holds it.

    Args:
        path: where it lies, for texts.
        world_size: how many ranks wrote it.
        tensors: what each tensor is as a whole, by name.
        values: everything that is not a tensor.
    """

    def __init__(
        self, path: Path, step: int, world_size: int, tensors: Mapping[str, TensorInfo], values: Mapping[str, Json]
    ) -> None:
        self.path, self.step, self.world_size, self.tensors, self.values = path, step, world_size, tensors, values

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:
        """Fill the values of pieces."""
        raise NotImplementedError


class StoredCheckpoint(Stored):
    """One checkpoint, its manifest read and its seal found right; data files are verified when they are read.

    Attributes:
        path: its directory.
        step: of which step it is.
        world_size: how many ranks wrote it.
        tensors: what each tensor is as a whole, by name.
        blocks: the blocks that each tensor is stored in, by name.
        values: everything that is not a tensor.
        files: the data files.
        seal: SHA-256 of the manifest's text, which stands for the whole checkpoint.
        signed: whether there is a signature (checked if a key was given).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.blocks: Mapping[str, tuple[StoredBlock, ...]] = manifest.tensors
        tensors = {name: blocks[0].info.whole for name, blocks in self.blocks.items()}
        super().__init__(path, manifest.step, manifest.world_size, tensors, manifest.values)
        self.files: tuple[StoredFile, ...] = manifest.files
        self.seal, self.signed = manifest.seal, manifest.signed

    def verify(self) -> None:
        """Read every file and compare it with the manifest.

        Raises:
            CheckpointInvalidError: the first file that is not what was written.
        """
        for error in self._damage():
            raise error

    def problems(self) -> list[str]:
        """Return what is wrong with each file that is not what was written: nothing, for a whole checkpoint."""
        return [f"{error.file}: {error.problem}" for error in self._damage()]

    def _damage(self) -> list[CheckpointInvalidError]:
        def check(file: StoredFile) -> CheckpointInvalidError | None:
            try:
                self._verified(file)
            except CheckpointInvalidError as error:
                return error
            return None

        with ThreadPoolExecutor(num_file_threads(), "megabucket-load") as pool:
            return [error for error in pool.map(check, self.files) if error is not None]

    def _verified(self, file: StoredFile) -> memoryview:
        """Return the contents of a file, once the SHA-256 of these bytes was found right."""
        try:
            contents = read_file(self.path / file.name, file.num_bytes)
            digest = hashlib.sha256(contents).hexdigest()
        except FileNotFoundError:
            problem = "it is missing"
        except OSError as error:
            problem = f"it cannot be read: {reason_of(error)}"
        except ValueError as error:
            problem = str(error)
        else:
            if digest == file.sha256:
                return contents
            problem = f"its SHA-256 is {digest}, and the manifest says {file.sha256}"
            if len(contents) != file.num_bytes:
                problem = f"it has {len(contents)} bytes, and the manifest says {file.num_bytes}"
        raise invalid(self.path, file.name, problem)

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:
        """Fill the values of each piece from the files; only files that hold some of it are read, each once.

        A piece is filled only from files that were verified before, but a file that is found damaged later leaves
        pieces filled and others not: read into memory that can be thrown away.

        Pieces of a block that is not stored as such, or in another ``order``, cost memory for two copies while this runs.

        Args:
            cast: floating-point values may be converted; one that does not fit is an error.

        Raises:
            CheckpointMismatchError: names, shapes or dtypes differ; every one is listed and nothing was read.
            CheckpointInvalidError: a file is not what was written.
        """
        found = [find_difference(self.tensors, of.info.name, of.info.global_shape, of.values.dtype, cast=cast) for of in wanted]
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise CheckpointMismatchError(path=str(self.path), problems=problems)
        targets: list[_Target] = []
        rebuilt: dict[TensorInfo, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        converted: list[tuple[torch.Tensor, Piece]] = []
        for piece in (piece for piece in wanted if piece.start < piece.stop):
            blocks = self.blocks[piece.info.name]
            same = next((block for block in blocks if _place(block.info) == _place(piece.info)), None)
            if same is not None:
                targets.append((same, piece.start, piece.values.detach()))
                continue
            wider, start = _narrowed(piece)
            if wider not in rebuilt:
                rebuilt[wider] = torch.empty(wider.numel, dtype=dtype_named(blocks[0].info.dtype))
                for block in blocks:
                    _copy_common(block, wider, rebuilt[wider], targets, copies)
            converted.append((rebuilt[wider][start : start + len(piece.values)], piece))
        self._fill(targets)
        for target, source in copies:
            target.copy_(source)
        for values, piece in converted:
            copy_checked(values, piece.values.detach(), piece.info.name)

    def _fill(self, targets: Sequence[_Target]) -> None:
        by_file: dict[int, list[tuple[str, int, torch.dtype, torch.Tensor]]] = {}
        for block, start, target in targets:
            stop, item_bytes, dtype = start + len(target), ITEM_BYTES[block.info.dtype], dtype_named(block.info.dtype)
            for source in block.ranges[bisect_right(block.ranges, start, key=lambda source: source.start) - 1 :]:
                if source.start >= stop:
                    break
                first, last = max(start, source.start), min(stop, source.stop)
                key, skipped = key_of(block.info, source.start, source.stop), (first - source.start) * item_bytes
                by_file.setdefault(source.file, []).append((key, skipped, dtype, target[first - start : last - start]))

        def fill(index: int) -> None:
            contents = self._verified(self.files[index])
            begins = first_bytes(contents)
            for key, skipped, dtype, target in by_file[index]:
                values = torch.frombuffer(contents, dtype=dtype, count=len(target), offset=begins[key] + skipped)
                copy_checked(values, target, key)

        with ThreadPoolExecutor(num_file_threads(), "megabucket-load") as pool:
            list(pool.map(fill, sorted(by_file)))  # after a failure those that have not begun are cancelled


def find_difference(
    tensors: Mapping[str, TensorInfo], name: str, shape: Sequence[int], dtype: torch.dtype, *, cast: bool
) -> str | None:
    """Return why a stored tensor cannot become one of a shape and a dtype, or ``None``."""
    info = tensors.get(name)
    if info is None:
        return f"{name!r} is not in the checkpoint"
    if info.shape != tuple(shape):
        return f"{name!r} has shape {info.shape} in the checkpoint and {tuple(shape)} here"
    there = dtype_named(info.dtype)
    if there == dtype:
        return None
    if not (there.is_floating_point and dtype.is_floating_point):
        return f"{name!r} is {info.dtype} in the checkpoint and {dtype_name(dtype)} here, and is never converted"
    return None if cast else f"{name!r} is {info.dtype} in the checkpoint and {dtype_name(dtype)} here; cast=True converts"


def copy_checked(source: torch.Tensor, target: torch.Tensor, name: str) -> None:
    """Copy values, perhaps into another floating-point dtype.

    Raises:
        CheckpointMismatchError: that dtype cannot hold them.
    """
    target.copy_(source)
    # Torch does not ask numbers of 8 bits whether they are finite; all of them are exact in float32.
    if source.dtype != target.dtype and bool((target.cpu().float().isfinite() != source.double().isfinite()).any()):
        raise CheckpointMismatchError(path=name, problems=[f"{name!r} has values that {target.dtype} cannot hold"])


def _place(info: TensorInfo) -> tuple[tuple[int, ...], ...]:
    return info.offset, info.shape, info.order


def _narrowed(piece: Piece) -> tuple[TensorInfo, int]:
    """Return the block of whole slices along the slowest dimension that holds a piece, and where the piece begins in it."""
    info = piece.info
    if not info.shape:
        return info, piece.start
    dim = info.order[0]
    slice_numel = info.numel // info.shape[dim]
    first, last = piece.start // slice_numel, -(-piece.stop // slice_numel)
    shape, offset = list(info.shape), list(info.offset)
    shape[dim], offset[dim] = last - first, offset[dim] + first
    return replace(info, shape=tuple(shape), offset=tuple(offset)), piece.start - first * slice_numel


def _copy_common(
    block: StoredBlock,
    wanted: TensorInfo,
    values: torch.Tensor,
    targets: list[_Target],
    copies: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Read what a stored block has in common with a wanted one into memory of its own, and copy that into ``values``."""
    stored = block.info
    common = overlap(stored.box, wanted.box)
    if common is None:
        return
    strides, stride = [0] * len(common), 1
    for dim in reversed(stored.order):
        strides[dim], stride = stride, stride * stored.shape[dim]
    sizes = [stop - start for start, stop in common]
    first = sum((start - begin) * step for (start, _), begin, step in zip(common, stored.offset, strides, strict=True))
    # From the first common element to the last; for a cut along the slowest dimension there is nothing else between them.
    numel = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    found = torch.empty(numel, dtype=values.dtype)
    targets.append((block, first, found))
    inside = tuple(slice(a - begin, b - begin) for (a, b), begin in zip(common, wanted.offset, strict=True))
    copies.append((in_shape(values, wanted.shape, wanted.order)[inside], found.as_strided(sizes, strides)))


def open_checkpoint(
    root: Path | str,
    step: Literal["latest"] | int = "latest",
    *,
    key: bytes | None = None,
    allow_fallback: bool = False,
) -> StoredCheckpoint:
    """Return a checkpoint whose manifest is whole and whose files are all there; their contents are verified when read.

    Local: ranks that open for themselves may see different things when a disk fails on one of them. Let one rank open
    and the others name its step.

    Args:
        key: demand a signature made with it.
        allow_fallback: verify all of it first, and take the newest older checkpoint that is whole if this one is not;
            warns when it does.

    Raises:
        CheckpointMissingError: there is none.
        CheckpointInvalidError: it is damaged, and no other may be taken or none is whole.
    """
    root = Path(root)
    if allow_fallback:
        return _newest_whole(root, step, key)
    if step == "latest":
        return _newest(root, key)
    return _open(root, next((one for one in step_directories(root)[::-1] if one.step == step), StepDirectory(step)), key)


def open_at(path: Path, *, step: int | None = None, key: bytes | None = None) -> StoredCheckpoint:
    """Return the checkpoint that a user means by a path: a run's root (its newest, or ``step``), or one of its directories.

    Raises:
        CheckpointError: see ``open_checkpoint``.
    """
    directory = StepDirectory.parse(path.absolute().name)
    if directory is None or step is not None:
        return open_checkpoint(path, "latest" if step is None else step, key=key)
    return _open(path.absolute().parent, directory, key)


def _newest(root: Path, key: bytes | None) -> StoredCheckpoint:
    latest = _latest(root)
    try:
        stored = _open(root, latest.directory, key)
    except CheckpointError:
        if _latest(root) == latest:
            raise
        return _newest(root, key)  # a save has replaced and removed it since ``latest`` was read
    if stored.seal != latest.seal:
        problem = f"it names {latest.directory.name} with another seal: one of the two was changed"
        raise invalid(root, LATEST, problem, saved_steps(root))
    return stored


def _newest_whole(root: Path, step: Literal["latest"] | int, key: bytes | None) -> StoredCheckpoint:
    """Return what is wanted, or the newest older one that is whole; of an unreadable ``latest``, the newest of all."""
    try:
        stored = open_checkpoint(root, step, key=key)
        stored.verify()
    except CheckpointError as error:
        problem = error
    else:
        return stored
    newest: StepDirectory | None = None
    if step != "latest":
        newest = StepDirectory(step, 10**9)
    else:
        with suppress(CheckpointError):  # else nobody can say which are of an abandoned run
            newest = _latest(root).directory
    for directory in step_directories(root)[::-1]:
        if newest is not None and directory > newest:
            continue
        try:
            stored = _open(root, directory, key)
            stored.verify()
        except CheckpointError:
            continue
        log_once(f"falling back to the checkpoint of step {stored.step} ({stored.path}): {problem}")
        return stored
    raise problem


def _latest(root: Path) -> Latest:
    try:
        return read_latest(root)
    except FileNotFoundError:
        wanted = f"{LATEST!r}, which is not there"
        raise CheckpointMissingError(root=str(root), wanted=wanted, steps=saved_steps(root)) from None
    except (OSError, ValueError) as error:
        raise invalid(root, LATEST, reason_of(error), saved_steps(root)) from None


def _open(root: Path, directory: StepDirectory, key: bytes | None) -> StoredCheckpoint:
    path = root / directory.name
    try:
        manifest = read_manifest(path, directory, key=key)
        missing = [file.name for file in manifest.files if not os.path.lexists(path / file.name)]
    except (OSError, ValueError) as error:
        if not path.exists():
            raise CheckpointMissingError(root=str(root), wanted=f"step {directory.step}", steps=saved_steps(root)) from None
        problem = "it is missing" if isinstance(error, FileNotFoundError) else reason_of(error)
        raise invalid(path, MANIFEST_NAME, problem) from None
    if missing:
        problem = "it is missing" if len(missing) == 1 else f"it and {len(missing) - 1} other files are missing"
        raise invalid(path, missing[0], problem)
    return StoredCheckpoint(path, manifest)


def invalid(path: Path, file: str, problem: str, steps: Sequence[int] | None = None) -> CheckpointInvalidError:
    """Return the error about a file of a checkpoint; it names the other steps that are there."""
    if steps is None:
        steps = saved_steps(path.parent, but=StepDirectory.parse(path.name))
    return CheckpointInvalidError(path=str(path), file=file, problem=problem, steps=steps)
