"""The handle of one batch on a process group: waits for works, does what is left to do, and says when a rank cannot be read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from megabucket.comm.background_reader import UnreadableError
from megabucket.comm.plan import AllToAll, Plan, steps
from megabucket.comm.port import Handle
from megabucket.comm.reading_paths import ABANDONED, unread_ranks, word_of
from megabucket.comm.torch_probes import use_count
from megabucket.comm.vigil import PeerWatch
from megabucket.errors import CollectiveError, MegabucketError
from megabucket.trace.clock import Stamp
from megabucket.trace.recorder import Lane

if TYPE_CHECKING:
    from megabucket.comm.torch_group import ProcessGroupCommunicator

_RELEASE_S: Final = 0.2


def _arguments(exchange: AllToAll) -> tuple[object, ...]:
    options = dist.AllToAllOptions()
    options.asyncOp = True
    return exchange.received, exchange.sent, exchange.received_sizes, exchange.sent_sizes, options


def uses_of(plan: Plan) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that gloo's threads will hold, and how often C++ holds each."""
    return [(tensor, use_count(tensor)) for tensor in plan.tensors]


def _await_release(tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Return when C++ holds the tensors as often as before the launch, or after a fifth of a second.

    Nobody else holds the tensors of calls that were not prepared, so a thread of gloo may need Python's lock to let go of them:
    see plan.Anchor. It gets it here.
    """
    deadline_s = time.monotonic() + _RELEASE_S
    while any(use_count(tensor) > count for tensor, count in tensors) and time.monotonic() < deadline_s:
        time.sleep(0.0001)


class WorkHandle(Handle):
    """Waits for the works of one batch.

    The plan stays referenced until ``wait`` has returned: on CUDA the allocator could otherwise hand the memory of its tensors
    to somebody else while a collective still reads it.

    Args:
        works: what was started.
        watch: finds out who is lost when they do not end; ``None`` where nobody can.
        passing: from ``uses_of``, where nobody else keeps the tensors.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        plan: Plan,
        owner: ProcessGroupCommunicator,
        label: str,
        *,
        watch: PeerWatch | None,
        passing: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        self._works: list[dist.Work] | None = list(works)
        self._plan: Plan | None = plan
        self._rounds = [part.exchange for part in plan.later]
        # Each with a single step, so that a wait that is begun again starts no round twice.
        self._starts = [iter([_arguments(exchange)]) for exchange in self._rounds]
        self._operations = [plan.finish(), *(steps(part.operations) for part in plan.later)]
        self._num_parts_done = 0
        self._is_abandoned = False
        self._results: list[object] = []
        self._clock = owner.clock_for(plan.device) if owner.recorder.records_time else None
        self._stamps: list[Stamp] = []  # when somebody first waited, and when the first works were done
        self._owner = owner
        self._label = label
        self._watch = watch
        self._passing = passing
        self._number = owner.progress.num_launched
        self.has_divided = bool(plan.reads)

    def wait(self) -> None:
        """Return when the results are there, or when a rank has abandoned the batch, which the fence tells.

        Raises:
            PeerLostError: a rank died, froze, left without its part of the batch, or cannot be read.
            CollectiveError: a rank cannot be read, where nobody watches the others.
        """
        if self._works is None or self._plan is None:
            return
        self.advance(len(self._starts))
        self._go_on(self._works)
        self._check_words()
        owner, has_read = self._owner, bool(self._plan.reads)
        self._works = self._plan = None
        self._results = []
        _await_release(self._passing)
        self._passing = ()
        if self._clock is not None:
            begun, read = self._stamps
            if has_read:
                owner.timer.record(owner.recorder, self._clock, Lane.COMM, label=self._label, start=read)
            owner.timer.record(owner.recorder, self._clock, Lane.WAIT, label=self._label, start=begun)
            owner.collect_times()

    def advance(self, num_parts: int) -> None:
        """Do so many parts of the wait, but for those that were done."""
        while self._works is not None and self._num_parts_done < min(num_parts, len(self._starts)):
            self._go_on(self._works)
            self._rounds[self._num_parts_done].sent.fill_(self._own_word())
            # In C from one end to the other: no interrupt comes between a start and the note that it was made.
            self._works.extend(starmap(self._owner.exchange, self._starts[self._num_parts_done]))
            self._num_parts_done += 1

    def abandon(self) -> None:
        """Do nothing with what comes, and wait for nobody before the last part."""
        self._is_abandoned = True

    def _go_on(self, works: Sequence[dist.Work]) -> None:
        """Wait for what was started, and do what comes then. Done twice, it goes on where it was."""
        is_last = self._num_parts_done == len(self._starts)
        if self._clock is not None and not self._stamps:
            self._stamps.append(self._clock.stamp())
        if is_last or not self._is_abandoned:
            # Who has not launched what this rank has does not wait either, and a wait needs the other ranks' waits.
            number = self._owner.progress.num_launched if self._num_parts_done else self._number
            self._await(works, number)
        if self._clock is not None and len(self._stamps) == 1:
            self._stamps.append(self._clock.stamp())
        if not (self._is_abandoned or any(map(any, self._heard()))):
            self._results.extend(self._operations[self._num_parts_done])

    def _await(self, works: Sequence[dist.Work], number: int) -> None:
        try:
            if self._watch is not None:
                self._watch.wait(works, label=self._label, number=number)
            else:
                for work in works:
                    work.wait()  # over NCCL: the current stream waits, not the host
        except UnreadableError as error:
            raise self._unreadable(error.states) from None

    # What ranks tell each other in the rounds #

    def _own_word(self) -> int:
        """Return what this rank says in the next round: how it fares."""
        if self._is_abandoned:
            return ABANDONED
        reads = self._plan.reads if self._plan is not None else ()
        return word_of(reads, self._results)

    def _heard(self) -> list[list[int]]:
        """Return what the ranks have said, by round and rank."""
        return [exchange.received.tolist() for exchange in self._rounds[: self._num_parts_done]]

    def _check_words(self) -> None:
        words = self._heard()
        if self._is_abandoned or not any(map(any, words)) or any(ABANDONED in said for said in words):
            return
        raise self._unreadable(unread_ranks(words))

    def _unreadable(self, states: Mapping[int, str]) -> MegabucketError:
        if self._watch is not None:
            return self._watch.give_up(states, label=self._label)
        text = "; ".join(f"rank {rank} {state}" for rank, state in states.items())
        return CollectiveError(f"{self._label}: {text}. End the run, and start it again with read_peer_memory=False.")
