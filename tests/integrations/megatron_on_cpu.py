"""Runs a program of Megatron's on a CPU, where its schedule asks CUDA for a few things: ``tests/ranks/megatron_side.py``."""

import runpy
import sys

from megatron_side import on_cpu

if __name__ == "__main__":
    del sys.argv[0]
    with on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
