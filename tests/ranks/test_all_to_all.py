"""All-to-alls of parts of any size between processes: every rank gets the bytes meant for it."""

from __future__ import annotations

import random

import pytest
import torch
from pool import Rank

from megabucket.comm import AllToAll, ProcessGroupCommunicator, with_same_host_copies
from megabucket.testing import ListRecorder

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64)

Numels = list[list[int]]
"""By source, then by destination."""


def numels_of_cases(size: int) -> dict[str, Numels]:
    """Return how much each rank sends to each."""
    numbers = random.Random(size)
    ranks = range(size)
    return {
        "all the same": [[5] * size for _ in ranks],
        "any": [[numbers.choice((0, 1, 3, 1001)) for _ in ranks] for _ in ranks],
        "one sends everything": [[7 * (source == size - 1)] * size for source in ranks],
        "one receives everything": [[7 * (destination == 0) for destination in ranks] for _ in ranks],
        "own parts only": [[3 * (source == destination) for destination in ranks] for source in ranks],
        "large": [[100_003 * (source + 1)] * size for source in ranks],
        "nothing": [[0] * size for _ in ranks],
    }


def part_of(source: int, destination: int, numel: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + 10 * source + destination)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def call_of(rank: Rank, numels: Numels, dtype: torch.dtype) -> AllToAll:
    received_numels = tuple(of_source[rank.index] for of_source in numels)
    sent_numels = tuple(numels[rank.index])
    received, sent = torch.zeros(sum(received_numels), dtype=dtype), torch.zeros(sum(sent_numels), dtype=dtype)
    return AllToAll(received, sent, received_numels, sent_numels)


def fill(rank: Rank, call: AllToAll, salt: int) -> torch.Tensor:
    """Fill what is sent; return what is to be received."""
    parts = [part_of(rank.index, other, numel, call.sent.dtype, salt) for other, numel in enumerate(call.sent_numels)]
    call.sent.copy_(torch.cat(parts))
    return torch.cat(
        [part_of(other, rank.index, numel, call.sent.dtype, salt) for other, numel in enumerate(call.received_numels)]
    )


def wrong_exchanges(rank: Rank, is_prepared: bool) -> list[str]:
    communicator = with_same_host_copies(ProcessGroupCommunicator(rank.group, owns_groups=True), torch.device("cpu"))
    wrong = []
    for case, numels in numels_of_cases(rank.size).items():
        for dtype in DTYPES:
            call = call_of(rank, numels, dtype)
            batch = communicator.prepare([call]) if is_prepared else [call]
            for salt in range(1 + is_prepared):
                expected = fill(rank, call, salt)
                communicator.launch(batch, label="parts").wait()
                if not torch.equal(call.received, expected):
                    wrong.append(f"{case} {dtype} launch {salt}")
    communicator.close()
    return wrong


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_parts_meant_for_it_in_rank_order(pool, ranks, is_prepared):
    assert pool.run(wrong_exchanges, is_prepared, ranks=ranks) == [[]] * ranks


def wrong_calls_of_a_batch(rank: Rank) -> list[str]:
    communicator = ProcessGroupCommunicator(rank.group)
    calls = {case: call_of(rank, numels, torch.bfloat16) for case, numels in numels_of_cases(rank.size).items()}
    expected = {case: fill(rank, call, index) for index, (case, call) in enumerate(calls.items())}
    communicator.launch(list(calls.values()), label="parts").wait()
    return [case for case, call in calls.items() if not torch.equal(call.received, expected[case])]


def test_a_batch_does_all_of_its_exchanges(pool):
    assert pool.run(wrong_calls_of_a_batch, ranks=3) == [[]] * 3


def recorded_bytes(rank: Rank) -> list[int]:
    communicator, recorder = ProcessGroupCommunicator(rank.group), ListRecorder()
    communicator.recorders.activate([recorder], on_moment=None)
    call = call_of(rank, [[1, 2, 3], [0, 5, 0], [9, 0, 9]], torch.bfloat16)
    communicator.launch([call], label="parts").wait()
    return [record.payload_bytes for record in recorder.collectives]


def test_a_rank_records_the_bytes_that_it_sends_to_others_and_its_part_even_if_that_is_nothing(pool):
    # Of 2 bytes each: 2 + 3; nothing; 9.
    assert pool.run(recorded_bytes, ranks=3) == [[10], [0], [18]]
