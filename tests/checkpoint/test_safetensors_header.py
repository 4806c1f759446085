"""The header of a data file: what is written, the safetensors library reads; what it refuses is refused here, too."""

import json
import random
import struct

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.dtypes import CODE_OF, ITEM_BYTES
from megabucket.checkpoint.header import MAX_HEADER_BYTES, decode_header, encode_header, entry_bytes_bound


def file_of(fields, values=b"", *, raw=None):
    text = raw if raw is not None else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + values


tensor_lists = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda key: key != "__metadata__"),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 4), max_size=4),
    ),
    unique_by=lambda one: one[0],
    max_size=6,
)


@given(tensors=tensor_lists)
def test_what_is_written_is_read_again_and_by_safetensors(tensors):
    tensors = sorted(tensors, key=lambda one: -ITEM_BYTES[one[1]])
    header = encode_header(tensors)
    sizes = [int(torch.tensor(shape).prod()) * ITEM_BYTES[dtype] for _, dtype, shape in tensors]
    data = header + bytes(sum(sizes))

    entries = decode_header(data, len(data))
    theirs = safetensors.torch.load(data)

    assert [(key, entries[key].dtype, list(entries[key].shape)) for key, _, _ in tensors] == tensors_as_lists(tensors)
    assert {key: (str(value.dtype), list(value.shape)) for key, value in theirs.items()} == {
        key: (f"torch.{dtype}", list(shape)) for key, dtype, shape in tensors
    }
    assert len(header) % 8 == 0
    assert len(header) <= 64 + sum(entry_bytes_bound(*one) for one in tensors)


def tensors_as_lists(tensors):
    return [(key, dtype, list(shape)) for key, dtype, shape in tensors]


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


BAD = {
    "gap before": ({"a": entry(offsets=(4, 8))}, 8, "'a' starts at byte"),
    "gap between": ({"a": entry(), "b": entry(offsets=(6, 10))}, 10, "'b' starts at byte"),
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, 6, "'b' starts at byte"),
    "rest at the end": ({"a": entry()}, 5, "its tensors end at byte"),
    "beyond the end": ({"a": entry()}, 3, "its tensors end at byte"),
    "backwards": ({"a": entry(offsets=(4, 0))}, 4, "takes 4 bytes and has -4"),
    "shape and bytes differ": ({"a": entry(shape=(5,))}, 4, "takes 5 bytes and has 4"),
    "shape overflows": ({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}, 0, "overflows"),
    "dimension too large": ({"a": entry(shape=(2**64,))}, 4, "the shape of 'a' is no list"),
    "negative dimension": ({"a": entry(shape=(-1, -4))}, 4, "where no negative number can be"),
    "bool dimension": ({"a": entry(shape=(True,), offsets=(0, 1))}, 1, "the shape of 'a' is no list"),
    "float offset": ({"a": entry(offsets=(0, 4.0))}, 4, "data_offsets of 'a' is no list"),
    "unknown dtype": ({"a": entry(dtype="F7")}, 4, "has the dtype 'F7', which is none of"),
    "one field too many": ({"a": entry(more=1)}, 4, "and nothing else"),
    "one field too few": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "and nothing else"),
    "three offsets": ({"a": entry(offsets=(0, 4, 4))}, 4, "has 3 data_offsets"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, "is not an object of strings"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(case):
    fields, value_bytes, problem = BAD[case]
    data = file_of(fields, bytes(value_bytes))

    with pytest.raises(ValueError, match=problem):
        decode_header(data, len(data))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes, too few for a header"),
        (b"1234567", "7 bytes, too few"),
        (struct.pack("<Q", 5) + b"{}", "a header of 5 bytes in a file of 10"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "the limit is 16777216"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "the limit is 16777216"),
        (file_of(None, raw=b"[]"), "is not a JSON object"),
        (file_of(None, raw=b' {"a":1}'), "is not a JSON object"),
        (file_of(None, raw=b'{"a":1,"a":2}'), "the key 'a' is there twice"),
        (file_of(None, raw=b'{"a":NaN}'), "NaN is not JSON"),
        (file_of(None, raw=b'{"\xff":1}'), "utf-8"),
        (file_of(None, raw=b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "half a surrogate"),
        (file_of(None, raw=b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}'), "where no negative"),
        (file_of(None, raw=b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}"), "nested deeper than 20"),
        (file_of(None, raw=b'{"a":1e999}'), "too large a number"),
    ],
)
def test_bytes_that_are_no_header_are_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        decode_header(data, len(data))


def test_what_is_accepted_after_random_changes_is_accepted_by_safetensors():
    draw = random.Random(5)
    keys = [("w", "F32", 4), ("x[0:2]", "BF16", 2), ("e", "BOOL", 0)]
    header = encode_header([(key, {v: k for k, v in CODE_OF.items()}[code], (n,)) for key, code, n in keys])
    data = header + bytes(range(20))
    accepted = 0

    for _ in range(4_000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 2)):
            changed[draw.randrange(len(header) + 4)] = draw.choice(b'0123456789,:[]{}" aF')
        try:
            decode_header(bytes(changed), len(changed))
        except ValueError:
            continue
        safetensors.deserialize(bytes(changed))
        accepted += 1

    assert accepted > 20
