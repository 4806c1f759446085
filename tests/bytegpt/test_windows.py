import hashlib

import numpy as np
import pytest
import torch

from examples.bytegpt.data import CorpusError, Split, Windows
from examples.bytegpt.task import make_task
from megabucket.measure.ranks import Ranks


def windows_over(content, sequence_length=4):
    data = np.frombuffer(bytearray(content), dtype=np.uint8)
    split = Split(data=data, num_files=1, sha256=hashlib.sha256(content).hexdigest())
    return Windows(split, sequence_length, device=torch.device("cpu"))


def test_targets_are_the_bytes_that_follow_the_inputs():
    windows = windows_over(b"abcdefgh")

    inputs, targets = windows.batch(np.array([0, 3]))

    assert [bytes(row.tolist()) for row in inputs] == [b"abcd", b"defg"]
    assert [bytes(row.tolist()) for row in targets] == [b"bcde", b"efgh"]


def test_the_last_start_still_has_a_target_for_its_last_byte():
    windows = windows_over(b"abcdefgh")

    _, targets = windows.batch(np.array([windows.num_starts - 1]))

    assert bytes(targets[0].tolist()) == b"efgh"


def test_training_starts_depend_on_every_part_of_their_key():
    windows = windows_over(bytes(200))
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]

    drawn = {tuple(windows.random_starts(16, key=key)) for key in keys}

    assert len(drawn) == len(keys)
    assert tuple(windows.random_starts(16, key=keys[0])) in drawn


def test_held_out_starts_reach_from_the_first_window_to_the_last():
    windows = windows_over(bytes(100))

    starts = windows.even_starts(5)

    assert starts.tolist() == [0, 23, 47, 71, 95]  # 100 - 4 = 96 starts, spread over 0..95


def test_a_split_shorter_than_one_window_is_refused():
    with pytest.raises(CorpusError, match=r"1 file\(s\) with 4 bytes are too few for one window of 4 bytes"):
        windows_over(b"abcd", sequence_length=4)


def batches_of(tiny_run, step, *, num_ranks, microbatch_size, num_microbatches):
    """What all ranks see in a step: for each rank its microbatches, as text."""
    config = tiny_run(train={"microbatch_size": microbatch_size, "num_microbatches": num_microbatches, "seed": 3})
    by_rank = []
    for rank in range(num_ranks):
        ranks = Ranks(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"), backend="none")
        batches = make_task(config, config.model, ranks).microbatches(step)
        by_rank.append([[bytes(row.tolist()) for row in inputs] for inputs, _ in batches])
    return by_rank


def flat(by_rank):
    return [window for batches in by_rank for batch in batches for window in batch]


@pytest.mark.parametrize(
    ("num_ranks", "microbatch_size", "num_microbatches"), [(1, 12, 1), (1, 2, 6), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)]
)
def test_a_step_sees_the_same_windows_however_they_are_shared_out(tiny_run, num_ranks, microbatch_size, num_microbatches):
    found = batches_of(tiny_run, 7, num_ranks=num_ranks, microbatch_size=microbatch_size, num_microbatches=num_microbatches)

    assert {(len(batches), len(batch)) for batches in found for batch in batches} == {(num_microbatches, microbatch_size)}
    assert flat(found) == flat(batches_of(tiny_run, 7, num_ranks=1, microbatch_size=12, num_microbatches=1))


def test_ranks_microbatches_and_steps_see_windows_of_their_own(tiny_run):
    first, second = (batches_of(tiny_run, step, num_ranks=2, microbatch_size=4, num_microbatches=2) for step in (0, 1))

    batches = [tuple(batch) for step in (first, second) for batches in step for batch in batches]
    assert len(set(batches)) == len(batches) == 8
