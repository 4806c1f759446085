import hashlib

import numpy as np
import pytest
import torch

from megabucket.errors import CorpusError
from megabucket.training.corpus import Split
from megabucket.training.windows import Windows, held_out_starts, training_starts


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

    drawn = {tuple(training_starts(windows, 16, key=key)) for key in keys}

    assert len(drawn) == len(keys)
    assert tuple(training_starts(windows, 16, key=keys[0])) in drawn


def test_held_out_starts_reach_from_the_first_window_to_the_last():
    windows = windows_over(bytes(100))

    starts = held_out_starts(windows, 5)

    assert starts.tolist() == [0, 23, 47, 71, 95]  # 100 - 4 = 96 starts, spread over 0..95


def test_a_split_shorter_than_one_window_is_refused():
    with pytest.raises(CorpusError, match=r"1 file\(s\) with 4 bytes are too few for one window of 4 bytes"):
        windows_over(b"abcd", sequence_length=4)
