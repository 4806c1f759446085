"""A checkpoint on the disk, opened: what it holds, whether it is whole, and ranges of it read into tensors.

Everything here is local: each rank opens and reads for itself, only the files it needs. Nothing is unpickled and no code
of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megabucket.checkpoint.catalog import StepDirectory, whole_steps
from megabucket.checkpoint.cut import Part
from megabucket.checkpoint.dtypes import ITEM_BYTES
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.header import Entry, decode_header
from megabucket.checkpoint.manifest import Manifest, SealedManifest, StoredFile
from megabucket.checkpoint.pieces import Json, Piece, TensorInfo
from megabucket.checkpoint.plan import Copy, StoredRange, WantedRange, files_of, plan_reads
from megabucket.checkpoint.verified import DamagedFileError, for_each_verified
from megabucket.errors import CheckpointInvalidError, CheckpointMismatchError


@dataclass(frozen=True, slots=True)
class _Held:
    """A stored range, with the tensor it is of."""

    info: TensorInfo
    range: StoredRange


class StoredCheckpoint:
    """One checkpoint, its manifest read and its seal found right; data files are verified when they are read.

    Attributes:
        path: its directory.
        step: of which step it is.
        world_size: how many ranks wrote it.
        tensors: what each tensor is, by name.
        values: everything that is not a tensor.
        files: the data files.
        seal: SHA-256 of the manifest's text, which stands for the whole checkpoint.
        signed: whether there is a signature (checked if a key was given).
    """

    def __init__(self, root: Path, directory: StepDirectory, sealed: SealedManifest, file_system: FileSystem) -> None:
        manifest: Manifest = sealed.manifest
        self.path = root / directory.name
        self.step, self.world_size = manifest.step, manifest.world_size
        self.seal, self.signed = sealed.seal, sealed.signed
        self.tensors: Mapping[str, TensorInfo] = {name: tensor.info for name, tensor in manifest.tensors.items()}
        self.values: Mapping[str, Json] = manifest.values
        self.files: tuple[StoredFile, ...] = manifest.files
        self.ranges: Mapping[str, tuple[StoredRange, ...]] = {name: t.ranges for name, t in manifest.tensors.items()}
        self._root, self._directory, self._file_system = root, directory, file_system
        self._held: list[list[_Held]] = [[] for _ in manifest.files]
        for tensor in manifest.tensors.values():
            for part in tensor.ranges:
                self._held[part.file].append(_Held(tensor.info, part))

    def verify(self, *, part: int = 0, parts: int = 1) -> None:
        """Read every file and compare it with the manifest; or every ``parts``-th from ``part`` on, to share the work.

        Raises:
            CheckpointInvalidError: the first file that is not what was written.
        """
        chosen = [(index, self.files[index]) for index in range(part, len(self.files), parts)]
        try:
            for_each_verified(self._file_system, self.path, chosen, self._check_file)
        except DamagedFileError as error:
            raise self._invalid(error) from None

    def problems(self) -> list[str]:
        """Return what is wrong with each file that is not what was written: nothing, for a whole checkpoint."""
        return [problem for index in range(len(self.files)) if (problem := self._problem(index)) is not None]

    def _problem(self, index: int) -> str | None:
        try:
            for_each_verified(self._file_system, self.path, [(index, self.files[index])], self._check_file)
        except DamagedFileError as error:
            return str(error)
        return None

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:
        """Fill the values of each piece from the files; only files that hold some of it are read, each once.

        A piece is filled only from files that were verified before, but a file that is found damaged later leaves
        pieces filled and others not: read into memory that can be thrown away.

        Pieces whose ``order`` is another than the stored one cost memory for the whole tensor while this runs.

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
        targets: list[tuple[TensorInfo, int, int, torch.Tensor]] = []
        reordered: dict[str, torch.Tensor] = {}
        for piece in wanted:
            info = self.tensors[piece.info.name]
            if _same_order(piece.info, info) or piece.start == piece.stop:
                targets.append((info, piece.start, piece.stop, piece.values.detach()))
            elif info.name not in reordered:
                reordered[info.name] = torch.empty(info.numel, dtype=getattr(torch, info.dtype))
                targets.append((info, 0, info.numel, reordered[info.name]))
        self._fill(targets)
        for piece in wanted:
            info = self.tensors[piece.info.name]
            if info.name in reordered and not _same_order(piece.info, info):
                flat = _in_order(reordered[info.name], info, piece.info.order)
                copy_checked(flat[piece.start : piece.stop], piece.values.detach(), info.name)

    def _mismatches(self, piece: Piece, *, cast: bool) -> list[str]:
        wanted = piece.info
        info = self.tensors.get(wanted.name)
        if info is None:
            return [f"{wanted.name!r} is not in the checkpoint"]
        found = []
        if wanted.shape != info.shape:
            found.append(f"{wanted.name!r} has shape {info.shape} in the checkpoint, and {wanted.shape} is wanted")
        elif not 0 <= piece.start <= piece.stop <= info.numel or piece.values.shape != (piece.stop - piece.start,):
            found.append(f"{wanted.name!r} {piece.start}:{piece.stop} is wanted into {tuple(piece.values.shape)} elements")
        if str(piece.values.dtype) != f"torch.{wanted.dtype}":
            found.append(f"{wanted.name!r} is wanted as {wanted.dtype} into values of {piece.values.dtype}")
        elif wanted.dtype != info.dtype:
            found.extend(_cast_problems(info, piece.values.dtype, cast=cast))
        return found

    def _fill(self, targets: Sequence[tuple[TensorInfo, int, int, torch.Tensor]]) -> None:
        def use(copy: Copy, values: torch.Tensor) -> None:
            target = targets[copy.target][3][copy.target_start : copy.target_start + copy.numel]
            copy_checked(values, target, copy.name)

        self.stream([WantedRange(info.name, start, stop) for info, start, stop, _ in targets], use)

    def stream(self, wanted: Sequence[WantedRange], use: Callable[[Copy, torch.Tensor], None]) -> None:
        """Hand each stored stretch of the wanted ranges to ``use``, in the order of the files, each file read once.

        Memory is that of a few files, however much is wanted. ``use`` is called in several threads, with values that are
        valid during the call only.

        Raises:
            CheckpointInvalidError: a file is not what was written; ``use`` never sees anything of it.
        """
        by_file = files_of(plan_reads(self.ranges, wanted))

        def use_file(index: int, contents: torch.Tensor) -> None:
            entries = self._entries(index, contents)
            for copy in by_file[index]:
                use(copy, _values(contents, entries, copy, self.tensors[copy.name]))

        try:
            for_each_verified(self._file_system, self.path, [(index, self.files[index]) for index in by_file], use_file)
        except DamagedFileError as error:
            raise self._invalid(error) from None

    def _check_file(self, index: int, contents: torch.Tensor) -> None:
        self._entries(index, contents)

    def _entries(self, index: int, contents: torch.Tensor) -> dict[str, Entry]:
        """Return what a file says it holds, which must be what the manifest says it holds."""
        file = self.files[index]
        try:
            entries = decode_header(contents.numpy().data, file.num_bytes)
        except ValueError as error:
            raise DamagedFileError(file.name, str(error)) from None
        parts = [Part(held.info, held.range.start, held.range.stop, 0) for held in self._held[index]]
        expected = {part.key: (part.info.dtype, part.shape) for part in parts}
        found = {key: (entry.dtype, entry.shape) for key, entry in entries.items()}
        if len(parts) != len(expected) or found != expected:
            differing = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
            raise DamagedFileError(
                file.name, f"the manifest and the file differ about {len(differing)} tensors, such as {differing[:1]!r:.200}"
            )
        return entries

    def _invalid(self, error: DamagedFileError) -> CheckpointInvalidError:
        steps = whole_steps(self._file_system, self._root, but=self._directory)
        return CheckpointInvalidError(path=str(self.path), file=error.file, problem=error.problem, steps=steps)


def _values(contents: torch.Tensor, entries: Mapping[str, Entry], copy: Copy, info: TensorInfo) -> torch.Tensor:
    """Return the stored elements that ``copy`` takes, in the memory of the file."""
    entry = entries[Part(info, copy.source.start, copy.source.stop, 0).key]
    item_bytes = ITEM_BYTES[info.dtype]
    begin = entry.start_byte + copy.source_start * item_bytes
    raw = contents[begin : begin + copy.numel * item_bytes]
    if info.dtype == "bool" and bool((raw > 1).any()):
        raise CheckpointMismatchError(path=info.name, problems=[f"{info.name!r} is bool and has bytes other than 0 and 1"])
    if begin % item_bytes:  # other writers need not align
        raw = raw.clone()
    return raw.view(getattr(torch, info.dtype))


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


def _cast_problems(info: TensorInfo, wanted: torch.dtype, *, cast: bool) -> list[str]:
    stored = getattr(torch, info.dtype)
    if not torch.can_cast(stored, wanted):
        return [f"{info.name!r} is {info.dtype} in the checkpoint, which is never made {wanted}"]
    return [] if cast else [f"{info.name!r} is {info.dtype} in the checkpoint and {wanted} is wanted; cast=True converts"]


def _same_order(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether both lay out the same shape alike; dimensions of one element are laid out anyhow."""
    return _effective(one) == _effective(other) or one.numel <= 1


def _effective(info: TensorInfo) -> list[int]:
    return [dim for dim in info.order if info.shape[dim] != 1]


def _in_order(flat: torch.Tensor, info: TensorInfo, order: Sequence[int]) -> torch.Tensor:
    """Return the elements of a tensor stored as ``info`` says, flat in another order."""
    stored = flat.view([info.shape[dim] for dim in info.order])
    return stored.permute([info.order.index(dim) for dim in order]).reshape(-1)
