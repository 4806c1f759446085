"""``python -m peers``: measure cell by cell, write what is there after each, and print tables."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from peers import cells, machine
from peers.options import read_options
from peers.result import write_json
from peers.tables import tables


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 when a cell failed, or systems did not compute the same."""
    options = read_options(arguments)
    result: dict[str, Any] = {
        "name": options.name,
        "command": shlex.join(["make", "bench", f"BENCH={shlex.join(arguments)}"]),
        **machine.facts(),
        "settings": cells.settings(options),
        "cells": [],
        "memory": [],
        "hooks": [],
        "problems": [],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = [Path(options.folder / f"{options.name}.{ending}") for ending in ("json", "md")]
    for _ in cells.measure(options, result):
        write_json(paths[0], result)
        paths[1].write_text(tables(result), encoding="utf-8")
    print(tables(result))
    print("\n".join(f"wrote {path}" for path in paths))
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
