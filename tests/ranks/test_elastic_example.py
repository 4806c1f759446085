"""``examples/elastic.py``: a rank is killed in step 7, torchrun starts both ranks again, and nothing shows in the result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pool import Rank

import megabucket as mb
from megabucket.checkpoint.offline import compare

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def train_without_a_stop(rank: Rank, root: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from elastic import train
    finally:
        sys.path.remove(str(EXAMPLES))
    train(root, group=rank.group)


@pytest.mark.nightly
def test_a_run_that_torchrun_starts_again_ends_as_one_that_was_not_interrupted(pool, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, *launcher, str(EXAMPLES / "elastic.py"), str(tmp_path / "broken"), "7"]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    pool.run(train_without_a_stop, str(tmp_path / "whole"), ranks=2)

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} begins at step {step}" for rank in (0, 1) for step in (0, 6)]
    found = compare(mb.open_checkpoint(tmp_path / "broken", 12), mb.open_checkpoint(tmp_path / "whole", 12))
    # Nobody has seeded the other generators, which each process begins with numbers of its own.
    assert [one for one in (*found.tensors, *found.values) if "python" not in one.name and "numpy" not in one.name] == []
    assert found.num_equal_tensors > 12
