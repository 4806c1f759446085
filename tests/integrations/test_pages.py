"""The pages and the examples of the adapters run: ``make frameworks``."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.dist, pytest.mark.nightly]


def needing(framework: str, path: str):
    is_missing = importlib.util.find_spec(framework) is None
    reason = f"{framework} is not installed: make frameworks installs it"
    return pytest.param(ROOT / path, marks=pytest.mark.skipif(is_missing, reason=reason), id=path)


def run(command: list[str], folder: Path) -> str:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests/ranks")))  # the second one has the shim for Megatron
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PAGES = [
    needing("lightning", "docs/lightning.md"),
    needing("accelerate", "docs/hugging-face.md"),
    needing("megatron", "docs/megatron-core.md"),
]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_blocks_of_a_page_run_from_top_to_bottom(page, tmp_path):
    (tmp_path / "page.py").write_text("\n".join(PYTHON_BLOCK.findall(page.read_text())))

    run(["page.py"], tmp_path)


EXAMPLES = [
    needing("lightning", "examples/lightning_trainer.py"),
    needing("accelerate", "examples/hugging_face_trainer.py"),
    needing("megatron", "examples/megatron_loop.py"),
    needing("megatron", "examples/megatron_tensor_parallel.py"),
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_on_its_ranks_and_takes_less_than_75_lines(example, tmp_path):
    shim = [str(Path(__file__).parent / "megatron_on_cpu.py")] if example.name.startswith("megatron_") else []
    num_ranks = "4" if example.name == "megatron_tensor_parallel.py" else "2"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, *shim]
    shown = run([*launcher, str(example), str(tmp_path)], tmp_path)

    assert "the same weights, bit by bit: True" in shown
    assert len(example.read_text().splitlines()) < 75
