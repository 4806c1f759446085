"""A device with streams that is not there: its memory is the host's, and it looks for accesses that nothing orders.

All tensors are CPU tensors and every operation is done at once, on the stream that is current for the test. What a stream of a
real device would still have to wait for is known to torch's own CUDA sanitizer, which is told what each operation reads and
writes: two accesses to the same bytes by two streams, one of them a write, need an event between them. Freed memory is handed
out again to the stream that allocated it, so a free counts as a write there.
"""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, TensorInfo, zip_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megabucket.buffer import WithheldGrad
from megabucket.comm import Accelerator
from megabucket.trace.clock import DeviceClock

MAIN, SIDE, HOST, COMM = 0, 97, 98, 99
"""The stream a program begins on, one of the package's own, what the host reads from its own memory, and the collectives'."""


class RaceError(AssertionError):
    """Two accesses to the same memory that no event orders."""


class FakeStream:
    """A queue of the device. As a context it is the current one inside."""

    def __init__(self, device, number):
        self.device, self.stream_id = device, number
        self._before = []

    def wait_stream(self, other):
        self.device.event().record(other).wait(self)

    def __enter__(self):
        self._before.append(self.device.current_id())
        self.device.switch(self.stream_id)

    def __exit__(self, *_):
        self.device.switch(self._before.pop())


class FakeEvent:
    def __init__(self, device, number):
        self._device, self._number, self._moment_s = device, number, 0.0
        self._is_done = False

    def record(self, stream=None):
        self._moment_s = time.perf_counter()
        self._device.handler._handle_event_record(self._number, self._device.id_of(stream))
        return self

    def wait(self, stream=None):
        self._device.handler._handle_event_wait(self._number, self._device.id_of(stream))

    def query(self):
        """Whether the device has come here. To ask until it has is one wait of the host."""
        if self._device.is_stuck:
            return False
        if not self._is_done:
            self.synchronize()
        return True

    def synchronize(self):
        self._device.check_not_stuck("an event")
        self._is_done = True
        self._device.num_host_waits += 1
        self._device.handler._handle_event_synchronization(self._number)

    def elapsed_time(self, other):
        return (other._moment_s - self._moment_s) * 1e3


class Piece:
    """Some bytes of one storage that were always accessed together."""

    __slots__ = ("key", "start", "stop")

    def __init__(self, start, stop, key):
        self.start, self.stop, self.key = start, stop, key


class Memory:
    """A storage: when it was allocated, by which stream, and the pieces of it that the sanitizer knows."""

    def __init__(self, storage, stream, is_of_host):
        self.reference, self.stream, self.is_of_host = StorageWeakRef(storage), stream, is_of_host
        self.pieces = []
        self.is_recorded = False  # other streams have asked the allocator to wait for them


class FakeDevice:
    """The device, as the package asks for it (see ``Accelerator``), and as a test looks at it."""

    def __init__(self):
        self.handler = EventHandler()
        self.handler._handle_stream_creation(HOST)
        self.num_host_waits = 0
        self.is_stuck = False
        """Whether the device comes to nothing any more: a collective waits for a rank that is lost."""
        self.races = []
        """Texts about accesses that nothing orders; also of those in a destructor, which cannot raise."""
        self.operations = []
        """Names of all that was launched."""
        self._streams, self._num_events, self._num_keys = {}, 0, 0
        self._memory = {}  # by address
        self._freed = {}  # keys of pieces by the stream that may use them again
        self._local = threading.local()
        self._is_blind = False

    # What the package asks #

    name = "a device that is not there"

    def current_id(self):
        return getattr(self._local, "current", MAIN)

    def current(self):
        return self.stream(self.current_id())

    def side_stream(self):
        return self.stream(SIDE)

    def record(self):
        return self.event().record()

    def clock(self):
        return DeviceClock(self.event)

    def pinned(self, shape, dtype):
        tensor = torch.empty(shape, dtype=dtype)
        self._memory_of(tensor).is_of_host = True  # allocated for the current stream, as the mode has seen
        return tensor

    def synchronize(self):
        self.check_not_stuck("the device")
        self.num_host_waits += 1
        self.handler._handle_device_synchronization()

    # What a program asks #

    def stream(self, number):
        if number not in self._streams:
            self._streams[number] = FakeStream(self, number)
        return self._streams[number]

    def switch(self, number):
        self._local.current = number

    def event(self):
        self._num_events += 1
        self.handler._handle_event_creation(self._num_events)
        return FakeEvent(self, self._num_events)

    def id_of(self, stream):
        return self.current_id() if stream is None else stream.stream_id

    def record_stream(self, tensor):
        """Tell the allocator that the current stream uses a tensor of another one."""
        self._memory_of(tensor).is_recorded = True

    # What the detector sees #

    @contextmanager
    def blind(self):
        """Look at nothing inside: what is done there was reported by other means."""
        before, self._is_blind = self._is_blind, True
        try:
            yield
        finally:
            self._is_blind = before

    def access(self, operation, *, reads=(), writes=(), stream=None):
        """Note what an operation reads and writes, on the current stream.

        Raises:
            RaceError: something of it was accessed by another stream before, and nothing orders the two.
        """
        if self._is_blind:
            return
        self._free_dead_memory()
        for tensor in (*writes, *reads):
            self._keys_of(tensor)  # cuts pieces, so that no key that is taken below is cut any more
        written = {key for tensor in writes for key in self._keys_of(tensor)}
        read = {key for tensor in reads for key in self._keys_of(tensor)} - written
        stream = self.current_id() if stream is None else stream
        if freed := self._freed.pop(stream, None):
            self._launch("free", stream, set(), freed)
        self._launch(operation, stream, read, written)

    def host_reads(self, tensor, operation):
        """Note that the host waits for the current stream and reads a tensor. For its own memory it does not wait."""
        if self.is_of_host(tensor):
            self.access(operation, reads=[tensor], stream=HOST)
            self.handler._handle_stream_synchronization(HOST)  # what the host launches from now on comes after it
        elif not self._is_blind:
            self.check_not_stuck(operation)
            self.access(operation, reads=[tensor])
            self.num_host_waits += 1
            self.handler._handle_stream_synchronization(self.current_id())

    def check_not_stuck(self, operation):
        """Fail where the host would wait for ever, and look at no other rank meanwhile."""
        if self.is_stuck:
            pytest.fail(f"{operation} waits for a device that comes to nothing any more")

    def is_of_host(self, tensor):
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        return memory is not None and memory.is_of_host

    def _free_dead_memory(self):
        """Hand memory that nobody holds back to the stream that allocated it, whose next operation may write there."""
        for address, memory in list(self._memory.items()):
            if memory.reference.expired():
                del self._memory[address]
                if not memory.is_recorded:
                    self._freed.setdefault(memory.stream, set()).update(piece.key for piece in memory.pieces)

    def allocated(self, tensor, *, is_of_host=False):
        """Note that a tensor has memory that was allocated just now: by the current stream, or on the host."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in self._memory:
            self._memory[storage.data_ptr()] = Memory(storage, HOST if is_of_host else self.current_id(), is_of_host)

    def _launch(self, operation, stream, read, written):
        self.operations.append(operation)
        aliases = {key: [] for key in read | written}
        errors = self.handler._handle_kernel_launch(stream, read, written, set(), operation, aliases)
        if errors:
            error = errors[0]
            before, now = error.previous_access, error.current_access
            self.races.append(
                f"{now.operator} on stream {now.stream} is {now.type} what {before.operator} on stream {before.stream} was "
                f"{before.type}, and nothing orders the two\n--- before:\n{_shown(before)}\n--- now:\n{_shown(now)}"
            )
            raise RaceError(self.races[0])

    def _memory_of(self, tensor):
        self.allocated(tensor)
        return self._memory[tensor.untyped_storage().data_ptr()]

    def _keys_of(self, tensor):
        """Return the keys of the pieces a tensor covers; pieces are cut at its ends."""
        if isinstance(tensor, WithheldGrad) or not tensor.numel() or not tensor.untyped_storage().data_ptr():
            return []
        memory = self._memory_of(tensor)
        start = tensor.storage_offset() * tensor.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = start + reach * tensor.element_size()
        keys, cut, place = [], [], start
        for piece in memory.pieces:
            if piece.stop <= start or piece.start >= stop:
                cut.append(piece)
                continue
            if place < piece.start:
                cut.append(Piece(place, piece.start, self._new_key()))
                keys.append(cut[-1].key)
            for part_start, part_stop in (
                (piece.start, max(start, piece.start)),
                (max(start, piece.start), min(stop, piece.stop)),
                (min(stop, piece.stop), piece.stop),
            ):
                if part_start < part_stop:
                    is_first = part_start == piece.start
                    part = Piece(part_start, part_stop, piece.key if is_first else self._new_key(like=piece.key))
                    cut.append(part)
                    if start <= part_start and part_stop <= stop:
                        keys.append(part.key)
            place = piece.stop
        if place < stop:
            cut.append(Piece(place, stop, self._new_key()))
            keys.append(cut[-1].key)
        memory.pieces = sorted(cut, key=lambda piece: piece.start)
        return keys

    def _new_key(self, like=None):
        self._num_keys += 1
        known = self.handler.tensors_accessed.accesses
        known[self._num_keys] = TensorInfo(None)
        if like is not None:
            known[self._num_keys] = TensorInfo(None, list(known[like].reads), known[like].write)
        return self._num_keys


class Observer(TorchDispatchMode):
    """Reports every operation to a device."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, WithheldGrad) for kind in types):
            return NotImplemented  # it does something else in its place, which is seen
        device, name = self._device, func.overloadpacket.__name__
        reads, writes = [], []
        for argument, value in zip_arguments(func._schema, args, kwargs):
            alias = argument.alias_info
            if alias is None or alias.is_write:
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                (reads if alias is None else writes).extend(tensors)
        if name in ("_local_scalar_dense", "item"):  # the second where another mode has taken the first apart
            device.host_reads(args[0], name)
            return func(*args, **kwargs)
        is_of_host = bool(reads) and all(map(device.is_of_host, (*reads, *writes)))
        outputs = func(*args, **kwargs)
        for result, value in zip(
            func._schema.returns, (outputs,) if len(func._schema.returns) == 1 else outputs or (), strict=False
        ):
            if result.alias_info is None:
                made = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                device._free_dead_memory()
                for tensor in made:
                    device.allocated(tensor, is_of_host=is_of_host)
                writes += made
        if name.endswith("_like") or name.startswith(("new_", "empty")):
            reads = []  # only the form of what is given counts
        if reads or writes:
            device.access(name, reads=reads, writes=writes, stream=HOST if is_of_host else None)
        return outputs


@contextmanager
def fake_device(patch):
    """Run the block on a device of its own: the package takes every CPU for it.

    Args:
        patch: a ``pytest.MonkeyPatch``.
    """
    device = FakeDevice()
    patch.setattr(_sanitizer, "traceback", ShortStacks)
    patch.setattr(Accelerator, "of", staticmethod(lambda _: device))
    for method in ("tolist", "cpu"):
        patch.setattr(torch.Tensor, method, _read_by_the_host(device, getattr(torch.Tensor, method), method))
    with Observer(device):
        yield device


class ShortStacks:
    """Stands in for the module by which the sanitizer notes stacks: half of the time would go there otherwise."""

    class StackSummary:
        @staticmethod
        def extract(frame, **_):
            found = []
            while frame is not None and len(found) < 8:
                path = frame.f_code.co_filename
                if "/megabucket/" in path or path.endswith("schedules.py"):
                    found.append((path, frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back
            return found

    @staticmethod
    def walk_stack(frame):
        return frame


def _shown(access):
    return "".join(f"  {path}:{line} {name}()\n" for path, line, name in access.stack_trace)


def _read_by_the_host(device, original, name):
    def read(tensor, *arguments, **named):
        device.host_reads(tensor, name)
        return original(tensor, *arguments, **named)

    return read
