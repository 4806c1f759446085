"""The demo on real ranks, each a process of ours, forked from one that has torch loaded: starting costs little."""

import multiprocessing
import os
import signal
import socket
import sys
import warnings
from pathlib import Path

import torch

from examples.bytegpt.__main__ import app
from examples.bytegpt.steps import StepLoop

LIMIT_S = 150


class Job:
    """One run.

    Args:
        said: a directory for what the ranks print.
        acts: signal, rank, step: that rank gives itself that signal when the step begins.
    """

    def __init__(self, arguments, said, *, num_ranks=2, acts=None, warnings_are_errors=False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        said.mkdir()
        self._said = [(said / f"rank-{rank}.out", said / f"rank-{rank}.err") for rank in range(num_ranks)]
        self.processes = [
            context.Process(
                target=_rank, args=(arguments, rank, num_ranks, port, paths, acts, warnings_are_errors), daemon=True
            )
            for rank, paths in enumerate(self._said)
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
        """Exit codes (negative: killed by that signal), and what each rank has said: its results, then its talk."""
        for process in self.processes:
            process.join(LIMIT_S)
        return [process.exitcode for process in self.processes], [out + err for out, err in self.printed()]

    def printed(self):
        """Return what each rank has written to stdout and to stderr."""
        return [(out.read_text(), err.read_text()) for out, err in self._said]


def _rank(arguments, rank, num_ranks, port, said, acts, warnings_are_errors):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    if warnings_are_errors:
        warnings.simplefilter("error")
    sys.stdout, sys.stderr = (_opened(path, descriptor) for path, descriptor in zip(said, (1, 2), strict=True))
    if acts is not None and acts[1] == rank:
        _act(signal.Signals[acts[0]], at=acts[2])
    app(arguments)


def _opened(path: Path, descriptor: int):
    """Return the file to print into; code that knows the descriptor only prints there, too."""
    file = path.open("w", buffering=1)
    os.dup2(file.fileno(), descriptor)
    return file


def _act(number, *, at):
    run_step = StepLoop._run_step

    def act_and_run(loop, step):
        if step == at:
            os.kill(os.getpid(), number)
        return run_step(loop, step)

    StepLoop._run_step = act_and_run
