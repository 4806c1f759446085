"""Short campaigns against checkpoints; the long ones are ``python -m faults checkpoints``, with these functions.

What forks runs in a process of its own: the tests have threads.
"""

import errno
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from faults.checkpoints.damage import run_damage
from faults.checkpoints.io_errors import CODES, run_io_errors
from faults.processes import environment

pytestmark = pytest.mark.long_file


@pytest.fixture
def quick_disk():
    """A directory in memory where there is one: thousands of fsync calls wait for nothing there."""
    memory = Path("/dev/shm")  # noqa: S108 - only a place for a directory of our own
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


def campaign(*arguments):
    command = [sys.executable, "-W", "error", "-m", "faults", "checkpoints", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment())
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.nightly
def test_a_save_killed_at_any_of_its_calls_leaves_the_old_or_the_new_checkpoint_whole(quick_disk):
    whole, torn = campaign("crash-points", "--where", str(quick_disk)).splitlines()

    for line in (whole, torn):
        calls, saves, old, new, failures = map(int, re.findall(r"(\d+) (?:calls|saves|loaded|the new|failures)", line))
        assert (saves, failures) == (calls + 1, 0)
        assert calls > 25
        assert old + new == saves
        assert old > 20
        assert new > 3


@pytest.mark.nightly
def test_processes_killed_at_random_moments_lose_nothing_they_have_reported(quick_disk):
    output = campaign("kills", "--kills", "40", "--seed", "3", "--where", str(quick_disk))

    assert "40 kills of 2 ranks" in output
    assert "0 failures" in output


@pytest.mark.parametrize(
    "code", [CODES[0], *(pytest.param(code, marks=pytest.mark.nightly) for code in CODES[1:])], ids=errno.errorcode.get
)
def test_a_disk_that_fails_at_any_call_on_any_rank_costs_no_checkpoint_and_is_named_on_all(quick_disk, code):
    result = run_io_errors(quick_disk, size=2, codes=(code,), report=print)

    assert result.failures == ()
    assert set(result.outcomes) == {"named", "saved"}
    assert result.outcomes["named"] > 2 * result.outcomes["saved"]


def test_damage_to_any_file_is_found_or_has_changed_nothing(quick_disk):
    result = run_damage(quick_disk, 400, 1, size=2, report=print)

    assert result.failures == ()
    assert result.found.total() + result.harmless.total() == 400
    assert result.harmless.total() < 5
    assert len(result.found) == 10
