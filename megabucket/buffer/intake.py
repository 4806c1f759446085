"""How the gradients of a bucket group come into its buffer: large ones at once, small ones many in one call.

A small gradient costs more in Python and in calls of torch than in memory traffic. So it may wait where autograd has left it,
in ``param.grad``, while its hook does nothing but append to a list; the gradient that finds no more room there comes the long
way, by ``receive``, and sees to the others. Nothing waits longer than its backward lasts, or its group accumulates. So only
what runs inside a backward can tell the difference, and where others have hooks on parameters of the group, nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from contextlib import nullcontext
from typing import Final

import torch

from megabucket.buffer.grad_slot import GradSlot, store_all
from megabucket.buffer.readiness import Readiness
from megabucket.buffer.streams import GradStreams

SMALL_BYTES: Final = 128 << 10
"""A gradient of up to this many bytes may wait."""

MOST_WAITING: Final = 64
"""So many wait at most: all that is touched for them is still in the cache when they are stored."""

WAITING_BYTES: Final = 512 << 10
"""About so many bytes wait at most."""


class Waiting(list[torch.Tensor]):
    """The parameters whose gradients wait. Hooks hold this, where no garbage collector looks, so only a backward fills it."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        super().__init__()
        self.room = 0
        """How many may wait without anybody looking; 0 while nothing is known about the backward."""


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
        # Of two gradients in one backward the second is added to the first where that is: in its dtype.
        self._keeps_dtypes = all(slot.view.dtype == slot.param.dtype for slot in slots)
        self._hooks: Sequence[Sized] = ()
        self._is_open = self._counts = False
        self._limit = 0
        self._released: list[GradSlot] = []
        self.waiting = Waiting()

    def receive(self, position: int, *, counts: bool) -> bool:
        """Take the gradient of one parameter, and look at those that wait if they could be the last ones.

        Returns whether the group is complete now.

        Args:
            position: of the parameter in the group, which is accumulating.
            counts: whether this is the backward that is going to be reduced.
        """
        if counts is not self._counts:
            self.close()
        if not self._is_open:
            self._is_open, self._counts = True, counts
            self._limit = self._most_waiting if self._may_wait() else 0
        is_complete = False
        if self.streams is not None and not self.streams.is_here():
            is_complete = self._take()  # on the stream that has computed them
            self.streams.note()
        if self._limit and self.is_small[position]:
            self.waiting.append(self._slots[position].param)
        else:
            is_complete = self._store(position) or is_complete
        if len(self.waiting) >= self._num_awaited():
            is_complete = self._take() or is_complete
        self.waiting.room = self._num_awaited() - 1
        return is_complete

    def close(self) -> None:
        """Store what waits, and show all gradients. What comes next may belong to another backward."""
        self._take()
        for slot in self._released:
            slot.reclaim()
        self._end()

    def drop(self) -> None:
        """Forget what waits: nobody uses the gradients of this step."""
        self.waiting.clear()
        for slot in self._released:
            slot.is_released = False
        self._end()

    def hand_over(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Let go of all views so that a collective can own them.

        Returns the names of the parameters without a gradient, and of those among them whose view had to be zeroed.
        """
        self._take()
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

    def _may_wait(self) -> bool:
        readiness = self._readiness
        is_exact = readiness.expects_one_each or (readiness.is_learned and self._keeps_dtypes)
        if torch.is_grad_enabled() or not is_exact:
            return False
        if not self._hooks:  # the dicts, which stay the same
            hooks = [slot.param._post_accumulate_grad_hooks for slot in self._slots]
            if None in hooks:
                return False
            self._hooks = hooks
        return sum(map(len, self._hooks)) == len(self._hooks)

    def _num_awaited(self) -> int:
        """Return with how many waiting gradients somebody must look at them."""
        return min(self._limit, self._readiness.num_incomplete) if self._counts else self._limit

    def _store(self, position: int) -> bool:
        slot = self._slots[position]
        if slot.store():
            self._interrupted.append(slot.name)
        return self._counts and self._readiness.mark(position)

    def _take(self) -> bool:
        """Store and count what waits; return whether the group is complete now."""
        if not self.waiting:
            return False
        positions = [self.position_of[id(param)] for param in self.waiting]
        self.waiting.clear()
        slots = [self._slots[position] for position in positions]
        with nullcontext() if self.streams is None else self.streams.last():
            self._released += store_all(slots, self._interrupted, releases=self._counts)
        return self._counts and self._readiness.mark_all(positions)
