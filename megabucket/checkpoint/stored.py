"""A checkpoint on the disk: find and open it, verify it, and read ranges of it into tensors.

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
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import in_shape
from megabucket.checkpoint.catalog import (
    LATEST,
    MAX_STEP,
    Latest,
    StepDirectory,
    read_latest,
    saved_steps,
    step_directories,
)
from megabucket.checkpoint.file_system import NUM_FILE_THREADS, read_file, reason_of
from megabucket.checkpoint.format import (
    ITEM_BYTES,
    MANIFEST_NAME,
    VERSION,
    Json,
    Manifest,
    OtherVersionError,
    Piece,
    StoredFile,
    StoredRange,
    TensorInfo,
    decode_manifest,
    first_bytes,
    overlap,
)
from megabucket.errors import CheckpointError, CheckpointInvalidError, CheckpointMismatchError, CheckpointMissingError, log_once

_MAX_MANIFEST_BYTES: Final = 1 << 30


class _Target(NamedTuple):
    """Memory to fill with the elements of a stored block from ``start`` on."""

    block: TensorInfo
    ranges: tuple[StoredRange, ...]
    start: int
    values: torch.Tensor


_Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor, str]
"""The arguments of ``copy_checked``."""


class Stored:
    """A checkpoint that was opened, from files of any format.

    Args:
        path: its place, for texts.
        world_size: how many ranks wrote it.
        tensors: each whole tensor, by name.
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
    """A checkpoint whose manifest was read and has the right seal; data files are verified when they are read.

    Attributes:
        path: its directory.
        manifest: its contents, with the blocks of each tensor.
        tensors: each whole tensor, by name.
        values: everything that is not a tensor.
        files: the data files.
        seal: SHA-256 of the manifest's text. Two checkpoints with one seal are equal.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        tensors = {name: tensor.infos(name)[0].whole for name, tensor in manifest.tensors.items()}
        super().__init__(path, manifest.step, manifest.world_size, tensors, manifest.values)
        self.manifest, self.files, self.seal = manifest, manifest.files, manifest.seal

    def verify(self) -> None:
        """Read every file and compare it with the manifest.

        Raises:
            CheckpointInvalidError: the first file that is not the one that was written.
        """
        for error in self.damage():
            raise error

    def damage(self) -> list[CheckpointInvalidError]:
        """Read every file, and return an error for each that is not the one that was written."""

        def check(file: StoredFile) -> list[CheckpointInvalidError]:
            try:
                self._verified(file)
            except CheckpointInvalidError as error:
                return [error]
            return []

        with ThreadPoolExecutor(NUM_FILE_THREADS, "megabucket-load") as pool:
            return [error for errors in pool.map(check, self.files) for error in errors]

    def _verified(self, file: StoredFile) -> memoryview:
        """Return the contents of a file, whose SHA-256 is right."""
        try:
            contents = read_file(self.path / file.name, file.num_bytes)
        except (OSError, ValueError) as error:
            raise invalid(self.path, file.name, _read_problem(error)) from None
        if len(contents) != file.num_bytes:
            raise invalid(self.path, file.name, f"it has {len(contents)} bytes, and the manifest says {file.num_bytes}")
        digest = hashlib.sha256(contents).hexdigest()
        if digest != file.sha256:
            raise invalid(self.path, file.name, f"its SHA-256 is {digest}, and the manifest says {file.sha256}")
        return contents

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:
        """Fill the values of each piece from the files that hold some of it; each file is read once.

        A piece is filled from verified files only. A damaged file that is found later leaves some pieces filled and others
        not: read into memory that can be thrown away.

        A piece of a block that is not stored as such, or in another ``order``, costs memory for two copies meanwhile.

        Args:
            cast: convert floating-point values; one that does not fit is an error.

        Raises:
            CheckpointMismatchError: names, shapes or dtypes differ; every difference is listed and nothing was read.
            CheckpointInvalidError: a file is not the one that was written.
        """
        found = [find_difference(self.tensors, of.info.name, of.info.global_shape, of.values.dtype, cast=cast) for of in wanted]
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise CheckpointMismatchError(path=str(self.path), problems=problems)
        targets: list[_Target] = []
        copies: list[_Copy] = []
        for piece in (piece for piece in wanted if piece.start < piece.stop):
            tensor = self.manifest.tensors[piece.info.name]
            blocks = [*zip(tensor.infos(piece.info.name), tensor.blocks, strict=True)]
            same = next((one for one in blocks if _place(one[0]) == _place(piece.info)), None)
            if same is not None:
                targets.append(_Target(same[0], same[1].pieces, piece.start, piece.values.detach()))
                continue
            wider, start = _narrowed(piece)
            values = torch.empty(wider.numel, dtype=dtype_named(tensor.dtype), device="cpu")
            for info, block in blocks:
                _copy_common(_Target(info, block.pieces, 0, values), wider, targets, copies)
            copies.append((values[start : start + len(piece.values)], piece.values.detach(), piece.info.name))
        self._fill(targets)
        for copy in copies:
            copy_checked(*copy)

    def _fill(self, targets: Sequence[_Target]) -> None:
        by_file: dict[int, list[tuple[str, int, torch.dtype, torch.Tensor]]] = {}
        for block, ranges, start, values in targets:
            stop = start + len(values)
            for source in ranges[bisect_right(ranges, start, key=lambda source: source.start) - 1 :]:
                if source.start >= stop:
                    break
                first, last = max(start, source.start), min(stop, source.stop)
                skipped_bytes = (first - source.start) * ITEM_BYTES[block.dtype]
                part = block.key_of(source.start, source.stop), skipped_bytes, dtype_named(block.dtype)
                by_file.setdefault(source.file, []).append((*part, values[first - start : last - start]))

        def fill(index: int) -> None:
            contents = self._verified(self.files[index])
            begins = first_bytes(contents)
            for key, skipped_bytes, dtype, values in by_file[index]:
                source = torch.frombuffer(contents, dtype=dtype, count=len(values), offset=begins[key] + skipped_bytes)
                copy_checked(source, values, key)

        with ThreadPoolExecutor(NUM_FILE_THREADS, "megabucket-load") as pool:
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
    # isfinite() does not take dtypes of 8 bits; all their numbers are exact in float32.
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


def _copy_common(source: _Target, wanted: TensorInfo, targets: list[_Target], copies: list[_Copy]) -> None:
    """Plan to read the elements that a stored block and a wanted one have in common, and to copy them into its values.

    Args:
        source: the stored block, with the values of the wanted one.
    """
    stored = source.block
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
    found = torch.empty(numel, dtype=source.values.dtype, device="cpu")
    targets.append(source._replace(start=first, values=found))
    inside = tuple(slice(a - begin, b - begin) for (a, b), begin in zip(common, wanted.offset, strict=True))
    copies.append((found.as_strided(sizes, strides), in_shape(source.values, wanted.shape, wanted.order)[inside], stored.name))


def open_checkpoint(
    root: Path | str, step: Literal["latest"] | int = "latest", *, allow_fallback: bool = False
) -> StoredCheckpoint:
    """Return a checkpoint whose manifest is whole and whose files are all there; their contents are verified when read.

    Local: a disk that fails on one rank can make ranks see different things. Let one rank open the checkpoint, and the others
    the step that it has found.

    Args:
        allow_fallback: verify all of it first; if it is damaged, take the newest older checkpoint that is whole, with a
            warning.

    Raises:
        CheckpointMissingError: there is none.
        CheckpointInvalidError: it is damaged, and there is no fallback, or nothing whole to fall back to.
    """
    root = Path(root)
    newest = StepDirectory(MAX_STEP if step == "latest" else step, 10**9)
    try:
        if step == "latest":
            stored = _newest(root)
        else:
            stored = _open(root, next((one for one in step_directories(root)[::-1] if one.step == step), StepDirectory(step)))
        if allow_fallback:
            stored.verify()
    except CheckpointError as error:
        if not allow_fallback:
            raise
        problem = error
    else:
        return stored
    if step == "latest":
        with suppress(CheckpointError):  # without it, an abandoned run cannot be told from this one
            newest = _latest(root).directory
    for directory in step_directories(root)[::-1]:
        if directory <= newest:
            with suppress(CheckpointError):
                stored = _open(root, directory)
                stored.verify()
                log_once(f"falling back to the checkpoint of step {stored.step} ({stored.path}): {problem}")
                return stored
    raise problem


def open_at(path: Path, step: int | None = None) -> StoredCheckpoint:
    """Return the checkpoint at a path: of a run's root its newest or ``step``, or of one of its directories.

    Raises:
        CheckpointError: see ``open_checkpoint``.
    """
    directory = StepDirectory.parse(path.absolute().name)
    if directory is None or step is not None:
        return open_checkpoint(path, "latest" if step is None else step)
    return _open(path.absolute().parent, directory)


def _newest(root: Path) -> StoredCheckpoint:
    latest = _latest(root)
    try:
        stored = _open(root, latest.directory)
    except CheckpointError:
        if _latest(root) == latest:
            raise
        return _newest(root)  # a save has replaced and removed it since ``latest`` was read
    if stored.seal != latest.seal:
        problem = f"it names {latest.directory.name} with another seal: one of the two was changed"
        raise invalid(root, LATEST, problem, saved_steps(root))
    return stored


def _latest(root: Path) -> Latest:
    try:
        return read_latest(root)
    except FileNotFoundError:
        wanted = f"{LATEST!r}, which is not there"
        raise CheckpointMissingError(root=str(root), wanted=wanted, steps=saved_steps(root)) from None
    except (OSError, ValueError) as error:
        raise invalid(root, LATEST, _read_problem(error), saved_steps(root)) from None


def _open(root: Path, directory: StepDirectory) -> StoredCheckpoint:
    path = root / directory.name
    try:
        manifest = decode_manifest(bytes(read_file(path / MANIFEST_NAME, _MAX_MANIFEST_BYTES)))
        missing = [file.name for file in manifest.files if not os.path.lexists(path / file.name)]
    except OtherVersionError as error:
        cause, remedy = f"This megabucket reads version {VERSION} only", "Load it with the megabucket that wrote it"
        raise invalid(path, MANIFEST_NAME, str(error), cause=cause, remedy=remedy) from None
    except (OSError, ValueError) as error:
        if not path.exists():
            raise CheckpointMissingError(root=str(root), wanted=f"step {directory.step}", steps=saved_steps(root)) from None
        raise invalid(path, MANIFEST_NAME, _read_problem(error)) from None
    if manifest.step != directory.step:
        raise invalid(path, MANIFEST_NAME, f"it is of step {manifest.step}, in the directory of step {directory.step}")
    if missing:
        problem = "it is missing" if len(missing) == 1 else f"it and {len(missing) - 1} other files are missing"
        raise invalid(path, missing[0], problem)
    return StoredCheckpoint(path, manifest)


def _read_problem(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    return f"it cannot be read: {reason_of(error)}" if isinstance(error, OSError) else str(error)


def invalid(
    path: Path, file: str, problem: str, steps: Sequence[int] | None = None, *, cause: str = "", remedy: str = ""
) -> CheckpointInvalidError:
    """Return the error about a file of a checkpoint; it names the other steps that are there."""
    if steps is None:
        steps = saved_steps(path.parent, but=StepDirectory.parse(path.name))
    return CheckpointInvalidError(path=str(path), file=file, problem=problem, steps=steps, cause=cause, remedy=remedy)
