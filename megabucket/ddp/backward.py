"""``Backward``: what is known of the backward that is running through a wrapped module.

Hooks of the outputs detect the start of a backward. Reentrant activation checkpointing runs backwards inside the backward, and
the first parameter hook may fire in an inner one; the outputs of the module belong to the outer one.

Autograd runs the callbacks of a backward only if it succeeds, but always drops them, before its exception reaches the caller.
So a callback that is dropped without having run shows, at the earliest moment, that the backward has failed, but not why.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Protocol

import torch

from megabucket.errors import ConcurrentBackwardError, PhaseError


class FollowsBackward(Protocol):
    """The step that a backward belongs to."""

    backward: Backward | None
    """The backward that the step follows; only one at a time."""

    def end_backward(self, backward: Backward) -> None:
        """Go on after a successful backward. An error leaves ``backward()``."""

    def abandon_backward(self) -> None:
        """Report that the backward has failed. Never raises: a destructor calls it."""


class Backward:
    """One running backward, including inner backwards of activation checkpointing.

    Args:
        follower: notified of its end. Referenced weakly, because autograd keeps callbacks in C++.
    """

    __slots__ = ("_thread", "has_failed", "id", "is_last", "is_taking", "may_stage")

    def __init__(self, follower: FollowsBackward) -> None:
        self.id = torch._C._current_graph_task_id()
        """Autograd's id."""
        self._thread = threading.current_thread()
        self.has_failed = False
        """Whether autograd has dropped it before its end."""
        self.is_taking = False
        """Whether it has produced a gradient; the first one decides the two below. Without one it came through the outputs."""
        self.is_last = False
        """Whether its gradients will be reduced: it runs outside ``no_sync()``."""
        self.may_stage = False
        """Whether gradients may be moved out of ``param.grad`` for a while."""
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self, weakref.ref(follower)))

    def is_gone(self) -> bool:
        """Return whether it has failed without notice, because an interrupt or its thread prevented that."""
        return self.has_failed or (torch._C._current_graph_task_id() < 0 and threading.current_thread() is self._thread)

    def is_this(self) -> bool:
        """Return whether the caller runs in it."""
        return torch._C._current_graph_task_id() == self.id

    def check_is_this(self, *, rank: int) -> None:
        """Refuse another backward that runs in the meantime.

        Threads are no criterion: torch runs all backwards of a device in one thread, and one backward through outputs on a
        device and on the host in two.

        Raises:
            ConcurrentBackwardError: the caller is in another one.
        """
        if not self.is_this():
            thread = threading.current_thread()
            raise ConcurrentBackwardError(rank=rank, thread=thread.name, other_thread=self._thread.name)


@dataclasses.dataclass(slots=True, eq=False)
class _EndOfBackward:
    """A callback that autograd calls at the end of a successful backward, and drops in any case."""

    backward: Backward
    follower: weakref.ref[FollowsBackward]

    def __call__(self) -> None:
        follower = self.follower()
        if follower is not None and follower.backward is self.backward:
            follower.end_backward(self.backward)  # unfollows it; after an interrupt before that, the destructor acts

    def __del__(self) -> None:
        follower = self.follower()
        if follower is not None and follower.backward is self.backward:
            self.backward.has_failed = True
            # In a device thread of autograd, unknown to Python, the caller may already have the exception and go on: its next
            # call notifies the other ranks. See docs/decisions/agreement.md.
            if not isinstance(threading.current_thread(), threading._DummyThread):
                follower.abandon_backward()


def refuse_in_backward(operation: str) -> None:
    """Refuse an operation that needs all ranks inside a backward, in which each rank sends its buckets at its own pace.

    Raises:
        PhaseError: a backward is running in this thread. The error ends it, and the other ranks learn that.
    """
    if torch._C._current_graph_task_id() >= 0:
        raise PhaseError(
            f"{operation} was called inside a backward, by a hook or by a forward that activation checkpointing reruns. It "
            "needs all ranks, and they run their backwards at different paces. Call it when backward() has returned."
        )
