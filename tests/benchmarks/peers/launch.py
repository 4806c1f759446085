"""Starts the ranks of a job with torchrun and returns what the first one wrote. A failed job shows its last lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.options import ROOT

SHOWN_LINES = 40
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # of glibc


class JobFailedError(RuntimeError):
    """The ranks of a job ended with an error, or did not end in time."""


def run_job(job: dict[str, Any], *, ranks: int, timeout_s: float, has_plain_heap: bool = True) -> dict[str, Any]:
    """Return the result of a job.

    Args:
        has_plain_heap: whether memory is managed as usual. Otherwise what is freed is given back, so that what is resident is
            what is alive.

    Raises:
        JobFailedError: the ranks failed; the text holds the end of what they printed.
    """
    with tempfile.TemporaryDirectory(prefix="megabucket-bench-") as folder:
        question, answer, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        question.write_text(json.dumps(job))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("-m", "peers.rank", str(question), str(answer)),
        ]
        with log.open("w") as out:
            # A session of its own: whatever the ranks have started ends with them.
            process = subprocess.Popen(
                command,
                env=environment() | ({} if has_plain_heap else GIVES_BACK),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = f"nothing within {timeout_s:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code != 0 or not answer.exists():
            raise JobFailedError(f"the ranks of {job} ended with {code}:\n{last_lines(log.read_text(errors='replace'))}")
        return json.loads(answer.read_text())


def last_lines(log: str) -> str:
    """Return what ranks said last, without what torchrun says about it."""
    lines = [line for line in log.splitlines() if "SyncActivityProfilerHandler" not in line]
    ends = [number for number, line in enumerate(lines) if "failed (exitcode" in line]
    return "\n".join([*lines[: ends[0] if ends else len(lines)][-SHOWN_LINES:], *(lines[number] for number in ends)])


def environment() -> dict[str, str]:
    """Return the ranks' environment: one thread each, DeepSpeed on the CPU, and this package where they find it."""
    paths = [str(Path(__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "bench" / "extensions"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
