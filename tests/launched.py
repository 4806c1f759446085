"""Programs on real ranks, as torchrun starts them, but forked from a process that has torch loaded: starting costs little.

What torchrun itself does, and the end of an interpreter, are not part of that.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import torch

LIMIT_S = 150


class Launched:
    """Ranks that each call ``main(*arguments)``.

    Args:
        said: a directory for what the ranks print.
    """

    def __init__(self, main, arguments, said, *, num_ranks=2, warnings_are_errors=False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        said.mkdir()
        self._said = [(said / f"rank-{rank}.out", said / f"rank-{rank}.err") for rank in range(num_ranks)]
        self.processes = [
            context.Process(
                target=_rank, args=(main, arguments, rank, num_ranks, port, paths, warnings_are_errors), daemon=True
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


def run_launched(main, arguments, said, **options):
    """Run ``main(*arguments)`` on ranks to the end; return what a torchrun would: the worst exit code and all that was said."""
    with Launched(main, arguments, said, **options) as ranks:
        codes, _ = ranks.finish()
        out, err = map("".join, zip(*ranks.printed(), strict=True))
    assert None not in codes, f"no end after {LIMIT_S} s, exit codes {codes}: {out}{err}"
    return subprocess.CompletedProcess(arguments, max(codes, key=abs), out, err)


def torchrun(*arguments):
    """Run ``torchrun arguments`` on two ranks to the end; warnings are errors in them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, arguments)]
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def run_script(script, directory, *arguments):
    """Be ``python script arguments``, called in that directory; a ``main`` for ranks."""
    os.chdir(directory)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(str(script), run_name="__main__")


def _rank(main, arguments, rank, num_ranks, port, said, warnings_are_errors):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    if warnings_are_errors:
        warnings.simplefilter("error")
    sys.stdout, sys.stderr = (_opened(path, descriptor) for path, descriptor in zip(said, (1, 2), strict=True))
    main(*arguments)


def _opened(path, descriptor):
    """Return the file to print into; code that knows the descriptor only prints there, too."""
    file = path.open("w", buffering=1)
    os.dup2(file.fileno(), descriptor)
    return file
