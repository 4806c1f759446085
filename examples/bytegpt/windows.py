"""Which bytes make a batch: windows of the corpus, chosen by numbers alone, so that a run can be repeated.

Training windows start anywhere and depend on seed and step, and on their place in the batch of all ranks; held-out windows lie
evenly spread and depend on nothing but their number.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from examples.bytegpt.corpus import Split
from megabucket.errors import CorpusError

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and next-byte targets, both int64 of shape ``(windows, sequence_length)``."""


class Windows:
    """Cuts one part of a corpus into inputs and next-byte targets.

    Args:
        split: the bytes.
        sequence_length: tokens per window.
        device: where batches are made.

    Raises:
        CorpusError: the part is shorter than one window and its last target.
    """

    def __init__(self, split: Split, sequence_length: int, *, device: torch.device) -> None:
        if split.num_bytes <= sequence_length:
            raise CorpusError(
                f"{split.num_files} file(s) with {split.num_bytes} bytes are too few for one window of {sequence_length} "
                "bytes and its next byte. Use a larger corpus or a smaller model.sequence_length."
            )
        self.num_starts = split.num_bytes - sequence_length
        self._data = torch.from_numpy(split.data)
        self._offsets = torch.arange(sequence_length + 1)
        self._device = device

    def batch(self, starts: npt.NDArray[np.int64]) -> Batch:
        """Return the windows that begin at ``starts``."""
        rows = self._data[torch.from_numpy(starts)[:, None] + self._offsets].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]


def training_starts(windows: Windows, num_windows: int, *, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return random starts that depend on ``key`` only: seed and step."""
    return np.random.default_rng(key).integers(0, windows.num_starts, size=num_windows)


def held_out_starts(windows: Windows, num_windows: int) -> npt.NDArray[np.int64]:
    """Return starts spread evenly from the first possible window to the last."""
    return np.linspace(0, windows.num_starts - 1, num_windows).astype(np.int64)
