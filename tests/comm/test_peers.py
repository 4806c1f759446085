"""Looking at processes of this host: alive, stopped, dead, somebody else by now, out of sight."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megabucket.comm.liveness import ProcessState, identify_this_process, look_at

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def state_soon(identity, state):
    """Wait for a state, because signals take effect a little later."""
    deadline_s = time.monotonic() + 10
    while (seen := look_at(identity, from_space=identity.pid_space)) is not state and time.monotonic() < deadline_s:
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
    assert look_at(here, from_space=here.pid_space) is ProcessState.RUNNING


def test_another_process_runs_stops_and_goes_on(other):
    process, identity = other

    assert look_at(identity, from_space=identity.pid_space) is ProcessState.RUNNING
    process.send_signal(signal.SIGSTOP)
    assert state_soon(identity, ProcessState.STOPPED) is ProcessState.STOPPED
    process.send_signal(signal.SIGCONT)
    assert state_soon(identity, ProcessState.RUNNING) is ProcessState.RUNNING


def test_a_process_is_dead_before_and_after_its_parent_has_read_its_exit_code(other):
    process, identity = other

    process.kill()
    assert state_soon(identity, ProcessState.DEAD) is ProcessState.DEAD
    process.wait()
    assert look_at(identity, from_space=identity.pid_space) is ProcessState.DEAD


def test_a_process_that_has_the_id_of_a_dead_one_is_somebody_else():
    here = identify_this_process()

    assert look_at(here._replace(start_ticks=here.start_ticks - 1), from_space=here.pid_space) is ProcessState.DEAD


@pytest.mark.parametrize("space", ["another host", ""])
def test_a_process_elsewhere_is_out_of_sight(space):
    here = identify_this_process()

    assert look_at(here._replace(pid_space=space), from_space=here.pid_space) is ProcessState.UNKNOWN
    assert look_at(here, from_space=space) is ProcessState.UNKNOWN
