"""``megabucket train`` on real ranks, each a process of ours, forked from one that has torch loaded: starting costs little."""

import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from megabucket.cli.main import app
from megabucket.training.steps import StepLoop

LIMIT_S = 150


class Job:
    """One run.

    Args:
        said: a directory for what the ranks print.
        acts: signal, rank, step: that rank gives itself that signal when the step begins.
    """

    def __init__(self, arguments, said, *, num_ranks=2, acts=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        said.mkdir()
        self._said = [said / f"rank-{rank}.txt" for rank in range(num_ranks)]
        self.processes = [
            context.Process(target=_rank, args=(arguments, rank, num_ranks, port, path, acts), daemon=True)
            for rank, path in enumerate(self._said)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()

    def signal(self, name):
        """Send a signal to every rank."""
        for process in self.processes:
            os.kill(process.pid, signal.Signals[name])

    def finish(self):
        """Exit codes (negative: killed by that signal), and what each rank has said."""
        for process in self.processes:
            process.join(LIMIT_S)
        return [process.exitcode for process in self.processes], [path.read_text() for path in self._said]


def _rank(arguments, rank, num_ranks, port, said, acts):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    _print_into(said)
    if acts is not None and acts[1] == rank:
        _act(signal.Signals[acts[0]], at=acts[2])
    app(["train", *arguments])


def _print_into(said: Path):
    file = said.open("w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file


def _act(number, *, at):
    run_step = StepLoop._run_step

    def act_and_run(loop, step):
        if step == at:
            os.kill(os.getpid(), number)
        return run_step(loop, step)

    StepLoop._run_step = act_and_run
