"""What a process group of ``torch.distributed`` does when it is asked: one small question a method, on small tensors.

``megabucket doctor`` asks them because back-ends differ exactly here. An operation that a back-end does not have raises, and
that is an answer: whoever asks catches it. ``ProbeGroups`` makes groups to ask on, so that a question which leaves a group
unusable costs the real one nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from megabucket.comm.torch import backend_of, store_of
from megabucket.errors import CollectiveError

# torch 2.13 renamed these functions; 2.11 has only the old names, about which newer ones warn.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_NUMEL: Final = 8
"""Elements of each rank's part in a question."""
_LATE_S: Final = 0.5
_EXPIRES_S: Final = 0.05
_CALLBACK_S: Final = 2.0


class GroupProbes:
    """Questions to one process group. Every rank of the group asks the same ones in the same order.

    Args:
        group: this process is a member.
        device: where the tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend: str = group._get_backend(device).name()
        self._device = device

    def _own(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((_NUMEL,), self.rank + 1, dtype=dtype, device=self._device)

    @property
    def _sum(self) -> int:
        return self.size * (self.size + 1) // 2  # of rank + 1 over all ranks

    def scatter_in_place(self) -> dict[str, Any]:
        """Reduce-scatter into this rank's own part of the input, as the back-end does it itself."""
        full = torch.full((_NUMEL * self.size,), self.rank + 1, dtype=torch.float32, device=self._device)
        shard = full[self.rank * _NUMEL : (self.rank + 1) * _NUMEL]
        _reduce_scatter(shard, full, op=dist.ReduceOp.SUM, group=self.group, async_op=True).wait()
        others = torch.cat([full[: self.rank * _NUMEL], full[(self.rank + 1) * _NUMEL :]])
        return {"is_right": _all_equal(shard, self._sum), "keeps_input": _all_equal(others, self.rank + 1)}

    def coalesced(self) -> dict[str, Any]:
        """Launch three collectives of each kind as one batch; return how many works each batch became.

        Gathers are left out on gloo, where torch may crash; see docs/decisions/gloo-coalesced-gather.md.
        """
        parts = [self._own() for _ in range(3)]
        num_works = {"all-reduce": self._batch([_reducing(part, self.group) for part in parts])}
        is_right = all(_all_equal(part, self._sum) for part in parts)
        shards = [self._own() for _ in range(3)]
        fulls = [torch.full((_NUMEL * self.size,), self.rank + 1.0, device=self._device) for _ in range(3)]
        pairs = list(zip(shards, fulls, strict=True))
        num_works["reduce-scatter"] = self._batch([_scattering(shard, full, self.group) for shard, full in pairs])
        is_right = is_right and all(_all_equal(shard, self._sum) for shard in shards)
        if backend_of(self.group, self._device) == "gloo":
            return {"is_right": is_right, "num_works": num_works}
        parts = [self._own() for _ in range(3)]
        num_works["all-gather"] = self._batch(
            [_gathering(full, part, self.group) for full, part in zip(fulls, parts, strict=True)]
        )
        expected = torch.arange(1, self.size + 1, dtype=torch.float32, device=self._device).repeat_interleave(_NUMEL)
        return {"is_right": is_right and all(torch.equal(full, expected) for full in fulls), "num_works": num_works}

    def _batch(self, launches: list[Callable[[], Any]]) -> int:
        device = self._device if self._device.type == "cuda" else None
        manager_of = distributed_c10d._coalescing_manager
        with manager_of(self.group, device=device, async_ops=True) as manager:
            for launch in launches:
                launch()
        for work in manager.works:
            work.wait()
        return len(manager.works)

    def all_to_all(self) -> dict[str, Any]:
        """Send a piece of its own to every rank."""
        sent = torch.arange(self.size, dtype=torch.float32, device=self._device) + 100 * self.rank
        received = torch.empty_like(sent)
        _wait(dist.all_to_all_single(received, sent, group=self.group, async_op=True))
        expected = 100.0 * torch.arange(self.size, dtype=torch.float32, device=self._device) + self.rank
        return {"is_right": torch.equal(received, expected)}

    def send_receive(self) -> dict[str, Any]:
        """Send to the next rank and receive from the one before, both at once."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent, received = self._own(), torch.zeros(_NUMEL, device=self._device)
        pair = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return {"is_right": _all_equal(received, before + 1)}

    def future(self) -> dict[str, Any]:
        """Ask an asynchronous work to call back when it is done, which is how communication is timed."""
        calls: list[float] = []
        work = _works(dist.all_reduce(self._own(), group=self.group, async_op=True))
        work.get_future().add_done_callback(lambda _: calls.append(time.perf_counter()))
        work.wait()
        end_s = time.perf_counter() + _CALLBACK_S
        while not calls and time.perf_counter() < end_s:
            time.sleep(0.001)
        return {"is_right": len(calls) == 1}

    def expired_wait(self) -> dict[str, Any]:
        """Give up a wait for a late rank, wait again, and see whether the result is as if nothing had been.

        The last rank is late. Leaves the group unusable where an expired wait does.
        """
        tensor, raised = self._own(), ""
        is_late = self.rank == self.size - 1
        if is_late:
            time.sleep(_LATE_S)
        work = _works(dist.all_reduce(tensor, group=self.group, async_op=True))
        start_s = time.perf_counter()
        if not is_late:
            try:
                work.wait(timedelta(seconds=_EXPIRES_S))
            except RuntimeError as error:
                raised = type(error).__name__
        waited_s = time.perf_counter() - start_s
        work.wait()
        # 0.5 s late, 0.05 s asked for: anything below half of the delay was the wait giving up.
        ended_early = is_late or (bool(raised) and waited_s < _LATE_S / 2)
        return {"is_right": _all_equal(tensor, self._sum), "ended_early": ended_early}

    def store(self) -> dict[str, Any]:
        """Write through the group's store, read what the next rank wrote, and do so again through a clone of the store."""
        store = store_of(self.group)
        if store is None:
            raise CollectiveError("torch does not tell the store of the group")
        kind = type(_innermost(store)).__name__
        own, other = f"doctor/{self.rank}", f"doctor/{(self.rank + 1) % self.size}"
        store.set(own, str(self.rank))
        store.wait([other], timedelta(seconds=10))
        is_right = store.get(other) == str((self.rank + 1) % self.size).encode()
        can_clone = False
        with suppress(Exception):  # a store without connections of its own refuses in ways of its own
            can_clone = cast("Any", store).clone().get(other) == store.get(other)
        return {"is_right": is_right, "kind": kind, "can_clone": can_clone}

    def flight_recorder(self) -> dict[str, Any]:
        """Look for torch's record of launched collectives, after launching one."""
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None) or getattr(
            torch._C._distributed_c10d, "_dump_nccl_trace_json", None
        )
        if dump is None:
            return {"has": False, "num_entries": 0}
        _wait(dist.all_reduce(self._own(), group=self.group, async_op=True))
        return {"has": True, "num_entries": len(json.loads(dump()).get("entries") or ())}


class ProbeGroups:
    """Groups of the same ranks over the same back-end as a given one, to ask questions on.

    Where the given group is not the whole world in its order, none can be made without the other ranks, and the given one is
    used.

    Args:
        group: the real one; ``None`` is the default group.
        timeout_s: after which a collective on the groups that are made gives up.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        real = group if group is not None else dist.group.WORLD
        self._real = cast("dist.ProcessGroup", real)
        self._timeout = timedelta(seconds=timeout_s)
        self._made: list[dist.ProcessGroup] = []
        self._ranks = dist.get_process_group_ranks(self._real)
        self.are_fresh = self._ranks == list(range(dist.get_world_size()))
        """Whether the groups are apart from the real one."""

    def make(self) -> dist.ProcessGroup:
        """Return another group; every rank calls this at the same time."""
        if not self.are_fresh:
            return self._real
        made: dist.ProcessGroup = dist.new_group(
            self._ranks, timeout=self._timeout, backend=dist.get_backend_config(self._real)
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        """End all groups that were made."""
        while self._made:
            dist.destroy_process_group(self._made.pop())


def _reducing(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    return lambda: dist.all_reduce(tensor, group=group, async_op=True)


def _scattering(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    return lambda: _reduce_scatter(shard, full, op=dist.ReduceOp.SUM, group=group, async_op=True)


def _gathering(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    return lambda: _all_gather(full, shard, group=group, async_op=True)


def _innermost(store: Store) -> Store:
    return _innermost(store.underlying_store) if isinstance(store, PrefixStore) else store


def _works(work: dist.Work | None) -> dist.Work:
    return cast("dist.Work", work)


def _wait(work: dist.Work | None) -> None:
    _works(work).wait()


def _all_equal(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())
