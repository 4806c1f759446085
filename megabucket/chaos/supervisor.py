"""Runs cells: forks a store and the ranks, reads what they report, sends signals they ask for, and ends what does not end.

A process of its own (``python -m megabucket.chaos.supervisor``) that imports torch once and has a single thread, so that forked
ranks start within milliseconds. Takes tasks as JSON lines on stdin and answers with JSON lines on stdout.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from torch._C._distributed_c10d import TCPStore

from megabucket.chaos import rank
from megabucket.chaos.cell import Cell
from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.kinds import kind_named
from megabucket.chaos.soak_plan import SoakPlan

_IMPORTED_LATE: Final = (
    "torch._dynamo",
    "torch.distributed.nn.functional",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch.profiler",
)
"""What torch imports when a module is first wrapped or an optimizer made: seconds, which every forked rank would need."""

_TICK_S: Final = 0.02
_STACKS_BEFORE_LIMIT_S: Final = 1.0
_LOG_BYTES: Final = 6_000
_STORE_RANK: Final = -1
_JOIN_LIMIT_S: Final = 8.0
_NUM_TRIES: Final = 4

OnEvent = Callable[[Mapping[str, Any]], None]
"""Receives the reports of ranks as they arrive."""


@dataclass
class _Process:
    """A forked process as its supervisor sees it."""

    rank: int
    pid: int
    reports: int
    log: int
    buffer: bytes = b""
    exit_code: int | None = None
    is_done: bool = False


@dataclass
class _Watch:
    """The state of one running cell."""

    cell: Cell
    processes: list[_Process]
    store_pid: int
    started_s: float
    deadline_s: float
    on_event: OnEvent
    signals: list[tuple[float, int, int]] = field(default_factory=list)  # when, to which rank, which
    killed: list[int] = field(default_factory=list)
    has_asked_for_stacks: bool = False
    timed_out: bool = False
    num_joined: int = 0

    def run(self) -> None:
        """Watch until every rank is done or gone, or the time is over."""
        lost = set(kind_named(self.cell.kind).fault(self.cell).expect().lost)
        while any(not one.is_done and one.exit_code is None and one.rank not in lost for one in self.processes):
            self._read()
            self._reap()
            self._send_signals()
            now_s = time.monotonic()
            if now_s > self.deadline_s:
                self.timed_out = True
                return
            if now_s > self.started_s + _JOIN_LIMIT_S and self.num_joined < len(self.processes):
                return

    def _read(self) -> None:
        open_processes = [one for one in self.processes if one.reports >= 0]
        ready, _, _ = select.select([one.reports for one in open_processes], [], [], _TICK_S)
        for one in open_processes:
            if one.reports not in ready:
                continue
            chunk = os.read(one.reports, 1 << 16)
            if not chunk:
                os.close(one.reports)
                one.reports = -1
            *lines, one.buffer = (one.buffer + chunk).split(b"\n")
            for line in lines:
                self._receive(one, json.loads(line))

    def _receive(self, process: _Process, event: Mapping[str, Any]) -> None:
        if event["kind"] == "done":
            process.is_done = True
            return
        if event["kind"] == "joined":
            self.num_joined += 1
        if event["kind"] == "ask":
            self.signals.append((time.monotonic() + event["after_s"], event["rank"], event["signal"]))
        else:
            self.on_event(event)

    def _reap(self) -> None:
        for one in self.processes:
            if one.exit_code is None:
                pid, status = os.waitpid(one.pid, os.WNOHANG)
                if pid:
                    one.exit_code = os.waitstatus_to_exitcode(status)

    def _send_signals(self) -> None:
        now_s = time.monotonic()
        due = [one for one in self.signals if one[0] <= now_s]
        self.signals = [one for one in self.signals if one[0] > now_s]
        for _, to, number in due:
            self.on_event({"kind": "signal", "rank": to, "signal": number, "at_s": time.monotonic()})
            self._signal(to, number)
        if now_s > self.deadline_s - _STACKS_BEFORE_LIMIT_S and not self.has_asked_for_stacks:
            self.has_asked_for_stacks = True
            for one in self.processes:
                if not one.is_done:
                    self._signal(one.rank, signal.SIGUSR1)

    def _signal(self, to: int, number: int) -> None:
        if to == _STORE_RANK:
            os.kill(self.store_pid, number)
            return
        process = self.processes[to]
        if process.exit_code is None:
            os.kill(process.pid, number)

    def end(self, release: int) -> None:
        """Let the ranks end, and kill those that do not."""
        os.close(release)
        limit_s = time.monotonic() + 1.0
        while time.monotonic() < limit_s and any(one.exit_code is None and one.is_done for one in self.processes):
            self._read()
            self._reap()
        for one in self.processes:
            if one.exit_code is None:
                self.killed.append(one.rank)
                os.kill(one.pid, signal.SIGKILL)
                one.exit_code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
        self._read_rest()

    def _read_rest(self) -> None:
        while any(one.reports >= 0 for one in self.processes):
            self._read()


def run_cell(
    cell: Cell,
    *,
    time_limit_s: float,
    soak: SoakPlan | None = None,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> CellRun:
    """Run one cell and return what was seen; again from the start while the ranks cannot even form a group.

    Args:
        time_limit_s: seconds after which every process of the cell is killed.
        soak: run this many random steps instead of the steps of the cell.
        on_event: receives the reports as they arrive; they are kept for the result if not given.
    """
    num_tries = 0
    while True:
        num_tries += 1
        run = _try_cell(cell, time_limit_s=time_limit_s, soak=soak, on_event=on_event)
        if run.has_started or on_event is not None or num_tries == _NUM_TRIES:
            return replace(run, num_tries=num_tries)


def _try_cell(cell: Cell, *, time_limit_s: float, soak: SoakPlan | None, on_event: OnEvent | None) -> CellRun:
    events: list[Mapping[str, Any]] = []
    started_s = time.monotonic()
    with _store_host() as (store_pid, port), tempfile.TemporaryDirectory(prefix="megabucket-chaos-") as directory:
        release_reader, release_writer = os.pipe()
        processes: list[_Process] = []
        for index in range(cell.combo.num_ranks):
            task = rank.RankTask(cell, index, port, soak)
            processes.append(_fork_rank(task, (release_reader, release_writer), processes, directory))
        os.close(release_reader)
        watch = _Watch(cell, processes, store_pid, started_s, started_s + time_limit_s, on_event or events.append)
        try:
            watch.run()
        finally:
            watch.end(release_writer)
        logs = {str(one.rank): _end_of(one.log) for one in processes}
    return CellRun(
        cell=cell,
        events=events,
        exits={str(one.rank): one.exit_code or 0 for one in processes},
        killed=watch.killed,
        timed_out=watch.timed_out,
        logs={name: text for name, text in logs.items() if text},
        wall_s=time.monotonic() - started_s,
    )


def _fork_rank(task: rank.RankTask, release: tuple[int, int], before: list[_Process], directory: str) -> _Process:
    reader, writer = os.pipe()
    log = os.open(os.path.join(directory, f"rank-{task.rank}.log"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)  # noqa: PTH118
    pid = os.fork()
    if pid == 0:
        for descriptor in (reader, release[1], *(one.reports for one in before)):
            os.close(descriptor)
        rank.main(task, rank.Channels(reports=writer, release=release[0], log=log))
    os.close(writer)
    return _Process(task.rank, pid, reader, log)


@contextmanager
def _store_host() -> Iterator[tuple[int, int]]:
    """Host the store of one cell in a process of its own, which can be killed; yield its id and port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _host_store(writer)
    os.close(writer)
    try:
        port = int(os.read(reader, 100))
        yield pid, port
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _host_store(writer: int) -> NoReturn:
    parent = os.getppid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


def _end_of(log: int) -> str:
    length = os.lseek(log, 0, os.SEEK_END)
    text = os.pread(log, _LOG_BYTES, max(0, length - _LOG_BYTES)).decode(errors="replace")
    os.close(log)
    return text


def serve() -> None:
    """Run tasks from stdin until it ends."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    # c10d asks the resolver for the name of every address it connects to. Where nobody answers, that is 5 s each time.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    gc.collect()
    gc.freeze()  # forked ranks share the imported modules instead of copying them
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not become an answer
    for line in sys.stdin:
        task = json.loads(line)
        plan = SoakPlan.from_dict(task["soak"]) if task["soak"] else None

        def forward(event: Mapping[str, Any]) -> None:
            answers.write(json.dumps({"event": event}) + "\n")

        run = run_cell(
            Cell.from_dict(task["cell"]),
            time_limit_s=task["time_limit_s"],
            soak=plan,
            on_event=forward if plan is not None else None,
        )
        answers.write(json.dumps({"run": run.to_dict()}) + "\n")


if __name__ == "__main__":
    serve()
