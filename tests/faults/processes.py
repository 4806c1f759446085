"""Ranks as processes over gloo: forks a store and ranks, reads what they report, sends signals they ask for, ends what hangs.

``python -m faults.processes`` is a supervisor: it imports torch once and has a single thread, so ranks fork in milliseconds.
It takes plays on stdin and answers with runs on stdout; ``run_many`` keeps a few of them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from .judge import Event, Run
from .kinds import fault_of
from .loopback import tripping
from .player import Play, Player, prepare
from .systems import TORCH_TIMEOUT_S, Ours, Torch, make_groups

_IMPORTED_LATE = (
    "torch._dynamo",
    "torch.distributed.nn.functional",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch.profiler",
)
"""What torch imports when a module is first wrapped or an optimizer made: seconds, which every forked rank would need."""
_TICK_S = 0.02
_STACKS_BEFORE_LIMIT_S = 1.0
_LOG_BYTES = 6_000
_STORE_RANK = -1
_JOIN_LIMIT_S = 8.0
_NUM_TRIES = 4
_PR_SET_PDEATHSIG = 1
_STORE_TIMEOUT = timedelta(seconds=20)

# In a rank #


def _main(play: Play, rank: int, store_port: int, reports: int, release: int) -> NoReturn:
    """Run the rank and end the process; never returns, and never runs the interpreter's own end.

    A gloo thread that still lets go of a tensor while the interpreter goes down would abort the process, and what it would
    clean up goes with the process anyway.
    """

    def send(kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "rank": rank, **values}, default=list)
        os.write(reports, line.encode() + b"\n")

    try:
        is_interrupted = _run(play, rank, store_port, send)
        send("done")
    except BaseException:
        send("broken", text=traceback.format_exc())
        is_interrupted = True
    if not is_interrupted:
        os.read(release, 1)
    os._exit(0)


def _prepare_process(log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Whatever happens to the supervisor, no rank outlives it: not even one that is stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)


def _run(play: Play, rank: int, store_port: int, send: Callable[..., None]) -> bool:
    """Train; return whether the process ends at once, as a program does that was interrupted or gave up."""
    cell = play.cells[0]
    fault = fault_of(cell)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: send("warning", text=record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megabucket").addHandler(handler)
    on_collective: dict[str, Any] = {}
    store = TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    timeout = timedelta(seconds=TORCH_TIMEOUT_S if cell.is_torch else fault.group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=play.combo.num_ranks, timeout=timeout)
    groups = make_groups(play.combo, lambda ranks: dict.fromkeys(ranks, dist.new_group(ranks, timeout=timeout)))
    send("joined")
    system = Torch(play.combo) if cell.is_torch else Ours(play.combo, tripping(on_collective), groups[rank])
    if fault.before_wrap is not None and fault.is_at_fault(cell, rank):
        fault.before_wrap(rank, send)
    here = prepare(play, rank, fault, system, send, on_collective)
    if here is None:
        return False
    player = Player(here, system, play, fault_of)
    player.run()
    return player.has_given_up


# In the supervisor #


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

    def reap(self) -> None:
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def end_of_log(self) -> str:
        length = os.lseek(self.log, 0, os.SEEK_END)
        text = os.pread(self.log, _LOG_BYTES, max(0, length - _LOG_BYTES)).decode(errors="replace")
        os.close(self.log)
        return text


@dataclass
class _Watch:
    """The state of one run."""

    play: Play
    processes: list[_Process]
    store_pid: int
    deadline_s: float
    events: list[Event] = field(default_factory=list)
    signals: list[tuple[float, int, int]] = field(default_factory=list)  # when, to which rank, which
    killed: list[int] = field(default_factory=list)
    has_asked_for_stacks: bool = False
    timed_out: bool = False
    num_joined: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Watch until every rank is done or gone, or the time is over."""
        lost = set(fault_of(self.play.cells[0]).expect.lost)
        while any(not one.is_done and one.exit_code is None and one.rank not in lost for one in self.processes):
            self._read()
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
            if one.reports in ready:
                chunk = os.read(one.reports, 1 << 16)
                if not chunk:
                    os.close(one.reports)
                    one.reports = -1
                *lines, one.buffer = (one.buffer + chunk).split(b"\n")
                for line in lines:
                    self._receive(one, json.loads(line))
        for one in self.processes:
            one.reap()

    def _receive(self, process: _Process, event: Event) -> None:
        if event["kind"] == "done":
            process.is_done = True
        elif event["kind"] == "ask":
            self.signals.append((time.monotonic() + event["after_s"], event["to"], event["signal"]))
        else:
            self.num_joined += event["kind"] == "joined"
            self.events.append(event)

    def _send_signals(self) -> None:
        now_s = time.monotonic()
        due = [one for one in self.signals if one[0] <= now_s]
        self.signals = [one for one in self.signals if one[0] > now_s]
        for _, to, number in due:
            self.events.append({"kind": "signal", "rank": to, "signal": number, "at_s": time.monotonic()})
            self._signal(to, number)
        if now_s > self.deadline_s - _STACKS_BEFORE_LIMIT_S and not self.has_asked_for_stacks:
            self.has_asked_for_stacks = True
            for one in self.processes:
                if not one.is_done:
                    self._signal(one.rank, signal.SIGUSR1)

    def _signal(self, to: int, number: int) -> None:
        if to == _STORE_RANK:
            os.kill(self.store_pid, number)
        elif self.processes[to].exit_code is None:
            os.kill(self.processes[to].pid, number)

    def end(self, release: int) -> None:
        """Let the ranks end, and kill those that do not."""
        os.close(release)
        limit_s = time.monotonic() + 1.0
        while time.monotonic() < limit_s and any(one.exit_code is None and one.is_done for one in self.processes):
            self._read()
        for one in self.processes:
            if one.exit_code is None:
                self.killed.append(one.rank)
                os.kill(one.pid, signal.SIGKILL)
                one.exit_code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
        while any(one.reports >= 0 for one in self.processes):
            self._read()


def run_in_processes(play: Play, *, time_limit_s: float) -> Run:
    """Play and return what was seen; again from the start while the ranks cannot even form a group.

    Gloo's rendezvous fails now and then on a busy machine. Call it in a process with a single thread.
    """
    for _ in range(_NUM_TRIES):
        run = _try_play(play, time_limit_s=time_limit_s)
        if run.has_started:
            break
    return run


def _try_play(play: Play, *, time_limit_s: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="megabucket-faults-") as directory, _store_host() as (store_pid, port):
        release = os.pipe()
        processes: list[_Process] = []
        for rank in range(play.combo.num_ranks):
            processes.append(_fork_rank(play, rank, port, release, processes, directory))
        os.close(release[0])
        watch = _Watch(play, processes, store_pid, deadline_s=time.monotonic() + time_limit_s)
        try:
            watch.run()
        finally:
            watch.end(release[1])
        return Run(
            play,
            watch.events,
            exits={one.rank: one.exit_code or 0 for one in processes},
            killed=watch.killed,
            timed_out=watch.timed_out,
            logs={one.rank: text for one in processes if (text := one.end_of_log())},
            wall_s=time.monotonic() - watch.started_s,
        )


def _fork_rank(
    play: Play, rank: int, port: int, release: tuple[int, int], before: Sequence[_Process], directory: str
) -> _Process:
    reader, writer = os.pipe()
    log = os.open(f"{directory}/rank-{rank}.log", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    pid = os.fork()
    if pid == 0:
        for descriptor in (reader, release[1], *(one.reports for one in before)):
            os.close(descriptor)
        _prepare_process(log)
        _main(play, rank, port, writer, release[0])
    os.close(writer)
    return _Process(rank, pid, reader, log)


@contextmanager
def _store_host() -> Iterator[tuple[int, int]]:
    """Host the store of one run in a process of its own, which can be killed; yield its id and port."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)
    os.close(writer)
    try:
        yield pid, int(os.read(reader, 100))
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def serve() -> None:
    """Run plays from stdin until it ends."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    # c10d asks the resolver for the name of every address it connects to. Where nobody answers, that is 5 s each time.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    gc.collect()
    gc.freeze()  # forked ranks share the imported modules instead of copying them
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not become an answer
    while (task := _receive(sys.stdin.buffer)) is not None:
        play, time_limit_s = task
        _send(answers, run_in_processes(play, time_limit_s=time_limit_s))


# In the program that wants runs #


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    length = stream.read(8)
    return pickle.loads(stream.read(*struct.unpack("<Q", length))) if length else None  # noqa: S301 - our own process


def environment() -> dict[str, str]:
    """Return the environment in which ``python -m faults`` works, wherever it is started."""
    paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_many(plays: Sequence[Play], *, num_jobs: int = 2, time_limit_s: float = 20.0) -> Iterator[Run]:
    """Run plays on a few supervisors, and yield what was seen in the order in which they end.

    Raises:
        RuntimeError: a supervisor has ended, which is a bug of the harness.
    """
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def run(play: Play) -> Run:
        supervisor = idle.get()
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        _send(supervisor.stdin, (play, time_limit_s))
        answer: Run | None = _receive(supervisor.stdout)
        if answer is None:
            raise RuntimeError(f"a supervisor has ended with exit code {supervisor.wait()}; see its stderr")
        idle.put(supervisor)
        return answer

    with ExitStack() as stack:
        for _ in range(min(num_jobs, len(plays))):
            # In a session of its own: Ctrl-C is for this process, which then ends the supervisors, and they their ranks.
            command = [sys.executable, "-m", "faults.processes"]
            pipe = subprocess.PIPE
            started = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env=environment())
            stack.callback(started.communicate)
            stack.callback(started.kill)
            idle.put(started)
        pool = ThreadPoolExecutor(num_jobs)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for future in as_completed([pool.submit(run, play) for play in plays]):
            yield future.result()


if __name__ == "__main__":
    serve()
