"""Reading ranges: any range into any order and dtype that can hold it; only the files that are needed."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megabucket.checkpoint.stored
from megabucket.checkpoint.file_system import read_file
from megabucket.checkpoint.format import ITEM_BYTES, Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import CheckpointMismatchError

WEIGHT = torch.arange(60.0).reshape(3, 4, 5)
INFO = TensorInfo("w", "float32", (3, 4, 5), (0, 1, 2))


def flat_in(tensor, order):
    return tensor.permute(order).reshape(-1).contiguous()


def stored_as(root, tensor, order=None, **options):
    """Save one tensor, its values laid out as ``order`` says, and open the checkpoint."""
    order = tuple(range(tensor.dim())) if order is None else order
    info = TensorInfo("w", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), order)
    pieces = [Piece(info, 0, tensor.numel(), flat_in(tensor, order))]
    save_snapshot(root, 1, Snapshot(pieces, {}), AloneRanks(), SaveSettings(**options))
    return open_checkpoint(root)


def read(stored, info, start, stop, **options):
    values = torch.empty(stop - start, dtype=getattr(torch, info.dtype))
    stored.read([Piece(info, start, stop, values)], **options)
    return values


@pytest.fixture(scope="module")
def in_many_files(tmp_path_factory):
    return stored_as(tmp_path_factory.mktemp("many"), WEIGHT, max_file_bytes=48)


@pytest.fixture(scope="module")
def in_other_order(tmp_path_factory):
    return stored_as(tmp_path_factory.mktemp("order"), WEIGHT, (2, 0, 1), max_file_bytes=48)


@given(edges=st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted))
def test_any_range_can_be_read(in_many_files, edges):
    assert torch.equal(read(in_many_files, INFO, *edges), WEIGHT.reshape(-1)[slice(*edges)])


@given(edges=st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), order=st.permutations(range(3)))
def test_any_range_in_any_order_can_be_read(in_other_order, edges, order):
    info = dataclasses.replace(INFO, order=tuple(order))

    assert torch.equal(read(in_other_order, info, *edges), flat_in(WEIGHT, order)[slice(*edges)])


def test_orders_that_differ_in_dimensions_of_one_element_are_the_same(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 1, 3)

    values = read(
        stored_as(tmp_path, tensor, (0, 1, 2), max_file_bytes=8), TensorInfo("w", "float32", (2, 1, 3), (1, 0, 2)), 0, 1
    )

    assert values.tolist() == [0.0]


def test_only_the_files_that_hold_some_of_it_are_read(in_many_files, monkeypatch):
    stored, opened = in_many_files, []

    def watched(path, max_bytes):
        opened.append(path.name)
        return read_file(path, max_bytes)

    monkeypatch.setattr(megabucket.checkpoint.stored, "read_file", watched)
    ranges = stored.manifest.tensors["w"].blocks[0].pieces

    read(stored, INFO, ranges[1].start + 1, ranges[2].stop - 1)

    assert len(ranges) > 4
    assert sorted(opened) == [stored.files[ranges[1].file].name, stored.files[ranges[2].file].name]


def test_several_pieces_of_one_tensor_are_filled_together(in_many_files):
    parts = [Piece(INFO, start, start + 20, torch.empty(20)) for start in (0, 40, 20, 0)]

    in_many_files.read(parts)

    assert torch.equal(torch.cat([parts[0].values, parts[2].values, parts[1].values]), WEIGHT.reshape(-1))
    assert torch.equal(parts[3].values, parts[0].values)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Piece(dataclasses.replace(INFO, name="v"), 0, 60, torch.empty(60)), "'v' is not in the checkpoint"),
        (Piece(TensorInfo("w", "float32", (3, 20), (0, 1)), 0, 60, torch.empty(60)), "'w' has shape (3, 4, 5) in the"),
        (
            Piece(dataclasses.replace(INFO, dtype="bfloat16"), 0, 60, torch.empty(60, dtype=torch.bfloat16)),
            "'w' is float32 in the checkpoint and bfloat16 here; cast=True converts",
        ),
        (
            Piece(dataclasses.replace(INFO, dtype="int32"), 0, 60, torch.empty(60, dtype=torch.int32)),
            "'w' is float32 in the checkpoint and int32 here, and is never converted",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_read(in_many_files, wanted, problem):
    good = Piece(INFO, 0, 60, torch.full((60,), -1.0))

    with pytest.raises(CheckpointMismatchError) as caught:
        in_many_files.read([good, wanted])

    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]
    assert (good.values == -1).all()


def test_all_problems_are_listed_at_once(in_many_files):
    unknown = [Piece(dataclasses.replace(INFO, name=f"v{i}"), 0, 60, torch.empty(60)) for i in range(25)]

    with pytest.raises(CheckpointMismatchError, match="and 5 more") as caught:
        in_many_files.read(unknown)

    assert len(caught.value.problems) == 25


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("float32", "float64"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float64", "float16"),
        ("float8_e5m2", "float32"),
    ],
)
def test_a_cast_that_is_asked_for_converts_as_torch_does(tmp_path, stored, wanted):
    tensor = torch.tensor([0, 1, 1, 0]).to(getattr(torch, stored))
    info = TensorInfo("w", wanted, (4,), (0,))

    values = read(stored_as(tmp_path, tensor), info, 1, 4, cast=True)

    assert torch.equal(values, tensor[1:].to(getattr(torch, wanted)))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("float32", "int64"), ("int64", "float32"), ("complex64", "float32"), ("int64", "int32"), ("float16", "uint8")],
)
def test_only_floating_point_is_cast(tmp_path, stored, wanted):
    tensor = torch.ones(4, dtype=getattr(torch, stored))

    with pytest.raises(CheckpointMismatchError, match="never converted"):
        read(stored_as(tmp_path, tensor), TensorInfo("w", wanted, (4,), (0,)), 0, 4, cast=True)


@pytest.mark.parametrize(("stored", "value", "wanted"), [("float64", 1e300, "float32"), ("float32", 1e5, "float16")])
def test_a_cast_that_would_lose_a_value_is_an_error(tmp_path, stored, value, wanted):
    tensor = torch.tensor([0, value], dtype=getattr(torch, stored))

    with pytest.raises(CheckpointMismatchError, match=f"'w' has values that torch.{wanted} cannot hold"):
        read(stored_as(tmp_path, tensor), TensorInfo("w", wanted, (2,), (0,)), 0, 2, cast=True)


def test_infinities_and_nan_survive_a_cast(tmp_path):
    tensor = torch.tensor([float("inf"), float("nan"), -0.0])

    values = read(stored_as(tmp_path, tensor), TensorInfo("w", "bfloat16", (3,), (0,)), 0, 3, cast=True)

    assert torch.equal(
        values.float(),
        tensor,
    ) or (values[0].isinf() and values[1].isnan() and values[2].signbit())


def test_a_cast_in_another_order_works_too(in_other_order):
    info = dataclasses.replace(INFO, dtype="float64")

    assert torch.equal(read(in_other_order, info, 7, 50, cast=True), WEIGHT.double().reshape(-1)[7:50])


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (2, 3), (1, 1, 1)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    numel = torch.empty(shape).numel()
    item_bytes = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (numel * item_bytes,), dtype=torch.uint8)
    info = TensorInfo("w", dtype, shape, tuple(range(len(shape))))
    pieces = [Piece(info, 0, numel, raw.view(getattr(torch, dtype)))]
    save_snapshot(tmp_path, 1, Snapshot(pieces, {}), AloneRanks())

    values = read(open_checkpoint(tmp_path), info, 0, numel)

    assert torch.equal(values.view(torch.uint8), raw)
