"""The communicator over a ``torch.distributed`` process group: gloo, NCCL, or any other back-end torch knows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from megabucket.comm.port import (
    AllGather,
    AllReduce,
    Broadcast,
    Call,
    Communicator,
    Handle,
    LocalCommunicator,
    ReduceOp,
    ReduceScatter,
)
from megabucket.errors import CollectiveError, ProcessGroupMissingError
from megabucket.trace.recorder import Interval, Lane, Recorder

_REDUCE_OPS: Final = MappingProxyType(
    {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG, ReduceOp.MAX: dist.ReduceOp.MAX}
)


def _newest(name: str, deprecated_name: str) -> Callable[..., dist.Work]:
    # torch 2.13 renamed these collectives and warns under the old names; 2.11 has only the old ones.
    return cast("Callable[..., dist.Work]", getattr(dist, name, None) or getattr(dist, deprecated_name))


_all_gather = _newest("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")


def discover_communicator(process_group: dist.ProcessGroup | None, recorder: Recorder | None = None) -> Communicator:
    """Return the communicator for a group: the given one, the default one, or a single process.

    Raises:
        ProcessGroupMissingError: a launcher started several processes but ``torch.distributed`` is not initialized.
    """
    if process_group is not None:
        return ProcessGroupCommunicator(process_group, recorder)
    if dist.is_available() and dist.is_initialized():
        return ProcessGroupCommunicator(dist.group.WORLD, recorder)
    # Read only to refuse: a forgotten init_process_group() would otherwise train replicas that never talk.
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdigit() and int(launched) > 1:
        raise ProcessGroupMissingError(world_size=int(launched))
    return LocalCommunicator()


class ProcessGroupCommunicator(Communicator):
    """Launches on one process group. Several of them may live in one process.

    Raises:
        CollectiveError: this process is not a member of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, recorder: Recorder | None = None) -> None:
        # The default group stays None: a reference of ours would keep its threads alive beyond destroy_process_group().
        self._group = None if group is dist.group.WORLD else group
        self._gloo_devices: dict[torch.device, bool] = {}
        rank = dist.get_rank(group)
        if rank < 0:
            raise CollectiveError(
                f"global rank {dist.get_rank()} is not a member of the process group it was given; wrap the module on the "
                "group's members only, or pass a group that contains this rank."
            )
        super().__init__(rank=rank, size=dist.get_world_size(group), recorder=recorder)

    def prepare(self, calls: Sequence[Call]) -> list[Call]:
        """Return calls on tensors that C++ owns, too, where gloo's threads handle them."""
        return [_anchored(call) if self._is_gloo(call.full.device) else call for call in calls]

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        start_s = time.perf_counter()
        if self._is_gloo(calls[0].full.device):
            calls = [_without_clone(call) for call in calls]
        works = [self._start(call) for call in calls] if len(calls) == 1 else self._start_coalesced(calls)
        if self.recorder.records_time:
            self._record_completion(works, label, start_s)
        return _WorkHandle(works, calls, self, label)

    def _is_gloo(self, device: torch.device) -> bool:
        if device not in self._gloo_devices:
            group = self._group or dist.group.WORLD
            self._gloo_devices[device] = group is not None and group._get_backend(device).name() == "gloo"
        return self._gloo_devices[device]

    def _start(self, call: Call) -> dist.Work:
        group = self._group
        if isinstance(call, AllReduce):
            work = dist.all_reduce(call.tensor, op=_REDUCE_OPS[call.op], group=group, async_op=True)
        elif isinstance(call, ReduceScatter):
            work = _reduce_scatter(call.shard, call.full, op=_REDUCE_OPS[call.op], group=group, async_op=True)
        elif isinstance(call, AllGather):
            work = _all_gather(call.full, call.shard, group=group, async_op=True)
        else:
            # As bytes: nothing is computed, and gloo knows neither bool (masks) nor int16.
            work = dist.broadcast(call.tensor.reshape(-1).view(torch.uint8), group=group, group_src=0, async_op=True)
        return cast("dist.Work", work)

    def _start_coalesced(self, calls: Sequence[Call]) -> list[dist.Work]:
        """Send the calls as few batches: torch coalesces one kind, one reduce op and one dtype at a time."""
        if isinstance(calls[0], Broadcast):
            return [self._start(call) for call in calls]
        batches: dict[tuple[torch.dtype, ReduceOp | None], list[Call]] = {}
        for call in calls:
            batches.setdefault((call.full.dtype, getattr(call, "op", None)), []).append(call)
        works: list[dist.Work] = []
        for batch in batches.values():
            if len(batch) == 1:
                works.append(self._start(batch[0]))
                continue
            # NCCL batches what is launched between group start and end; other back-ends have *_coalesced collectives.
            device = batch[0].full.device if batch[0].full.is_cuda else None
            with dist._coalescing_manager(self._group, device=device, async_ops=True) as manager:  # type: ignore[attr-defined]
                for call in batch:
                    self._start(call)
            works += manager.works
        return works

    def _record_completion(self, works: Sequence[dist.Work], label: str, start_s: float) -> None:
        """Record the time from launch to the completion of the last work, from the back-end's own thread."""
        countdown = iter(range(len(works))[::-1])  # next() is atomic, and works may end in several threads at once

        def on_done(_: Any) -> None:
            if next(countdown) == 0:
                self.recorder.record_interval(Interval(Lane.COMM, label, start_s, time.perf_counter()))

        for work in works:
            work.get_future().add_done_callback(on_done)


def _without_clone(call: Call) -> Call:
    """Return an all-reduce in place of an in-place reduce-scatter, which is what gloo makes of it anyway.

    Gloo clones the input on the caller's thread, all-reduces the clone and copies the shard out while waiting; its handle
    cannot tell when the data arrived. Reducing the buffer itself gives the same bits without clone and copy, and whatever it
    leaves outside the shard is allowed to be anything. See docs/decisions/gloo-reduce-scatter.md.
    """
    if not isinstance(call, ReduceScatter):
        return call
    start, shard = call.full.data_ptr(), call.shard.data_ptr()
    is_in_place = start <= shard < start + call.full.numel() * call.full.element_size()
    return AllReduce(call.full, call.op) if is_in_place else call


def _anchored(call: Call) -> Call:
    """Return the call on tensors that C++ owns, too, so that gloo's threads never need Python's lock to let go of them.

    A gloo thread drops its reference after the waiting thread went on. If only Python owned the tensor besides, the drop would
    need the lock: the thread competes with backward for it, and at the end of the program it may never get it, which
    aborts the process ("terminate called without an active exception"). See docs/decisions/gloo-tensors.md.
    """
    if isinstance(call, Broadcast):
        return call
    # .data is the same memory and no view in autograd's sense, so a view of it owns it, in C++.
    full = call.full.data
    if isinstance(call, AllReduce):
        return replace(call, tensor=full, keeps=(full.view(-1),))
    shard = call.shard.data
    return replace(call, full=full, shard=shard, keeps=(full.view(-1), shard.view(-1)))


class _WorkHandle(Handle):
    """Waits for the works of one batch.

    The calls stay referenced until ``wait`` has returned: on CUDA the allocator could otherwise hand their memory to
    somebody else while the collective still reads it.
    """

    def __init__(self, works: Sequence[dist.Work], calls: Sequence[Call], owner: Communicator, label: str) -> None:
        self._works: Sequence[dist.Work] | None = works
        self._calls: Sequence[Call] = calls
        self._owner = owner
        self._label = label

    def wait(self) -> None:
        if self._works is None:
            return
        start_s = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works, self._calls = None, ()
        if self._owner.recorder.records_time:
            self._owner.record_wait(self._label, start_s)
