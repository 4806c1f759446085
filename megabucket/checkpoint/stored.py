"""A checkpoint on the disk: found and opened, verified, and ranges of it read into tensors.

Everything here is local: each rank opens and reads for itself, only the files it needs. Nothing is unpickled and no code
of a checkpoint is run.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from megabucket.buffer import dtype_named
from megabucket.checkpoint.canonical import in_shape
from megabucket.checkpoint.catalog import (
    LATEST,
    Latest,
    StepDirectory,
    read_latest,
    read_manifest,
    step_directories,
    whole_steps,
)
from megabucket.checkpoint.data_files import Part
from megabucket.checkpoint.file_system import FileSystem, num_file_threads, reason_of
from megabucket.checkpoint.format import (
    ITEM_BYTES,
    MANIFEST_NAME,
    Json,
    Piece,
    SealedManifest,
    StoredBlock,
    StoredFile,
    TensorInfo,
    first_bytes,
    overlap,
)
from megabucket.errors import CheckpointError, CheckpointInvalidError, CheckpointMismatchError, CheckpointMissingError, log_once

_Target: TypeAlias = tuple[StoredBlock, int, torch.Tensor]
"""A block, and what is to be filled with its elements from a first one on."""


class _DamagedFileError(Exception):
    """Which file is not as it must be, and why; the reader makes an error for users of it."""

    def __init__(self, file: str, problem: str) -> None:
        self.file, self.problem = file, problem
        super().__init__(f"{file}: {problem}")


class StoredCheckpoint:
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

    def __init__(self, root: Path, directory: StepDirectory, sealed: SealedManifest, file_system: FileSystem) -> None:
        manifest = sealed.manifest
        self.path = root / directory.name
        self.step, self.world_size = manifest.step, manifest.world_size
        self.seal, self.signed = sealed.seal, sealed.signed
        self.blocks: Mapping[str, tuple[StoredBlock, ...]] = manifest.tensors
        self.tensors: Mapping[str, TensorInfo] = {name: blocks[0].info.whole for name, blocks in self.blocks.items()}
        self.values: Mapping[str, Json] = manifest.values
        self.files: tuple[StoredFile, ...] = manifest.files
        self._root, self._directory, self._file_system = root, directory, file_system

    def verify(self, *, part: int = 0, parts: int = 1) -> None:
        """Read every file and compare it with the manifest; or every ``parts``-th from ``part`` on, to share the work.

        Raises:
            CheckpointInvalidError: the first file that is not what was written.
        """
        for error in self._damage(self.files[part::parts]):
            raise self._invalid(error)

    def problems(self) -> list[str]:
        """Return what is wrong with each file that is not what was written: nothing, for a whole checkpoint."""
        return [str(error) for error in self._damage(self.files)]

    def _damage(self, files: Sequence[StoredFile]) -> Iterator[_DamagedFileError]:
        def check(file: StoredFile) -> _DamagedFileError | None:
            try:
                self._verified(file)
            except _DamagedFileError as error:
                return error
            return None

        with ThreadPoolExecutor(num_file_threads(), "megabucket-load") as pool:
            yield from (error for error in pool.map(check, files) if error is not None)

    def _verified(self, file: StoredFile) -> memoryview:
        """Return the contents of a file, once the SHA-256 of these bytes was found right."""
        try:
            contents = self._file_system.read(self.path / file.name, file.num_bytes)
        except FileNotFoundError:
            raise _DamagedFileError(file.name, "it is missing") from None
        except OSError as error:
            raise _DamagedFileError(file.name, f"it cannot be read: {reason_of(error)}") from None
        except ValueError as error:
            raise _DamagedFileError(file.name, str(error)) from None
        if len(contents) != file.num_bytes:
            raise _DamagedFileError(file.name, f"it has {len(contents)} bytes, and the manifest says {file.num_bytes}")
        digest = hashlib.sha256(contents).hexdigest()
        if digest != file.sha256:
            raise _DamagedFileError(file.name, f"its SHA-256 is {digest}, and the manifest says {file.sha256}")
        return contents

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:
        """Fill the values of each piece from the files; only files that hold some of it are read, each once.

        A piece is filled only from files that were verified before, but a file that is found damaged later leaves
        pieces filled and others not: read into memory that can be thrown away.

        Pieces of a block that is not stored as such, or in another ``order``, cost memory for two copies while this runs.

        Args:
            cast: take stored values of other dtypes, if the wanted one is of the same or a wider kind (bool, integer,
                float, complex); a value that does not fit is an error.

        Raises:
            CheckpointMismatchError: names, shapes or dtypes differ; every one is listed and nothing was read.
            CheckpointInvalidError: a file is not what was written.
        """
        problems = [problem for piece in wanted for problem in self._mismatches(piece, cast=cast)]
        if problems:
            raise CheckpointMismatchError(path=str(self.path), problems=problems)
        targets: list[_Target] = []
        rebuilt: dict[TensorInfo, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        converted: list[tuple[torch.Tensor, Piece]] = []
        for piece in (piece for piece in wanted if piece.start < piece.stop):
            blocks = self.blocks[piece.info.name]
            same = next((block for block in blocks if _lies_alike(piece.info, block.info)), None)
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

    def _mismatches(self, piece: Piece, *, cast: bool) -> list[str]:
        wanted = piece.info
        info = self.tensors.get(wanted.name)
        if info is None:
            return [f"{wanted.name!r} is not in the checkpoint"]
        found = []
        if wanted.global_shape != info.shape:
            found.append(f"{wanted.name!r} has shape {info.shape} in the checkpoint, and {wanted.global_shape} is wanted")
        elif not 0 <= piece.start <= piece.stop <= wanted.numel or piece.values.shape != (piece.stop - piece.start,):
            found.append(f"{wanted.name!r} {piece.start}:{piece.stop} is wanted into {tuple(piece.values.shape)} elements")
        if str(piece.values.dtype) != f"torch.{wanted.dtype}":
            found.append(f"{wanted.name!r} is wanted as {wanted.dtype} into values of {piece.values.dtype}")
        elif not torch.can_cast(dtype_named(info.dtype), piece.values.dtype):
            found.append(f"{info.name!r} is {info.dtype} in the checkpoint, which is never made {piece.values.dtype}")
        elif wanted.dtype != info.dtype and not cast:
            found.append(
                f"{info.name!r} is {info.dtype} in the checkpoint and {piece.values.dtype} is wanted; cast=True converts"
            )
        return found

    def _fill(self, targets: Sequence[_Target]) -> None:
        by_file: dict[int, list[tuple[Part, int, torch.Tensor]]] = {}
        for block, start, target in targets:
            stop = start + len(target)
            for source in block.ranges[bisect_right(block.ranges, start, key=lambda source: source.start) - 1 :]:
                if source.start >= stop:
                    break
                first, last = max(start, source.start), min(stop, source.stop)
                part = Part(block.info, source.start, source.stop)
                by_file.setdefault(source.file, []).append((part, first - source.start, target[first - start : last - start]))

        def fill(index: int) -> None:
            contents = self._verified(self.files[index])
            begins = first_bytes(contents)
            for part, skipped, target in by_file[index]:
                begin = begins[part.key] + skipped * ITEM_BYTES[part.info.dtype]
                values = torch.frombuffer(contents, dtype=dtype_named(part.info.dtype), count=len(target), offset=begin)
                copy_checked(values, target, part.info.key)

        try:
            with ThreadPoolExecutor(num_file_threads(), "megabucket-load") as pool:
                list(pool.map(fill, sorted(by_file)))  # after a failure those that have not begun are cancelled
        except _DamagedFileError as error:
            raise self._invalid(error) from None

    def _invalid(self, error: _DamagedFileError) -> CheckpointInvalidError:
        steps = whole_steps(self._file_system, self._root, but=self._directory)
        return CheckpointInvalidError(path=str(self.path), file=error.file, problem=error.problem, steps=steps)


def copy_checked(source: torch.Tensor, target: torch.Tensor, name: str) -> None:
    """Copy values, perhaps into another dtype.

    Raises:
        CheckpointMismatchError: that dtype cannot hold them.
    """
    target.copy_(source)
    if source.dtype == target.dtype:
        return
    if target.is_floating_point() or target.is_complex():
        lost = bool((_is_finite(target) != _is_finite(source)).any())
    else:
        lost = not torch.equal(target.cpu().to(source.dtype), source.cpu())
    if lost:
        raise CheckpointMismatchError(path=name, problems=[f"{name!r} has values that {target.dtype} cannot hold"])


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    # Torch does not ask numbers of 8 bits; all of them are exact in float32.
    wide = values.float() if values.dtype.itemsize == 1 else values
    return wide.isfinite().cpu()


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


def _lies_alike(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether both are the same block and lay it out alike; dimensions of one element are laid out anyhow."""
    if (one.offset, one.shape) != (other.offset, other.shape):
        return False
    first, second = ([dim for dim in info.order if info.shape[dim] != 1] for info in (one, other))
    return first == second or one.numel <= 1


def open_checkpoint(
    root: Path | str,
    step: Literal["latest"] | int = "latest",
    *,
    key: bytes | None = None,
    allow_fallback: bool = False,
    file_system: FileSystem | None = None,
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
    opener = _Opener(Path(root), key, file_system or FileSystem())
    if allow_fallback:
        return opener.newest_whole(step)
    return opener.newest() if step == "latest" else opener.of_step(step)


def open_at(path: Path, *, step: int | None = None, key: bytes | None = None) -> StoredCheckpoint:
    """Return the checkpoint that a user means by a path: a run's root (its newest, or ``step``), or one of its directories.

    Raises:
        CheckpointError: see ``open_checkpoint``.
    """
    directory = StepDirectory.parse(path.absolute().name)
    if directory is None or step is not None:
        return open_checkpoint(path, "latest" if step is None else step, key=key)
    return _Opener(path.absolute().parent, key, FileSystem()).open(directory)


class _Opener:
    def __init__(self, root: Path, key: bytes | None, file_system: FileSystem) -> None:
        self._root, self._key, self._files = root, key, file_system

    def newest(self) -> StoredCheckpoint:
        latest = self._latest()
        while True:
            try:
                stored = self.open(latest.directory)
                break
            except CheckpointError:
                # A save may have replaced and removed it since ``latest`` was read.
                again = self._latest()
                if again == latest:
                    raise
                latest = again
        if stored.seal != latest.seal:
            problem = f"it names {latest.directory.name} with another seal: one of the two was changed"
            raise self._invalid(self._root, LATEST, problem)
        return stored

    def of_step(self, step: int) -> StoredCheckpoint:
        directories = [directory for directory in step_directories(self._files, self._root) if directory.step == step]
        if not directories:
            raise self._missing(f"step {step}")
        return self.open(directories[-1])

    def newest_whole(self, step: Literal["latest"] | int) -> StoredCheckpoint:
        problems: list[CheckpointError] = []
        for candidate in self._candidates(step, problems):
            try:
                stored = self.open(candidate)
                stored.verify()
            except CheckpointError as error:
                problems.append(error)
                continue
            if problems:
                log_once(f"falling back to the checkpoint of step {stored.step} ({stored.path}): {problems[0]}")
            return stored
        raise problems[0] if problems else self._missing(str(step))

    def _candidates(self, step: Literal["latest"] | int, problems: list[CheckpointError]) -> Iterator[StepDirectory]:
        directories = step_directories(self._files, self._root)[::-1]
        if step != "latest":
            if not any(directory.step == step for directory in directories):
                problems.append(self._missing(f"step {step}"))
            yield from (directory for directory in directories if directory.step <= step)
            return
        try:
            first = self._latest().directory
        except CheckpointError as error:
            problems.append(error)  # nobody can say which are of an abandoned run
            yield from directories
            return
        try:
            self.newest()
        except CheckpointError as error:
            problems.append(error)
        yield from (directory for directory in directories if directory <= first)

    def _latest(self) -> Latest:
        try:
            return read_latest(self._files, self._root)
        except FileNotFoundError:
            raise self._missing(f"{LATEST!r}, which is not there") from None
        except (OSError, ValueError) as error:
            raise self._invalid(self._root, LATEST, reason_of(error)) from None

    def open(self, directory: StepDirectory) -> StoredCheckpoint:
        path = self._root / directory.name
        try:
            names = set(self._files.names(path))
        except FileNotFoundError:
            raise self._missing(directory.name) from None
        except OSError as error:
            raise self._invalid(path, ".", f"the directory cannot be read: {reason_of(error)}", directory) from None
        try:
            sealed = read_manifest(self._files, path, directory, key=self._key)
        except (OSError, ValueError) as error:
            problem = "it is missing" if isinstance(error, FileNotFoundError) else reason_of(error)
            raise self._invalid(path, MANIFEST_NAME, problem, directory) from None
        missing = [file.name for file in sealed.manifest.files if file.name not in names]
        if missing:
            problem = "it is missing" if len(missing) == 1 else f"it and {len(missing) - 1} other files are missing"
            raise self._invalid(path, missing[0], problem, directory)
        return StoredCheckpoint(self._root, directory, sealed, self._files)

    def _missing(self, wanted: str) -> CheckpointMissingError:
        return CheckpointMissingError(root=str(self._root), wanted=wanted, steps=whole_steps(self._files, self._root))

    def _invalid(self, path: Path, file: str, problem: str, but: StepDirectory | None = None) -> CheckpointInvalidError:
        steps = whole_steps(self._files, self._root, but=but)
        return CheckpointInvalidError(path=str(path), file=file, problem=problem, steps=steps)
