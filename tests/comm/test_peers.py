"""Looking at processes of this host: alive, dead, somebody else by now, out of sight."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megabucket.comm.liveness.observations import identify_this_process, is_gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def is_gone_soon(identity):
    """Wait for a death, because signals take effect a little later."""
    deadline_s = time.monotonic() + 10
    while not (seen := is_gone(identity, from_space=identity.pid_space)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return seen


@pytest.fixture
def other():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        yield process, identify_this_process()._replace(pid=process.pid, start_ticks=int(fields[19]))  # fields 3 to 52
        process.kill()


def test_this_process_runs():
    here = identify_this_process()

    assert here.pid == os.getpid()
    assert not is_gone(here, from_space=here.pid_space)


def test_a_process_is_dead_before_and_after_its_parent_has_read_its_exit_code(other):
    process, identity = other

    process.kill()
    assert is_gone_soon(identity)
    process.wait()
    assert is_gone(identity, from_space=identity.pid_space)


def test_a_process_that_has_the_id_of_a_dead_one_is_somebody_else():
    here = identify_this_process()

    assert is_gone(here._replace(start_ticks=here.start_ticks - 1), from_space=here.pid_space)


@pytest.mark.parametrize("space", ["another host", ""])
def test_a_process_elsewhere_is_out_of_sight(space):
    here = identify_this_process()

    assert not is_gone(here._replace(pid_space=space, start_ticks=0), from_space=here.pid_space)
    assert not is_gone(here._replace(start_ticks=0), from_space=space)
