"""Saving in the background: what is taken when, who waits, and where a failure is said."""

import errno
import gc
import os
import threading
import time

import pytest
import torch

from faults.checkpoints import sample
from faults.checkpoints.faulty import FaultyFileSystem
from faults.checkpoints.threads import in_threads
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.format import Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import BackgroundWriter, SaveSettings, save_snapshot
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import CheckpointNotSavedError


class Gate(FaultyFileSystem):
    """Data is not on the disk before the gate is open, or fails with an error number."""

    __slots__ = ("code", "gate")

    def __init__(self, code=None):
        self.gate, self.code = threading.Event(), code
        super().__init__(lambda _index, _name: None)

    def call(self, function, *args):
        if function is os.fsync:
            assert self.gate.wait(30)
            if self.code is not None:
                raise OSError(self.code, os.strerror(self.code))
        return super().call(function, *args)


def alone(root, files, **options):
    return BackgroundWriter(root, AloneRanks(), SaveSettings(file_system=files), **options)


def sample_of(step):
    return lambda: sample.snapshot(step, rank=0, size=1)


def test_nothing_is_there_before_all_is_written_and_committed(tmp_path):
    files = Gate()
    writer = alone(tmp_path, files)

    assert writer.save(1, sample_of(1))
    assert writer.is_busy
    assert writer.poll() is None
    files.gate.set()
    path = writer.close()

    assert path == tmp_path / "step-00000001"
    assert not writer.is_busy
    assert sample.loaded_step(tmp_path) == 1


def test_poll_commits_once_everything_is_written(tmp_path):
    files = Gate()
    files.gate.set()
    writer = alone(tmp_path, files)
    writer.save(1, sample_of(1))

    for _ in range(2_000):
        if path := writer.poll():
            break
        time.sleep(0.005)

    assert path == tmp_path / "step-00000001"
    assert [writer.poll() for _ in range(2_000)] == [None] * 2_000


def test_a_busy_writer_that_skips_takes_nothing(tmp_path):
    files = Gate()
    writer = alone(tmp_path, files, when_busy="skip")
    writer.save(1, sample_of(1))

    assert not writer.save(2, lambda: pytest.fail("nothing may be copied"))
    files.gate.set()
    writer.close()

    assert sample.loaded_step(tmp_path) == 1


def test_a_busy_writer_that_waits_saves_both(tmp_path):
    files = Gate()
    writer = alone(tmp_path, files)
    writer.save(1, sample_of(1))
    threading.Timer(0.05, files.gate.set).start()

    assert writer.save(2, sample_of(2))
    assert open_checkpoint(tmp_path).step == 1
    writer.close()

    assert sample.loaded_step(tmp_path) == 2


def test_an_idle_writer_has_nothing_to_poll_or_close(tmp_path):
    writer = alone(tmp_path, FileSystem())

    assert writer.poll() is None
    assert writer.close() is None


def poll_until_done(writer):
    while writer.poll() is None:
        pass


NEXT_CALLS = {
    "poll": poll_until_done,
    "save": lambda writer: writer.save(3, lambda: pytest.fail("the failure comes first")),
    "close": lambda writer: writer.close(),
}


@pytest.mark.parametrize("when", NEXT_CALLS)
def test_a_failure_in_the_background_is_raised_by_the_next_call_on_all_ranks(tmp_path, when):
    def act(ranks):
        files = Gate(errno.EIO if ranks.rank == 1 else None)
        files.gate.set()
        sample.save(tmp_path, 1, ranks, SaveSettings())
        writer = BackgroundWriter(tmp_path, ranks, SaveSettings(file_system=files))
        writer.save(2, lambda: sample.snapshot(2, rank=ranks.rank, size=2))
        with pytest.raises(CheckpointNotSavedError) as caught:
            NEXT_CALLS[when](writer)
        assert not writer.is_busy
        files.code = None
        writer.save(3, lambda: sample.snapshot(3, rank=ranks.rank, size=2))
        writer.close()
        return caught.value

    first, second = in_threads(2, act)

    assert isinstance(first, CheckpointNotSavedError), first
    assert str(first) == str(second)
    assert (first.step, first.ranks, first.last_good_step) == (2, (1,), 1)
    assert first.path.endswith("rank-00001-00000.safetensors")
    assert sample.loaded_step(tmp_path) == 3


def test_whatever_ends_the_thread_in_the_background_is_an_error_of_all_ranks(tmp_path):
    def act(ranks):
        def end_thread(_index, _name):
            if ranks.rank == 1:
                raise SystemExit("of an extension")

        writer = BackgroundWriter(tmp_path, ranks, SaveSettings(file_system=FaultyFileSystem(end_thread)))
        writer.save(1, lambda: sample.snapshot(1, rank=ranks.rank, size=2))
        with pytest.raises(CheckpointNotSavedError) as caught:
            writer.close()
        return str(caught.value)

    first, second = in_threads(2, act)

    assert first == second
    assert "SystemExit: of an extension" in first


class GatedRename(FaultyFileSystem):
    """Nothing is renamed before the gate is open, or renaming fails with an error number."""

    __slots__ = ("gate", "reached")

    def __init__(self, code=None):
        self.gate, self.reached = threading.Event(), threading.Event()

        def act(_index, name):
            if name == "rename":
                self.reached.set()
                assert self.gate.wait(30)
                if code is not None:
                    raise OSError(code, os.strerror(code))

        super().__init__(act)


def test_the_commit_happens_in_the_background_and_the_next_save_waits_for_it(tmp_path):
    files = GatedRename()
    writer = alone(tmp_path, files)
    writer.save(1, sample_of(1))
    while not files.reached.is_set():
        assert writer.poll() is None

    assert writer.poll() is None
    assert not (tmp_path / "latest").exists()
    threading.Timer(0.05, files.gate.set).start()
    assert writer.save(2, sample_of(2))
    assert open_checkpoint(tmp_path).step == 1
    writer.close()

    assert sample.loaded_step(tmp_path) == 2


def test_a_commit_that_fails_in_the_background_is_an_error_of_all_ranks(tmp_path):
    def act(ranks):
        sample.save(tmp_path, 1, ranks, SaveSettings())
        files = GatedRename(errno.EIO)
        files.gate.set()
        writer = BackgroundWriter(tmp_path, ranks, SaveSettings(file_system=files))
        writer.save(2, lambda: sample.snapshot(2, rank=ranks.rank, size=2))
        with pytest.raises(CheckpointNotSavedError) as caught:
            poll_until_done(writer)
        assert not writer.is_busy
        return caught.value

    first, second = in_threads(2, act)

    assert isinstance(first, CheckpointNotSavedError), first
    assert str(first) == str(second)
    assert (first.step, first.ranks, first.last_good_step) == (2, (0,), 1)
    assert sample.loaded_step(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


def test_a_snapshot_that_cannot_be_taken_is_an_error_of_all_ranks(tmp_path):
    def act(ranks):
        writer = BackgroundWriter(tmp_path, ranks, SaveSettings())

        def take():
            if ranks.rank == 1:
                raise RuntimeError("no memory for a copy")
            return sample.snapshot(1, rank=0, size=2)

        writer.save(1, take)

    texts = {str(result) for result in in_threads(2, act)}

    assert len(texts) == 1
    assert "rank 1: RuntimeError: no memory for a copy" in texts.pop()


def test_a_save_in_the_background_keeps_others_out_until_it_is_over(tmp_path):
    files = Gate()
    writer = alone(tmp_path, files)
    writer.save(1, sample_of(1))

    with pytest.raises(CheckpointNotSavedError, match="another save into this directory is going on"):
        save_snapshot(tmp_path, 2, sample_of(2)(), AloneRanks())
    files.gate.set()
    writer.close()
    save_snapshot(tmp_path, 2, sample_of(2)(), AloneRanks())

    assert sample.loaded_step(tmp_path) == 2


def test_a_writer_that_is_forgotten_keeps_nobody_out(tmp_path):
    files = Gate()
    files.gate.set()
    writer = alone(tmp_path, files)
    writer.save(1, sample_of(1))

    del writer
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("megabucket-save"):
            thread.join(30)
    save_snapshot(tmp_path, 2, sample_of(2)(), AloneRanks())

    assert sample.loaded_step(tmp_path) == 2


def test_what_is_taken_is_what_is_written(tmp_path):
    values = torch.zeros(4)
    info = TensorInfo("w", "float32", (4,), (0,))
    files = Gate()
    writer = alone(tmp_path, files)

    writer.save(1, lambda: Snapshot([Piece(info, 0, 4, values.clone())], {}))
    values.fill_(7)
    files.gate.set()
    writer.close()
    read = torch.empty(4)
    open_checkpoint(tmp_path).read([Piece(info, 0, 4, read)])

    assert read.tolist() == [0.0] * 4


def test_an_unknown_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="when_busy is 'drop'"):
        alone(tmp_path, FileSystem(), when_busy="drop")
