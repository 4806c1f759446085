"""The header of a data file: what is written, the safetensors library reads."""

import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.data_files import header_bound
from megabucket.checkpoint.format import ITEM_BYTES, encode_header, first_bytes

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

    begins = first_bytes(memoryview(data))
    theirs = safetensors.torch.load(data)

    assert [begins[key] for key, _, _ in tensors] == [len(header) + sum(sizes[:index]) for index in range(len(sizes))]
    assert {key: (str(value.dtype), list(value.shape)) for key, value in theirs.items()} == {
        key: (f"torch.{dtype}", list(shape)) for key, dtype, shape in tensors
    }
    assert len(header) % 8 == 0
    assert len(header) <= 64 + sum(header_bound(key, shape) for key, _, shape in tensors)
