"""Access to a device that runs asynchronously: streams, events, clocks, pinned memory, waits.

No other module asks torch about them, so tests replace ``Accelerator.of`` and run the whole package on fake streams
(tests/device_fake). The host waits only in functions that say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final

import torch

from megabucket.trace.clock import DeviceClock

_LONGEST_PAUSE_S: Final = 0.001  # between two queries of an event


class Accelerator:
    """One device with streams, of any kind that ``torch.accelerator`` supports."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @staticmethod
    def of(device: torch.device) -> Accelerator | None:
        """Return the accelerator of a device; ``None`` for a host, which works synchronously."""
        return None if device.type in ("cpu", "meta") else Accelerator(device)

    @property
    def name(self) -> str:
        """The product name."""
        return str(torch.get_device_module(self._device).get_device_name(self._device))

    def current_id(self) -> int:
        """Return the id of the current stream. Called for each gradient."""
        if self._device.type == "cuda" and self._device.index is not None:
            return int(torch._C._cuda_getCurrentRawStream(self._device.index))
        return int(self.current().stream_id)

    def current(self) -> Any:
        """Return the current stream."""
        return torch.accelerator.current_stream(self._device)

    def side_stream(self) -> Any:
        """Return a new stream; as a context manager it becomes the current one."""
        return torch.Stream(self._device)

    def record(self) -> Any:
        """Record an event on the current stream and return it."""
        event = torch.Event(self._device)
        event.record()
        return event

    def clock(self) -> DeviceClock:
        """Return a clock of device time. Waits for the device."""
        return DeviceClock(lambda: torch.Event(self._device, enable_timing=True))

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory, for asynchronous copies to and from the device."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        torch.accelerator.synchronize(self._device)


def profiler_range(device: torch.device) -> Callable[[str], AbstractContextManager[object]]:
    """Return a function that opens a named range in torch's profiler and, on CUDA, in NVTX."""
    if device.type != "cuda":
        return torch.profiler.record_function

    @contextmanager
    def in_both(name: str) -> Iterator[None]:
        with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
            yield

    return in_both


class GradStreams:
    """The streams on which gradients of a bucket group were stored since the last ``join``.

    A collective is ordered only after the stream that is current when it is launched. Backward runs each layer on the stream of
    its forward, so in a model with several streams, gradients of one bucket come from other streams than the launching one.
    With a single stream, the usual case, a gradient costs one call into C and nothing waits.
    """

    __slots__ = ("_accelerator", "_last_id", "_streams", "_writers")

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._last_id: int | None = None
        self._streams: dict[int, Any] = {}
        self._writers: dict[int, Any] = {}  # streams, by place

    def note(self) -> None:
        """Note that a gradient is stored on the current stream."""
        stream_id = self._accelerator.current_id()
        if stream_id != self._last_id:
            self._last_id = stream_id
            self._streams[stream_id] = self._accelerator.current()

    def order(self, place: int) -> None:
        """Let the current stream wait for the last one that wrote to a place, before it writes there."""
        writer, here = self._writers.get(place), self._accelerator.current()
        if writer is not None and writer.stream_id != here.stream_id:
            here.wait_stream(writer)
        self._writers[place] = here

    def is_here(self) -> bool:
        """Return whether the last gradient was stored on the current stream."""
        return self._accelerator.current_id() == self._last_id

    def last(self) -> AbstractContextManager[object]:
        """Return a context in which the stream of the last ``note`` is the current one."""
        stream: AbstractContextManager[object] | None = None
        if self._last_id is not None and not self.is_here():
            stream = self._streams[self._last_id]
        return nullcontext() if stream is None else stream

    def follow(self) -> None:
        """Let the current stream wait for all others that stored gradients."""
        here = self._accelerator.current_id()
        for stream_id, stream in self._streams.items():
            if stream_id != here:
                self._accelerator.current().wait_stream(stream)

    def join(self) -> None:
        """Let the current stream wait for all others that stored gradients, and forget them."""
        self.follow()
        self._last_id = None
        self._streams.clear()
        self._writers.clear()


class Arrival:
    """Results that the current stream has waited for. Other streams wait on their first read."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._event = accelerator.record()
        self._known = {accelerator.current_id()}

    def follow(self) -> None:
        """Let the current stream wait for the results, unless it already has."""
        stream_id = self._accelerator.current_id()
        if stream_id not in self._known:
            self._event.wait()
            self._known.add(stream_id)


class Arrived:
    """The moment when the current stream has finished its queued work. Can be waited for like a work of gloo."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._event = accelerator.record()

    def is_completed(self) -> bool:
        """Return whether the stream has finished."""
        return bool(self._event.query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the stream has finished. Signal handlers may run meanwhile.

        Raises:
            RuntimeError: ``timeout`` is over.
        """
        started_s = time.monotonic()
        while not self.is_completed():
            waited_s = time.monotonic() - started_s
            if timeout is not None and waited_s >= timeout.total_seconds():
                raise RuntimeError("Operation timed out!")  # gloo's text, which waits in slices look for
            time.sleep(min(waited_s / 16, _LONGEST_PAUSE_S))  # the host may continue that much too late
        return True


class HostCopy(Arrived):
    """An asynchronous copy of values on the current stream to the host."""

    def __init__(self, accelerator: Accelerator, values: torch.Tensor) -> None:
        self.values = accelerator.pinned(values.shape, values.dtype).copy_(values, non_blocking=True)
        """Valid when the wait is over."""
        super().__init__(accelerator)
