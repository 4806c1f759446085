"""Training over two hosts, which are namespaces: bytes on the link between them, and hosts that go away without a word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megabucket.checkpoint.stored import open_checkpoint
from megabucket.comm.samehost import LEAST_BYTES

from .measured import BUCKET_NUMEL
from .namespaces import INTERFACE, Host, Traffic, two_hosts, why_not

pytestmark = [pytest.mark.nightly, pytest.mark.dist, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}
LIMIT_S = 540.0  # of one run of four ranks, on a machine with a load of 50 for each core

NUM_LOCAL = 2
STEPS, EVERY_STEPS, LOST_AFTER_STEPS = 20, 4, 6
SLOW_MBIT = 100.0
"""The gradients of a step take 0.4 s, so that a run does not end before its host is lost."""

HEARTBEAT_S, DEAD_AFTER_S = 0.5, 4.0
SLACK_S = 2.0
"""The store is asked a few times a second, and the text has to reach this process."""


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made() -> None:
    if problem := why_not():
        pytest.skip(problem)


def torchrun(host: Host, node: int, store: Host, output: Path, *program: str) -> subprocess.Popen[bytes]:
    """Start the agent of one host, with ``NUM_LOCAL`` ranks."""
    options = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", store.address, "--master-port", "29500"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(NUM_LOCAL), *program]
    return host.start(command, output, **ENVIRONMENT)


def await_that(condition: Callable[[], bool], what: str, output: Path, limit_s: float = LIMIT_S) -> float:
    """Return the seconds until the condition holds."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < limit_s, f"not after {limit_s:g} s: {what}\n{output.read_text()[-5000:]}"
        time.sleep(0.02)
    return time.monotonic() - started_s


# Bytes on the link #


def test_the_link_carries_each_gradient_once_and_what_stays_inside_a_host_is_copied(tmp_path):
    num_steps, rate_mbit = 10, 400.0
    started_s = time.monotonic()
    with two_hosts(rate_mbit) as hosts:
        program = ("-m", "hosts.measured", str(tmp_path), str(num_steps))
        agents = [torchrun(host, node, hosts[0], tmp_path / host.name, *program) for node, host in enumerate(hosts)]
        codes = [agent.wait(LIMIT_S) for agent in agents]
    assert codes == [0, 0], "".join((tmp_path / host.name).read_text() for host in hosts)
    print(f"{time.monotonic() - started_s:.1f} s in all")

    for host in hosts:
        counted = json.loads((tmp_path / f"{host.name}.json").read_text())
        by_host, one_group = counted["by host"], counted["one group"]
        link, loopback = (Traffic(*by_host["steps"][interface]) for interface in (INTERFACE, "lo"))
        idle, flat = Traffic(*by_host["idle"][INTERFACE]), Traffic(*one_group["steps"][INTERFACE])
        # docs/memory.md, bytes per parameter of a rank, here with 4 for a gradient and 4 for a parameter: (g + p) (n - 1) / n
        # among the n ranks of a host, and an all-reduce of the shard over r replicas, 2 g / n * (r - 1) / r.
        of_host_numel = num_steps * NUM_LOCAL * sum(by_host["bucket_numels"])
        across_bytes = of_host_numel * 2 * 4 / NUM_LOCAL * (2 - 1) / 2
        inside_bytes = of_host_numel * (4 + 4) * (NUM_LOCAL - 1) / NUM_LOCAL
        too_small = sum(numel for numel in by_host["bucket_numels"] if 4 * numel < LEAST_BYTES) / sum(by_host["bucket_numels"])
        print(
            f"{host.name} sent {link.sent_payload_bytes:,} bytes in {num_steps} steps, formula {across_bytes:,.0f} "
            f"({link.sent_payload_bytes / across_bytes - 1:+.2%}; with headers {link.sent_bytes:,}). A step took "
            f"{by_host['step_s']:.3f} s; the link alone takes {8e-6 * across_bytes / num_steps / rate_mbit:.3f} s"
        )
        print(f"  heartbeats, store and agents: {idle.sent_bytes / by_host['idle_s']:,.0f} bytes/s")
        print(
            f"  over the loopback interface {loopback.sent_payload_bytes:,} bytes; {inside_bytes:,.0f} without copies, "
            f"{too_small:.1%} of it in buckets too small to be copied"
        )
        print(f"  with shards over all ranks {flat.sent_payload_bytes:,} bytes and {one_group['step_s']:.3f} s a step")

        assert abs(link.sent_payload_bytes / across_bytes - 1) < 0.03
        assert 0 < too_small < 0.1
        assert loopback.sent_payload_bytes < (too_small + 0.02) * inside_bytes
        assert flat.sent_payload_bytes > 1.5 * link.sent_payload_bytes
        assert idle.sent_bytes / by_host["idle_s"] < 5_000


# Hosts that go away #


class Run(NamedTuple):
    """The files of one run of the demo, in a directory."""

    directory: Path

    @property
    def folder(self) -> Path:
        """Of its checkpoints."""
        return self.directory / "run"

    def arguments(self, *, num_hosts: int, dead_after_s: float = DEAD_AFTER_S) -> list[str]:
        """Return the command line of a rank: shards inside a host, replicas across, and always the same windows in a step."""
        overrides = {
            "num_distributed_optimizer_instances": num_hosts,
            "ddp.bucket_size": BUCKET_NUMEL,
            "ddp.heartbeat_s": HEARTBEAT_S,
            "ddp.dead_after_s": dead_after_s,
            "train.steps": STEPS,
            "train.microbatch_size": 4,
            "train.num_microbatches": 2 // num_hosts,
            "train.eval_batches": 2 // num_hosts,
            "train.log_path": self.directory / "log.jsonl",
            "checkpoint.folder": self.folder,
            "checkpoint.every_steps": EVERY_STEPS,
        }
        config = ["-m", "examples.bytegpt", "-c", str(ROOT / "configs" / "bytegpt.yaml"), "--resume", "auto"]
        return [*config, *(f"{name}={value}" for name, value in overrides.items())]

    def on_one_host(self) -> list[str]:
        """Return the command that starts or resumes it on one host."""
        options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(NUM_LOCAL)]
        return [sys.executable, "-m", "torch.distributed.run", *options, *self.arguments(num_hosts=1)]

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return the objects of one kind in the log."""
        path = self.directory / "log.jsonl"
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
        return [line for line in map(json.loads, whole) if line["kind"] == kind]

    def norms(self) -> dict[int, float]:
        """Return the norm of the whole gradient by step; the last one of a step that ran twice."""
        return {line["step"]: line["grad_norm"] for line in self.log("step")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on two ranks of this machine, without hosts and without a break."""
    run = Run(tmp_path_factory.mktemp("straight"))
    environment = os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
    started_s = time.monotonic()
    done = subprocess.run(run.on_one_host(), env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    print(f"\nstraight run on two ranks: {time.monotonic() - started_s:.1f} s")
    return run


def train_until_a_host_is_lost(
    run: Run, hosts: Sequence[Host], lost: Host, *, is_silent: bool, dead_after_s: float = DEAD_AFTER_S
) -> list[str]:
    """Start on both hosts, lose one, and return the errors of the ranks on the other one when its agent has ended.

    Args:
        is_silent: the link is cut first, so that no connection is reset; else the network of the lost host answers.
    """
    started_s = time.monotonic()
    arguments = run.arguments(num_hosts=2, dead_after_s=dead_after_s)
    agents = [torchrun(host, node, hosts[0], run.directory / host.name, *arguments) for node, host in enumerate(hosts)]
    (left,) = (host for host in hosts if host is not lost)
    agent, output = agents[hosts.index(left)], run.directory / left.name
    await_that(lambda: len(run.log("step")) >= LOST_AFTER_STEPS, "steps", output)
    print(f"\n{lost.name} is lost {time.monotonic() - started_s:.1f} s after the start, in step {len(run.log('step')) + 1}")

    if is_silent:
        lost.unplug()
    lost.kill_all()
    lost_s = time.monotonic()
    await_that(lambda: "error: " in output.read_text(), "an error", output)
    named_s = time.monotonic() - lost_s
    assert agent.wait(LIMIT_S) == 1
    said = output.read_text()
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    print(f"named after {named_s:.1f} s (dead_after_s={dead_after_s:g}); agent ended after {time.monotonic() - lost_s:.1f} s")
    print(*(error.partition(". The process group")[0] for error in errors), sep="\n")
    # The wait that notices the loss begins up to a step after it.
    step_s = max(line["step_s"] for line in run.log("step"))
    assert named_s <= min(DEAD_AFTER_S, dead_after_s) + step_s + SLACK_S
    assert "exitcode  : 5 " in said  # in torchrun's report: a peer was lost
    return errors


def check_names(error: str, state: str, host: Host) -> None:
    """Check that ranks of the second host are named, those in the group of the collective that was waited for, and the host."""
    ranks = re.findall(rf"rank (\d+) {re.escape(state)}", error)
    assert ranks
    assert set(ranks) <= {"2", "3"}
    assert error.count(f", on {host.name}") == len(ranks)


def resume(run: Run, host: Host, straight: Run) -> None:
    """Resume on one host and compare with the straight run."""
    num_done, started_s, output = len(run.log("step")), time.monotonic(), run.directory / "resumed"
    agent = host.start(run.on_one_host(), output, **ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"})
    first_s = await_that(lambda: len(run.log("step")) > num_done, "a step", output)
    assert agent.wait(LIMIT_S) == 0, output.read_text()
    (resumed,) = run.log("resume")
    norms, expected = run.norms(), straight.norms()
    off = max(abs(norms[step] / expected[step] - 1) for step in expected)
    (bits,), (expected_bits,) = ([line["held_out_bits_after"] for line in each.log("summary")] for each in (run, straight))
    print(
        f"resumed on {host.name} at step {resumed['step']}: {first_s:.1f} s to its first step, "
        f"{time.monotonic() - started_s:.1f} s to the end. Held-out bits per byte {bits:.6f}, straight {expected_bits:.6f}; "
        f"largest relative difference of the norm of a step {off:.1e}"
    )

    assert resumed["saved_by_ranks"] == 2 * NUM_LOCAL
    assert resumed["step"] >= LOST_AFTER_STEPS // EVERY_STEPS * EVERY_STEPS
    assert sorted(norms) == list(range(STEPS))
    # Sums of four ranks and of two are rounded in another order.
    assert bits == pytest.approx(expected_bits, abs=1e-4)
    assert off < 1e-3
    assert open_checkpoint(run.folder).step == STEPS


def test_a_host_that_goes_away_is_named_and_the_other_one_resumes(tmp_path, straight):
    run = Run(tmp_path)
    with two_hosts(SLOW_MBIT) as (alpha, beta):
        errors = train_until_a_host_is_lost(run, (alpha, beta), beta, is_silent=True)

        for error in errors:
            check_names(error, "froze: no sign of life for 4 s; last seen in ", beta)
        resume(run, alpha, straight)


def test_the_host_of_the_store_is_named_when_it_goes_away_and_the_other_one_resumes(tmp_path, straight):
    run = Run(tmp_path)
    with two_hosts(SLOW_MBIT) as (alpha, beta):
        errors = train_until_a_host_is_lost(run, (alpha, beta), alpha, is_silent=True)

        for error in errors:
            assert f"the store of the process group has not answered for 4 s: its host {alpha.address} may be gone" in error
        resume(run, beta, straight)


def test_a_host_whose_processes_are_killed_is_named_before_its_silence_is_long_enough(tmp_path):
    with two_hosts(SLOW_MBIT) as (alpha, beta):
        errors = train_until_a_host_is_lost(Run(tmp_path), (alpha, beta), beta, is_silent=False, dead_after_s=60.0)

    for error in errors:
        check_names(error, "went away: no sign of life for ", beta)
