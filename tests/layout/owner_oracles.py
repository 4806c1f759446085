"""An exchange with owners, carried out on numbers: every rank packs, sends, receives and sends back."""

import numpy as np


def assert_each_element_travels_once(buffer, owner_of, plan_exchange):
    """Every owned parameter is whole and in order at its owner, and each of its elements returns to its place, once."""
    home, num_returns = np.arange(buffer.numel), np.zeros(buffer.numel, int)
    for bucket in buffer.buckets:
        ranks = range(buffer.num_shards)
        parts = [plan_exchange(buffer, bucket, owner_of, rank=rank) for rank in ranks]
        if not any(name in owner_of for name in bucket.params):
            assert parts == [None] * len(ranks)
            continue
        sent = [_cut(_packed(home, part), part.held_numels) for part in parts]
        returned = []
        for owner, part in enumerate(parts):
            arrived = [sent[holder][owner] for holder in ranks]
            assert [len(piece) for piece in arrived] == list(part.owned_numels)
            wholes = [np.arange(buffer.params[name].start, buffer.params[name].stop) for name in part.owned]
            assert np.concatenate(arrived).tolist() == np.concatenate([*wholes, []]).tolist(), "not the whole tensors in order"
            returned.append(_cut(np.concatenate(arrived), part.owned_numels))
        for holder, part in enumerate(parts):
            shard = buffer.shard_span(bucket=bucket.index, rank=holder)
            assert all(shard.start <= start < stop <= shard.stop for _, (start, stop) in part.held)
            back = np.concatenate([returned[owner][holder] for owner in ranks])
            assert back.tolist() == _packed(home, part).tolist(), "not where they came from"
            np.add.at(num_returns, back, 1)
    expected = np.zeros(buffer.numel, int)
    for name in owner_of.keys() & buffer.params.keys():
        expected[buffer.params[name].start : buffer.params[name].stop] = 1
    assert num_returns.tolist() == expected.tolist(), "some elements do not travel exactly once"


def _packed(buffer, part):
    pieces = [buffer[piece.in_buffer.start : piece.in_buffer.stop] for piece in part.held]
    return np.concatenate([*pieces, np.empty(0, int)])


def _cut(flat, numels):
    assert len(flat) == sum(numels)
    return np.split(flat, np.cumsum(numels)[:-1])
