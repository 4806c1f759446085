"""The way of reduced gradients to the owners of whole parameters, and of the new values back. See ``layout/owners.py``.

Each bucket group makes one exchange in each direction, among the ranks that hold its shards. All exchanges of gradients are
launched at once, and those of values after the update::

    reduce-scatter -> verdict -> gradients to owners -> update -> values to shards -> param gather
                                 norm -> clip factor -----^

The memory of an exchange lives until it is over, the gradients of an owner until its update is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.comm import AllToAll, Handle
from megabucket.ddp import DistributedDataParallel
from megabucket.layout.owners import BucketExchange, plan_exchange
from megabucket.optim.shards import GradShard, WholeShard, main_dtype

GRADS_TO_OWNERS: Final = "gradients to owners"
VALUES_TO_SHARDS: Final = "values to shards"


class _Bucket(NamedTuple):
    """The exchange of one bucket."""

    plan: BucketExchange
    held: Sequence[tuple[GradShard, slice]]
    """By piece: the shard with its gradient, and the range there."""
    held_values: Sequence[torch.Tensor]
    """By piece, in the parameter buffer."""
    owned: Sequence[WholeShard]
    owned_values: Sequence[torch.Tensor]
    """By owned parameter, in the parameter buffer: 1D."""
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Of gradients, of changed gradients, of values."""
    device: torch.device


_Launched = tuple[Handle, Sequence[_Bucket], Sequence[AllToAll]]


class OwnerExchange:
    """The exchanges of a wrapper, step after step.

    Args:
        owner_of: ranks in their reduction groups, by parameter.
        held: the gradients of all such parameters in this rank's shards.
        owned: the parameters that this rank updates.
    """

    def __init__(
        self, ddp: DistributedDataParallel, owner_of: Mapping[str, int], held: Sequence[GradShard], owned: Sequence[WholeShard]
    ) -> None:
        self._progress, self._sync = ddp.communicator.progress, ddp.sync
        self._held, self._owned = held, owned
        self._on_way: list[_Launched] = []
        self._keeps_grads = False
        self._groups: list[tuple[_ParamAndGradBucketGroup, list[_Bucket]]] = []
        held_of = {name: shard for shard in held for name in shard.segment.params}
        whole_of = {shard.name: shard for shard in owned}
        for group in ddp.bucket_groups:
            made = []
            for bucket in group.buckets:
                buffer = bucket.buffer
                plan = plan_exchange(buffer.layout, bucket.layout, owner_of, rank=group.communicator.rank)
                if plan is None:
                    continue
                dtypes = buffer.grad_data.dtype, main_dtype(buffer.param_data.dtype), buffer.param_data.dtype
                places = [buffer.layout.params[name] for name in plan.owned]
                made.append(
                    _Bucket(
                        plan,
                        [(held_of[piece.param], held_of[piece.param].range_of(piece.in_buffer)) for piece in plan.held],
                        [buffer.param_data[slice(*piece.in_buffer)] for piece in plan.held],
                        [whole_of[name] for name in plan.owned],
                        [buffer.param_data[place.start : place.stop] for place in places],
                        dtypes,
                        buffer.grad_data.device,
                    )
                )
            if made:
                self._groups.append((group, made))

    def launch_grads(self, *, are_widened: bool) -> None:
        """Send the pieces of reduced gradients to their owners.

        Args:
            are_widened: whether they were changed after the reduction; then 16-bit ones travel in the dtype of the update.
        """
        for group, buckets in self._groups:
            calls = []
            for bucket in buckets:
                pieces = [(shard.grad if are_widened else shard.buffer_grads)[part] for shard, part in bucket.held]
                plan, dtype = bucket.plan, bucket.dtypes[are_widened]
                calls.append(_call(pieces, plan.held_numels, plan.owned_numels, dtype=dtype, device=bucket.device))
            self._launch(group, GRADS_TO_OWNERS, buckets, calls)

    def finish_grads(self) -> None:
        """Wait for the gradients of the parameters that this rank owns."""
        self._progress.enter(self._sync.step, GRADS_TO_OWNERS)
        for bucket, call in self._finish():
            for shard, grads in zip(bucket.owned, call.received.split([one.numel for one in bucket.owned]), strict=True):
                shard.receive(grads)
        self._progress.enter(self._sync.step, "optimizer")

    def return_values(self) -> None:
        """Send new values from the parameter buffer of their owner to all shards."""
        self._progress.enter(self._sync.step, VALUES_TO_SHARDS)
        if not self._keeps_grads:
            self._release_grads()
        for group, buckets in self._groups:
            calls = []
            for bucket in buckets:
                plan, dtype = bucket.plan, bucket.dtypes[-1]
                calls.append(_call(bucket.owned_values, plan.owned_numels, plan.held_numels, dtype=dtype, device=bucket.device))
            self._launch(group, VALUES_TO_SHARDS, buckets, calls)
        for bucket, call in self._finish():
            if bucket.held_values:
                received = call.received.split([values.numel() for values in bucket.held_values])
                torch._foreach_copy_(list(bucket.held_values), list(received))

    @contextmanager
    def keeping_grads(self) -> Iterator[None]:
        """Let owners keep the gradients that they have stepped on until the block ends."""
        self._keeps_grads = True
        try:
            yield
        finally:
            self._keeps_grads = False
            self._release_grads()

    def _release_grads(self) -> None:
        for shard in self._owned:  # a slice without elements would keep the memory
            shard.receive(shard.buffer_grads.new_empty(0))
            shard.main.grad = None

    def drop(self) -> None:
        """Wait for the gradients on their way, which no rank needs."""
        for _ in self._finish():
            pass
        self.forget_widened()

    def forget_widened(self) -> None:
        """Free the widened copies of 16-bit gradients: at the end of a step, since norms and other parts read them."""
        for shard in self._held:
            shard.grad = shard.buffer_grads

    def _launch(
        self, group: _ParamAndGradBucketGroup, what: str, buckets: Sequence[_Bucket], calls: Sequence[AllToAll]
    ) -> None:
        self._on_way.append((group.communicator.launch(calls, label=f"{what} {group.index}"), buckets, calls))

    def _finish(self) -> Iterator[tuple[_Bucket, AllToAll]]:
        on_way, self._on_way = self._on_way, []
        for handle, buckets, calls in on_way:
            handle.wait()
            yield from zip(buckets, calls, strict=True)


def _call(
    pieces: Sequence[torch.Tensor],
    sent_numels: tuple[int, ...],
    received_numels: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> AllToAll:
    received = torch.empty(sum(received_numels), dtype=dtype, device=device)
    sent = torch.cat(list(pieces)) if pieces else received.new_empty(0)
    return AllToAll(received, sent, received_numels, sent_numels)
