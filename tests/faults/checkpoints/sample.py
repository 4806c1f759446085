"""What campaigns save: tensors that follow from the step alone, so that whatever is loaded can be judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megabucket.checkpoint.format import Json, Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import CheckpointRanks
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import StoredCheckpoint, open_checkpoint

FILE_BYTES = 3_000
"""So small that each rank writes several files."""

_TENSORS: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("model.weight", "float32", (29, 31), (0, 1)),
    ("model.conv", "bfloat16", (4, 3, 5, 5), (0, 2, 3, 1)),
    ("model.bias", "float16", (37,), (0,)),
    ("model.empty", "float32", (0, 4), (0, 1)),
    ("model.scale", "float64", (), ()),
    ("model.steps_seen", "int64", (), ()),
    ("model.mask", "bool", (19,), (0,)),
    ("optim.state.weight.exp_avg", "float32", (29, 31), (0, 1)),
    ("rng.0.torch", "uint8", (101,), (0,)),
)


class WrongStateError(Exception):
    """A load gave what was never saved, without an error: what must not happen."""


def infos() -> list[TensorInfo]:
    """Return the tensors of a sample."""
    return [TensorInfo(name, dtype, shape, order) for name, dtype, shape, order in _TENSORS]


def flat_values(info: TensorInfo, step: int) -> torch.Tensor:
    """Return the values of a tensor at a step, flat; any bits, nan and -0.0 among them."""
    draw = torch.Generator().manual_seed(step * 1_000 + [one[0] for one in _TENSORS].index(info.name))
    dtype = getattr(torch, info.dtype)
    if info.dtype == "bool":
        return torch.randint(0, 2, (info.numel,), generator=draw, dtype=torch.uint8).view(dtype)
    num_bytes = info.numel * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (num_bytes,), generator=draw, dtype=torch.uint8).view(dtype)


def values_of(step: int) -> dict[str, Json]:
    """Return what is not a tensor at a step."""
    return {"step": step, "lr": 1.0 / (step + 3), "groups": [{"name": "a]b{", "betas": [0.9, 0.95]}], "none": None}


def snapshot(step: int, *, rank: int, size: int) -> Snapshot:
    """Return what ``rank`` of ``size`` saves: the range of each tensor that falls to it, which can be none."""
    pieces = []
    for info in infos():
        start, stop = info.numel * rank // size, info.numel * (rank + 1) // size
        if start < stop or (info.numel == 0 and rank == 0):
            pieces.append(Piece(info, start, stop, flat_values(info, step)[start:stop].clone()))
    return Snapshot(pieces, values_of(step))


def save(root: Path, step: int, ranks: CheckpointRanks, settings: SaveSettings) -> Path:
    """Save the sample of a step."""
    return save_snapshot(root, step, snapshot(step, rank=ranks.rank, size=ranks.size), ranks, settings)


def judge(stored: StoredCheckpoint) -> int:
    """Return the step that was loaded, when all of it is that step's, bit for bit.

    Raises:
        WrongStateError: it is not.
        CheckpointError: it is damaged, which reading has found.
    """
    wanted = [Piece(info, 0, info.numel, torch.empty(info.numel, dtype=getattr(torch, info.dtype))) for info in infos()]
    stored.read(wanted)
    if set(stored.tensors) != {info.name for info in infos()} or stored.values != values_of(stored.step):
        raise WrongStateError(f"step {stored.step}: other tensors or values: {sorted(stored.tensors)}, {stored.values}")
    for piece in wanted:
        if not torch.equal(piece.values.view(torch.uint8), flat_values(piece.info, stored.step).view(torch.uint8)):
            raise WrongStateError(f"step {stored.step}: {piece.info.name} has other values")
    return stored.step


def loaded_step(root: Path, *, opened: Callable[[Path], StoredCheckpoint] = open_checkpoint) -> int:
    """Open the newest checkpoint, read and compare all of it, and return its step; see ``judge``."""
    return judge(opened(root))
