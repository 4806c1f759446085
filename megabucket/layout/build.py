"""``build_layout``: from parameter descriptions to a layout. Pure arithmetic; calls nothing but ``config.resolve``.

The padded layout is Megatron-Core's. Its constants: parameters start at multiples of 64 elements, buckets end at multiples
of ``lcm(dp_size, 128)``, or ``lcm(dp_size, 128, 65536)`` for NCCL's bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import (
    START_ALIGNMENT,
    bucket_end_multiple,
    is_padded,
    resolve_bucket_size,
    resolve_grad_dtype,
)
from megabucket.errors import LayoutError, name_list
from megabucket.layout.by_name import cuts_of, ready_indices
from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout, ParamSlot
from megabucket.layout.spec import BufferKey, ParamSpec
from megabucket.units import dtype_bytes


def build_layout(
    specs: Iterable[ParamSpec],
    config: DistributedDataParallelConfig,
    *,
    dp_size: int,
    expert_dp_size: int | None = None,
) -> ModelLayout:
    """Return where each parameter lies and how the buffers are cut.

    The result depends on nothing but the arguments: not on the rank, not on whether overlap or the distributed optimizer
    is switched on (unless ``layout="megatron"``). Time is linear in the number of parameters.

    Args:
        specs: trainable parameters in registration order.
        dp_size: ranks that the dense buckets are cut for.
        expert_dp_size: ranks that the expert buckets are cut for; ``dp_size`` when not given.

    Raises:
        LayoutError: no parameter, the same name twice, or sizes that are not positive integers.
        ConfigError: the config cannot be honoured for these parameters.

    >>> config = DistributedDataParallelConfig(bucket_size=150)
    >>> layout = build_layout([ParamSpec("a", (100,)), ParamSpec("b", (100,))], config, dp_size=2)
    >>> layout.buffers[0].params["b"].start, layout.buffers[0].params["a"].start  # 100 rounded up to 64 * 2
    (0, 128)
    >>> layout.buffers[0].buckets[0].numel_unpadded, layout.buffers[0].numel  # 228 rounded up to lcm(2, 128) * 2
    (228, 256)
    """
    specs = tuple(specs)
    _check_arguments(specs, dp_size, expert_dp_size)
    total_numel = sum(spec.numel for spec in specs)
    by_key: dict[BufferKey, list[tuple[int, ParamSpec]]] = {}
    for index, spec in enumerate(specs):
        key = BufferKey(spec.dtype, resolve_grad_dtype(config, spec.dtype), spec.group)
        by_key.setdefault(key, []).append((index, spec))

    padded = is_padded(config)
    cuts, ready = cuts_of(config, specs), ready_indices(config, specs)
    buffers = []
    for key, indexed_specs in by_key.items():
        group_size = expert_dp_size if key.group == "expert" and expert_dp_size is not None else dp_size
        policy = _CutPolicy(
            bucket_size=resolve_bucket_size(
                config, dp_size=dp_size, total_numel=total_numel, grad_itemsize_bytes=dtype_bytes(key.grad_dtype)
            ),
            start_alignment=START_ALIGNMENT if padded else 1,
            end_multiple=bucket_end_multiple(config, group_size),
            isolates_shared_embeddings=padded,
            num_shards=group_size if padded else 1,
            cuts=cuts,
            ready_index=ready,
        )
        buffers.append(_build_buffer(key, indexed_specs, policy))
    return ModelLayout(tuple(buffers))


def _check_arguments(specs: Sequence[ParamSpec], dp_size: int, expert_dp_size: int | None) -> None:
    if not specs:
        raise LayoutError("a layout needs at least one trainable parameter, got none")
    for name, value in (("dp_size", dp_size), ("expert_dp_size", expert_dp_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise LayoutError(f"{name} must be an integer >= 1, got {value!r}")
    seen: set[str] = set()
    twice = [spec.name for spec in specs if spec.name in seen or seen.add(spec.name)]  # type: ignore[func-returns-value]
    if twice:
        raise LayoutError(
            f"the same parameter is given twice: {name_list(twice)}. A parameter owns one range of one buffer; "
            "pass each name once (a tied parameter counts under its first name)"
        )


@dataclass(frozen=True, slots=True)
class _CutPolicy:
    bucket_size: int | None
    start_alignment: int
    end_multiple: int
    isolates_shared_embeddings: bool
    num_shards: int
    cuts: frozenset[str] | None
    ready_index: Mapping[str, int] | None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _build_buffer(key: BufferKey, indexed_specs: Sequence[tuple[int, ParamSpec]], policy: _CutPolicy) -> BufferLayout:
    """Walk the parameters in the order in which backward produces gradients: as recorded, or roughly the last one first."""
    slots: dict[str, ParamSlot] = {}
    buckets: list[BucketLayout] = []
    names: list[str] = []
    bucket_start = cursor = 0

    def close(end: int) -> None:
        nonlocal bucket_start, cursor
        stop = _round_up(end, policy.end_multiple)
        buckets.append(BucketLayout(len(buckets), bucket_start, stop, end - bucket_start, tuple(names)))
        names.clear()
        bucket_start = cursor = stop

    cuts, ready = policy.cuts, policy.ready_index
    in_order = reversed(indexed_specs) if ready is None else sorted(indexed_specs, key=lambda item: ready[item[1].name])
    for index, spec in in_order:
        isolated = spec.shared_embedding and policy.isolates_shared_embeddings
        cursor = _round_up(cursor, policy.start_alignment)
        if isolated and names:
            close(cursor)  # at the aligned position: the gap counts as part of the bucket, as in Megatron
        start, cursor = cursor, cursor + spec.numel
        names.append(spec.name)
        ready_index = None if ready is None else ready[spec.name]
        slots[spec.name] = ParamSlot(start, cursor, len(buckets), index, spec.shape, spec.shared_embedding, ready_index)
        is_full = policy.bucket_size is not None and cursor - bucket_start >= policy.bucket_size
        if isolated or is_full or (cuts is not None and spec.name in cuts):
            close(cursor)
    if names:
        close(cursor)

    return BufferLayout(
        key=key,
        params={spec.name: slots[spec.name] for _, spec in indexed_specs},
        buckets=tuple(buckets),
        num_shards=policy.num_shards,
        bucket_size=policy.bucket_size,
        start_alignment=policy.start_alignment,
        end_multiple=policy.end_multiple,
        cuts=None if cuts is None else tuple(name for bucket in buckets for name in bucket.params if name in cuts),
    )
