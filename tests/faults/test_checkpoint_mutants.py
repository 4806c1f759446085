"""Mistakes put into saving and loading on purpose: each must be found by a short campaign, or the campaigns prove nothing.

Each runs in a process of its own, with one thing replaced, forked from one that has torch loaded (tests/conftest.py).
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

RUN = """
import os
import tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from megabucket.checkpoint import catalog, file_system, format, save, stored
{mutation}
from faults.checkpoints.crash_points import run_crash_points
from faults.checkpoints.damage import run_damage
from faults.checkpoints.io_errors import run_io_errors
base = Path(tempfile.mkdtemp(dir=where))
print(*{campaign}.failures, sep="\\n")
"""

CRASH = "run_crash_points(base, size=2, torn=False, report=lambda text: None, until=until)"
DAMAGE = "run_damage(base, 200, 1, size=2, report=lambda text: None, until=until)"
IO_ERRORS = "run_io_errors(base, size=2, codes=(28,), report=lambda text: None, until=until)"

MUTANTS = {
    "latest before the directory": (
        CRASH,
        """
publish = catalog.RootDirectory.publish
def early(self, staging, step, manifest_bytes, *, before):
    self._replace_latest(catalog.Latest(catalog.StepDirectory(step), format.seal_of(manifest_bytes)))
    return publish(self, staging, step, manifest_bytes, before=before)
catalog.RootDirectory.publish = early
""",
        "CheckpointMissingError",
    ),
    "old removed before the new is named": (
        CRASH,
        """
replace = catalog.RootDirectory._replace_latest
def removing(self, latest):
    self.remove_old(latest.directory, keep_last=1)
    replace(self, latest)
catalog.RootDirectory._replace_latest = removing
""",
        "CheckpointMissingError",
    ),
    "written in place": (
        CRASH,
        """
stage = catalog.RootDirectory.stage
def in_place(self, step):
    path = self._root / catalog.StepDirectory(step - 1).name
    if not path.exists():
        return stage(self, step)
    for file in path.iterdir():
        file.unlink()
    return path
catalog.RootDirectory.stage = in_place
""",
        "CheckpointInvalidError",
    ),
    "old removed in place": (
        CRASH,
        """
def remove_old(self, saved, *, keep_last):
    for directory in catalog.step_directories(self._root):
        if directory != saved:
            (self._root / catalog.LATEST).write_text(catalog.Latest(directory, "0" * 64).encode().decode())
            self._files.remove_tree(self._root / directory.name)
catalog.RootDirectory.remove_old = remove_old
""",
        "another seal",
    ),
    "SHA-256 not compared": (
        DAMAGE,
        """
class Same(str):
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__
init = stored.StoredCheckpoint.__init__
def unhashed(self, path, manifest):
    init(self, path, manifest)
    self.files = [format.StoredFile(file.name, file.num_bytes, Same(file.sha256)) for file in manifest.files]
stored.StoredCheckpoint.__init__ = unhashed
""",
        "WrongStateError",
    ),
    "seal of latest not compared": (
        DAMAGE,
        """
class Every(str):
    __ne__ = lambda self, other: False
class Unsealed(stored.StoredCheckpoint):
    seal = property(lambda self: Every(), lambda self, value: None)
stored.StoredCheckpoint = Unsealed
""",
        "step 1 was loaded",
    ),
    "step of the manifest not compared": (
        DAMAGE,
        """
class Every(int):
    __ne__ = lambda self, other: False
decode = format.decode_manifest
def of_any_step(raw):
    manifest = decode(raw)
    return format.replace(manifest, step=Every(manifest.step))
stored.decode_manifest = of_any_step
stored._newest = lambda root: stored._open(root, stored._latest(root).directory)
""",
        "step 1 was loaded",
    ),
    "failed write ignored": (
        IO_ERRORS,
        """
write = save.Content.write
def ignoring(self, file_system, directory):
    try:
        return write(self, file_system, directory)
    except OSError:
        return []
save.Content.write = ignoring
""",
        "a piece is in none of the 2 files",
    ),
    "error on one rank only": (
        IO_ERRORS,
        """
agree = save.Save._agree
def alone(self, place, act):
    try:
        return agree(self, place, act)
    except Exception as error:
        if self._ranks.rank == 0:
            raise
        raise RuntimeError("the other rank failed") from error
save.Save._agree = alone
""",
        "the other rank failed",
    ),
    "failed commit not taken back": (
        IO_ERRORS,
        """
def half(self, directory, staging, before):
    self._files.call(os.rename, self._root / directory.name, staging)
catalog.RootDirectory._take_back = half
""",
        "call ",
    ),
}


@pytest.fixture
def quick_disk():
    """A directory in memory where there is one: thousands of fsync calls wait for nothing there."""
    memory = Path("/dev/shm")  # noqa: S108 - only a place for a directory of our own
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield path


def run(program, where, until=None):
    """Exit code, and what was printed, of a campaign in a process without threads."""
    out, said = Path(where) / "out.txt", Path(where) / "said.txt"
    process = multiprocessing.get_context("forkserver").Process(target=_execute, args=(program, where, until, out, said))
    process.start()
    process.join(240)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode, out.read_text(), said.read_text()


def _execute(program, where, until, out, said):
    for path, descriptor in ((out, 1), (said, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    try:
        exec(program, {"__name__": "__main__", "where": where, "until": until})  # noqa: S102
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        raise


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_found(mutant, quick_disk):
    campaign, mutation, found_as = MUTANTS[mutant]

    code, printed, said = run(RUN.format(mutation=mutation, campaign=campaign), quick_disk, found_as)

    assert code == 0, said
    assert found_as in printed, printed[:2_000]


# By day, the same campaigns find nothing in test_checkpoint_faults.py.
@pytest.mark.nightly
@pytest.mark.parametrize("campaign", [CRASH, DAMAGE, IO_ERRORS], ids=["crash points", "damage", "I/O errors"])
def test_without_a_mistake_nothing_is_found(campaign, quick_disk):
    code, printed, said = run(RUN.format(mutation="", campaign=campaign), quick_disk)

    assert (code, printed.strip()) == (0, ""), said
