"""Detects lost and stuck ranks: heartbeats in the store of the group, waits in slices, one finding for all ranks.

Each rank has a thread that writes beats into the store and reads those of the others. A wait for a collective is split into
short slices: C++ does not return to Python while it waits, so a signal handler would run only when the collective ends.
Between two slices the waiting rank checks the others. The first rank that finds out why a wait cannot end writes its finding
into the store, and all ranks raise that finding.

::

    waiting thread                    thread of the rank                store
      request() / ask()  --mailbox-->   write, read         <------->   <wrapper>/rank/<r>         Beat
      view               <----------    publish a View                  board/rank/<r>             Block: where a rank waits
                                        every heartbeat_s   -------->   board/finding/<token>      Finding

Works of gloo can be waited for in slices, because a wait that times out does them no harm, and so can an event on a device
(``comm/device.py``). A work of NCCL cannot: a wait that times out ends its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megabucket.comm.communicator import Finding, LaunchCount, RankState
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import (
    ConfigError,
    ForkedProcessError,
    MegabucketError,
    PeerFailedError,
    PeerLostError,
    WrapperBrokenError,
    log_once,
)

_SLICE: Final = timedelta(milliseconds=100)
_RANKS_SHOWN: Final = 5
_LONGEST_GAP_S: Final = 1.0  # between two checks by this rank; a longer gap means that this process itself was stopped
_LOOKS_AT_DEAD: Final = 2  # checks that find it dead: data it sent before may still be on its way
_LOOKS_AT_ENDED: Final = 10  # the same for a rank that exited cleanly after launching the collective in question
_BLOCKED_S: Final = 1.0  # a wait is written to the board after this time
_ANSWER_S: Final = 0.5  # time limit for an answer of the store once a rank is lost
_DIAGNOSIS_S: Final = 1.0  # a process that closed its connections dies within this time, or goes on without the group
_DIAGNOSIS_BEATS: Final = 3.5  # on another host its beats stop
_BEATS_ALIVE: Final = 2  # a rank that is silent for more beats is not said to be alive
_START_S: Final = 5.0
_JOIN_S: Final = 1.0
_READ_EVERY_S: Final = 0.2
_READ_S_PER_RANK: Final = 0.01  # all ranks may be blocked at once, and each reads one value per rank

_SLICE_ENDED: Final = "Operation timed out!"
_TIME_LIMIT: Final = ("Timed out waiting", "Application timeout caused pair closure")
_LOST: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection timed out",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
)


# Settings #


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a rank counts as lost and when as slow.

    Attributes:
        heartbeat_s: how often each rank writes a sign of life into the store of its group; ``None``: only once, so that only
            dead processes of the same host are noticed.
        dead_after_s: a rank without a sign of life for this long is lost.
        straggler_warning_s: how long a rank waits for living ones before it logs a warning; ``None``: never.
        is_default: the user did not set ``dead_after_s``, so it is reduced to fit a group with a short time limit.
    """

    heartbeat_s: float | None = 1.0
    dead_after_s: float = 30.0
    straggler_warning_s: float | None = 30.0
    is_default: bool = False

    @staticmethod
    def from_config(config: DistributedDataParallelConfig) -> Liveness:
        """Return the settings of a wrapper's config."""
        return Liveness(
            heartbeat_s=config.heartbeat_s,
            dead_after_s=config.dead_after_s,
            straggler_warning_s=config.straggler_warning_s,
            is_default="dead_after_s" not in config.model_fields_set,
        )

    def fitted_to(self, group_timeout_s: float) -> Liveness:
        """Return settings that fit the time limit of the group.

        Raises:
            ConfigError: a rank would be declared dead only after the group has given up.

        >>> Liveness(is_default=True).fitted_to(10.0).dead_after_s
        5.0
        """
        fitted = self
        if self.is_default and self.dead_after_s > group_timeout_s / 2:
            dead_after_s = group_timeout_s / 2
            heartbeat_s = None if self.heartbeat_s is None else min(self.heartbeat_s, dead_after_s / 4)
            fitted = replace(self, dead_after_s=dead_after_s, heartbeat_s=heartbeat_s)
        if fitted.dead_after_s >= group_timeout_s:
            raise ConfigError(
                f"dead_after_s={fitted.dead_after_s:g} must be less than the time limit of the process group, which is "
                f"{group_timeout_s:g} s: otherwise the group gives up first, and nothing can say which rank froze. Lower "
                "dead_after_s, or pass a longer timeout= to init_process_group() or new_group()"
            )
        return fitted


# Processes of the same host #


class ProcessIdentity(NamedTuple):
    """A process, distinguished from other processes with the same id."""

    host: str
    pid: int
    start_ticks: int  # clock ticks from boot to its start
    pid_space: str  # equal for processes that share host and pid namespace; empty if unknown


def identify_this_process() -> ProcessIdentity:
    """Return the identity of this process. Call it again in a forked child."""
    host, pid = socket.gethostname(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = f"{boot} {Path('/proc/self/ns/pid').readlink()}"  # containers of one host share the boot, not the ids
        if str(Path("/proc/self").readlink()) != str(pid):
            raise ProcessLookupError("/proc belongs to another container")
        return ProcessIdentity(host, pid, _read_stat(pid)[1], space)
    except (OSError, ValueError, IndexError):
        return ProcessIdentity(host, pid, 0, "")


def is_gone(process: ProcessIdentity, *, from_space: str) -> bool:
    """Return whether a process is certainly dead: ended, not yet reaped, or its id reused. False if it cannot be seen.

    Args:
        from_space: the ``pid_space`` of the process that looks.
    """
    if not from_space or process.pid_space != from_space:
        return False
    try:
        letter, start_ticks = _read_stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False
    return start_ticks != process.start_ticks or letter in "ZXx"


def _read_stat(pid: int) -> tuple[str, int]:
    """Return fields 3 and 22 of ``/proc/<pid>/stat``, see proc(5): the state letter and the start time in clock ticks."""
    # Field 2, the program name in parentheses, may itself contain parentheses.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode("ascii"), int(fields[19])


# Values in the store #


class Beat(NamedTuple):
    """One sign of life of a rank."""

    process: ProcessIdentity
    number: int
    every_s: float | None  # None: this rank writes no more beats
    step: int
    phase: str
    bucket: int  # -1: in none
    num_launched: int
    has_left: bool  # the final beat: its program exited cleanly, its group was destroyed, or its wrapper was detached

    @property
    def place(self) -> str:
        """Phase, step and bucket of the rank."""
        return f"{self.phase}, step {self.step}" + (f", bucket {self.bucket}" if self.bucket >= 0 else "")

    @property
    def last_seen(self) -> str:
        """The place as the end of an error text; empty if the rank writes a single beat."""
        # Not how old the beat is: without the store each rank writes the text by itself, and all texts must be equal.
        return "" if self.every_s is None else f"; last seen in {self.place} (it says so every {self.every_s:g} s)"


class Block(NamedTuple):
    """A long wait of a rank. Ranks are global."""

    token: str  # of the wrapper; unique in the store, also across restarts
    wrapper: str
    label: str
    members: Sequence[int]  # ranks of the wrapper


class _Request(NamedTuple):
    """A request to the thread: renew the view of the store."""

    write: Callable[[Store], None] | None = None  # a write to the board, done first
    answered: threading.Event | None = None  # set when the view is there; beats are then read again, however new they are


class View(NamedTuple):
    """The contents of the store at one moment."""

    asked_at_s: float  # time.monotonic() before the store was asked for ``beats``
    beats: Mapping[int, Beat]
    finding: Finding | None = None


def decode_beat(raw: bytes) -> Beat:
    """Return the beat in a value of the store."""
    process, *fields = json.loads(raw)
    return Beat(ProcessIdentity(*process), *fields)


def encode_finding(finding: Finding) -> str:
    """Return the JSON form."""
    return json.dumps([type(finding).__name__, finding.__dict__])


def decode_finding(raw: bytes) -> Finding:
    """Return the finding in a value of the store."""
    name, fields = json.loads(raw)
    kinds: tuple[type[Finding], ...] = (PeerFailedError, PeerLostError, WrapperBrokenError)
    return next(kind for kind in kinds if kind.__name__ == name)(**fields)


# The thread #

_LEAVE: Final = _Request()


def report_before_wrap(store: Store, finding: Finding, *, rank: int) -> None:
    """Write a finding for the wrapper that the ranks are about to make, over the given connection to the store."""
    *_, token = _begin_wrapper(store, rank)
    _board_of(store).compare_set(f"finding/{token}", "", encode_finding(finding))


def _begin_wrapper(store: Store, rank: int) -> tuple[str, Store, str]:
    """Return the name of the next wrapper, its part of the store, and its token. All ranks make wrappers in one order."""
    name = f"megabucket/{store.add(f'megabucket/instances/{rank}', 1)}"
    part = PrefixStore(name, store)
    return name, part, part.compare_set("token", "", secrets.token_hex(8)).decode()


def _board_of(store: Any) -> Store:
    return PrefixStore("megabucket/board", _bottom_of(store))


class Heartbeat:
    """Writes beats of this rank and keeps a view of the others.

    Args:
        store: of the process group. A TCP store is cloned, so requests of this thread never delay the caller's.
        members: global ranks of the wrapper; this one is ``members[rank]``.
        state: of this rank; its progress is read at each beat.
        launches: of the communicator; read at each beat.
        every_s: seconds between beats; ``None``: only the first one is written, which identifies this process.
        is_wanted: called at each beat; ``False`` ends the thread.
        group_name: of the process group, the same on all ranks; distinguishes wrappers of different groups on the board.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        members: Sequence[int],
        state: RankState,
        launches: LaunchCount,
        every_s: float | None,
        is_wanted: Callable[[], bool],
        group_name: str = "",
    ) -> None:
        self.rank, self.members, self.every_s = rank, tuple(members), every_s
        self.name = self._token = ""
        """Of the wrapper, the same on all ranks."""
        self.process = identify_this_process()
        self.view = View(0.0, {})
        self.failure = ""
        """The error of the store that ended the thread."""
        self.is_stopped = False
        self.state, self.launches = state, launches
        self._is_wanted, self._group_name = is_wanted, group_name
        self._num_beats = 0
        self._block: Block | None = None  # of this rank, as written to the board
        self._cycle: dict[int, Block] = {}  # found by the last check
        # SimpleQueue, because the garbage collector may close a communicator at any moment, even in this thread: its put
        # must not need a lock that the interrupted code holds.
        self._mailbox: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._kept: list[object] = []
        self._has_left = threading.Event()
        is_ready = threading.Event()
        # In a list that the thread empties: a thread keeps its arguments alive, and a program that destroys the group of a
        # TCP store may want to listen on the same port again.
        arguments = ([store], is_ready)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"megabucket-heartbeat-{rank}", daemon=True)
        self._thread.start()
        # If the program ended now, the thread could be in a connect that is retried and cannot be interrupted: see stop().
        # Usually this takes a millisecond.
        is_ready.wait(_START_S)

    def request(self) -> None:
        """Ask the thread to renew ``view``, unless a request is pending."""
        if self._mailbox.empty():
            self._mailbox.put(_Request())

    def block(self, label: str | None) -> None:
        """Write to the board what this rank waits for; ``None``: it no longer waits."""
        self._mailbox.put(_Request(lambda board: self._write_block(board, label)))

    def post(self, finding: Finding) -> None:
        """Write a finding, unless there is one."""
        self._mailbox.put(_Request(lambda board: self._write_finding(board, finding)))

    def ask(self, timeout_s: float) -> View | None:
        """Return a view that is newer than all earlier requests, or ``None`` if the store does not answer in time."""
        answered, deadline_s = threading.Event(), time.monotonic() + timeout_s
        self._mailbox.put(_Request(answered=answered))
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            if answered.wait(0.01):
                return self.view
        return None

    def stop(self, *, kept: Sequence[object] = ()) -> None:
        """Write a final beat and stop the thread. Waits up to a second, in case the store does not answer.

        A daemon thread that returns from C++ after the interpreter has ended aborts the process, so this runs at exit.

        Args:
            kept: objects that the end of the program must not drop. The thread then sleeps for ever, with them in its frame.
        """
        self.is_stopped = True
        self._kept.extend(kept)
        self._mailbox.put(_LEAVE)
        # In a forked child, which has no such thread, join returns at once.
        if threading.current_thread() is not self._thread and not kept:
            self._thread.join(_JOIN_S)
        elif self._thread.is_alive():
            self._has_left.wait(_JOIN_S)

    # In the thread #

    def _run(self, stores: list[Store], is_ready: threading.Event) -> None:
        try:
            with contextlib.closing(_StoreConnection(stores.pop())) as connection:
                self._serve(connection, is_ready)
        except Exception as error:
            # Not reported here: at the end of a program the host of the store may simply exit first. A blocked rank notices
            # that there are no answers.
            self.failure = f"{type(error).__name__}: {error}"
            is_ready.set()
        kept = self._kept.copy()
        self._has_left.set()
        if kept:
            threading.Event().wait()

    def _serve(self, connection: _StoreConnection, is_ready: threading.Event) -> None:
        # Several wrappers may share a group. All ranks make them in the same order.
        self.name, store, own = _begin_wrapper(connection.store, self.rank)
        # A wrapper of several groups has one token for all of them: ranks that wait in two of its groups form no cycle, since
        # all ranks launch in one order, and a finding of one group reaches the others.
        self._token = self.state.ranks.token = self.state.ranks.token or own
        self._write_block(connection.board, None)
        next_beat_s = time.monotonic()
        while True:
            request: _Request | None = None
            with contextlib.suppress(queue.Empty):
                request = self._mailbox.get(timeout=max(0.0, next_beat_s - time.monotonic()))
            connection.check()
            if request is _LEAVE or not self._is_wanted():
                break  # the group was destroyed: this rank launches nothing more on it
            if request is not None:
                self._answer(store, connection.board, request)
                continue
            self._beat(store)
            if len(self.view.beats) < len(self.members) - 1:
                # Until all ranks have written: later the store may be out of reach. A process that is stopped while it holds
                # the lock of a file store, for instance, stops the store.
                self._read_beats(store)
            is_ready.set()
            next_beat_s = time.monotonic() + (self.every_s or threading.TIMEOUT_MAX)
        self._beat(store, has_left=True)

    def _beat(self, store: Store, *, has_left: bool = False) -> None:
        progress = self.state.progress
        self._num_beats += 1
        place = (progress.step, progress.phase, progress.bucket, self.launches.last)
        # A list, because a file store keeps every beat.
        beat = json.dumps(Beat(self.process, self._num_beats, self.every_s, *place, has_left), separators=(",", ":"))
        store.set(_rank_key(self.rank), beat)

    def _answer(self, store: Store, board: Store, request: _Request) -> None:
        if request.write is not None:
            request.write(board)
        if request.answered is not None or time.monotonic() - self.view.asked_at_s >= read_every_s(len(self.members)):
            self._read_beats(store)
            self._report_cycle(board)
        key = f"finding/{self._token}"
        # A new view even if nothing has changed: it shows that the store has answered.
        self.view = self.view._replace(finding=decode_finding(board.get(key)) if board.check([key]) else None)
        if request.answered is not None:
            request.answered.set()

    def _write_finding(self, board: Store, finding: Finding, tokens: Iterable[str] = ()) -> None:
        """Write a finding for this wrapper and others. If one of them has a finding already, all get that one."""
        text = encode_finding(finding)
        for token in sorted({self._token, *tokens}):
            text = board.compare_set(f"finding/{token}", "", text).decode()

    def _write_block(self, board: Store, label: str | None) -> None:
        wrapper = f"{self.name} over group {self._group_name!r} of ranks {list(self.members)}"
        self._block = None if label is None else Block(self._token, wrapper, label, self.members)
        board.set(_rank_key(self.members[self.rank]), json.dumps(self._block))

    def _read_beats(self, store: Store) -> None:
        asked_at_s, others = time.monotonic(), set(range(len(self.members))) - {self.rank}
        values = _read(store, others, known=set(self.view.beats))
        beats = {rank: decode_beat(value) for rank, value in values.items()}
        self.view = self.view._replace(asked_at_s=asked_at_s, beats=beats)

    def _report_cycle(self, board: Store) -> None:
        """Write a finding to all ranks of a cycle of waits. It must be seen twice, because the board may be out of date."""
        cycle, self._cycle = self._cycle, self._find_cycle(board)
        if cycle and cycle == self._cycle:
            places = [f"rank {rank} waits for {block.label} of {block.wrapper}" for rank, block in sorted(cycle.items())]
            cause = (
                f"ranks wait for one another: {'; '.join(places)}. Every rank must use its wrappers, and make collective "
                "calls, in the same order"
            )
            progress = self.state.progress
            error = WrapperBrokenError(step=progress.step, rank=None, phase=progress.phase, cause=cause)
            self._write_finding(board, error, [block.token for block in cycle.values()])

    def _find_cycle(self, board: Store) -> dict[int, Block]:
        """Return global ranks that wait for each other in a cycle of wrappers, this rank first; empty if there is none.

        Each rank waits for all members of its wrapper that wait in another one; a path back to this rank is a deadlock.
        """
        if self._block is None:
            return {}
        own = self.members[self.rank]
        # Blocks of ranks that have not written a beat yet are from before a restart.
        read = {member for rank, member in enumerate(self.members) if rank not in self.view.beats}
        blocks, ahead = {own: self._block}, deque([own])
        paths: dict[int, tuple[int, ...]] = {own: (own,)}
        while ahead:
            rank = ahead.popleft()
            blocks |= _read_blocks(board, set(blocks[rank].members) - read)
            read.update(blocks[rank].members)
            for other in blocks[rank].members:
                if other in blocks and blocks[other].token != blocks[rank].token:
                    if other == own:
                        return {member: blocks[member] for member in paths[rank]}
                    if other not in paths:
                        paths[other] = (*paths[rank], other)
                        ahead.append(other)
        return {}


def _read_blocks(board: Store, ranks: set[int]) -> dict[int, Block]:
    """Return the blocks of those of the ranks that have waited for long."""
    blocks = {rank: json.loads(value) for rank, value in _read(board, ranks, set()).items()}
    return {rank: Block(*block) for rank, block in blocks.items() if block is not None}


def _read(store: Store, ranks: set[int], known: set[int]) -> dict[int, bytes]:
    """Return the values of the ranks that have written one. Reading a key that does not exist would block.

    Args:
        known: ranks that are known to have written.
    """
    asked = ranks - known
    if asked and not store.check([_rank_key(rank) for rank in asked]):
        ranks = known | {rank for rank in asked if store.check([_rank_key(rank)])}
    values = store.multi_get([_rank_key(rank) for rank in sorted(ranks)]) if ranks else []
    return dict(zip(sorted(ranks), values, strict=True))


def read_every_s(num_ranks: int) -> float:
    """Return how often a waiting rank reads the store, in seconds: all ranks may wait at once."""
    return max(_READ_EVERY_S, _READ_S_PER_RANK * num_ranks)


def _rank_key(rank: int) -> str:
    return f"rank/{rank}"


def _bottom_of(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class _StoreConnection:
    """A store over its own connection, and the board, which all wrappers of the program share."""

    def __init__(self, store: Any) -> None:
        bottom = _bottom_of(store)
        self._probe: socket.socket | None = None
        self.store: Store = store
        if isinstance(bottom, TCPStore):
            self.store = store.clone()
            bottom = _bottom_of(self.store)
            # Sends nothing; the host closes it together with the clone. A request over a closed connection would make c10d
            # print a page of C++ frames at the end of every program whose rank 0 exits first.
            with contextlib.suppress(OSError):
                self._probe = socket.create_connection((bottom.host, bottom.port), timeout=_START_S)
        self.board = _board_of(bottom)

    def check(self) -> None:
        """Check that the connection is open.

        Raises:
            ConnectionResetError: the host of the store has closed it.
        """
        if self._probe is not None:
            poll = select.poll()
            poll.register(self._probe, select.POLLRDHUP)
            if poll.poll(0):
                raise ConnectionResetError("the host of the store has closed the connection")

    def close(self) -> None:
        """Close the connection."""
        if self._probe is not None:
            self._probe.close()


# Waiting #


class Work(Protocol):
    """Something that can be waited for in slices: a work of gloo, or one that behaves alike."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done. Raises ``RuntimeError`` if it has failed, or on a time-out; it then goes on."""

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""


def wait_slice(work: Work) -> bool:
    """Wait for a work for up to 0.1 s; return whether it is done.

    Raises:
        RuntimeError: the work has failed.
    """
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        # Call nothing here: the exception of a signal handler that ran now would be chained to our time-out.
        failure = error
    else:
        return True
    try:
        if not str(failure).startswith(_SLICE_ENDED):
            raise failure
    finally:
        del failure  # it refers to this frame, which would keep the work and its tensors until the garbage collector runs
    if not work.is_completed():
        return False
    work.wait()  # it completed at the same moment, perhaps with an error
    return True


def is_lost_connection(failure: str) -> bool:
    """Return whether the text of a failed work says that another rank cannot be reached or did not come."""
    return any(text in failure for text in (*_LOST, *_TIME_LIMIT))


def is_time_limit(failure: str) -> bool:
    """Return whether the text of a failed work says that the group timed out."""
    return any(text in failure for text in _TIME_LIMIT)


@dataclass(slots=True)
class _Peer:
    """Observations about one other rank during one wait."""

    beat: Beat
    looks_at_dead: int = 0  # consecutive checks that found its process dead
    silent_s: float = 0.0  # since its last beat


class Observations:
    """Observations about the other ranks during one long wait, and their meaning in words. Does no communication.

    Args:
        number: of the launch in question, counted from 1 and the same on all ranks.
        is_gone: returns whether a process is certainly dead.
    """

    def __init__(self, label: str, *, number: int, rank: int, size: int, is_gone: Callable[[ProcessIdentity], bool]) -> None:
        self.label, self.started_s = label, time.monotonic()
        self.is_on_board = self.has_warned = False
        self._number = number
        self._others = [other for other in range(size) if other != rank]
        self._is_gone = is_gone
        self._longest_gap_s = max(_LONGEST_GAP_S, 2 * read_every_s(size))
        self._peers: dict[int, _Peer] = {}
        self._looked_at_s = self._asked_at_s = 0.0
        self._view: View | None = None
        self.store_silent_s = 0.0
        """How long there was no new view of the store."""

    def note(self, view: View, at_s: float) -> None:
        """Check the processes and take over a view of the store."""
        # A long gap between two checks counts as a short one: then this process was stopped, and the others may be alive.
        gap_s = min(at_s - self._looked_at_s, _LONGEST_GAP_S)
        view_gap_s = min(view.asked_at_s - self._asked_at_s, self._longest_gap_s)
        self.store_silent_s = self.store_silent_s + gap_s if view is self._view else 0.0
        self._looked_at_s, self._asked_at_s, self._view = at_s, view.asked_at_s, view
        for rank, beat in view.beats.items():
            is_new = rank not in self._peers
            peer = self._peers.setdefault(rank, _Peer(beat))
            peer.looks_at_dead = peer.looks_at_dead + 1 if self._is_gone(beat.process) else 0
            peer.silent_s = 0.0 if is_new or beat.number != peer.beat.number else peer.silent_s + view_gap_s
            peer.beat = beat

    def gone(self) -> dict[int, str]:
        """Return the ranks that are certainly dead, or have left without launching the collective in question.

        If some crashed, only these: a clean exit may be a reaction to a crash.
        """
        crashed, left, is_sure = dict[int, str](), dict[int, str](), False
        for rank, peer in self._peers.items():
            beat, is_dead = peer.beat, peer.looks_at_dead > 0
            has_left_early = beat.has_left and beat.num_launched < self._number
            is_sure |= has_left_early or peer.looks_at_dead >= (_LOOKS_AT_ENDED if beat.has_left else _LOOKS_AT_DEAD)
            if is_dead and not beat.has_left:
                crashed[rank] = f"died: process {beat.process.pid} on {beat.process.host} is gone{beat.last_seen}"
            elif is_dead or has_left_early:
                left[rank] = self._how_left(beat)
        return (crashed or left) if is_sure else {}

    def left(self) -> dict[int, str]:
        """Return the ranks that have left, also those that have launched the collective in question before."""
        return {rank: self._how_left(peer.beat) for rank, peer in self._peers.items() if peer.beat.has_left}

    def _how_left(self, beat: Beat) -> str:
        return (
            "left: its program ended, its process group was destroyed, or its wrapper was detached, after "
            f"{beat.num_launched} launches; this was launch {self._number}"
        )

    def silent(self, limit_s: float, verb: str = "froze") -> dict[int, str]:
        """Return the ranks that should write beats and have written none for ``limit_s``."""
        return {
            rank: f"{verb}: no sign of life for {limit_s:.3g} s{peer.beat.last_seen}"
            for rank, peer in self._peers.items()
            if peer.silent_s >= limit_s and peer.beat.every_s is not None and not peer.beat.has_left
        }

    def absent(self) -> dict[int, str]:
        """Return the ranks that never wrote a beat."""
        return dict.fromkeys(self._absent(), "went away or never came: it has given no sign of life")

    def late(self) -> dict[int, str]:
        """Return the ranks that have not launched the collective in question, according to their beats."""
        found = dict.fromkeys(self._absent(), "has given no sign of life: it has not wrapped its module yet")
        for rank, peer in self._peers.items():
            beat = peer.beat
            if beat.every_s is None or beat.num_launched >= self._number:
                continue
            found[rank] = f"is alive but has not launched its part; it is in {beat.place}"
            if peer.silent_s > _BEATS_ALIVE * beat.every_s:
                silence = f"has given no sign of life for {peer.silent_s:.3g} s"
                found[rank] = f"{silence} and has not launched its part{beat.last_seen}"
        return dict(sorted(found.items()))

    def _absent(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._peers]


class PeerWatch:
    """Waits for the works of one communicator, and finds out why one does not end.

    Args:
        group_timeout_s: time limit of the process group.
        on_loss: called when nothing more can be launched.
    """

    def __init__(
        self, heartbeat: Heartbeat, liveness: Liveness, *, group_timeout_s: float, on_loss: Callable[[], None]
    ) -> None:
        self.finding: Finding | None = None
        """Set when ranks were lost or interrupted; nothing can be launched from then on."""
        self.heartbeat, self._progress = heartbeat, heartbeat.state.progress
        self._liveness = liveness
        self._group_timeout_s = group_timeout_s
        self._on_loss = on_loss

    def wait(self, works: Iterable[Work], *, label: str, number: int) -> None:
        """Return when the works of one launch are done.

        Args:
            number: of the launch, counted from 1 and alike on all ranks.

        Raises:
            PeerLostError: a rank died, froze, or left without launching its part.
            WrapperBrokenError: a rank was interrupted, or ranks wait for each other in different wrappers.
            ForkedProcessError: this is a forked child of the process that launched them.
        """
        wait: Observations | None = None
        try:
            for work in works:
                while not wait_slice(work):
                    wait = wait or self._begin(label, number)
                    self._look(wait)
        except RuntimeError as error:
            if isinstance(error, MegabucketError) or not is_lost_connection(str(error)):
                raise
            wait = wait or self._begin(label, number)
            raise self._conclude(self._diagnose(wait, str(error))) from error
        finally:
            if wait is not None:
                self._leave_board(wait)

    def wait_for_all_ranks(self, label: str) -> None:
        """Return when every rank has written its first beat, as it does when it wraps.

        Raises:
            MegabucketError: as ``wait``.
        """
        wait, deadline_s = self._begin(label, 0), time.monotonic() + self._group_timeout_s
        try:
            while len(self.heartbeat.view.beats) < len(self.heartbeat.members) - 1:
                if time.monotonic() > deadline_s:
                    raise self._conclude(self._too_late(wait))
                self._look(wait)
                time.sleep(0.005)
        finally:
            self._leave_board(wait)

    def report_unreachable(self, states: Mapping[int, str], *, label: str, number: int) -> Finding:
        """Return the error to raise because ranks cannot be reached by other means than gloo. The same on all ranks."""
        return self._conclude(self._settle(self._begin(label, number), states))

    def break_off(self, finding: Finding) -> None:
        """Publish why this rank launches nothing more. Does not wait."""
        if self.finding is None:
            self.heartbeat.post(finding)
            self._conclude(finding)

    def _begin(self, label: str, number: int) -> Observations:
        rank, size = self.heartbeat.rank, len(self.heartbeat.members)
        is_dead = partial(is_gone, from_space=self.heartbeat.process.pid_space)
        return Observations(label, number=number, rank=rank, size=size, is_gone=is_dead)

    def _look(self, wait: Observations) -> None:
        """Check the other ranks once.

        Raises:
            MegabucketError: the wait cannot end.
        """
        heartbeat, now_s = self.heartbeat, time.monotonic()
        if os.getpid() != heartbeat.process.pid:
            raise ForkedProcessError(rank=heartbeat.rank, operation=f"{wait.label} was waited for")
        if heartbeat.is_stopped:
            return  # the communicator was closed: the wait goes on without a view of the others
        heartbeat.request()
        wait.note(heartbeat.view, now_s)
        finding = self.finding or heartbeat.view.finding or self._find_cause(wait)
        if finding is not None:
            raise self._conclude(finding)
        if not wait.is_on_board and now_s - wait.started_s >= _BLOCKED_S:
            wait.is_on_board = True
            heartbeat.block(wait.label)
        self._warn_of_stragglers(wait, now_s - wait.started_s)

    def _find_cause(self, wait: Observations) -> Finding | None:
        dead_after_s = self._liveness.dead_after_s
        if wait.gone():
            self._refresh(wait)  # with the last beats of the dead ranks
        if states := wait.gone() or wait.silent(dead_after_s):
            return self._settle(wait, states)
        if wait.store_silent_s >= dead_after_s:
            reason = self.heartbeat.failure or "its host may be gone or frozen"
            return self._settle(wait, {}, f"the store of the process group has not answered for {dead_after_s:g} s: {reason}")
        return None

    def _warn_of_stragglers(self, wait: Observations, waited_s: float) -> None:
        limit_s = self._liveness.straggler_warning_s
        if wait.has_warned or limit_s is None or waited_s < limit_s:
            return
        wait.has_warned = True
        findings = [f"rank {self._number_of(rank)} {state}" for rank, state in wait.late().items()]
        late = "; ".join(findings[:_RANKS_SHOWN]) or "no rank is known to be late: heartbeats are off, or the transfer is slow"
        rank = self._number_of(self.heartbeat.rank)
        log_once(f"[rank {rank}] has waited {waited_s:.3g} s for {self._waiting_for(wait)}: {late}. The wait goes on.")

    def _leave_board(self, wait: Observations) -> None:
        if wait.is_on_board:
            self.heartbeat.block(None)

    # When a wait cannot end #

    def report_store_failure(self, failure: str, *, label: str) -> Finding:
        """Return the error to raise because the store of the process group has failed a call of this rank."""
        return self._conclude(self._settle(self._begin(label, 0), {}, f"the store of the process group has failed: {failure}"))

    def _diagnose(self, wait: Observations, failure: str) -> Finding:
        """Find out why gloo gave up.

        Gloo does not say which rank was lost. A process that dies closes its connections before it appears dead.
        """
        limit_s = max(_DIAGNOSIS_S, _DIAGNOSIS_BEATS * (self.heartbeat.every_s or 0.0))
        deadline_s = time.monotonic() + limit_s
        while (finding := self.finding or self._refresh(wait)) is None:
            if states := wait.gone():
                return self._settle(wait, states)
            if is_time_limit(failure):
                return self._too_late(wait)
            if time.monotonic() > deadline_s:
                silent_s = limit_s - (self.heartbeat.every_s or 0.0)
                states = wait.silent(silent_s, "went away") or wait.left() or wait.absent()
                return self._settle(wait, states, _first_sentence(failure))
            time.sleep(0.02)
        return finding

    def _too_late(self, wait: Observations) -> Finding:
        states = {rank: f"did not come in time: it {state}" for rank, state in wait.late().items()}
        return self._settle(wait, states, f"the time limit of the process group ({self._group_timeout_s:g} s) was over")

    def _refresh(self, wait: Observations) -> Finding | None:
        """Check again with a new view of the store; return the finding of any rank. A silent store is not asked again."""
        heartbeat = self.heartbeat
        if wait.store_silent_s < _LONGEST_GAP_S and heartbeat.ask(_ANSWER_S) is None:
            wait.store_silent_s += _ANSWER_S
        wait.note(heartbeat.view, time.monotonic())
        return heartbeat.view.finding

    def _settle(self, wait: Observations, states: Mapping[int, str], reason: str = "") -> Finding:
        """Return the finding that ranks are lost, or an earlier finding of another rank."""
        during = f"noticed while waiting for {self._waiting_for(wait)}" + (f": {reason}" if reason else "")
        finding = PeerLostError(ranks=tuple(map(self._number_of, states)), states=tuple(states.values()), during=during)
        self.heartbeat.post(finding)
        return self._refresh(wait) or finding

    def _number_of(self, rank: int) -> int:
        return self.heartbeat.state.ranks.number_of(self.heartbeat.members[rank], rank)

    def _waiting_for(self, wait: Observations) -> str:
        phase = "" if self._progress.phase == wait.label else f" ({self._progress.phase})"
        return f"{wait.label} of step {self._progress.step}{phase}"

    def _conclude(self, finding: Finding) -> Finding:
        if self.finding is None:
            self.finding = finding
            self._on_loss()
        return self.finding.copy()


def _first_sentence(failure: str) -> str:
    """Strip the source location and the closing hint from an error message of gloo."""
    return failure.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or failure
