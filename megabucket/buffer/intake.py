"""How the gradients of a bucket group come into its buffer: large ones at once, small ones many in one call.

A small gradient costs more in Python and in calls of torch than in memory traffic. So its hook takes it out of ``param.grad``,
appends it to a list and returns; the gradient that finds no more room there comes the long way, by ``receive``, and brings all
of them into the buffer. Nothing waits longer than its backward lasts, or its group accumulates. So only what runs inside a
backward can tell the difference, and where others have hooks on parameters of the group, nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch

from megabucket.buffer.grad_slot import GradSlot
from megabucket.buffer.readiness import Readiness
from megabucket.buffer.store_all import are_plain, copy_all, store_all
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


@dataclass(frozen=True, eq=False)
class Handful:
    """Small parameters of a group whose gradients came together, as a step after the other brings them."""

    positions: tuple[int, ...]
    slots: list[GradSlot]
    views: list[torch.Tensor]
    numels: list[int]
    is_unique: bool
    """Whether no parameter is in it twice."""


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
        self._handfuls: dict[tuple[int, ...], Handful] = {}  # known ones, by the identity of their parameters
        self._most_known = 16 + 4 * len(slots) // max(self._most_waiting, 1)
        self._stored: list[Handful] = []  # in this backward, without a word to their slots
        self._stored_positions: set[int] = set()
        self._is_untouched = False
        """Whether all small slots but those of ``_stored`` are as ``hand_over`` leaves them: the next gradient overwrites."""
        self.look: Callable[[Handful], object] | None = None
        """Called with what was just stored, and is in the cache."""
        self.waiting = Waiting()
        for slot in slots:
            slot.settle, slot.note_touch = self._settle, self._note_touch

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
            self._is_untouched = self._is_untouched and not self.is_small[position]
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
        self._tell_slots()
        if self.streams is not None:
            self.streams.follow()  # whoever uses the gradients now does so on the current stream
        for slot in self._released:
            slot.reclaim()
        self._end()

    def drop(self) -> None:
        """Forget what waits: nobody uses the gradients of this step."""
        self.waiting.take()
        self._tell_slots()
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
        rest = self._not_stored()
        for slot in self._released:
            slot.is_released = slot.has_received = False
        self._forget_stored()
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
        self._is_untouched = True
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
        """Store what waits, and tell the slot, if it is a gradient of ``param``: somebody is about to write into its place."""
        if any(waiting is param for waiting in self.waiting):
            self._store_waiting()
        if self.position_of[id(param)] in self._stored_positions:
            self._tell_slots()

    def _store_waiting(self) -> bool:
        """Store and count what waits; return whether the group is complete now."""
        if not self.waiting:
            return False
        params, grads = self.waiting.take()
        handful = self._handful_of(params)
        with nullcontext() if self.streams is None else self.streams.last():
            self._store(handful, grads)
        if self.look is not None:
            self.look(handful)
        return self._counts and self._readiness.mark_all(handful.positions)

    def _store(self, handful: Handful, grads: list[torch.Tensor | None]) -> None:
        is_first = self._is_untouched and handful.is_unique and self._stored_positions.isdisjoint(handful.positions)
        if is_first and are_plain(grads, handful.numels):
            copy_all(handful.views, grads)  # and not a look at the slots, which would cost as much again
            self._stored.append(handful)
            self._stored_positions.update(handful.positions)
        else:
            self._tell_slots()
            self._note_touch()
            store_all(handful.slots, grads, released=self._released, interrupted=self._interrupted)

    def _handful_of(self, params: Sequence[torch.Tensor]) -> Handful:
        """Return what is known of parameters that come together; in the next step they probably do so again."""
        key = tuple(map(id, params))
        handful = self._handfuls.get(key)
        if handful is None:
            positions = tuple(self.position_of[number] for number in key)
            slots = [self._slots[position] for position in positions]
            views, numels = [slot.view for slot in slots], [slot.numel for slot in slots]
            handful = Handful(positions, slots, views, numels, len(set(positions)) == len(positions))
            if len(self._handfuls) >= self._most_known:
                self._handfuls.clear()
            self._handfuls[key] = handful
        return handful

    def _not_stored(self) -> list[GradSlot]:
        if len(self._released) + len(self._stored_positions) >= len(self._slots):
            return []
        stored = self._stored_positions
        return [slot for position, slot in enumerate(self._slots) if not (slot.is_released or position in stored)]

    def _tell_slots(self) -> None:
        """Tell the slots what was stored without a word: somebody may look at them, or bring more."""
        for handful in self._stored:
            self._note_touch()
            for slot in handful.slots:
                slot.is_released = slot.has_received = True
            self._released += handful.slots
        self._forget_stored()

    def _forget_stored(self) -> None:
        self._stored.clear()
        self._stored_positions.clear()

    def _note_touch(self) -> None:
        self._is_untouched = False
