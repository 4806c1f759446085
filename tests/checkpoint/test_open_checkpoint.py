"""Opening: the newest, one by its step, an older one; and what is refused with which words."""

import os
import shutil

import pytest

import megabucket.checkpoint.stored
from faults.checkpoints import sample
from megabucket.checkpoint.file_system import read_file
from megabucket.checkpoint.format import seal_body
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import CheckpointInvalidError, CheckpointMissingError


@pytest.fixture
def root(tmp_path):
    """Checkpoints of the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    return tmp_path


def save(root, step, **options):
    settings = SaveSettings(keep_last=None, max_file_bytes=sample.FILE_BYTES, **options)
    return sample.save(root, step, AloneRanks(), settings)


def data_file(root, step, index=0):
    return root / f"step-{step:08d}" / f"rank-00000-{index:05d}.safetensors"


def flip(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


def test_latest_and_every_step_can_be_opened(root):
    assert open_checkpoint(root).step == 3
    assert [open_checkpoint(root, step).step for step in (1, 2, 3)] == [1, 2, 3]
    assert sample.judge(open_checkpoint(str(root), 2)) == 2


def test_what_is_stored_is_described_without_reading_data(root):
    stored = open_checkpoint(root)

    assert list(stored.tensors) == sorted(info.name for info in sample.infos())
    assert set(stored.tensors.values()) == set(sample.infos())
    assert stored.values == sample.values_of(3)


def test_a_checkpoint_of_another_version_says_so_and_is_not_called_damaged(root):
    manifest = root / "step-00000002" / "manifest.json"
    body = manifest.read_bytes().replace(b'"version":1', b'"version":2', 1)
    manifest.write_bytes(seal_body(body[: body.rindex(b',"seal":')]))

    with pytest.raises(CheckpointInvalidError) as caught:
        open_checkpoint(root, 2)

    assert str(caught.value) == (
        f"{manifest.parent}: manifest.json: it is of version 2 of the format. This megabucket reads version 1 only; nothing of "
        "it was loaded. Load it with the megabucket that wrote it; steps 1, 3 can be tried: name one as the step to read."
    )


def test_a_directory_without_checkpoints_is_missing_them(tmp_path):
    with pytest.raises(CheckpointMissingError, match="no checkpoint for 'latest', which is not there"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointMissingError, match="It holds no checkpoint at all"):
        open_checkpoint(tmp_path / "nowhere", 5)


def test_a_step_that_is_not_there_lists_those_that_are(root):
    with pytest.raises(CheckpointMissingError, match=r"no checkpoint for step 4. It holds steps 1, 2, 3: name one") as caught:
        open_checkpoint(root, 4)

    assert caught.value.steps == (1, 2, 3)


def test_without_latest_the_steps_are_listed_not_guessed(root):
    (root / "latest").unlink()

    with pytest.raises(CheckpointMissingError, match="It holds steps 1, 2, 3"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    "said", [b"", b"step-00000003\n", b"step-3 " + b"0" * 64 + b"\n", b"../x " + b"0" * 64 + b"\n", b"\xff" * 84]
)
def test_a_latest_that_says_nothing_is_an_error_with_the_steps(root, said):
    (root / "latest").write_bytes(said)

    with pytest.raises(CheckpointInvalidError, match="it does not name a checkpoint") as caught:
        open_checkpoint(root)

    assert (caught.value.file, caught.value.steps) == ("latest", (1, 2, 3))


def test_a_latest_of_another_checkpoint_is_found_by_the_seal(root):
    said = (root / "latest").read_text()
    (root / "latest").write_text(said.replace("step-00000003", "step-00000002"))

    with pytest.raises(CheckpointInvalidError, match="it names step-00000002 with another seal"):
        open_checkpoint(root)


def test_a_directory_under_another_steps_name_is_refused(root):
    shutil.rmtree(root / "step-00000002")
    shutil.copytree(root / "step-00000001", root / "step-00000002")

    with pytest.raises(CheckpointInvalidError, match="it is of step 1, in the directory of step 2") as caught:
        open_checkpoint(root, 2)

    assert caught.value.steps == (1, 3)


def test_a_missing_file_is_named_when_opening(root):
    data_file(root, 3, 0).unlink()
    data_file(root, 3, 2).unlink()

    with pytest.raises(CheckpointInvalidError, match="it and 1 other files are missing") as caught:
        open_checkpoint(root)

    assert caught.value.file == "rank-00000-00000.safetensors"


def test_a_missing_manifest_is_named(root):
    (root / "step-00000003" / "manifest.json").unlink()

    with pytest.raises(CheckpointInvalidError, match=r"manifest.json: it is missing.*steps 1, 2 can be tried"):
        open_checkpoint(root)


def test_a_damaged_data_file_is_named_when_it_is_read(root):
    flip(data_file(root, 3, 1))
    stored = open_checkpoint(root)

    with pytest.raises(CheckpointInvalidError, match=r"rank-00000-00001\.safetensors: its SHA-256 is"):
        stored.verify()
    with pytest.raises(CheckpointInvalidError, match=r"rank-00000-00001\.safetensors: its SHA-256 is"):
        sample.judge(stored)
    assert len(stored.damage()) == 1


def test_all_damaged_files_are_listed(root):
    flip(data_file(root, 3, 0))
    data_file(root, 3, 1).write_bytes(b"short")
    stored = open_checkpoint(root)
    data_file(root, 3, 2).unlink()

    first, second, third = map(str, stored.damage())

    assert "its SHA-256 is" in first
    assert "it has 5 bytes, and the manifest says" in second
    assert "rank-00000-00002.safetensors: it is missing" in third


@pytest.mark.parametrize("what", ["symbolic link", "pipe", "directory"])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000-00000.safetensors"])
def test_only_regular_files_are_read_and_nothing_blocks(root, what, name):
    path = root / "step-00000003" / name
    path.rename(root / "aside")
    if what == "symbolic link":
        path.symlink_to(root / "aside")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()

    with pytest.raises(CheckpointInvalidError) as caught:
        open_checkpoint(root).verify()

    assert caught.value.file == name


@pytest.mark.parametrize("name", ["latest", "step-00000003/manifest.json", "step-00000003/rank-00000-00000.safetensors"])
def test_a_sparse_file_of_200_gb_takes_no_memory_and_is_an_error(root, name):
    os.truncate(root / name, 200 << 30)

    with pytest.raises(CheckpointInvalidError, match=f"it has {200 << 30} bytes, and at most"):
        open_checkpoint(root).verify()


def test_a_root_that_is_a_symbolic_link_is_fine(root, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "run"
    link.symlink_to(root)

    assert sample.loaded_step(link) == 3
    save(link, 4)
    assert sample.loaded_step(root) == 4


@pytest.mark.parametrize("harm", ["data", "manifest", "missing file", "latest", "no latest"])
def test_the_fallback_takes_the_newest_whole_one_and_says_so(root, harm, caplog):
    if harm == "data":
        flip(data_file(root, 3))
    elif harm == "manifest":
        flip(root / "step-00000003" / "manifest.json")
    elif harm == "missing file":
        data_file(root, 3).unlink()
    elif harm == "latest":
        flip(root / "latest")
    else:
        (root / "latest").unlink()
    flip(data_file(root, 2))

    stored = open_checkpoint(root, allow_fallback=True)

    assert "falling back to the checkpoint of step" in caplog.text
    assert sample.judge(stored) == (3 if "latest" in harm else 1)


def test_the_fallback_from_a_step_never_goes_to_a_later_one(root, caplog):
    flip(data_file(root, 2))

    assert open_checkpoint(root, 2, allow_fallback=True).step == 1
    assert "falling back to the checkpoint of step 1" in caplog.text


def test_without_need_nothing_falls_back(root):
    assert open_checkpoint(root, allow_fallback=True).step == 3
    assert open_checkpoint(root, 2, allow_fallback=True).step == 2


def test_what_latest_does_not_name_is_no_candidate_for_it(root):
    """A newer directory comes from a save that died before it was over, or from before a rollback."""
    before = (root / "latest").read_bytes()
    save(root, 4)
    (root / "latest").write_bytes(before)

    assert open_checkpoint(root, allow_fallback=True).step == 3


@pytest.mark.parametrize("name", ["manifest.json", "data"])
def test_the_fallback_never_goes_to_a_step_of_an_abandoned_run(root, name, caplog):
    before = (root / "latest").read_bytes()
    save(root, 4)
    (root / "latest").write_bytes(before)  # as after a rollback to step 3
    flip(root / "step-00000003" / name if name != "data" else data_file(root, 3))

    assert open_checkpoint(root, allow_fallback=True).step == 2
    assert "falling back to the checkpoint of step 2" in caplog.text


def test_when_nothing_is_whole_the_first_problem_is_raised(root):
    for step in (1, 2, 3):
        flip(data_file(root, step))

    with pytest.raises(CheckpointInvalidError, match="step-00000003: rank-00000-00000"):
        open_checkpoint(root, allow_fallback=True)


def test_a_fallback_without_any_checkpoint_is_missing(tmp_path):
    with pytest.raises(CheckpointMissingError):
        open_checkpoint(tmp_path, allow_fallback=True)


def test_a_newest_that_vanishes_for_a_newer_one_is_followed(root, monkeypatch):
    """A job that evaluates reads ``latest`` while a job that trains replaces it and removes what it named."""

    def late(path, max_bytes):
        if path.parent.name == "step-00000003":
            save(root, 4)
            shutil.rmtree(path.parent)
        return read_file(path, max_bytes)

    monkeypatch.setattr(megabucket.checkpoint.stored, "read_file", late)

    assert open_checkpoint(root).step == 4
