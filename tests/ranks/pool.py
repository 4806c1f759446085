"""Real ranks for tests: four processes on gloo, started once and kept.

A test hands ``WorkerPool.run`` a top-level function of an importable module. It travels by name; its arguments and results are
pickled. The function is called on ranks ``0 .. ranks - 1`` as ``function(rank, *args)``, where ``rank`` holds the process group
of exactly those ranks.

Nothing here may hang: every call has a time limit. After a call that did not end well, be it by the time limit of its test,
the processes are killed: ranks that stopped at different places would mix up their next collectives, and the next call would
get answers meant for this one. It starts fresh processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

NUM_RANKS = 4
ONE_AT_NIGHT, TWO_AT_NIGHT, FOUR_AT_NIGHT = (pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 2, 4))
"""Of the ranks of a test that takes long: on two cores, four take as long as the others together, and three show the most."""
_STOP = b"stop"
_MOST_GROUPS_OF_MESHES = 6  # in a process of a pool, before the pool starts again
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_GRACE_S = 5.0  # how long the other ranks may take to report after one has failed


@dataclass(frozen=True)
class Rank:
    """What a function running on the pool knows about its place."""

    index: int
    size: int
    group: dist.ProcessGroup


class RankFailedError(AssertionError):
    """A function raised on some rank. ``errors`` holds the original errors by rank; the text holds their tracebacks."""

    def __init__(self, text: str, errors: dict[int, BaseException]) -> None:
        super().__init__(text)
        self.errors = errors


class WorkerPool:
    """Processes that run functions as ranks of a process group. Starts them on first use.

    Args:
        first: how the first process starts. ``spawn`` begins it from nothing and sees how Python ends it. ``forkserver``, as
            for all others, forks it from one that has loaded torch: a start then costs a tenth.
        num_ranks: how many processes: the size of the default group, for what asks torch for that.
    """

    def __init__(self, first: Literal["spawn", "forkserver"] = "spawn", *, num_ranks: int = NUM_RANKS) -> None:
        others = multiprocessing.get_context("forkserver")
        self._contexts = [multiprocessing.get_context(first), *[others] * (num_ranks - 1)]
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory = ""
        self._num_groups_of_meshes = 0

    def run(self, function: Callable[..., Any], *args: Any, ranks: int, timeout_s: float = 60.0) -> list[Any]:
        """Call ``function(rank, *args)`` on the first ``ranks`` ranks and return the results in rank order.

        Raises:
            RankFailedError: the function raised on at least one rank.
            TimeoutError: some rank did not answer in time.
        """
        message = pickle.dumps((function, args, ranks))
        try:
            if self._num_groups_of_meshes > _MOST_GROUPS_OF_MESHES:
                self.close()
            if not self._processes:
                self._start()
            for connection in self._connections[:ranks]:
                connection.send_bytes(message)
            answers = self._collect(range(ranks), timeout_s, f"{function.__module__}.{function.__qualname__}")
        except BaseException:
            self.kill()
            raise
        return [answers[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes in good order.

        Raises:
            RuntimeError: a process did not end, or ended with an error.
        """
        processes = self._processes
        for connection in self._connections:
            connection.send_bytes(_STOP)
        for process in processes:
            process.join(_STOP_TIMEOUT_S)
        exit_codes = [process.exitcode for process in processes]
        self.kill()
        if any(exit_codes):
            raise RuntimeError(f"worker processes did not end cleanly: exit codes {exit_codes}")

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._num_groups_of_meshes = [], [], 0
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="megabucket-pool-")
        for rank, context in enumerate(self._contexts):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, len(self._contexts), self._directory), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(range(len(self._contexts)), _START_TIMEOUT_S, "starting the workers")

    def _collect(self, ranks: range, timeout_s: float, what: str) -> dict[int, Any]:
        """Receive one answer per rank, or say which rank failed and how."""
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[str, BaseException | None]] = {}
        deadline_s = time.monotonic() + timeout_s
        while missing := {self._connections[rank]: rank for rank in ranks if rank not in answers and rank not in failures}:
            ready = wait(list(missing), deadline_s - time.monotonic())
            if not ready:
                break
            for connection in ready:
                rank = missing[connection]
                try:
                    is_failure, content, num_groups = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own processes
                except EOFError:
                    is_failure, content, num_groups = True, ("the process died", None), 0
                self._num_groups_of_meshes = max(self._num_groups_of_meshes, num_groups)
                if is_failure:
                    failures[rank] = content
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
                else:
                    answers[rank] = content
        if failures:
            ranks_by_text: dict[str, list[int]] = {}
            for rank, (text, _) in sorted(failures.items()):
                ranks_by_text.setdefault(text, []).append(rank)
            texts = [f"--- rank {', '.join(map(str, ranks))} ---\n{text}" for text, ranks in ranks_by_text.items()]
            silent = [f"(no answer from ranks {sorted(missing.values())})"] if missing else []
            errors = {rank: error for rank, (_, error) in failures.items() if error is not None}
            raise RankFailedError("\n".join([f"{what} failed", *texts, *silent]), errors) from next(iter(errors.values()), None)
        if missing:
            raise TimeoutError(f"{what}: no answer from ranks {sorted(missing.values())} within {timeout_s:g} s")
        return answers


def _serve(connection: Connection, rank: int, num_ranks: int, directory: str) -> None:
    """Answer calls until told to stop: the main function of a worker process."""
    warnings.simplefilter("error")
    unraisable: list[str] = []  # errors in finalizers and the like, which Python would only print
    sys.unraisablehook = lambda what: unraisable.append("".join(traceback.format_exception(what.exc_value)))
    store = dist.FileStore(str(Path(directory) / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    groups = {size: dist.new_group(list(range(size))) for size in range(1, num_ranks + 1)}
    kept = set(dist.distributed_c10d._world.pg_map)
    num_own = len(kept)
    gc.freeze()  # otherwise every collection passes over all of torch
    connection.send_bytes(pickle.dumps((False, None, 0)))
    while (message := connection.recv_bytes()) != _STOP:
        _destroy_groups_made_since(kept)  # now: all ranks have answered, so none is still at work in one of them
        try:
            function, args, size = pickle.loads(message)  # noqa: S301 - from our own parent
            torch.manual_seed(0)
            result = function(Rank(rank, size, groups[size]), *args)
            assert not unraisable, "errors that nobody could catch:\n" + "\n".join(unraisable)
            answer = pickle.dumps((False, result, len(kept) - num_own))
        except Exception as error:
            answer = pickle.dumps((True, (traceback.format_exc(), _if_picklable(error)), 0))
        connection.send_bytes(answer)
    # Threads of a group live as long as anything refers to it. One that releases the tensors of the last collective, perhaps of
    # torch's own DDP, while the interpreter shuts down aborts the process.
    groups.clear()
    gc.collect()
    dist.destroy_process_group()


def _destroy_groups_made_since(kept: set[dist.ProcessGroup]) -> None:
    """Destroy what the last call made. Gloo's thread of a group wakes 100 times a second: a few hundred keep a core busy.

    Groups of a mesh stay: torch caches what it knows of equal meshes, groups included. Where that are many, the pool starts
    again.
    """
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in kept]
    forgotten = [group for group in made if not group.group_desc.startswith("mesh_")]
    kept.update(group for group in made if group not in forgotten)
    if forgotten:
        while forgotten:
            dist.destroy_process_group(forgotten.pop())
        del made
        gc.collect()  # the threads end with the last reference, and wrappers are cycles


def _if_picklable(error: BaseException) -> BaseException | None:
    try:
        restored = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was dumped in the same line
    except Exception:
        return None
    return restored if isinstance(restored, BaseException) else None
