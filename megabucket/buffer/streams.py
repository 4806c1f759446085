"""On which CUDA streams the gradients of a bucket group were stored, so that its collective begins after all of them.

A collective begins after the stream that is current when it is launched. Backward runs each layer on the stream of its forward,
so in a model that uses several, gradients of one bucket come from streams that the launching one knows nothing about. With one
stream, which is the rule, a gradient costs one call into C and nothing is waited for. The host never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class GradStreams:
    """The streams on which something was stored since the last ``join``.

    Args:
        current_handle: returns a number that tells the current stream from others of the device. Called for each gradient.
        current: returns the current stream.
        on: returns a context in which a stream is the current one.
    """

    __slots__ = ("_current", "_current_handle", "_last_handle", "_on", "_streams")

    def __init__(
        self,
        current_handle: Callable[[], int],
        current: Callable[[], Any],
        on: Callable[[Any], AbstractContextManager[object]],
    ) -> None:
        self._current_handle, self._current, self._on = current_handle, current, on
        self._last_handle: int | None = None
        self._streams: dict[int, Any] = {}

    @staticmethod
    def of(device: torch.device) -> GradStreams | None:
        """Return one for a CUDA device, and ``None`` for a device without streams."""
        if device.type != "cuda":
            return None
        index = device.index if device.index is not None else torch.cuda.current_device()
        return GradStreams(
            lambda: torch._C._cuda_getCurrentRawStream(index), lambda: torch.cuda.current_stream(index), torch.cuda.stream
        )

    def note(self) -> None:
        """Note that a gradient was just stored, on the current stream."""
        handle = self._current_handle()
        if handle != self._last_handle:
            self._last_handle = handle
            self._streams[handle] = self._current()

    def is_here(self) -> bool:
        """Return whether the last gradient was stored on the stream that is current now."""
        return self._current_handle() == self._last_handle

    def last(self) -> AbstractContextManager[object]:
        """Return a context in which the stream of the last ``note`` is the current one."""
        return nullcontext() if self._last_handle is None or self.is_here() else self._on(self._streams[self._last_handle])

    def follow(self) -> None:
        """Let the current stream wait for that of the last ``note``."""
        if self._last_handle is not None and not self.is_here():
            self._current().wait_stream(self._streams[self._last_handle])

    def join(self) -> None:
        """Let the current stream wait for all others that stored something, and forget them."""
        here = self._current_handle()
        others = [stream for handle, stream in self._streams.items() if handle != here]
        if others:
            current = self._current()
            for stream in others:
                current.wait_stream(stream)
        self._last_handle = None
        self._streams.clear()
