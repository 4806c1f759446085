"""A checkpoint written again for other ranks is the same; what differs between two is found and named."""

import itertools

import pytest
import torch

from faults.checkpoints import sample
from faults.checkpoints.faulty import FaultyFileSystem, fail_at, nothing
from faults.checkpoints.threads import in_threads
from megabucket.checkpoint.format import Piece, Snapshot, TensorInfo
from megabucket.checkpoint.offline import compare, reshard
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import CheckpointInvalidError, CheckpointNotSavedError


def saved(root, step=1, *, size=2, file_bytes=sample.FILE_BYTES):
    results = in_threads(size, lambda ranks: sample.save(root, step, ranks, SaveSettings(max_file_bytes=file_bytes)))
    assert all(not isinstance(result, Exception) for result in results), results
    return open_checkpoint(root)


def saved_values(root, values, extras):
    infos = {
        name: TensorInfo(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(range(value.dim())))
        for name, value in values.items()
    }
    pieces = [Piece(infos[name], 0, value.numel(), value.reshape(-1)) for name, value in values.items()]
    save_snapshot(root, 1, Snapshot(pieces, extras), AloneRanks(), SaveSettings())
    return open_checkpoint(root)


@pytest.mark.parametrize(("size", "writers", "file_bytes"), list(itertools.product([1, 3], [1, 2, 7], [700, 5_000, 10**6])))
def test_a_checkpoint_written_again_for_other_ranks_is_the_same(tmp_path, size, writers, file_bytes):
    source = saved(tmp_path / "from", size=size)

    reshard(source, tmp_path / "to", num_writers=writers, settings=SaveSettings(max_file_bytes=file_bytes))

    again = open_checkpoint(tmp_path / "to")
    again.verify()
    assert sample.judge(again) == 1
    assert again.world_size == writers
    assert max(file.num_bytes for file in again.files) <= file_bytes + 300  # a header


def test_there_and_back_again_is_the_identity_of_the_files_too(tmp_path):
    source = saved(tmp_path / "a", size=1)
    settings = SaveSettings(max_file_bytes=sample.FILE_BYTES)

    reshard(source, tmp_path / "b", num_writers=1, settings=settings)
    reshard(open_checkpoint(tmp_path / "b"), tmp_path / "c", num_writers=5, settings=settings)
    reshard(open_checkpoint(tmp_path / "c"), tmp_path / "d", num_writers=1, settings=settings)

    assert open_checkpoint(tmp_path / "d").seal == open_checkpoint(tmp_path / "b").seal


def test_each_writer_gets_an_equal_share_of_the_bytes(tmp_path):
    values = {f"w{i}": torch.zeros(1_000 + i) for i in range(20)}
    source = saved_values(tmp_path / "from", values, {})

    reshard(source, tmp_path / "to", num_writers=4, settings=SaveSettings())

    sizes = [file.num_bytes for file in open_checkpoint(tmp_path / "to").files]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 200  # headers differ by the number of their entries


def test_a_damaged_source_is_not_written_again(tmp_path):
    source = saved(tmp_path / "from")
    path = source.path / source.files[1].name
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)

    with pytest.raises(CheckpointInvalidError, match="its SHA-256 is"):
        reshard(source, tmp_path / "to", num_writers=1, settings=SaveSettings())

    assert [path.name for path in (tmp_path / "to").iterdir()] == [".lock"]


def test_a_disk_that_fails_at_any_call_leaves_no_checkpoint(tmp_path):
    source = saved(tmp_path / "from", file_bytes=10**6, size=1)
    counter = FaultyFileSystem(nothing)
    reshard(source, tmp_path / "count", num_writers=2, settings=SaveSettings(file_system=counter))
    outcomes = [
        outcome_with(source, tmp_path / f"to-{index}", fail_at(index, 28, for_good=False)) for index in range(counter.num_calls)
    ]

    assert outcomes == ["named"] * counter.num_calls
    assert counter.num_calls > 15


def outcome_with(source, root, fault):
    try:
        reshard(source, root, num_writers=2, settings=SaveSettings(file_system=FaultyFileSystem(fault)))
    except CheckpointNotSavedError as error:
        return "named" if error.path.startswith(str(root)) and "[Errno 28]" in error.reason else f"{error}"
    return "saved" if sample.loaded_step(root) == 1 else "another step is loaded"


def test_no_writers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one rank must write"):
        reshard(saved(tmp_path), tmp_path / "to", num_writers=0, settings=SaveSettings())


def test_a_checkpoint_equals_itself_however_it_is_laid_out(tmp_path):
    source = saved(tmp_path / "from", size=3)
    reshard(source, tmp_path / "to", num_writers=2, settings=SaveSettings())

    found = compare(source, open_checkpoint(tmp_path / "to"))

    assert found.is_equal
    assert found.num_equal_tensors == len(sample.infos())


def test_every_difference_is_named(tmp_path):
    first = {"same": torch.ones(3), "w": torch.zeros(5), "shape": torch.zeros(4), "kind": torch.zeros(2), "gone": torch.ones(1)}
    second = {**first, "w": torch.tensor([0, 0, 2.5, 0, -1]), "shape": torch.zeros(2, 2), "kind": torch.zeros(2).half()}
    second["came"] = second.pop("gone")
    one = saved_values(tmp_path / "one", first, {"lr": 0.1, "list": [1, 2], "old": 1, "kind": 1})
    other = saved_values(tmp_path / "other", second, {"lr": 0.2, "list": [1, 3], "new": 1, "kind": True})

    found = compare(one, other)

    assert found.num_equal_tensors == 1
    assert [(difference.name, difference.what) for difference in found.tensors] == [
        ("came", "only in the second"),
        ("gone", "only in the first"),
        ("kind", "float32 [2] and float16 [2]"),
        ("shape", "float32 [4] and float32 [2, 2]"),
        ("w", "2 of elements 0:5 differ, the first at 2, by up to 2.5"),
    ]
    assert [(difference.name, difference.what) for difference in found.values] == [
        ("kind", "1 and True"),
        ("list[1]", "2 and 3"),
        ("lr", "0.1 and 0.2"),
        ("new", "only in the second"),
        ("old", "only in the first"),
    ]


def test_bits_are_compared_not_values(tmp_path):
    one = saved_values(tmp_path / "one", {"w": torch.tensor([0.0, float("nan"), float("inf")])}, {})
    same = saved_values(tmp_path / "same", {"w": torch.tensor([0.0, float("nan"), float("inf")])}, {})
    other = saved_values(tmp_path / "other", {"w": torch.tensor([-0.0, float("nan"), 1.0])}, {})

    assert compare(one, same).is_equal
    (difference,) = compare(one, other).tensors
    # The difference between 0.0 and -0.0 is 0; the other one is not finite.
    assert difference.what == "2 of elements 0:3 differ, the first at 0, by up to 0"


def test_a_tensor_of_another_order_in_memory_is_the_same(tmp_path):
    values = torch.arange(6.0)
    pieces = [
        Piece(TensorInfo("w", "float32", (2, 3), order), 0, 6, flat)
        for order, flat in (((0, 1), values), ((1, 0), values.view(2, 3).t().reshape(-1)))
    ]
    for name, piece in zip("ab", pieces, strict=True):
        save_snapshot(tmp_path / name, 1, Snapshot([piece], {}), AloneRanks(), SaveSettings())

    assert compare(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")).is_equal
