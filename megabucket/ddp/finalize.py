"""``finalize_grads``: completes gradients under tensor and pipeline parallelism, in the only order that mixes no partial sums.

::

    backward -> reduced over data-parallel ranks -> summed over copies -> divided by tokens -> optimizer: norm, clip, update

Copies of a parameter on other ranks (a tied embedding on two pipeline stages, a norm whose sequence is cut over tensor-parallel
ranks) each have a part of its gradient. With shards a rank owns a piece of it after the reduction, and sums this piece with the
ranks that own the same one; wrapping has compared that they do. The norm comes last and counts each element once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real

import torch

from megabucket.comm import AllReduce, Broadcast, Communicator
from megabucket.ddp.backward import refuse_in_backward
from megabucket.ddp.distributed_data_parallel import DistributedDataParallel
from megabucket.ddp.groups import DENSE
from megabucket.ddp.step import UPDATING, GradSync, StepState, all_or_none
from megabucket.errors import ConfigError
from megabucket.layout.shards import shard_slices


@torch.no_grad()
def finalize_grads(
    chunks: DistributedDataParallel | Iterable[DistributedDataParallel], *, num_tokens: float | torch.Tensor | None = None
) -> None:
    """Complete the gradients of the whole model: call it after the last backward of a step, before the optimizer's step.

    A collective call of all ranks that agree on steps. Finishes the reduction, then sums the gradients of parameters that are
    ``partial`` along one of the wrapper's ``copies``, and divides all gradients by the number of tokens.

    Args:
        chunks: the wrapped model, or its wrapped parts on this rank.
        num_tokens: the number of tokens in the losses of this rank, over all microbatches; summed over the ranks of ``dense``.
            With ``copies={"pp": ...}`` the sum of the last pipeline stage counts: the other stages may give any number, but not
            ``None``. ``None``: no division.

    Raises:
        ConfigError: tokens are given, and the gradients are means over ranks already.
        LayoutMismatchError: tokens are given on some ranks only.
        PhaseError: a backward is running.
        MegabucketError: the step is not whole on some rank; all ranks raise the same error.
    """
    refuse_in_backward("finalize_grads()")
    tokens: float | None = None
    wrappers = [chunks] if isinstance(chunks, DistributedDataParallel) else list(chunks)
    _finish([ddp.sync for ddp in wrappers])
    for ddp in wrappers:
        with ddp.sync.call("finalize_grads()") as call:
            call.entries = [("num_tokens is given:", num_tokens is not None)]
            if num_tokens is not None:
                if ddp.policy.averages:
                    raise ConfigError(
                        "finalize_grads() got num_tokens, but grad_reduction='mean' has divided the gradients by the number of "
                        "ranks: they would be divided twice. Set grad_reduction='sum', and let the loss be a sum over tokens."
                    )
                tokens = _checked(num_tokens, ddp)
    for ddp in wrappers:
        if not ddp.sync.skip_reason:
            with ddp.sync.failing_on_all_ranks("finalize_grads()", UPDATING):
                _sum_over_copies([ddp], ddp.ranks.copies)
    if not any(ddp.sync.skip_reason for ddp in wrappers):
        with wrappers[0].sync.failing_on_all_ranks("finalize_grads()", UPDATING):
            _sum_over_copies(wrappers, wrappers[0].ranks.copies_across)
    if tokens is not None:
        with wrappers[0].sync.failing_on_all_ranks("finalize_grads()", UPDATING):
            total = _total_tokens(wrappers[0], tokens)
        for ddp in wrappers:
            ddp.scale_gradients(1.0 / max(total, 1.0))


def _finish(syncs: Sequence[GradSync]) -> None:
    """Finish the reductions of all wrappers, which run beside each other."""
    with all_or_none(syncs) as agreed:
        if not any(sync.state is StepState.GIVING_UP for sync in syncs):
            for sync in syncs:
                sync.start()
        for sync in syncs:
            sync.finish()
            agreed.append(sync)


def _checked(num_tokens: object, ddp: DistributedDataParallel) -> float:
    """Return the tokens of this rank as a number, before any rank sends its own.

    Raises:
        ConfigError: it is no finite number >= 0, or a tensor of several elements.
    """
    number: object = num_tokens
    if isinstance(num_tokens, torch.Tensor) and num_tokens.numel() == 1 and not num_tokens.is_complex():
        number = ddp.communicator.read(num_tokens, label="tokens").item()
    if isinstance(number, Real) and 0 <= (found := float(number)) < math.inf:
        return found
    shown = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, torch.Tensor) else repr(number)
    raise ConfigError(
        f"num_tokens must be a finite number >= 0, or a tensor of one element, got {shown}: gradients would be divided by "
        "the sum of it over the ranks. Count the tokens of all microbatches of the step on this rank, as one number."
    )


def _sum_over_copies(wrappers: Sequence[DistributedDataParallel], copies: Mapping[str, Communicator]) -> None:
    for along, communicator in copies.items():
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for piece in _pieces(wrappers, along):
            by_dtype.setdefault(piece.dtype, []).append(piece)
        for pieces in by_dtype.values():
            # One collective for many small tensors; no copy for a single large one.
            flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            in_order = wrappers[0].policy.sums_in_rank_order
            communicator.launch([AllReduce(flat, in_rank_order=in_order)], label=f"gradients along {along}").wait()
            if flat is not pieces[0]:
                torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))
    for group in chain.from_iterable(ddp.bucket_groups for ddp in wrappers if copies):
        group.copy_to_local_grads()


def _pieces(wrappers: Iterable[DistributedDataParallel], along: str) -> Iterator[torch.Tensor]:
    """Yield this rank's pieces of gradients that are partial along a dimension, in the same order on all ranks."""
    found: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for ddp, group in ((owner, group) for owner in wrappers for group in owner.bucket_groups):
        for bucket in group.buckets:
            buffer = bucket.buffer
            if not ddp.policy.is_sharded or bucket.slots[0].param.grad is bucket.slots[0].in_buffer:  # or force_all_reduce
                slots = {name: buffer.layout.params[name] for name in bucket.layout.params}
                spans = [(name, slot.start, slot.stop) for name, slot in slots.items()]
            else:
                owned = shard_slices(buffer.layout, bucket=bucket.layout.index, rank=group.communicator.rank)
                spans = [(piece.param, *piece.in_buffer) for piece in owned]
            for name, start, stop in spans:
                if along in (identity := ddp.identities[name]).partial:
                    found[identity.global_name, identity.offset] = buffer.grad_data[start:stop]  # 1D
    yield from (found[place] for place in sorted(found))


def _total_tokens(ddp: DistributedDataParallel, num_tokens: float) -> float:
    device = ddp.param_and_grad_buffers[0].grad_data.device
    total = torch.full((1,), num_tokens, dtype=torch.float64, device=device)
    for communicator in ddp.ranks.by_name[DENSE].communicators:  # inside each replica, then over replicas
        result = communicator.launch([AllReduce(total)], label="tokens").read(total)
    if (stages := ddp.ranks.copies.get("pp")) is not None:
        result = stages.launch([Broadcast(total, stages.size - 1)], label="tokens of the last stage").read(total)
    return float(result)
