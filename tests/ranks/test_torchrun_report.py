"""What the report of torchrun says when a rank fails or is killed: docs/more-than-one-machine.md promises it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("loses_a_rank.py"))
LIMIT_S = 200
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]


def started(command: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def report_of(agent: subprocess.Popen[str]) -> dict[int | str, str]:
    """Return what the report has about each failed rank, and about the root cause."""
    try:
        _, said = agent.communicate(timeout=LIMIT_S)
    finally:
        agent.terminate()  # which ends its ranks
        agent.wait()
    assert agent.returncode == 1, said
    report = re.search(r"^=+\n.* FAILED\n.*", said, re.MULTILINE | re.DOTALL)
    assert report is not None, said
    sections = re.split(r"^\[\d+\]:\n", report[0], flags=re.MULTILINE)[1:]
    by_rank: dict[int | str, str] = {int(re.search(r"rank +: (\d+)", section)[1]): section for section in sections}
    return by_rank | {"root cause": sections[-1]}


def test_a_killed_rank_is_the_root_cause_and_the_other_has_hardly_time_to_name_it():
    report = report_of(started([*ALONE, PROGRAM, "1", "killed"]))

    assert report["root cause"] == report[1]
    assert "Signal 9 (SIGKILL)" in report[1]
    assert "Signal 15 (SIGTERM)" in report[0] or "PeerLostError: rank 1 died" in report[0]


def test_an_exception_is_in_the_report_with_its_text():
    report = report_of(started([*ALONE, PROGRAM, "1", "raises"]))

    # Rank 0 says PeerFailedError with the text of rank 1, if it comes to it; one of the two is first.
    assert "ValueError: this batch is bad" in report["root cause"]
    assert "rank 1" in report["root cause"] or report["root cause"] == report[1]


def test_ranks_of_another_host_name_the_lost_one_in_the_report_of_theirs():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    store = ["--master-addr", "127.0.0.1", "--master-port", port]
    both = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *store]
    hosts = [started([*both, "--node-rank", node, PROGRAM, "1", "killed"]) for node in ("0", "1")]

    of_survivor, of_lost = map(report_of, hosts)

    assert "Signal 9 (SIGKILL)" in of_lost["root cause"]
    assert "megabucket.errors.PeerLostError: rank 1 died" in of_survivor["root cause"]


def processes_of(agent: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process of each rank that the agent has started, by rank."""
    found = {}
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(one.removeprefix(b"RANK=")): int(child) for one in variables if one.startswith(b"RANK=")}
    return found


def test_the_demo_survives_sigterm_for_long_enough_to_name_a_killed_rank(tmp_path):
    log = tmp_path / "log.jsonl"
    saving = [f"train.log_path={log}", f"checkpoint.folder={tmp_path / 'run'}"]
    agent = started([*ALONE, "-m", "examples.bytegpt", "train.eval_batches=1", *saving])
    limit = time.monotonic() + LIMIT_S
    while not (log.exists() and '"step": 2' in log.read_text()):
        assert agent.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)

    os.kill(processes_of(agent)[1], signal.SIGKILL)
    report = report_of(agent)

    assert report["root cause"] == report[1]
    assert "Signal 9 (SIGKILL)" in report[1]
    assert "PeerLostError: rank 1 died" in report[0]
    assert "exitcode  : 5 " in report[0]


def test_an_error_of_a_command_is_in_the_report_with_its_text(tmp_path):
    report = report_of(started([*ALONE, "-m", "examples.bytegpt", f"data.corpus={tmp_path / 'nowhere'}"]))

    assert "CorpusError: " in report["root cause"]
    assert str(tmp_path / "nowhere") in report["root cause"]
