"""Saving: what is on the disk afterwards, what is refused, and who says so."""

import errno
import gc
import hashlib
import os
import shutil
import stat

import pytest
import torch

from faults.checkpoints import sample
from faults.checkpoints.faulty import FaultyFileSystem
from faults.checkpoints.threads import in_threads
from megabucket.checkpoint.catalog import saved_steps
from megabucket.checkpoint.file_system import FileSystem, lock, unlock
from megabucket.checkpoint.format import Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import Save, SaveSettings, content_of, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import CheckpointNotSavedError


def save(root, step, **options):
    return save_snapshot(root, step, sample.snapshot(step, rank=0, size=1), AloneRanks(), SaveSettings(**options))


def save_on_ranks(root, step, *, size, snapshot=None, **options):
    """What each rank gets from a save: a path or its error."""

    def act(ranks):
        mine = (snapshot or sample.snapshot)(step, rank=ranks.rank, size=ranks.size)
        return save_snapshot(root, step, mine, ranks, SaveSettings(max_file_bytes=sample.FILE_BYTES, **options))

    return in_threads(size, act)


def same_error(results):
    """The one error that all ranks have raised."""
    assert all(isinstance(result, CheckpointNotSavedError) for result in results), results
    assert len({str(result) for result in results}) == 1
    return results[0]


def names(root):
    return sorted(path.name for path in root.iterdir())


def vector(name, values):
    info = TensorInfo(name, str(values.dtype).removeprefix("torch."), tuple(values.shape), tuple(range(values.dim())))
    return Piece(info, 0, values.numel(), values.reshape(-1))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_ranks_save_together_is_what_one_reads(tmp_path, size):
    results = save_on_ranks(tmp_path / "run", 12, size=size)

    assert results == [tmp_path / "run" / "step-00000012"] * size
    assert sample.loaded_step(tmp_path / "run") == 12
    assert open_checkpoint(tmp_path / "run").world_size == size
    assert names(tmp_path / "run") == [".lock", "latest", "step-00000012"]


def test_the_digests_in_the_manifest_are_those_that_sha256sum_gives(tmp_path):
    save(tmp_path, 1, max_file_bytes=sample.FILE_BYTES)
    stored = open_checkpoint(tmp_path)

    found = {file.name: hashlib.sha256((stored.path / file.name).read_bytes()).hexdigest() for file in stored.files}

    assert {file.name: file.sha256 for file in stored.files} == found
    assert sorted([*found, "manifest.json"]) == names(stored.path)
    assert max(file.num_bytes for file in stored.files) <= sample.FILE_BYTES + 1_000  # and a header


def test_latest_names_the_newest_and_its_seal(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)

    assert (tmp_path / "latest").read_text() == f"step-00000002 {open_checkpoint(tmp_path).seal}\n"


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (None, [1, 2, 3, 4])])
def test_as_many_are_kept_as_asked_for(tmp_path, keep_last, kept):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_last=keep_last)

    assert list(saved_steps(tmp_path)) == kept


def test_after_going_back_to_an_older_step_what_came_later_is_left_alone(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=None)

    save(tmp_path, 15, keep_last=2)
    save(tmp_path, 17, keep_last=2)

    assert list(saved_steps(tmp_path)) == [15, 17, 20, 30]
    assert open_checkpoint(tmp_path).step == 17


def test_a_step_that_was_saved_is_not_saved_again_unless_allowed(tmp_path):
    save(tmp_path, 1)

    with pytest.raises(CheckpointNotSavedError, match="step 1 is saved already; overwrite=True saves it again") as caught:
        save(tmp_path, 1)

    assert caught.value.last_good_step == 1
    assert sample.loaded_step(tmp_path) == 1
    assert names(tmp_path) == [".lock", "latest", "step-00000001"]


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)

    path = save(tmp_path, 2, overwrite=True)

    assert path == tmp_path / "step-00000002.2"
    assert names(tmp_path) == [".lock", "latest", "step-00000001", "step-00000002.2"]
    assert open_checkpoint(tmp_path).path == open_checkpoint(tmp_path, 2).path == path
    assert save(tmp_path, 2, overwrite=True).name == "step-00000002.3"


def test_a_step_that_nothing_names_is_saved_again_without_asking(tmp_path):
    """It comes from a save that died before ``latest`` was replaced, or from before a rollback."""
    save(tmp_path, 1)
    before = (tmp_path / "latest").read_bytes()
    save(tmp_path, 2)
    (tmp_path / "latest").write_bytes(before)

    assert save(tmp_path, 2).name == "step-00000002.2"
    assert sample.loaded_step(tmp_path) == 2


def test_what_a_dead_save_has_left_is_removed_by_the_next(tmp_path):
    dead = tmp_path / ".tmp-step-00000001-0123"
    dead.mkdir()
    (dead / "rank-00000-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-latest-0123").write_bytes(b"half")

    save(tmp_path, 1)

    assert names(tmp_path) == [".lock", "latest", "step-00000001"]


def test_two_saves_into_one_directory_do_not_meet(tmp_path):
    save(tmp_path, 1)
    first = Save(tmp_path, 2, AloneRanks(), SaveSettings())
    works = first.works(lambda: content_of(sample.snapshot(2, rank=0, size=1), AloneRanks(), 10**6))
    work = next(works)

    with pytest.raises(CheckpointNotSavedError, match="another save into this directory is going on"):
        save(tmp_path, 3)
    work = works.send(work)
    with pytest.raises(StopIteration):
        works.send(work)

    assert sample.loaded_step(tmp_path) == 2


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_exception_on_one_rank_is_one_error_on_all_and_leaves_nothing(tmp_path, victim):
    save_on_ranks(tmp_path, 1, size=3)

    def broken(step, *, rank, size):
        good = sample.snapshot(step, rank=rank, size=size)
        if rank != victim:
            return good
        piece = good.pieces[0]
        return Snapshot([Piece(piece.info, piece.start, piece.stop, piece.values[1:])], good.values)

    error = same_error(save_on_ranks(tmp_path, 2, size=3, snapshot=broken))

    assert (error.step, error.ranks, error.last_good_step) == (2, (victim,), 1)
    assert "'model.weight'" in error.reason
    assert names(tmp_path) == [".lock", "latest", "step-00000001"]


def test_ranks_that_save_other_values_are_refused(tmp_path):
    def differing(step, *, rank, size):
        good = sample.snapshot(step, rank=rank, size=size)
        return Snapshot(good.pieces, {**good.values, "lr": rank})

    error = same_error(save_on_ranks(tmp_path, 2, size=2, snapshot=differing))

    assert error.ranks == (1,)
    assert "its values" in error.reason


def test_ranks_that_save_different_steps_are_refused(tmp_path):
    results = in_threads(2, lambda ranks: sample.save(tmp_path, 5 + ranks.rank, ranks, SaveSettings()))

    texts = [str(result) for result in results]
    assert all("rank 1: its step 6 and that of rank 0 5 differ" in text for text in texts)
    assert names(tmp_path) == [".lock"]


def test_tensors_that_no_rank_has_wholly_are_refused(tmp_path):
    def with_a_gap(step, *, rank, size):
        good = sample.snapshot(step, rank=rank, size=size)
        return Snapshot([piece for piece in good.pieces if (rank, piece.info.name) != (1, "model.bias")], good.values)

    error = same_error(save_on_ranks(tmp_path, 2, size=2, snapshot=with_a_gap))

    assert "the pieces of 'model.bias' do not hold each of its 37 elements once" in str(error)


def test_tensors_that_ranks_describe_differently_are_refused(tmp_path):
    def reshaped(step, *, rank, size):
        info = TensorInfo("w", "float32", (4, 2) if rank else (2, 4), (0, 1))
        return Snapshot([Piece(info, 4 * rank, 4 * rank + 4, torch.zeros(4))], {})

    assert "'w' is TensorInfo(name='w'" in str(same_error(save_on_ranks(tmp_path, 2, size=2, snapshot=reshaped)))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (torch.zeros(4, dtype=torch.float64), "'w' 0:4 of float32 has values of shape .* torch.float64"),
        (torch.zeros(8)[::2], "'w' 0:4 of float32 has values of shape"),
        (torch.zeros(2, 2), "'w' 0:4 of float32 has values of shape"),
        (torch.zeros(3), "'w' 0:4 of float32 has values of shape"),
    ],
)
def test_values_that_are_not_what_their_piece_says_are_refused(tmp_path, values, problem):
    piece = Piece(TensorInfo("w", "float32", (4,), (0,)), 0, 4, values)

    with pytest.raises(CheckpointNotSavedError, match=problem):
        save_snapshot(tmp_path, 1, Snapshot([piece], {}), AloneRanks())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"step": -1}, "step -1 is not a whole number"),
        ({"step": True}, "step True is not a whole number"),
        ({"values": {"a": float("nan")}}, "Out of range float"),
        ({"dtype": "float7"}, "float7"),
    ],
)
def test_what_could_not_be_read_again_is_refused(tmp_path, options, problem):
    info = TensorInfo("w", options.get("dtype", "float32"), (4,), (0,))
    snapshot = Snapshot([Piece(info, 0, 4, torch.zeros(4))], options.get("values", {}))

    with pytest.raises(CheckpointNotSavedError, match=problem):
        save_snapshot(tmp_path, options.get("step", 1), snapshot, AloneRanks())


class ElsewhereOnRankOne(FaultyFileSystem):
    """Rank 1 sees another root than rank 0: two machines without a common file system."""

    __slots__ = ()

    def __init__(self):
        super().__init__(lambda _index, _name: None)

    def call(self, function, *args):
        if function is os.open:
            path, *args = args
            args = (path.parent.parent / "elsewhere" / path.parent.name / path.name, *args)
        return super().call(function, *args)


def test_ranks_without_a_common_file_system_are_told_so(tmp_path):
    def act(ranks):
        files = ElsewhereOnRankOne() if ranks.rank == 1 else FileSystem()
        return sample.save(tmp_path, 1, ranks, SaveSettings(file_system=files))

    error = same_error(in_threads(2, act))

    assert error.ranks == (1,)
    assert "do all ranks see one file system" in str(error)


class StuckDirectory(FaultyFileSystem):
    """Old checkpoints cannot be removed."""

    __slots__ = ()

    def __init__(self):
        super().__init__(lambda _index, _name: None)

    def call(self, function, *args):
        if function is os.rename and "old" in args[1].name:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return super().call(function, *args)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_in_the_log_once(tmp_path, caplog):
    sample.save(tmp_path, 1, AloneRanks(), SaveSettings())

    for step in (2, 3):
        sample.save(tmp_path, step, AloneRanks(), SaveSettings(keep_last=1, file_system=StuckDirectory()))

    (first, second) = (record for record in caplog.records if record.name == "megabucket")
    assert "step-00000001 cannot be removed: [Errno 1]" in first.getMessage()
    assert "step-00000002 cannot be removed: [Errno 1]" in second.getMessage()
    assert sample.loaded_step(tmp_path) == 3


def test_writes_that_take_a_part_at_a_time_are_completed(tmp_path):
    class Slow(FileSystem):
        __slots__ = ()

        def call(self, function, *args):
            if function is os.write:
                args = (args[0], args[1][:7])
            return super().call(function, *args)

    sample.save(tmp_path, 1, AloneRanks(), SaveSettings(file_system=Slow()))

    assert sample.loaded_step(tmp_path) == 1


def test_files_larger_than_a_chunk_hold_what_was_given(tmp_path):
    large = torch.randn(3 * 2**18 + 5)  # 3 MiB and a bit
    pieces = [vector("a", torch.arange(9)), vector("b", large), vector("c", torch.zeros(3))]

    save_snapshot(tmp_path, 1, Snapshot(pieces, {}), AloneRanks())
    read = torch.empty_like(large)
    open_checkpoint(tmp_path).read([Piece(pieces[1].info, 0, large.numel(), read)])

    assert torch.equal(read, large)


def test_a_checkpoint_of_values_only_has_no_files(tmp_path):
    save_snapshot(tmp_path, 1, Snapshot([], {"a": 1}), AloneRanks())

    stored = open_checkpoint(tmp_path)

    assert (stored.values, stored.files) == ({"a": 1}, ())
    stored.verify()


def test_parameters_that_need_gradients_are_saved_and_filled(tmp_path):
    weight = torch.nn.Parameter(torch.randn(5))
    info = TensorInfo("w", "float32", (5,), (0,))
    save_snapshot(tmp_path, 1, Snapshot([Piece(info, 0, 5, weight)], {}), AloneRanks())
    other = torch.nn.Parameter(torch.zeros(5))

    open_checkpoint(tmp_path).read([Piece(info, 0, 5, other)])

    assert torch.equal(weight, other)


def test_files_get_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)

    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_no_descriptor_stays_open(tmp_path):
    def open_descriptors():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    save(tmp_path, 1)
    before = open_descriptors()
    save(tmp_path, 2)
    with pytest.raises(CheckpointNotSavedError):
        save(tmp_path, 2)
    open_checkpoint(tmp_path).verify()

    assert open_descriptors() == before


def test_a_root_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointNotSavedError, match="no good one is known") as caught:
        save(tmp_path / "file" / "run", 1)

    assert caught.value.path == str(tmp_path / "file" / "run")
    assert "Not a directory" in caught.value.reason


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep_last):
    with pytest.raises(ValueError, match="the checkpoint just saved is one to keep"):
        save(tmp_path, 1, keep_last=keep_last)


def test_a_checkpoint_can_be_moved_with_its_root(tmp_path):
    save(tmp_path / "here", 1)
    shutil.move(tmp_path / "here", tmp_path / "there")

    assert sample.loaded_step(tmp_path / "there") == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_lock_that_an_interrupt_has_kept_from_being_released_is_free_when_its_save_is_dropped(tmp_path):
    held = lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        lock(tmp_path / "lock")

    del held
    gc.collect()

    unlock(lock(tmp_path / "lock"))
