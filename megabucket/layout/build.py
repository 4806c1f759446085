"""``build_layout``: from parameter descriptions and a config to a layout. Pure arithmetic; ``config.resolve`` has the rules.

The padded layout is Megatron-Core's. Its constants: parameters start at multiples of 64 elements, buckets end at multiples
of ``lcm(dp_size, 128)``, or ``lcm(dp_size, 128, 65536)`` for NCCL's bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import (
    START_ALIGNMENT,
    bucket_end_multiple,
    check_group_size,
    is_padded,
    resolve_bucket_size,
    resolve_cuts,
    resolve_grad_dtype,
)
from megabucket.errors import ConfigError, LayoutError, name_list
from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout, ParamSlot
from megabucket.layout.spec import BufferKey, ParamSpec
from megabucket.units import dtype_bytes


def build_layout(
    specs: Iterable[ParamSpec],
    config: DistributedDataParallelConfig,
    *,
    dp_size: int,
    group_sizes: Mapping[str, int] | None = None,
) -> ModelLayout:
    """Return where each parameter lies and how the buffers are cut.

    The result depends on nothing but the arguments: not on the rank, not on whether overlap or the distributed optimizer
    is switched on (unless ``layout="megatron"``). Time is linear in the number of parameters.

    Args:
        specs: trainable parameters in registration order.
        dp_size: ranks that buckets are cut for.
        group_sizes: ranks that buckets are cut for, by reduction group, if not ``dp_size``. A group may have no parameters.

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
    group_sizes = group_sizes or {}
    _check_arguments(specs, dp_size, group_sizes)
    total_numel = sum(spec.numel for spec in specs)
    by_key: dict[BufferKey, list[tuple[int, ParamSpec]]] = {}
    for index, spec in enumerate(specs):
        key = BufferKey(spec.dtype, resolve_grad_dtype(config, spec.dtype), spec.group)
        by_key.setdefault(key, []).append((index, spec))

    padded = is_padded(config)
    cuts, ready = _cuts(config, specs), _ready_indices(config, specs)
    buffers = []
    for key, indexed_specs in by_key.items():
        group_size = group_sizes.get(key.group, dp_size)
        empty = BufferLayout(
            key=key,
            params={},
            buckets=(),
            num_shards=group_size if padded else 1,
            bucket_size=resolve_bucket_size(
                config, dp_size=dp_size, total_numel=total_numel, grad_itemsize_bytes=dtype_bytes(key.grad_dtype)
            ).numel,
            start_alignment=START_ALIGNMENT if padded else 1,
            end_multiple=bucket_end_multiple(config, group_size),
        )
        buffers.append(_filled(empty, indexed_specs, cuts, ready))
    return ModelLayout(tuple(buffers))


def _check_arguments(specs: Sequence[ParamSpec], dp_size: int, group_sizes: Mapping[str, int]) -> None:
    if not specs:
        raise LayoutError("a layout needs at least one trainable parameter, got none")
    check_group_size(dp_size)
    for group, size in group_sizes.items():
        check_group_size(size, name=f"group_sizes[{group!r}]")
    seen: set[str] = set()
    twice = [spec.name for spec in specs if spec.name in seen or seen.add(spec.name)]  # type: ignore[func-returns-value]
    if twice:
        raise LayoutError(
            f"the same parameter is given twice: {name_list(twice)}. A parameter owns one range of one buffer; "
            "pass each name once (a tied parameter counts under its first name)"
        )


def _cuts(config: DistributedDataParallelConfig, specs: Sequence[ParamSpec]) -> frozenset[str] | None:
    """Return the names of the parameters that close a bucket; ``None`` if a size closes buckets."""
    if config.bucket_cuts is not None:  # names are checked also where the config does not use its cuts
        _check_known("bucket_cuts", config.bucket_cuts, {spec.name for spec in specs}, remedy="plan the cuts for this model")
    cuts = resolve_cuts(config)
    return None if cuts is None else frozenset(cuts)


def _ready_indices(config: DistributedDataParallelConfig, specs: Sequence[ParamSpec]) -> Mapping[str, int] | None:
    """Return the position of each parameter in the recorded order; ``None`` without one."""
    if config.bucket_order is None:
        return None
    remedy = "record the order of this model"
    _check_known("bucket_order", config.bucket_order, {spec.name for spec in specs}, remedy=remedy)
    indices = {name: index for index, name in enumerate(config.bucket_order)}
    missing = [spec.name for spec in specs if spec.name not in indices]
    if missing:
        raise ConfigError(
            f"bucket_order leaves out {name_list(missing)} ({len(missing)} of {len(specs)} trainable parameters), which would "
            f"have no place in a buffer. {_way_out('bucket_order', remedy)}"
        )
    return indices


def _check_known(field: str, names: Sequence[str], known: Collection[str], *, remedy: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"{field} names {name_list(unknown)}, not among the {len(known)} trainable parameters of the model. "
            f"{_way_out(field, remedy)}"
        )


def _way_out(field: str, remedy: str) -> str:
    return (
        f"It fits one model only: {remedy}, or drop {field}. For a module that has changed since it was wrapped, give the "
        "config that fits now to ddp.rebuild(config)."
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _filled(
    empty: BufferLayout,
    indexed_specs: Sequence[tuple[int, ParamSpec]],
    cuts: Collection[str] | None,
    ready: Mapping[str, int] | None,
) -> BufferLayout:
    """Return a buffer with the parameters in the order of backward: as recorded, or the reverse of registration."""
    slots: dict[str, ParamSlot] = {}
    buckets: list[BucketLayout] = []
    names: list[str] = []
    bucket_start = cursor = 0

    def close(end: int) -> None:
        nonlocal bucket_start, cursor
        stop = _round_up(end, empty.end_multiple)
        buckets.append(BucketLayout(len(buckets), bucket_start, stop, end - bucket_start, tuple(names)))
        names.clear()
        bucket_start = cursor = stop

    in_order = reversed(indexed_specs) if ready is None else sorted(indexed_specs, key=lambda item: ready[item[1].name])
    for index, spec in in_order:
        isolated = spec.shared_embedding and empty.start_alignment > 1
        cursor = _round_up(cursor, empty.start_alignment)
        if isolated and names:
            close(cursor)  # at the aligned position: the gap counts as part of the bucket, as in Megatron
        start, cursor = cursor, cursor + spec.numel
        names.append(spec.name)
        ready_index = None if ready is None else ready[spec.name]
        slots[spec.name] = ParamSlot(start, cursor, len(buckets), index, spec.shape, spec.shared_embedding, ready_index)
        is_full = empty.bucket_size is not None and cursor - bucket_start >= empty.bucket_size
        if isolated or is_full or (cuts is not None and spec.name in cuts):
            close(cursor)
    if names:
        close(cursor)

    return replace(
        empty,
        params={spec.name: slots[spec.name] for _, spec in indexed_specs},
        buckets=tuple(buckets),
        cuts=None if cuts is None else tuple(name for bucket in buckets for name in bucket.params if name in cuts),
    )
