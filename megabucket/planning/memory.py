"""Bytes that the wrapper and its optimizer hold on one rank, computed from a layout. No torch.

Counts what lives from step to step, to the byte (tests/optim/test_memory_to_the_byte.py compares with real tensors), and
activations if they are given. The temporaries of autograd and of collectives, the process group and the rounding of an
allocator are not in it, nor are frozen parameters and module buffers, which stay where they are. See docs/memory.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import fp32_local_params
from megabucket.layout import BufferLayout, ModelLayout, OwnerPlan, ParamSpec, build_layout, plan_owners
from megabucket.layout.segments import Segment, plan_segments
from megabucket.planning.run_config import shard_counts
from megabucket.units import FENCE_BYTES, dtype_bytes

_MAIN_BYTES: Final = 4  # float32
_STEP_COUNT_BYTES: Final = 4  # Adam keeps one float32 per tensor
_NORM_BYTES: Final = 8  # float64
_MOST_EXCHANGING_RANKS: Final = 8  # as in comm.gloo
_LEAST_READ_BYTES: Final = 1 << 20  # as in comm.samehost
_BLOCK_BYTES: Final = 1 << 19  # as in comm.samehost


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank by what they hold."""

    parameter_bytes: int = 0
    """Model parameters in the parameter buffer."""
    gradient_bytes: int = 0
    """Gradients in the gradient buffer, and float32 sums of microbatches beside it."""
    padding_bytes: int = 0
    """Elements of both buffers outside of parameters: alignment gaps and padded bucket ends."""
    main_parameter_bytes: int = 0
    """float32 copies of the 16-bit parameters this rank updates."""
    main_gradient_bytes: int = 0
    """float32 copies of the 16-bit gradients this rank updates with."""
    moment_bytes: int = 0
    """Optimizer state of the elements this rank updates."""
    optimizer_padding_bytes: int = 0
    """Alignment gaps inside the flat tensors the optimizer steps on."""
    scratch_bytes: int = 0
    """Small tensors for communication and bookkeeping: fence, gradient norm, a NaN per parameter, Adam's step counts, and with
    ``unused_parameters="skip"`` a byte per parameter."""
    activation_bytes: int = 0
    """Activations, as given by the caller."""

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: RankMemory) -> RankMemory:
        """Add category by category."""
        return RankMemory(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def rank_memory(  # noqa: PLR0913 - one argument per choice, most of them rarely used
    layout: ModelLayout,
    *,
    rank: int,
    is_sharded: bool,
    moments_per_element: int = 2,
    has_main_params: bool = True,
    has_fence: bool = True,
    group_of: Mapping[str, int] | None = None,
    fp32_local: Collection[str] = (),
    skips_unused: bool = False,
    owners: OwnerPlan | None = None,
) -> RankMemory:
    """Return the bytes one rank holds for the model of ``layout``.

    Per element of a float32 model with Adam on ``n`` ranks that is ``4 + 4 + 8 / n`` bytes sharded and 16 otherwise; per
    element of a 16-bit model with float32 gradients ``2 + 4 + 12 / n`` and 18 (Rajbhandari et al., "ZeRO", 2020, section 3.1,
    counts the same with 16-bit gradients). Padding and scratch come on top. Time is linear in the number of parameters.

    Args:
        layout: of the whole model.
        rank: position in the data-parallel group. For buffers cut for fewer ranks (experts) the position is taken modulo
            their number. Ranks differ: the last ones own padding instead of parameters.
        is_sharded: whether the rank updates its shard only (the distributed optimizer), or everything.
        moments_per_element: tensors of optimizer state: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for SGD. With two,
            each flat tensor also has a step count, as in torch's Adam.
        has_main_params: whether ``DistributedOptimizer`` steps, which has float32 main parameters for 16-bit ones in both
            modes. A plain torch optimizer steps on whole parameters instead, with state in the dtype of the gradients.
        has_fence: whether there is more than one rank, so that they agree: on each step, or on calls between steps alone.
        group_of: index of the optimizer group by parameter name, where there is more than one: a flat tensor ends where the
            group changes.
        fp32_local: parameters whose gradients of 16 bits are added up in float32 on each rank, as
            ``config.resolve.fp32_local_params`` returns them.
        skips_unused: whether ``unused_parameters="skip"``, with a flat tensor for each parameter. All of them have been used.
        owners: of parameters that are updated whole, with one tensor of state each: see ``planning.owners``.

    Raises:
        LayoutError: a buffer's dtype is unknown, or ``rank`` is out of range.

    >>> from megabucket.config import DistributedDataParallelConfig
    >>> from megabucket.layout import ParamSpec, build_layout
    >>> layout = build_layout([ParamSpec("head", (200,), "bfloat16")], DistributedDataParallelConfig(), dp_size=2)
    >>> rank_memory(layout, rank=1, is_sharded=True)  # 200 elements padded to 256; rank 1 owns 128 to 200
    ... # doctest: +NORMALIZE_WHITESPACE
    RankMemory(parameter_bytes=400, gradient_bytes=800, padding_bytes=336, main_parameter_bytes=288, main_gradient_bytes=0,
               moment_bytes=576, optimizer_padding_bytes=0, scratch_bytes=62, activation_bytes=0)
    """
    norm_bytes = _NORM_BYTES if has_main_params else 0
    total = RankMemory(scratch_bytes=norm_bytes + (FENCE_BYTES if has_fence else 0))
    total += _whole_memory_of_rank(layout, owners, rank=rank, is_sharded=is_sharded)
    for buffer in layout.buffers:
        total += _buffers_memory(buffer, fp32_local) + RankMemory(scratch_bytes=len(buffer.params) * skips_unused)
        if has_main_params:
            groups = _groups_in_shards(group_of if group_of is not None else dict.fromkeys(buffer.params, 0), owners)
            alone = {name: name for name in buffer.params} if skips_unused else None
            segments = plan_segments(buffer, groups, rank=rank % buffer.num_shards, is_sharded=is_sharded, signature_of=alone)
            total += _flat_optimizer_memory(buffer, segments, moments_per_element)
        else:
            total += _plain_optimizer_memory(buffer, moments_per_element)
    return total


@dataclass(frozen=True, slots=True)
class OffloadBytes:
    """Bytes of storages that ``ddp.offload()`` gives back on one rank, by argument."""

    grads: int = 0
    """Gradient buffers, float32 sums beside them, and float32 copies of 16-bit gradients."""
    optimizer: int = 0
    """Optimizer state of the elements this rank updates, without step counts."""
    main_params: int = 0
    """float32 copies of the 16-bit parameters this rank updates."""
    params: int = 0
    """Parameter buffers; given back with ``params=True`` only."""

    def __add__(self, other: OffloadBytes) -> OffloadBytes:
        """Add argument by argument."""
        return OffloadBytes(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def offload_bytes(
    layout: ModelLayout,
    *,
    rank: int,
    is_sharded: bool,
    moments_per_element: int = 2,
    group_of: Mapping[str, int] | None = None,
    fp32_local: Collection[str] = (),
    skips_unused: bool = False,
    owners: OwnerPlan | None = None,
) -> OffloadBytes:
    """Return what ``ddp.offload()`` gives back on one rank with a ``DistributedOptimizer``; arguments as for ``rank_memory``.

    All of it is part of ``rank_memory``. What gloo receives gradients in (``exchange_bytes``) is freed with them, on top.

    Raises:
        LayoutError: a buffer's dtype is unknown, or ``rank`` is out of range.

    >>> from megabucket.config import DistributedDataParallelConfig
    >>> from megabucket.layout import ParamSpec, build_layout
    >>> layout = build_layout([ParamSpec("head", (200,), "bfloat16")], DistributedDataParallelConfig(), dp_size=2)
    >>> offload_bytes(layout, rank=1, is_sharded=True)  # 256 elements in each buffer; rank 1 owns 72
    OffloadBytes(grads=1024, optimizer=576, main_params=288, params=512)
    """
    total = OffloadBytes()
    for buffer in layout.buffers:
        held = rank_memory(
            ModelLayout((buffer,)),
            rank=rank,
            is_sharded=is_sharded,
            moments_per_element=moments_per_element,
            group_of=group_of,
            fp32_local=fp32_local,
            skips_unused=skips_unused,
            owners=owners,
        )
        param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
        main, main_grad, moments = _flat_bytes_per_element(buffer, moments_per_element)
        gaps_numel = held.optimizer_padding_bytes // max(main + main_grad + moments, 1)
        total += OffloadBytes(
            grads=held.gradient_bytes
            + held.main_gradient_bytes
            + (buffer.numel - buffer.params_numel) * grad_bytes
            + gaps_numel * main_grad,
            optimizer=held.moment_bytes + gaps_numel * moments,
            main_params=held.main_parameter_bytes + gaps_numel * main,
            params=buffer.numel * param_bytes,
        )
    return total


def offload_of_plan(
    layout: ModelLayout,
    config: DistributedDataParallelConfig,
    *,
    moments_per_element: int = 2,
    whole_params: Collection[str] = (),
) -> OffloadBytes:
    """Return what ``ddp.offload()`` gives back on the rank of ``memory_by_mode``, in the mode of the config."""
    owners = plan_owners(layout, whole_params) if whole_params else None
    return offload_bytes(
        layout,
        rank=0 if owners is None else _busiest_rank(layout, owners),
        owners=owners,
        is_sharded=config.use_distributed_optimizer,
        moments_per_element=moments_per_element,
        fp32_local=fp32_local_params(config, [name for buffer in layout.buffers for name in buffer.params]),
        skips_unused=config.unused_parameters == "skip",
    )


def exchange_bytes(layout: ModelLayout, *, reads_peers: bool = False, receives: bool = True) -> int:
    """Return the bytes that come on top of ``rank_memory`` over gloo.

    Other ranks' gradients are received in it: see docs/decisions/gloo.md.

    Args:
        receives: whether parts are received outside of the gradient buffer, as in reduce-scatter mode.
        reads_peers: whether the ranks read each other's memory, bucket by bucket (``read_peer_memory``, all ranks on one host).
            Then only small buckets are received, and a block from each other rank.
    """
    received_bytes = block_bytes = 0
    for buffer in layout.buffers:
        if 1 < buffer.num_shards <= _MOST_EXCHANGING_RANKS:
            for bucket in buffer.buckets:
                grad_bytes = bucket.numel * dtype_bytes(buffer.key.grad_dtype)
                if reads_peers and grad_bytes >= _LEAST_READ_BYTES:
                    block_bytes = max(block_bytes, (buffer.num_shards - 1) * _BLOCK_BYTES)
                elif receives:
                    received_bytes += grad_bytes // 2 if buffer.num_shards == 2 else grad_bytes
    return received_bytes + block_bytes


def memory_by_mode(
    specs: Sequence[ParamSpec],
    config: DistributedDataParallelConfig,
    *,
    dp_size: int,
    group_sizes: Mapping[str, int] | None = None,
    num_instances: int = 1,
    moments_per_element: int = 2,
    activation_bytes: int = 0,
    whole_params: Collection[str] = (),
) -> dict[str, RankMemory]:
    """Return the memory of the first rank with ``DistributedOptimizer``, by mode: ``all_reduce`` and ``reduce_scatter``.

    No rank holds more than the first one but for gaps: padding lies at the end of buckets, so the last ranks own less. With
    ``whole_params`` it is the rank that owns most elements.

    Args:
        whole_params: those that are updated whole, in reduce-scatter mode each at its owner.
        num_instances: replicas among the ranks of each group, each of which holds all shards.
        activation_bytes: added as they are.

    Raises:
        LayoutError: no parameter, or a name twice.
        ConfigError: the config cannot be honoured for these parameters, or the instances do not divide the ranks of a group.
    """
    layout, found = None, {}
    for is_sharded, mode in enumerate(("all_reduce", "reduce_scatter")):
        if layout is None or num_instances > 1 or config.layout == "megatron":  # whose padding depends on the mode
            fields = {"use_distributed_optimizer": bool(is_sharded)} if config.layout == "megatron" else {}
            shards = shard_counts(dp_size, group_sizes or {}, num_instances if is_sharded else 1)
            layout = build_layout(specs, config.model_copy(update=fields), dp_size=shards["dense"], group_sizes=shards)
        owners = plan_owners(layout, whole_params) if whole_params else None
        found[mode] = rank_memory(
            layout,
            rank=0 if owners is None else _busiest_rank(layout, owners),
            owners=owners,
            is_sharded=bool(is_sharded),
            moments_per_element=moments_per_element,
            has_fence=dp_size > 1,
            fp32_local=fp32_local_params(config, [spec.name for spec in specs]),
            skips_unused=config.unused_parameters == "skip",
        ) + RankMemory(activation_bytes=activation_bytes)
    return found


def _buffers_memory(buffer: BufferLayout, fp32_local: Collection[str]) -> RankMemory:
    param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
    local_numel = sum(slot.numel for name, slot in buffer.params.items() if name in fp32_local and grad_bytes < _MAIN_BYTES)
    return RankMemory(
        parameter_bytes=buffer.params_numel * param_bytes,
        gradient_bytes=buffer.params_numel * grad_bytes + local_numel * _MAIN_BYTES,
        padding_bytes=(buffer.numel - buffer.params_numel) * (param_bytes + grad_bytes),
        scratch_bytes=len(buffer.params) * param_bytes,  # the NaN that a parameter shows until it is gathered
    )


def _flat_optimizer_memory(buffer: BufferLayout, segments: Sequence[Segment], moments_per_element: int) -> RankMemory:
    main_bytes, main_grad_bytes, moment_bytes = _flat_bytes_per_element(buffer, moments_per_element)
    owned_numel = sum(
        min(buffer.params[name].stop, segment.span.stop) - max(buffer.params[name].start, segment.span.start)
        for segment in segments
        for name in segment.params
    )
    gaps_numel = sum(segment.span.numel for segment in segments) - owned_numel
    return RankMemory(
        optimizer_padding_bytes=gaps_numel * (main_bytes + main_grad_bytes + moment_bytes),
        main_parameter_bytes=owned_numel * main_bytes,
        main_gradient_bytes=owned_numel * main_grad_bytes,
        moment_bytes=owned_numel * moment_bytes,
        scratch_bytes=len(segments) * _STEP_COUNT_BYTES * (moments_per_element >= 2),
    )


def _flat_bytes_per_element(buffer: BufferLayout, moments_per_element: int) -> tuple[int, int, int]:
    """Return the bytes of a main parameter, of its widened gradient, and of its moments."""
    param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
    is_narrow = param_bytes < _MAIN_BYTES
    main_grad_bytes = _MAIN_BYTES if is_narrow and grad_bytes < _MAIN_BYTES else 0
    return _MAIN_BYTES if is_narrow else 0, main_grad_bytes, moments_per_element * max(param_bytes, _MAIN_BYTES)


def _groups_in_shards(group_of: Mapping[str, int], owners: OwnerPlan | None) -> Mapping[str, int]:
    """Return the groups of the parameters that have no owner."""
    return group_of if owners is None else {name: index for name, index in group_of.items() if name not in owners.owner_of}


def _whole_memory_of_rank(layout: ModelLayout, owners: OwnerPlan | None, *, rank: int, is_sharded: bool) -> RankMemory:
    """Count the tensors that a rank updates whole: its own, or all of them if not sharded."""
    total, owner_of = RankMemory(), owners.owner_of if owners is not None else {}
    for buffer in layout.buffers:
        owned = [name for name in buffer.params if name in owner_of]
        here = [name for name in owned if not is_sharded or owner_of[name] == rank % buffer.num_shards]
        total += _whole_optimizer_memory(buffer, here, is_sharded=is_sharded and buffer.num_shards > 1)
    return total


def _whole_optimizer_memory(buffer: BufferLayout, names: Sequence[str], *, is_sharded: bool) -> RankMemory:
    """Count what a rank holds for tensors that it updates whole; an owner has their gradients inside a step only."""
    param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
    numel, is_narrow = sum(buffer.params[name].numel for name in names), param_bytes < _MAIN_BYTES
    return RankMemory(
        main_parameter_bytes=numel * _MAIN_BYTES * is_narrow,
        main_gradient_bytes=numel * _MAIN_BYTES * (is_narrow and grad_bytes < _MAIN_BYTES and not is_sharded),
        moment_bytes=numel * max(param_bytes, _MAIN_BYTES),
    )


def _busiest_rank(layout: ModelLayout, owners: OwnerPlan) -> int:
    """Return the rank whose own tensors have most bytes; the first of several."""
    owned_bytes = [Counter[int]() for _ in layout.buffers]
    for buffer, owned in zip(layout.buffers, owned_bytes, strict=True):
        for name in owners.owner_of.keys() & buffer.params.keys():
            owned[owners.owner_of[name]] += _whole_optimizer_memory(buffer, [name], is_sharded=True).total_bytes
    places = list(zip(layout.buffers, owned_bytes, strict=True))
    ranks = range(max(buffer.num_shards for buffer in layout.buffers))
    return max(ranks, key=lambda rank: sum(owned[rank % buffer.num_shards] for buffer, owned in places))


def _plain_optimizer_memory(buffer: BufferLayout, moments_per_element: int) -> RankMemory:
    return RankMemory(
        # SGD's momentum begins as a copy of the gradient; Adam takes no gradients of another dtype than the parameters'.
        moment_bytes=buffer.params_numel * dtype_bytes(buffer.key.grad_dtype) * moments_per_element,
        scratch_bytes=len(buffer.params) * _STEP_COUNT_BYTES * (moments_per_element >= 2),
    )
