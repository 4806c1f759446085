"""Ranks of the loopback world are threads of one process, so one must not hold what another waits for."""

import subprocess
import sys

import pytest

# While the first rank collects garbage the other one runs, as when a large tensor is freed.
PROGRAM = """
import gc, sys, threading, time, torch
from megabucket.checkpoint.values import capture_rng
from megabucket.optim.update_kind import find_update_kind
from megabucket.testing import LoopbackWorld

sgd = type("Mine", (torch.optim.SGD,), {})([torch.nn.Parameter(torch.ones(3))], lr=0.1)  # is tried
read = {"a checkpoint": lambda: capture_rng(torch.device("cpu")), "a trial": lambda: find_update_kind(sgd)}[sys.argv[1]]

has_ended = threading.Event()

def program(rank):
    if rank == 1:
        while not has_ended.is_set():
            read()
    else:
        for attempt in range(6):
            kept = [[] for _ in range(attempt % 3)]  # so garbage is collected in another place each time
            read()
        has_ended.set()

def let_the_other_run(*_):
    caller = sys._getframe().f_back
    if caller is not None and caller.f_code.co_name in ("get_rng_state", "capture_rng", "_same_random_numbers"):
        if threading.current_thread().name == "loopback-rank-0":
            time.sleep(0.01)

gc.callbacks.append(let_the_other_run)
gc.set_threshold(1)
LoopbackWorld(2, timeout_s=60).run(program)
"""


@pytest.mark.parametrize("what", ["a checkpoint", pytest.param("a trial", marks=pytest.mark.nightly)])
def test_two_that_read_the_random_numbers_of_torch_do_not_wait_for_ever(what):
    # A process of its own: threads that wait with Python's lock in hand would stop this one, too.
    subprocess.run([sys.executable, "-c", PROGRAM, what], check=True, timeout=60)
