"""How pieces are cut into files of bounded size."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.canonical import empty_piece
from megabucket.checkpoint.format import ITEM_BYTES, TensorInfo, encode_header
from megabucket.checkpoint.save import cut_into_files


@st.composite
def pieces_to_write(draw):
    """Ranges of tensors with distinct names; shrinks towards none."""
    found = []
    for index in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        order = tuple(draw(st.permutations(range(len(shape)))))
        name = draw(st.text(st.characters(codec="utf-8"), max_size=5)) + str(index)
        info = TensorInfo(name, draw(st.sampled_from(sorted(ITEM_BYTES))), shape, order)
        found.append(empty_piece(info, *sorted(draw(st.tuples(*[st.integers(0, info.numel)] * 2)))))
    return found


@given(pieces=pieces_to_write(), max_file_bytes=st.integers(8, 3_000))
def test_files_stay_within_the_limit_and_hold_every_element_once_with_aligned_values(pieces, max_file_bytes):
    files = cut_into_files(0, pieces, max_file_bytes)

    held = {piece.info.name: [] for piece in pieces}
    for parts in files.values():
        offset = begin = len(encode_header(parts))
        for part in parts:
            assert offset % ITEM_BYTES[part.info.dtype] == 0
            assert part.values.numel() == part.stop - part.start
            offset += part.num_bytes
            held[part.info.name].append((part.start, part.stop))
        assert offset - begin <= max_file_bytes
        assert len({part.key for part in parts}) == len(parts)
    for piece in pieces:
        edges = sorted(held[piece.info.name])
        assert edges[0][0] == piece.start
        assert edges[-1][1] == piece.stop
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


def keys(files):
    return [[part.key for part in parts] for parts in files.values()]


def test_a_piece_that_fits_into_one_file_is_not_cut():
    infos = [TensorInfo(f"w{i}", "float32", (100,), (0,)) for i in range(3)]

    files = cut_into_files(7, [empty_piece(info, 0, 100) for info in infos], 1_000)

    assert keys(files) == [["w0", "w1"], ["w2"]]
    assert list(files) == ["rank-00007-00000.safetensors", "rank-00007-00001.safetensors"]


def test_a_whole_row_major_tensor_keeps_its_name_and_others_name_their_range():
    row_major = TensorInfo("a", "float32", (2, 3), (0, 1))
    other = TensorInfo("b", "float32", (2, 3), (1, 0))

    files = cut_into_files(0, [empty_piece(row_major, 0, 6), empty_piece(other, 0, 6), empty_piece(row_major, 1, 6)], 1_000)

    assert keys(files) == [["a", "b[0:6]", "a[1:6]"]]


def test_two_parts_with_one_key_go_to_two_files():
    part_of = TensorInfo("w", "float32", (6,), (0,))
    named_alike = TensorInfo("w[0:3]", "float32", (3,), (0,))

    files = cut_into_files(0, [empty_piece(part_of, 0, 3), empty_piece(named_alike, 0, 3)], 1_000)

    assert keys(files) == [["w[0:3]"], ["w[0:3]"]]
