"""Runs a program of this folder on real ranks, once for all tests of a file, and returns what its first rank has said."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., dict[str, Any]]:
    def run(program: str, folder: Path, *, ranks: int | None = None) -> dict[str, Any]:
        """Start ``ranks`` processes with torchrun, or one that starts its own."""
        torchrun = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path),
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, *torchrun, str(HERE / program), str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (said,) = (line for line in done.stdout.splitlines() if line.startswith("SAID "))
        return dict(json.loads(said.removeprefix("SAID ")))

    return run
