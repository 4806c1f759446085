"""Handfuls: small gradients that come into the buffer together, and what one backward teaches about the next.

What has come together in one backward probably does so in the next one. Then only the last of them needs a hook in Python
(``ddp.grad_hook``), and the others wait in ``param.grad``, where autograd adds a second gradient of the same backward to the
first: in the dtype of the parameter, and in memory that other gradients may share. So parameters that have shown anything of
that kind are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from megabucket.buffer.grad_slot import GradSlot


@dataclass(frozen=True, eq=False)
class Handful:
    """Small parameters of a group whose gradients came together."""

    positions: tuple[int, ...]
    slots: list[GradSlot]
    views: list[torch.Tensor]
    numels: list[int]
    is_unique: bool
    """Whether no parameter is in it twice."""


class Lesson:
    """Remembers the handfuls of one backward."""

    def __init__(self) -> None:
        self._task: int | None = None
        self._together: list[tuple[int, ...]] = []
        self._apart: set[int] = set()

    @property
    def is_on(self) -> bool:
        """Whether it was begun and not ended."""
        return self._task is not None

    def begin(self) -> None:
        """Learn from the backward that is running."""
        self._task = torch._C._current_graph_task_id()
        self._together, self._apart = [], set()

    def note(self, handful: Handful, grads: Sequence[torch.Tensor | None], *, tasks: set[int]) -> None:
        """Note what has come together.

        Args:
            tasks: by which runs of autograd. What activation checkpointing reruns within a backward is one of its own, and may
                bring several gradients of one parameter.
        """
        if self._task is None:
            return
        self._together.append(handful.positions)
        is_rerun = tasks != {self._task}
        of_each = zip(handful.positions, handful.slots, grads, strict=True)
        shared = (position for position, slot, grad in of_each if shares_memory(grad, slot))
        self._apart.update(handful.positions if is_rerun else shared)

    def note_single(self, position: int) -> None:
        """Note a gradient that came alone."""
        if self.is_on:
            self._apart.add(position)

    def end(self) -> list[list[int]]:
        """Return the positions of parameters that came together, in the order in which they came; at least two each."""
        counts = Counter(chain.from_iterable(self._together))
        self._apart.update(position for position, count in counts.items() if count > 1)
        together = [[position for position in positions if position not in self._apart] for positions in self._together]
        self._task, self._together = None, []
        return [positions for positions in together if len(positions) > 1]


def shares_memory(grad: torch.Tensor | None, slot: GradSlot) -> bool:
    """Return whether a gradient has its memory together with another one. Autograd lets gradients be views of one tensor.

    Its place in the buffer is its own, whatever else is in the buffer.
    """
    if grad is None or grad is slot.view or grad.layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > 2  # the tensor, and what was made to ask
