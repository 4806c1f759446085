"""The handle of one batch on a process group: waits for works, does what is left to do, and says when a rank cannot be read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from megabucket.comm.background_reader import UnreadableError
from megabucket.comm.plan import Plan, run_through
from megabucket.comm.port import Handle
from megabucket.comm.torch_probes import use_count
from megabucket.comm.vigil import PeerWatch
from megabucket.errors import CollectiveError, MegabucketError
from megabucket.trace.clock import Stamp
from megabucket.trace.recorder import Lane

if TYPE_CHECKING:
    from megabucket.comm.torch_group import ProcessGroupCommunicator

_RELEASE_S: Final = 0.2


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
        self._works: Sequence[dist.Work] | None = works
        self._plan: Plan | None = plan
        self._operations = plan.finish()
        self._clock = owner.clock_for(plan.device) if owner.recorder.records_time else None
        self._first_waited: Stamp | None = None
        self._owner = owner
        self._label = label
        self._watch = watch
        self._passing = passing
        self._number = owner.progress.num_launched
        self.has_divided = plan.is_read

    def wait(self) -> None:
        """Return when the results are there. A wait that was interrupted may be begun again and goes on where it was.

        Raises:
            PeerLostError: a rank died, froze, left without its part of the batch, or cannot be read.
            CollectiveError: a rank cannot be read, where nobody watches the others.
        """
        if self._works is None:
            return
        if self._clock is not None and self._first_waited is None:
            self._first_waited = self._clock.stamp()
        self._await(self._works)
        run_through(self._operations)
        self._works = self._plan = None
        _await_release(self._passing)
        self._passing = ()
        owner = self._owner
        if self._clock is not None and self._first_waited is not None:
            owner.timer.record(owner.recorder, self._clock, Lane.WAIT, label=self._label, start=self._first_waited)
            owner.collect_times()

    def _await(self, works: Sequence[dist.Work]) -> None:
        try:
            if self._watch is not None:
                self._watch.wait(works, label=self._label, number=self._number)
            else:
                for work in works:
                    work.wait()  # over NCCL: the current stream waits, not the host
        except UnreadableError as error:
            raise self._unreadable(error.states) from None

    def _unreadable(self, states: Mapping[int, str]) -> MegabucketError:
        if self._watch is not None:
            return self._watch.give_up(states, label=self._label)
        text = "; ".join(f"rank {rank} {state}" for rank, state in states.items())
        return CollectiveError(f"{self._label}: {text}. End the run, and start it again with read_peer_memory=False.")
