"""``ddp.import_weights``: checks all chunks on all ranks, and only then writes them into parameters and module buffers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from megabucket.checkpoint.format import overlap
from megabucket.comm import exchange
from megabucket.errors import LayoutError, name_list
from megabucket.weights.chunk import WeightChunk, WeightEntry, joined_weights
from megabucket.weights.export import Exported, Held, device_of, first_problems, held_weights

_CALL: Final = "import_weights()"


@torch.inference_mode(False)
def import_weights(ddp: Exported, chunks: Iterable[WeightChunk]) -> None:
    """Write chunks into parameters and module buffers. See ``DistributedDataParallel.import_weights``."""
    ranks = ddp.sync.ranks
    with ddp.sync.call(_CALL) as call:
        ddp.sync.check_between_steps(_CALL)
        ddp.finish_param_sync()
        held, given = list(held_weights(ddp).values()), dict[str, list[tuple[WeightEntry, torch.Tensor]]]()
        for entry, values in joined_weights(chunks):
            given.setdefault(entry.name, []).append((entry, values))
        copies = _copies(held, given)
        call.open()
        rows = [json.dumps([sorted({one.entry.name for one in held}), sorted(given)]).encode()]
        if not ranks.has_same_params:
            rows = exchange(ranks.step, rows[0], device=device_of(ddp), label="imported weights")
    known, told = (set(itertools.chain.from_iterable(of_ranks)) for of_ranks in zip(*map(json.loads, rows), strict=True))
    if unknown := sorted(told - known):
        raise LayoutError(
            f"{_CALL}: {name_list(unknown)} is in the chunks, and in the model of no rank. Nothing was written. Export from "
            "the same model, or leave out what this one lacks."
        )
    with ddp.sync.call(f"{_CALL}: writing") as call, torch.no_grad():
        call.open()
        for target, values in copies:
            target.copy_(values)
        ddp.note_written()


def _copies(
    held: Iterable[Held], given: Mapping[str, Sequence[tuple[WeightEntry, torch.Tensor]]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of this rank's tensors, each with its new values.

    Raises:
        LayoutError: a tensor is missing, or of another shape or dtype.
    """
    copies, problems = [], []
    for own, target, _ in held:
        found = given.get(own.name, ())
        there = {("shape", entry.global_shape) for entry, _ in found} | {("dtype", values.dtype) for _, values in found}
        if other := there - {("shape", own.global_shape), ("dtype", target.dtype)}:
            kind, value = min(other, key=str)
            here = own.global_shape if kind == "shape" else target.dtype
            problems.append(f"{own.name!r} has the {kind} {value} in the chunks, and {here} in the model")
            continue
        num_found = 0
        for box, values in {entry.box: values for entry, values in found}.items():
            if (common := overlap(box, own.box)) is not None:
                copies.append((_cut(target, own.box, common), _cut(values, box, common)))
                num_found += math.prod(stop - start for start, stop in common)
        if num_found != own.numel or not found:
            problems.append(f"the chunks hold {num_found} of the {own.numel} elements of {own.name!r} on this rank")
    if problems:
        raise LayoutError(
            f"{_CALL}: {first_problems(problems)}. Nothing was written. Import all chunks of an export of this model, in its "
            "dtypes."
        )
    return copies


def _cut(tensor: torch.Tensor, of: Sequence[tuple[int, int]], box: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the part of a tensor that is ``box`` in the whole one.

    Args:
        of: the box that the tensor is.
    """
    return tensor[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, of, strict=True))]
