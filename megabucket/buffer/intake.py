"""How the gradients of a bucket group come into its buffer: large ones at once, small ones many in one call.

A small gradient costs more in Python and in calls of torch than in memory traffic. So its hook takes it out of ``param.grad``,
appends it to a list and returns; the gradient that finds no more room there comes the long way, by ``receive``, and brings all
of them into the buffer. Nothing waits longer than its backward lasts, or its group accumulates. So only what runs inside a
backward can tell the difference, and where others have hooks on parameters of the group, nothing waits.

What came into the buffer together in one backward will do so in the next one: a ``Run``. Then only the last of its parameters
needs a hook (``ddp.grad_hook``), and the gradients of the others are found where autograd leaves them, in ``param.grad``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_not
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

WAITING_BYTES: Final = 512 << 10
"""So many bytes wait at most, if all of them are as large as the average."""


_grad: Final = attrgetter("grad")
_is_added_by_kernel: Final = attrgetter("grad_added_to_main_grad")


class Waiting(list[torch.Tensor]):
    """Parameters whose gradients wait. Hooks hold this, where no garbage collector looks, so nothing may stay in it."""

    __slots__ = ("grads", "room", "tasks")

    def __init__(self) -> None:
        super().__init__()
        self.grads: list[torch.Tensor | None] = []
        """Their gradients."""
        self.tasks: set[int] = set()
        """By which runs of autograd: what activation checkpointing reruns within a backward is one of its own."""
        self.room = 0
        """How many may wait without anybody looking; 0 while nothing is known about the backward."""

    def add(self, param: torch.Tensor) -> None:
        """Take the gradient out of ``param.grad``, so that a second one in this backward is not added to it there."""
        self.append(param)
        self.grads.append(param.grad)
        self.tasks.add(torch._C._current_graph_task_id())
        param.grad = None

    def take(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None], set[int]]:
        """Return the parameters, their gradients, in the order in which they came, and ``tasks``, and forget them."""
        taken = self.copy(), self.grads, self.tasks
        self.clear()
        self.grads, self.tasks = [], set()
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Small parameters of a group whose gradients come one after another, each once in a backward."""

    positions: tuple[int, ...]
    slots: list[GradSlot]
    params: list[torch.nn.Parameter]
    views: list[torch.Tensor]
    numels: list[int]

    def find_grads(self) -> list[torch.Tensor] | None:
        """Return all gradients, if autograd has brought them since there was none; ``None`` if one is missing."""
        grads = list(map(_grad, self.params))
        is_whole = all(map(is_not, grads, repeat(None))) and not any(map(_is_added_by_kernel, self.params))
        return grads if is_whole else None


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
        self._is_open = self._counts = False
        self._limit = 0
        self._released: list[GradSlot] = []
        self._task: int | None = None
        self._together: list[list[int]] = []
        self._alone: list[int] = []
        self.runs: Mapping[int, Run] = {}
        """The runs whose parameters have no hooks but the last, by its position."""
        self._in_runs: frozenset[int] = frozenset()
        self._stored: list[Run] = []  # in this backward, and their slots do not know
        self._is_untouched = False
        self.waiting = Waiting()
        for slot in slots:
            slot.settle, slot.note_clean = self._settle, self._note_touch

    def begin_backward(self, *, may_wait: bool, learns: bool = False) -> None:
        """Note that a backward begins. Of one that is not announced, no gradient waits.

        Args:
            may_wait: whether its small gradients may wait.
            learns: whether to remember what comes together, for ``learned_runs``. Called by autograd then.
        """
        self._limit = self._most_waiting if may_wait else 0
        self._task = torch._C._current_graph_task_id() if learns else None
        self._together, self._alone = [], []

    def learned_runs(self) -> list[Run]:
        """Return what came together in the last backward, without parameters that have received several gradients."""
        counts = Counter(chain(self._alone, *self._together))
        chunks = [tuple(position for position in chunk if counts[position] == 1) for chunk in self._together]
        self._together, self._alone = [], []
        return [self._run(chunk) for chunk in chunks if len(chunk) > 1]

    def use_runs(self, runs: Sequence[Run]) -> None:
        """Let gradients come in these runs from now on, and in no others."""
        self._unpack()
        self.runs = {run.positions[-1]: run for run in runs}
        self._in_runs = frozenset(chain.from_iterable(run.positions for run in runs))
        self._is_untouched = not any(slot.is_touched for run in runs for slot in run.slots)

    def find_unseen(self) -> list[int]:
        """Return the positions of gradients that have come without a hook and were not received yet."""
        unseen = []
        for run in self.runs.values():
            if any(map(is_not, map(_grad, run.params), repeat(None))):
                unseen += [position for position in run.positions if self._slots[position].param.grad is not None]
        return unseen

    def _run(self, positions: tuple[int, ...]) -> Run:
        slots = [self._slots[position] for position in positions]
        params, views, numels = zip(*((slot.param, slot.view, slot.numel) for slot in slots), strict=True)
        return Run(positions, slots, list(params), list(views), list(numels))

    def receive(self, position: int, *, counts: bool) -> bool:
        """Take the gradient of one parameter, and store those that wait if they could be the last ones.

        Returns whether the group is complete now.

        Args:
            position: of the parameter in the group, which is accumulating.
            counts: whether this is the backward that is going to be reduced. What waits counts as the first gradient does.
        """
        is_complete = self._begin(counts=counts)
        slot = self._slots[position]
        if self._limit and self.is_small[position] and not slot.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            self.waiting.add(slot.param)
        else:
            if self._task is not None:
                self._alone.append(position)
            self._settle(slot.param)
            if slot.store():
                self._interrupted.append(slot.name)
            is_complete = (counts and self._readiness.mark(position)) or is_complete
        return self._store_last() or is_complete

    def receive_run(self, run: Run, grads: list[torch.Tensor], *, counts: bool) -> bool:
        """Take all gradients of a run, which are in ``param.grad``, and else do as ``receive`` does."""
        is_complete = self._begin(counts=counts)
        for param in run.params:
            param.grad = None
        if self._is_untouched and are_plain(grads, run.numels):
            copy_all(run.views, grads)  # and not a look at the slots, which would cost as much again
            self._stored.append(run)
        else:
            self._note_touch()
            self._unpack()
            store_all(run.slots, grads, released=self._released, interrupted=self._interrupted)
        is_complete = (counts and self._readiness.mark_all(run.positions)) or is_complete
        return self._store_last() or is_complete

    def _begin(self, *, counts: bool) -> bool:
        """Look at what the first gradient of a backward brings, and those of another stream; return as ``receive`` does."""
        if not self._is_open:
            self._is_open, self._counts = True, counts
        if self.streams is None or self.streams.is_here():
            return False
        is_complete = self._store_waiting()  # on the stream that has computed them
        self.streams.note()
        return is_complete

    def _store_last(self) -> bool:
        """Store what waits if no more is to come or there is no more room; return whether the group is complete now."""
        is_complete = len(self.waiting) >= self._num_awaited() and self._store_waiting()
        self.waiting.room = self._num_awaited() - 1
        return is_complete

    def close(self) -> None:
        """Store what waits, and show all gradients. What comes next may belong to another backward."""
        self._store_waiting()
        self._unpack()
        if self.streams is not None:
            self.streams.follow()  # whoever uses the gradients now does so on the current stream
        for slot in self._released:
            slot.reclaim()
        self._end()

    def drop(self) -> None:
        """Forget what waits: nobody uses the gradients of this step."""
        self.waiting.take()
        self._unpack()
        for slot in self._released:
            slot.is_released = False
        self._end()

    def drop_unseen(self) -> None:
        """Forget what has come without a hook, in a backward that has failed."""
        for position in self.find_unseen():
            self._slots[position].param.grad = None

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
        self._stored.clear()
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

    def _not_stored(self) -> list[GradSlot]:
        num_stored = sum(len(run.positions) for run in self._stored)
        if len(self._released) + num_stored >= len(self._slots):
            return []
        stored = set(chain.from_iterable(run.positions for run in self._stored))
        return [slot for position, slot in enumerate(self._slots) if not slot.is_released and position not in stored]

    def _note_touch(self) -> None:
        """Note that some slot in a run may not be as ``hand_over`` leaves it."""
        self._is_untouched = False

    def _unpack(self) -> None:
        """Tell the slots what runs have brought, because somebody may look at them, or bring more."""
        for run in self._stored:
            self._note_touch()
            for slot in run.slots:
                slot.is_released = slot.has_received = True
            self._released += run.slots
        self._stored.clear()

    def _end(self) -> None:
        self._released.clear()
        self._is_open = False
        self._limit = self.waiting.room = 0

    def _num_awaited(self) -> int:
        """Return with how many waiting gradients somebody must look at them."""
        return min(self._limit, self._readiness.num_incomplete) if self._counts else self._limit

    def _settle(self, param: torch.Tensor) -> None:
        """Let the slot of ``param`` know of all gradients that have come: somebody is about to write into its place."""
        if self.position_of[id(param)] in self._in_runs:
            self._note_touch()
            self._unpack()
        if any(waiting is param for waiting in self.waiting):
            self._store_waiting()

    def _store_waiting(self) -> bool:
        """Store and count what waits; return whether the group is complete now."""
        if not self.waiting:
            return False
        params, grads, tasks = self.waiting.take()
        positions = [self.position_of[id(param)] for param in params]
        if self._task is not None:
            if tasks == {self._task}:
                self._together.append(positions)
            else:
                self._alone += positions
        if not self._in_runs.isdisjoint(positions):
            self._note_touch()
            self._unpack()
        slots = [self._slots[position] for position in positions]
        with nullcontext() if self.streams is None else self.streams.last():
            store_all(slots, grads, released=self._released, interrupted=self._interrupted)
        return self._counts and self._readiness.mark_all(positions)
