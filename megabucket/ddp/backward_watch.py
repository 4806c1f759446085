"""Learns the end of a backward, the good one and the bad one.

Autograd runs the callbacks of a backward only when it succeeds, but drops them in any case, and before its exception reaches
the caller. So a callback that is dropped without having run tells, at the earliest moment, that the backward has failed.
Autograd does not say why; the caller's traceback does.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from megabucket.errors import ConcurrentBackwardError


class FollowsBackward(Protocol):
    """Who wants to know."""

    def end_backward(self) -> None:
        """Called by autograd at the end of a backward that has succeeded; may raise."""

    def abandon_backward(self) -> None:
        """Called when a backward has failed, before its exception reaches the caller; must not raise."""


class BackwardWatch:
    """Follows one backward at a time. Backwards that run inside another one (activation checkpointing) belong to it."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether a backward is running."""
        self._num_opened = 0
        self._thread = threading.current_thread()

    def open(self, follower: FollowsBackward) -> None:
        """Begin to follow the backward that is running. ``follower`` is known weakly: autograd keeps callbacks in C++."""
        self.is_open = True
        self._num_opened += 1
        self._thread = threading.current_thread()
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self, self._num_opened, follower))

    def check_thread(self, *, rank: int) -> None:
        """Refuse a backward in another thread than that of the one that is open.

        Raises:
            ConcurrentBackwardError: the threads differ.
        """
        thread = threading.current_thread()
        if thread is not self._thread:
            raise ConcurrentBackwardError(rank=rank, thread=thread.name, other_thread=self._thread.name)

    def close(self, number: int) -> bool:
        """Stop following; return whether that backward was still followed."""
        was_open = self.is_open and number == self._num_opened
        if was_open:
            self.is_open = False
        return was_open

    def forget(self) -> None:
        """Stop following, whatever is open."""
        self.is_open = False


class _EndOfBackward:
    __slots__ = ("_follower", "_has_run", "_number", "_watch")

    def __init__(self, watch: BackwardWatch, number: int, follower: FollowsBackward) -> None:
        self._watch, self._number = watch, number
        self._follower = weakref.ref(follower)
        self._has_run = False

    def __call__(self) -> None:
        self._has_run = True
        follower = self._follower()
        if follower is not None and self._watch.close(self._number):
            follower.end_backward()

    def __del__(self) -> None:
        follower = None if self._has_run else self._follower()
        if follower is not None and self._watch.close(self._number):
            follower.abandon_backward()
