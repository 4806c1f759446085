"""How the gradients of a bucket group come into its buffer: large ones at once, small ones many in one call.

A small gradient costs more in Python and in calls of torch than in memory traffic. So its hook takes it out of ``param.grad``,
appends it to a list and returns; the gradient that finds no more room there comes the long way, by ``receive``, and brings all
of them into the buffer. Nothing waits longer than its backward lasts, or its group accumulates. So only what runs inside a
backward can tell the difference, and where others have hooks on parameters of the group, nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from contextlib import nullcontext
from typing import Final

import torch

from megabucket.buffer.grad_slot import GradSlot
from megabucket.buffer.readiness import Readiness
from megabucket.buffer.store_all import store_all
from megabucket.buffer.streams import GradStreams

SMALL_BYTES: Final = 128 << 10
"""A gradient of up to this many bytes may wait."""

MOST_WAITING: Final = 64
"""So many wait at most: all that is touched for them is still in the cache when they are stored."""

WAITING_BYTES: Final = 1 << 20
"""So many bytes wait at most, if all of them are as large as the average."""


class Waiting(list[torch.Tensor]):
    """Parameters whose gradients wait. Hooks hold this, where no garbage collector looks, so nothing may stay in it."""

    __slots__ = ("grads", "room")

    def __init__(self) -> None:
        super().__init__()
        self.grads: list[torch.Tensor | None] = []
        """Their gradients."""
        self.room = 0
        """How many may wait without anybody looking; 0 while nothing is known about the backward."""

    def add(self, param: torch.Tensor) -> None:
        """Take the gradient out of ``param.grad``, so that a second one in this backward is not added to it there."""
        self.append(param)
        self.grads.append(param.grad)
        param.grad = None

    def take(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return the parameters and their gradients, in the order in which they came, and forget them."""
        taken = self.copy(), self.grads
        self.clear()
        self.grads = []
        return taken


class GradIntake:
    """Where the hooks of one bucket group bring their gradients.

    Args:
        slots: of the group.
        readiness: told of each gradient that counts.
        interrupted: names of parameters whose gradient was cleared or replaced between two backwards are added here.
        streams: told on which one gradients are computed and stored; ``None`` on a device without any.
    """

    def __init__(
        self, slots: Sequence[GradSlot], readiness: Readiness, interrupted: list[str], streams: GradStreams | None
    ) -> None:
        self._slots = slots
        self._readiness = readiness
        self._interrupted = interrupted
        self.streams = streams
        self.is_small = [slot.param.nbytes <= SMALL_BYTES for slot in slots]
        """Of each parameter, whether its gradient may wait."""
        self.position_of = {id(slot.param): position for position, slot in enumerate(slots)}
        """Where each parameter stands in the group. By identity, so that hooks may hold it as they hold ``waiting``."""
        small_bytes = [slot.param.nbytes for slot, is_small in zip(slots, self.is_small, strict=True) if is_small]
        self._most_waiting = min(MOST_WAITING, WAITING_BYTES * len(small_bytes) // max(sum(small_bytes), 1))
        self._hooks: Sequence[Sized] = ()
        self._is_open = self._counts = False
        self._limit = 0
        self._released: list[GradSlot] = []
        self.waiting = Waiting()
        for slot in slots:
            slot.settle = self._settle

    def receive(self, position: int, *, counts: bool, may_wait: bool) -> bool:
        """Take the gradient of one parameter, and store those that wait if they could be the last ones.

        Returns whether the group is complete now.

        Args:
            position: of the parameter in the group, which is accumulating.
            counts: whether this is the backward that is going to be reduced. What waits counts as the first gradient does.
            may_wait: whether gradients of this backward may wait, if nothing here is against it.
        """
        if not self._is_open:
            self._is_open, self._counts = True, counts
            self._limit = self._most_waiting if may_wait and self._is_alone() else 0
        is_complete = False
        if self.streams is not None and not self.streams.is_here():
            is_complete = self._store_waiting()  # on the stream that has computed them
            self.streams.note()
        slot = self._slots[position]
        if self._limit and self.is_small[position] and not slot.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            self.waiting.add(slot.param)
        else:
            self._settle(slot.param)
            if slot.store():
                self._interrupted.append(slot.name)
            is_complete = (counts and self._readiness.mark(position)) or is_complete
        if len(self.waiting) >= self._num_awaited():
            is_complete = self._store_waiting() or is_complete
        self.waiting.room = self._num_awaited() - 1
        return is_complete

    def close(self) -> None:
        """Store what waits, and show all gradients. What comes next may belong to another backward."""
        self._store_waiting()
        if self.streams is not None:
            self.streams.follow()  # whoever uses the gradients now does so on the current stream
        for slot in self._released:
            slot.reclaim()
        self._end()

    def drop(self) -> None:
        """Forget what waits: nobody uses the gradients of this step."""
        self.waiting.take()
        for slot in self._released:
            slot.is_released = False
        self._end()

    def hand_over(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Let go of all views so that a collective can own them.

        Returns the names of the parameters without a gradient, and of those among them whose view had to be zeroed.
        """
        self._store_waiting()
        if self.streams is not None:
            self.streams.join()
        has_rest = len(self._released) < len(self._slots)
        rest = [slot for slot in self._slots if not slot.is_released] if has_rest else []
        for slot in self._released:
            slot.is_released = slot.has_received = False
        self._end()
        missing, cleared = [], []
        for slot in rest:
            was_clean = slot.is_clean
            if not slot.hand_over():
                missing.append(slot.name)
                if not was_clean:
                    cleared.append(slot.name)
                    if slot.was_cleared:
                        self._interrupted.append(slot.name)
        return tuple(missing), tuple(cleared)

    def _end(self) -> None:
        self._released.clear()
        self._is_open, self.waiting.room = False, 0

    def _is_alone(self) -> bool:
        """Return whether nobody else has hooks on the parameters."""
        if not self._hooks:  # the dicts, which stay the same
            hooks = [slot.param._post_accumulate_grad_hooks for slot in self._slots]
            if None in hooks:
                return False
            self._hooks = hooks
        return sum(map(len, self._hooks)) == len(self._hooks)

    def _num_awaited(self) -> int:
        """Return with how many waiting gradients somebody must look at them."""
        return min(self._limit, self._readiness.num_incomplete) if self._counts else self._limit

    def _settle(self, param: torch.Tensor) -> None:
        """Store what waits if it is a gradient of ``param``: somebody is about to write into its place."""
        if any(waiting is param for waiting in self.waiting):
            self._store_waiting()

    def _store_waiting(self) -> bool:
        """Store and count what waits; return whether the group is complete now."""
        if not self.waiting:
            return False
        params, grads = self.waiting.take()
        positions = [self.position_of[id(param)] for param in params]
        slots = [self._slots[position] for position in positions]
        with nullcontext() if self.streams is None else self.streams.last():
            store_all(slots, grads, released=self._released, interrupted=self._interrupted)
        return self._counts and self._readiness.mark_all(positions)
