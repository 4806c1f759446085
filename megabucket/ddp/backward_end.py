"""What is queued on a backward to learn its end, the good one and the bad one.

Autograd runs the callbacks of a backward only when it succeeds, but drops them in any case, and before its exception reaches
the caller. So a callback that is dropped without having run tells, at the earliest moment, that the backward has failed.
Autograd does not say why; the caller's traceback does.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megabucket.ddp.grad_sync import GradSync


class OpenBackward:
    """The identity of a backward that is running."""

    __slots__ = ("thread_id", "thread_name", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        thread = threading.current_thread()
        self.thread_id, self.thread_name = thread.ident, thread.name


class _EndOfBackward:
    __slots__ = ("_has_run", "_sync", "_token")

    def __init__(self, sync: GradSync, token: int) -> None:
        self._sync = weakref.ref(sync)
        self._token = token
        self._has_run = False

    def __call__(self) -> None:
        self._has_run = True
        sync = self._sync()
        if sync is not None:
            sync.end_backward(self._token)

    def __del__(self) -> None:
        sync = None if self._has_run else self._sync()
        if sync is not None:
            sync.abandon_backward(self._token)


def open_backward(sync: GradSync, token: int) -> OpenBackward:
    """Queue on the running backward that ``sync`` learns its end; return the backward's identity.

    ``sync`` is known weakly: autograd keeps callbacks in C++, where Python's garbage collector does not see them.
    """
    opened = OpenBackward(token)
    torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(sync, opened.token))
    return opened
