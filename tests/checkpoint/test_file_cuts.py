"""How pieces are cut into files of bounded size."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.data_files import cut_into_files
from megabucket.checkpoint.format import ITEM_BYTES, TensorInfo, encode_header


@st.composite
def ranges_to_write(draw):
    """Ranges of tensors with distinct names; shrinks towards none."""
    found = []
    for index in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        order = tuple(draw(st.permutations(range(len(shape)))))
        name = draw(st.text(st.characters(codec="utf-8"), max_size=5)) + str(index)
        info = TensorInfo(name, draw(st.sampled_from(sorted(ITEM_BYTES))), shape, order)
        start, stop = sorted(draw(st.tuples(*[st.integers(0, info.numel)] * 2)))
        found.append((info, start, stop))
    return found


@given(ranges=ranges_to_write(), max_file_bytes=st.integers(400, 3_000))
def test_files_stay_within_the_limit_and_hold_every_element_once_with_aligned_values(ranges, max_file_bytes):
    files = cut_into_files(ranges, max_file_bytes)

    held = {index: [] for index in range(len(ranges))}
    for parts in files:
        offset = len(encode_header([(part.key, part.info.dtype, part.shape) for part in parts]))
        for part in parts:
            assert offset % ITEM_BYTES[part.info.dtype] == 0
            assert math.prod(part.shape) == part.stop - part.start
            offset += part.num_bytes
            held[part.piece].append((part.start, part.stop))
        assert offset <= max_file_bytes
        assert len({part.key for part in parts}) == len(parts)
    for index, (_, start, stop) in enumerate(ranges):
        edges = sorted(held[index])
        assert edges[0][0] == start
        assert edges[-1][1] == stop
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


def test_a_piece_that_fits_into_one_file_is_not_cut():
    infos = [TensorInfo(f"w{i}", "float32", (100,), (0,)) for i in range(3)]

    files = cut_into_files([(info, 0, 100) for info in infos], 1_000)

    assert [[part.key for part in parts] for parts in files] == [
        ["w0"],
        ["w1"],
        ["w2"],
    ]  # 2 x 400 bytes and their headers: 1,040


def test_a_whole_row_major_tensor_keeps_its_name_and_shape_and_others_name_their_range():
    row_major = TensorInfo("a", "float32", (2, 3), (0, 1))
    other = TensorInfo("b", "float32", (2, 3), (1, 0))

    ((whole, column_major, part),) = cut_into_files([(row_major, 0, 6), (other, 0, 6), (row_major, 1, 6)], 1_000)

    assert (whole.key, whole.shape) == ("a", (2, 3))
    assert (column_major.key, column_major.shape) == ("b[0:6]", (6,))
    assert (part.key, part.shape) == ("a[1:6]", (5,))


def test_two_parts_with_one_key_go_to_two_files():
    part_of = TensorInfo("w", "float32", (6,), (0,))
    named_alike = TensorInfo("w[0:3]", "float32", (3,), (0,))

    files = cut_into_files([(part_of, 0, 3), (named_alike, 0, 3)], 1_000)

    assert [[part.key for part in parts] for parts in files] == [["w[0:3]"], ["w[0:3]"]]


def test_a_limit_without_room_for_one_element_is_refused_by_name():
    with pytest.raises(ValueError, match="max_file_bytes is 100, too few for one element of 'w'"):
        cut_into_files([(TensorInfo("w", "float32", (100,), (0,)), 0, 100)], 100)
