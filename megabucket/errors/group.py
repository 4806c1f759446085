"""Errors about ranks and collectives: what carries the gradients is broken."""

from __future__ import annotations

from collections.abc import Sequence

from megabucket.errors.base import MegabucketError


class PeerLostError(MegabucketError, RuntimeError):
    """A rank died, froze, or did not arrive in time. The process group is of no use any more."""

    def __init__(self, *, ranks: Sequence[int], states: Sequence[str], during: str, recorder: str = "") -> None:
        self.ranks, self.states, self.during, self.recorder = tuple(ranks), tuple(states), during, recorder
        findings = "; ".join(f"rank {rank} {state}" for rank, state in zip(self.ranks, self.states, strict=True))
        super().__init__(
            f"{findings or 'a rank went away, and it cannot be told which'} ({during}). The process group cannot be used any "
            "more: gradients of this step are lost, parameters are those of the last step. End this process, or destroy the "
            "group, and start again from the last checkpoint with the ranks that are left."
            + (f" {recorder}" if recorder else "")
        )


class ForkedProcessError(MegabucketError, RuntimeError):
    """A forked child used the wrapper of its parent."""

    def __init__(self, *, rank: int, operation: str) -> None:
        self.rank, self.operation = rank, operation
        super().__init__(
            f"[rank {rank}] {operation} in a forked child process. The threads of the process group exist in the parent only, "
            "so this would wait for ever. Train in the process that wrapped the module; start helpers with the 'spawn' "
            "method, or let them work on a copy (copy.deepcopy(ddp.module))."
        )


class GroupDestroyedError(MegabucketError, RuntimeError):
    """The process group that a wrapper reduces over does not exist any more."""

    def __init__(self, *, rank: int, operation: str) -> None:
        self.rank, self.operation = rank, operation
        super().__init__(
            f"[rank {rank}] {operation}, but the process group of the wrapper was destroyed, so nothing can be reduced any "
            "more and this replica would go on alone. Call ddp.detach() and wrap the module again over a living group."
        )


class CollectiveError(MegabucketError, RuntimeError):
    """A collective that cannot give the right result."""


class MismatchedCollectiveError(CollectiveError):
    """Two ranks launched different collectives at the same position of their schedules."""

    def __init__(self, *, sequence: int, rank: int, call: str, other_rank: int, other_call: str) -> None:
        self.sequence, self.rank, self.call = sequence, rank, call
        self.other_rank, self.other_call = other_rank, other_call
        super().__init__(
            f"collective {sequence} differs between ranks: rank {other_rank} launched {other_call}, rank {rank} launched "
            f"{call}. On a real process group this hangs or mixes unrelated data. All ranks must launch the same "
            "collectives in the same order."
        )


class CollectiveDeadlockError(CollectiveError):
    """A rank waits for a collective that other ranks have not launched and cannot launch any more."""

    def __init__(self, *, sequence: int, rank: int, call: str, missing_ranks: Sequence[int]) -> None:
        self.sequence, self.rank, self.call, self.missing_ranks = sequence, rank, call, tuple(missing_ranks)
        super().__init__(
            f"[rank {rank}] waits for collective {sequence} ({call}), which rank(s) {', '.join(map(str, missing_ranks))} "
            "have not launched. Launch it on every rank before waiting, or run the ranks in threads."
        )


class InFlightWriteError(CollectiveError):
    """A buffer changed between the launch and the completion of the collective that owned it."""

    def __init__(self, *, sequence: int, rank: int, call: str, index: int) -> None:
        self.sequence, self.rank, self.call, self.index = sequence, rank, call, index
        super().__init__(
            f"[rank {rank}] the input of collective {sequence} ({call}) changed while it was in flight, first at element "
            f"{index}. On a real process group the reduced value would depend on timing. Nothing may write a buffer "
            "between launch and completion."
        )
