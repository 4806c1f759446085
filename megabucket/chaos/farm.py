"""Runs many cells on a few supervisors, each of which runs one cell at a time."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from megabucket.chaos.cell import Cell
from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.soak_plan import SoakPlan


class _Supervisor:
    """A supervisor process seen from outside."""

    def __init__(self) -> None:
        # In a session of its own: Ctrl-C is for this process, which then ends the supervisors, and they their ranks.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megabucket.chaos.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def answers(self) -> IO[str]:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        return self._process.stdout

    def start(self, cell: Cell, *, time_limit_s: float, soak: SoakPlan | None = None) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        task = {"cell": cell.to_dict(), "time_limit_s": time_limit_s, "soak": soak.to_dict() if soak else None}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"a supervisor of chaos has ended with exit code {self._process.wait()}; see its stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run_cells(cells: Sequence[Cell], *, num_jobs: int, time_limit_s: float) -> Iterator[CellRun]:
    """Run cells and yield what was seen, in the order in which they end.

    Args:
        num_jobs: how many cells run at the same time.
        time_limit_s: for each cell.

    Raises:
        RuntimeError: a supervisor ended, which is a bug of the harness.
    """
    waiting = list(reversed(cells))
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(min(num_jobs, len(cells))):
            supervisor = _Supervisor()
            stack.callback(supervisor.close)
            supervisor.start(waiting.pop(), time_limit_s=time_limit_s)
            selector.register(supervisor.answers, selectors.EVENT_READ, supervisor)
        while selector.get_map():
            for key, _ in selector.select():
                supervisor = key.data
                yield CellRun.from_dict(supervisor.read()["run"])
                if waiting:
                    supervisor.start(waiting.pop(), time_limit_s=time_limit_s)
                else:
                    selector.unregister(key.fileobj)


SoakEvents = Callable[[Mapping[str, Any]], None]
"""Receives each report of each rank."""


def run_soaks(plans: Sequence[tuple[SoakPlan, SoakEvents]], *, time_limits_s: Sequence[float]) -> Iterator[CellRun]:
    """Run soaks one after the other; yield how the processes of each have ended.

    Args:
        time_limits_s: for each soak.

    Raises:
        RuntimeError: the supervisor ended, which is a bug of the harness.
    """
    supervisor = _Supervisor()
    try:
        for (plan, on_event), time_limit_s in zip(plans, time_limits_s, strict=True):
            supervisor.start(Cell("none", "step", plan.combo, plan.seed), time_limit_s=time_limit_s, soak=plan)
            while "run" not in (answer := supervisor.read()):
                on_event(answer["event"])
            yield CellRun.from_dict(answer["run"])
    finally:
        supervisor.close()
