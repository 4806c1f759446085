"""The installed command finds modules in its working directory, as ``python -m megabucket`` does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = """
import torch


def build():
    return torch.nn.Linear(3, 5)
"""
# What pip writes for the entry point. Python puts its folder in front of the module search path, not the working directory.
COMMAND = """
import sys
from megabucket.cli.main import app
sys.exit(app())
"""


def test_a_model_of_a_file_in_the_working_directory_is_planned(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "megabucket").write_text(COMMAND)
    (tmp_path / "mymodel.py").write_text(MODEL)

    done = subprocess.run(
        [sys.executable, tmp_path / "bin" / "megabucket", "plan", "-c", "mymodel:build", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert '"weight"' in done.stdout
