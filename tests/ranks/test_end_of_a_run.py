"""A rank whose program ends with an exception ends at once, whatever the others are in, also in a collective of their own.

Its traceback is on the screen then, and the others end when their back-end sees the closed connection.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

PROGRAM = Path(__file__).with_name("ends_with_an_exception.py")
LIMIT_S = 30.0  # from the exception on: on a slow machine two interpreters with torch take longer to start
PLACES = ["forward", "between", "backward", "after backward", "after step"]
WAYS = ["bare", "detach", "block", "destroy", "dropped", "caught"]


def _cases():
    by_day = {
        ("between", "block", "all_reduce", "small"),
        ("after backward", "detach", "reduce_scatter", "large"),
        ("after backward", "caught", "reduce_scatter", "small"),
    }
    for place in PLACES:
        for way in WAYS:
            for mode in ("all_reduce", "reduce_scatter"):
                for size in ("small", "large"):
                    if mode == "all_reduce" and place == "after backward":
                        continue  # backward waits for the other rank, which waits for this one: a deadlock of the program
                    marks = () if (place, way, mode, size) in by_day else pytest.mark.nightly
                    yield pytest.param(place, way, mode, size, marks=marks)


@pytest.mark.parametrize(("place", "way", "mode", "size"), list(_cases()))
def test_an_exception_ends_the_program_while_the_other_rank_is_in_a_collective_of_its_own(place, way, mode, size, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        places = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in places.items()}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, str(PROGRAM), place, way, mode, size]
        with (tmp_path / f"rank-{rank}").open("w") as said:
            ranks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT))
    try:
        while ranks[1].poll() is None and "fails now" not in (tmp_path / "rank-1").read_text():
            time.sleep(0.1)
        deadline_s = time.monotonic() + LIMIT_S
        codes = [process.wait(max(deadline_s - time.monotonic(), 0.1)) for process in reversed(ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()

    assert codes == [1, 1]
    other, failed = ((tmp_path / f"rank-{rank}").read_text() for rank in range(2))
    assert "the program has failed" in failed
    assert "Traceback" in other
