"""The header of a data file: what is written, the safetensors library reads."""

import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.canonical import empty_piece
from megabucket.checkpoint.format import ITEM_BYTES, TensorInfo, encode_header, first_bytes

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
    infos = [TensorInfo(name, dtype, tuple(shape), tuple(range(len(shape)))) for name, dtype, shape in tensors]
    pieces = [empty_piece(info, 0, info.numel) for info in sorted(infos, key=lambda info: -ITEM_BYTES[info.dtype])]
    header = encode_header(pieces)
    sizes = [piece.num_bytes for piece in pieces]
    data = header + bytes(sum(sizes))

    begins = first_bytes(memoryview(data))
    theirs = safetensors.torch.load(data)

    assert [begins[piece.key] for piece in pieces] == [len(header) + sum(sizes[:index]) for index in range(len(sizes))]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in theirs.items()} == {
        info.name: (getattr(torch, info.dtype), info.shape) for info in infos
    }
    assert len(header) % 8 == 0
