"""The order of gloo's ring, against a ring that is walked segment by segment as gloo walks it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm.gloo import ring_blocks


def walked(numel: int, itemsize_bytes: int, num_ranks: int) -> list[list[int]]:
    """The ranks whose values were added up, in order, by element: each rank passes on what it has until all have added."""
    total_bytes = numel * itemsize_bytes
    longest = itemsize_bytes * max(1, (1 << 20) // itemsize_bytes)
    num_segments = max(-(-total_bytes // longest), 2 * num_ranks)
    num_segments += -num_segments % num_ranks
    segment = -(-total_bytes // num_segments)
    segment += -segment % itemsize_bytes
    per_rank = num_segments // num_ranks
    held = [[[rank] for _ in range(num_segments)] for rank in range(num_ranks)]  # by rank and segment
    for hop in range(num_ranks - 1):
        sent = {}
        for rank in range(num_ranks):
            for i in range(per_rank):
                index = ((rank + 1) * per_rank + hop * per_rank + i) % num_segments
                sent[(rank - 1) % num_ranks, index] = list(held[rank][index])
        for (rank, index), values in sent.items():
            held[rank][index] = values + held[rank][index]
    segment_of = [start * itemsize_bytes // segment for start in range(numel)]
    return [held[index // per_rank][index] for index in segment_of]


@given(
    num_ranks=st.integers(2, 8),
    numel=st.integers(1, 400),
    itemsize_bytes=st.sampled_from([1, 2, 4, 8]),
    block_numel=st.integers(1, 500),
    data=st.data(),
)
def test_every_element_is_added_in_the_order_of_the_ring(num_ranks, numel, itemsize_bytes, block_numel, data):
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    expected = walked(numel, itemsize_bytes, num_ranks)[start:stop]

    found = list(
        ring_blocks(
            range(start, stop),
            numel=numel,
            itemsize_bytes=itemsize_bytes,
            num_ranks=num_ranks,
            block_numel=block_numel,
        )
    )

    orders = [list(stretch.ranks) for stretch in found for _ in range(stretch.start, stretch.stop)]
    assert all(0 < stretch.stop - stretch.start <= block_numel for stretch in found)
    assert [stretch.start for stretch in found] == [0, *(stretch.stop for stretch in found[:-1])]
    if num_ranks == 2:
        assert [sorted(order) for order in orders] == [sorted(order) for order in expected]  # of two the order is all one
    else:
        assert orders == expected


@pytest.mark.parametrize("numel", [3 << 18, (3 << 18) + 1, 10_000_000])
def test_segments_of_large_tensors_are_no_longer_than_a_mebibyte(numel):
    found = list(ring_blocks(range(numel), numel=numel, itemsize_bytes=4, num_ranks=3, block_numel=numel))

    longest = max(stretch.stop - stretch.start for stretch in found)
    num_segments = max(math.ceil(numel * 4 / 2**20 / 3) * 3, 6)
    segment_numel = math.ceil(math.ceil(numel * 4 / num_segments) / 4)
    assert longest == segment_numel * num_segments // 3
    assert sum(stretch.stop - stretch.start for stretch in found) == numel
