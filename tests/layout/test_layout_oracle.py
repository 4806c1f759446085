"""The layout equals what a second, deliberately simple implementation lays out, one element at a time on a tape.

The oracle is written from the words of the rules. It knows no positions: it appends elements to a tape, appends gaps until
the tape is as long as it should be, and looks at what came out.
"""

from typing import NamedTuple

import numpy as np
from hypothesis import given

from megabucket.layout import BufferLayout, ParamSpec, shard_slices
from megabucket.testing import LayoutInput, dp_sizes, layout_inputs, param_specs

UNUSED = -1
IDS_PER_PARAM = 1_000_000


class Tape(NamedTuple):
    elements: np.ndarray  # 1D; each element is number of the parameter * IDS_PER_PARAM + position in it, or UNUSED
    buckets: list  # of (start, stop, length without the tail, names)


def lay_out_one_by_one(numbered_specs: list[tuple[int, ParamSpec]], *, bucket_size, cuts, divisor, padded) -> Tape:
    tape: list[int] = []
    buckets = []
    names: list[str] = []
    start = 0

    def close() -> None:
        nonlocal start, names
        length = len(tape) - start
        while padded and len(tape) % divisor != 0:
            tape.append(UNUSED)
        buckets.append((start, len(tape), length, tuple(names)))
        start, names = len(tape), []

    for number, spec in numbered_specs:
        while padded and len(tape) % 64 != 0:
            tape.append(UNUSED)
        if padded and spec.shared_embedding and names:
            close()
        names.append(spec.name)
        for position in range(spec.numel):
            tape.append(number * IDS_PER_PARAM + position)  # noqa: PERF401 - one at a time is the point
        if (
            (padded and spec.shared_embedding)
            or (bucket_size is not None and len(tape) - start >= bucket_size)
            or spec.name in cuts
        ):
            close()
    if names:
        close()
    return Tape(np.array(tape, dtype=np.int64), buckets)


def tape_of(buffer: BufferLayout) -> np.ndarray:
    flat = np.full(buffer.numel, UNUSED, dtype=np.int64)  # 1D
    for slot in buffer.params.values():
        first = slot.registration_index * IDS_PER_PARAM
        flat[slot.start : slot.stop] = np.arange(first, first + slot.numel)
    return flat


def grad_dtype(case: LayoutInput, spec: ParamSpec) -> str:
    return "float32" if case.config.grad_reduce_in_fp32 and spec.dtype in ("bfloat16", "float16") else spec.dtype


GRAD_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def is_one_bucket(case: LayoutInput) -> bool:
    return case.config.layout == "megatron" and not case.config.overlap_grad_reduce


def bucket_size_by_hand(case: LayoutInput, dtype: str) -> int | None:
    config = case.config
    if is_one_bucket(case) or config.bucket_cuts is not None:
        return None
    if config.bucket_size is not None:
        return config.bucket_size
    if config.num_buckets is not None:
        return max(1, sum(spec.numel for spec in case.specs) // config.num_buckets)
    if config.bucket_cap_mb is not None:
        return max(1, int(config.bucket_cap_mb * 1024 * 1024) // GRAD_BYTES[dtype])
    return 40_000_000 if case.dp_size <= 40 else 1_000_000 * case.dp_size


@given(case=layout_inputs(specs=param_specs(max_params=8, max_numel=300), dp_size=dp_sizes(max_size=12)))
def test_the_layout_and_its_shards_are_what_writing_elements_one_by_one_gives(case):
    fields = {**case.config.model_dump(), "pad_buckets_for_high_nccl_busbw": False}  # 65536 elements one by one take too long
    case = case._replace(config=type(case.config)(**fields))
    padded = case.config.layout == "stable" or case.config.use_distributed_optimizer
    groups: dict[tuple[str, str, str], list[tuple[int, ParamSpec]]] = {}
    for number, spec in enumerate(case.specs):
        groups.setdefault((spec.dtype, grad_dtype(case, spec), spec.group), []).insert(0, (number, spec))
    if case.config.bucket_order is not None:
        for numbered_specs in groups.values():
            numbered_specs.sort(key=lambda numbered: case.config.bucket_order.index(numbered[1].name))

    layout = case.build()

    keys = [(buffer.key.param_dtype, buffer.key.grad_dtype, buffer.key.group) for buffer in layout.buffers]
    assert keys == list(groups)
    for buffer, (key, numbered_specs) in zip(layout.buffers, groups.items(), strict=True):
        num_ranks = case.group_sizes.get(key[2], case.dp_size)
        tape = lay_out_one_by_one(
            numbered_specs,
            bucket_size=bucket_size_by_hand(case, key[1]),
            cuts=() if is_one_bucket(case) else case.config.bucket_cuts or (),
            divisor=int(np.lcm(num_ranks, 128)),
            padded=padded,
        )
        assert [(b.start, b.stop, b.numel_unpadded, b.params) for b in buffer.buckets] == tape.buckets
        assert np.array_equal(tape_of(buffer), tape.elements)
        assert_shards_match(buffer, tape, num_ranks=num_ranks if padded else 1)


def assert_shards_match(buffer: BufferLayout, tape: Tape, *, num_ranks: int) -> None:
    """The shard of a rank is an equal part of the bucket's tape, and holds what the slices say."""
    for index, (start, stop, _, _) in enumerate(tape.buckets):
        for rank, shard in enumerate(np.split(tape.elements[start:stop], num_ranks)):
            claimed = np.full(len(shard), UNUSED, dtype=np.int64)
            for piece in shard_slices(buffer, bucket=index, rank=rank):
                first = buffer.params[piece.param].registration_index * IDS_PER_PARAM
                claimed[slice(*piece.in_shard)] = np.arange(first + piece.in_param.start, first + piece.in_param.stop)
            assert np.array_equal(claimed, shard)
